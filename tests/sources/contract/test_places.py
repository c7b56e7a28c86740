"""Where the samples of a source lie, however it is made of others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import parted

from lit_async_data import ConcatSource, SubsetSource
from lit_async_data.sources.contract.source import places_of


def test_places_are_those_of_the_innermost_parts():
    subset = SubsetSource(SubsetSource(parted(), [9, 8, 5, 1]), [3, 0, 1])
    places = subset.places()
    assert [places.parts[which].name for which in places.which] == ["a.h5", "b.h5", "b.h5"]
    assert places.rows.tolist() == [1, 5, 4]
    assert places.order().tolist() == [0, 2, 1]


@given(st.permutations(range(10)))
def test_places_are_ordered_by_part_and_then_by_row(samples):
    places = places_of(parted({"a.h5": 4, "b.h5": 4, "c.h5": 2})).taken(np.array(samples))
    assert np.array(samples)[places.order()].tolist() == list(range(10))


def test_a_file_that_is_in_two_of_the_sources_is_one_part():
    whole, other = parted(), parted({"c.h5": 2})
    both = ConcatSource([SubsetSource(whole, [9, 1]), other, SubsetSource(whole, [2, 8])])
    places = both.places()
    assert [part.name for part in places.parts] == ["a.h5", "b.h5", "c.h5"]
    assert places.which.tolist() == [1, 0, 2, 2, 0, 1]
    assert places.rows.tolist() == [5, 1, 0, 1, 2, 4]
