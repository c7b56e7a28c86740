"""Rows copied from the file: at any offset, by map and by pread, from memory and from disk."""

import os
import threading

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.hdf5 import stored_spans
from support.sources import oracle

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.engine.pipeline.ahead import Ahead
from lit_async_data.errors import ChangedError, ConfigError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.order.shares import Shares
from lit_async_data.sources.hdf5.readers.raw import gather_windows
from lit_async_data.sources.hdf5.storage import open_file, readahead
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
    source.close()


@pytest.mark.parametrize("rows", [1, 8])
def test_compressed_chunks_need_no_map_either(h5, monkeypatch, rows):
    no_maps(monkeypatch)
    path = h5(data={"data": VALUES, "chunks": (rows, 6), "compression": "gzip"}, labels=np.arange(50))
    assert (read(HDF5Source(path, memory_map=False), ROWS)["data"] == VALUES[ROWS]).all()


def test_without_a_map_scattered_samples_are_read_by_h5py(h5):
    source = HDF5Source(h5(data=VALUES.T), ["data"], layout="CN", memory_map=False)
    assert source.chunks.reading == "locked"
    assert (oracle.read(source, ROWS)["data"] == VALUES[ROWS]).all()
    source.close()


@pytest.mark.parametrize("option", ["memory_map", "allow_external"])
@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_what_is_neither_true_nor_false_is_refused(h5, option, wrong):
    with pytest.raises(ConfigError, match=rf"^{option}: .* is not true or false"):
        HDF5Source(h5(data=VALUES), ["data"], **{option: wrong})


def test_a_row_beyond_the_end_of_the_file_is_an_error(h5, monkeypatch):
    """1. The file is checked and unchanged. 2. It shrinks. 3. Its rows are read."""
    path = h5(data=VALUES, labels=np.arange(50))
    source = HDF5Source(path, ["data"], memory_map=False)
    os.truncate(path, stored_spans(path)[0][0] + 49 * 24 + 3)
    monkeypatch.setattr(open_file.OpenFile, "check", lambda self: self.descriptor())
    with pytest.raises(ChangedError, match="in the middle of a sample, so it shrank"):
        source.read_into(np.arange(50), {"data": np.empty((50, 6), "i4")})
    source.close()


class Kernel:
    """Fakes which bytes are in memory, and records what it was told to fetch."""

    def __init__(self, monkeypatch, warm=False):
        self.warm = warm
        self.asked = 0
        self.fetched = []
        monkeypatch.setattr(readahead, "is_cold", self.is_cold)
        monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: self.fetched.append((at, at + size)))

    def is_cold(self, descriptor, offset):
        self.asked += 1
        return not (self.warm or any(begin <= offset < end for begin, end in self.fetched))


@pytest.mark.parametrize("kind", ["in one piece", "in chunks"])
def test_cold_rows_are_fetched_together_and_neighbours_as_one(h5, monkeypatch, kind):
    path = h5(data={"data": VALUES, **KINDS[kind]})
    source = HDF5Source(path, ["data"])
    kernel = Kernel(monkeypatch)
    source.fetch(np.array([3, 5, 4, 30, 3]))
    source.close()
    spans = stored_spans(path)
    first, last = (3, 30) if len(spans) == 1 else (3, 30 % 8)
    begin = spans[0][0] + first * 24, spans[30 // 8 if len(spans) > 1 else 0][0] + last * 24
    assert sorted(kernel.fetched) == [(begin[0], begin[0] + 3 * 24), (begin[1], begin[1] + 24)]


def test_nothing_in_memory_is_fetched_and_few_rows_are_probed(file, monkeypatch):
    source = HDF5Source(file[0])
    kernel = Kernel(monkeypatch, warm=True)
    source.fetch(np.arange(50))
    assert kernel.fetched == []
    assert kernel.asked <= 2 * (readahead.PROBES + 1)
    asked = kernel.asked
    source.read_into(np.arange(50), {"data": np.empty((50, 6), "i4")})
    source.close()
    assert kernel.asked == asked  # the last probe found its rows in memory


def test_large_pieces_are_fetched_in_several_calls(monkeypatch, tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    kernel = Kernel(monkeypatch)
    file = open_file.OpenFile(str(tmp_path / "x"), None)
    readahead.ReadAhead(file).fetch(np.array([100, -1]), 2 * readahead.MAX_FETCH_BYTES + 1)
    file.close()
    sizes = [end - begin for begin, end in kernel.fetched]
    assert sizes == [readahead.MAX_FETCH_BYTES, readahead.MAX_FETCH_BYTES, 1]


def test_one_thread_at_a_time_has_pieces_fetched(tmp_path, monkeypatch):
    """1. The main thread asks for its first piece. 2. Another thread comes to the lock. 3. Both go on."""
    (tmp_path / "x").write_bytes(b"x")
    file = open_file.OpenFile(str(tmp_path / "x"), None)
    ahead, lock, here, came = readahead.ReadAhead(file), threading.Lock(), [], threading.Event()
    other = threading.Thread(target=lambda: ahead.fetch(np.array([0, 20, 40]), 10))

    class Spied:
        def __enter__(self):
            if threading.current_thread() is other:
                came.set()
            return lock.__enter__()

        def __exit__(self, *given):
            return lock.__exit__(*given)

    def fetched(*_):
        if not here:
            other.start()
            assert came.wait(60)
        here.append(threading.current_thread())

    monkeypatch.setattr(ahead, "_lock", Spied())
    monkeypatch.setattr(readahead, "is_cold", lambda descriptor, offset: True)
    monkeypatch.setattr(os, "posix_fadvise", fetched)
    ahead.fetch(np.array([0, 20, 40]), 10)
    other.join()
    file.close()
    assert here == [threading.main_thread()] * 3 + [other] * 3


@pytest.mark.parametrize("rows", [1, 8])
def test_cold_compressed_chunks_are_fetched(h5, monkeypatch, rows):
    path = h5(data={"data": VALUES, "chunks": (rows, 3), "compression": "gzip"})
    source = HDF5Source(path, ["data"])
    spans = np.array(stored_spans(path))
    kernel = Kernel(monkeypatch)
    source.fetch(np.array([0, 30]))
    source.close()
    wanted = spans[np.isin(np.arange(len(spans)) // 2, [0, 30 // rows])]
    for begin, size in wanted.tolist():
        assert any(first <= begin and begin + size <= end for first, end in kernel.fetched)
    assert sum(end - begin for begin, end in kernel.fetched) == wanted[:, 1].sum()


def test_later_batches_are_fetched_while_earlier_ones_are_read(h5, monkeypatch):
    path = h5(data=np.zeros((400, 20_000), np.uint8))
    source = HDF5Source(path, ["data"])
    kernel = Kernel(monkeypatch)
    with AsyncLoader(source, {"batch_size": 2, "shuffle": "global", "workers": 1, "queue_depth": 1}) as loader:
        schedule, steps = loader.machinery.wiring.schedule, 8 + loader.footprint.layout.batches
        for _ in range(3):
            next(loader)
    samples = schedule.plan(0).batch(steps)
    begins = stored_spans(path)[0][0] + samples * 20_000
    source.close()
    assert all(any(first <= begin < end for first, end in kernel.fetched) for begin in begins)


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
