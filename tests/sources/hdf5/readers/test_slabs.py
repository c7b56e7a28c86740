"""Slabs are decoded in the memory that is counted for them, and a damaged chunk is named."""

import zlib

import h5py
import numpy as np
import pytest
from support.memory import SMALL, peak
from support.sources.oracle import read_from

from lit_async_data import CorruptError, HDF5Source

ROWS = np.random.default_rng(0).integers(0, 8, (128, 64, 256), np.uint8)


@pytest.mark.parametrize(
    ("dtype", "shuffle", "fletcher32"),
    [("u1", False, False), ("<i4", True, False), (">i4", False, True), (">i4", True, True)],
)
@pytest.mark.parametrize("chunks", [(64, 64, 256), (64, 8, 256), (1, 64, 256)])
def test_decoding_takes_no_more_memory_than_is_counted(h5, dtype, shuffle, fletcher32, chunks):
    options = {"chunks": chunks, "compression": "gzip", "shuffle": shuffle, "fletcher32": fletcher32}
    source = HDF5Source(h5(data={"data": ROWS.astype(dtype), **options}), ["data"])
    rows, out = np.arange(100)[::-1].copy(), np.empty((100, *ROWS.shape[1:]), source.spec["data"].dtype)
    taken = peak(lambda: source.read_into(rows, {"data": out}))
    assert (out == ROWS[rows]).all()
    assert taken < source.memory().per_thread + SMALL


@pytest.mark.parametrize("content", [zlib.compress(b"\1" * 16), zlib.compress(b"\1" * 160), b"\1" * 16])
def test_a_chunk_of_the_wrong_length_is_an_error_and_no_garbage(h5, content):
    """h5py returns uninitialised memory for the first, and truncates the second."""
    values = np.arange(120, dtype="i4").reshape(20, 6)
    path = h5(data={"data": values, "chunks": (4, 6), "compression": "gzip"})
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((8, 0), content)
    assert (read_from(path, ["data"], [0, 12])["data"] == values[[0, 12]]).all()
    with pytest.raises(CorruptError, match=rf"{path}:/data, chunk \(8, 0\) at byte \d+: .*restore the file") as caught:
        read_from(path, ["data"], [0, 9])
    assert (caught.value.file, caught.value.dataset, caught.value.row) == (path, "data", 8)


@pytest.mark.parametrize("inflated", [100, 10_000], ids=["too few bytes", "too many bytes"])
@pytest.mark.parametrize("corner", [20, 8], ids=["edge", "inner"])  # in both cases the edge is damaged
def test_a_damaged_chunk_is_an_error_also_where_the_edge_of_the_dataset_is_damaged(h5, corner, inflated):
    # libhdf5 would return uninitialised memory for the one, and the first bytes of the other.
    path = h5(data={"data": np.ones((23, 8, 8), "i2"), "chunks": (4, 8, 8), "compression": "gzip"})
    with h5py.File(path, "r+") as file:
        for damaged in {20, corner}:
            file["data"].id.write_direct_chunk((damaged, 0, 0), zlib.compress(bytes(inflated)))
    with pytest.raises(CorruptError, match=rf"chunk \({corner}, 0, 0\)") as caught:
        read_from(path, ["data"], [corner + 1])
    assert caught.value.row == corner
