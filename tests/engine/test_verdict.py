"""Why a loop waits, and the change that can help: by what was measured, and by what the loader is."""

import contextlib
import itertools
import time
import types

import numpy as np
import pytest
from support.device.training_loop import pretend
from support.threads.noted_loaders import Stream
from torch.utils.data import DataLoader
from waiting.on_device.fake_streams import FakeStreams

import lit_async_data as lad
from lit_async_data.engine.stats import LoaderStats, Wait, Watch, explained
from lit_async_data.sources.contract.source import Remote, StorageLayout
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.testing import ArraySource

STEPS = 100


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    for module in ("engine.stats", "engine.resources"):
        monkeypatch.setattr(f"lit_async_data.{module}.cores", lambda _=None: 4)
    monkeypatch.setattr("lit_async_data.engine.stats.PACKED", ("lit_async_data.",))  # as if a test's source had files


def loader_of(reading="copied", *, random=False, ahead=False, remote=None, hook=None, **options):
    chunks = StorageLayout(reading=reading, random=random, ahead=ahead, remote=remote)
    source = ArraySource({"x": np.zeros(8)}, chunks=chunks)
    return lad.AsyncLoader(source, {"batch_size": 4, **options}, sample_transform=hook)


def unchanged(sample):
    return sample


def waits(loader, *, step_s=0.01, workers=1, starved=STEPS, gap_s=0.0, cpu=0.0, wait_s=None, **stages):
    """The verdict on a loop beside workers that take so many seconds per batch for each stage."""
    read, decode, transform, copy = (stages.get(name, 0.0) for name in ("read", "decode", "transform", "copy"))
    one = Work(read + decode + transform, decode, transform, cpu, copy_s=copy)
    work = Work._make(STEPS * each for each in one)._replace(starved=starved)
    beside = max(one.seconds / max(workers, 1), copy) - step_s
    waited = Wait(STEPS, STEPS * max(beside, 0.0) if wait_s is None else wait_s, gap_s, STEPS * step_s)
    with contextlib.closing(loader):
        return explained(loader, waited, work, workers)


THREAD = {"worker_kind": "thread", "workers": 1}
PROCESS = {"worker_kind": "process", "workers": 1}
AUTO_4 = {"reading": "decoded", "worker_kind": "thread"}  # `auto` would take four


@pytest.mark.parametrize(
    ("kind", "measured", "verdict"),
    [
        ({}, {"read": 0.005}, ("loop", "", 0)),
        ({}, {"read": 0.005, "wait_s": 0.02}, ("loop", "", 0)),
        ({}, {"read": 0.03}, ("read", "workers", 3)),
        ({}, {"read": 0.09}, ("read", "workers", 9)),
        ({}, {"read": 0.9}, ("read", "workers", 16)),
        ({}, {"read": 0.03, "cpu": 0.02}, ("read", "", 0)),
        ({"remote": Remote(10**9, 5000, None)}, {"read": 0.03}, ("read", "cache", 0)),
        ({"remote": Remote(10**9, 5000, "/nvme")}, {"read": 0.03}, ("read", "workers", 3)),
        ({"workers": 2}, {"read": 0.09, "workers": 2}, ("read", "", 0)),
        ({"reading": "opened", "ahead": True}, {"read": 0.02}, ("read", "pack", 0)),
        ({"reading": "opened", "ahead": True, "random": True}, {"read": 0.02}, ("read", "", 0)),
        ({"reading": "opened", "workers": 1}, {"read": 0.02}, ("read", "workers", 2)),
        (AUTO_4 | {"workers": 1}, {"decode": 0.018}, ("decode", "auto", 0)),
        (AUTO_4 | {"workers": 4}, {"decode": 0.09, "workers": 4}, ("decode", "pack", 0)),
        (AUTO_4, {"decode": 0.09}, ("decode", "pack", 0)),
        (AUTO_4 | {"random": True}, {"decode": 0.09}, ("decode", "", 0)),
        (THREAD | {"hook": unchanged}, {"transform": 0.02}, ("transform", "processes", 0)),
        (THREAD | {"hook": unchanged, "workers": 4}, {"transform": 0.02, "workers": 1}, ("transform", "process", 0)),
        (THREAD | {"reading": "python"}, {"read": 0.02, "cpu": 0.02}, ("read", "processes", 0)),
        (THREAD | {"reading": "python"}, {"read": 0.02}, ("read", "workers", 2)),
        (THREAD | {"reading": "locked"}, {"read": 0.02, "cpu": 0.02}, ("read", "process", 0)),
        (THREAD | {"reading": "locked"}, {"read": 0.02}, ("read", "pack", 0)),
        (THREAD | {"reading": "locked"}, {"decode": 0.02}, ("decode", "process", 0)),
        pytest.param(
            PROCESS | {"hook": unchanged}, {"transform": 0.02}, ("transform", "auto", 0), marks=pytest.mark.processes
        ),
        pytest.param(PROCESS | {"reading": "python"}, {"read": 0.02}, ("read", "auto", 0), marks=pytest.mark.processes),
        pytest.param(
            PROCESS | {"reading": "locked"}, {"decode": 0.02}, ("decode", "pack", 0), marks=pytest.mark.processes
        ),
        (THREAD, {"read": 0.03, "decode": 0.02, "transform": 0.01}, ("read", "workers", 7)),
        ({}, {"copy": 0.02}, ("copy", "bytes", 0)),
        ({"workers": 0}, {"read": 0.02, "workers": 0}, ("caller", "workers", 1)),
        ({"reading": "python", "hook": lambda sample: sample}, {"read": 0.02, "workers": 0}, ("caller", "", 0)),
        ({}, {"read": 0.005, "wait_s": 0.2}, ("late", "queue_depth", 8)),
        ({"queue_depth": 8}, {"read": 0.005, "wait_s": 0.2}, ("late", "", 0)),
        ({}, {"read": 0.005, "wait_s": 0.1, "starved": 1}, ("handover", "batch_size", 0)),
        ({}, {"read": 0.005, "wait_s": 0.1, "starved": 1, "step_s": 0.03}, ("handover", "", 0)),
        ({}, {"read": 0.005, "wait_s": 0.01, "gap_s": 1.0}, ("first", "", 0)),
        ({}, {"read": 0.005, "wait_s": 0.2, "gap_s": 1.0}, ("first", "", 0)),
        ({}, {"read": 0.03, "gap_s": 3.0}, ("read", "workers", 3)),
    ],
)
def test_the_slow_stage_is_named_with_the_first_change_that_can_help(kind, measured, verdict):
    found = waits(loader_of(**kind), **measured)
    assert (found.cause, found.hint, found.value) == verdict


@pytest.mark.parametrize(
    ("loader", "verdict"),
    [
        (DataLoader(range(10)), ("foreign", "num_workers", 2)),
        (DataLoader(range(10), num_workers=2), ("foreign", "source", 0)),
        (DataLoader(Stream(), num_workers=2), ("foreign", "", 0)),
        (iter(range(10)), ("foreign", "", 0)),
    ],
)
def test_a_loader_of_others_gets_workers_once_and_then_a_source_if_its_dataset_has_an_index(loader, verdict):
    assert waits(lad.prefetched(loader, device="cpu"), read=0.05)[2:5] == verdict
    assert waits(lad.prefetched(loader, device="cpu"), read=0.05, starved=0)[2:5] == ("handover", "batch_size", 0)
    assert waits(lad.prefetched(loader, device="cpu", device_depth=0), read=0.05)[2:5] == ("caller", "", 0)


def test_decoding_in_vain_is_seen_in_the_plan_of_the_loader(h5, monkeypatch):
    monkeypatch.setattr("lit_async_data.sources.hdf5.readers.part_reader.RECENT_BYTES", 0)  # more than that is stored
    values = np.arange(256 * 50).reshape(256, 50)
    path = h5("z.h5", labels=np.arange(256), data={"data": values, "chunks": (8, 50), "compression": 1})
    for shuffle, hint in (("global", "shuffle"), ("chunk", "auto")):
        options = {"batch_size": 16, "shuffle": shuffle, "workers": 1, "worker_kind": "thread", "cache_bytes": 0}
        with contextlib.closing(lad.HDF5Source(path)) as source:
            assert waits(lad.AsyncLoader(source, options), decode=0.02).hint == hint


@pytest.mark.parametrize(("workers", "before", "hint"), [("auto", 1, "grown"), ("auto", 3, ""), (3, 0, "auto")])
def test_while_auto_adds_workers_it_is_not_advised_to_set_a_number(workers, before, hint, monkeypatch):
    loader = loader_of(**AUTO_4, workers=workers, random=True)
    work = Work(7.0, 7.0, 0.0, 7.0)._replace(starved=STEPS)
    monkeypatch.setattr(loader, "stats", lambda: LoaderStats(STEPS, 2.0, read=work, workers=3))
    found = Watch([loader], [LoaderStats(workers=before)]).verdict(3.0)
    assert (found.cause, found.hint) == ("decode", hint)
    if hint == "grown":
        said = "; workers=auto went up to 3 meanwhile, and the next epoch shows what is left"
        assert found.sentence("the loop", "3.0 s").endswith(said)


def test_a_sentence_has_the_shares_of_the_stages():
    found = waits(loader_of(**AUTO_4, workers=1), read=0.01, decode=0.03, copy=0.01)
    assert found.sentence("the loop", "4.0 s") == (
        "the loop waited 75.0 % of 4.0 s for data, mostly for decoding (read 20 %, decode 60 %, copy 20 %); set "
        "loader.workers=auto, which keeps as many as help"
    )


@pytest.fixture
def now(monkeypatch):
    """The seconds of a clock that stands still, in a list."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    for module in ("device.queues", "loader.async_loader", "loader.base_loader", "prefetch.loader", "stats"):
        monkeypatch.setattr(f"lit_async_data.engine.{module}.time", clock)
    return now


def test_the_seconds_of_a_transform_in_the_loop_are_no_wait_and_named(now):
    def slow(batch):
        now[0] += 0.5
        return batch

    source = ArraySource({"x": np.zeros(8)})
    with lad.AsyncLoader(source, {"batch_size": 4, "workers": 0}, device_transform=slow) as loader:
        watch = Watch([loader])
        assert len(list(loader)) == 2
        now[0] += 3.0
        found = watch.verdict()
    assert (found.waited, found.share) == (Wait(2, busy_s=4.0), 0.25)
    assert found.sentence("training", "4.0 s") == (
        "training spent 25.0 % of 4.0 s in device_transform, which runs in the loop on a CPU; as batch_transform, in "
        "numpy, the readers run it"
    )


def test_of_several_loaders_the_one_that_was_waited_for_longest_is_described(now, monkeypatch):
    def read_into(self, samples, out):
        now[0] += len(self)

    monkeypatch.setattr(ArraySource, "read_into", read_into)
    loaders = [lad.AsyncLoader(ArraySource({"x": np.zeros(n)}), {"batch_size": 1, "workers": 0}) for n in (2, 3, 2)]
    watch = Watch(loaders)
    for loader in loaders:
        list(loader)
    now[0] += 5
    assert watch.verdict().waited == Wait(3, wait_s=2 + 6 + 2, gap_s=2 + 3 + 2, busy_s=5)
    assert watch.verdict(total_s=20.0).waited.busy_s == 3.0
    assert Watch([]).verdict(1.0).cause == "loop"


def test_a_long_first_batch_hides_nothing_of_the_rest():
    found = waits(loader_of(), read=0.03, gap_s=3.0)
    assert found.sentence("the loop", "6.0 s", "") == (
        "the loop waited 83.3 % of 6.0 s for data, mostly for the first batch; after it, mostly for reading "
        "(read 100 %); set workers=3"
    )


def test_only_files_of_this_package_are_to_be_packed(monkeypatch):
    monkeypatch.undo()
    for kind in ({"reading": "locked"}, {"reading": "decoded", "workers": 9}):
        assert waits(loader_of(worker_kind="process", **kind), decode=0.9, workers=9).hint == ""


class Restarted:
    """As a DataLoader whose workers take a second to start: for each pass, or once."""

    num_workers = 1

    def __init__(self, now, *, persistent):
        self.now, self.persistent_workers, self.starts = now, persistent, 0

    def __iter__(self):
        if not (self.persistent_workers and self.starts):
            self.now[0] += 1.0
        self.starts += 1
        return iter(range(20))


def test_who_keeps_the_workers_of_a_dataloader_waits_for_their_start_once(now):
    for persistent, hint, waited_s in ((False, "persistent", 3.0), (True, "", 1.0)):
        with lad.prefetched(Restarted(now, persistent=persistent), device="cpu") as loader:
            watch = Watch([loader])
            for _ in itertools.chain(loader, loader, loader):
                now[0] += 0.01
            found = watch.verdict()
        assert (found.cause, found.hint, round(found.waited.waited_s, 3)) == ("first", hint, waited_s)


class Bus(FakeStreams):
    """Copies take 0.1 µs a byte."""

    def copy(self, destination, source):
        self._takes_s["copy"] = 1e-7 * destination.nbytes
        super().copy(destination, source)


def test_who_hands_over_fewer_bytes_waits_less(monkeypatch):
    def verdict_on(dtype):
        streams = Bus("side", {"step": 0.01})
        pretend(monkeypatch, lambda device: streams)
        clock = types.SimpleNamespace(perf_counter=lambda: streams.now_s, monotonic=time.monotonic)
        for module in ("engine.loader.async_loader", "engine.loader.base_loader", "engine.stats"):
            monkeypatch.setattr(f"lit_async_data.{module}.time", clock)
        with lad.AsyncLoader(ArraySource({"x": np.zeros((400, 20_000), dtype)}), {"batch_size": 4}) as loader:
            watch = Watch([loader])
            for _ in loader:
                streams.launch("step", lambda: None)
            return watch.verdict()

    before, after = verdict_on(np.float32), verdict_on(np.uint8)
    assert (before.cause, before.hint) == ("copy", "bytes")
    assert after.waited.waited_s < 0.3 * before.waited.waited_s


def test_who_reads_a_dataloader_in_the_loop_is_told_to_give_it_workers(now):
    class Slow:
        def __len__(self):
            return 30

        def __getitem__(self, sample):
            now[0] += 0.05
            return sample

    with lad.prefetched(DataLoader(Slow()), device="cpu") as loader:
        for _ in loader:
            now[0] += 0.05
        verdict = loader.verdict()
    assert verdict.startswith("the loop waited 50.0 % of ")
    assert verdict.endswith("mostly for your own loader; set its num_workers=2")


def test_the_verdict_of_a_loader_is_about_its_last_pass(now, monkeypatch):
    def read_into(self, samples, out):
        now[0] += 0.05 * len(samples)

    monkeypatch.setattr(ArraySource, "read_into", read_into)
    source = ArraySource({"x": np.zeros(40)})
    options = {"batch_size": 1, "workers": 0, "shuffle": False}
    with lad.AsyncLoader(source, options) as own, lad.prefetched(DataLoader([0] * 40), device="cpu") as others:
        assert own.verdict().startswith("too little to say of 0 batches in 0.0 s: a verdict takes 20 batches and 1 s")
        for step_s, share in ((0.05, "50.0"), (0.15, "25.0")):
            for _ in own:
                now[0] += step_s
            now[0] += 100.0  # between two passes
            assert own.verdict().startswith(f"the loop waited {share} % of ")
        assert own.verdict() == (
            "the loop waited 25.0 % of 8.0 s for data: it reads by itself, and nothing is read ahead; set workers=1"
        )
        for _ in others:
            now[0] += 0.1
        assert others.verdict() == "the loop waited 0.0 % of 4.0 s for data: data keep up"
