"""Slabs are decoded in the memory that is counted for them, and a damaged chunk is named."""

import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import SMALL, peak
from support.sources.oracle import check, read_from

from lit_async_data import CorruptError, HDF5Source
from lit_async_data.sources.hdf5.readers.slabs import gather_windows
from lit_async_data.sources.hdf5.storage import open_file

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
@pytest.mark.parametrize("damaged", [[8], [20], [8, 20]], ids=["inner", "edge", "both"])
def test_a_chunk_of_the_wrong_length_is_an_error_and_no_garbage(h5, damaged, content):
    """h5py returns uninitialised memory for the first, and truncates the second."""
    values = np.arange(138, dtype="i4").reshape(23, 6)
    path = h5(data={"data": values, "chunks": (4, 6), "compression": "gzip"})
    with h5py.File(path, "r+") as file:
        for corner in damaged:
            file["data"].id.write_direct_chunk((corner, 0), content)
    assert (read_from(path, ["data"], [0, 12])["data"] == values[[0, 12]]).all()
    for corner in damaged:
        said = rf"{path}:/data, chunk \({corner}, 0\) .*: .*restore the file"
        with pytest.raises(CorruptError, match=said) as caught:
            read_from(path, ["data"], [0, corner + 1])
        assert (caught.value.file, caught.value.dataset, caught.value.row) == (path, "data", corner)


@given(
    size=st.integers(1, 400),
    length=st.integers(1, 40),
    shift=st.integers(0, 8),
    multiple=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_pieces_at_any_offset_are_copied(size, length, shift, multiple, data):
    memory = np.random.default_rng(0).integers(0, 256, size + length + shift, dtype=np.uint8)[shift:]
    memory.flags.writeable = False
    most = (len(memory) - length) // multiple
    offsets = np.array(data.draw(st.lists(st.integers(0, most), max_size=20)), np.int64) * multiple
    out = np.zeros((len(offsets), length), np.uint8)
    gather_windows(memory, offsets, out)
    assert (out == np.array([memory[at : at + length] for at in offsets]).reshape(out.shape)).all()


@pytest.mark.parametrize("length", [1, 1000, 2**13 - 1, 2**13, 2**13 + 1, 2**16])
def test_pieces_of_any_length_are_copied_also_in_several_steps(length):
    memory = np.random.default_rng(0).integers(0, 256, 2**17, dtype=np.uint8)
    offsets = np.random.default_rng(1).integers(0, len(memory) - length + 1, 300 if length > 1 else 2**18 + 1)
    out = np.zeros((len(offsets), length), np.uint8)
    gather_windows(memory, offsets, out)
    assert all(np.array_equal(row, memory[at : at + length]) for row, at in zip(out[::97], offsets[::97]))
    assert np.array_equal(out[-1], memory[offsets[-1] :][:length])


VALUES = np.arange(50 * 6, dtype=">i4").reshape(50, 6)
GZIP = {"compression": "gzip"}
STORED = [{}, {"chunks": (8, 6)}, {"chunks": (1, 6)}, {"chunks": (8, 6), "fillvalue": 5}]
STORED += [{"chunks": (8, 6)} | GZIP, {"chunks": (1, 6)} | GZIP]


def no_maps(monkeypatch):
    monkeypatch.setattr(open_file.OpenFile, "map", lambda self: pytest.fail("a map was made"))


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("options", STORED, ids=str)
def test_rows_are_read_by_map_and_by_pread(path, options, memory_map, monkeypatch):
    with h5py.File(path, "w") as file:
        data, missing = file.create_dataset("data", VALUES.shape, VALUES.dtype, **options), "fillvalue" in options
        for rows in [slice(0, 17), slice(30, 40)] if missing else [slice(None)]:
            data[rows] = VALUES[rows]
        file["labels"] = np.arange(50, dtype="u2")
    if not memory_map:
        no_maps(monkeypatch)
    reading = "decoded" if "compression" in options else "copied"
    check(path, {"x": "data", "y": "labels"}, memory_map=memory_map, reading=reading)


def test_large_rows_need_no_map(h5, monkeypatch):
    no_maps(monkeypatch)
    values = np.random.default_rng(0).integers(0, 255, (5, open_file.PREAD_BYTES), dtype=np.uint8)
    check(h5(data=values), {"x": "data"})
