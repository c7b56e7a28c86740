import contextlib
import copy
import gc
import itertools
import logging
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from support.device.training_loop import SLOW, pretend
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions
from lit_async_data.engine.device.inline_queue import InlineQueue
from lit_async_data.engine.pipeline.slots import READY
from lit_async_data.errors import ClosedError, ConfigError, ReadError, TransformError
from lit_async_data.order.plan import EpochPlan
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.testing import ArraySource

# Over 64 KiB per batch of 4, so that x is handed out as the slot itself.
WIDE = 20_000
LENGTH = 18


def numbers(length=LENGTH, width=WIDE):
    first = np.arange(length)
    return ArraySource({"x": np.repeat(first.astype(np.float32), width).reshape(length, width), "y": first})


def loader_of(source=None, **options):
    keep = {
        name: options.pop(name)
        for name in ("rank", "world_size", "device_depth", "device_transform")
        if name in options
    }
    return AsyncLoader(source or numbers(), LoaderOptions(**{"batch_size": 4, **options}), **keep)


def order(epoch=0, *, length=LENGTH, shuffle="global", seed=0):
    return (
        EpochPlan(length=length, batch_size=4, shuffle=shuffle, seed=seed, epoch=epoch)
        .samples(np.arange(length))
        .tolist()
    )


def seen(batches):
    return [number for batch in batches for number in batch["y"].tolist()]


@pytest.mark.parametrize(
    ("workers", "queue_depth", "device_depth"), [(0, 4, 2), (1, 1, 2), (1, 4, 0), (2, 1, 0), (2, 4, 2)]
)
def test_the_order_never_depends_on_how_it_is_read(workers, queue_depth, device_depth):
    with loader_of(workers=workers, queue_depth=queue_depth, device_depth=device_depth) as loader:
        assert [seen(loader) for _ in range(3)] == [order(0), order(1), order(2)]


def test_the_length_is_the_number_of_batches():
    with loader_of() as loader, loader_of(drop_last=True) as dropping:
        assert len(loader) == len(list(loader)) == 5
        assert len(dropping) == len(list(dropping)) == 4


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("width", [WIDE, 3], ids=["lent", "several batches to a slot"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_short_batches_are_filled_with_their_last_sample(monkeypatch, ranks, width, on_device):
    streams, found, options = FakeStreams("compute"), [], {"pad_last": True, "return_indices": True}
    if on_device:  # with a transform, without which fields would leave their block on the slow stream
        pretend(monkeypatch, lambda device: streams)
        options["device_transform"] = lambda batch: batch
    for rank in range(ranks):
        with loader_of(numbers(17, width), rank=rank, world_size=ranks, **options) as loader:
            batches = list(loader)
            assert list(loader.spec) == list(batches[0]) == ["x", "y", "mask", "index"]
        for batch in batches:
            real = int(batch["mask"].sum())
            assert batch["x"].shape == (4, width)
            assert batch["mask"].tolist() == [True] * real + [False] * (4 - real)
            assert batch["y"][real:].eq(batch["y"][real - 1]).all()
            assert torch.equal(batch["x"][:, 1], batch["y"].float())
            assert torch.equal(batch["index"], batch["y"])
            found += batch["y"][:real].tolist()
    assert sorted(found) == list(range(17))


def test_masks_need_a_key_of_their_own():
    with pytest.raises(ConfigError, match="pad_last: the source has a field 'mask' of its own"):
        loader_of(ArraySource({"mask": np.arange(4)}), pad_last=True)


def test_ids_come_with_the_batch(images):
    with AsyncLoader(HDF5Source(images), {"batch_size": 10, "return_indices": True}) as loader:
        data, _, ids = next(loader)
        assert torch.equal(data[:, 0, 0, 0].long(), ids)
    with loader_of(return_indices=True) as loader:
        batch = next(loader)
        assert torch.equal(batch["index"], batch["y"])


def test_a_batch_may_be_written_to_while_others_are_filled():
    with loader_of() as loader:
        first = next(loader)
        first["x"].zero_()
        rest = list(loader)
        assert first["x"].abs().sum() == 0
        assert all((batch["x"][:, 0] == batch["y"]).all() for batch in rest)


def test_an_autograd_graph_keeps_its_batch():
    weight = torch.ones(WIDE, requires_grad=True)
    with loader_of() as loader:
        losses = [(batch["x"] * weight).sum() for batch in loader]
        seen(loader)
        torch.stack(losses).sum().backward()
    assert torch.equal(weight.grad, torch.full((WIDE,), float(sum(range(LENGTH)))))


def test_batches_outlive_the_loader():
    with loader_of() as loader:
        batch = next(loader)
    del loader
    gc.collect()
    assert torch.equal(batch["x"][:, 0].long(), batch["y"])


def test_iterating_again_and_again_starts_no_threads():
    with loader_of(workers=2) as loader:
        for _ in range(30):
            next(iter(loader))
        assert sum("lit_async_data" in thread.name for thread in threading.enumerate()) <= 2


def test_epochs_are_read_once_and_nothing_is_dropped_between_them():
    with loader_of() as loader:
        for _ in range(4):
            seen(loader)
        # 5 batches an epoch, and at the end no more than the slots that are read ahead.
        assert 20 <= loader.stats().read.batches <= 20 + loader.footprint.budget.slots


@pytest.mark.parametrize("length", [1, 4, 8, 12])
@pytest.mark.parametrize("keep", [False, True])
def test_no_slot_is_lost_when_an_epoch_is_shorter_than_the_queue(length, keep):
    with loader_of(numbers(length), shuffle="none", timeout_s=60) as loader:
        kept = []
        for _ in range(8):
            batches = list(loader)
            assert seen(batches) == list(range(length))
            kept += batches if keep else []
        del batches, kept
        pipeline = loader.machinery.engine.feed.pipeline
        assert pipeline.pool.held == 0
        until(pipeline, lambda: pipeline.ready == pipeline.pool.count(READY) == len(pipeline.pool))


@pytest.mark.parametrize("seconds", [0, 1e9])
def test_a_full_queue_is_shown_as_full_however_many_batches_are_read_together(monkeypatch, seconds):
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", seconds)
    chunks = StorageLayout(reading="copied")
    source = ArraySource({"y": np.arange(2000)}, parts={"a": 2000}, chunks=chunks)
    with loader_of(source, shuffle="none", workers=1, queue_depth=3) as loader:
        assert loader.footprint.layout.batches == 32
        next(loader)
        pipeline = loader.machinery.engine.feed.pipeline
        until(pipeline, lambda: pipeline.ready >= 3)
        assert str(loader.fill) == "host 3/3"


def test_set_epoch_chooses_the_next_pass():
    with loader_of() as loader:
        loader.set_epoch(5)
        assert seen(loader) == order(5)
        loader.batch_sampler.sampler.set_epoch(9)
        assert seen(loader) == order(9)
        assert seen(loader) == order(10)


def test_prefetch_reads_without_being_asked_for_a_batch():
    read = threading.Event()

    class Telling(ArraySource):
        def read_into(self, samples, out):
            super().read_into(samples, out)
            read.set()

    with loader_of(Telling({"y": np.arange(LENGTH)})) as loader:
        loader.machinery.prefetch()
        assert read.wait(30)


class Bad(ArraySource):
    """Cannot read one of its samples."""

    def __init__(self, sample):
        super().__init__({"y": np.arange(LENGTH)})
        self._sample = sample

    def read_into(self, samples, out):
        if self._sample in samples:
            raise OSError(5, "Input/output error")
        super().read_into(samples, out)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_at_its_place_and_iteration_can_go_on(workers):
    with loader_of(Bad(9), shuffle="none", workers=workers) as loader:
        before = seen(itertools.islice(loader, 2))
        with pytest.raises(ReadError, match=r"batch 2 of epoch 0 \(samples 8, 9, 10, … \(4 in all\)\).*Input/output"):
            next(loader)
        assert before == list(range(8))
        assert seen([next(loader), next(loader)]) == list(range(12, 18))
        with pytest.raises(StopIteration):
            next(loader)


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


def test_a_device_transform_that_fails_is_an_error_at_its_place():
    def fails(batch):
        raise KeyError("image")

    with loader_of(device_transform=fails) as loader:
        with pytest.raises(TransformError, match="batch 0 of epoch 0: KeyError: 'image'"):
            next(loader)
        with pytest.raises(TransformError, match="batch 1"):
            next(loader)


def test_a_closed_loader_says_so():
    loader = loader_of()
    next(loader)
    loader.close()
    loader.close()
    for call in (loader.next, loader.machinery.prefetch, lambda: next(loader)):
        with pytest.raises(ClosedError, match="build a new one"):
            call()


def test_a_loader_that_was_not_used_can_be_copied_with_its_source():
    with loader_of() as loader, copy.deepcopy(loader) as copied:
        assert copied.source is not loader.source
        for _ in range(2):
            assert seen(copied) == seen(loader)


@pytest.mark.parametrize(
    ("way", "used"),
    [(pickle.dumps, False), (pickle.dumps, True), (copy.copy, False), (copy.copy, True), (copy.deepcopy, True)],
)
def test_a_loader_cannot_be_pickled_or_copied_and_says_what_to_do(way, used):
    with loader_of() as loader:
        if used:
            next(loader)
        with pytest.raises(TypeError, match="pickle or copy its source and its options, and build another loader"):
            way(loader)


def test_a_daemon_thread_that_iterates_at_the_interpreters_exit_prints_no_traceback(images):
    program = f"""
import threading
from lit_async_data import AsyncLoader, HDF5Source

enough = threading.Semaphore(0)

def consume():
    loader = AsyncLoader(HDF5Source({images!r}), dict(batch_size=4, workers=2))
    while True:
        for batch in loader:
            enough.release()

threading.Thread(target=consume, daemon=True).start()
for _ in range(500):
    enough.acquire()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    # Before Python 3.14 the interpreter ends a daemon thread inside whatever C++ function it is in: torch aborts then.
    assert "Traceback" not in done.stderr


def test_a_loader_that_is_forgotten_ends_its_threads():
    before = threading.active_count()
    loader = loader_of(workers=2)
    batch = next(loader)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None  # at once: nothing refers back to it
    assert threading.active_count() == before
    assert len(batch["y"]) == 4


def test_nothing_is_allocated_or_started_before_the_first_batch():
    before = threading.active_count()
    with loader_of() as loader:
        iter(loader)
        assert len(loader) == 5
        assert loader.stats().read.slots == 0
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("batch_size", 0), ("shuffle", "all"), ("worker_kind", "core"), ("augment", 1), ("timeout_s", 0)),
        *(("weights", 1), ("epoch_size", 5)),
    ],
)
def test_errors_of_options_have_their_key(option, value):
    with pytest.raises(ConfigError, match=f"^loader.{option}: ") as error:
        LoaderOptions.of({"batch_size": 4, option: value}, "loader.")
    assert error.value.option == f"loader.{option}"


@pytest.mark.parametrize("given", [{}, {"world_size": 1}, {"rank": 1, "world_size": 2}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_would_read_the_same_samples_are_an_error_at_the_first_batch(monkeypatch, given, ranks):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    with AsyncLoader(numbers(), {"batch_size": 4, "workers": 0}, **given) as loader:
        if ranks > 1 and not given:
            with pytest.raises(ConfigError) as error:
                next(loader)
            assert error.value.option == "world_size"
        else:
            assert len(list(loader)) == len(loader)


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
    assert stats.wait_s > 0
    assert stats.epoch_gap_s > 0
    assert stats.queue_fill == 0
    names = "wait_ms", "device_wait_ms", "queue_fill", "epoch_gap_ms", "read_mb_s"
    assert set(stats.metrics()) == {f"data/{name}" for name in names}
    assert stats.metrics()["data/device_wait_ms"] == stats.metrics()["data/wait_ms"]  # it waits when the loop does


def test_the_same_warning_of_several_loaders_is_one_line_with_a_stage(caplog):
    source = ArraySource({"x": np.zeros(8)})
    loaders = [AsyncLoader(source, {"batch_size": 4}) for _ in range(3)]
    for loader, label in zip(loaders, ("train", "val", "test")):
        loader.machinery.wiring.label, loader.machinery.wiring.logged = label, loaders[0].machinery.wiring.logged
        loader._say(logging.WARNING, "this is slow")
    loaders[2]._say(logging.WARNING, "this, too")
    assert [each.getMessage() for each in caplog.records] == ["train: this is slow", "test: this, too"]


def test_threads_need_not_be_asked_after_each_batch(monkeypatch):
    asked = []
    monkeypatch.setattr(InlineQueue, "prefetch", lambda queue, key: asked.append(key))
    with AsyncLoader(ArraySource({"y": np.arange(40)}), {"batch_size": 4, "workers": 1}) as loader:
        assert sorted(torch.cat([batch["y"] for batch in loader]).tolist()) == list(range(40))
    assert asked == []


@SLOW
@pytest.mark.parametrize("externally_driven", [False, True])
def test_the_loader_sends_batches_to_a_device_with_streams(monkeypatch, slow, externally_driven):
    streams = FakeStreams(slow)
    pretend(monkeypatch, lambda device: streams)
    numbers = np.arange(20, dtype=np.int64)
    arrays = {"x": np.repeat(numbers, 10_000).reshape(20, 10_000), "y": numbers}
    source = ArraySource(arrays, chunks=StorageLayout(reading="copied"))
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle="none")) as loader:
        assert loader.footprint.layout.batches == 5
        loader.machinery.wiring.externally_driven = externally_driven
        for _ in range(4):
            for step, batch in enumerate(loader):
                streams.synchronize()
                assert batch["y"].tolist() == batch["x"][:, -1].tolist() == list(range(4 * step, 4 * step + 4))
                if externally_driven:
                    loader.machinery.prefetch()
        streams.synchronize()
