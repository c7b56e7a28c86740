"""Pickles of users' objects for other processes, and digests of them.

Classes and functions of ``__main__``, of a script started by spawn (``__mp_main__``), and of modules loaded by path
travel by value. Imports cloudpickle, so a reader process does not import this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices

PROBES = 2**14  # most values of an array that go into a digest


def probes(length: int, most: int = PROBES) -> Indices:
    """At most ``most`` evenly spaced numbers from 0 to ``length - 1``, both included."""
    return np.arange(length) if length <= most else np.arange(most) * (length - 1) // (most - 1)


def digest(*pieces: str | npt.NDArray[Any] | Iterable[str]) -> str:
    """A short text that almost surely differs if texts or probed values differ."""
    made = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            text = f"{piece.dtype} {piece.shape}"
            made.update(text.encode() + np.ascontiguousarray(piece[probes(len(piece))]).tobytes())
        else:
            texts = [piece] if isinstance(piece, str) else list(piece)
            made.update(repr(texts).encode("utf-8", "surrogatepass"))
    return made.hexdigest()


# Guards cloudpickle's list of modules, which is global. Reentrant: an object may pickle a part of itself.
_LOCK = threading.RLock()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles by value the classes and functions that another process could not import."""

    def __init__(self, file: Any, buffer_callback: Callable[[Any], object]) -> None:
        super().__init__(file, 5, buffer_callback)
        self._known: set[str] = set()
        self._registered = contextlib.ExitStack()

    def dump(self, obj: Any) -> None:
        with _LOCK, self._registered:
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType | types.ModuleType):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
            if isinstance(name, str) and name not in self._known:
                self._known.add(name)
                listed = cloudpickle.list_registry_pickle_by_value()
                if name in sys.modules and name != "__main__" and not importable(name) and name not in listed:
                    cloudpickle.register_pickle_by_value(module := sys.modules[name])
                    self._registered.callback(cloudpickle.unregister_pickle_by_value, module)
        return super().reducer_override(obj)


def dumps(value: Any, buffer_callback: Callable[[Any], object]) -> bytes:
    """The pickle of a value without its arrays; ``buffer_callback`` gets a `pickle.PickleBuffer` of each."""
    Pickler(memory := io.BytesIO(), buffer_callback).dump(value)
    return memory.getvalue()


def importable(name: str) -> bool:
    """Whether another process with this module path would import the same module by this name."""
    parent, _, _ = name.rpartition(".")
    if parent and not (parent in sys.modules and importable(parent)):
        return False
    spec, path = getattr(sys.modules[name], "__spec__", None), getattr(sys.modules.get(parent), "__path__", None)
    if spec is None or (parent and path is None):  # made by C code of its parent, or by hand
        return bool(parent)
    found = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
    return found is not None and found.origin == spec.origin


def why_not_pickled(value: Any) -> str:
    """The reason why a value cannot be pickled; empty if it can."""
    try:
        dumps(value, [].append)
    except Exception as error:  # noqa: BLE001  # whatever the user's objects raise
        return f"cannot be pickled ({type(error).__name__}: {error})"
    return ""
