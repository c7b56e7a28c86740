"""Slots that reader processes fill are pinned for a GPU, and for no other device."""

import contextlib
import gc
import weakref

import pytest
import torch
from support.device.training_loop import pretend
from support.processes import loader_of
from support.sources.reader_sources import Numbers
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device.feeds import CopyFeed
from lit_async_data.engine.processes.pipeline import pipeline_of
from lit_async_data.order.plan import BatchIndex

pytestmark = pytest.mark.processes


def test_the_slots_of_a_reader_process_are_locked_for_a_gpu(monkeypatch):
    locked, gpu = [], torch.device("cuda:1")
    monkeypatch.setattr(
        "lit_async_data.engine.resources.memory.register",
        lambda slot, *, device: locked.append(slot) if device == gpu else pytest.fail("on another device"),
    )
    loader = loader_of(Numbers())
    setup = loader._setup(loader.footprint)
    process = loader._machinery.wiring.reader_processes
    with contextlib.closing(pipeline_of(setup, process, pin=gpu, options=loader.options)) as pipeline:
        assert [slot.ctypes.data for slot in locked] == [pipeline.pool.memories[slot].ctypes.data for slot in range(5)]
        locked.clear()


def test_a_slot_stays_locked_while_a_copy_of_it_is_under_way(monkeypatch):
    """numpy lets views refer to the whole map: the array that is locked is the one that the queue keeps."""
    unlocked, gpu = [], torch.device("cuda")

    def register(slot, *, device):
        weakref.finalize(slot, unlocked.append, slot.ctypes.data).atexit = False

    monkeypatch.setattr("lit_async_data.engine.resources.memory.register", register)
    loader = loader_of(Numbers())
    pipeline = pipeline_of(
        loader._setup(loader.footprint), loader._machinery.wiring.reader_processes, pin=gpu, options=loader.options
    )
    feed = CopyFeed(pipeline)
    with contextlib.closing(feed):
        release = feed.get(BatchIndex(0, 0)).release
    gc.collect()
    assert len(unlocked) == 4  # all others
    del release
    gc.collect()
    assert len(unlocked) == 5


def test_a_reader_process_serves_an_accelerator_for_which_its_slots_cannot_be_pinned(monkeypatch):
    streams = FakeStreams("side")
    pretend(monkeypatch, lambda device: streams)
    with loader_of(Numbers()) as loader:
        batch = next(loader)
        streams.synchronize()
        assert batch["y"].tolist() == list(range(10))
