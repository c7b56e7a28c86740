"""Slots that processes share, and samples that end them; without memfd, in a file without a name, reserved first."""

import contextlib
import errno
import logging
import os
import threading
import types

import numpy as np
import pytest
from support.failures import raising
from support.processes import loader_of
from support.sources.reader_sources import Numbers

from lit_async_data import AsyncLoader
from lit_async_data.engine.processes import shared_memory
from lit_async_data.engine.processes.shared_memory import HEAD_BYTES, SharedFile, SharedSlots
from lit_async_data.errors import ConfigError, MemoryBudgetError

pytestmark = pytest.mark.processes
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_maps_the_file_sees_the_slots_and_which_samples_end_processes():
    with contextlib.closing(SharedSlots(100)) as slots, contextlib.closing(SharedSlots(100, slots.fd)) as reader:
        assert [len(slot) for slot in slots.add(2)] == [100, 100]
        assert slots.add(0) == []
        reader.slot(1)[:] = 7
        assert (slots.slot(0).max(), slots.slot(1).min()) == (0, 7)
        assert not slots.condemn(2)
        reader.tried(2)[0] = 34
        assert not slots.condemn(1)
        assert slots.condemn(2)
        assert reader.deadly[:2].tolist() == [34, 0]


@pytest.fixture(params=["missing", errno.ENOSYS, errno.EPERM], ids=["missing", "not implemented", "forbidden"])
def no_memfd(request, monkeypatch):
    if request.param == "missing":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", raising(OSError(request.param, os.strerror(request.param))))


@pytest.fixture
def full(monkeypatch):
    """A system without memfd, and a file system without room."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(SharedFile, "reach", raising(NO_SPACE))


@pytest.mark.usefixtures("no_memfd")
def test_without_memfd_a_process_reads_through_a_file_that_has_no_name():
    with loader_of(Numbers(), worker_kind="auto") as loader:
        kept = list(loader)
        assert loader.footprint.workers.kind == "process"
        assert [batch["y"].tolist() for batch in kept] == np.arange(100).reshape(10, 10).tolist()
        assert os.fstat(loader._run.engine.feed.pipeline._memory.fd).st_nlink == 0


@pytest.mark.usefixtures("no_memfd")
def test_every_byte_is_reserved_before_it_is_used():
    slots = SharedSlots(3 * 2**20 + 1)
    for count in (1, 2):
        slots.add(count)
        found = os.fstat(slots.fd)
        assert found.st_size == HEAD_BYTES + len(slots._slots) * (3 * 2**20 + 4096)
        assert found.st_blocks * 512 >= found.st_size
    slots.close()


def test_memory_of_a_memfd_is_not_touched_before_it_is_used():
    slots = SharedSlots(2**20)
    slots.add(3)
    assert os.fstat(slots.fd).st_blocks * 512 <= HEAD_BYTES
    slots.close()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("folder", "advice"),
    [("/dev/shm", r"make /dev/shm larger \(docker run --shm-size=8g\)"), ("/nowhere", r"make room in \S+")],
)
def test_too_little_room_is_an_error_before_the_first_batch(monkeypatch, folder, advice):
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    message = rf"refuses .*No space left.*{advice}, or set worker_kind=thread$"
    with loader_of(Numbers()) as loader, pytest.raises(MemoryBudgetError, match=message):
        next(loader)


@pytest.mark.usefixtures("full")
def test_with_too_little_room_the_choice_is_no_process(caplog):
    caplog.set_level(logging.INFO)
    with loader_of(Numbers(), worker_kind="auto") as loader:
        assert [batch["y"].tolist() for batch in loader] == np.arange(100).reshape(10, 10).tolist()
        assert loader.footprint.workers.kind == "caller"
    before, after = [each.getMessage() for each in caplog.records if each.getMessage().startswith("Numbers: ")]
    assert before.startswith("Numbers: 1 reader process, at most 2 (")
    assert after.startswith("Numbers: no workers (memory_budget: the system refuses 64.0 KiB for memory that reader")


def test_no_room_in_the_midst_of_zeros_gives_the_rest_back(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shared_memory, "_STEP", 4096)
    shared = SharedFile("x")
    shared.reach(4096)
    file = shared.file
    shared.file = types.SimpleNamespace(
        fileno=file.fileno,
        seek=file.seek,
        tell=file.tell,
        truncate=file.truncate,
        write=lambda data: file.write(data) if file.tell() < 3 * 4096 else raising(NO_SPACE)(),
    )
    with pytest.raises(OSError, match="No space left"):
        shared.reach(5 * 4096)
    assert os.fstat(file.fileno()).st_size == 4096
    file.close()


def test_python_code_is_read_ahead_in_a_process_and_by_the_loop_where_it_cannot_go(monkeypatch, caplog):
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False}) as loader:
        assert loader.footprint.workers[:3] == ("process", 1, "Python code reads the samples")
        assert [batch["y"].tolist() for batch in loader] == np.arange(100).reshape(10, 10).tolist()
    source = Numbers(act=threading.Lock().release)  # a lock cannot be pickled
    caplog.set_level(logging.INFO)
    with AsyncLoader(source, {"batch_size": 10, "shuffle": False}) as loader:
        assert [batch["y"].tolist() for batch in loader] == np.arange(100).reshape(10, 10).tolist()
        assert loader.footprint.workers.kind == "caller"
    assert "Numbers: no workers (it cannot be pickled (TypeError: " in caplog.text
    loader = loader_of(source)
    with pytest.raises(ConfigError, match=r"^worker_kind: Numbers cannot go .*pickle.*; .* set worker_kind=thread"):
        next(loader)


def test_a_source_for_which_there_is_no_room_is_an_error_that_says_so(monkeypatch):
    def without_room(self, _):
        self.folder, self.file = "/dev/shm", open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(SharedFile, "__init__", without_room)
    error = pytest.raises(MemoryBudgetError, match=r"for a copy of the source .*No space left")
    with loader_of(Numbers()) as loader, error:
        next(loader)


def test_a_source_of_large_arrays_goes_to_a_process_only_on_demand(monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.processes.shared_memory.MOST_COPIED_BYTES", 100)
    assert loader_of(Numbers(), worker_kind="auto").footprint.workers.why.startswith("a copy of it takes ")
    assert loader_of(Numbers()).footprint.workers.kind == "process"
