"""`Job`: consecutive batches that are read in one go into one slot, and `Filled`, what became of each.

Where batches are small, what each costs beside its reading (a claim, a hand-over between threads, a call of numpy) is
most of its price; read several at a time, they share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ReadError, few
from lit_async_data.permutation import Indices
from lit_async_data.plan import BatchPlan, Key, Schedule
from lit_async_data.spec import BatchLayout, Bytes

Read = Callable[[Indices, Mapping[str, npt.NDArray[Any]]], None]
# Batches are read together up to this many bytes and this many batches. Samples per second against one batch at a time,
# two cores: batches of 3 MiB 1.37 times at 2, 1.39 at 4; of 128 KiB 1.9 times at 16, 2.1 at 32, 2.2 at 64.
TOGETHER_BYTES = 8 * 2**20
TOGETHER = 32


@dataclasses.dataclass(frozen=True)
class Filled:
    """A batch that has been read into a slot, or the error that came instead.

    Attributes:
        place: Its place in the ring.
        first: Row of the slot's arrays at which it begins.
        samples: int64, shape (n,).
        error: What is to be raised in its place.
    """

    place: int
    first: int
    samples: Indices
    error: Exception | None = None


def together(batch_bytes: int, most: int) -> int:
    """How many batches to read in one go, where reading is no more than a copy.

    Args:
        batch_bytes: Bytes of one.
        most: How many there may be at most.

    Example:
        >>> together(3 * 2**20, 100), together(2**30, 100), together(1000, 100)
        (2, 1, 32)
    """
    return max(min(TOGETHER_BYTES // batch_bytes, TOGETHER, most), 1)


@dataclasses.dataclass
class Job:
    """Batches for one worker to read.

    Attributes:
        places: Where they go; all of one slot, at least as many as ``keys``.
        keys: Which they are: steps of one epoch that follow each other.
        generation: Of what was wanted when they were claimed.
        worker: Number of the worker; None for the caller's own thread.
    """

    places: Sequence[int]
    keys: Sequence[Key]
    generation: int
    worker: int | None
    _samples: Indices | None = None

    def done(self, read: Read, schedule: Schedule, layout: BatchLayout, memory: Bytes) -> list[Filled]:
        """Read, and say what became of each batch, in the order of ``keys``."""
        plans = [schedule.plan(key.epoch).batch(key.step) for key in self.keys]
        firsts = np.cumsum([0] + [len(plan.samples) for plan in plans]).tolist()
        self._samples = np.concatenate([plan.samples for plan in plans])
        if len(plans) > 1:
            try:
                read(self._samples, layout.views(memory, firsts[-1]))
            except Exception:  # noqa: BLE001, S110  # said below, by the batch it belongs to: the others are read
                pass
            else:
                return [
                    Filled(place, first, plan.samples)
                    for place, first, plan in zip(self.places, firsts, plans, strict=False)
                ]
        return [
            self._alone(read, layout, memory, Filled(place, first, plan.samples), plan)
            for place, first, plan in zip(self.places, firsts, plans, strict=False)
        ]

    def _alone(self, read: Read, layout: BatchLayout, memory: Bytes, filled: Filled, plan: BatchPlan) -> Filled:
        self._samples = plan.samples
        try:
            read(plan.samples, layout.views(memory, len(plan.samples), filled.first))
        except BaseException as caught:
            if self.worker is None and not isinstance(caught, Exception):
                raise  # Ctrl-C in the caller's own thread
            # Not named here: see `Pipeline._fill`.
            return self._failed(filled, caught, plan)
        return filled

    def _failed(self, filled: Filled, cause: BaseException, plan: BatchPlan) -> Filled:
        error = ReadError.of_batch(cause, plan.epoch, plan.step, plan.samples.tolist(), self.worker)
        return dataclasses.replace(filled, error=error)

    def __str__(self) -> str:
        first, last = self.keys[0], self.keys[-1]
        steps = f"batch {first.step}" if first == last else f"batches {first.step} to {last.step}"
        samples = "" if self._samples is None else f", samples {few(self._samples.tolist())}"
        return f"{steps} of epoch {first.epoch}{samples}"
