"""`Transformation`: host hooks on the way of samples from scratch memory into a slot."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array, BatchLayout, BatchSpec, Bytes
from lit_async_data.engine.hooks.calls import HookCalls, Made
from lit_async_data.engine.hooks.failures import failure, fitting, fitting_rows, other_keys
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import UnfitError
from lit_async_data.sources.contract.stage_clock import CLOCK

# Reads samples into arrays for all fields of a source.
ReadInto = Callable[[Mapping[str, Array]], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The fields that come out of the host hooks of a loader."""

    of_samples: BatchSpec  # after ``sample_transform``; those of the source without one
    spec: BatchSpec  # after ``batch_transform`` too: those of a slot
    drawn: Sequence[str] = ()  # the global random generators that reading and hooks drew from for it


class Transformation:
    """Reads samples into scratch memory, calls the host hooks, and puts the results into a slot.

    Any thread may call it. Each has scratch memory of its own, so threads read and decode at the same time; one at a
    time calls hooks, since few of the objects in them (augmentations with a state) are thread-safe, and Python code
    would not run faster.

    Attributes:
        scratch_bytes: Bytes of scratch memory of each thread.
        takes_batches: Whether one of the hooks takes a whole batch, so that several batches cannot be read as one.
    """

    def __init__(
        self,
        calls: HookCalls,
        outcome: Outcome,
        capacity: int,
        buckets: Buckets | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self._calls, self._outcome, self.capacity, self._buckets = calls, outcome, capacity, buckets
        self._spec = calls.source.spec
        self._raw = BatchLayout(self._spec, capacity, buckets=buckets)
        both = calls.sample is not None and calls.batch is not None
        self._between = BatchLayout(outcome.of_samples, capacity, buckets=buckets) if both else None
        self.scratch_bytes = self._raw.nbytes + (0 if self._between is None else self._between.nbytes)
        self.takes_batches = calls.batch is not None
        self._lock = threading.Lock() if lock is None else lock
        self._thread = threading.local()

    def __reduce__(self) -> Any:
        return Transformation, (self._calls, self._outcome, self.capacity, self._buckets)

    def __call__(
        self, epoch: int, samples: Indices, read: ReadInto, out: Mapping[str, Array], rows: Sequence[int] | None = None
    ) -> None:
        """Have samples read, and put what the hooks make of them into ``out``: into these rows, or the first ones."""
        if not hasattr(self._thread, "memory"):
            self._thread.memory = np.empty(self.scratch_bytes, np.uint8)
        memory: Bytes = self._thread.memory
        read(self.raw(memory, samples))
        self.apply(epoch, samples, memory, out, rows)

    def check(self, epoch: int, sample: Indices, read: ReadInto) -> None:
        """Have one sample read, and transformed unless that takes a whole batch."""
        values = self._spec.empty(1)
        read(values)
        if self._calls.sample is not None:
            with self._lock:
                values = delivered(self._spec, values)
                put_samples(self._calls, epoch, sample, values, self._outcome.of_samples.empty(1))

    def raw(self, memory: Bytes, samples: Indices) -> dict[str, Array]:
        """Arrays in memory for samples as they are read."""
        return self._raw.views_of(memory, samples)

    def apply(
        self, epoch: int, samples: Indices, memory: Bytes, out: Mapping[str, Array], rows: Sequence[int] | None = None
    ) -> None:
        values, began = delivered(self._spec, self.raw(memory, samples)), time.perf_counter()
        with self._lock:
            CLOCK.waited_for_others((locked := time.perf_counter()) - began)
            if self._calls.sample is not None:
                target = out
                if self._between is not None:
                    target = self._between.views_of(memory[self._raw.nbytes :], samples)
                put_samples(self._calls, epoch, samples, values, target, rows=rows)
                values = dict(target)
            if self._calls.batch is not None:
                put_batch(self._calls, samples, self._calls.of_batch(epoch, samples, values), out)
            CLOCK.transformed(time.perf_counter() - locked)


def delivered(spec: BatchSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays as they are stored, with the axes that a batch has."""
    return {key: spec[key].delivered(array) for key, array in arrays.items()}


def put_samples(
    calls: HookCalls,
    epoch: int,
    samples: Indices,
    values: Mapping[str, Array],
    out: Mapping[str, Array],
    *,
    rows: Sequence[int] | None = None,
) -> None:
    """Call ``sample_transform`` with each sample, and put the results into rows of ``out``, or the first ones."""
    assert calls.sample is not None
    targets = [(key, array, array.shape[1:], array.dtype) for key, array in out.items()]
    keys, plain = out.keys(), np.ndarray
    places = range(len(samples))
    for place, row, made in zip(places, rows or places, calls.of_samples(epoch, samples, values), strict=True):
        if made.keys() != keys:
            raise failure(calls.sample.where, calls.source, samples[place : place + 1], other_keys(made, keys))
        try:
            for key, array, shape, dtype in targets:
                value = made[key]
                if value.__class__ is not plain or value.shape != shape or value.dtype != dtype:
                    value = fitting(key, value, shape, dtype)
                array[row] = value
        except UnfitError as error:
            raise failure(calls.sample.where, calls.source, samples[place : place + 1], str(error)) from None


def put_batch(calls: HookCalls, samples: Indices, made: Made, out: Mapping[str, Array]) -> None:
    assert calls.batch is not None
    if made.keys() != out.keys():
        raise failure(calls.batch.where, calls.source, samples, other_keys(made, out))
    try:
        for key, array in out.items():
            array[...] = fitting_rows(key, made[key], array.shape, array.dtype)
    except UnfitError as error:
        raise failure(calls.batch.where, calls.source, samples, str(error)) from None
