"""Every loader starts with its first batch, goes on in its order, and ends with itself."""

import contextlib
import gc
import itertools
import logging
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.sources.numbered import LENGTH, WIDE, Bad, loader_of, order, seen
from support.threads.waits import LONG, until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader
from lit_async_data.engine.device.feeds import LentFeed
from lit_async_data.engine.loader.base_loader import Engine
from lit_async_data.errors import ClosedError, ReadError
from lit_async_data.sources.contract.source import StorageLayout
from lit_async_data.testing import ArraySource


def test_a_loader_that_is_dropped_after_an_error_is_closed_without_garbage_collection():
    """With workers. Without any there is nothing to close, and Python's own frames keep it until a collection."""
    gc.collect()
    gc.disable()
    try:
        loader = loader_of(Bad(1), shuffle="none", workers=1)
        with contextlib.suppress(ReadError):
            next(loader)
        gone = threading.Event()
        weakref.finalize(loader, gone.set)
        del loader
        assert gone.wait(30)  # 1. The worker wakes the caller. 2. The caller is here. 3. The worker lets the error go.
        for thread in threading.enumerate():  # the worker itself may have closed the loader, and is about to end
            if thread.name.startswith("lit_async_data"):
                thread.join(30)
    finally:
        gc.enable()


@pytest.mark.parametrize("place", [(AsyncLoader, "next"), (AsyncLoader, "_new_engine"), (LentFeed, "_batches")])
def test_a_loader_that_another_thread_closes_at_any_moment_says_so_and_is_closed(monkeypatch, place):
    kept, threads = getattr(*place), threading.active_count()
    monkeypatch.setattr(*place, lambda *args: loader.close() or kept(*args))
    loader = loader_of(workers=1)
    for call in (loader.next, loader._prefetch, lambda: next(loader)):
        with pytest.raises(ClosedError, match="build a new one"):
            call()
    loader.close()
    assert (loader._run.engine, threading.active_count()) == (None, threads)


def test_a_stop_that_ends_late_leaves_the_engine_that_was_started_since(monkeypatch):
    """1. A thread stops the loader. 2. The loop does, too, and starts another engine. 3. The thread goes on."""
    ending, go_on, kept = threading.Event(), threading.Event(), Engine.close

    def gated(engine, **wait):
        kept(engine, **wait)
        if threading.current_thread() is late:
            ending.set()
            assert go_on.wait(LONG)

    monkeypatch.setattr(Engine, "close", gated)
    with loader_of(workers=1, shuffle="none") as loader:
        next(loader)
        late = threading.Thread(target=loader._stop)
        late.start()
        assert ending.wait(LONG)
        next(loader)
        engine = loader._run.engine
        go_on.set()
        late.join(LONG)
        assert loader._run.engine is engine is not None


def test_a_loader_that_is_forgotten_ends_its_threads():
    before = threading.active_count()
    loader = loader_of(workers=2)
    batch = next(loader)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None  # at once: nothing refers back to it
    assert threading.active_count() == before
    assert len(batch["y"]) == 4


def test_changing_the_depth_goes_on_in_the_order():
    with loader_of() as loader:
        first = seen(itertools.islice(loader, 2))
        loader.device_depth = 0
        rest = seen([next(loader), next(loader), next(loader)])
        assert first + rest == order(0)


def test_stats_count_what_happened():
    with loader_of(workers=0, shuffle="none") as loader:
        seen(loader)
        stats = loader.stats()
    assert stats.batches == stats.read.batches == 5
    assert stats.read.bytes == LENGTH * (4 * WIDE + 8)
    assert min(stats.wait_s, stats.epoch_gap_s) > 0 == stats.queue_fill
    metrics = stats.metrics()
    names = "wait_ms", "device_wait_ms", "queue_fill", "epoch_gap_ms", "read_mb_s"
    assert set(metrics) == {f"data/{name}" for name in names}
    assert metrics["data/device_wait_ms"] == metrics["data/wait_ms"]  # it waits when the loop does


def test_the_same_warning_of_several_loaders_is_one_line_with_a_stage(caplog):
    loaders = [loader_of() for _ in range(3)]
    for loader, label in zip(loaders, ("train", "val", "test")):
        loader._wiring.label, loader._wiring.logged = label, loaders[0]._wiring.logged
        loader._say(logging.WARNING, "this is slow")
    loaders[2]._say(logging.WARNING, "this, too")
    assert [each.getMessage() for each in caplog.records] == ["train: this is slow", "test: this, too"]


def test_a_full_queue_is_shown_as_full_however_many_batches_are_read_together():
    source = ArraySource({"y": np.arange(2000)}, parts={"a": 2000}, chunks=StorageLayout(reading="copied"))
    with loader_of(source, shuffle="none", workers=1, queue_depth=3) as loader:
        assert loader.footprint.layout.batches == 32
        next(loader)
        pipeline = loader._run.engine.feed.pipeline
        until(pipeline, lambda: pipeline.ready >= 3)
        assert loader.fill == "host 3/3"
        loader._run.engine.feed._coalesced = 20  # as after a slot of small batches
        assert loader.fill.endswith("/60 (3 × 20)")


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
