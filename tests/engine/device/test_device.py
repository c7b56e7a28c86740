"""The way to a device, on one that is not there: what a missing wait breaks shows as wrong values, every time."""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import (
    BATCH,
    SLOW,
    STEPS,
    Step,
    new_schedule,
    on_device,
    pretend,
    queue_on,
    trained,
    write_numbers,
)
from torch.utils.data import DataLoader
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import StorageLayout, prefetched
from lit_async_data.engine.device import streams as device_streams
from lit_async_data.engine.device.slot_feed import SlotFeed
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.pipeline.slots import COPYING
from lit_async_data.engine.resources import memory
from lit_async_data.errors import ConfigError, FormatError, ReadError, TransformError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.plan import BatchIndex
from lit_async_data.testing import ArraySource


@pytest.fixture(autouse=True)
def however_slow_the_machine_is(monkeypatch):
    """How many batches are read together depends on the time that they take."""
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 1e9)


@SLOW
@pytest.mark.parametrize(
    ("depth", "transforms", "late", "batches"),
    [
        (0, False, False, 3),
        (0, True, True, 1),
        (1, False, True, 3),
        (1, True, False, 1),
        (2, False, True, 1),
        (2, True, False, 3),
        (4, True, True, 3),
        (4, False, False, 1),
    ],
)
def test_every_step_sees_its_own_batch(slow, depth, transforms, late, batches):
    streams = FakeStreams(slow)
    transform = on_device(streams) if transforms else None
    assert trained(streams, epochs=2, depth=depth, transform=transform, late=late, batches=batches) == []


class FreesTheSlotWithItsFirstBatch(SlotFeed):
    def _take(self, filled):
        super()._take(filled)
        for _ in filled.batches[1:]:
            self._release()


@pytest.mark.parametrize(("feed", "right"), [(SlotFeed, True), (FreesTheSlotWithItsFirstBatch, False)])
def test_a_slot_is_not_filled_again_before_all_of_its_batches_have_been_copied(feed, right):
    """1. Batches 1 and 2 lie in one slot. 2. Batch 1 has been copied. 3. The copy of batch 2 is enqueued on a slow side
    stream. 4. Batch 3 is read. 5. The copy runs."""
    streams = FakeStreams("side")
    step = Step(streams)
    with queue_on(streams, workers=0, feed=feed, batches=2) as queue:
        plan = queue.feed.pipeline.schedule.plan(0)
        queue.feed.poll = queue.feed.get  # batches are read when the queue looks for them
        for queue.depth in (2, 4):
            queue.prefetch(BatchIndex(0, 0))
            if queue.depth == 2:
                streams.synchronize()
        for number in range(STEPS):
            step(BatchIndex(0, number), queue.take(BatchIndex(0, number)), plan.batch(number))
        streams.synchronize()
    assert (step.wrong == []) is right


class KeepsTheSlotOfWhatItDrops(SlotFeed):
    def _drop_rest(self):
        self._to_copy.clear()


@pytest.mark.parametrize(("feed", "left"), [(SlotFeed, 0), (KeepsTheSlotOfWhatItDrops, 1)])
@pytest.mark.parametrize("ending", ["another epoch", "the end of the pass"])
def test_a_slot_is_free_when_the_rest_of_its_batches_is_dropped(feed, left, ending):
    streams = FakeStreams("side")
    with queue_on(streams, feed=feed, depth=0, workers=0, batches=2) as queue:
        for number in range(2):  # batches 1 and 2 lie in one slot
            queue.take(BatchIndex(0, number))
        assert queue.feed.ready == 1
        if ending == "another epoch":
            queue.feed.prefetch(BatchIndex(5, 0))
        else:
            queue.feed.rest(wait=True)
        assert queue.feed.ready == 0
        queue.reclaim(block=True)
        assert queue.feed.pipeline.pool.count(COPYING) == left


def test_the_calls_to_the_device_come_in_the_order_that_the_module_describes():
    streams = FakeStreams("side")
    with queue_on(streams, depth=1) as queue:
        queue.take(BatchIndex(0, 0))
        assert streams.calls == [
            ("timed", "compute"),  # asked for
            ("record", "compute"),  # allocated
            ("wait", "side"),
            ("copy", "side"),  # x
            ("copy", "side"),  # the block of y and z
            ("record", "side"),  # copied
            ("record", "side"),  # ready
            ("wait", "compute"),
            ("timed", "compute"),  # came
            ("copy", "compute"),  # y out of the block
            ("copy", "compute"),  # z out of the block
        ]


def test_fields_of_a_slot_of_several_batches_travel_by_themselves():
    streams = FakeStreams("side")
    with queue_on(streams, depth=0, batches=3) as queue:
        for number in range(STEPS):
            streams.calls.clear()
            queue.take(BatchIndex(0, number))
            assert [call for call in streams.calls if call[0] == "copy"] == [("copy", "side")] * 3  # x, y, z


def test_destinations_are_allocated_before_the_host_batch_is_there():
    """So that the copy waits for the steps before this one and not for this one."""
    streams = FakeStreams("compute")
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
        queue.feed.poll = lambda key: None  # nothing is ready yet
        queue.prefetch(BatchIndex(0, 1))
        reserved = [ticket.allocated for ticket in queue.tickets]
        streams.launch("step", lambda: None)
        del queue.feed.poll
        queue.take(BatchIndex(0, 1))
        assert len(reserved) == 2
        assert reserved[0].done  # the copy forced compute up to the event ...
        assert streams.compute().pending  # ... and no further: the step is still to be done


def test_a_batch_is_read_while_the_one_before_is_copied():
    """There are two slots. 1. Batch 0 is copied on a slow side stream. 2. Batch 1 is read into the other slot. 3. For
    batch 2 the loop waits for the copy of batch 0, and not for that of batch 1."""
    streams, under_way = FakeStreams("side"), []
    streams.compute().eager = False

    def read(epoch, samples, out):
        under_way.append([copying.done.done for copying in queue.copying])

    with queue_on(streams, workers=0, depth=1, read=read) as queue:
        for number in range(4):
            queue.take(BatchIndex(0, number))
            queue.prefetch(BatchIndex(0, number + 1))
    assert under_way == [[], [False], [False], [False]]


def test_all_engines_of_a_process_have_one_side_stream_for_a_device(monkeypatch):
    """torch hands out 32 in turn: the user's own would be among those of many engines."""
    taken = []

    class Stream:
        def __init__(self, device=None, *, stream_id=0, device_index=0, device_type=1):
            if device is not None:
                taken.append(device)
                stream_id, device_index = len(taken), device.index
            self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type

    monkeypatch.setattr(torch, "Stream", Stream)
    device_streams._side_of.cache_clear()
    one, other = torch.device("cuda:0"), torch.device("cuda:1")
    device_streams.TorchStreams(one)
    assert not taken  # predictions, which are copied back to the host, need none
    sides = [device_streams.TorchStreams(one).side for _ in range(40)]
    assert {side.stream_id for side in sides} == {1}
    assert len(set(map(id, sides))) == 40  # an object cannot be entered twice at a time
    assert device_streams.TorchStreams(other).side.stream_id == 2
    assert taken == [one, other]
    device_streams._side_of.cache_clear()


@pytest.mark.parametrize(
    ("value", "unnoted"),
    [
        (torch.zeros(3, device="meta"), False),  # of another device
        (SimpleNamespace(record_stream=lambda stream: None), False),
        (SimpleNamespace(x=torch.zeros(3)), True),
        (torch.eye(3).to_sparse(), True),  # for which torch has no such method
    ],
)
def test_what_cannot_note_who_uses_its_memory_is_known(monkeypatch, value, unnoted):
    cpu = torch.device("cpu")
    monkeypatch.setattr(device_streams, "_side_of", functools.cache(lambda device: SimpleNamespace(unnoted=False)))
    streams = device_streams.TorchStreams(cpu)
    streams.record_stream(value, torch.Stream(stream_id=0, device_index=0, device_type=0))
    assert streams.unnoted is unnoted


@pytest.mark.parametrize(("depth", "batches"), [(0, 3), (2, 1), (2, 3)])
def test_an_error_comes_at_its_place_and_the_order_goes_on(depth, batches):
    streams = FakeStreams("side")
    bad = new_schedule().plan(0).batch(1)[0]

    def read(epoch, samples, out):
        if epoch == 0 and bad in samples:
            raise OSError(5, "Input/output error")
        write_numbers(epoch, samples, out)

    step = Step(streams)
    with queue_on(streams, depth=depth, read=read, batches=batches) as queue:
        schedule = queue.feed.pipeline.schedule
        for epoch in range(4):
            for number in range(STEPS):
                key = BatchIndex(epoch, number)
                if key == (0, 1):
                    with pytest.raises(ReadError, match="batch 1 of epoch 0"):
                        queue.take(key)
                else:
                    step(key, queue.take(key), schedule.plan(epoch).batch(number))
                queue.prefetch(schedule.following(key))
        streams.synchronize()
        queue.reclaim(block=True)
    assert step.wrong == []


def test_a_transform_that_fails_is_an_error_at_its_place():
    streams = FakeStreams("side")
    outcomes = iter([None, ZeroDivisionError("mine"), None])

    def transform(batch):
        error = next(outcomes)
        if error:
            raise error
        return batch

    with queue_on(streams, transform=transform, depth=0) as queue:
        queue.take(BatchIndex(0, 0))
        with pytest.raises(TransformError, match=r"batch 1 of epoch 0: ZeroDivisionError: mine") as caught:
            queue.take(BatchIndex(0, 1))
        assert caught.value.stage == "transform"
        assert queue.take(BatchIndex(0, 2))["y"].shape == (BATCH,)


def test_a_transform_that_fails_lets_its_copy_end_before_its_memory_is_given_out_again():
    streams = FakeStreams("side")

    def transform(batch):
        raise KeyError("mine")

    with queue_on(streams, transform=transform, depth=0) as queue:
        with pytest.raises(TransformError):
            queue.take(BatchIndex(0, 0))
        other = streams.empty((BATCH, 100, 100, 3), torch.uint8)
        streams.launch("step", lambda: other.fill_(7))
        streams.synchronize()
        assert (other == 7).all()


def test_whatever_a_transform_raises_is_raised_when_its_batch_is_asked_for():
    streams = FakeStreams("side")
    error = FormatError("mine")

    def transform(batch):
        raise error

    with queue_on(streams, transform=transform) as queue:
        queue.feed.poll = queue.feed.get
        queue.prefetch(BatchIndex(0, 0))
        with pytest.raises(FormatError, match="mine"):
            queue.take(BatchIndex(0, 0))


def test_a_device_in_trouble_does_not_keep_the_workers_alive(caplog):
    class Broken(FakeStreams):
        def happened(self, event, *, block):
            raise RuntimeError("device-side assert triggered")

    with queue_on(Broken("side")) as queue:
        queue.take(BatchIndex(0, 0))
    assert "waiting for copies to the device failed: device-side assert" in caplog.text


class Interrupted(FakeStreams):
    """A device whose first wait for all of side ends with Ctrl-C."""

    waited = False

    def happened(self, event, *, block):
        if block and not self.waited:
            self.waited = True
            raise KeyboardInterrupt
        return super().happened(event, block=block)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_memory_of_an_interrupted_copy_stays_pinned_until_side_is_done(batches, monkeypatch):
    """1. A copy is enqueued on side, which is slow. 2. Ctrl-C comes while the queue closes. 3. The feed is closed, and
    the pool drops its arrays: where one of them ends, its memory is pinned no more."""
    ended = []

    def allocated(nbytes, *, pinned):
        slot = np.zeros(2 * nbytes, np.uint8)[:nbytes]  # its views refer to the whole array, as those of a shared slot
        weakref.finalize(slot, ended.append, nbytes)
        return slot

    monkeypatch.setattr(memory, "allocated", allocated)
    streams = Interrupted("side")
    with queue_on(streams, depth=0, workers=0, batches=batches) as queue:
        queue.take(BatchIndex(0, 0))
        with pytest.raises(KeyboardInterrupt):
            queue.close()
        queue.feed.close()
        assert streams.side.pending
        assert len(ended) == 1  # of two slots
        queue.close()
        assert len(ended) == 2


class Copied(ArraySource):
    """Arrays of which the loader believes that several batches can be read together."""

    @property
    def chunks(self):
        return StorageLayout(reading="copied")


@pytest.mark.parametrize("kind", ["AsyncLoader", "DataLoader"])
def test_what_reads_batches_sees_the_inference_mode_of_the_loop(kind, monkeypatch):
    """Lightning validates in it: a network that encodes samples would track gradients without it."""
    pretend(monkeypatch, lambda device: FakeStreams("side"))
    seen = set()

    def noted(batch):
        seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return batch

    with contextlib.ExitStack() as stack:
        if kind == "AsyncLoader":
            source, options = ArraySource({"x": np.arange(8.0)}), LoaderOptions(batch_size=4, workers=0)
            loader = stack.enter_context(AsyncLoader(source, options, batch_transform=noted))
            assert list(loader.spec) == ["x"]  # calls it, too
            seen.clear()
        else:
            given = DataLoader(torch.arange(8.0), batch_size=4, collate_fn=lambda rows: noted(torch.stack(rows)))
            loader = stack.enter_context(prefetched(given, device="cpu"))
        with torch.inference_mode():
            assert len(list(loader)) == 2
    assert seen == {(True, False)}


@SLOW
@pytest.mark.parametrize("externally_driven", [False, True])
def test_the_loader_sends_batches_to_a_device_with_streams(monkeypatch, slow, externally_driven):
    streams = FakeStreams(slow)
    pretend(monkeypatch, lambda device: streams)
    numbers = np.arange(20, dtype=np.int64)
    source = Copied({"x": np.repeat(numbers, 10_000).reshape(20, 10_000), "y": numbers})
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


def test_a_device_without_a_number_is_the_one_that_was_current_at_the_first_batch(monkeypatch):
    current, asked = [3], []
    monkeypatch.setattr(device_streams, "checked_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[-1])
    pretend(monkeypatch, lambda device: asked.append(device) or FakeStreams("side"))
    source = ArraySource({"x": np.arange(40.0)})
    with AsyncLoader(source, {"batch_size": 4, "workers": 0}, device="cuda") as loader:
        assert loader.device == torch.device("cuda")
        next(loader)
        current.append(0)
        loader.device_depth = 1  # begins with a new engine
        next(loader)
        assert asked == [torch.device("cuda:3")] * 2
        loader.device = "cuda"
        next(loader)
        assert asked[-1] == loader.device == torch.device("cuda:0")


@pytest.mark.parametrize(("device", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("xpu:0", False)])
def test_a_device_that_does_not_exist_is_an_error_when_the_loader_is_built(monkeypatch, device, there):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    message = r"^device: there is no (cuda:2 here; cuda devices here: 2|xpu here)"
    with contextlib.nullcontext() if there else pytest.raises(ConfigError, match=message):
        AsyncLoader(ArraySource({"x": np.arange(8.0)}), {"batch_size": 4}, device=device).close()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 64, 64), (8,)])
@pytest.mark.parametrize("kind", [ArraySource, Copied])
def test_batches_arrive_on_a_gpu(shape, kind):
    numbers = np.arange(1000, dtype=np.int64)
    source = kind({"x": np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (1000, *shape)), "y": numbers})
    with AsyncLoader(source, LoaderOptions(batch_size=64), device="cuda") as loader:
        assert (loader.footprint.layout.batches > 1) == (kind is Copied)
        for _ in range(3):
            seen = []
            for batch in loader:
                torch.cuda._sleep(10**6)
                assert batch["x"].device.type == "cuda"
                assert torch.equal(batch["x"].flatten(1)[:, -1], batch["y"])
                seen += batch["y"].tolist()
            assert sorted(seen) == numbers.tolist()


def test_inline_devices_are_cpu_and_mps():
    assert [name for name in ("cpu", "mps", "cuda") if device_streams.has_streams(torch.device(name))] == ["cuda"]


def test_a_capture_is_seen_on_every_device_for_which_torch_tells_it(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    assert device_streams.TorchStreams(torch.device("xpu:0")).capturing
    assert not device_streams.TorchStreams(torch.device("cpu")).capturing


def test_nothing_is_copied_while_a_graph_is_recorded():
    streams = FakeStreams("side")
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
        streams.calls.clear()
        streams.capturing = True
        queue.prefetch(BatchIndex(0, 1))
        assert not streams.calls
        assert not queue.ready
        streams.capturing = False
        queue.take(BatchIndex(0, 1))


class Remembering(FakeStreams):
    """A device that knows which of its tensors live."""

    def __init__(self, slow):
        super().__init__(slow)
        self.made = []

    def empty(self, shape, dtype):
        tensor = super().empty(shape, dtype)
        self.made.append(weakref.ref(tensor))
        return tensor


@pytest.mark.parametrize("transforms", [False, True])
def test_what_an_interrupted_copy_may_still_write_to_lives_until_side_is_done(monkeypatch, transforms):
    """1. Copies are enqueued on side, which is slow. 2. Ctrl-C. 3. The queue is closed. 4. Others get its memory."""
    streams = Remembering("side")

    def interrupt(*given):
        raise KeyboardInterrupt

    with queue_on(streams, depth=1, transform=interrupt if transforms else None) as queue:
        record = streams.record
        if not transforms:
            monkeypatch.setattr(
                streams, "record", lambda stream: interrupt() if stream is streams.side else record(stream)
            )
        with pytest.raises(KeyboardInterrupt):
            queue.take(BatchIndex(0, 0))
        monkeypatch.undo()
        assert streams.side.pending
        gc.collect()
        assert all(tensor() is not None for tensor in streams.made[:2])  # x, and the block of y and z
        queue.close()
        assert not streams.side.pending
        queue.close()
