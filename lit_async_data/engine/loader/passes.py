"""`Pass`: one iteration over a loader, with its own place; `BatchIterator`: the one barrier against interrupts.

A loader has one engine, which reads ahead, and one place in the order. Of several iterations over it, one has both:

1. An iteration that was never advanced has nothing and costs nothing.
2. Under a Trainer the engine belongs to the Trainer's own iterator, which takes it from any other.
3. Elsewhere it belongs to the first iteration that was advanced, until that is exhausted, closed or collected; until it
   ended in an error and another one begins; or until ``set_epoch`` or ``load_state_dict`` names where the next begins.
4. Every other iteration reads beside it: in the caller's thread, without reading ahead, and without a change to the
   place, the state or the statistics of the loader. One that has lost the engine goes on from where it was.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

from lit_async_data.engine.device.feed import Batch
from lit_async_data.engine.loader.engine import Run
from lit_async_data.errors import ClosedError


class Taken(NamedTuple):
    """A batch of the engine that is about to be handed out."""

    batch: Batch
    after: Any


class BatchIterator(abc.ABC):
    """What hands out batches, each once, also where an interrupt (Ctrl-C) comes at any moment."""

    _cursor: Any  # its ``state`` is the place, which is replaced in one assignment
    _run: Run

    @abc.abstractmethod
    def _taken(self) -> Taken:
        """The next batch, waiting for it."""

    def __next__(self) -> Batch:
        """The next batch, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ReadError, SourceError: This batch could not be read; the next call goes on with the one after it.
            TransformError: A transform failed on this batch; the next call goes on with the one after it.
            StalledError: Nothing came within ``timeout_s``.
            WorkerError: A worker died, this process is a fork of the one that began to read, or another thread is
                inside ``next``. If reader processes died of this batch, the next call goes on with the one after it.
            ClosedError: The loader is closed, or an interrupt has ended a pass over a loader of others.
            Exception: Whatever a loader of others raised in place of this batch.
        """
        taken = self._taken()
        cursor, run = self._cursor, self._run
        # From here on nothing is called. CPython delivers an interrupt when a call begins or ends, so none comes
        # between this and the end of `__next__`: the batch is the caller's, or it is still the next.
        cursor.state, run.interrupted, run.unanswered, run.inside = taken.after, False, False, {}
        return taken.batch


class Pass(BatchIterator):
    """One iteration over a loader, whose place is the ``state`` of a cursor. One thread may advance it at a time."""

    def __init__(
        self,
        taken: Callable[[], Taken],
        cursor: Any,
        run: Run,
        claim: Callable[[Pass], bool],
        beside: Callable[[Any], Iterator[Batch]],
    ) -> None:
        self._taken_of_loader, self._claim, self._read_beside = taken, claim, beside
        self._cursor, self._run, self._run_of_loader = cursor, run, run
        self._beside: Iterator[Batch] | None = None
        self.left: Any = None  # where the pass was when another one took the engine from it; else None

    def __iter__(self) -> Self:
        return self

    def _taken(self) -> Taken:
        if self._beside is None and not self._claim(self):
            # The loader's cursor stays where it is; a pass that reads for this one has a place of its own.
            beside = self._read_beside(self.left)
            if isinstance(beside, Pass):
                self._beside, self._cursor, self._run = beside, beside._cursor, beside._run  # noqa: SLF001
            else:
                self._beside, self._cursor, self._run = beside, types.SimpleNamespace(), Run()
        if self._beside is None:
            try:
                return self._taken_of_loader()
            except StopIteration:
                self.close()
                raise
        if self._run_of_loader.closed:
            self._taken_of_loader()  # raises
        if isinstance(self._beside, Pass):
            return self._beside._taken()  # noqa: SLF001  # one barrier for both
        return Taken(next(self._beside), after=None)

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
