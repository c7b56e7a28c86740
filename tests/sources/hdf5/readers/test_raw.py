"""Rows copied from the file: at any offset, by map and by pread, from memory and from disk."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources import oracle

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.engine.pipeline.ahead import Ahead
from lit_async_data.order.plan import BatchIndex
from lit_async_data.order.shares import Shares
from lit_async_data.sources.hdf5.readers.raw import gather_windows
from lit_async_data.sources.hdf5.storage import open_file
from lit_async_data.testing import ArraySource


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
KINDS = {
    "in one piece": {},
    "in chunks": {"chunks": (8, 6)},
    "in chunks of one": {"chunks": (1, 6)},
    "in chunks, some of them missing": {"chunks": (8, 6), "fillvalue": 5},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def file(request, tmp_path):
    path, values = str(tmp_path / "x.h5"), VALUES.copy()
    with h5py.File(path, "w") as made:
        data = made.create_dataset("data", VALUES.shape, VALUES.dtype, **request.param)
        if "fillvalue" in request.param:
            data[:17], data[30:40] = values[:17], values[30:40]
            values = data[...]
        else:
            data[...] = values
        made["labels"] = np.arange(50, dtype="u2")
    return path, values


def read(source, rows):
    out = {"data": np.zeros((len(rows), 6), "i4"), "labels": np.zeros(len(rows), np.int64)}
    source.read_into(np.array(rows), out)
    source.close()
    return out


ROWS = [49, 0, 17, 16, 23, 24, 31, 31, 5]


def no_maps(monkeypatch):
    monkeypatch.setattr(open_file.OpenFile, "map", lambda self: pytest.fail("a map was made"))


@pytest.mark.parametrize("memory_map", [True, False])
def test_rows_are_read_by_map_and_by_pread(file, memory_map, monkeypatch):
    path, values = file
    if not memory_map:
        no_maps(monkeypatch)
    source = HDF5Source(path, memory_map=memory_map)
    assert source.chunks.reading == "copied"
    out = read(source, ROWS)
    assert (out["data"] == values[ROWS]).all()
    assert out["labels"].tolist() == ROWS


def test_large_rows_need_no_map(h5, monkeypatch):
    no_maps(monkeypatch)
    values = np.random.default_rng(0).integers(0, 255, (5, open_file.PREAD_BYTES), dtype=np.uint8)
    source = HDF5Source(h5(data=values), ["data"])
    assert (oracle.read(source, [4, 0, 4])["data"] == values[[4, 0, 4]]).all()


@pytest.mark.parametrize("rows", [1, 8])
def test_compressed_chunks_need_no_map_either(h5, monkeypatch, rows):
    no_maps(monkeypatch)
    path = h5(data={"data": VALUES, "chunks": (rows, 6), "compression": "gzip"}, labels=np.arange(50))
    assert (read(HDF5Source(path, memory_map=False), ROWS)["data"] == VALUES[ROWS]).all()


def test_the_first_batches_of_the_next_epoch_are_fetched_at_the_end_of_this(tmp_path):
    asked = []

    class Asked(ArraySource):
        reads_ahead = True

        def fetch(self, samples):
            asked.append(samples.tolist())
            return True

    source = Asked({"x": np.arange(40)})
    with AsyncLoader(source, {"batch_size": 4, "shuffle": "global", "workers": 1}) as loader:
        schedule = loader.machinery.wiring.schedule
        ahead = Ahead(source, 3, Shares(None))
        ahead(schedule, [BatchIndex(0, 8), BatchIndex(0, 9)], BatchIndex(1, 0))
        ahead(schedule, [BatchIndex(1, 0)], BatchIndex(1, 1))
    wanted = [schedule.plan(1).batch(step).tolist() for step in range(4)]
    # The batches in between are fetched later, once.
    assert asked == [wanted[1] + wanted[2], wanted[0], wanted[3]]
