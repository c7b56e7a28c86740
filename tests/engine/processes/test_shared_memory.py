"""What processes share: slots, tasks and reports, and what libraries keep for a whole process."""

import contextlib
import errno
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from PIL import Image, ImageFile
from support.failures import raising
from support.processes import loader_of, running
from support.sources import reader_sources as acts
from support.sources.reader_sources import Numbers

from lit_async_data import AsyncLoader, DatasetSource, HDF5Source
from lit_async_data.engine.processes import shared_memory
from lit_async_data.engine.processes.shared_memory import (
    HEAD_BYTES,
    REPORT,
    REPORT_BYTES,
    Report,
    ReportKind,
    Reports,
    SharedFile,
    SharedSlots,
    Task,
    adopt,
    environment,
    settings_here,
)
from lit_async_data.errors import ConfigError, MemoryBudgetError, ReadError
from lit_async_data.order.plan import BatchIndex, Limits, Share

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


@pytest.mark.parametrize("first", [0, 2**62])
def test_a_task_arrives_as_it_was_sent(first):
    keys = BatchIndex(first + 2, first + 3)
    limits = Limits(first + 8, first + 9, first + 10, first + 11)
    task = Task(first, first + 1, keys, first + 4, first + 5, Share(first + 6, first + 7), limits, first > 0, 0)
    assert Task.unpacked(task.packed()) == task


def test_long_reports_of_several_threads_do_not_mix():
    reading, writing = os.pipe()
    reports, length = Reports(writing), 2**18
    with ThreadPoolExecutor(4) as threads, open(reading, "rb") as pipe:
        for number in range(4):
            threads.submit(reports.send, Report(ReportKind.DONE, step=number), bytes([number]) * length)
        for _ in range(4):
            _, size, _, step, *_ = REPORT.unpack(pipe.read(REPORT_BYTES))
            assert (size, set(pipe.read(length))) == (length, {step})
    reports._pipe.close()


@pytest.mark.parametrize("act", [acts.fail_at_length, acts.warn_at_length])
def test_reports_longer_than_the_pipe_arrive_and_do_not_hold_up_the_end(act, caplog):
    with loader_of(Numbers(33, act), batch_size=1) as loader:
        for step in range(40):
            if step == 33 and act is acts.fail_at_length:
                with pytest.raises(ReadError, match="x" * 2**18):
                    next(loader)
            else:
                assert next(loader)["y"].item() == step
    assert sum(line == "x" * 2**18 for line in caplog.messages) == (act is acts.warn_at_length)
    with loader_of(Numbers(2, act), batch_size=1) as loader:
        loader._prefetch()  # what it reports is never read
        while not (reader := running(loader)._readers[0]).channel.ready:
            reader.channel.receive()
    assert reader.channel.process.returncode == 0


@pytest.fixture
def hdf5plugin():
    return pytest.importorskip("hdf5plugin")


def test_what_only_libhdf5_decodes_is_read_in_a_reader_process(h5, hdf5plugin):
    values = np.arange(96, dtype="f4").reshape(8, 12)
    path = h5(data={"data": values, "chunks": (2, 12), **hdf5plugin.Zfp(reversible=True)})
    with loader_of(HDF5Source(path, {"data": "data"}), batch_size=8, workers=1) as loader:
        assert (next(loader)["data"].numpy() == values).all()


class Settings:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return {
            "truncated": bool(ImageFile.LOAD_TRUNCATED_IMAGES),
            "pixels": Image.MAX_IMAGE_PIXELS,
            "complex": h5py.get_config().complex_names == ("real", "imag"),
            "bzip2": bool(h5py.h5z.filter_avail(307)),
            "variable": int(os.environ.get("SET_WHILE_IT_RAN", "-1")),
            "process": os.getpid(),
        }


@pytest.mark.usefixtures("hdf5plugin")
def test_settings_of_pillow_and_h5py_and_the_environment_are_those_of_the_training_process(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12345)
    monkeypatch.setattr(h5py.get_config(), "complex_names", ("real", "imag"))
    monkeypatch.setenv("SET_WHILE_IT_RAN", "7")
    with loader_of(DatasetSource(Settings()), batch_size=4, workers=1) as loader:
        found = {key: value[0].item() for key, value in next(loader).items()}
    assert found.pop("process") != os.getpid()
    assert found == {"truncated": True, "pixels": 12345, "complex": True, "bzip2": True, "variable": 7}


def test_a_process_that_goes_on_takes_back_what_was_taken_back(monkeypatch):
    usual = settings_here(filters=True)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    adopt(*usual)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_folders_of_plugins_are_passed_on(tmp_path):
    h5py.h5pl.append(os.fsencode(tmp_path))
    try:
        listed = "import h5py.h5pl as pl; print([pl.get(n).decode() for n in range(pl.size())])"
        found = subprocess.run([sys.executable, "-c", listed], env=environment(), stdout=subprocess.PIPE, check=True)
    finally:
        h5py.h5pl.remove(h5py.h5pl.size() - 1)
    assert str(tmp_path) in found.stdout.decode()


def test_a_process_without_h5py_and_pillow_imports_neither():
    program = """
import sys
from lit_async_data.engine.processes.shared_memory import adopt, environment, settings_here
before = set(sys.modules)
environment(), adopt(*settings_here(filters=True))
assert not {"h5py", "PIL"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
