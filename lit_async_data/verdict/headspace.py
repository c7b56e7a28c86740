"""`Headspace`: the most that a better loader could gain, measured with batches that are already there."""

from __future__ import annotations

from typing import cast

from lit_async_data.device.inline_queue import DeviceQueue
from lit_async_data.device.repeating_queue import RepeatingQueue
from lit_async_data.verdict.watch import Loader

# Where nobody knows how many steps an epoch has.
UNKNOWN = 200
# Headspace is reported from this number of steps of each kind on.
LEAST = 4


class Headspace:
    """Has loaders repeat batches in the second half of each epoch, and times the steps of both halves.

    Example:
        >>> headspace = Headspace()
        >>> headspace.begin(steps=10)
        >>> for step in range(10):
        ...     headspace.step(step, now_s=step * 2.0 if step < 5 else 8.0 + (step - 4) * 1.5)
        >>> print(headspace)
        0.5 steps/s with this loader, 0.667 with batches that are already there: a better loader saves 25 % at most
    """

    def __init__(self) -> None:
        self.begin(steps=None)

    def begin(self, steps: int | None) -> None:
        """An epoch begins.

        Args:
            steps: Its steps; None if that is not known.
        """
        self._steps = steps or UNKNOWN
        self._real = max(self._steps // 2, 1)
        self._ended_s: float | None = None
        # Seconds and steps, with batches of the loader and with repeated ones.
        self._seconds, self._counted = [0.0, 0.0], [0, 0]

    def attach(self, loader: Loader) -> None:
        """Have a loader repeat, if it runs and does not yet."""
        engine = loader.machinery.engine
        if engine is not None and not isinstance(engine.queue, RepeatingQueue):
            queue = RepeatingQueue(engine.queue, self._real, self._steps)
            engine.queue = cast(DeviceQueue, queue)  # a property is no attribute to type checkers

    def step(self, number: int, now_s: float) -> None:
        """A step has ended.

        Args:
            number: Of its batch in the epoch.
            now_s: When.
        """
        # The first step of each kind is left out: first batches and the change take longer, or less.
        if self._ended_s is not None and number not in (0, self._real):
            repeats = number > self._real
            self._seconds[repeats] += now_s - self._ended_s
            self._counted[repeats] += 1
        self._ended_s = now_s

    def interrupt(self) -> None:
        """Something else ran since the last step."""
        self._ended_s = None

    @property
    def gain(self) -> float | None:
        """The share of the time that a perfect loader would save; None if there were too few steps."""
        if min(self._counted) < LEAST or not self._seconds[0]:
            return None
        alone_s, with_s = (self._seconds[kind] / self._counted[kind] for kind in (1, 0))
        return max(1 - alone_s / with_s, 0.0)

    def __str__(self) -> str:
        gain = self.gain
        if gain is None:
            return f"too few steps in an epoch; {2 * LEAST + 2} or more are needed"
        rates = [count / max(seconds, 1e-9) for count, seconds in zip(self._counted, self._seconds, strict=True)]
        return (
            f"{rates[0]:.3g} steps/s with this loader, {rates[1]:.3g} with batches that are already there: a better "
            f"loader saves {100 * gain:.0f} % at most"
        )
