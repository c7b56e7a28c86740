"""Files read ahead: only where they are not in memory, each once, and nothing is left when nobody wants them."""

import itertools
import os
import pickle
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource
from lit_async_data.sources.files import transport
from lit_async_data.sources.manifest import files as fetching
from lit_async_data.sources.manifest.files import THREADS, FilePrefetcher, RootDirectory

ANYWHERE = RootDirectory("/", allow_external=True)


class Disk:
    def __init__(self, monkeypatch, *, cold=True, gated=False):
        self.cold, self.asked, self.here, self.calls = cold, [], set(), []
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        if not gated:
            self.gate.set()
        monkeypatch.setattr(transport, "_IDLE_S", 1e6)  # only a closing ends them
        self._read = fetching.fetched
        monkeypatch.setattr(fetching, "fetched", self.fetched)
        # What is not in memory is not read straight to its place; here, nothing is filled.
        there = lambda path, parts, *_: not parts and (path in self.here or not self.cold)  # noqa: E731
        monkeypatch.setattr(fetching, "filled", there)

    def fetched(self, path, most_bytes, root):
        self.calls.append((path, threading.current_thread().name))
        if (cold := self.cold and path not in self.here) or not self.cold:
            self.asked.append((path, threading.current_thread().name))
            self.arrived.release()
            assert self.gate.wait(30)
            self.here.add(path)
        return self._read(path, most_bytes, root)[0], cold

    def read_ahead(self):
        return sorted(path for path, name in self.asked if "fetcher" in name)

    def await_all(self, paths):
        end = time.monotonic() + 30
        while not self.here.issuperset(paths):
            assert time.monotonic() < end
            time.sleep(1e-3)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def reader():
    reader = FilePrefetcher(ANYWHERE)
    give_back = reader.reserve()
    yield reader
    give_back()


@pytest.fixture
def files(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 100)
    return [str(tmp_path / f"{number}") for number in range(40)]


def fetchers():
    return [thread for thread in threading.enumerate() if "fetcher" in thread.name]


def no_fetchers_are_left():
    for thread in fetchers():
        thread.join(30)
    return not fetchers()


def made_cold(reader, files):
    for path in files[:4]:
        reader.read(path)


def test_nothing_is_read_ahead_of_what_is_in_memory_or_where_nobody_asked_for_it(files, reader, monkeypatch):
    disk = Disk(monkeypatch, cold=False)
    made_cold(reader, files)
    assert not reader.wanted
    disk.cold, kept_by_nobody = True, FilePrefetcher(ANYWHERE)
    made_cold(kept_by_nobody, files[4:])
    assert not kept_by_nobody.wanted
    kept_by_nobody.fetch(files)
    assert not fetchers()
    assert len(disk.asked) == 8
    made_cold(reader, files[8:])
    assert reader.wanted
    disk.here.update(files)
    assert all(reader.fill(path, [], 100) for path in files)  # in memory again
    assert not reader.wanted


def test_a_file_is_read_ahead_once_by_another_thread_and_then_lies_in_memory(files, disk, reader):
    made_cold(reader, files)
    reader.fetch(files[10:30])
    reader.fetch(files[10:30])
    disk.await_all(files[10:30])
    assert reader.fill(files[10], [], 100)
    assert [reader.read(path) for path in files[11:30]] == [bytes([number]) * 100 for number in range(11, 30)]
    assert disk.read_ahead() == sorted(files[10:30])
    assert len(disk.asked) == 24
    assert reader.wanted  # files that were cold for their threads count as that


def test_at_most_sixteen_files_are_waited_for_and_one_that_none_has_begun_is_read_at_once(files, reader, monkeypatch):
    disk, found = Disk(monkeypatch, gated=True), []
    reader._local.window = THREADS  # as after a few answers
    reader.fetch(files)
    for _ in range(THREADS):
        assert disk.arrived.acquire(timeout=30)
    # All of them wait at the gate, and no further one is asked for.
    assert len(disk.asked) == THREADS
    needing = threading.Thread(target=lambda: found.append(reader.read(files[39])))
    needing.start()
    assert disk.arrived.acquire(timeout=30)
    disk.gate.set()
    needing.join(30)
    assert found == [bytes([39]) * 100]
    disk.await_all(files)
    assert [path for path, _ in disk.calls].count(files[39]) == 1


def test_a_read_ahead_that_fails_is_done_again_by_who_needs_the_file(files, disk, caplog, reader, monkeypatch):
    failed = threading.Semaphore(0)

    def fails(path, most_bytes, root):
        if "fetcher" in threading.current_thread().name:
            failed.release()
            raise AssertionError("a mistake")
        return disk.fetched(path, most_bytes, root)

    monkeypatch.setattr(fetching, "fetched", fails)
    reader.fetch(files)
    assert all(failed.acquire(timeout=30) for _ in files)
    assert [reader.read(path) for path in files] == [bytes([number]) * 100 for number in range(40)]
    assert not caplog.records


def test_several_loaders_share_it_and_the_last_one_ends_it(files, disk):
    reader = FilePrefetcher(ANYWHERE)
    first, second = reader.reserve(), reader.reserve()
    made_cold(reader, files)
    reader.fetch(files[5:7])
    first()
    first()  # twice is once
    assert reader.wanted
    assert reader.read(files[5]) == bytes([5]) * 100
    second()
    assert not reader.wanted
    assert no_fetchers_are_left()
    assert reader.read(files[6]) == bytes([6]) * 100


def test_a_copy_in_another_process_begins_anew(files, disk, reader, monkeypatch):
    made_cold(reader, files)
    again = pickle.loads(pickle.dumps(reader))
    assert (again.wanted, reader.wanted) == (False, True)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork: threads do not exist there
    assert not reader.wanted
    assert reader.read(files[9]) == bytes([9]) * 100
    monkeypatch.undo()


def test_given_back_in_one_of_its_threads_it_does_not_wait_for_that(files, disk, monkeypatch):
    """As garbage collection does, which can come anywhere."""
    reader, ended = FilePrefetcher(ANYWHERE), threading.Event()
    give_back = reader.reserve()
    monkeypatch.setattr(fetching, "fetched", lambda *_: (give_back(), ended.set()))
    reader.fetch(files[:1])
    assert ended.wait(30)
    assert no_fetchers_are_left()


COUNT = 200


@pytest.fixture
def source(tmp_path):
    for number in range(COUNT):
        np.save(tmp_path / f"{number}.npy", np.full(300, number))
    table = pa.table({"x": [f"{number}.npy" for number in range(COUNT)]})
    return ManifestSource(table, {"x": "x"}, root=tmp_path, check_files="none")


def numbers(source, epochs=2, **options):
    options = {"batch_size": 4, "shuffle": False, "workers": 1, **options}
    with AsyncLoader(source, LoaderOptions(**options)) as loader:
        return [[value for batch in loader for value in batch["x"][:, 17].tolist()] for _ in range(epochs)]


@pytest.mark.parametrize(("shuffle", "workers"), [("none", 1), ("global", 3), ("chunk", 3)])
def test_batches_are_the_same_from_a_cold_disk(shuffle, workers, disk, source):
    cold = numbers(source, shuffle=shuffle, workers=workers)
    assert len(disk.read_ahead())
    # What was told of the disk is not copied.
    disk.cold = False
    assert cold == numbers(pickle.loads(pickle.dumps(source)), shuffle=shuffle, workers=workers)


def test_a_loader_that_is_closed_early_leaves_nothing(disk, source):
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False, workers=1)) as loader:
        assert len(list(itertools.islice(loader, 20))) == 20
    assert no_fetchers_are_left()
    assert numbers(source, 1) == [list(range(COUNT))]
