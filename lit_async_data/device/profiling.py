"""`ranged`: names a part of our work in torch's profiler, where one is active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Ranges that a trace shows.
NEXT, COPY = "lit_async_data.next", "lit_async_data.copy"


def _never() -> bool:
    return False


#: Whether torch's profiler is active; a function in C, since every batch asks. A private name, which torch may drop.
profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", _never)


def ranged(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Make a call inside a range of the profiler.

    Example:
        >>> with torch.profiler.profile() as profile:
        ...     ranged(NEXT, sum, [1, 2])
        3
        >>> [event.name for event in profile.events() if event.name == NEXT]
        ['lit_async_data.next']
    """
    with torch.profiler.record_function(name):
        return call(*arguments)
