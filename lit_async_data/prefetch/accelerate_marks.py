"""`Marks`: what Accelerate's loaders say about the batch in hand, said when that batch is handed over.

A loader that Accelerate has prepared keeps two marks, whether the batch that it gave last is the last of its pass and
how many samples that one has, and enters itself into a list while it is iterated over. ``accelerator.accumulate`` and
``gather_for_metrics`` read the marks of the newest entry. The loader sets them when it is read, which may be some
batches before the training loop gets there. So while we read it, it enters nothing; we enter a `Marks` instead, which
has the marks of the batch that was handed over last.

Accelerate is known by the names of its attributes and is not imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ENTER, LEAVE = "_add_dataloader", "_remove_dataloader"


class Mark(NamedTuple):
    """What a loader says after a batch.

    Attributes:
        end_of_dataloader: Whether that batch is the last of its pass.
        remainder: Samples of the last batch, -1 where that is not known.
    """

    end_of_dataloader: bool
    remainder: int


class Marks:
    """Stands in Accelerate's list in place of a loader. What it does not have itself is the loader's.

    An interrupt (Ctrl-C) can end any method at any call; `end`, called again, undoes all of it.

    Args:
        loader: One that Accelerate has prepared.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._state = loader.gradient_state
        self._entered = False
        self.end_of_dataloader, self.remainder = False, -1

    @staticmethod
    def of(loader: Any) -> Marks | None:
        """Those of a loader; None if it keeps none."""
        state = getattr(loader, "gradient_state", None)
        known = all(callable(getattr(type(state), name, None)) for name in (ENTER, LEAVE))
        return Marks(loader) if known and hasattr(loader, "end_of_dataloader") else None

    def begin(self) -> None:
        """A pass begins: the loader is to enter nothing by itself."""
        self._loader.gradient_state = _Silent(self._state)

    def now(self) -> Mark:
        """What the loader says about the batch that it gave last. To be asked in the thread that reads it."""
        return Mark(self._loader.end_of_dataloader, self._loader.remainder)

    def show(self, mark: Mark) -> None:
        """The batch with this mark has been handed over."""
        self.end_of_dataloader, self.remainder = mark
        if not self._entered:
            self._entered = True
            getattr(self._state, ENTER)(self)

    def end(self) -> None:
        """The pass is over. Twice is fine."""
        if self._entered:
            enter, leave = getattr(self._state, ENTER), getattr(self._state, LEAVE)
            try:
                leave(self)
            except ValueError:  # of versions like 1.2: an interrupt has kept this out of the list
                enter(self)
                leave(self)
            self._entered = False
        if isinstance(self._loader.gradient_state, _Silent):
            self._loader.gradient_state = self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


class _Silent:
    """Accelerate's state, to which a loader adds nothing, and from which it takes nothing away."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in (ENTER, LEAVE) else getattr(vars(self)["_state"], name)


def _nothing(loader: Any) -> None:
    pass
