"""Why a source or a function of the user cannot be pickled for another process."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

# Attributes of attributes that are searched.
DEPTH = 5


def why_not_pickled(value: Any) -> str:
    """Why an object cannot be pickled, with the attribute that prevents it; empty if it can.

    Classes and functions that another process could not import, as those of a notebook, are pickled by value.
    """
    error = _error(value)
    if error is None:
        return ""
    path = _path(value, DEPTH)
    return f"cannot be pickled ({type(error).__name__}: {error})" + (f", because of its {path}" if path else "")


def _error(value: Any) -> Exception | None:
    from lit_async_data.sources.contract.by_value import dumps  # cloudpickle, which no reader process needs

    try:
        dumps(value, [].append)
    except Exception as error:  # noqa: BLE001  # whatever the user's objects raise
        return error
    return None


def _path(value: Any, depth: int) -> str:
    """The first part that cannot be pickled either, as ``attribute.attribute``; empty if there is none."""
    if not depth:
        return ""
    for name, part in _parts(value).items():
        if _error(part) is not None:
            inner = _path(part, depth - 1)
            return name + inner if inner.startswith("[") else f"{name}.{inner}" if inner else name
    return ""


def _parts(value: Any) -> Mapping[str, Any]:
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, types.FunctionType):
        return inspect.getclosurevars(value).nonlocals
    if isinstance(value, functools.partial):
        given = {f"args[{place}]": argument for place, argument in enumerate(value.args)}
        return {"func": value.func, **given, **value.keywords}
    if isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"[{key!r}]": part for key, part in pairs}
    try:
        state = value.__getstate__()
    except Exception:  # noqa: BLE001  # its own pickling fails, and `_error` says how
        return {}
    if isinstance(state, tuple):  # of a class with __slots__
        state = {name: part for each in state if each for name, part in each.items()}
    return state if isinstance(state, dict) else {}
