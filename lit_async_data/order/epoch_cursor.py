"""`EpochCursor`: which epoch and step the consumer of a loader asks for next.

``iter()`` only announces a pass: Lightning calls it two or three times per epoch, before and after ``set_epoch``. The
first batch binds the pass to an epoch: to the one that ``set_epoch`` requested since the last pass, otherwise to the
one after the last, even if that ended early. Without a shuffle all epochs are alike, and ``set_epoch`` changes nothing,
so that batches already read ahead can be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lit_async_data.order.plan import BatchIndex, Limits, Schedule

# Returns how many steps of the next pass the consumer will take, and how many of each pass after it; None for all.
StepsWanted = Callable[[], tuple[int | None, int | None]]


class CursorState(NamedTuple):
    """Where the consumer is.

    Attributes:
        epoch: Epoch of the last pass begun; -1 before the first.
        step: Next step of that pass.
        fresh: Whether the next batch begins a pass.
        requested: Epoch that ``set_epoch`` requested for the next pass.
    """

    epoch: int = -1
    step: int = 0
    fresh: bool = True
    requested: int | None = None


class EpochCursor:
    """Tracks where the consumer is. Holds no reference to the loader, so that a dropped loader closes at once.

    The whole state is one tuple that is replaced in a single assignment: an interrupt leaves the old or the new one.

    Args:
        schedule: The order.

    Attributes:
        schedule: The order, limited to the steps that the current pass will take.
        state: Where the consumer is. The loader sets it to `after` once a batch was handed out or has failed.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.state = CursorState()

    def set_epoch(self, epoch: int) -> None:
        """Requests the epoch of the next pass."""
        self.state = self.state._replace(requested=epoch)

    def restart(self) -> None:
        """Lets the next batch begin a pass."""
        self.state = self.state._replace(fresh=True)

    @property
    def started(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self.state.fresh

    @property
    def over(self) -> bool:
        """Whether the pass has had its last batch."""
        return not self.state.fresh and self.state.step >= self.schedule.steps

    def begin(self, steps_wanted: StepsWanted) -> None:
        """Limits the order to the steps that the pass will take, if the next batch begins one."""
        if self.state.fresh:
            self.schedule = self.schedule.limited(Limits(self._next_epoch, *steps_wanted()))

    @property
    def upcoming(self) -> BatchIndex | None:
        """The key of the next batch, or None if the pass is over. Changes only with `state`."""
        if self.state.fresh:
            return BatchIndex(self._next_epoch, 0) if self.schedule.steps else None
        return None if self.over else BatchIndex(self.state.epoch, self.state.step)

    def after(self, key: BatchIndex) -> CursorState:
        """Returns the state after the batch of this key, which is the upcoming one."""
        requested = None if self.state.fresh else self.state.requested  # this pass used up its request
        return CursorState(key.epoch, key.step + 1, fresh=False, requested=requested)

    @property
    def wanted(self) -> BatchIndex:
        """The key that the consumer will probably ask for next."""
        if self.state.fresh:
            return BatchIndex(self._next_epoch, 0)
        return self.schedule.following(BatchIndex(self.state.epoch, self.state.step - 1))

    @property
    def _next_epoch(self) -> int:
        requested = self.state.requested
        return self.state.epoch + 1 if requested is None or not self.schedule.shuffled else requested
