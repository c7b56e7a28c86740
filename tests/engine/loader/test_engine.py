"""The running part of a loader: who must be asked for the next batch, how full it is, and how it ends."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.sources.numbered import loader_of, order, seen
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.engine.loader.base_loader import Engine
from lit_async_data.sources.contract.source import StorageLayout
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize("seconds", [0, 1e9])
def test_a_full_queue_is_shown_as_full_however_many_batches_are_read_together(monkeypatch, seconds):
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", seconds)
    chunks = StorageLayout(reading="copied")
    source = ArraySource({"y": np.arange(2000)}, parts={"a": 2000}, chunks=chunks)
    with loader_of(source, shuffle="none", workers=1, queue_depth=3) as loader:
        assert loader.footprint.layout.batches == 32
        next(loader)
        pipeline = loader._machinery.engine.feed.pipeline
        until(pipeline, lambda: pipeline.ready >= 3)
        assert str(loader.fill) == "host 3/3"


def test_threads_need_not_be_asked_after_each_batch(monkeypatch):
    asked = []
    monkeypatch.setattr(InlineQueue, "prefetch", lambda queue, key: asked.append(key))
    with loader_of(workers=1) as loader:
        assert seen(loader) == order()
    assert asked == []


@pytest.mark.parametrize(("forked", "wanted"), [(False, ["queue", "feed"]), (True, [])])
def test_the_threads_end_though_the_device_fails_and_a_fork_ends_nothing(forked, wanted):
    ended = []
    feed = SimpleNamespace(forked=forked, lend=None, close=lambda wait: ended.append("feed"))
    engine = Engine(feed, torch.device("cpu"), depth=1)
    engine.queue = SimpleNamespace(close=lambda: ended.append("queue") or 1 / 0)
    with contextlib.nullcontext() if forked else pytest.raises(ZeroDivisionError):
        engine.close()
    assert ended == wanted


@pytest.mark.parametrize("copies", [False, True])
def test_copies_are_asked_for_after_each_batch_though_threads_read(monkeypatch, copies):
    pretend(monkeypatch, lambda device: FakeStreams("side"), has_streams=lambda device: copies)
    engine = Engine(SimpleNamespace(lend=None), torch.device("cpu"), depth=1, asks=False)
    assert (engine.copies, engine.asks) == (copies, copies)
