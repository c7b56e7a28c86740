"""`note_all`: have all memory that a batch refers to noted as used by a stream, and find what hides its memory."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.tree import SCALARS
from lit_async_data.engine.device.feed import moves

# The walk gives up after this many objects, since one of them may refer to the whole program.
MOST = 50_000
# They refer to no memory of a device, or to the whole program.
SKIPPED: tuple[type, ...] = (type, types.ModuleType, types.CodeType, np.ndarray, np.generic, torch.Size)
SKIPPED += (torch.Generator, torch.device, torch.dtype, torch.layout, torch.memory_format)
# Modules whose types in C refer to no memory of a device.
HARMLESS = sys.stdlib_module_names | {"pandas", "pyarrow", "PIL"}
# The memory of sparse tensors, for which torch notes nothing as a whole.
ROWS, COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
PARTS: dict[torch.layout, tuple[str, ...]] = {torch.sparse_coo: ("_indices", "_values")}
PARTS |= {torch.sparse_csr: ROWS, torch.sparse_bsr: ROWS, torch.sparse_csc: COLUMNS, torch.sparse_bsc: COLUMNS}


def note_all(batch: Any, note: Callable[[Any], bool]) -> type | None:
    """Have all memory noted that a batch of any form refers to, also in attributes, slots and closures of its objects.

    Args:
        batch: Any object.
        note: Called with each tensor, and each object that has a ``record_stream``; returns whether it could note it.

    Returns:
        The type of an object that may refer to memory which could not be noted; None if there is none.
    """
    seen: dict[int, tuple[Any, int]] = {}  # objects, which stay alive so that no id is used again; and what led there
    full, doubtful = set[int](), list[Any]()  # whose memory has been noted, or that of an object inside; the others
    todo = [(batch, 0)]
    while todo:
        value, owner = todo.pop()
        kind, key = type(value), id(value)
        if kind in SCALARS or isinstance(value, SKIPPED):
            continue
        if key not in seen:
            seen[key] = value, owner
            if len(seen) > MOST:
                return kind
            if callable(getattr(value, "record_stream", None)) and note(value):
                full.add(key)
                # A subclass of Tensor may have attributes.
                inside = gc.get_referents(value) if isinstance(value, torch.Tensor) and kind is not torch.Tensor else []
            else:
                inside = list(_inside(value))
                if _may_hide(value, inside):
                    doubtful.append(value)
            todo += [(each, key) for each in inside]
        while key in full and owner not in full:
            full.add(owner)
            owner = seen[owner][1] if owner else 0
    return next((type(value) for value in doubtful if id(value) not in full), None)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):  # not its globals, which are a module's
        return value.__closure__ or (), value.__defaults__, value.__kwdefaults__
    if not isinstance(value, torch.Tensor):
        return gc.get_referents(value)
    if flatten := getattr(value, "__tensor_flatten__", None):  # a subclass that wraps others
        return [getattr(value, name) for name in flatten()[0]]
    names = ("values",) if value.is_nested else PARTS.get(value.layout, ())
    return [getattr(value, name)() for name in names] + gc.get_referents(value)


def _may_hide(value: Any, inside: Sequence[Any]) -> bool:
    """Whether an object may have memory other than that of objects inside: one that moves itself, or is made in C."""
    if moves(value):
        return not isinstance(value, Mapping | Sequence | AbstractSet)
    seen = hasattr(value, "__dict__") or any(not isinstance(each, type) for each in inside)
    return not seen and str(type(value).__module__).partition(".")[0] not in HARMLESS
