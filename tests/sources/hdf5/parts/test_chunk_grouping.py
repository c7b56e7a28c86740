"""Samples that begin in the same chunks form a group, whichever rows they have."""

import pytest
from support.files.hdf5 import numbered
from support.sources.parts import parts_of

from lit_async_data import Field, HDF5Source
from lit_async_data.sources.hdf5.parts.part import grouping_key

GZIP = {"compression": "gzip"}


@pytest.mark.parametrize(
    ("window", "options", "grouping"),
    [
        (None, {}, ([(100, 10)], 1.0, 1, 1)),
        (None, {"stride": 4}, ([(3, 3), (2, 2)] * 5, 1.0, 1, 1)),
        (None, {"rows": [5, 95, 99, 12]}, ([(1, 1), (2, 2), (1, 1)], 1.0, 1, 1)),
        ((-2, 7), {"stride": 10}, ([(10, 1)], 1.0, 1, 1)),  # each lies in one chunk
        ((-2, 7), {}, ([(80, 40), (12, 12)], 1.2, 4, 5)),  # the last chunk of four is decoded for the next group too
    ],
)
def test_samples_are_grouped_by_the_chunks_that_they_begin_in(h5, window, options, grouping):
    path = h5(x={"data": numbered((100, 8)), "chunks": (10, 8), **GZIP})
    source = HDF5Source(path, {"x": Field("x", window=window)}, **options)
    runs, *others = source._grouping
    assert ([(run.samples, run.rows) for run in runs], *others) == grouping


@pytest.mark.parametrize(("columns", "key"), [(40, "y"), (2, "x")])
def test_the_largest_field_groups_or_a_compressed_one_of_a_tenth_of_its_bytes(h5, columns, key):
    y = {"data": numbered((100, columns)), "chunks": (10, columns), **GZIP}
    (part,) = parts_of(h5(x=numbered((100, 80)), y=y), {"x": "x", "y": "y"})
    assert grouping_key(part) == key
