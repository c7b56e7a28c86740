"""`LoaderIterator`: one pass over a prefetched loader, and where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

from lit_async_data.device.inline_queue import Batch
from lit_async_data.prefetch.state_snapshot import Snapshot


@dataclasses.dataclass
class PassState:
    """Where a loader is in its pass.

    An object of its own, since to set an attribute of the loader is a call, in which an interrupt can come; between
    assignments to these none can.

    Attributes:
        asked: Passes that `iter` has been called for.
        begun: Passes that have begun.
        fresh: Whether the next batch begins a pass.
        step: The next batch of the pass.
        over: Whether the pass has come to its end.
        lost: Whether an interrupt has ended the pass.
        state: Of the loader, after the batch that was handed out last; None where it is as the loader says.
        interrupted: Whether a request never came to its end: what runs may be in any state, and is thrown away.
    """

    asked: int = 0
    started: int = 0
    fresh: bool = True
    step: int = 0
    over: bool = False
    lost: bool = False
    state: Snapshot | None = None
    interrupted: bool = False


class Taken(NamedTuple):
    """A batch that is about to be handed out.

    Attributes:
        batch: As it is.
        step: Its number in the pass.
        state: Of the loader after it, if that is known.
    """

    batch: Batch
    step: int
    state: Snapshot | None


class LoaderIterator:
    """What ``iter`` of a prefetched loader gives: it goes on where it is when it is iterated over again.

    Args:
        following: Gives what is to be handed out next, and at the end a `StopIteration`.
        at: Where the loader is.
    """

    def __init__(self, following: Callable[[], Taken], at: PassState) -> None:
        self._following = following
        self._at = at

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        at, taken = self._at, self._following()
        # As in `PrefetchedLoader.__next__`; that is not called, since an interrupt could come when it has returned.
        at.step, at.state, at.interrupted = taken.step + 1, taken.state, False
        return taken.batch
