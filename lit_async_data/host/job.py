"""`ReadTask`: consecutive batches that are read together into one slot, and `FilledSlot`, the result.

Where batches are small, what each costs beside its reading (a claim, a hand-over between threads, a call of numpy) is
most of its price; read several at a time, they share it.
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
from lit_async_data.errors import ReadError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule

# Reads samples of an epoch into arrays.
Read = Callable[[int, Indices, Mapping[str, npt.NDArray[Any]]], None]
# Batches are read together up to this many bytes and this many batches. Samples per second against one batch at a time,
# two cores: batches of 3 MiB 1.2 to 1.4 times at 2, 1.2 to 1.5 at 4; of 128 KiB 1.9 times at 16, 2.1 at 32, 2.2 at 64.
COALESCED_BYTES = 12 * 2**20
COALESCED_BATCHES = 32


class BatchResult(NamedTuple):
    """A batch that has been read into a slot, or the error that came instead.

    Attributes:
        key: Which it is.
        first: Row of the slot's arrays at which it begins.
        samples: int64, shape (n,).
        error: What is to be raised in its place.
    """

    key: BatchIndex
    first: int
    samples: Indices
    error: Exception | None = None


class FilledSlot(NamedTuple):
    """A slot and the batches that have been read into it.

    Attributes:
        slot: Which slot; where no batch could be read, it has been let go.
        batches: In their order, at least one.
        good: How many of them could be read.
        unexplained: The traceback of an error that came while they were read together, if it was none of the source.
    """

    slot: int
    batches: Sequence[BatchResult]
    good: int
    unexplained: str = ""

    @property
    def samples(self) -> int:
        """Samples that could be read."""
        return sum(len(batch.samples) for batch in self.batches if batch.error is None)


def coalesced_batches(batch_bytes: int, most: int) -> int:
    """How many batches to read in one go, where reading is no more than a copy.

    Args:
        batch_bytes: Bytes of one.
        most: How many there may be at most.

    Example:
        >>> together(3 * 2**20, 100), together(2**30, 100), together(1000, 100)
        (4, 1, 32)
    """
    return max(min(COALESCED_BYTES // batch_bytes, COALESCED_BATCHES, most), 1)


@dataclasses.dataclass
class ReadTask:
    """Batches for one worker to read.

    Attributes:
        slot: Where they go.
        keys: Which they are: steps of one epoch that follow each other.
        generation: Of what was wanted when they were claimed.
        worker: Number of the worker; None for the caller's own thread.
        ids: The numbers that errors call samples by.
    """

    slot: int
    keys: Sequence[BatchIndex]
    generation: int
    worker: int | None
    ids: Callable[[Indices], Indices] = np.asarray
    _samples: Indices | None = None

    def done(self, read: Read, schedule: Schedule, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        """Read, and say what became of each batch."""
        try:
            batches = self._planned(schedule)
        except BaseException as caught:
            if self._is_interrupt(caught):
                raise
            # Not named here, nor below: see `Pipeline._fill`.
            return self._counted(
                [self._failed(BatchResult(key, 0, np.empty(0, np.int64)), caught) for key in self.keys]
            )
        unexplained, samples = "", self._samples
        if len(batches) > 1 and samples is not None:
            try:
                read(batches[0].key.epoch, samples, layout.views(memory, len(samples)))
            except Exception as error:  # noqa: BLE001  # raised below, by the batch it belongs to: the others are read
                unexplained = "" if isinstance(error, SourceError) else traceback.format_exc()
            else:
                return FilledSlot(self.slot, batches, len(batches))
        return self._counted([self._alone(read, layout, memory, batch) for batch in batches], unexplained)

    def _planned(self, schedule: Schedule) -> list[BatchResult]:
        epoch, step = self.keys[0]
        samples, edges = schedule.plan(epoch).stretch(step, len(self.keys))
        self._samples = samples
        return [
            BatchResult(key, begin, samples[begin:end])
            for key, (begin, end) in zip(self.keys, itertools.pairwise(edges), strict=True)
        ]

    def _counted(self, batches: list[BatchResult], unexplained: str = "") -> FilledSlot:
        return FilledSlot(self.slot, batches, sum(batch.error is None for batch in batches), unexplained)

    def _is_interrupt(self, caught: BaseException) -> bool:
        """Whether it is Ctrl-C, or the like, in the caller's own thread; a worker's is an error of the batch."""
        return self.worker is None and not isinstance(caught, Exception)

    def _alone(self, read: Read, layout: BatchLayout, memory: Bytes, batch: BatchResult) -> BatchResult:
        self._samples = batch.samples
        try:
            read(batch.key.epoch, batch.samples, layout.views(memory, len(batch.samples), batch.first))
        except BaseException as caught:
            if self._is_interrupt(caught):
                raise
            return self._failed(batch, caught)
        return batch

    def _failed(self, batch: BatchResult, cause: BaseException) -> BatchResult:
        error = ReadError.of_batch(cause, *batch.key, self.ids(batch.samples).tolist(), self.worker)
        return batch._replace(error=error)

    def __str__(self) -> str:
        first, last = self.keys[0], self.keys[-1]
        steps = f"batch {first.step}" if first == last else f"batches {first.step} to {last.step}"
        samples = "" if self._samples is None else f", samples {few(self.ids(self._samples).tolist())}"
        return f"{steps} of epoch {first.epoch}{samples}"
