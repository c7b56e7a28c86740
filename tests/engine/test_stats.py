"""Where the time of batches goes is counted in its stage, by a clock that only slow things move."""

import contextlib
import types

import h5py
import numpy as np
import pytest
from support.threads.number_pipelines import WHOLE, running, taken
from support.threads.waits import until

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.engine.stats import LoaderStats, Wait
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.testing import ArraySource

SAMPLES, BATCH, ROWS = 32, 8, 16
BATCHES = SAMPLES // BATCH


class Clock:
    """Wall and processor time, which pass only when a test says so."""

    wall_s = cpu_s = 0.0

    def passes(self, seconds, *, works=True):
        self.wall_s += seconds
        self.cpu_s += works * seconds


@pytest.fixture
def clock(monkeypatch):
    now = Clock()
    wall, cpu = (lambda: now.wall_s), (lambda: now.cpu_s)
    fake = types.SimpleNamespace(perf_counter=wall, monotonic=wall, thread_time=cpu, process_time=cpu)
    engine = "engine.hooks", "engine.loader.async_loader", "engine.loader.base_loader"
    for module in ("sources.contract.stage_clock", "sources.hdf5.readers.slabs", *engine):
        monkeypatch.setattr(f"lit_async_data.{module}.time", fake)
    return now


def compressed(h5, rows=ROWS):
    data = {"data": np.arange(SAMPLES * 100).reshape(SAMPLES, 100), "chunks": (rows, 100), "compression": 1}
    return h5(data=data, labels=np.arange(SAMPLES))


def one_epoch(loader):
    for _ in loader:
        pass
    return loader.stats().stages


@pytest.mark.parametrize(("works", "cpu_s"), [(False, 0.0), (True, 0.5 * BATCHES)])
def test_slow_storage_and_python_code_that_reads(clock, monkeypatch, works, cpu_s):
    monkeypatch.setattr(ArraySource, "read_into", lambda *_: clock.passes(0.5, works=works))
    source = ArraySource({"x": np.zeros((SAMPLES, 4))})
    with AsyncLoader(source, {"batch_size": BATCH, "workers": 0}) as loader:
        stages = one_epoch(loader)
    assert (stages.read, stages.cpu_s) == (Work(0.5 * BATCHES, bytes=SAMPLES * 32), cpu_s)
    assert stages.decode == stages.transform == stages.copy == Work()


@pytest.mark.parametrize(("rows", "shuffle"), [(ROWS, False), (1, True)])
def test_slow_decoding(clock, h5, monkeypatch, rows, shuffle):
    decode = FilterPipeline.decode

    def slow(*arguments):
        clock.passes(2.0)
        return decode(*arguments)

    monkeypatch.setattr(FilterPipeline, "decode", slow)
    path, options = compressed(h5, rows), {"batch_size": BATCH, "workers": 0, "shuffle": shuffle}
    with contextlib.closing(HDF5Source(path)) as source, AsyncLoader(source, options) as loader:
        stages = one_epoch(loader)
    with h5py.File(path) as file:
        stored = sum(file["data"].id.get_chunk_info(number).size for number in range(SAMPLES // rows))
    assert stages.decode == Work(2.0 * (SAMPLES // rows), bytes=SAMPLES * 800)
    assert (stages.read.bytes, stages.cpu_s) == (stored, 2.0 * (SAMPLES // rows))


def test_a_slow_transform(clock):
    def slow(batch):
        clock.passes(0.5)
        return batch

    source = ArraySource({"x": np.zeros((SAMPLES, 4))})
    with AsyncLoader(source, {"batch_size": BATCH, "workers": 0}, batch_transform=slow) as loader:
        len(loader.spec.fields)  # the hook is called once to see what it returns
        stages = one_epoch(loader)
    assert stages.transform == Work(0.5 * BATCHES, bytes=SAMPLES * 32)


def test_batches_that_were_not_ready_are_counted():
    with running() as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        until(pipeline, lambda: pipeline.ready)
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]
        assert pipeline.done.starved == 1


def test_copies_are_a_stage_by_the_clock_of_the_device():
    stats = LoaderStats(read=Work(2.0, bytes=5), device=Wait(copy=Work(copy_s=3.0, copied=7)))
    assert (stats.stages.copy, stats.stages.read) == (Work(3.0, bytes=7), Work(2.0, bytes=5))


@pytest.mark.processes
def test_a_reader_process_reports_its_stages(h5):
    path, hooks = compressed(h5), {"batch_transform": lambda batch: batch}

    def stages(kind):
        options = {"batch_size": BATCH, "worker_kind": kind, "workers": 1, "shuffle": "chunk"}
        with contextlib.closing(HDF5Source(path)) as source, AsyncLoader(source, options, **hooks) as loader:
            assert len(list(loader)) == BATCHES
            stats = loader.stats()
            assert stats.workers == 1
            return stats.stages

    here, there = stages("thread"), stages("process")
    assert there.read.bytes >= here.read.bytes > 0  # the process may have read on
    assert there.decode.bytes >= SAMPLES * 800
    assert min(there.read.seconds, there.decode.seconds, there.transform.seconds, there.cpu_s) > 0
    assert there.transform.bytes >= SAMPLES * 808


def test_the_devices_share_is_told_where_it_is_known_and_else_the_loops():
    loop = Wait(10, wait_s=3.0, gap_s=1.0, busy_s=6.0)
    assert loop.share == 0.4
    assert str(loop + Wait(device_s=0.1)).endswith("the device 0.100 s: data wait 1.0 %")
    assert (loop + Wait(device_s=0.1) + Wait(device_s=0.2)).device_s == pytest.approx(0.3)
    assert Wait() + loop == loop
    assert Wait().share == 0.0
