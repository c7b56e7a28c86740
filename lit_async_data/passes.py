"""`Passes`: which epoch and step a loader is asked for, in the way that Lightning asks.

``iter()`` marks a pass as wanted and does nothing else: Lightning calls it two or three times per epoch, before and
after ``set_epoch``. The first batch binds the pass: to the epoch that ``set_epoch`` named since the last pass, else to
the one after the last, also when that was left early. Without a shuffle epochs are alike, and ``set_epoch`` changes
nothing: what was read ahead serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from lit_async_data.plan import Key, Limits, Schedule

# How many steps of a pass, and of those after it, will be wanted; None for all.
StepsWanted = Callable[[], tuple[int | None, int | None]]


class Passes:
    """Where the consumer is. Refers to no loader, so that one that is dropped is closed at once.

    Args:
        schedule: The order; its ``limits`` are set when a pass begins.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._fresh = True
        self._told: int | None = None
        self._epoch = -1
        self._step = 0

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch of the next pass that begins."""
        self._told = epoch

    def restart(self) -> None:
        """The next batch begins a pass."""
        self._fresh = True

    @property
    def begun(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self._fresh

    @property
    def over(self) -> bool:
        """Whether the pass has had its last batch."""
        return not self._fresh and self._step >= self._schedule.steps

    def expect(self, steps_wanted: StepsWanted) -> None:
        """Be told already how much of the pass that begins next will be wanted; it is to be read ahead."""
        if self._fresh:
            self._schedule.limits = Limits(self._next_epoch, *steps_wanted())

    def advance(self, steps_wanted: StepsWanted) -> Key | None:
        """The key of the next batch, or None if the pass is over.

        Args:
            steps_wanted: Asked when a pass begins.
        """
        if self._fresh:
            self._epoch, self._told = self._next_epoch, None
            self._fresh, self._step = False, 0
            self._schedule.limits = Limits(self._epoch, *steps_wanted())
        if self.over:
            return None
        self._step += 1
        return Key(self._epoch, self._step - 1)

    def step_back(self) -> None:
        """The batch of the last key never came: it is still the next."""
        self._step -= 1

    @property
    def wanted(self) -> Key:
        """The key that will be asked for next, as far as can be known."""
        if self._fresh:
            return Key(self._next_epoch, 0)
        if self._step == 0:
            return Key(self._epoch, 0)
        return self._schedule.following(Key(self._epoch, self._step - 1))

    @property
    def _next_epoch(self) -> int:
        return self._epoch + 1 if self._told is None or not self._schedule.shuffled else self._told


class Pass:
    """What ``iter`` of a loader gives: it goes on where it is when it is iterated over again.

    Args:
        following: Gives the next batch, and at the end a `StopIteration`.

    Example:
        >>> one = Pass(iter("abc").__next__)
        >>> next(one), list(one)
        ('a', ['b', 'c'])
    """

    def __init__(self, following: Callable[[], Any]) -> None:
        self._following = following

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._following()
