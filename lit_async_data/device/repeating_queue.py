"""`RepeatingQueue`: hands out the first batches of an epoch again and again, as a loader that is never late would."""

from __future__ import annotations

from typing import Any

from lit_async_data.device.feed import Batch
from lit_async_data.device.inline_queue import DeviceQueue
from lit_async_data.order.plan import BatchIndex

# Batches that are kept.
KEPT = 4


class RepeatingQueue:
    """The batches of a queue in the first steps of each epoch; then those that it has kept. Keeps `DeviceQueue`.

    Args:
        queue: Where batches come from.
        real: Steps of each epoch with batches of the queue, ≥ 1.
        steps: Steps of each epoch; for loaders that do not know their end when nobody asks them.
    """

    def __init__(self, queue: DeviceQueue, real: int, steps: int) -> None:
        self._queue, self._real, self._steps = queue, real, steps
        self._kept: list[Batch] = []
        self._ahead = False  # whether the next epoch is being read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    @property
    def depth(self) -> int:
        return self._queue.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._queue.depth = depth

    def take(self, key: BatchIndex) -> Batch:
        if key.step >= self._steps:
            raise StopIteration
        if key.step >= self._real and self._kept:
            return self._kept[key.step % len(self._kept)]
        if not key.step:
            self._kept, self._ahead = [], False
        batch = self._queue.take(key)
        if len(self._kept) < KEPT:
            self._kept.append(batch)
        return batch

    def top_up(self, key: BatchIndex) -> None:
        if key.step < self._real or not self._kept:
            self._queue.top_up(key)
        elif not self._ahead:
            # As if this epoch had been read to its end: else the next one would begin with an empty queue.
            self._ahead = True
            self._queue.read_ahead(BatchIndex(key.epoch + 1, 0))

    def close(self) -> None:
        self._kept = []
        self._queue.close()
