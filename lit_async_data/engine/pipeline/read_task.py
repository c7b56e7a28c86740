"""`ReadTask`: reads consecutive batches into one slot; `FilledSlot` is the result.

Where batches are small, a worker reads several at once into one slot: they share the price of a claim, of a hand-over
between threads and of the numpy calls, which is most of what a small batch costs.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchLayout, Bytes
from lit_async_data.engine.pipeline.bad_samples import AroundBadSamples, ReadAround, is_of_a_sample
from lit_async_data.errors import SourceError, WorkerError, batch_error, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule

# Reads samples of an epoch into arrays, from any thread.
Read = Callable[[int, Indices, Mapping[str, npt.NDArray[Any]]], None]

NO_SAMPLES: Indices = np.empty(0, np.int64)


class BatchResult(NamedTuple):
    """A batch that has been read into a slot, or the error that came instead."""

    key: BatchIndex
    first: int  # its first row in the slot's arrays
    rows: int
    error: Exception | None = None  # raised in its place
    around: ReadAround | None = None  # None if it has the samples of its plan


class FilledSlot(NamedTuple):
    """A slot and the batches that have been read into it."""

    slot: int  # free again where no batch could be read
    batches: Sequence[BatchResult]  # in their order, at least one
    good: int  # how many of them could be read
    unexplained: str = ""  # the traceback of an error in reading them together that was none of the source


@dataclasses.dataclass
class ReadTask:
    """Consecutive batches of one epoch that a worker reads into one slot."""

    slot: int  # where they go
    keys: Sequence[BatchIndex]
    schedule: Schedule  # the order at the time of the claim
    generation: int  # of the pipeline, at that time
    worker: int | None  # None for the consumer's thread
    ids: Callable[[Indices], Indices]  # the numbers by which errors name samples
    around: AroundBadSamples | None = None  # None if bad samples are errors
    row: int = 0  # of the slot's arrays, where the first batch begins
    one_by_one: bool = False  # whether each sample is tried by itself, since some are bad
    reading: Sequence[BatchResult] = ()  # the batches that are read at present: all of them, or one by itself
    samples: Indices | None = None  # that are read at present

    def run(self, read: Read, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        """Read the batches together; if that fails, each by itself."""
        epoch, step = self.keys[0]
        try:
            samples, edges = self.schedule.plan(epoch).stretch(step, len(self.keys))
        except self._caught as caught:
            # No name holds the results: see `ThreadPipeline._fill`.
            return self._filled([self._failed(BatchResult(key, 0, 0), NO_SAMPLES, caught) for key in self.keys])
        self.samples = samples
        batches = [
            BatchResult(key, self.row + begin, end - begin)
            for key, (begin, end) in zip(self.keys, itertools.pairwise(edges), strict=True)
        ]
        self.reading, unexplained = batches, ""
        if len(batches) > 1 and not self._has_known(samples):
            try:
                read(epoch, samples, layout.views_of(memory, samples, self.row))
            except self._caught as error:  # raised below by its batch, while the others are read
                unexplained = "" if isinstance(error, SourceError | WorkerError) else traceback.format_exc()
            else:
                return FilledSlot(self.slot, batches, len(batches))
        return self._filled([self._alone(read, layout, memory, samples, batch) for batch in batches], unexplained)

    def _filled(self, batches: list[BatchResult], unexplained: str = "") -> FilledSlot:
        if any(batch.around is not None for batch in batches):
            unexplained = ""
        return FilledSlot(self.slot, batches, sum(batch.error is None for batch in batches), unexplained)

    @property
    def _caught(self) -> type[BaseException]:
        """What is an error of the batch: in a worker everything, in the consumer's thread not Ctrl-C."""
        return Exception if self.worker is None else BaseException

    def _alone(
        self, read: Read, layout: BatchLayout, memory: Bytes, samples: Indices, batch: BatchResult
    ) -> BatchResult:
        first = batch.first - self.row
        self.samples = samples = samples[first : first + batch.rows]
        self.reading = (batch,)
        if not self._has_known(samples):
            try:
                read(batch.key.epoch, samples, layout.views_of(memory, samples, batch.first))
            except self._caught as caught:
                if self.around is None or not is_of_a_sample(caught):
                    return self._failed(batch, samples, caught)
            else:
                return batch
        return self._read_around(read, layout, memory, batch)

    def _has_known(self, samples: Indices) -> bool:
        return self.around is not None and (self.around.knows(samples) or self.one_by_one)

    def _read_around(self, read: Read, layout: BatchLayout, memory: Bytes, batch: BatchResult) -> BatchResult:
        assert self.around is not None
        (epoch, step), samples = batch.key, NO_SAMPLES
        try:
            around = self.around.choice(self.schedule.plan(epoch), step)
            samples = np.array(around.samples, np.int64)
            read(epoch, samples, layout.views_of(memory, samples, batch.first))
        except self._caught as caught:
            return self._failed(batch, samples, caught)
        return batch._replace(rows=len(samples), around=around)

    def _failed(self, batch: BatchResult, samples: Indices, cause: BaseException) -> BatchResult:
        error = batch_error(cause, *batch.key, self.ids(samples).tolist(), self.worker)
        return batch._replace(error=error)

    def __str__(self) -> str:
        return batches_and_samples(self.keys[0], len(self.keys), [] if self.samples is None else self.ids(self.samples))


def batches_and_samples(first: BatchIndex, count: int, ids: Indices | Sequence[int]) -> str:
    """Consecutive batches and the numbers of their samples, for people."""
    steps = f"batch {first.step}" if count == 1 else f"batches {first.step} to {first.step + count - 1}"
    samples = f", samples {few(list(map(int, ids)))}" if len(ids) else ""
    return f"{steps} of epoch {first.epoch}{samples}"
