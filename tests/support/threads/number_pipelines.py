"""Pipelines whose batches are numbers in order, and reads that wait or fail."""

import contextlib
import functools
import threading
import types

import numpy as np

from lit_async_data.batch.spec import BatchLayout, BatchSpec, Extent, FieldSpec
from lit_async_data.engine.pipeline.sample_reader import ReaderSetup
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.engine.resources import allocated
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.testing import ArraySource
from support.plans import plan_of

SPEC = BatchSpec({"x": FieldSpec((), np.dtype(np.int64))}, as_mapping=True)
LENGTH, BATCH = 12, 4
WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def copy_numbers(keyed, out):
    out["x"][...] = keyed.samples


def failing_at(sample, error):
    def read(keyed, out):
        if sample in keyed.samples:
            raise error
        copy_numbers(keyed, out)

    return read


class Gate:
    """A read that waits to be let through, batch by batch, and says what it was asked for."""

    def __init__(self):
        self.asked = []
        self._doors = {}
        self._lock = threading.Lock()
        self.arrived = threading.Semaphore(0)

    def door(self, first):
        with self._lock:
            return self._doors.setdefault(first, threading.Event())

    def open(self, *firsts):
        for first in firsts:
            self.door(first).set()

    def __call__(self, keyed, out):
        first = int(keyed.samples[0])
        self.asked.append(first)
        self.arrived.release()
        assert self.door(first).wait(30)
        copy_numbers(keyed, out)

    def wait_for(self, reads):
        for _ in range(reads):
            assert self.arrived.acquire(timeout=30)


def setup_of(read, schedule, room, workers, ahead=None):
    """What a pipeline gets, as if a function read the samples of a source."""
    read = functools.partial(read)
    read.source = ArraySource({"x": np.arange(10_000)})
    workers, (layout, slots, most) = types.SimpleNamespace(threads=workers, tuner=lambda: None), room
    plan = types.SimpleNamespace(
        layout=layout, budget=types.SimpleNamespace(slots=slots, most_slots=most), workers=workers
    )
    return ReaderSetup(read, schedule, plan, ahead)


@contextlib.contextmanager
def running(
    read=copy_numbers, *, workers=1, depth=2, most_slots=10, timeout_s=30.0, length=LENGTH, batches=1, ahead=None
):
    layout = BatchLayout(SPEC, BATCH, batches)
    schedule = Schedule(
        lambda **at: plan_of(length=length, batch_size=BATCH, shuffle="none", seed=0, **at), shuffled=True
    )
    setup = setup_of(read, schedule, (layout, depth + 1, most_slots), workers, ahead)
    made = ThreadPipeline(setup, functools.partial(allocated, layout.nbytes, pinned=False), timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.close()


def taken(pipeline, key):
    """The batch of a key, its slot given back."""
    filled = pipeline.get(key)
    (batch,) = filled.batches
    if batch.error is not None:
        raise batch.error
    memory = pipeline.pool.memories[filled.slot]
    values = pipeline.layout.views(memory, Extent(batch.rows), batch.first)["x"].tolist()
    pipeline.pool.move(filled.slot, "drop")
    return values


def kept(pipeline, key):
    """The batch of a key, its slot on a lease."""
    filled = pipeline.get(key)
    (batch,) = filled.batches
    memory = pipeline.pool.lend(filled.slot)
    return pipeline.layout.views(memory, Extent(batch.rows), batch.first)["x"]


def epoch(pipeline, number):
    return [taken(pipeline, BatchIndex(number, step)) for step in range(3)]
