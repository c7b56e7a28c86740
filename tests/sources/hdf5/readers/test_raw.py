"""Rows copied from the file: at any offset, by map and by pread, from memory and from disk."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.oracle import check

from lit_async_data.sources.hdf5.readers.slabs import gather_windows
from lit_async_data.sources.hdf5.storage import open_file


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
STORED = [{}, {"chunks": (8, 6)}, {"chunks": (1, 6)}, {"chunks": (8, 6), "fillvalue": 5}]


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
    check(path, {"x": "data", "y": "labels"}, memory_map=memory_map, reading="copied")


def test_large_rows_need_no_map(h5, monkeypatch):
    no_maps(monkeypatch)
    values = np.random.default_rng(0).integers(0, 255, (5, open_file.PREAD_BYTES), dtype=np.uint8)
    check(h5(data=values), {"x": "data"})


@pytest.mark.parametrize("rows", [1, 8])
def test_compressed_chunks_need_no_map_either(h5, monkeypatch, rows):
    no_maps(monkeypatch)
    path = h5(data={"data": VALUES, "chunks": (rows, 6), "compression": "gzip"}, labels=np.arange(50))
    check(path, {"x": "data", "y": "labels"}, memory_map=False)
