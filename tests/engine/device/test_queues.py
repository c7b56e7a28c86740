"""The way to a device, on one that is not there: what a missing wait breaks shows as wrong values, every time.

That the waits are enough, whatever the streams do in time, is shown in test_waits.py.
"""

import dataclasses
import gc
import pathlib
import weakref
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import (
    BATCH,
    SLOW,
    STEPS,
    ComputeNeverWaits,
    Small,
    Step,
    copied_ahead,
    new_schedule,
    on_device,
    pretend,
    queue_on,
    trained,
    write_numbers,
)
from support.failures import raising
from support.sources.numbered import loader_of, numbers
from waiting.on_device.copy_verifier import TransferError, verified_copies
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device import queues
from lit_async_data.engine.device.queues import InlineQueue, note_all
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.pipeline.pipeline import COPYING
from lit_async_data.errors import FormatError, ReadError, TransformError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.plan import BatchIndex
from lit_async_data.testing import ArraySource

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


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

    def read(keyed, out):
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

    def read(keyed, out):
        if keyed.epoch == 0 and bad in keyed.samples:
            raise OSError(5, "Input/output error")
        write_numbers(keyed, out)

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
    with queue_on(streams, transform=raising(KeyError("mine")), depth=0) as queue:
        with pytest.raises(TransformError):
            queue.take(BatchIndex(0, 0))
        other = streams.empty((BATCH, 100, 100, 3), torch.uint8)
        streams.launch("step", lambda: other.fill_(7))
        streams.synchronize()
        assert (other == 7).all()


def test_a_device_in_trouble_does_not_keep_the_workers_alive(caplog, monkeypatch):
    streams = FakeStreams("side")
    monkeypatch.setattr(streams, "happened", raising(RuntimeError("device-side assert triggered")))
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
    assert "waiting for copies to the device failed: device-side assert" in caplog.text


def test_what_reads_batches_sees_the_inference_mode_of_the_loop(monkeypatch):
    """Lightning validates in it: a network that encodes samples would track gradients without it."""
    pretend(monkeypatch, lambda device: FakeStreams("side"))
    seen = []

    def noted(batch):
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return batch

    source = ArraySource({"x": np.arange(8.0)})
    with AsyncLoader(source, LoaderOptions(batch_size=4, workers=0), batch_transform=noted) as loader:
        assert list(loader.spec) == ["x"]  # calls it, too
        with torch.inference_mode():
            assert len(list(loader)) == 2
    assert seen[1:] == [(True, False)] * 2


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
    streams, interrupt = Remembering("side"), raising(KeyboardInterrupt)
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
        enqueued = streams.record(streams.side)
        queue.close()
        assert enqueued.done
        queue.close()


class Sealed:
    """An object that moves itself, and hides its memory."""

    def to(self, device, **options):
        return self


def waits_before_transforms(queue, streams, batches=3):
    for step in range(batches):
        queue.take(BatchIndex(0, step))
    return streams.calls.count(("wait", "side")) - batches


def test_objects_that_hide_memory_have_all_transforms_wait_until_their_queue_is_closed(caplog):
    streams, others = FakeStreams("side"), FakeStreams("side")
    with queue_on(streams, transform=lambda batch: batch | {"sealed": Sealed()}) as queue:
        assert waits_before_transforms(queue, streams) == 2  # from the first that was handed out on
        with queue_on(others, transform=dict) as other:  # gets memory of the same side
            assert waits_before_transforms(other, others) == 3
    with queue_on(others, transform=dict) as other:
        others.calls.clear()
        assert waits_before_transforms(other, others) == 0
    (line,) = caplog.messages
    assert line == "no tensor is found in Sealed: transforms wait for steps, unless it has record_stream"


# -- a device without memory for all batches ahead ---------------------------------------------------------------------

X_BYTES = BATCH * 100 * 100 * 3


@SLOW
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(("room", "depth"), [(1.5, 0), (2.5, 1), (3.5, 2)])
def test_fewer_batches_are_copied_ahead_where_the_device_has_no_memory_for_more(slow, batches, room, depth, caplog):
    streams = Small(slow, room * X_BYTES)
    assert trained(streams, depth=2, batches=batches) == []
    lines = [line for line in caplog.messages if f"are copied ahead as with device_depth={depth}" in line]
    assert len(lines) == len(caplog.messages) == (depth < 2)


@SLOW
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_transform_without_memory_ahead_is_called_again_when_its_batch_is_taken(slow, batches, depth, caplog):
    """Its batch is eight times as large as what is copied."""
    streams = Small(slow, 15 * X_BYTES)
    assert trained(streams, depth=depth, batches=batches, transform=on_device(streams)) == []
    assert ["device_depth=" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("transforms", [False, True])
def test_a_batch_that_is_taken_without_memory_is_torchs_error_and_comes_when_there_is_some(transforms):
    streams = Small("side", 0.5 * X_BYTES)
    with queue_on(streams, workers=0, transform=on_device(streams) if transforms else None) as queue:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                queue.take(BatchIndex(0, 0))
        streams.room = 20 * X_BYTES
        batch = queue.take(BatchIndex(0, 0))
        streams.synchronize()
        assert batch["y"].tolist() == [number % 251 for number in new_schedule().plan(0).batch(0)]


def test_a_batch_that_waits_for_memory_gives_its_host_memory_back_when_it_is_dropped():
    streams = Small("side", 15 * X_BYTES)
    with queue_on(streams, depth=2, workers=0, transform=on_device(streams)) as queue:
        for epoch in range(4):
            queue._most = 2
            batch = queue.take(BatchIndex(epoch, 0))
            queue.feed.poll = queue.feed.get
            queue.prefetch(BatchIndex(epoch, 1))
            assert [ticket.host is not None for ticket in queue.tickets] == [True]
            del batch, queue.feed.poll
            if epoch < 3:
                queue._forget()
                queue.reclaim(block=True)
        queue.close()
        assert queue.feed.pipeline.pool.count(COPYING) == 0


def test_a_queue_that_is_closed_while_a_graph_is_recorded_waits_for_its_copies_later():
    """Garbage collection may close a loader at any time. 1. Its copies are on a slow side stream. 2. It is closed. 3.
    Nobody waits, and its memory stays. 4. The next queue waits."""
    streams = Remembering("side")
    with queue_on(streams, depth=1, workers=0) as queue:
        queue.take(BatchIndex(0, 0))
        copied_ahead(queue, 1)
        streams.calls.clear()
        streams.capturing = True
        queue.close()
        assert not streams.calls
        gc.collect()
        assert streams.made[0]() is None  # of the batch that was dropped
        assert streams.made[-2]() is not None
        assert streams.side.pending
        streams.capturing = False
        with queue_on(FakeStreams("side"), workers=0) as other:
            other.prefetch(BatchIndex(0, 0))
        assert not queues.UNFINISHED
        assert not streams.side.pending
        assert not queue.tickets


@pytest.mark.parametrize(("depth", "read"), [(0, []), (1, [BatchIndex(0, 3)])])
def test_batches_are_read_ahead_where_there_is_a_depth(depth, read):
    asked = []
    InlineQueue(SimpleNamespace(lend=None, prefetch=asked.append), depth, None).prefetch(BatchIndex(0, 3))
    assert asked == read


@pytest.mark.parametrize(("made", "found"), [(FakeStreams, False), (ComputeNeverWaits, True)])
def test_copy_verification_finds_a_batch_that_does_not_arrive_and_no_other(monkeypatch, made, found):
    pretend(monkeypatch, lambda device: made("side"))
    with verified_copies(3), loader_of(numbers(40, 5000), queue_depth=2) as loader:
        if found:
            with pytest.raises(TransferError, match=r"batch 0 of epoch 0: .* did not arrive as it was read"):
                list(loader)
        else:
            assert len(list(loader)) == 10


# -- memory in a batch is found and noted, or the object that hides it is named ----------------------------------------


class Hiding:
    def __init__(self, value):
        self.value = value


class Attributed(torch.Tensor):
    """A tensor with attributes."""

    def __new__(cls, value):
        made = torch.zeros(1).as_subclass(cls)
        made.value = (value,)
        return made


@dataclasses.dataclass(frozen=True)
class Sample:
    value: object
    number: int = 3


@pytest.mark.parametrize(
    "outer", [Sample, Attributed, lambda value: {value}, lambda value: {value: 3}, lambda value: UserDict(x=value)]
)
def test_tensors_are_found_in_containers_and_in_their_attributes(outer):
    one, other, noted = torch.ones(2), torch.zeros(2), []
    batch = [{"x": outer(one), "y": other, "z": [other]}]
    assert note_all(batch, lambda value: noted.append(value) or True) is None
    assert sum(value is one for value in noted) == sum(value is other for value in noted) == 1


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (lambda: torch.eye(3).to_sparse(), 2),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), 3),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse).*:UserWarning")
def test_tensors_that_torch_notes_nothing_of_are_noted_in_their_parts(made, parts):
    tensor, noted = made(), []

    def note(value):
        plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested
        noted.append(value) if plain else None
        return plain

    assert note_all(tensor, note) is None
    assert len([value for value in noted if value.numel()]) == parts


def test_objects_that_hide_memory_are_named_and_values_without_memory_hide_none():
    for value in (None, pathlib.Path("x"), torch.float32, torch.Generator(), {1, 2}, np.ones(3), int):
        assert note_all({"x": torch.zeros(1), "y": [value], "z": Sample(value)}, lambda tensor: True) is None
    for value in (Hiding(3), Hiding(torch.zeros(1)), [Sample(Hiding({}))]):
        assert note_all({"x": torch.zeros(1), "y": value}, lambda tensor: True) is Hiding
    assert note_all(torch.zeros(1), lambda tensor: False) is torch.Tensor
