"""`OrderState`: a place in the order, and what the order depends on, as plain values for a checkpoint.

It is the same on every rank, and its size does not depend on that of the dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from lit_async_data.errors import ResumeError

VERSION = 1
MOST_EPOCHS = 2**62  # the order takes epochs of 63 bits, and the one after this must be one, too


class Segment(NamedTuple):
    """Consecutive steps of an epoch that were dealt alike."""

    position: int  # where they begin, in samples over all ranks
    world_size: int
    batch_size: int  # samples per batch and rank

    @property
    def step(self) -> int:
        return self.world_size * self.batch_size


class Place(NamedTuple):
    """Where an epoch is continued."""

    epoch: int  # the epoch, as ``set_epoch`` names it
    position: int = 0  # samples of the epoch that are done, over all ranks
    over: bool = False  # whether nothing remains of the epoch
    history: tuple[Segment, ...] = ()  # how the samples before were dealt
    # Passes by which the epoch is ahead of the one that a framework has named: those that began again in its middle.
    ahead: int = 0

    def dealt_on(self, world_size: int, batch_size: int) -> tuple[Segment, ...]:
        """The history, with the segment that begins here.

        Steps that go on where steps of the same size ended are of the same segment, so that the history of a run that
        is only stopped and continued does not grow.
        """
        last = self.history[-1] if self.history else None
        if last is not None and last[1:] == (world_size, batch_size) and not (self.position - last[0]) % last.step:
            return self.history
        return (*self.history, Segment(self.position, world_size, batch_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderState:
    """A place in the order, and what the order depends on."""

    epoch: int
    position: int  # samples of the epoch that are done, over all ranks
    samples: int  # samples of the whole epoch
    seed: int
    shuffle: str  # the shuffle in effect: ``"none"``, ``"chunk"`` or ``"global"``
    shuffle_chunks: int = 1  # chunks of a group, in a shuffle by chunks
    drawn: str | None = None  # digest of the weights by which samples are drawn; None if each comes once
    source: Mapping[str, int | str] = dataclasses.field(default_factory=dict)  # see `Source.fingerprint`
    history: tuple[Segment, ...] = ()  # how the samples before the position were dealt
    ahead: int = 0  # see `Place`; only in the state if there are any
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.ahead:
            del values["ahead"]
        return values | {"source": dict(self.source), "history": [list(segment) for segment in self.history]}

    @classmethod
    def from_dict(cls, given: Any) -> Self:
        """The state that `to_dict` returned, which may have been through JSON or YAML."""
        version = given.get("version") if isinstance(given, Mapping) else None
        if isinstance(version, int) and version > VERSION:
            raise ResumeError(
                f"the saved place has version {version}, and this lit_async_data knows those up to {VERSION}; resume "
                "with the version that wrote it, or a later one"
            )
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
        """What has changed since this state was saved, as ``"seed: 1 in the checkpoint, 2 now"``."""
        pairs: dict[str, tuple[Any, Any]] = {"seed": (self.seed, now.seed), "shuffle": (self.shuffle, now.shuffle)}
        if self.shuffle == now.shuffle == "chunk":
            pairs["shuffle_chunks"] = self.shuffle_chunks, now.shuffle_chunks
        pairs["weights"] = self.drawn, now.drawn
        for key in {**self.source, **now.source}:
            pairs[key] = self.source.get(key), now.source.get(key)
        drawn = self.drawn is not None or now.drawn is not None
        if drawn or self.source.get("samples") == now.source.get("samples"):  # else that line names the difference
            pairs["samples of an epoch"] = self.samples, now.samples
        if "shuffle" in [name for name, (saved, found) in pairs.items() if saved != found]:
            pairs.pop("chunks", None)  # the other shuffle may have none
        return [
            f"{name}: {_shown(saved)} in the checkpoint, {_shown(found)} now"
            for name, (saved, found) in pairs.items()
            if saved != found
        ]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)
