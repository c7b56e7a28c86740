"""Groups that stand for one dataset: categories, sparse rows, rows of different lengths."""

import itertools

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source
from lit_async_data.errors import CorruptError


@pytest.mark.parametrize(
    ("offsets", "lost"),
    [
        ([0, 2, 4, 6, 8, 10], []),
        ([0, 2, 4, 9, 11, 13], [3, 4]),  # the values end early
        ([0, 2, 4, 6, 0, 0], [3, 4]),  # the last were never written
        ([0, 2, 4, 0, 0, 0, 0, 8, 10], [2, 3, 4, 5, 6]),
        ([0, 4, 2, 6, 8, 10], [0, 1, 2]),  # either of two may be wrong
        ([0, 2, 4, -1, 8, 10], [2, 3]),
        ([0, 2, 4, 6, 8, 9, 7, 10], [5, 6]),
        ([1, 3, 5, 7, 9, 11], None),  # counted from 1
        ([20, 24, 30], None),  # those of another part
        ([0, 2, 4, 6, 8], None),  # the end is missing
        ([0, 12], None),
        ([0, 8, 16, 24, 32, 40], None),  # in bytes
        ([0, 8, 0, 24, 32, 40], None),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_an_offset_is_right_if_no_other_contradicts_it(path, offsets, lost, sparse):
    with h5py.File(path, "w") as file:
        names = ("data", "indices", "indptr") if sparse else ("values", "none", "offsets")
        for name, values in zip(names, (np.arange(1, 11), np.arange(10), offsets), strict=True):
            file[f"x/{name}"] = values
        if sparse:
            file["x"].attrs.update({"encoding-type": "csr_matrix", "shape": (len(offsets) - 1, 10)})
    if lost is None:
        with pytest.raises(CorruptError, match=rf"x/{names[2]}, row \d: \d+ to \d+ of 10 elements; it must"):
            HDF5Source(path, {"x": "x"})
        return
    source = HDF5Source(path, {"x": "x"})
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if row in lost:
            with pytest.raises(
                CorruptError, match=f"x/{names[2]}, row {row}: {begin} to {end} of 10 elements; it must"
            ):
                source[row]
        else:
            assert sorted(filter(None, source[row]["x"].tolist())) == [*range(begin + 1, end + 1)]
