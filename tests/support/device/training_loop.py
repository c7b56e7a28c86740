"""A training loop on `FakeStreams`, and streams that lack one of the required waits."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from waiting.on_device.fake_streams import FakeStreams, raw

from lit_async_data.batch.spec import BatchLayout, BatchSpec, FieldSpec
from lit_async_data.engine import resources
from lit_async_data.engine.device import streams as device_streams
from lit_async_data.engine.device.feeds import CopyFeed
from lit_async_data.engine.device.queues import DeviceTransform, StreamQueue
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.order.plan import BatchIndex, Schedule
from support.plans import plan_of
from support.threads.number_pipelines import setup_of

# x is large and has its own copy to the device; y and z share one.
FIELDS = {"x": FieldSpec((3, 100, 100), np.dtype("u1"), channel=2), "y": FieldSpec((), np.dtype("i8"))}
SPEC = BatchSpec(FIELDS | {"z": FieldSpec((2,), np.dtype("f4"))}, as_mapping=True)

BATCH, STEPS = 4, 5

LENGTH = BATCH * STEPS - 1

SLOW = pytest.mark.parametrize("slow", ["side", "compute"])


def write_numbers(keyed, out):
    for array in out.values():
        array[...] = keyed.samples.reshape(-1, *[1] * (array.ndim - 1)) % 251


def pretend(monkeypatch, make, has_streams=lambda device: True):
    """Have loaders that start copy to the streams that ``make`` returns for a device; host memory is not pinned."""
    monkeypatch.setattr(device_streams, "has_streams", has_streams)
    monkeypatch.setattr(device_streams, "streams_of", lambda device: make(device) if has_streams(device) else None)
    monkeypatch.setattr(resources, "allocated", lambda nbytes, *, pinned: np.zeros(nbytes, np.uint8))


def new_schedule():
    return Schedule(
        lambda **at: plan_of(length=LENGTH, batch_size=BATCH, shuffle="global", seed=0, **at), shuffled=True
    )


@contextlib.contextmanager
def queue_on(streams, *, depth=2, transform=None, read=write_numbers, feed=CopyFeed, workers=1, batches=1):
    """A device queue and its pipeline, closed at the end. ``batches``: the most in a slot."""
    layout = BatchLayout(SPEC, BATCH, batches)
    setup = setup_of(read, new_schedule(), (layout, *2 * [4 if workers else 2]), workers)
    pipeline = ThreadPipeline(setup, functools.partial(resources.allocated, layout.nbytes, pinned=False), timeout_s=60)
    transform = transform and DeviceTransform(transform, torch.device("cpu"))
    queue = StreamQueue(feed(pipeline), streams, depth, transform)
    with contextlib.closing(pipeline), contextlib.closing(queue):
        yield queue


def copied_ahead(queue, batches):
    """Has a queue copy the first batches of epoch 0, each as soon as it gets memory of the host for it."""
    queue.feed.poll = queue.feed.get  # the batches are read when the queue looks for them
    for number in range(batches):
        queue.reclaim(block=True)
        queue.depth = number + 1
        queue.prefetch(BatchIndex(0, 0))


class Step:
    """A training step: a kernel that reads the batch when it runs and records wrong values."""

    def __init__(self, streams):
        self._streams = streams
        self.wrong = []
        self.seen = 0

    def __call__(self, key, batch, samples):
        for name, tensor in batch.items():
            content = raw(tensor)
            expected = (samples % 251).astype(str)
            itemtype = SPEC[name].dtype if tensor.dtype != torch.float64 else np.dtype(np.float64)

            def kernel(content=content, expected=expected, itemtype=itemtype, where=(key, name)):
                values = content().view(itemtype).reshape(len(expected), -1)
                self.seen += 1
                if not all((row.astype(np.int64).astype(str) == number).all() for row, number in zip(values, expected)):
                    self.wrong.append(where)

            self._streams.launch("step", kernel)


def trained(streams, *, epochs=2, **options):
    """Runs epochs as the Trainer would; returns the (key, field) pairs of which a step saw wrong values."""
    step, schedule = Step(streams), new_schedule()
    with queue_on(streams, **options) as queue:
        for epoch in range(epochs):
            for number in range(len(schedule.plan(epoch))):
                key = BatchIndex(epoch, number)
                batch = queue.take(key)
                queue.prefetch(schedule.following(key))  # on_train_batch_start
                step(key, batch, schedule.plan(epoch).batch(number))
                del batch  # kernels may still be waiting when the step's last reference is gone
                queue.prefetch(schedule.following(key))  # on_train_batch_end
        streams.synchronize()
    assert step.seen == epochs * STEPS * len(SPEC.fields)
    return step.wrong


def on_device(streams):
    """A device transform that enqueues kernels: converts everything to float64, into memory of the side stream."""

    def transform(batch):
        out = {}
        for name, tensor in batch.items():
            converted = streams.empty(tuple(tensor.shape), torch.float64)
            source, target, itemtype = raw(tensor), raw(converted), SPEC[name].dtype
            streams.launch(
                "transform",
                lambda source=source, target=target, itemtype=itemtype: np.copyto(
                    target().view(np.float64), source().view(itemtype)
                ),
            )
            out[name] = converted
        return out

    return transform


class Small(FakeStreams):
    """A device with room for some bytes."""

    def __init__(self, slow, room):
        super().__init__(slow)
        self.room, self.used = room, 0

    def empty(self, shape, dtype):
        nbytes = math.prod(shape) * dtype.itemsize
        if self.used + nbytes > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.used += nbytes
        return super().empty(shape, dtype)

    def _free(self, pool, block):
        self.used -= block.nbytes
        super()._free(pool, block)


class ComputeNeverWaits(FakeStreams):
    """Read before write: kernels of the step begin before the copy ends."""

    def wait(self, stream, event):
        if stream is self.side:
            super().wait(stream, event)
