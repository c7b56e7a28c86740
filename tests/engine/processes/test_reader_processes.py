"""A reader process delivers the same batches as threads, and its end is an error that says what it read."""

import collections
import contextlib
import copy
import errno
import io
import itertools
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.processes import wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import BadInChild, BadInChildAtLength, Numbers
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader, Balanced, DatasetSource, HDF5Source, ManifestSource, StorageLayout
from lit_async_data.engine.processes.__main__ import Endpoint
from lit_async_data.engine.processes.messages import REPORT_BYTES
from lit_async_data.engine.processes.pipeline import ProcessPipeline
from lit_async_data.engine.processes.pipelines import pipeline_of
from lit_async_data.engine.processes.reader_server import LogToParent
from lit_async_data.engine.processes.shared_slots import NOTED, SharedSlots
from lit_async_data.errors import (
    AsyncDataError,
    ClosedError,
    ConfigError,
    CorruptError,
    ReadError,
    StalledError,
    WorkerError,
)
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.plan import BatchIndex, EpochPlan

# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pytest.importorskip("pyarrow.csv").read_csv(io.BytesIO(b"a\n1\n"))

pytestmark = pytest.mark.processes
ROWS = 500


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.h5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = random.integers(0, 9, (ROWS, 6, 20, 30), np.uint8)
        file.create_dataset("gzip", data=images, chunks=(16, 6, 20, 30), compression="gzip")
        file["label"] = np.arange(ROWS) % 7
    return path


def source_of(path, **options):
    return HDF5Source(path, {"x": "gzip", "y": "label"}, **options)


def loader_of(source, kind="process", **options):
    return AsyncLoader(source, {"batch_size": 16, "worker_kind": kind, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 1, "shuffle": "global", "drop_last": True},
        {"workers": 2, "shuffle": "chunk", "shuffle_chunks": 4, "cache_bytes": 2**24},
        {"shuffle": "none", "queue_depth": 1},
        {"weights": Balanced("y"), "epoch_size": 200},
    ],
    ids=["auto", "global", "chunks, cached", "as stored", "drawn"],
)
def test_a_process_delivers_the_batches_of_threads(file, options):
    def batches(kind):
        options_of_all = {"return_indices": True, "seed": 3, **options}
        with contextlib.closing(source_of(file)) as source, loader_of(source, kind, **options_of_all) as loader:
            assert loader.footprint.workers.kind == kind
            return [{key: value.clone() for key, value in batch.items()} for _ in range(2) for batch in loader]

    threads, process = batches("thread"), batches("process")
    assert len(threads) == len(process)
    for one, other in zip(threads, process):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key])
            assert value.stride() == other[key].stride()


@pytest.mark.parametrize(
    ("layout", "transform", "is_here"),
    [
        (StorageLayout(reading="decoded"), None, True),
        (StorageLayout(reading="opened"), None, True),
        (StorageLayout(reading="locked"), None, False),
        (StorageLayout(reading="python"), None, False),
        (StorageLayout(reading="decoded"), copy.copy, False),
        (StorageLayout((ChunkRun(100, 1),), compressed=True, reading="decoded"), None, True),
        (StorageLayout((ChunkRun(100, 4),), compressed=True, reading="decoded"), None, False),
    ],
    ids=["decoded", "opened", "locked", "python", "transformed", "one per chunk", "four per chunk"],
)
def test_the_first_batch_waits_for_no_process_where_that_costs_nothing(layout, transform, is_here):
    options = {"batch_size": 10, "worker_kind": "process"}
    with AsyncLoader(acts.ReadBy(layout), options, sample_transform=transform) as loader:
        first, *others = [set(batch["y"].tolist()) for batch in loader]
        process = {each.channel.pid for each in loader.machinery.engine.feed.pipeline._readers}
    assert first == ({os.getpid()} if is_here else process)
    assert set().union(*others) == process


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
    loader = AsyncLoader(source, {"batch_size": 10, "worker_kind": "process"})
    with pytest.raises(ConfigError, match=r"^worker_kind: Numbers cannot go .*pickle.*; .* set worker_kind=thread"):
        next(loader)


def test_passes_that_end_early_and_other_epochs_go_on_where_they_should(file):
    with contextlib.closing(source_of(file)) as source:
        with loader_of(source, "thread", seed=5) as loader:
            wanted = {epoch: [batch["y"].tolist() for batch in _epoch(loader, epoch)] for epoch in (0, 1, 7)}
        with loader_of(source, seed=5) as loader:
            assert [batch["y"].tolist() for batch in _epoch(loader, 0)] == wanted[0]
            begun = iter(_epoch(loader, 7))
            assert [next(begun)["y"].tolist() for _ in range(5)] == wanted[7][:5]
            assert [batch["y"].tolist() for batch in _epoch(loader, 1)] == wanted[1]
            loader.machinery.wiring.steps_wanted = lambda: (3, 4)
            begun = iter(_epoch(loader, 7))
            assert [next(begun)["y"].tolist() for _ in range(3)] == wanted[7][:3]
            assert [batch["y"].tolist() for batch in _epoch(loader, 1)] == wanted[1]


def _epoch(loader, epoch):
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("budget", [None, 3_000_000], ids=["enough memory", "little memory"])
def test_batches_that_the_user_keeps_never_change(file, budget):
    with contextlib.closing(source_of(file)) as source:
        with h5py.File(file) as opened:
            images = opened["gzip"][...]
        options = {"batch_size": 32, "memory_budget": budget, "return_indices": True, "shuffle_chunks": 4}
        with AsyncLoader(source, {"worker_kind": "process", **options}) as loader:
            kept = [batch for _ in range(2) for batch in loader]
            assert (loader.stats().copied > 0) == (budget is not None)
            slots = loader.stats().read.slots
            assert slots > 5 if budget is None else slots * loader.footprint.layout.nbytes <= budget
    for batch in kept:  # also after the process and its memory are gone
        assert np.array_equal(batch["x"].numpy(), images[batch["index"].numpy()])


def test_files_of_a_table_come_through_a_process(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, 8, 8, 3), np.uint8)
    for number, each in enumerate(pixels):
        image.fromarray(each).save(tmp_path / f"{number}.png")
    table = tmp_path / "t.csv"
    table.write_text("path,y\n" + "".join(f"{number}.png,{number}\n" for number in range(20)))
    with AsyncLoader(ManifestSource(table, {"x": "path", "y": "y"}), {"batch_size": 8}) as loader:
        assert loader.footprint.workers.kind == "process"
        for batch in loader:
            assert np.array_equal(batch["x"].numpy().transpose(0, 2, 3, 1), pixels[batch["y"].numpy()])


def test_a_source_of_the_users_own_program_travels_by_value(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy as np\n"
        "from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source\n"
        "class Mine(Source):\n"
        "    spec = BatchSpec({'y': FieldSpec((), np.dtype('i8'))}, as_mapping=True)\n"
        "    def __len__(self): return 10\n"
        "    def read_into(self, samples, out): out['y'][...] = samples + OFFSET\n"
        "OFFSET = 5\n"
        "with AsyncLoader(Mine(), dict(batch_size=10, shuffle=False, worker_kind='process')) as loader:\n"
        "    print(next(iter(loader))['y'].tolist())\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]\n", done.stderr


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (acts.fail, ReadError, r"batch 3 of epoch 0 \(samples 30, 31, 32, .*OSError: \[Errno 5\]"),
        (acts.fail_strangely, ReadError, "batch 3 of epoch 0 .*UnpicklableError: odd and even"),
        (acts.damage, CorruptError, "x.h5:/data, row 33: bad"),
    ],
)
def test_an_error_comes_at_its_place_with_type_sample_and_traceback(act, kind, message):
    with AsyncLoader(Numbers(33, act), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        with pytest.raises(kind, match=message) as caught:
            next(loader)
        assert (caught.value.stage, caught.value.worker) == ("read", 0)
        assert caught.value.sample_id == (33 if act is acts.damage else 30)
        notes = "\n".join(caught.value.__notes__)
        assert "In reader process" in notes
        assert f"in {act.__name__}" in notes  # the traceback
        assert isinstance(caught.value.__cause__, OSError) == (act is acts.fail)
        assert [next(loader)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]


@pytest.mark.parametrize(
    ("act", "how"), [(acts.crash, "was killed by SIGSEGV"), (acts.leave, "ended with exit code 3")]
)
def test_the_end_of_the_process_is_an_error_that_says_what_it_read(act, how):
    with AsyncLoader(Numbers(33, act), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        what = r"while it read sample 33 of epoch 0 \(row 33 of Numbers\)"
        with pytest.raises(WorkerError, match=rf"reader process \d+ {how}.*{what}") as caught:
            list(loader)
        error = caught.value
        assert (error.stage, error.sample_id, error.row, error.file) == ("read", 33, 33, "Numbers")
        assert next(loader)["y"][0].item() == 40


PROCESSES = pytest.mark.parametrize(
    ("workers", "chunk", "size"), [(1, 1, 1), (2, 4, 10)], ids=["one process", "two that share"]
)


def deadly(sample, chunk, bad=()):
    return acts.Deadly(sample, StorageLayout((ChunkRun(100, chunk),), compressed=True, reading="python"), bad)


def around(workers, on_error="skip", size=10):
    options = {"batch_size": size, "shuffle": False, "worker_kind": "process", "max_bad": 9}
    return {**options, "workers": workers, "on_error": on_error}


@PROCESSES
def test_a_sample_transform_that_ends_processes_is_named_by_its_stage(workers, chunk, size):
    with AsyncLoader(deadly(-1, chunk), around(workers, "raise", size), sample_transform=acts.kill_at_33) as loader:
        with pytest.raises(WorkerError, match="while it transformed sample 33 of epoch 0") as caught:
            list(loader)
        assert (caught.value.stage, caught.value.row) == ("transform", 33)


def test_of_many_samples_that_were_being_read_the_first_are_listed():
    """Small batches are read together, so any of a few hundred samples may have ended the process."""
    options = {"batch_size": 80, "shuffle": False, "worker_kind": "process", "restarts": 0}
    with AsyncLoader(Numbers(33, acts.crash), options) as loader:
        with pytest.raises(WorkerError, match=r"samples 0, 1, 2, … \(80 in all\)") as caught:
            list(loader)
        assert caught.value.__notes__ == [
            f"samples of epoch 0 that were being read: the first {NOTED} {list(range(NOTED))}"
        ]


# Two processes that share nothing; and whatever they call where they share batches.
@pytest.mark.parametrize(
    ("workers", "chunk", "hooks"),
    [
        (2, 1, {}),
        (2, 4, {}),
        (2, 4, {"batch_transform": acts.counted}),
        (2, 4, {"sample_transform": acts.kill_at_33, "batch_transform": acts.counted}),
    ],
)
def test_a_sample_that_ends_processes_is_read_around_and_never_read_again(workers, chunk, hooks, caplog):
    source = deadly(-1 if "sample_transform" in hooks else 33, chunk)
    with AsyncLoader(source, around(workers), **hooks) as loader:
        for _ in range(2):
            assert [row for batch in loader for row in batch["y"].tolist()] == [*range(33), *range(34, 100)]
        assert loader.machinery.wiring.quarantine.known == {33}
    assert sum("a new one takes its place" in line for line in caplog.messages) == 2


def test_a_sample_of_a_dataset_that_reads_whole_batches_is_known_too():
    with AsyncLoader(DatasetSource(acts.DeadlyItems()), around(1), batch_transform=acts.counted) as loader:
        assert [row for batch in loader for row in batch["y"].tolist()] == [*range(33), *range(34, 100)]


@pytest.mark.parametrize(("workers", "chunk"), [(1, 1), (2, 4)])
def test_a_sample_that_ends_processes_is_no_substitute(workers, chunk):
    plan = EpochPlan(length=100, batch_size=10, shuffle="none", seed=0, epoch=0)
    first, second = (plan.substitute(33, attempt) for attempt in range(2))
    with AsyncLoader(deadly(first, chunk, {33}), around(workers, "substitute")) as loader:
        assert next(itertools.islice(loader, 3, None))["y"].tolist() == [30, 31, 32, second, *range(34, 40)]
        assert loader.machinery.wiring.quarantine.known == {33, first}


@PROCESSES
def test_a_batch_transform_that_ends_processes_is_an_error(workers, chunk, size):
    first = 33 // size * size
    with AsyncLoader(deadly(-1, chunk), around(workers, size=size), batch_transform=acts.kill_at_33) as loader:
        found = itertools.islice(loader, first // size)
        assert [batch["y"][0].item() for batch in found] == list(range(0, first, size))
        with pytest.raises(WorkerError, match=rf"while it transformed samples? {first}") as caught:
            loader.next()
        assert (caught.value.stage, caught.value.row) == ("transform", first)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_sample_that_ends_more_processes_than_restarts_is_an_error_in_its_place(restarts, caplog):
    options = {"batch_size": 10, "shuffle": False, "worker_kind": "process", "restarts": restarts}
    with AsyncLoader(Numbers(33, acts.kill), options) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            next(loader)
        assert caught.value.sample_id == (33 if restarts else 30)
        assert loader.state_dict()["position"] == 40
        if restarts:  # else its slot was not read again, and the next batch may have been in it
            assert next(loader)["y"][0].item() == 40
    assert sum("while it read sample" in line and "epoch 0" in line for line in caplog.messages) == restarts + 1


@pytest.mark.parametrize("name", ["os.memfd_create", "mmap.mmap", "os.pipe", "socket.socketpair"])
def test_a_want_of_descriptors_is_named_with_the_limit_to_raise(name, monkeypatch):
    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    loader = AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process"})
    with monkeypatch.context() as patched:
        patched.setattr(name, none_left)
        with loader, pytest.raises(AsyncDataError, match=r"Too many open files.*ulimit -n"):
            next(loader)


def test_a_process_that_was_killed_for_lack_of_memory_says_so(monkeypatch, caplog):
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        next(loader)
        monkeypatch.setattr("lit_async_data.engine.processes.channel.out_of_memory_kills", lambda: 10**9)
        os.kill(killed := pid_of(loader), signal.SIGKILL)
        while pid_of(loader) == killed:
            loader.next()
    assert "was killed by SIGKILL (out of memory: the kernel has killed processes of this container" in caplog.text


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (signal.SIGRTMIN + 5, f"was killed by signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_a_killed_process_is_named_and_replaced(number, how, caplog):
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        seen, killed = [next(loader)["y"][0].item()], pid_of(loader)
        os.kill(killed, number)
        while pid_of(loader) == killed:
            seen.append(loader.next()["y"][0].item())
        seen += [loader.next()["y"][0].item() for _ in range(20)]
        assert seen == [10 * (place % 10) for place in range(len(seen))]
    (line,) = (line for line in caplog.messages if f"reader process {killed} {how}" in line)
    assert line.endswith("; a new one takes its place")


def pid_of(loader):
    pipeline = loader.machinery.engine.feed.pipeline
    assert isinstance(pipeline, ProcessPipeline)
    return pipeline._readers[0].channel.pid


def test_a_reason_longer_than_the_pipe_arrives_whole():
    source = BadInChildAtLength()
    with (
        AsyncLoader(source, {"batch_size": 10, "worker_kind": "process"}) as loader,
        pytest.raises(WorkerError, match="failed: ImportError: xxx") as caught,
    ):
        next(loader)
    assert str(caught.value).count("x") >= 2**18


def test_a_process_that_cannot_begin_is_an_error_with_its_reason():
    with AsyncLoader(BadInChild(), {"batch_size": 10, "worker_kind": "process"}) as loader:
        with pytest.raises(WorkerError, match=r"failed: ImportError: no such library") as caught:
            next(loader)
        assert isinstance(caught.value.__cause__, ImportError)


def test_a_process_that_does_not_answer_is_a_stall_that_says_what_it_reads(capfd):
    options = {"batch_size": 10, "shuffle": False, "worker_kind": "process"}
    with AsyncLoader(Numbers(33, acts.stop), options) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        pipeline = loader.machinery.engine.feed.pipeline
        while not any(note.samples[0] == 30 for note in pipeline._memory.being_read(slice(None))):
            pass
        pipeline.timeout_s = 0.5  # the start of the process may take longer
        what = r"batch 3 of epoch 0 .* reads samples 30, 31, 32, … \(10 in all\) of epoch 0 .*, for \d"
        with pytest.raises(StalledError, match=what) as caught:
            next(loader)
        error = caught.value
        assert (error.stage, error.worker, error.sample_id, error.row, error.file) == ("read", 0, 30, 30, "Numbers")
        stacks = capfd.readouterr().err
        assert stacks.index(f"threads of process {os.getpid()}") < stacks.index(f"reader process {pid_of(loader)}:")
        assert " in stop\n" in stacks


def test_a_stopped_process_is_a_stall_that_says_so_and_ends_with_its_loader(capfd):
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        next(loader)
        loader.machinery.engine.feed.pipeline.timeout_s = 0.5
        os.kill(stopped := pid_of(loader), signal.SIGSTOP)
        with pytest.raises(StalledError, match=rf"reader process {stopped} \(stopped by a signal"):
            collections.deque(iter(loader.next, None))
        assert "no answer: it is stopped" in capfd.readouterr().err
    wait_for_the_end_of(stopped)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_program_ends_though_a_read_is_stuck_after_a_warning_and_an_error(kind, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy as np\n"
        "from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source, StalledError\n"
        "from lit_async_data.engine import supervisor\n"
        "supervisor.THREADS_S = 0.1\n"
        "class Mine(Source):\n"
        "    spec = BatchSpec({'y': FieldSpec((), np.dtype('i8'))}, as_mapping=True)\n"
        "    def __len__(self): return 100\n"
        "    def read_into(self, samples, out):\n"
        f"        if 10 in samples: open({str(tmp_path / 'pipe')!r})\n"
        f"loader = AsyncLoader(Mine(), dict(batch_size=10, shuffle=False, worker_kind={kind!r}, warn_after_s=0.1))\n"
        "next(loader)\n"
        "loader.machinery.engine.feed.pipeline.timeout_s = 1.2\n"
        "try: next(loader)\n"
        "except StalledError as error: print(error.stage, error.worker, error.sample_id, error.file)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "read 0 10 Mine\n"), done.stderr
    warned = [line for line in done.stderr.splitlines() if "s for batch 1 of epoch 0 (stage" in line]
    assert "samples 10, 11, 12, … (10 in all)" in warned[0]
    assert "row 10 of Mine" in warned[0]
    assert "train.py" in done.stderr.partition("lit_async_data: ")[2]


def test_what_the_process_logs_is_logged_here(caplog):
    source = Numbers(33, acts.warn)
    with AsyncLoader(source, {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        list(loader)
    # Once for each epoch that was begun.
    logged = {(record.getMessage(), record.levelname) for record in caplog.records if record.name == "mine"}
    assert logged == {("row 33 is odd", "WARNING")}


def test_a_log_record_that_cannot_be_sent_stops_nothing():
    options = {"batch_size": 10, "shuffle": False, "worker_kind": "process"}
    with AsyncLoader(Numbers(33, acts.warn_with_a_lock), options) as loader:
        assert [next(loader)["y"][0].item() for _ in range(10)] == list(range(0, 100, 10))


def test_the_slots_of_a_reader_process_are_locked_for_a_gpu(monkeypatch):
    locked, gpu = [], torch.device("cuda:1")
    monkeypatch.setattr(
        "lit_async_data.engine.resources.memory.register",
        lambda slot, *, device: locked.append(slot) if device == gpu else pytest.fail("on another device"),
    )
    loader = AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process"})
    setup = loader._setup(loader.footprint)
    process = loader.machinery.wiring.reader_processes
    with contextlib.closing(pipeline_of(setup, process, pin=gpu, options=loader.options)) as pipeline:
        assert [slot.ctypes.data for slot in locked] == [pipeline.pool.memory(slot).ctypes.data for slot in range(5)]
        locked.clear()


def test_a_reader_process_serves_an_accelerator_for_which_its_slots_cannot_be_pinned(monkeypatch):
    streams = FakeStreams("side")
    pretend(monkeypatch, lambda device: streams)
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}) as loader:
        batch = next(loader)
        streams.synchronize()
        assert batch["y"].tolist() == list(range(10))


def test_no_more_slots_are_no_error():
    slots = SharedSlots(100)
    assert [len(slot) for slot in slots.add(2)] == [100, 100]
    assert slots.add(0) == []
    slots.close()


def ends(pid):
    """Whether a process ends within a minute; it need not be a child of this one."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([ended], [], [], 60)[0])
    finally:
        os.close(ended)


def test_the_process_ends_with_its_loader(file):
    with contextlib.closing(source_of(file)) as source:
        loader = loader_of(source)
        next(loader)
        closed = pid_of(loader)
        loader.close()
        loader.close()
        assert ends(closed)
        with pytest.raises(ClosedError):
            next(loader)
        loader = loader_of(source)
        next(loader)
        dropped = pid_of(loader)
        del loader
        assert ends(dropped)


def test_the_process_ends_when_the_trainer_is_killed_even_if_a_fork_of_it_lives(file, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import os, signal\n"
        "from lit_async_data import AsyncLoader, HDF5Source\n"
        f"source = HDF5Source({str(file)!r}, ['gzip'])\n"
        "loader = AsyncLoader(source, dict(batch_size=4, worker_kind='process'))\n"
        "next(loader)\n"
        "fork = os.fork()\n"
        "if not fork: signal.pause()\n"
        "print(loader.machinery.engine.feed.pipeline._readers[0].channel.pid, fork, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as trainer:
        reader, fork = map(int, trainer.stdout.readline().split())
        trainer.kill()
    try:
        assert ends(reader)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_process_ends_when_the_trainer_is_killed_even_if_c_code_holds_its_gil(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        f"sys.path.append({str(Path(acts.__file__).parents[2])!r})\n"
        "from support.sources.reader_sources import Numbers, hold_the_gil\n"
        "from lit_async_data import AsyncLoader\n"
        "loader = AsyncLoader(Numbers(33, hold_the_gil), dict(batch_size=1, shuffle=False, worker_kind='process'))\n"
        "next(loader)\n"
        "print(loader.machinery.engine.feed.pipeline._readers[0].channel.pid, flush=True)\n"
        "list(loader)\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as trainer:
        # The reader may write before the trainer does.
        reader, holding = sorted(trainer.stdout.readline().strip() for _ in range(2))
        assert holding == "holding"
        trainer.kill()
    assert ends(int(reader))


def test_the_process_outlives_the_thread_that_began(file):
    with contextlib.closing(source_of(file)) as source, loader_of(source) as loader:
        wanted = len(loader)
        thread = threading.Thread(target=loader.__next__)
        thread.start()
        thread.join()
        # A signal that the system sends when that thread ends has arrived with the next batches, if there is one.
        assert len(list(loader)) == wanted
        assert len(list(loader)) == wanted


def test_signals_for_the_trainer_do_not_end_the_process(file):
    with contextlib.closing(source_of(file)) as source, loader_of(source) as loader:
        wanted = len(loader)
        next(loader)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid_of(loader), number)
        assert len(list(loader)) == wanted


def test_a_fork_of_the_trainer_is_told_to_build_its_own_loader(file):
    with contextlib.closing(source_of(file)) as source, loader_of(source) as loader:
        next(loader)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                next(loader)
            try:
                next(loader)
            except WorkerError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        assert b"reader process does not serve it; build it in the child" in os.read(reading, 1000)
        os.close(reading)
        next(loader)


def sharing(first, *others):
    for other in others:
        other.machinery.wiring.reader_processes = first.machinery.wiring.reader_processes


def test_loaders_that_share_a_process_have_their_own_batches(file):
    with contextlib.closing(source_of(file)) as source:
        with loader_of(source, "thread", seed=1) as one, loader_of(source, "thread", shuffle=False) as other:
            wanted = [batch["y"].tolist() for batch in one], [batch["y"].tolist() for batch in other]
        with loader_of(source, seed=1) as train, loader_of(source, shuffle=False) as val:
            sharing(train, val)
            batches = iter(train)
            seen = [next(batches)["y"].tolist() for _ in range(3)]
            assert [batch["y"].tolist() for batch in val] == wanted[1]
            assert pid_of(train) == pid_of(val)
            val.close()
            assert seen + [batch["y"].tolist() for batch in _rest(batches)] == wanted[0]


def _rest(batches):
    while (batch := next(batches, None)) is not None:
        yield batch


def test_a_shared_process_ends_with_its_last_loader_and_starts_anew():
    train, val = (AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process"}) for _ in range(2))
    sharing(train, val)
    next(train), next(val)
    process = pid_of(train)
    end = os.pidfd_open(process)
    train.close()
    assert not select.select([end], [], [], 0)[0]
    next(val)
    val.close()
    assert select.select([end], [], [], 60)[0]
    os.close(end)
    with AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process"}) as third:
        sharing(train, third)
        next(third)
        assert pid_of(third) != process


def test_all_loaders_of_a_shared_process_that_is_killed_go_on_with_the_next(caplog):
    options = {"batch_size": 10, "shuffle": False, "worker_kind": "process"}
    loaders = [AsyncLoader(Numbers(), options) for _ in range(3)]
    sharing(*loaders)
    for loader in loaders[:2]:
        next(loader)
    killed = pid_of(loaders[0])
    os.kill(killed, signal.SIGKILL)
    for loader in loaders[:2]:
        number = 1
        while pid_of(loader) == killed:
            assert loader.next()["y"][0].item() == 10 * (number % 10)
            number += 1
    next(loaders[2])
    assert len({pid_of(loader) for loader in loaders}) == 1
    assert sum(f"reader process {killed} was killed" in line for line in caplog.messages) == 2
    for loader in loaders:
        loader.close()


def test_a_source_that_cannot_begin_leaves_a_shared_process_to_the_others():
    good, bad = (AsyncLoader(each, {"batch_size": 10, "worker_kind": "process"}) for each in (Numbers(), BadInChild()))
    sharing(good, bad)
    next(good)
    with pytest.raises(WorkerError, match="failed: ImportError"):
        next(bad)
    bad.close()
    assert len(list(good)) == 10
    good.close()


def test_a_read_that_hangs_does_not_keep_the_others_from_going_on():
    stuck, good = (
        AsyncLoader(each, {"batch_size": 10, "shuffle": False, "worker_kind": "process"})
        for each in (Numbers(33, acts.stop), Numbers())
    )
    sharing(stuck, good)
    assert next(stuck)["y"].tolist() == list(range(10))
    next(good)
    stuck.close()
    assert len(list(good)) == 10
    good.close()


def test_a_copy_of_a_loader_and_a_pickled_process_begin_with_none():
    with AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process"}) as loader:
        other = copy.deepcopy(loader)
        next(loader)
        next(other)
        assert pid_of(loader) != pid_of(other)
        other.close()
        process = loader.machinery.wiring.reader_processes
        assert pickle.loads(pickle.dumps(process)) is not process


@pytest.mark.parametrize("act", [acts.fail_at_length, acts.warn_at_length])
def test_a_loader_whose_reports_are_not_read_does_not_hold_up_the_others(act):
    flooded = AsyncLoader(Numbers(33, act), {"batch_size": 1, "shuffle": False, "worker_kind": "process"})
    good = AsyncLoader(Numbers(), {"batch_size": 10, "worker_kind": "process", "timeout_s": 60})
    sharing(flooded, good)
    iter(flooded)
    flooded.machinery.prefetch(copy=False)
    for _ in range(20):
        assert len(list(good)) == 10
    with contextlib.suppress(ReadError):
        for _ in range(50):
            next(flooded)
    flooded.close()
    good.close()


def test_the_end_of_a_loader_reaches_a_shared_process_though_a_fork_keeps_its_pipe():
    options = {"batch_size": 10, "worker_kind": "process", "workers": 1}
    loaders = [AsyncLoader(Numbers(), options) for _ in range(2)]
    sharing(*loaders)
    for loader in loaders:
        next(loader)
    descriptors = Path("/proc") / str(pid_of(loaders[0])) / "fd"
    both = len(list(descriptors.iterdir()))
    (reader,) = loaders[1].machinery.engine.feed.pipeline._readers
    copies = [os.dup(end.fileno()) for end in reader.channel._end if not end.closed]
    loaders[1].close()
    while len(list(descriptors.iterdir())) > both - 6:  # its setup, its slots and three pipes
        next(iter(loaders[0].next, None))
    for copied in copies:
        os.close(copied)
    loaders[0].close()


def test_a_log_record_that_cannot_be_read_here_is_reported_and_costs_nothing(caplog):
    with AsyncLoader(
        Numbers(33, acts.warn_oddly), {"batch_size": 10, "shuffle": False, "worker_kind": "process"}
    ) as loader:
        assert [next(loader)["y"][0].item() for _ in range(10)] == list(range(0, 100, 10))
        next(iter(loader.next, None))
    assert "a log record of another process could not be read: TypeError" in caplog.text


def test_a_loader_that_another_thread_closes_says_so():
    """1. The consumer has checked that the loader is open. 2. Another thread closes it. 3. The consumer asks for a
    batch."""
    loader = loader_of(Numbers(64))
    next(iter(loader))
    pipeline = loader._run.engine.feed.pipeline
    loader.close()
    with pytest.raises(ClosedError, match="build a new one"):
        pipeline.get(BatchIndex(0, 1))


def test_a_reader_thread_that_has_ended_is_an_error_soon():
    """Nobody in the reader process waits for a batch, and would find out."""
    source = Numbers(64, act=acts.break_the_next_task)
    failed = pytest.raises(WorkerError, match=r"reader process \d+ failed: WorkerError: .* its thread has ended")
    with loader_of(source, shuffle=False, timeout_s=60) as loader, failed:
        list(loader)


def test_a_setup_that_cannot_be_read_leaves_no_descriptor_open(tmp_path):
    """A reader process may go on for other loaders."""
    ends = [*os.pipe(), *os.pipe(), *os.pipe()]
    setup = os.open(tmp_path / "empty", os.O_RDWR | os.O_CREAT)
    (reports, sent), others = ends[:2], ends[4:]
    slots, end = ends[2:4]
    endpoint = Endpoint([setup, slots, end, sent, *others], 0, LogToParent())
    endpoint._close()
    assert os.read(reports, REPORT_BYTES)
    os.close(reports)
    for descriptor in (setup, slots, end, sent, *others):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
