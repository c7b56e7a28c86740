"""Where somebody else's loader is: in its pass, and by its own `state_dict`.

Some loaders have a ``state_dict`` that fails: Accelerate's do, unless they are made with ``use_stateful_dataloader``.
The error is raised when somebody asks for the state; the batch is handed out all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple


class Snapshot(NamedTuple):
    """A copy of a state, which does not change with the loader; or what ``state_dict`` raised instead."""

    state: Any
    error: Exception | None = None

    @staticmethod
    def of(state_dict: Callable[[], Any]) -> Snapshot:
        try:
            return Snapshot(copy.deepcopy(state_dict()))  # a loader may go on to change the dict that it returned
        except Exception as error:  # noqa: BLE001  # raised when the state is asked for
            return Snapshot(None, error.with_traceback(None))  # a traceback refers to frames, and those to batches

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.state


class PassState(NamedTuple):
    """Where a loader is in its pass.

    Attributes:
        started: Passes that have begun.
        fresh: Whether the next batch begins a pass.
        step: The next batch of the pass.
        over: Whether the pass has come to its end.
        lost: Whether an interrupt has ended the pass.
        state: The loader's state after the batch that was handed out last; None where the loader's own is right.
        before: The state before that batch; None where it is not known.
        counted: What the consumer counted as done when the pass began; None if it counts nothing.
    """

    started: int = 0
    fresh: bool = True
    step: int = 0
    over: bool = False
    lost: bool = False
    state: Snapshot | None = None
    before: Snapshot | None = None
    counted: int | None = None


class PassCursor:
    """Holds the place of a loader, which is replaced in one assignment."""

    def __init__(self) -> None:
        self.state = PassState()
