"""Files read ahead: only where they are not in memory, each once, and nothing is left when nobody wants them."""

import contextlib
import copy
import dataclasses
import itertools
import os
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from support.sources.manifests import of_paths
from support.threads.interrupts import interrupted

from lit_async_data import AsyncLoader, ConcatSource, LoaderOptions, ManifestSource, SubsetSource
from lit_async_data.engine.resources.plan import AHEAD
from lit_async_data.sources.manifest import files as fetching
from lit_async_data.sources.manifest.files import THREADS, FilePrefetcher, RootDirectory

ROOM = 2**25
ANYWHERE = RootDirectory("/", allow_external=True)


class Disk:
    """Stands for a slow disk: what is read waits for its gate, and everything had to come from the disk."""

    def __init__(self, monkeypatch, *, cold=True, gated=False):
        self.cold, self.asked = cold, []
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        if not gated:
            self.gate.set()
        self._read = fetching.fetched
        monkeypatch.setattr(fetching, "fetched", self.fetched)
        # What is not in memory is not read straight to its place.
        monkeypatch.setattr(fetching, "filled", lambda *_: not cold)

    def fetched(self, path, most_bytes, root):
        self.asked.append((path, threading.current_thread().name))
        self.arrived.release()
        assert self.gate.wait(30)
        return self._read(path, most_bytes, root)[0], self.cold

    def read_ahead(self):
        return [path for path, name in self.asked if "fetcher" in name]


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def reader():
    reader = FilePrefetcher(ANYWHERE)
    give_back = reader.reserve(ROOM)
    yield reader
    give_back()


@pytest.fixture
def files(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 100)
    return [str(tmp_path / f"{number}") for number in range(40)]


def fetchers():
    return [thread for thread in threading.enumerate() if "fetcher" in thread.name]


def made_cold(reader, files):
    for path in files[:4]:
        reader.read(path)


def there(reader, path):
    file = reader.files[path]
    assert file.reading.acquire(timeout=30)
    file.reading.release()


def test_nothing_is_read_ahead_of_what_is_in_memory(files, reader, monkeypatch):
    disk = Disk(monkeypatch, cold=False)
    made_cold(reader, files)
    assert not reader.wanted
    disk.cold, kept_by_nobody = True, FilePrefetcher(ANYWHERE)
    made_cold(kept_by_nobody, files)
    assert not kept_by_nobody.wanted
    kept_by_nobody.fetch(files)
    assert not fetchers()
    assert len(disk.asked) == 8


def test_files_that_are_in_memory_again_end_reading_ahead(files, disk, reader, monkeypatch):
    made_cold(reader, files)
    assert reader.wanted
    monkeypatch.setattr(fetching, "filled", lambda *_: True)
    assert all(reader.fill(path, [], 100) for path in files)
    assert not reader.wanted


def test_a_file_that_is_read_ahead_is_read_once_and_by_another_thread(files, disk, reader):
    made_cold(reader, files)
    assert reader.wanted
    del disk.asked[:]
    reader.fetch(files[10:30])
    for path in files[10:30]:
        there(reader, path)
    found = [reader.read(path) for path in files[10:30]]
    assert found == [bytes([number]) * 100 for number in range(10, 30)]
    assert sorted(path for path, _ in disk.asked) == sorted(files[10:30])
    assert all("fetcher" in name for _, name in disk.asked)


def test_at_most_sixteen_files_are_waited_for_at_a_time(files, reader, monkeypatch):
    disk = Disk(monkeypatch, gated=True)
    reader.fetch(files)
    for _ in range(THREADS):
        assert disk.arrived.acquire(timeout=30)
    # All of them wait at the gate, and no further one is asked for.
    assert len(disk.asked) == THREADS
    disk.gate.set()
    there(reader, files[39])


def test_who_needs_a_file_that_is_on_its_way_waits_for_it(files, reader, monkeypatch):
    disk, found = Disk(monkeypatch, gated=True), []
    reader.fetch(files[:1])
    assert disk.arrived.acquire(timeout=30)
    waiting = threading.Thread(target=lambda: found.append(reader.read(files[0])))
    waiting.start()
    assert not found
    disk.gate.set()
    waiting.join(30)
    assert found == [bytes(100)]
    assert len(disk.asked) == 1


def test_who_needs_a_file_that_nobody_has_begun_reads_it_at_once(files, monkeypatch):
    # 1. All threads are in the middle of a read, and a file waits for its turn. 2. A worker needs that file. Were it to
    # wait for the threads, it would get it after all others; and never, if the loader is closed meanwhile.
    disk, reader = Disk(monkeypatch, gated=True), FilePrefetcher(ANYWHERE)
    give_back = reader.reserve(ROOM)
    reader.fetch(files)
    for _ in range(THREADS):
        assert disk.arrived.acquire(timeout=30)
    monkeypatch.setattr(fetching, "fetched", lambda path, most, root: (b"read here", True))
    found = []
    needing = threading.Thread(target=lambda: found.append(reader.read(files[39])))
    needing.start()
    needing.join(30)
    at_once = found == [b"read here"]
    disk.gate.set()
    needing.join(30)
    give_back()
    assert at_once
    assert reader.held_bytes == 0


def test_no_more_is_held_than_there_is_room_for_and_the_next_files_come_first(files, disk):
    reader = FilePrefetcher(ANYWHERE)
    give_back = reader.reserve(250)
    reader.fetch(files[:10])
    there(reader, files[0])
    there(reader, files[1])
    assert reader.held_bytes == 200  # with a third one it would be 300 bytes
    for number in range(8):
        assert reader.read(files[number]) == bytes([number]) * 100
        there(reader, files[number + 2])
        # Room for one: it goes to the file that is wanted next.
        assert sorted(path for path, _ in disk.asked) == sorted(files[: number + 3])
    assert all("fetcher" in name for _, name in disk.asked)
    give_back()
    assert reader.held_bytes == 0
    assert len(disk.asked) == 10


def test_a_file_that_is_larger_than_the_room_is_not_read_ahead(files, disk, tmp_path):
    (tmp_path / "large").write_bytes(bytes(1000))
    reader = FilePrefetcher(ANYWHERE)
    give_back = reader.reserve(450)
    reader.fetch([str(tmp_path / "large"), str(tmp_path / "gone"), *files[:2]])
    there(reader, files[1])
    assert reader.held_bytes == 200
    assert reader.read(str(tmp_path / "large")) == bytes(1000)
    give_back()
    assert reader.held_bytes == 0


def test_room_that_is_taken_back_holds_up_nobody(files, disk):
    # 1. Two loaders give room for 250 bytes. 2. Two files are held, and the next one waits for room. 3. One loader is
    # closed, and what remains is too little for any file. 4. Reading goes on without reading ahead.
    reader = FilePrefetcher(ANYWHERE)
    first, second = reader.reserve(200), reader.reserve(50)
    reader.fetch(files[:4])
    there(reader, files[1])
    first()
    assert [reader.read(path) for path in files[:4]] == [bytes([number]) * 100 for number in range(4)]
    second()
    assert reader.held_bytes == 0


def test_a_read_ahead_that_fails_is_done_again_by_who_needs_the_file(files, disk, caplog, reader, monkeypatch):
    def fails(path, most_bytes, root):
        if "fetcher" in threading.current_thread().name:
            raise AssertionError("a mistake")
        return disk.fetched(path, most_bytes, root)

    monkeypatch.setattr(fetching, "fetched", fails)
    reader.fetch(files)
    for path in files:
        there(reader, path)
    assert [reader.read(path) for path in files] == [bytes([number]) * 100 for number in range(40)]
    assert not caplog.records


def test_where_no_thread_can_be_started_nothing_waits_for_one(files, disk, reader, monkeypatch):
    def refuses(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    reader.fetch(files)
    assert reader.read(files[0]) == bytes(100)


def test_what_nobody_asks_for_is_let_go(files, disk, reader, monkeypatch):
    monkeypatch.setattr(fetching, "_STALE", 3)
    reader.fetch(files[:1])
    there(reader, files[0])
    for number in range(1, 5):
        reader.fetch(files[number : number + 1])
    assert files[0] not in reader.files
    for number in range(1, 5):
        reader.read(files[number])
    assert reader.held_bytes == 0


def test_several_loaders_share_it_and_the_last_one_ends_it(files, disk):
    reader = FilePrefetcher(ANYWHERE)
    first, second = reader.reserve(ROOM), reader.reserve(ROOM)
    made_cold(reader, files)
    reader.fetch(files[5:7])
    first()
    first()  # twice is once
    assert reader.wanted
    assert reader.read(files[5]) == bytes([5]) * 100
    second()
    assert not reader.wanted
    assert not fetchers()
    assert reader.read(files[6]) == bytes([6]) * 100


def test_a_copy_in_another_process_begins_anew(files, disk, reader, monkeypatch):
    made_cold(reader, files)
    again = pickle.loads(pickle.dumps(reader))
    assert (again.wanted, reader.wanted) == (False, True)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork: threads do not exist there
    assert not reader.wanted
    assert reader.read(files[9]) == bytes([9]) * 100
    monkeypatch.undo()


def test_room_given_back_by_a_thread_that_holds_the_lock_waits_for_no_thread(files, disk):
    # As garbage collection does, which can come while the lock is held. A thread of the pool waits for the lock.
    reader = FilePrefetcher(ANYWHERE)
    give_back = reader.reserve(ROOM)
    with reader._held():
        reader.fetch(files[:1])
        threads = fetchers()
        give_back()
    for thread in threads:
        thread.join(30)
    assert not fetchers()


def test_wherever_an_interrupt_ends_the_giving_back_of_room_no_thread_waits_for_ever(files, monkeypatch):
    pool = SimpleNamespace(submit=lambda *_: None, shutdown=lambda **_: None)
    monkeypatch.setattr(fetching, "ThreadPoolExecutor", lambda *_: pool)
    for place in itertools.count():
        reader = FilePrefetcher(ANYWHERE)
        give_back = reader.reserve(ROOM)
        reader.fetch(files[:2])
        file = reader._waiting[0]
        with interrupted(place) as passed, contextlib.suppress(KeyboardInterrupt):
            give_back()
        thread = threading.Thread(target=reader._measure, args=(file,), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        give_back()
        if len(passed) <= place:
            break
    assert place > 20


COUNT = 200


@pytest.fixture
def source(tmp_path):
    for number in range(COUNT):
        np.save(tmp_path / f"{number}.npy", np.full(300, number))
    table = pa.table({"id": [f"n{number}" for number in range(COUNT)], "x": [f"{n}.npy" for n in range(COUNT)]})
    return ManifestSource(table, {"x": "x"}, id="id", root=tmp_path, check_files="none")


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
        batches = iter(loader)
        for _ in range(20):
            next(batches)
    assert not [thread.name for thread in threading.enumerate() if "fetch" in thread.name or "ahead" in thread.name]
    assert numbers(source, 1) == [list(range(COUNT))]


BATCH = 16


def large(tmp_path, nbytes, count):
    """A source of `count` files of `nbytes` bytes, which are hard links to one."""
    np.save(tmp_path / "0.npy", np.zeros(nbytes, np.uint8))
    for number in range(1, count):
        (tmp_path / f"{number}.npy").hardlink_to(tmp_path / "0.npy")
    return of_paths(tmp_path, [f"{number}.npy" for number in range(count)], check_files="none")


@pytest.mark.parametrize(
    ("nbytes", "budget", "room"),
    [
        (10_000, 2**31, 2**25),  # at least 32 MiB
        (500_128, 2**31, 2 * 500_128 * BATCH * (AHEAD + 1)),  # the next batches, twice: files differ in size
        (2_000_000, 2**26, None),  # half of what is left
    ],
)
def test_the_room_is_sized_by_the_files_and_the_budget(tmp_path, nbytes, budget, room):
    source = large(tmp_path, nbytes - 128, count=64)
    options = LoaderOptions(batch_size=BATCH, shuffle=True, memory_budget=budget, workers=1)
    if room is None:
        options = dataclasses.replace(options, batch_size=1, queue_depth=2)
    with AsyncLoader(source, options) as loader:
        found = loader.footprint.budget
        footprint = loader.footprint
    if room is None:
        room = min((budget - found.slots * found.slot_bytes) // 2, 2 * nbytes * (AHEAD + footprint.layout.batches))
    assert found.fetched == room
    assert found.total <= budget
    assert f"{room / 2**20:.1f} MiB of files read ahead" in str(found)
    assert found.most_slots >= found.slots


def test_room_is_at_most_a_gibibyte_and_none_where_nothing_is_read_ahead(tmp_path):
    source = large(tmp_path, 2_000_000, count=1024)
    options = LoaderOptions(batch_size=512, shuffle=True, memory_budget=2**40, workers=1)
    with AsyncLoader(source, options) as loader:
        assert loader.footprint.budget.fetched == 2**30
    with AsyncLoader(source, dataclasses.replace(options, workers=0)) as loader:
        assert loader.footprint.budget.fetched == 0
    both = ConcatSource([source, SubsetSource(source, np.arange(5))])
    with AsyncLoader(both, options) as loader:
        assert loader.footprint.budget.fetched == 2**30


def test_a_file_that_is_missing_does_not_count_for_the_size(tmp_path):
    source = large(tmp_path, 1000, count=3)
    (tmp_path / "2.npy").unlink()
    assert source.memory().files == 1128
    for number in range(2):
        (tmp_path / f"{number}.npy").unlink()
    assert copy.copy(source).memory().files == 1128  # looked up once
