"""`Pass`: one iteration over a loader, with its own place.

A loader has one engine, which reads ahead, and one place in the order. Of several iterations over it, one has both:

1. An iteration that was never advanced has nothing and costs nothing.
2. Under a Trainer the engine belongs to the Trainer's own iterator, which takes it from any other.
3. Elsewhere it belongs to the first iteration that was advanced, until that is exhausted, closed or collected; until it
   ended in an error and another one begins; or until ``set_epoch`` or ``load_state_dict`` names where the next begins.
4. Every other iteration reads beside it: in the caller's thread, without reading ahead, and without a change to the
   place, the state or the statistics of the loader. One that has lost the engine goes on from where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

from lit_async_data.engine.device.feed import Batch
from lit_async_data.engine.loader.engine import Run
from lit_async_data.errors import ClosedError


class Taken(NamedTuple):
    """A batch of the engine that is about to be handed out."""

    batch: Batch
    after: Any


class Pass:
    """One iteration over a loader, whose place is the ``state`` of a cursor. One thread may advance it at a time."""

    def __init__(
        self,
        taken: Callable[[], Taken],
        cursor: Any,
        run: Run,
        claim: Callable[[Pass], bool],
        beside: Callable[[Any], Iterator[Batch]],
    ) -> None:
        self._taken, self._cursor, self._run, self._claim, self._read_beside = taken, cursor, run, claim, beside
        self._beside: Iterator[Batch] | None = None
        self.left: Any = None  # where the pass was when another one took the engine from it; else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch; see the loader's own ``__next__`` for the errors."""
        if self._beside is None and not self._claim(self):
            self._beside = self._read_beside(self.left)
        if self._beside is not None:
            if self._run.closed:
                self._taken()  # raises
            return next(self._beside)
        cursor, run = self._cursor, self._run
        try:
            taken = self._taken()
        except StopIteration:
            self.close()
            raise
        # From here on nothing is called: see `BaseLoader.__next__`.
        cursor.state, run.interrupted, run.unanswered, run.inside = taken.after, False, False, {}
        return taken.batch

    def close(self) -> None:
        """End the pass, so that another one may have the engine. Idempotent."""
        self._beside = iter(())

    @property
    def closed(self) -> bool:
        """Whether the pass needs the engine no more."""
        return self._beside is not None

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning's CombinedLoader holds iterators, and programs copy and pickle Trainers.
        return _Copied, ()


class _Copied(Iterator[Batch]):
    """A copy of a pass, which has no place in the data."""

    def __next__(self) -> NoReturn:
        raise ClosedError(
            "this is a copy of a pass, and only the original has its place in the data; write iter(loader)"
        )
