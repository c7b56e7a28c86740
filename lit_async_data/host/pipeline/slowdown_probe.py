"""`SlowdownProbe`: pauses the readers of a loader for a few steps now and then, to measure what they take from it.

A pause begins only where enough batches are ready, and uses up half of them, so that no step waits because of it. If
steps wait all the same, the time that they wait is counted, and there is no pause while that is more than `MOST_COST`
of the time. A loop that waits for data anyway has no pauses, and its slowdown is not known.

Steps between pauses are drawn, so that pauses meet every phase of a loop whose steps are not alike.
"""

from __future__ import annotations

import math

from lit_async_data.host.metrics.slowdown import SlowdownMeter
from lit_async_data.host.pipeline.pipeline import Pipeline

# Steps before the first pause; between pauses, for each step of the last one; and between two tries.
FIRST, BETWEEN, RETRY = 16, 4, 4
# Groups of pauses after which they are rarer, and how much.
ENOUGH_GROUPS, RARER = 16, 4
# A pause needs this many batches, leaves this many, and lasts this many steps at most.
LEAST_READY, LEAST_LEFT, MOST_STEPS = 3, 2, 4
# It also needs this share of the batches that were ready at best: so the readers have caught up since the last one. How
# many there can be changes with the pace of the readers, so the best is multiplied by FADING with each step.
FULL, FADING = 0.5, 0.995
# Waiting because of pauses, as a share of all time.
MOST_COST = 0.005
# A pause ends by itself after the time for which the ready batches last, times PATIENCE, and after LONGEST_S at most.
PATIENCE, LONGEST_S = 2.0, 60.0
GOLDEN = (math.sqrt(5) - 1) / 2


class SlowdownProbe:
    """Pauses the readers of a pipeline. Called by its consumer with every batch.

    Args:
        pipeline: Whose readers are paused.
        meter: Gets the durations of steps.

    Attributes:
        left: When the last batch was handed out, by the same clock as in `asked`; None if none was since.
    """

    def __init__(self, pipeline: Pipeline, meter: SlowdownMeter) -> None:
        meter.interrupt()
        self._pipeline, self._meter = pipeline, meter
        self.left: float | None = None
        self._asked = 0.0
        self._due, self._draws = FIRST, 0
        self._most = 0.0  # batches that were ready at best, lately
        self._pausing = False
        self._quiet = False  # whether the readers were quiet when the last batch was asked for
        self._quiet_steps = self._floor = 0  # of this pause: its steps so far, and the ready batches at which it ends
        self._until = 0.0
        # The batches that were ready when the last pause began; 0 when they are ready again.
        self._missing = 0
        self._starved = False  # whether the last batch was late because of a pause
        self._steps, self._total_s, self._cost_s = 0, 0.0, 0.0

    def asked(self, now: float, ready: int, *, first: bool) -> None:
        """A batch is asked for.

        Args:
            now: In seconds.
            ready: Batches that are ready.
            first: Whether it is the first of an epoch; what came before is no step of training.

        Raises:
            WorkerError: A worker died.
        """
        quiet = self._pausing and self._pipeline.quiet
        left, self.left = self.left, None
        if left is not None:
            waited, busy = left - self._asked, 0.0 if first else now - left
            if self._starved:
                self._cost_s += waited
            self._steps += 1
            self._total_s += waited + busy
            if not first:
                paused = quiet and self._quiet
                self._quiet_steps += paused
                self._meter.add(busy, waited, paused=paused)
        self._asked = now
        self._most = max(FADING * self._most, ready)
        if ready >= min(self._missing, self._most) and not self._pausing:
            self._missing = 0
        self._starved = not ready and self._missing > 0
        if self._pausing:
            if first or ready <= self._floor or self._quiet_steps >= MOST_STEPS or now >= self._until:
                self._pausing = quiet = False
                self._pipeline.resume()
                rarer = RARER if self._meter.groups >= ENOUGH_GROUPS else 1
                self._due = self._drawn(BETWEEN * rarer * max(self._quiet_steps, 1))
        else:
            self._due -= 1
            if self._due <= 0:
                quiet = self._began(ready)
        self._quiet = quiet

    def _began(self, ready: int) -> bool:
        """Begin a pause if that can be; whether the readers are quiet at once."""
        full = ready >= max(LEAST_READY, FULL * self._most)
        if not full or self._cost_s > MOST_COST * self._total_s:
            # A group of pauses must have none that could not begin when it was due: else they would choose the moments
            # at which readers are ahead, because steps take long or the machine is idle.
            self._meter.interrupt()
            self._due = self._drawn(RETRY)
            return False
        self._meter.begin_cycle()
        self._pausing, self._quiet_steps = True, 0
        self._missing, self._floor = ready, max(LEAST_LEFT, ready // 2)
        longest_s = min(PATIENCE * ready * self._total_s / max(self._steps, 1), LONGEST_S)
        self._until = self._asked + longest_s
        self._pipeline.pause(longest_s)
        return self._pipeline.quiet

    def _drawn(self, steps: int) -> int:
        """A number of steps, drawn between ``steps`` and its double."""
        self._draws += 1
        return steps + int(steps * (self._draws * GOLDEN % 1))
