"""Races that the GIL hides or makes rare: it changes hands only where a call ends or a loop jumps back.

Each is forced here, in numbered steps.
"""

import contextlib
import itertools
import os
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.threads.waits import LONG

import lit_async_data as lad
from lit_async_data.engine.loader import base_loader
from lit_async_data.engine.loader.base_loader import Run
from lit_async_data.engine.prefetch.iterator_feed import ReaderThread, uncopied
from lit_async_data.engine.supervisor import ThreadWorker
from lit_async_data.errors import WorkerError
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.testing import ArraySource


def of_a_source():
    options = {"batch_size": 2, "workers": 0, "shuffle": False}
    return lad.AsyncLoader(ArraySource({"x": np.arange(6)}), options, device_depth=0)


def of_an_iterable():
    return lad.prefetched([[0, 1], [2, 3], [4, 5]], device_depth=0, device="cpu")


def values(batch):
    return batch if isinstance(batch, list) else batch["x"].tolist()


@pytest.mark.parametrize("make", [of_a_source, of_an_iterable])
def test_of_two_threads_that_call_next_at_once_one_gets_the_error(make, monkeypatch):
    """1. A is about to note that it is inside `next`; nobody is. 2. B enters, and stays. 3. A must see B."""
    at_the_door, inside, go_on = threading.Event(), threading.Event(), threading.Event()
    first = []

    def get_ident():
        if not first:
            first.append(True)
            at_the_door.set()
            assert inside.wait(LONG)
        return threading.get_ident()

    monkeypatch.setattr(base_loader, "threading", types.SimpleNamespace(get_ident=get_ident))
    with make() as loader, ThreadPoolExecutor(2) as threads:
        take = loader._take

        def held():
            inside.set()
            assert go_on.wait(LONG)
            return take()

        loader._take = held
        a = threads.submit(next, loader)
        assert at_the_door.wait(LONG)
        b = threads.submit(next, loader)
        try:
            with pytest.raises(WorkerError, match="two threads called next of this loader at once"):
                a.result(LONG)
        finally:
            inside.set()
            go_on.set()
        loader._take = take
        batches = [b.result(LONG), next(loader), next(loader)]  # and no batch is lost
        assert [values(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5]]


class GoneAtSecondRead:
    """An attribute that another thread has set to None when it is read for the second time.

    Put it on a class in place of an attribute: objects keep their values, and have them when it is gone again.
    """

    def __init__(self, name):
        self._name = name
        self._reads = itertools.count(1)

    def __get__(self, holder, owner=None):
        return None if next(self._reads) == 2 else vars(holder)[self._name]

    def __set__(self, holder, value):
        vars(holder)[self._name] = value


def test_a_worker_that_ends_its_task_while_a_message_names_it_is_named(monkeypatch):
    """1. A message finds a task. 2. The worker ends it. 3. The message asks what the task is."""
    worker = ThreadWorker(3, lambda _: False)
    worker.begin("batch 7")
    monkeypatch.setattr(ThreadWorker, "task", GoneAtSecondRead("task"), raising=False)
    monkeypatch.setattr(ThreadWorker, "alive", True)
    assert str(worker).startswith("worker 3 has been at batch 7 for ")


def test_a_file_that_is_closed_while_another_thread_enters_it_is_opened_again(tmp_path, monkeypatch):
    """1. A enters a file, which is open. 2. B has opened more files than may be open, and closes this one. 3. A asks
    which process opened it."""
    path = str(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"1234")
    file = OpenFile(path, FileIdentity.of(os.stat(path)))

    class ClosedAfterFirstRead(list):
        def __bool__(self):
            file.close()
            return len(self) > 0

    with contextlib.closing(file):
        for entered in (
            lambda: not file.forked,
            lambda: file._opened().descriptor is not None,
            lambda: file.map(random_access=False)[:].tobytes() == b"1234",
        ):
            file.check()
            file._kept = ClosedAfterFirstRead(file._kept)
            assert entered()


@pytest.mark.parametrize("make", [of_a_source, of_an_iterable])
def test_a_loader_that_is_closed_while_another_thread_asks_how_full_it_is(make, monkeypatch):
    """1. A asks how full the queues are; there is an engine. 2. B closes the loader. 3. A asks the engine."""
    with make() as loader:
        next(loader)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "engine", GoneAtSecondRead("engine"))
            assert loader.fill


def test_a_reader_that_two_threads_close_is_closed(monkeypatch):
    """1. A and B close a reader, which has a thread. 2. B forgets the thread. 3. A waits for it."""
    reader = ReaderThread(iter([1, 2, 3]), uncopied, depth=1)
    reader.get()
    monkeypatch.setattr(ReaderThread, "worker", GoneAtSecondRead("worker"), raising=False)
    assert reader.close()


class Places(np.ndarray):
    """Places of slabs that may be read and written under a lock only."""

    def __getitem__(self, key):
        assert self.lock.locked()
        return np.asarray(self)[key]

    def __setitem__(self, key, value):
        assert self.lock.locked()
        np.asarray(self)[key] = value


def test_places_are_read_and_written_under_the_lock():
    """1. A writes a slab, and then its place. 2. B sees the place, but not yet the slab: the processor makes the writes
    visible in another order. x86 does not, so here the places say whether both threads take the lock."""
    slabs = ChunkCache()
    slabs.reservation = slabs.reserve({}, 100)
    cache = slabs.kept(4, 1, (2,), np.dtype("i4"))
    cache.put(0, np.zeros((1, 2), "i4"))
    table, place = cache._content
    guarded = place.view(Places)
    cache._lock = guarded.lock = threading.Lock()  # which says whether it is locked
    cache._content = table, guarded
    cache.put(1, np.ones((1, 2), "i4"))
    out = np.zeros((2, 2), "i4")
    assert not cache.copy_rows(np.array([1, 0]), out).size
    assert out.tolist() == [[1, 1], [0, 0]]
    assert cache.slab(1).tolist() == [[1, 1]]
    assert cache.slab(3) is None
    assert cache.missing(np.arange(4)).tolist() == [2, 3]
