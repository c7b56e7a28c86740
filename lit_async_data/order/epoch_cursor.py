"""`EpochCursor`: the place of the consumer in the order of all epochs, and its saved state, the same on every rank.

``iter()`` only announces a pass: Lightning calls it two or three times per epoch, before and after ``set_epoch``. The
first batch binds the pass to an epoch: to the epoch that ``set_epoch`` requested since the last pass, otherwise to the
epoch after the last one, even if that ended early. A framework names epochs by its own count. Among several loaders, a
short one begins again in the middle of the framework's epoch, and each of its passes is an epoch of its own.

The next pass begins at the saved place if it is a pass over that epoch. The pass after it begins at the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from lit_async_data.errors import ResumeError
from lit_async_data.order.plan import UNLIMITED, BatchIndex, Limits, Schedule

VERSION = 1
MOST_EPOCHS = 2**62  # the order takes epochs of 63 bits, and the epoch after this one must be valid, too


class Segment(NamedTuple):
    """Consecutive steps of an epoch with the same number of ranks and the same batch size."""

    position: int  # the first position, in samples over all ranks
    world_size: int
    batch_size: int  # samples per batch and rank

    @property
    def step(self) -> int:
        return self.world_size * self.batch_size


class Place(NamedTuple):
    epoch: int  # the epoch, as ``set_epoch`` names it
    position: int = 0  # samples of the epoch that are done, over all ranks
    over: bool = False  # whether the epoch has no more batches
    history: tuple[Segment, ...] = ()  # the segments before the position
    # The difference to the epoch that a framework has named: passes that began again in the middle of its epochs.
    ahead: int = 0

    def dealt_on(self, world_size: int, batch_size: int) -> tuple[Segment, ...]:
        """The history, with the segment that begins here.

        Steps of the same size that follow each other share a segment, so that stopping and continuing a run does not
        lengthen its history.
        """
        last = self.history[-1] if self.history else None
        if last is not None and last[1:] == (world_size, batch_size) and not (self.position - last[0]) % last.step:
            return self.history
        return (*self.history, Segment(self.position, world_size, batch_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderState:
    epoch: int
    position: int  # samples of the epoch that are done, over all ranks
    samples: int  # samples of the whole epoch
    seed: int
    shuffle: str  # the shuffle in effect: ``"none"``, ``"chunk"`` or ``"global"``
    shuffle_chunks: int = 1  # chunks of a group, in a shuffle by chunks
    drawn: str | None = None  # digest of the weights by which samples are drawn; None without weights
    source: Mapping[str, int | str] = dataclasses.field(default_factory=dict)  # see `Source.fingerprint`
    history: tuple[Segment, ...] = ()  # the segments before the position
    ahead: int = 0  # see `Place`; saved only if it is not 0
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.ahead:
            del values["ahead"]
        return values | {"source": dict(self.source), "history": [list(segment) for segment in self.history]}

    @classmethod
    def from_dict(cls, given: Any) -> Self:
        """The inverse of `to_dict`, also after JSON or YAML."""
        version = given.get("version") if isinstance(given, Mapping) else None
        if isinstance(version, int) and version > VERSION:
            what = f"the saved place has version {version}, and this lit_async_data reads versions up to {VERSION}"
            raise ResumeError(f"{what}; resume with the version that wrote it, or a later one")
        with contextlib.suppress(KeyError, TypeError, ValueError):
            given = {"ahead": 0, **given}
            values: dict[str, Any] = {field.name: given[field.name] for field in dataclasses.fields(cls)}
            history = tuple(Segment(*map(operator.index, each)) for each in values["history"])
            values |= {name: operator.index(values[name]) for name in ("epoch", "position", "samples", "seed", "ahead")}
            state = cls(**values | {"source": dict(values["source"]), "history": history})
            steps = [0, *(each.position for each in history), state.position, state.samples]
            ordered = steps == sorted(steps) and all(each.step > 0 for each in history)
            if ordered and 0 <= state.ahead <= state.epoch <= MOST_EPOCHS:
                return state
        raise ResumeError(f"the saved place is damaged, or was not written by AsyncLoader.state_dict: {given!r}")

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.position, self.position >= self.samples, self.history, self.ahead)

    def at(self, place: Place) -> Self:
        history = tuple(Segment(*map(int, segment)) for segment in place.history)  # of plain numbers, not of numpy's
        epoch, position, ahead = map(int, (place.epoch, place.position, place.ahead))
        return dataclasses.replace(self, epoch=epoch, position=position, history=history, ahead=ahead)

    def differences(self, now: OrderState) -> list[str]:
        """The changes since this state was saved, as ``"seed: 1 in the checkpoint, 2 now"``."""
        pairs: dict[str, tuple[Any, Any]] = {"seed": (self.seed, now.seed), "shuffle": (self.shuffle, now.shuffle)}
        if self.shuffle == now.shuffle == "chunk":
            pairs["shuffle_chunks"] = self.shuffle_chunks, now.shuffle_chunks
        pairs["weights"] = self.drawn, now.drawn
        for key in {**self.source, **now.source}:
            pairs[key] = self.source.get(key), now.source.get(key)
        drawn = self.drawn is not None or now.drawn is not None
        if drawn or self.source.get("samples") == now.source.get("samples"):  # else "samples" names the difference
            pairs["samples of an epoch"] = self.samples, now.samples
        if self.shuffle != now.shuffle:
            pairs.pop("chunks", None)  # the other shuffle may have none
        return [
            f"{name}: {_shown(saved)} in the checkpoint, {_shown(found)} now"
            for name, (saved, found) in pairs.items()
            if saved != found and not (name == "fields" and _fields_of(saved) == _fields_of(found))
        ]


def _fields_of(spec: object) -> list[str]:
    """The fields of a specification in one order: a source inside may have its keys in another."""
    return sorted(re.split(r", (?=[^,]* )", str(spec)))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


# Returns the steps that the consumer will take of the next pass, and of each later pass; None for all.
StepsWanted = Callable[[], tuple[int | None, int | None]]


class CursorState(NamedTuple):
    epoch: int = -1  # epoch of the last pass begun; -1 before the first. Without a shuffle, the number of the pass
    step: int = 0  # next step of the last pass
    fresh: bool = True  # whether the next batch begins a pass
    requested: Place | None = None  # the start of the epoch that was requested for the next pass
    origin: Place = Place(-1)  # the first place of the last pass
    saved: Place | None = None  # the first place of the next pass over that epoch; None for its start
    steps: int = 0  # steps of the last pass
    named: bool = False  # whether a framework names the epochs

    @property
    def between(self) -> bool:
        """Whether the next batch begins a pass: none is under way, or it is over and an epoch was requested."""
        return self.fresh or (self.requested is not None and self.step >= self.steps)

    @property
    def coming(self) -> Place:
        """The first place of the next pass."""
        requested, saved = self.requested, self.saved
        if saved is not None and (requested is None or requested.epoch == saved.epoch):
            return Place(saved.epoch + 1, ahead=saved.ahead) if saved.over and requested is None else saved
        return requested or Place(self.origin.epoch + 1, ahead=self.origin.ahead + self.named)


class EpochCursor:
    """Tracks the place of the consumer. Holds no reference to the loader, so that a dropped loader closes at once.

    A single assignment replaces the whole state, a tuple: an interrupt leaves the old or the new one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule  # the order, limited to the steps that the current pass will take
        self.state = CursorState()  # the loader sets it to `after` once a batch was handed out or has failed

    def set_epoch(self, epoch: int) -> None:
        self._request(Place(operator.index(epoch)), named=False)  # a plain number, not one of numpy

    def name_epoch(self, epoch: int) -> None:
        """Request an epoch by a framework's count. If that moved on by one, the pass after the last one follows."""
        state, chosen = self.state, operator.index(epoch)
        last = state.requested or state.saved or state.origin
        since = chosen - (last.epoch - last.ahead)
        if since == 1 or (since == 0 and last is not state.origin):
            chosen = last.epoch + since
        self._request(Place(chosen, ahead=chosen - operator.index(epoch)), named=True)

    def follow(self, last: Place) -> None:
        """Continue after ``last``, the last pass of the loader that this one replaces."""
        named = self.state.requested
        self.state = self.state._replace(origin=Place(last.epoch, ahead=last.ahead), requested=None)
        if named is not None:
            self.name_epoch(named.epoch - named.ahead)

    def _request(self, requested: Place, *, named: bool) -> None:
        state = self.state._replace(requested=requested, named=named)
        if state.coming.position != self.coming.position:  # batches read ahead begin elsewhere: they need another key
            state = state._replace(epoch=state.epoch + 1)
        self.state = state

    def resume(self, place: Place | None) -> None:
        """Let the next batch begin a pass, at this place if it is a pass over that epoch; None for the start."""
        self.state = self.state._replace(fresh=True, saved=place)

    @property
    def over(self) -> bool:
        return not self.state.fresh and self.state.step >= self.state.steps

    @property
    def coming(self) -> Place:
        return self.state.coming

    def place(self, done: int | None = None) -> Place:
        """The place of the next batch, or after ``done`` steps of the pass. May be called from any thread."""
        state = self.state  # read once: the consumer may go on
        if state.between:
            return state.coming
        origin = state.origin
        if origin.over:
            return origin
        plan = self.schedule.limited(Limits(state.epoch, start=origin.position)).plan(state.epoch)
        steps = state.step if done is None else min(max(done, 0), state.step)
        history = origin.dealt_on(plan.world_size, plan.batch_size)
        return Place(origin.epoch, plan.position(steps), steps >= len(plan), history, origin.ahead)

    def begin(self, steps_wanted: StepsWanted) -> None:
        """Limit the order to the steps that the consumer will take, if the next batch begins a pass."""
        if self.state.fresh:
            steps, later = (UNLIMITED if most is None else most for most in steps_wanted())  # may name the epoch
            start = 0 if self.coming.over else self.coming.position
            self.schedule = self.schedule.limited(Limits(self._next_epoch, steps, later, start))

    @property
    def upcoming(self) -> BatchIndex | None:
        """The key of the next batch; None if the pass is over. Changes only with `state`."""
        state = self.state
        if state.fresh:
            return None if self.coming.over else BatchIndex(self._next_epoch, 0)
        return BatchIndex(state.epoch, state.step) if state.step < state.steps else None

    def after(self, key: BatchIndex) -> CursorState:
        """The state after the upcoming batch, which has this key."""
        state = self.state
        requested, origin, saved, steps = state.requested, state.origin, state.saved, state.steps
        if state.fresh:  # this pass uses up the request and the saved place
            requested, origin, saved, steps = None, self.coming, None, self.schedule.steps_of(key.epoch)
        return CursorState(key.epoch, key.step + 1, False, requested, origin, saved, steps, state.named)

    @property
    def ended(self) -> CursorState:
        """The state after the last batch, or after a pass without remaining batches."""
        last = BatchIndex(self._next_epoch, self.schedule.steps - 1)
        return self.after(last) if self.state.fresh else self.state

    @property
    def wanted(self) -> BatchIndex:
        """The key that the consumer will probably ask for next."""
        if self.state.fresh:
            return BatchIndex(self._next_epoch + self.coming.over, 0)
        return self.schedule.following(BatchIndex(self.state.epoch, self.state.step - 1))

    @property
    def _next_epoch(self) -> int:
        return self.coming.epoch if self.schedule.shuffled else self.state.epoch + 1
