"""`Headspace`: the most that a better loader could gain, measured with batches that are already there."""

from __future__ import annotations

import math
from typing import cast

from lit_async_data.engine.device.feed import Batch
from lit_async_data.engine.device.inline_queue import DeviceQueue, WrappedQueue
from lit_async_data.engine.verdict.watch import Loader
from lit_async_data.order.plan import BatchIndex

# Steps of an epoch where nobody knows them; the fewest of each kind that say anything; batches that are kept.
UNKNOWN, LEAST, KEPT = 200, 4, 4


class Headspace:
    """Has loaders repeat batches in the second half of an epoch, and times the steps of both halves."""

    def __init__(self, steps: int | None = None) -> None:
        self._steps = steps or UNKNOWN
        self._real = max(self._steps // 2, 1)
        self._took: tuple[list[float], list[float]] = [], []  # seconds of steps: batches of the loader, repeated ones

    def attach(self, loader: Loader) -> None:
        """Have a loader repeat, if it runs and does not repeat yet."""
        engine = loader._machinery.engine
        if engine is not None and not isinstance(engine.queue, RepeatingQueue):
            queue = RepeatingQueue(engine.queue, self._real, self._steps)
            engine.queue = cast(DeviceQueue, queue)  # a property is no attribute to type checkers

    def step(self, number: int, took_s: float) -> None:
        """The step with this batch of the epoch has taken so long."""
        # The first step of each kind is left out: first batches and the change take longer, or less.
        if number not in (0, self._real):
            self._took[number > self._real].append(took_s)

    @property
    def rates(self) -> list[float]:
        """Steps per second with batches of the loader, and with repeated ones; empty if there were too few steps."""
        return [] if min(map(len, self._took)) < LEAST else [len(took) / max(sum(took), 1e-9) for took in self._took]

    @property
    def gain(self) -> float:
        """Percent of the time that a perfect loader would save; NaN if there were too few steps."""
        return 100 * max(1 - self.rates[0] / self.rates[1], 0.0) if self.rates else math.nan

    def __str__(self) -> str:
        if not self.rates:
            return f"too few steps in an epoch; {2 * LEAST + 2} or more are needed"
        return (
            f"{self.rates[0]:.3g} steps/s with this loader, {self.rates[1]:.3g} with batches that are already there: a "
            f"better loader saves {self.gain:.0f} % at most"
        )


class RepeatingQueue(WrappedQueue):
    """The batches of a queue in the first ``real`` of the ``steps`` of each epoch; then those that it has kept."""

    def __init__(self, queue: DeviceQueue, real: int, steps: int) -> None:
        super().__init__(queue)
        self._real, self._steps, self._kept = real, steps, list[Batch]()

    def take(self, key: BatchIndex) -> Batch:
        if key.step >= self._steps:
            raise StopIteration
        if key.step >= self._real and self._kept:
            self.queue.transform_s = 0.0
            return self._kept[key.step % len(self._kept)]
        if not key.step:
            self._kept = []
        batch = self.queue.take(key)
        self._kept = [*self._kept, batch][:KEPT]
        return batch

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:
        if key.step < self._real or not self._kept:
            self.queue.prefetch(key, copy=copy)
        else:  # as if this epoch had been read to its end: else the next one would begin with an empty queue
            self.queue.prefetch(BatchIndex(key.epoch + 1, 0), copy=False)
