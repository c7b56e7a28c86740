"""Which readers a loader takes, and how many batches they read together: by what reading costs, cores, and the GIL."""

import copy
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data import AsyncLoader, ManifestSource
from lit_async_data.engine import resources
from lit_async_data.engine.device import streams
from lit_async_data.engine.resources import (
    COALESCED_BATCHES,
    COALESCED_BYTES,
    WINDOW,
    Wanted,
    Workers,
    WorkerTuner,
    cores,
    system_refusal,
)
from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import ChunkRun, MemoryNeeds, StorageLayout
from lit_async_data.testing import ArraySource

LENGTH, BATCH = 4096, 16


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(resources, "system_refusal", lambda: "")
    monkeypatch.setattr(resources, "has_gil", lambda: True)
    monkeypatch.setattr(resources, "cores", lambda ranks=None: 2)


def plan_of(reading, shape=(8,), *, rows=1, order=None, **options):
    arrays = {"x": np.zeros((LENGTH, *shape), np.uint8), "y": np.zeros(LENGTH, np.int64)}
    runs = (ChunkRun(LENGTH, rows),) if rows > 1 else ()
    chunks = StorageLayout(runs, compressed=True, reading=reading, order=order)
    source = ArraySource(arrays, parts={"a": LENGTH}, chunks=chunks)
    return AsyncLoader(source, {"batch_size": BATCH, "shuffle": True, **options}).footprint


@pytest.mark.parametrize("reading", ["copied", "opened", "locked", "decoded", "python"])
@pytest.mark.parametrize(("kind", "workers"), [("auto", 1), ("thread", 1), ("process", 1), ("auto", 0)])
def test_small_batches_are_read_together_but_for_python_code_and_locks(reading, kind, workers):
    """A loop that reads itself copies several batches together, and decodes one."""
    found = plan_of(reading, worker_kind=kind, workers=workers)
    together = reading == "copied" or (workers and reading in ("opened", "decoded"))
    assert found.layout.batches == (COALESCED_BATCHES if together else 1)
    assert found.budget.slot_bytes == found.layout.nbytes


@pytest.mark.parametrize("reading", ["copied", "opened", "decoded"])
def test_batches_that_are_read_together_take_no_more_than_a_few_megabytes(reading):
    shape = (COALESCED_BYTES // BATCH // 3,)
    assert plan_of(reading, shape).layout.batches == 2  # three with the labels are too large
    assert plan_of(reading, (COALESCED_BYTES // BATCH + 1,)).layout.batches == 1


@pytest.mark.parametrize("reading", ["copied", "opened", "decoded"])
def test_batches_that_are_read_together_leave_most_of_a_small_budget_and_come_alone_in_a_smaller_one(reading):
    """For users who keep batches, and for files that are read ahead."""
    alone = plan_of(reading, (1000,), workers=1, memory_budget=5 * 17_000)
    assert alone.layout.batches == 1
    found = plan_of(reading, (1000,), workers=1, memory_budget=5 * 4 * 3 * alone.budget.slot_bytes)
    assert found.layout.batches == 3
    assert found.budget.most_slots == 4 * found.budget.slots == 20


@pytest.mark.parametrize(("kind", "factor"), [("thread", 2), ("process", 1)])
def test_slots_that_a_device_copies_from_take_as_much_as_torch_pins(monkeypatch, kind, factor):
    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    options = {"worker_kind": kind, "memory_budget": 10 * 2**20}
    plan = plan_of("python", (2**16,), **options)  # one batch in a slot, and its labels: a little over 1 MiB
    assert 2**20 < plan.layout.nbytes < 1.1 * 2**20
    assert plan.budget.slot_bytes == (2**21 if factor == 2 else plan.layout.nbytes)
    assert plan.budget.most_slots == (5 if factor == 2 else 9)
    plan.budget.check()


def test_a_hook_that_takes_a_whole_batch_gets_one_from_each_slot_in_processes_that_each_cache_all(monkeypatch):
    monkeypatch.setattr(ArraySource, "memory", lambda source, chunks=0: MemoryNeeds(cacheable=1000))
    chunks = StorageLayout((ChunkRun(LENGTH, 4),), compressed=True, reading="decoded")
    source = ArraySource({"x": np.zeros((LENGTH, 8), np.uint8)}, parts={"a": LENGTH}, chunks=chunks)
    options = {"batch_size": BATCH, "shuffle": "global", "workers": 2, "worker_kind": "process"}
    for hook, alone in (("batch_transform", True), ("sample_transform", False)):
        for cache, full in ((10_000, 2000 if alone else 1000), (1000, 1000)):
            found = AsyncLoader(source, options | {"cache_bytes": cache}, **{hook: copy.copy}).footprint
            assert ((found.layout.batches == 1), found.budget.cache) == (alone, full)
            assert (found.amplification > 1) is (alone and cache == 1000)


@pytest.mark.parametrize(
    ("rows", "options", "groups"),
    [
        (64, {"workers": 1}, 1),  # 512 of the 512 samples of a group
        (16, {"workers": 1}, 4),
        (16, {"workers": 2}, 8),
        (2, {"workers": 1}, 32),
    ],
)
def test_decoded_chunks_have_room_for_all_that_is_read_together_and_a_group_more(rows, options, groups):
    """Else a chunk would be decoded for several slots anew."""
    found = plan_of("decoded", rows=rows, shuffle="chunk", shuffle_chunks=8, **options)
    assert (found.layout.batches, found.chunks) == (COALESCED_BATCHES, min(8 * (groups + 1), LENGTH // rows))


@pytest.mark.parametrize(("reading", "most"), [("decoded", 4), ("locked", 1)])
def test_automatic_workers_are_no_reason_to_refuse_a_budget(reading, most, monkeypatch):
    monkeypatch.setattr(resources, "cores", lambda ranks=None: 64)
    monkeypatch.setattr(ArraySource, "memory", lambda source, chunks=0: MemoryNeeds(per_thread=2**20))
    for megabytes in range(1, 10):
        found = plan_of(reading, rows=16, memory_budget=megabytes * 2**20 + 100_000)
        found.budget.check()
        assert found.workers.most == min(megabytes, most)


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("world_size", [1, 8, 128])
def test_what_is_read_together_leaves_most_of_the_budget_with_any_number_of_ranks(kind, world_size, monkeypatch):
    """The chunks that a rank has in hand are those of the steps of all ranks."""
    monkeypatch.setattr(ArraySource, "memory", lambda source, chunks=0: MemoryNeeds(decoded=1000 * chunks))
    chunks = StorageLayout((ChunkRun(LENGTH, 4),), compressed=True, reading="decoded")
    source = ArraySource({"x": np.zeros((LENGTH, 250), np.uint8)}, parts={"a": LENGTH}, chunks=chunks)
    options = {"batch_size": 8, "shuffle": "chunk", "shuffle_chunks": 8, "worker_kind": kind, "workers": 2}
    found = AsyncLoader(source, options | {"memory_budget": 2**21}, world_size=world_size).footprint
    assert found.budget.total <= 2**20


def test_a_loader_takes_no_more_than_the_share_of_its_rank():
    source, options = ArraySource({"y": np.arange(64)}), {"batch_size": 4}
    loader = AsyncLoader(source, options)
    alone = loader.footprint.budget.limit
    loader.local_world_size = 4
    assert loader.footprint.budget.limit == pytest.approx(alone / 4, abs=1)


@pytest.mark.parametrize("reading", ["decoded", "locked", "opened"])
@pytest.mark.parametrize("rows", [1, 16])
def test_what_is_no_python_code_is_read_by_threads_of_one_process(reading, rows):
    found = plan_of(reading, rows=rows, workers=2, worker_kind="process")
    assert (found.workers.apart, found.workers.threads, found.budget.scratch) == (False, 2, 0)


@pytest.mark.parametrize(
    ("shuffle", "said"),
    [
        ("global", "^shuffle=global: .* 9 share .*; shuffle=chunk decodes each chunk once"),
        ("chunk", "^shuffle=chunk .* windows reach .* smaller chunks"),
    ],
)
def test_what_is_decoded_in_vain_is_said_with_what_helps(shuffle, said):
    source = ArraySource({"y": np.arange(90)}, chunks=StorageLayout((ChunkRun(90, 9),), compressed=True))
    order = SimpleNamespace(decks=SimpleNamespace(shuffle=shuffle), deck=SimpleNamespace(chunk_orders=[]))
    footprint = SimpleNamespace(workers=SimpleNamespace(kind="thread"), amplification=2.5)
    (line,) = resources.slow(source, None, footprint, order, ahead=True)
    assert re.search(said, line)


class Loop:
    """A loop that waits as long as its workers make it wait.

    Args:
        load_s: Seconds that one worker needs for a batch.
        step_s: Seconds that the loop needs for a step.
        useful: Workers that run side by side; more share their time.
    """

    def __init__(self, load_s, step_s, useful, most=8):
        self.now, self.batches = 0.0, 0
        self.load_s, self.step_s, self.useful = load_s, step_s, useful
        self.tuner = WorkerTuner(1, most, window_s=0.25, clock=lambda: self.now)
        self.counts = [1]

    def run(self, steps):
        for _ in range(steps):
            each = self.load_s / min(self.tuner.count, self.useful)
            waits = max(each - self.step_s, 0.0)
            self.now += self.step_s + waits
            self.batches += 1
            if waits:
                self.counts.append(self.tuner.waited(waits, self.batches))
        return self.tuner.count


@pytest.mark.parametrize(
    ("load_s", "step_s", "useful", "found"),
    [
        (0.1, 0.0, 3, 3),  # no more than run side by side
        (0.1, 0.03, 8, 4),  # no more than the loop needs
        (0.1, 0.2, 8, 1),  # it never waits
        (0.1, 0.0, 1, 1),  # threads that wait for one lock
        (0.1, 0.0, 20, 8),  # no more than there may be
    ],
)
def test_as_many_workers_as_help(load_s, step_s, useful, found):
    assert Loop(load_s, step_s, useful).run(2000) == found


@given(load_s=st.floats(1e-4, 1), step_s=st.floats(0, 1), useful=st.integers(1, 10), most=st.integers(1, 10))
def test_it_changes_one_by_one_and_comes_to_rest(load_s, step_s, useful, most):
    loop = Loop(load_s, step_s, useful, most)
    loop.run(200 * WINDOW)
    counts = loop.counts
    assert all(1 <= count <= most for count in counts)
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(counts))
    # Taken back at most once; after that the number is final.
    assert sum(after < before for before, after in itertools.pairwise(counts)) <= 1


def test_a_wait_that_is_rare_adds_nobody():
    now = iter(range(10**6))
    tuner = WorkerTuner(1, 4, window_s=0, clock=lambda: next(now))
    assert {tuner.waited(0.001, batches) for batches in range(0, 10**4, 10)} == {1}


def workers_of(reading, *, refusal="", **options):
    source = ArraySource({"x": np.arange(6)}, chunks=StorageLayout(reading=reading))
    options = LoaderOptions(batch_size=2, **options)
    return Workers.of(Wanted(source, source.spec, options, None, ahead=True, refusal=refusal))


@pytest.mark.parametrize(
    ("reading", "kind", "why", "most"),
    [
        ("copied", "thread", "reading is a copy", 1),
        ("opened", "process", "a file is opened for each sample", 1),
        ("locked", "process", "reading holds a lock", 1),
        ("decoded", "process", "samples are decoded", 2),
        ("python", "process", "Python code reads the samples", 2),
    ],
)
def test_what_would_take_the_gil_is_read_in_a_process_and_more_come_later_where_they_can_help(reading, kind, why, most):
    assert workers_of(reading)[:4] == (kind, 1, why, most)


@pytest.mark.parametrize(
    ("reading", "refusal", "chosen"),
    [
        ("decoded", "", ("process", 1, "samples are decoded")),
        ("python", "", ("process", 1, "Python code reads the samples")),
        ("python", "no memfd", ("caller", 0, "no memfd")),
    ],
)
def test_without_the_gil_threads_read_what_a_process_or_the_loop_would(monkeypatch, reading, refusal, chosen):
    for gil_on, found in zip((True, False), (chosen, ("thread", chosen[1] or 1, "there is no GIL"))):
        monkeypatch.setattr(resources, "has_gil", lambda gil_on=gil_on: gil_on)
        assert workers_of(reading, refusal=refusal)[:3] == found


@pytest.mark.processes
def test_who_reads_is_said_and_is_no_process_where_no_core_is_free_or_the_user_chose(monkeypatch):
    assert str(workers_of("decoded")) == "a reader process with 1 reader thread, at most 2 (samples are decoded)"
    for options in ({"workers": 0}, {"worker_kind": "thread"}):
        assert workers_of("decoded", **options).kind != "process"
    monkeypatch.setattr(resources, "cores", lambda ranks=None: 1)
    assert str(workers_of("decoded")) == "1 reader thread (no core is free)"


@pytest.mark.processes
def test_a_table_of_npy_files_opens_them(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 3), np.float32))
    table = pa.table({"path": [f"{number}.npy" for number in range(4)], "label": [0, 1, 0, 1]})
    source = ManifestSource(table, root=tmp_path, fields={"x": "path", "y": "label"})
    assert source.chunks.reading == "opened"
    assert AsyncLoader(source, {"batch_size": 2}).footprint.workers.kind == "process"
    assert ManifestSource(table, root=tmp_path, fields={"y": "label"}).chunks.reading == "copied"


@pytest.mark.processes
def test_a_system_that_is_not_posix_has_threads_and_says_why(monkeypatch):
    monkeypatch.setattr(resources, "system_refusal", system_refusal)
    monkeypatch.setattr(resources, "os", SimpleNamespace(name="nt", environ={}))
    monkeypatch.setattr(resources, "sys", SimpleNamespace(platform="win32"))
    why = "win32 passes no descriptors to a new process"
    assert workers_of("python", workers=1)[:3] == ("thread", 1, why)
    with pytest.raises(ConfigError, match=f"worker_kind: process is not possible here: {why}; set worker_kind=thread"):
        workers_of("python", worker_kind="process")


@pytest.mark.parametrize(
    ("environment", "known", "share"),
    [
        ({}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 8),
        ({"LOCAL_WORLD_SIZE": ""}, None, 32),
        ({}, 64, 1),
        # SLURM has given each of its tasks 32 cores.
        ({"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "32"}, 4, 32),
        # All tasks share 32 cores.
        ({"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "8"}, 4, 8),
        # The ranks were not started by SLURM, but within a task.
        ({"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "32"}, 4, 8),
    ],
)
def test_each_rank_has_its_share_of_the_cores(monkeypatch, environment, known, share):
    monkeypatch.setattr(resources, "usable_cores", lambda: 32)
    monkeypatch.setattr(resources, "core_limit", lambda: None)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cores(known) == share
