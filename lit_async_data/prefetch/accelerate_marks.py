"""`Marks`: keeps Accelerate's end-of-loader marks in step with the batches that are handed over.

A loader that Accelerate has prepared keeps two marks: whether its last batch ends the pass, and how many samples that
batch has. While it is iterated over, it is an entry of a list; ``accelerator.accumulate`` and ``gather_for_metrics``
read the marks of the newest entry. The loader sets its marks when it is read, which may be some batches before the
training loop gets there. So the reader keeps it from entering the list, and enters a `Marks` instead, which has the
marks of the batch that was handed over last.

This module recognizes Accelerate by the names of its attributes and does not import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ENTER, LEAVE = "_add_dataloader", "_remove_dataloader"


class Mark(NamedTuple):
    """The marks of a loader after a batch.

    Attributes:
        end_of_dataloader: Whether that batch is the last of its pass.
        remainder: Samples of the last batch; -1 if unknown.
    """

    end_of_dataloader: bool
    remainder: int


class Marks:
    """Stands in Accelerate's list in place of a loader. It takes all other attributes from the loader.

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
        """The marks of a loader; None if it keeps none."""
        state = getattr(loader, "gradient_state", None)
        known = all(callable(getattr(type(state), name, None)) for name in (ENTER, LEAVE))
        return Marks(loader) if known and hasattr(loader, "end_of_dataloader") else None

    def begin(self) -> None:
        """Begin a pass: keep the loader from entering the list."""
        self._loader.gradient_state = _Silent(self._state)

    def now(self) -> Mark:
        """The marks of the batch that was read last. Called in the thread that reads the loader."""
        return Mark(self._loader.end_of_dataloader, self._loader.remainder)

    def show(self, mark: Mark) -> None:
        """Take over the marks of the batch that has been handed over."""
        self.end_of_dataloader, self.remainder = mark
        if not self._entered:
            self._entered = True
            getattr(self._state, ENTER)(self)

    def end(self) -> None:
        """End the pass. Idempotent."""
        if self._entered:
            enter, leave = getattr(self._state, ENTER), getattr(self._state, LEAVE)
            try:
                leave(self)
            except ValueError:  # Accelerate 1.2, if an interrupt has kept this out of the list
                enter(self)
                leave(self)
            self._entered = False
        if isinstance(self._loader.gradient_state, _Silent):
            self._loader.gradient_state = self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


class _Silent:
    """Accelerate's state, without the methods by which a loader enters and leaves the list."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in (ENTER, LEAVE) else getattr(vars(self)["_state"], name)


def _nothing(loader: Any) -> None:
    pass
