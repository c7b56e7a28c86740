"""Pieces are fetched from disk before they are read: together, where some are cold, by one thread at a time."""

import os
import threading

import numpy as np
import pytest
from support.files.hdf5 import stored_spans

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.engine.pipeline.thread_pipeline import Ahead
from lit_async_data.order.due import Shares
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.hdf5.storage import open_file
from lit_async_data.sources.hdf5.storage import open_file as readahead
from lit_async_data.sources.hdf5.storage.external_files import FileIdentity
from lit_async_data.testing import ArraySource

VALUES = np.arange(50 * 6, dtype=">i4").reshape(50, 6)


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


@pytest.mark.parametrize("options", [{}, {"chunks": (8, 6)}], ids=str)
def test_cold_rows_are_fetched_together_and_neighbours_as_one(h5, monkeypatch, options):
    path = h5(data={"data": VALUES, **options})
    source = HDF5Source(path, ["data"])
    kernel = Kernel(monkeypatch)
    source.fetch(np.array([3, 5, 4, 30, 3]))
    source.close()
    spans = stored_spans(path)
    first, last = (3, 30) if len(spans) == 1 else (3, 30 % 8)
    begin = spans[0][0] + first * 24, spans[30 // 8 if len(spans) > 1 else 0][0] + last * 24
    assert sorted(kernel.fetched) == [(begin[0], begin[0] + 3 * 24), (begin[1], begin[1] + 24)]


@pytest.mark.parametrize("options", [{}, {"chunks": (8, 6)}, {"chunks": (1, 6)}], ids=str)
def test_nothing_in_memory_is_fetched_and_few_rows_are_probed(h5, monkeypatch, options):
    source = HDF5Source(h5(data={"data": VALUES, **options}, labels=np.arange(50)))
    kernel = Kernel(monkeypatch, warm=True)
    source.fetch(np.arange(50))
    assert kernel.fetched == []
    assert kernel.asked <= 2 * (readahead.PROBES + 1)
    asked = kernel.asked
    source.read_into(np.arange(50), {"data": np.empty((50, 6), "i4")})
    source.close()
    assert kernel.asked == asked  # the last probe found its rows in memory


def opened(path):
    return open_file.OpenFile(str(path), FileIdentity.of(path.stat()))


def test_large_pieces_are_fetched_in_several_calls(monkeypatch, tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    kernel = Kernel(monkeypatch)
    file = opened(tmp_path / "x")
    readahead.ReadAhead(file).fetch(np.array([100, -1]), 2 * readahead.MAX_FETCH_BYTES + 1)
    file.close()
    sizes = [end - begin for begin, end in kernel.fetched]
    assert sizes == [readahead.MAX_FETCH_BYTES, readahead.MAX_FETCH_BYTES, 1]


def test_one_thread_at_a_time_has_pieces_fetched(tmp_path, monkeypatch):
    """1. The main thread asks for its first piece. 2. Another thread comes to the lock. 3. Both go on."""
    (tmp_path / "x").write_bytes(b"x")
    file = opened(tmp_path / "x")
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
        schedule, steps = loader._machinery.wiring.schedule, 8 + loader.footprint.layout.batches
        for _ in range(3):
            next(loader)
    samples = schedule.plan(0).batch(steps)
    begins = stored_spans(path)[0][0] + samples * 20_000
    source.close()
    assert all(any(first <= begin < end for first, end in kernel.fetched) for begin in begins)


def test_the_first_batches_of_the_next_epoch_are_fetched_at_the_end_of_this():
    asked = []

    class Asked(ArraySource):
        reads_ahead = True

        def fetch(self, samples):
            asked.append(samples.tolist())
            return True

    source = Asked({"x": np.arange(40)})
    with AsyncLoader(source, {"batch_size": 4, "shuffle": "global", "workers": 1}) as loader:
        schedule = loader._machinery.wiring.schedule
        ahead = Ahead(source, 3, Shares(None))
        ahead(schedule, [BatchIndex(0, 8), BatchIndex(0, 9)], BatchIndex(1, 0))
        ahead(schedule, [BatchIndex(1, 0)], BatchIndex(1, 1))
    wanted = [schedule.plan(1).batch(step).tolist() for step in range(4)]
    # The batches in between are fetched later, once.
    assert asked == [wanted[1] + wanted[2], wanted[0], wanted[3]]
