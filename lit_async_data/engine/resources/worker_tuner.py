"""`WorkerTuner`: finds how many workers a loop needs, from how long it waits for batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

# Batches after which the waiting is judged, at least; the first of them were begun by fewer workers.
WINDOW = 16
# Another worker is tried if the loop waits for more than this share of the time. It stays if it shortens the waiting by
# this share of what it could: the second of two workers that share nothing halves it.
WORTH_A_WORKER, WORTH_KEEPING = 0.05, 0.5


@dataclasses.dataclass
class WorkerTuner:
    """Starts with few workers, adds one while the queue runs dry, and takes it back if that does not help.

    Told only of waits, so that it costs nothing while the queue is full. Not thread-safe.
    """

    count: int  # to begin with
    most: int
    window_s: float  # seconds after which the waiting is judged, at least; a process takes a part of a second to start
    clock: Callable[[], float] = time.monotonic
    # Of the window: its first batch and moment, and the seconds waited in it.
    _first: int | None = None
    _began: float = 0.0
    _waited: float = 0.0
    # Seconds waited per batch before the worker on trial came; None if none is on trial.
    _before: float | None = None

    @property
    def settled(self) -> bool:
        return self.count >= self.most and self._before is None

    def stay(self, count: int) -> None:
        """Make a number final."""
        self.count = self.most = count
        self._before = None

    def waited(self, seconds: float, batches: int) -> int:
        """The loop has waited for a batch: returns the number of workers from now on."""
        if self.settled:
            return self.count
        now = self.clock()
        if self._first is None:
            self._first, self._began, self._waited = batches, now, 0.0
            return self.count
        self._waited += seconds
        if batches - self._first >= WINDOW and now - self._began >= self.window_s:
            self._judge(self._waited / (batches - self._first), self._waited / max(now - self._began, 1e-9))
            self._first = None
        return self.count

    def _judge(self, per_batch: float, share: float) -> None:
        if self._before is not None and per_batch > (1 - WORTH_KEEPING / self.count) * self._before:
            self.count -= 1
            self.most, self._before = self.count, None
            return
        self._before = None
        if share > WORTH_A_WORKER and self.count < self.most:
            self.count, self._before = self.count + 1, per_batch
