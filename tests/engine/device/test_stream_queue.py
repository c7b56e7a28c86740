"""The way to a device, on one that is not there: what a missing wait breaks shows as wrong values, every time.

That the waits are enough, whatever the streams do in time, is shown in test_waits.py.
"""

import contextlib
import gc
import weakref

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

from lit_async_data import prefetched
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import FormatError, ReadError, TransformError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.plan import BatchIndex
from lit_async_data.testing import ArraySource

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


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


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ZeroDivisionError("mine"), TransformError, r"batch 1 of epoch 0: ZeroDivisionError: mine"),
        (FormatError("mine", stage="transform"), FormatError, "^mine$"),
    ],
)
def test_whatever_a_transform_raises_is_raised_at_its_place(error, raised, message, depth):
    outcomes = iter([None, error, None, None])

    def transform(batch):
        if error := next(outcomes):
            raise error
        return batch

    with queue_on(FakeStreams("side"), transform=transform, depth=depth) as queue:
        queue.feed.poll = queue.feed.get
        queue.take(BatchIndex(0, 0))
        queue.prefetch(BatchIndex(0, 1))
        with pytest.raises(raised, match=message) as caught:
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


def test_a_device_in_trouble_does_not_keep_the_workers_alive(caplog):
    class Broken(FakeStreams):
        def happened(self, event, *, block):
            raise RuntimeError("device-side assert triggered")

    with queue_on(Broken("side")) as queue:
        queue.take(BatchIndex(0, 0))
    assert "waiting for copies to the device failed: device-side assert" in caplog.text


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
