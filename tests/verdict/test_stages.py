"""Where the time of batches goes is counted in its stage, by a clock that only slow things move."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import types

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.host.metrics.stages import Stage, StageMeter, StageTimes
from lit_async_data.sources.contract.stage_clock import StageClock, Work
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.testing import ArraySource
from lit_async_data.verdict import watch as watch_module
from lit_async_data.verdict.diagnosis import verdict
from lit_async_data.verdict.facts import Readers
from lit_async_data.verdict.finding import Bound
from lit_async_data.verdict.watch import Watch

SAMPLES, BATCH, ROWS = 32, 8, 16
BATCHES = SAMPLES // BATCH


class Clock:
    """Wall and processor time, which pass only when a test says so."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0

    def works(self, seconds):
        self.wall_s += seconds
        self.cpu_s += seconds

    def waits(self, seconds):
        self.wall_s += seconds


@pytest.fixture
def clock(monkeypatch):
    now = Clock()
    fake = types.SimpleNamespace(
        perf_counter=lambda: now.wall_s,
        monotonic=lambda: now.wall_s,
        thread_time=lambda: now.cpu_s,
        process_time=lambda: now.cpu_s,
    )
    for module in (
        "sources.contract.stage_clock",
        "sources.hdf5.readers.slabs",
        "hooks.transformation",
        "loader.async_loader",
        "verdict.watch",
    ):
        monkeypatch.setattr(f"lit_async_data.{module}.time", fake)
    return now


@pytest.fixture
def gzip_file(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "data", data=np.arange(SAMPLES * 100).reshape(SAMPLES, 100), chunks=(ROWS, 100), compression=1
        )
        file["labels"] = np.arange(SAMPLES)
    return path


class Storage(ArraySource):
    """Takes its time to be read."""

    def __init__(self, takes):
        super().__init__({"x": np.zeros((SAMPLES, 4))})
        self._takes = takes

    def read_into(self, samples, out):
        self._takes()
        super().read_into(samples, out)


def one_epoch(loader, step=lambda: None):
    """The stages of an epoch, and the facts of its loop."""
    watch = Watch([loader])
    for _ in loader:
        step()
    return loader.stats().stages, watch.facts()


def beside(facts, **readers):
    """The same facts, if a thread had read; here the loop reads itself, so that nothing depends on threads."""
    return dataclasses.replace(facts, readers=Readers(**readers), cores=4, starved=facts.batches)


def test_slow_storage(clock):
    with AsyncLoader(Storage(lambda: clock.waits(0.5)), {"batch_size": BATCH, "workers": 0}) as loader:
        stages, facts = one_epoch(loader, lambda: clock.works(0.25))
    assert stages == StageTimes(Stage(0.5 * BATCHES, SAMPLES * 32), cpu_s=0.0)
    assert verdict(beside(facts)).bound is Bound.READING
    assert verdict(facts).bound is Bound.CALLER


def test_python_code_that_reads(clock):
    with AsyncLoader(Storage(lambda: clock.works(0.5)), {"batch_size": BATCH, "workers": 0}) as loader:
        stages, facts = one_epoch(loader, lambda: clock.works(0.25))
    assert (stages.worked_s, stages.cpu_s) == (0.5 * BATCHES, 0.5 * BATCHES)
    assert verdict(beside(facts, reading="python", kind="process", apart=True, gil=False)).bound is Bound.PYTHON


def test_slow_decoding(clock, gzip_file, monkeypatch):
    decode = FilterPipeline.decode

    def slow(*arguments):
        clock.works(2.0)
        return decode(*arguments)

    monkeypatch.setattr(FilterPipeline, "decode", slow)
    options = {"batch_size": BATCH, "workers": 0, "shuffle": False}
    with contextlib.closing(HDF5Source(gzip_file)) as source, AsyncLoader(source, options) as loader:
        stages, facts = one_epoch(loader, lambda: clock.works(0.25))
        with h5py.File(gzip_file) as file:
            stored = sum(
                file["data"].id.get_chunk_info(number).size for number in range(file["data"].id.get_num_chunks())
            )
    assert stages.decode == Stage(2.0 * (SAMPLES // ROWS), SAMPLES * 800)
    assert (stages.read.bytes, stages.cpu_s) == (stored, 2.0 * (SAMPLES // ROWS))
    assert verdict(beside(facts, reading="decoded")).bound is Bound.DECODING


def test_slow_decoding_of_single_samples(clock, tmp_path, monkeypatch):
    decode = FilterPipeline.decode

    def slow(*arguments):
        clock.works(0.25)
        return decode(*arguments)

    monkeypatch.setattr(FilterPipeline, "decode", slow)
    path = str(tmp_path / "y.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((SAMPLES, 100), "u1"), chunks=(1, 100), compression=1)
        file["labels"] = np.arange(SAMPLES)
    with (
        contextlib.closing(HDF5Source(path)) as source,
        AsyncLoader(source, {"batch_size": BATCH, "workers": 0}) as loader,
    ):
        stages, _ = one_epoch(loader)
    assert stages.decode == Stage(0.25 * SAMPLES, SAMPLES * 100)


def test_a_slow_transform(clock):
    def slow(batch):
        clock.works(0.5)
        return batch

    source = ArraySource({"x": np.zeros((SAMPLES, 4))})
    with AsyncLoader(source, {"batch_size": BATCH, "workers": 0}, batch_transform=slow) as loader:
        len(loader.spec.fields)  # the hook is called once to see what it returns
        stages, facts = one_epoch(loader, lambda: clock.works(0.25))
    assert stages.transform == Stage(0.5 * BATCHES, SAMPLES * 32)
    assert verdict(beside(facts, reading="python", kind="process", apart=True, gil=False)).bound is Bound.TRANSFORM


def test_a_full_gil(clock):
    def slow(batch):
        clock.works(0.125)
        clock.waits(0.5)  # the loop has the GIL
        return batch

    source = ArraySource({"x": np.zeros((SAMPLES, 4))})
    with AsyncLoader(source, {"batch_size": BATCH, "workers": 0}, batch_transform=slow) as loader:
        len(loader.spec.fields)
        _, facts = one_epoch(loader, lambda: clock.works(0.25))
    found = verdict(beside(facts, reading="python"))
    assert (found.bound, found.cure()) == (Bound.GIL, "loader.worker_kind=process")


def test_a_slow_step(clock):
    with AsyncLoader(Storage(lambda: None), {"batch_size": BATCH, "workers": 0}) as loader:
        _, facts = one_epoch(loader, lambda: clock.works(0.25))
    assert verdict(facts).bound is Bound.LOOP


def test_what_was_left_out_does_not_count(clock):
    watch = Watch([])
    clock.works(1.0)
    between = Watch([])
    clock.works(4.0)
    clock.waits(2.0)
    watch.leave_out(between)
    wall_s, cpu = watch.spent()
    assert (wall_s, cpu.thread_s, cpu.process_s) == (1.0, 1.0, 1.0)


def test_what_other_programs_take_of_the_cores_is_all_that_is_not_idle_or_ours(clock, monkeypatch):
    cores = iter([watch_module.Cores(10.0, 100.0), watch_module.Cores(12.0, 108.0)])
    monkeypatch.setattr(watch_module.Cores, "now", lambda: next(cores))
    with AsyncLoader(Storage(lambda: clock.works(0.5)), {"batch_size": BATCH, "workers": 0}) as loader:
        _, facts = one_epoch(loader, lambda: clock.works(0.5))
    assert facts.elsewhere == pytest.approx((8.0 - 2.0 - 4.0) / 4.0)


def test_cores_of_other_ranks_are_not_taken_from_this_one(clock, monkeypatch):
    cores = iter([watch_module.Cores(0.0, 0.0), watch_module.Cores(1.0, 16.0)])
    monkeypatch.setattr(watch_module.Cores, "now", lambda: next(cores))
    monkeypatch.setattr(watch_module, "usable_cores", lambda: 4)
    watch = Watch([])
    clock.works(4.0)
    # Of 16 s, 11 s are of others: 2.75 cores, all of them of the three of other ranks.
    assert watch._elsewhere(0.0, 1) == 0.0
    cores = iter([watch_module.Cores(0.0, 0.0), watch_module.Cores(0.0, 16.0)])
    watch = Watch([])
    clock.works(4.0)
    assert watch._elsewhere(2.0, 1) == 0.0
    cores = iter([watch_module.Cores(0.0, 0.0), watch_module.Cores(0.0, 18.0)])
    watch = Watch([])
    clock.works(4.0)
    assert watch._elsewhere(0.0, 1) == 0.5


# Seconds with a core, and seconds of waiting for one, by thread.
class Thread:
    def __init__(self, name, native_id):
        self.name, self.native_id = name, native_id


@pytest.fixture
def threads(clock, monkeypatch):
    """Threads that take cores only when a test says so: ``threads[name] = (seconds with a core, and without)``."""
    spent = {"MainThread": (0.0, 0.0), "lit_async_data reader 0": (0.0, 0.0), "Thread-1 (augment)": (0.0, 0.0)}
    numbers = {name: number for number, name in enumerate(spent)}
    now = [Thread(*each) for each in numbers.items()]
    fake = types.SimpleNamespace(enumerate=lambda: now, get_native_id=lambda: numbers["MainThread"])
    monkeypatch.setattr(watch_module, "threading", fake)
    names = {number: name for name, number in numbers.items()}
    monkeypatch.setattr(watch_module, "thread_seconds", lambda number: spent[names[number]])
    return spent


@pytest.mark.parametrize("taken", [True, False])
def test_waits_for_cores_are_told_by_thread_and_threads_of_the_program_count_if_they_keep_the_gil(
    clock, threads, monkeypatch, taken
):
    tried = []
    monkeypatch.setattr(watch_module, "gil_is_taken", lambda: tried.append(1) or taken)
    loader = AsyncLoader(Storage(lambda: None), {"batch_size": BATCH, "workers": 0})
    watch = Watch([loader])
    clock.waits(10.0)
    threads["MainThread"], threads["lit_async_data reader 0"] = (4.0, 1.0), (3.0, 2.0)
    facts = watch.facts()
    assert (facts.loop_queued_s, facts.readers_queued_s, facts.own_s, tried) == (1.0, 2.0, 0.0, [])
    threads["Thread-1 (augment)"] = (2.0, 0.4)
    assert (watch.facts().own_s, tried) == (0.0, [])  # too little for a try
    threads["Thread-1 (augment)"] = (2.0, 1.0)
    assert (watch.facts().own_s, tried) == (3.0 if taken else 0.0, [1])


def test_where_the_system_says_nothing_of_cores_nobody_else_takes_any(clock, monkeypatch):
    monkeypatch.setattr(watch_module, "open", lambda *_, **__: io.StringIO("none\n"), raising=False)
    with AsyncLoader(Storage(lambda: clock.works(0.5)), {"batch_size": BATCH, "workers": 0}) as loader:
        _, facts = one_epoch(loader)
    assert facts.elsewhere == 0


def test_a_wait_for_a_slot_is_told_from_a_wait_for_the_loop():
    meter = StageMeter()
    meter.waited(1.0, starved=False)
    meter.waited(0.5, starved=True)
    assert (meter.loop_s, meter.slot_s, meter.idle_s) == (1.0, 0.5, 1.5)


def test_what_another_worker_did_meanwhile_is_no_wait_for_storage(clock):
    here = StageClock()
    here.start()
    clock.waits(1.0)
    here.waited_for_others(0.75)
    assert here.take() == Work(1.0, cpu_s=0.75)


def test_each_thread_has_its_own_sums():
    here = StageClock()
    here.decoded(1.0, 1, 1)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(here.take()))
    thread.start()
    thread.join()
    assert taken[0].decode_s == 0
    assert here.take().decode_s == 1


def test_the_sums_of_two_engines_are_added():
    one = StageTimes(Stage(1, 10), Stage(2, 20), Stage(3, 30), Stage(4, 40), 5, 6, 7)
    assert one.after(one).since(one) == one
    assert one.after(one).read == Stage(2, 20)


@pytest.mark.processes
def test_a_reader_process_reports_its_stages(gzip_file):
    def stages(kind):
        options = {"batch_size": BATCH, "worker_kind": kind, "workers": 1, "shuffle": "chunk"}
        with (
            contextlib.closing(HDF5Source(gzip_file)) as source,
            AsyncLoader(source, options, batch_transform=lambda batch: batch) as loader,
        ):
            assert len(list(loader)) == BATCHES
            stats = loader.stats()
            assert stats.read.workers == 1
            return stats.stages

    here, there = stages("thread"), stages("process")
    assert there.read.bytes >= here.read.bytes > 0  # the process may have read on
    assert there.decode.bytes >= SAMPLES * 800
    assert min(there.read.seconds, there.decode.seconds, there.transform.seconds, there.cpu_s) > 0
    assert there.transform.bytes >= SAMPLES * 808
