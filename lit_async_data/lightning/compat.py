"""The Lightning package that this program uses, and `Replacement`, which replaces a method of its objects.

``pytorch_lightning`` and ``lightning.pytorch`` are the same code under two names, and the Trainer of one refuses the
DataModules and callbacks of the other. This module uses the package that is already imported, or ``pytorch_lightning``
if neither or both are.
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
    """Replaces a method of an object by ``call``, which gets the original method and the arguments.

    A copy or pickle of the object has the original method again.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._call: Callable[..., Any] | None = call  # None after `undo`; other code may still call this object
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        return self._original(*arguments) if self._call is None else self._call(self._original, *arguments)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()  # a bound method is pickled as its object and its name

    def undo(self) -> None:
        """Restore the object, unless other code has replaced the method since. Idempotent."""
        self._call = None
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if getattr(self._owner, self._name) != self._original:
                setattr(self._owner, self._name, self._original)
