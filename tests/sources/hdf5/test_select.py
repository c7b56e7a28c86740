"""Which rows are samples, and which rows their windows read."""

import numpy as np
import pytest

from lit_async_data import Field, HDF5Source
from lit_async_data.sources.hdf5.select import Episodes, WindowStarts


@pytest.mark.parametrize(
    ("chosen", "overlap"), [([0, 5, 10], 0), ([0, 4, 8, 16], 1), ([0, 1, 2, 9], 2), ([8, 0, 4], 2)]
)
def test_chosen_windows_of_5_rows_share_rows_with_the_next_or_if_unordered_with_any(chosen, overlap):
    assert WindowStarts.at(np.array(chosen)).overlap(5) == overlap


def test_other_choices_have_other_fingerprints_and_all_rows_have_none():
    equal = [
        WindowStarts.within(Episodes.whole(10), *each) for each in (((0, 1), 1), ((0, 1), 2), ((-1, 1), 1), ((0, 2), 1))
    ]
    found = [each.fingerprint(10) for each in (*equal, *(WindowStarts.at(np.array(rows)) for rows in ([0, 1], [1, 0])))]
    assert found[0] == 0
    assert len(set(found)) == 6


@pytest.mark.parametrize(("window", "overlap"), [((0, 3), 2), ((4, 6), 5), ((-6, -4), 6)])
def test_samples_that_repeat_a_row_as_padding_overlap(h5, window, overlap):
    source = HDF5Source(h5(x=np.arange(20)), {"x": Field("x", window=window, pad="last")})
    assert source.chunks.overlap == overlap
