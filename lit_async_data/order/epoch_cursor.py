"""`EpochCursor`: which epoch and step a loader is asked for, in the way that Lightning asks.

``iter()`` marks a pass as wanted and does nothing else: Lightning calls it two or three times per epoch, before and
after ``set_epoch``. The first batch binds the pass: to the epoch that ``set_epoch`` named since the last pass, else to
the one after the last, also when that was left early. Without a shuffle epochs are alike, and ``set_epoch`` changes
nothing: what was read ahead serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lit_async_data.order.plan import BatchIndex, Limits, Schedule

# How many steps of a pass, and of those after it, will be wanted; None for all.
StepsWanted = Callable[[], tuple[int | None, int | None]]


class At(NamedTuple):
    """Where the consumer is.

    Attributes:
        epoch: Of the pass that has begun last; -1 before the first.
        step: The next one of it.
        fresh: Whether the next batch begins a pass.
        told: The epoch that was named for the pass that begins next.
    """

    epoch: int = -1
    step: int = 0
    fresh: bool = True
    told: int | None = None


class EpochCursor:
    """Where the consumer is. Refers to no loader, so that one that is dropped is closed at once.

    All of its state is one value, replaced as a whole: an interrupt leaves that before or that after.

    Args:
        schedule: The order; its ``limits`` are set when a pass begins.

    Attributes:
        at: Where the consumer is. To be set to what `after` gives, once a batch has had its turn.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.at = At()

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch of the next pass that begins."""
        self.at = self.at._replace(told=epoch)

    def restart(self) -> None:
        """The next batch begins a pass."""
        self.at = self.at._replace(fresh=True)

    @property
    def started(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self.at.fresh

    @property
    def over(self) -> bool:
        """Whether the pass has had its last batch."""
        return not self.at.fresh and self.at.step >= self._schedule.steps

    def expect(self, steps_wanted: StepsWanted) -> None:
        """Be told already how much of the pass that begins next will be wanted; it is to be read ahead."""
        if self.at.fresh:
            self._schedule.limits = Limits(self._next_epoch, *steps_wanted())

    def upcoming(self, steps_wanted: StepsWanted) -> BatchIndex | None:
        """The key of the next batch, or None if the pass is over; the same until `at` is set.

        Args:
            steps_wanted: Asked when a pass begins.
        """
        if self.at.fresh:
            self._schedule.limits = Limits(self._next_epoch, *steps_wanted())
            return BatchIndex(self._next_epoch, 0) if self._schedule.steps else None
        return None if self.over else BatchIndex(self.at.epoch, self.at.step)

    def after(self, key: BatchIndex) -> At:
        """Where the consumer is when the batch of this key, which is the upcoming one, has had its turn."""
        told = None if self.at.fresh else self.at.told  # what was named for this pass is used up
        return At(key.epoch, key.step + 1, fresh=False, told=told)

    def following(self, key: BatchIndex) -> BatchIndex:
        """The key that will be asked for after this one, as far as can be known."""
        return self._schedule.following(key)

    @property
    def wanted(self) -> BatchIndex:
        """The key that will be asked for next, as far as can be known."""
        if self.at.fresh:
            return BatchIndex(self._next_epoch, 0)
        return self._schedule.following(BatchIndex(self.at.epoch, self.at.step - 1))

    @property
    def _next_epoch(self) -> int:
        told = self.at.told
        return self.at.epoch + 1 if told is None or not self._schedule.shuffled else told
