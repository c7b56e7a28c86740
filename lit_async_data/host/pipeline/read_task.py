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
from lit_async_data.errors import SourceError, WorkerError, batch_error, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule

# Reads samples of an epoch into arrays, from any thread.
Read = Callable[[int, Indices, Mapping[str, npt.NDArray[Any]]], None]

NO_SAMPLES: Indices = np.empty(0, np.int64)


class BatchResult(NamedTuple):
    """A batch that has been read into a slot, or the error that came instead.

    Attributes:
        key: Its index.
        first: Its first row in the slot's arrays.
        rows: Number of its samples.
        error: Raised in its place.
    """

    key: BatchIndex
    first: int
    rows: int
    error: Exception | None = None


class FilledSlot(NamedTuple):
    """A slot and the batches that have been read into it.

    Attributes:
        slot: Its number. Where no batch could be read, the slot is free again.
        batches: In their order, at least one.
        good: How many of them could be read.
        unexplained: The traceback of an error in reading them together that was none of the source.
    """

    slot: int
    batches: Sequence[BatchResult]
    good: int
    unexplained: str = ""

    @property
    def samples(self) -> int:
        """Samples that could be read."""
        return sum(batch.rows for batch in self.batches if batch.error is None)


@dataclasses.dataclass
class ReadTask:
    """Consecutive batches of one epoch that a worker reads into one slot.

    Attributes:
        slot: Where they go.
        keys: Their indexes.
        schedule: The order at the time of the claim.
        generation: The pipeline's generation at the time of the claim.
        worker: Number of the worker; None for the consumer's thread.
        ids: The numbers by which errors name samples.
        reading: The batches that are read at present: all of them, or one by itself.
    """

    slot: int
    keys: Sequence[BatchIndex]
    schedule: Schedule
    generation: int
    worker: int | None
    ids: Callable[[Indices], Indices]
    reading: Sequence[BatchResult] = ()
    _samples: Indices | None = None

    def run(self, read: Read, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        """Read the batches together; if that fails, each by itself."""
        epoch, step = self.keys[0]
        try:
            samples, edges = self.schedule.plan(epoch).stretch(step, len(self.keys))
        except BaseException as caught:
            if self._is_interrupt(caught):
                raise
            # No name holds the results: see `ThreadPipeline._fill`.
            return self._filled([self._failed(BatchResult(key, 0, 0), NO_SAMPLES, caught) for key in self.keys])
        self._samples = samples
        batches = [
            BatchResult(key, begin, end - begin)
            for key, (begin, end) in zip(self.keys, itertools.pairwise(edges), strict=True)
        ]
        self.reading, unexplained = batches, ""
        if len(batches) > 1:
            try:
                read(epoch, samples, layout.views(memory, len(samples)))
            except BaseException as error:  # raised below by its batch, while the others are read
                if self._is_interrupt(error):
                    raise
                unexplained = "" if isinstance(error, SourceError | WorkerError) else traceback.format_exc()
            else:
                return FilledSlot(self.slot, batches, len(batches))
        return self._filled([self._alone(read, layout, memory, samples, batch) for batch in batches], unexplained)

    def _filled(self, batches: list[BatchResult], unexplained: str = "") -> FilledSlot:
        return FilledSlot(self.slot, batches, sum(batch.error is None for batch in batches), unexplained)

    def _is_interrupt(self, caught: BaseException) -> bool:
        """Whether this is Ctrl-C, or the like, in the consumer's thread. In a worker it is an error of the batch."""
        return self.worker is None and not isinstance(caught, Exception)

    def _alone(
        self, read: Read, layout: BatchLayout, memory: Bytes, samples: Indices, batch: BatchResult
    ) -> BatchResult:
        self._samples = samples = samples[batch.first : batch.first + batch.rows]
        self.reading = (batch,)
        try:
            read(batch.key.epoch, samples, layout.views(memory, batch.rows, batch.first))
        except BaseException as caught:
            if self._is_interrupt(caught):
                raise
            return self._failed(batch, samples, caught)
        return batch

    def _failed(self, batch: BatchResult, samples: Indices, cause: BaseException) -> BatchResult:
        error = batch_error(cause, *batch.key, self.ids(samples).tolist(), self.worker)
        return batch._replace(error=error)

    def __str__(self) -> str:
        first, last = self.keys[0], self.keys[-1]
        steps = f"batch {first.step}" if first == last else f"batches {first.step} to {last.step}"
        samples = "" if self._samples is None else f", samples {few(self.ids(self._samples).tolist())}"
        return f"{steps} of epoch {first.epoch}{samples}"
