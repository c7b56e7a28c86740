"""`Unread`: a dataset as it was before its first sample was read, for other processes."""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar, Self

import cloudpickle
import torch

# Larger pickles are not kept. Arrays and tensors are not copied, and count for nothing.
MOST_BYTES = 2**28


class Unread:
    """A pickle of a dataset: most open their files when they are first read, and then cannot be pickled any more."""

    def __init__(self, dataset: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._data = _pickled(dataset, self._buffers)
        self._after: dict[str, Any] = {}

    def if_needed(self, dataset: Any) -> Self | None:
        """This, if the dataset could be pickled before it was read, and cannot now."""
        self._after = dict(getattr(dataset, "__dict__", {}))
        return self if self._data and _pickled(dataset, []) is None else None

    def with_changes(self, dataset: Any) -> Any:
        """A copy of the dataset as it was, with what the user has set since."""
        unread = pickle.loads(self._data or b"", buffers=self._buffers)  # noqa: S301  # of this process
        for name, value in getattr(dataset, "__dict__", {}).items():
            if self._after.get(name, self) is not value and _pickled(value, []) is not None:
                setattr(unread, name, value)
        return unread


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise OverflowError
        return super().write(data)


def _shared(tensor: torch.Tensor) -> Any:
    """Shares the memory of a tensor, which torch would copy, if numpy can hold it."""
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):
        reduced: Any = tensor
        return reduced.__reduce_ex__(5)


_table: Any = cloudpickle.Pickler.dispatch_table


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    dispatch_table: ClassVar[Any] = _table.new_child({torch.Tensor: _shared})


def _pickled(value: Any, buffers: list[pickle.PickleBuffer]) -> bytes | None:
    """The pickle of a value; empty if it takes too much, None if there is none."""
    memory = _Limited()
    try:
        _Pickler(memory, 5, buffers.append).dump(value)
    except OverflowError:
        return b""
    except Exception:  # noqa: BLE001  # whatever the user's objects raise
        return None
    return memory.getvalue()
