"""The Lightning package that this program uses, and `Replacement`, by which it takes the place of a method there.

``pytorch_lightning`` and ``lightning.pytorch`` are the same code under two names, and the Trainer of one refuses the
DataModules and callbacks of the other. This module takes the package that is already imported, and
``pytorch_lightning`` if neither or both are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_only
else:
    _name = "pytorch_lightning"
    if "lightning.pytorch" in sys.modules and _name not in sys.modules:
        _name = "lightning.pytorch"
    pl = importlib.import_module(_name)
    rank_zero_only = importlib.import_module(f"{_name}.utilities.rank_zero").rank_zero_only

__all__ = ["Replacement", "pl", "rank_zero_only"]


class Replacement:
    """Takes the place of a method of an object, and makes a call with the original and the arguments instead.

    In a copy of the object, or a pickle of it, the method is the original again.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._call: Callable[..., Any] | None = call  # None once it is undone, though other code may still call it
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        return self._original(*arguments) if self._call is None else self._call(self._original, *arguments)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()  # of a bound method: its object and its name

    def undo(self) -> None:
        """Restore the object, unless other code has replaced the method since. Idempotent."""
        self._call = None
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if getattr(self._owner, self._name) != self._original:
                setattr(self._owner, self._name, self._original)
