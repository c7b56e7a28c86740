"""`EpochCursor`: which epoch and step the consumer of a loader asks for next.

``iter()`` only announces a pass: Lightning calls it two or three times per epoch, before and after ``set_epoch``. The
first batch binds the pass to an epoch: to the one that ``set_epoch`` requested since the last pass, otherwise to the
one after the last, even if that ended early. Without a shuffle all epochs are alike, and ``set_epoch`` changes nothing,
so that batches already read ahead can be used.

A framework names epochs as it counts its own. Among several loaders a short one begins again in the middle of such an
epoch, and each of its passes is an epoch of its own: 0, 1, 2 in the first one of the framework, then 3, 4, 5.

A place that was saved is where the next pass begins, if it is of that epoch. The pass after it begins at the start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

from lit_async_data.order.order_state import Place
from lit_async_data.order.plan import BatchIndex, Limits, Schedule

# Returns how many steps of the next pass the consumer will take, and how many of each pass after it; None for all.
StepsWanted = Callable[[], tuple[int | None, int | None]]


class CursorState(NamedTuple):
    """Where the consumer is."""

    epoch: int = -1  # epoch of the last pass begun; -1 before the first. Without a shuffle, the number of the pass
    step: int = 0  # next step of that pass
    fresh: bool = True  # whether the next batch begins a pass
    requested: Place | None = None  # the start of the epoch that was requested for the next pass
    origin: Place = Place(-1)  # where that pass began
    saved: Place | None = None  # where the next pass begins if it is of that epoch; None for the start
    steps: int = 0  # steps of that pass
    named: bool = False  # whether a framework names the epochs

    @property
    def between(self) -> bool:
        """Whether the place is where the next pass begins: none is under way, or it is over and an epoch requested."""
        return self.fresh or (self.requested is not None and self.step >= self.steps)


class EpochCursor:
    """Tracks where the consumer is. Holds no reference to the loader, so that a dropped loader closes at once.

    The whole state is one tuple that is replaced in a single assignment: an interrupt leaves the old or the new one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule  # the order, limited to the steps that the current pass will take
        # Where the consumer is. The loader sets it to `after` once a batch was handed out or has failed.
        self.state = CursorState()

    def set_epoch(self, epoch: int) -> None:
        self._request(Place(operator.index(epoch)), named=False)  # as a plain number, not one of numpy

    def name_epoch(self, epoch: int) -> None:
        """Takes the epoch that a framework names: after the last one that it named comes the pass after the last."""
        state, chosen = self.state, operator.index(epoch)
        last = state.requested or state.saved or state.origin
        since = chosen - (last.epoch - last.ahead)
        if since == 1 or (since == 0 and last is not state.origin):
            chosen = last.epoch + since
        self._request(Place(chosen, ahead=chosen - operator.index(epoch)), named=True)

    def follow(self, last: Place) -> None:
        """Has the next pass be the one after the last pass of a loader of the same place among several."""
        named = self.state.requested
        self.state = self.state._replace(origin=Place(last.epoch, ahead=last.ahead), requested=None)
        if named is not None:
            self.name_epoch(named.epoch - named.ahead)

    def _request(self, requested: Place, *, named: bool) -> None:
        state = self.state._replace(requested=requested, named=named)
        if _coming(state).position != self.coming.position:  # what was read ahead begins elsewhere: it has another key
            state = state._replace(epoch=state.epoch + 1)
        self.state = state

    def restart(self) -> None:
        """Lets the next batch begin a pass."""
        self.state = self.state._replace(fresh=True)

    def resume(self, place: Place | None) -> None:
        """Lets the next batch begin a pass, at this place if it is of that epoch; None for the start of any epoch."""
        self.state = self.state._replace(fresh=True, saved=place)

    @property
    def started(self) -> bool:
        return not self.state.fresh

    @property
    def over(self) -> bool:
        return not self.state.fresh and self.state.step >= self.state.steps

    @property
    def coming(self) -> Place:
        return _coming(self.state)

    def place(self, done: int | None = None) -> Place:
        """The place of the next batch. May be called from any thread.

        Args:
            done: Steps of the pass that count as done; None for those that were handed out, which are the most.
        """
        state = self.state  # read once: the consumer may go on
        if state.between:
            return _coming(state)
        origin = state.origin
        if origin.over:
            return origin
        plan = self.schedule.limited(Limits(state.epoch, start=origin.position)).plan(state.epoch)
        steps = state.step if done is None else min(max(done, 0), state.step)
        history = origin.dealt_on(plan.world_size, plan.batch_size)
        return Place(origin.epoch, plan.position(steps), steps >= len(plan), history, origin.ahead)

    def begin(self, steps_wanted: StepsWanted) -> None:
        """Limits the order to what the pass will take, if the next batch begins one."""
        if self.state.fresh:
            steps, later = steps_wanted()  # which may name the epoch
            start = 0 if self.coming.over else self.coming.position
            self.schedule = self.schedule.limited(Limits(self._next_epoch, steps, later, start))

    @property
    def upcoming(self) -> BatchIndex | None:
        """The key of the next batch, or None if the pass is over. Changes only with `state`."""
        state = self.state
        if state.fresh:
            return None if self.coming.over else BatchIndex(self._next_epoch, 0)
        return BatchIndex(state.epoch, state.step) if state.step < state.steps else None

    def after(self, key: BatchIndex) -> CursorState:
        """Returns the state after the batch of this key, which is the upcoming one."""
        state = self.state
        requested, origin, saved, steps = state.requested, state.origin, state.saved, state.steps
        if state.fresh:  # this pass uses up the request, and the place that was saved
            requested, origin, saved, steps = None, self.coming, None, self.schedule.steps_of(key.epoch)
        return CursorState(key.epoch, key.step + 1, False, requested, origin, saved, steps, state.named)

    @property
    def ended(self) -> CursorState:
        """The state after a pass of which nothing remains, or after the last batch."""
        if not self.state.fresh:
            return self.state
        steps = self.schedule.steps
        named = self.state.named
        return CursorState(self._next_epoch, steps, fresh=False, origin=self.coming, steps=steps, named=named)

    @property
    def wanted(self) -> BatchIndex:
        """The key that the consumer will probably ask for next."""
        if self.state.fresh:
            return BatchIndex(self._next_epoch + self.coming.over, 0)
        return self.schedule.following(BatchIndex(self.state.epoch, self.state.step - 1))

    @property
    def _next_epoch(self) -> int:
        return self.coming.epoch if self.schedule.shuffled else self.state.epoch + 1


def _coming(state: CursorState) -> Place:
    requested, saved = state.requested, state.saved
    if saved is not None and (requested is None or requested.epoch == saved.epoch):
        return Place(saved.epoch + 1, ahead=saved.ahead) if saved.over and requested is None else saved
    return requested or Place(state.origin.epoch + 1, ahead=state.origin.ahead + state.named)
