"""`IdleDevice`: a device whose operations take no time, so that only the work of the host is measured."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class IdleDevice:
    """Streams on which everything has happened at once. Only small tensors are copied, such as labels."""

    side: Any = None
    capturing = False
    _COPIED = 4096

    def compute(self) -> None:
        pass

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.nbytes <= self._COPIED:
            destination.copy_(source)

    def moved(self, value: Any) -> Any:
        return value

    def record_stream(self, value: Any, stream: Any) -> bool:
        return True

    def record(self, stream: Any) -> Any:
        return self

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def happened(self, event: Any, *, block: bool) -> bool:
        return True

    def timed(self, stream: Any) -> Any:
        return self

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return 0.0
