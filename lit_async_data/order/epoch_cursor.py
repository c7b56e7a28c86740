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
    """The place of a loader's consumer. Refers to no loader, so that a dropped loader is closed at once.

    All of its state is one value, which is replaced as a whole: an interrupt comes before or after that.

    Args:
        schedule: The order.

    Attributes:
        at: The consumer's place. Set it to what `after` returns, once a batch has had its turn.
        schedule: The order, limited to the steps that the current pass will take.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
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
        return not self.at.fresh and self.at.step >= self.schedule.steps

    def begin(self, steps_wanted: StepsWanted) -> None:
        """Limit the order to the steps that the pass will take, if the next batch begins one."""
        if self.at.fresh:
            self.schedule = self.schedule.limited(Limits(self._next_epoch, *steps_wanted()))

    @property
    def upcoming(self) -> BatchIndex | None:
        """The index of the next batch, or None if the pass is over; the same until `at` is set."""
        if self.at.fresh:
            return BatchIndex(self._next_epoch, 0) if self.schedule.steps else None
        return None if self.over else BatchIndex(self.at.epoch, self.at.step)

    def after(self, key: BatchIndex) -> At:
        """The consumer's place after the upcoming batch has had its turn."""
        told = None if self.at.fresh else self.at.told  # the epoch that was named for this pass is used up
        return At(key.epoch, key.step + 1, fresh=False, told=told)

    @property
    def wanted(self) -> BatchIndex:
        """The index that will be asked for next, as far as is known."""
        if self.at.fresh:
            return BatchIndex(self._next_epoch, 0)
        return self.schedule.following(BatchIndex(self.at.epoch, self.at.step - 1))

    @property
    def _next_epoch(self) -> int:
        told = self.at.told
        return self.at.epoch + 1 if told is None or not self.schedule.shuffled else told
