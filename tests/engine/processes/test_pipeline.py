"""Reader processes deliver the batches of threads, in order; one that ends is replaced."""

import collections
import contextlib
import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import types
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.processes import in_two_processes, loader_of, pid_of, process_ids, running, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import FailsToStart, KilledAtStart, Numbers, PythonNumbers

from lit_async_data import Balanced, HDF5Source, StorageLayout
from lit_async_data.engine import supervisor
from lit_async_data.engine.device.feeds import CopyFeed
from lit_async_data.engine.processes import pipeline as process_pipeline
from lit_async_data.engine.processes.pipeline import Channel, pipeline_of
from lit_async_data.engine.processes.shared_memory import Task
from lit_async_data.engine.resources import WorkerTuner
from lit_async_data.errors import ClosedError, WorkerError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.plan import BatchIndex

pytestmark = pytest.mark.processes
ORDER = list(range(0, 100, 10))


@pytest.fixture
def stacks(h5):
    data = np.random.default_rng(0).integers(0, 9, (500, 6, 20, 30), np.uint8)
    path = h5(x={"data": data, "chunks": (16, 6, 20, 30), "compression": "gzip"}, y=np.arange(500) % 7)
    with contextlib.closing(HDF5Source(path, {"x": "x", "y": "y"})) as source:
        yield source


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "auto"},
        {"workers": 1, "shuffle": "global", "drop_last": True},
        {"workers": 2, "shuffle": "chunk", "shuffle_chunks": 4, "cache_bytes": 2**24},
        {"shuffle": "none", "queue_depth": 1},
        {"shuffle": "auto", "weights": Balanced("y"), "epoch_size": 200},
    ],
    ids=["auto", "global", "chunks, cached", "as stored", "drawn"],
)
def test_a_process_delivers_the_batches_of_threads(stacks, options):
    def batches(kind):
        with loader_of(stacks, batch_size=16, worker_kind=kind, return_indices=True, seed=3, **options) as loader:
            assert loader.footprint.workers.kind == kind
            return [{key: value.clone() for key, value in batch.items()} for _ in range(2) for batch in loader]

    threads, process = batches("thread"), batches("process")
    assert len(threads) == len(process)
    for one, other in zip(threads, process):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key])
            assert value.stride() == other[key].stride()


def in_chunks(rows, **given):
    return StorageLayout((ChunkRun(100, rows),), compressed=True, reading="decoded", **given)


@pytest.mark.parametrize(
    ("layout", "options", "is_here"),
    [
        (StorageLayout(reading="decoded"), {}, True),
        (StorageLayout(reading="locked"), {}, False),
        (StorageLayout(reading="decoded"), {"hooks": {"sample_transform": copy.copy}}, False),
        (in_chunks(1), {}, True),
        (in_chunks(4), {}, False),
        (in_chunks(5), {}, True),
        (in_chunks(10), {"shuffle": "global"}, False),
        (in_chunks(10, spread=1.5), {}, False),
        (in_chunks(10, order=np.arange(100)[::-1]), {}, False),
    ],
)
def test_the_first_batch_waits_for_no_process_where_that_costs_nothing(layout, options, is_here):
    with loader_of(acts.ReadBy(layout), **options) as loader:
        first, *others = [set(batch["y"].tolist()) for batch in loader]
        process = set(process_ids(loader))
    assert first == ({os.getpid()} if is_here else process)
    assert set().union(*others) == process


def test_passes_that_end_early_and_other_epochs_go_on_where_they_should(stacks):
    def pass_of(loader, epoch, steps=None):
        loader.set_epoch(epoch)
        return [batch["y"].tolist() for batch in itertools.islice(loader, steps)]

    options = {"batch_size": 16, "shuffle": "chunk", "seed": 5}
    with loader_of(stacks, worker_kind="thread", **options) as loader:
        wanted = {epoch: pass_of(loader, epoch) for epoch in (0, 1, 7)}
    with loader_of(stacks, **options) as loader:
        assert pass_of(loader, 0) == wanted[0]
        assert pass_of(loader, 7, 5) == wanted[7][:5]
        assert pass_of(loader, 1) == wanted[1]
        loader._wiring.steps_wanted = lambda: (3, 4)
        assert pass_of(loader, 7, 3) == wanted[7][:3]
        assert pass_of(loader, 1) == wanted[1]


@pytest.mark.parametrize("budget", [None, 3_000_000], ids=["enough memory", "little memory"])
def test_batches_that_the_user_keeps_never_change(stacks, budget):
    with h5py.File(stacks.paths[0]) as opened:
        images = opened["x"][...]
    options = {"shuffle": "chunk", "shuffle_chunks": 4, "memory_budget": budget, "return_indices": True}
    with loader_of(stacks, batch_size=32, **options) as loader:
        kept = [batch for _ in range(2) for batch in loader]
        assert (loader.stats().copied > 0) == (budget is not None)
        slots = loader.stats().slots
        assert slots > 5 if budget is None else slots * loader.footprint.layout.nbytes <= budget
    for batch in kept:  # also after the process and its memory are gone
        assert np.array_equal(batch["x"].numpy(), images[batch["index"].numpy()])


def test_no_more_tasks_are_in_the_pipe_of_a_process_than_it_holds_however_many_are_read_again(monkeypatch):
    """Else this process could wait for room in it while that one waits until its reports are read."""
    counts, most, packed, receive = collections.Counter(), 4, Task.packed, Channel.receive

    def written(task):
        counts["out"] += 1
        counts["most"] = max(counts["most"], counts["out"])
        return packed(task)

    def received(channel):
        try:
            found = receive(channel)
        except WorkerError:
            counts["out"] = 0
            raise
        counts["out"] -= len(found)
        return found

    monkeypatch.setattr(process_pipeline, "MOST_TASKS", most)
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 1e9)  # many batches in a slot
    monkeypatch.setattr(Task, "packed", written)
    monkeypatch.setattr(Channel, "receive", received)
    with loader_of(acts.Deadly(40, 1, reading="copied"), batch_size=1) as loader:
        assert [next(loader)["y"].item() for _ in range(40)] == list(range(40))
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            next(loader)
        assert [next(loader)["y"].item() for _ in range(59)] == list(range(41, 100))
    assert counts["most"] == most


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_batch_that_ends_more_processes_than_restarts_is_an_error_in_its_place(restarts, caplog):
    with loader_of(Numbers(33, acts.kill), restarts=restarts) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            next(loader)
        assert (caught.value.stage, caught.value.file) == ("read", "Numbers")
        assert loader.state_dict()["position"] == 40
        if restarts:  # else its slot was not read again, and the next batch may have been in it
            assert next(loader)["y"][0].item() == 40
    named = "while it read batch 3 of epoch 0" if restarts else "while it read batch"
    assert sum(named in line for line in caplog.messages) == restarts + 1


def test_a_process_that_a_realtime_signal_killed_is_named_and_replaced(caplog):
    number = signal.SIGRTMIN + 5
    with loader_of(Numbers()) as loader:
        seen, killed = [next(loader)["y"][0].item()], pid_of(loader)
        os.kill(killed, number)
        while pid_of(loader) == killed:
            seen.append(loader.next()["y"][0].item())
        seen += [loader.next()["y"][0].item() for _ in range(20)]
        assert seen == [10 * (place % 10) for place in range(len(seen))]
    (line,) = (line for line in caplog.messages if f"reader process {killed} was killed by signal {number}" in line)
    assert line.endswith("; a new one takes its place")


def test_a_program_ends_though_a_read_is_stuck_after_a_warning_and_an_error(tmp_path):
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
        "kept = []\n"
        "for kind in ('thread', 'process'):\n"
        "    loader = AsyncLoader(Mine(), dict(batch_size=10, shuffle=False, worker_kind=kind, warn_after_s=0.1))\n"
        "    next(loader)\n"
        "    loader._run.engine.feed.pipeline.timeout_s = 1.2\n"
        "    try: next(loader)\n"
        "    except StalledError as error: print(kind, error.stage, error.worker, error.sample_id, error.file)\n"
        "    kept.append(loader)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "thread read 0 10 Mine\nprocess read 0 10 Mine\n"), done.stderr
    warned = [line for line in done.stderr.splitlines() if "s for batch 1 of epoch 0 (stage" in line]
    for line in warned[0], warned[-1]:
        assert "samples 10, 11, 12, … (10 in all)" in line
        assert "row 10 of Mine" in line
    assert "train.py" in done.stderr.partition("lit_async_data: ")[2]


def test_a_fork_of_the_trainer_is_told_to_build_its_own_loader():
    with loader_of(Numbers()) as loader:
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


FIRST = BatchIndex(0, 0)
ASKED = {
    "a batch": lambda pipeline: pipeline.get(FIRST),
    "another setup": lambda pipeline: pipeline.renew(pipeline.setup, FIRST),
    "to wait": lambda pipeline: pipeline._wait(FIRST, 0.0),
    "workers": lambda pipeline: pipeline._tune(types.SimpleNamespace(count=1, waited=lambda *_: 2), 0.0),
    "whether it works": lambda pipeline: pipeline.check(),
}


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize(
    ("asked", "late"),
    [*((asked, False) for asked in ASKED), ("a batch", True), ("to wait", True), ("whether it works", True)],
)
def test_a_loader_that_another_thread_closes_says_so(kind, asked, late, monkeypatch):
    """1. The consumer has checked that the loader is open. 2. Another thread closes it. 3. The consumer asks for
    something; or 2 follows 3."""
    loader = loader_of(Numbers(64), worker_kind=kind)
    next(iter(loader))
    pipeline = running(loader)
    if late:
        waits = process_pipeline.wait_for_reports
        monkeypatch.setattr(process_pipeline, "wait_for_reports", lambda *args: (loader.close(), waits(*args)))
        monkeypatch.setattr(pipeline, "_guard", ClosesMeanwhile(loader))
    else:
        loader.close()
    with pytest.raises(ClosedError, match="build a new one"):
        ASKED[asked](pipeline)
    loader.close()


class ClosesMeanwhile:
    """A `ProcessGuard` that closes a loader when it is asked which process this is."""

    forked = False

    def __init__(self, loader):
        self.loader = loader

    @property
    def pid(self):
        self.loader.close()
        return os.getpid()


def test_each_worker_has_a_process_and_all_are_told_to_end_before_one_is_waited_for(monkeypatch):
    told, end = [], supervisor.end
    with loader_of(PythonNumbers(), workers=2) as loader:
        assert str(loader.footprint.workers).startswith("2 reader processes (")
        processes = in_two_processes(loader)
        names = {(Path("/proc") / str(pid) / "comm").read_text() for pid in processes}
        assert names == {"lit_data reader\n"}
        channels = [reader.channel for reader in running(loader)._readers]
        monkeypatch.setattr(
            supervisor, "end", lambda ended: (told.extend(each.tasks.closed for each in channels), end(ended))
        )
    assert told == [True, True]
    for pid in processes:
        wait_for_the_end_of(pid)


@pytest.mark.parametrize("rest", [False, True])
def test_processes_that_are_killed_are_each_named_once_and_cost_nothing(rest, caplog):
    with loader_of(PythonNumbers(), workers=2) as loader:
        killed, seen = in_two_processes(loader), []
        pipeline = running(loader)
        while rest and pipeline.ready < len(pipeline.pool):  # until all slots are filled, and nobody reads
            pipeline.poll(None)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        while killed & set(process_ids(loader)):
            seen += [batch["y"][0].item() for batch in loader]
        assert seen == ORDER * (len(seen) // len(ORDER))
        in_two_processes(loader)
    for pid in killed:
        said = f"reader process {pid} was killed by SIGKILL (out of memory?"
        assert sum(said in line for line in caplog.messages) == 1


def test_workers_are_added_where_the_loop_waits(monkeypatch, caplog):
    caplog.set_level("INFO")
    counts = [2]
    monkeypatch.setattr(WorkerTuner, "settled", property(lambda tuner: not counts))
    monkeypatch.setattr(WorkerTuner, "waited", lambda tuner, *_: counts.pop())
    monkeypatch.setattr("lit_async_data.engine.resources.cores", lambda ranks=None: 4)
    with loader_of(PythonNumbers(), workers="auto", worker_kind="auto") as loader:
        assert str(loader.footprint.workers) == ("1 reader process, at most 4 (Python code reads the samples)")
        assert [batch["y"][0].item() for batch in loader] == ORDER
        in_two_processes(loader)
    assert "workers=auto: 2 from here on, since the loop waited for batches; workers=2 begins so" in caplog.text


def test_a_process_that_is_killed_while_it_starts_is_replaced_like_any_other(tmp_path, caplog):
    (flag := tmp_path / "flag").touch()
    with loader_of(KilledAtStart(str(flag)), workers=2) as loader:
        assert [batch["y"][0].item() for batch in loader] == ORDER
    assert sum("less); a new one takes its place" in line for line in caplog.messages) == 1
    flag.mkdir()  # which none can remove
    with loader_of(KilledAtStart(str(flag)), workers=2) as loader:
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            next(loader)
        assert caught.value.worker in {0, 1}


def test_one_more_process_that_cannot_start_is_done_without(tmp_path, caplog):
    with loader_of(FailsToStart(str(tmp_path / "flag")), workers=2) as loader:
        in_two_processes(loader)
        (tmp_path / "flag").touch()
        running(loader).set_workers(3)
        while "failed: ImportError: no such library; reading goes on with 2" not in caplog.text:
            assert [batch["y"][0].item() for batch in loader] == ORDER
        in_two_processes(loader)


def test_another_number_of_processes_changes_nothing_and_those_too_many_end(stored):
    options = {"shuffle": "chunk", "shuffle_chunks": 3, "seed": 2, "return_indices": True}
    hooks, alone = {"sample_transform": acts.copied}, {"workers": 0, "worker_kind": "thread"}
    with loader_of(stored, hooks, **options, **alone) as one, loader_of(stored, hooks, workers=3, **options) as loader:
        for count in (3, 1, 2):
            assert loader.next()["x"].tolist() == one.next()["x"].tolist()
            before = process_ids(loader)
            running(loader).set_workers(count)
            while running(loader)._dealing != count or len(process_ids(loader)) > count:
                assert loader.next()["x"].tolist() == one.next()["x"].tolist()
            for ended in set(before).difference(process_ids(loader)):
                wait_for_the_end_of(ended)


def test_a_killed_process_has_its_share_read_again(stored, caplog):
    options = {"shuffle": "chunk", "shuffle_chunks": 3, "seed": 2}
    with loader_of(stored, workers=0, worker_kind="thread", **options) as loader:
        wanted = [batch["y"].tolist() for _ in range(20) for batch in loader]
    with loader_of(stored, {"sample_transform": acts.with_process}, workers=2, **options) as loader:
        seen = [loader.next()["y"].tolist() for _ in range(15)]
        killed = process_ids(loader)[1]
        os.kill(killed, signal.SIGKILL)
        seen += [loader.next()["y"].tolist() for _ in range(185)]
        assert seen == wanted
        assert killed not in process_ids(loader)


def test_slots_are_locked_for_a_gpu_as_long_as_a_copy_of_them_is_under_way(monkeypatch):
    """numpy lets views refer to the whole map: the array that is locked is the one that the queue keeps."""
    locked, unlocked, gpu = [], [], torch.device("cuda:1")

    def register(slot, *, device):
        locked.append((slot.ctypes.data, device))
        weakref.finalize(slot, unlocked.append, slot.ctypes.data).atexit = False

    monkeypatch.setattr("lit_async_data.engine.resources.register", register)
    loader = loader_of(Numbers())
    pipeline = pipeline_of(loader._setup(loader.footprint), pin=gpu, options=loader.options)
    assert locked == [(memory.ctypes.data, gpu) for memory in pipeline.pool.memories]
    feed = CopyFeed(pipeline)
    with contextlib.closing(feed):
        host = feed.get(BatchIndex(0, 0))  # as the queue keeps it until the copy is done
    gc.collect()
    assert len(unlocked) == 4  # all others
    del host
    gc.collect()
    assert len(unlocked) == 5
