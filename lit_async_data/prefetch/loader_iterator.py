"""`LoaderIterator`: one pass over a prefetched loader, and where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self

from lit_async_data.device.feed import Batch
from lit_async_data.errors import ClosedError
from lit_async_data.loader.base_loader import Run
from lit_async_data.prefetch.state_snapshot import Snapshot


@dataclasses.dataclass
class PassState:
    """The place of a loader in its pass.

    A separate object: setting an attribute of the loader is a call, and an interrupt can come there. None can come
    between assignments to these attributes.

    Attributes:
        asked: Passes that `iter` has been called for.
        begun: Passes that have begun.
        fresh: Whether the next batch begins a pass.
        step: The next batch of the pass.
        over: Whether the pass has come to its end.
        lost: Whether an interrupt has ended the pass.
        state: The loader's state after the batch that was handed out last; None where the loader's own is right.
        before: The state before that batch; None where it is not known.
        counted: What the consumer counted as done when the pass began; None if it counts nothing.
    """

    asked: int = 0
    started: int = 0
    fresh: bool = True
    step: int = 0
    over: bool = False
    lost: bool = False
    state: Snapshot | None = None
    before: Snapshot | None = None
    counted: int | None = None


class Taken(NamedTuple):
    """A batch that is about to be handed out.

    Attributes:
        batch: The batch.
        step: Its number in the pass.
        state: The loader's state after it, if that is known.
    """

    batch: Batch
    step: int
    state: Snapshot | None


class LoaderIterator:
    """One pass over a prefetched loader. Iterated over again, it goes on where it is.

    Args:
        following: Returns the next batch; raises `StopIteration` at the end.
        at: The loader's place.
        run: The loader's running part.
    """

    def __init__(self, following: Callable[[], Taken], at: PassState, run: Run) -> None:
        self._following = following
        self._at = at
        self._run = run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        at, run, taken = self._at, self._run, self._following()
        # As in `PrefetchedLoader.__next__`, which is not called: an interrupt could come when it has returned.
        at.step, at.before, at.state, run.interrupted, run.inside = taken.step + 1, at.state, taken.state, False, {}
        return taken.batch

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning's CombinedLoader holds iterators, and programs copy and pickle Trainers.
        return LoaderIterator, (_copied, PassState(), Run())


def _copied() -> NoReturn:
    raise ClosedError("this is a copy of a pass, and only the original has its place in the data; write iter(loader)")
