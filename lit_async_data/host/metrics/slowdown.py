"""`SlowdownMeter`: estimates what reading takes from a training loop, from steps with the readers at work and paused.

In the long run the loop reads one batch per step. So the mean of all steps, paused ones too, is a step alone plus what
reading one batch takes. This also holds where readers catch up after a pause, and where several batches are read at
once. The mean of the paused steps is a step alone. The difference is the slowdown.

It is found in groups of a few pauses each, and the estimate is the median of the groups. Few groups with a hiccup of
the machine do not move it, and a mean per group is right also where steps differ, as with accumulated gradients.
"""

from __future__ import annotations

import collections
import math
import statistics

from lit_async_data.host.metrics.stats import Slowdown

# Pauses in a group; groups that an estimate takes at least, and at most: the last ones.
PAUSES, LEAST_GROUPS, MOST_GROUPS = 8, 5, 64
# A step that takes this many times the median step is left out: a validation, a checkpoint, a slow logger.
UNUSUAL = 4.0
# Steps without a pause after which nothing is known any more: data has become scarce.
STALE = 4096
# The standard error of the median of normal values is this, times their median absolute deviation, over √n.
NORMAL_ERROR = 1.2533 * 1.4826


class SlowdownMeter:
    """Collects the durations of steps. Not thread-safe.

    A cycle begins with a pause and ends with the next. When a pause begins, about as many batches must be ready as when
    the last one did: then the steps of a cycle are as many as its reads.

    Attributes:
        estimate: The slowdown; None as long as it is not known.
        groups: How many groups it is made from.

    Example:
        >>> meter = SlowdownMeter()
        >>> for cycle in range(60):
        ...     meter.begin_cycle()
        ...     for step in range(10):
        ...         meter.add(0.75 if step < 2 else 1.0625, 0.0, paused=step < 2)
        >>> print(meter.estimate)
        25.0 ± 0.0 %
    """

    def __init__(self) -> None:
        self.estimate: Slowdown | None = None
        self._shares: collections.deque[float] = collections.deque(maxlen=MOST_GROUPS)
        self.interrupt()

    @property
    def groups(self) -> int:
        return len(self._shares)

    def interrupt(self) -> None:
        """Forget the cycles that are not in the estimate: what comes now does not follow them."""
        # Steps of this cycle: seconds of the loop, seconds of waiting before, and whether the readers were paused.
        self._steps: list[tuple[float, float, bool]] = []
        self._counts = False  # whether this cycle has begun with a pause
        self._pauses = self._all = self._paused = 0
        self._all_s = self._paused_s = self._waited_s = 0.0

    def begin_cycle(self) -> None:
        """A pause begins; it ends the cycle before."""
        if self._counts:
            self._end_cycle()
        self._steps = []
        self._counts = True

    def add(self, busy_s: float, waited_s: float, *, paused: bool) -> None:
        """One more step.

        Args:
            busy_s: Seconds from the batch to the request for the next.
            waited_s: Seconds that the loop waited for the batch.
            paused: Whether the readers were quiet all the time.
        """
        self._steps.append((busy_s, waited_s, paused))
        if len(self._steps) >= STALE:
            self._shares.clear()
            self.estimate = None
            self.interrupt()

    def _end_cycle(self) -> None:
        if not self._steps:
            return
        most = UNUSUAL * statistics.median([busy for busy, _, _ in self._steps])
        steps = [step for step in self._steps if step[0] <= most]
        alone = [busy for busy, _, paused in steps if paused]
        self._all += len(steps)
        self._all_s += sum([busy for busy, _, _ in steps])
        self._waited_s += sum([waited for _, waited, _ in steps])
        self._paused += len(alone)
        self._paused_s += sum(alone)
        self._pauses += bool(alone)
        if self._pauses == PAUSES:
            taken_s = self._all_s - self._all * self._paused_s / self._paused
            total_s = self._all_s + self._waited_s
            if total_s:
                self._shares.append(taken_s / total_s)
            self.interrupt()
            self._estimate()

    def _estimate(self) -> None:
        if len(self._shares) < LEAST_GROUPS:
            return
        share = statistics.median(self._shares)
        deviation = statistics.median([abs(each - share) for each in self._shares])
        self.estimate = Slowdown(share, NORMAL_ERROR * deviation / math.sqrt(len(self._shares)))
