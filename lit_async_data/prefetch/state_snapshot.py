"""`Snapshot`: the state of somebody else's loader after one of its batches, or the error that came instead.

Some loaders have a ``state_dict`` that fails: Accelerate's do, unless they are made with ``use_stateful_dataloader``.
The error is raised when somebody asks for the state; the batch is handed out all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple


class Snapshot(NamedTuple):
    """A state that does not change with the loader.

    Attributes:
        state: A copy of the state.
        error: What ``state_dict`` raised instead, or None.

    Example:
        >>> held = {"given": 1}
        >>> snapshot = Snapshot.of(lambda: held)
        >>> held["given"] = 2
        >>> snapshot.get()
        {'given': 1}
    """

    state: Any
    error: Exception | None = None

    @staticmethod
    def of(state_dict: Callable[[], Any]) -> Snapshot:
        """The state now."""
        try:
            return Snapshot(copy.deepcopy(state_dict()))  # a loader may go on to change the dict that it returned
        except Exception as error:  # noqa: BLE001  # raised when the state is asked for
            return Snapshot(None, error.with_traceback(None))  # a traceback refers to frames, and those to batches

    def get(self) -> Any:
        """The state.

        Raises:
            Exception: What ``state_dict`` raised.
        """
        if self.error is not None:
            raise self.error
        return self.state
