"""What of a batch goes to a device, and how a whole batch is moved there at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from lit_async_data.batch.tree import flatten, rebuilt

# Names of the first parameter of methods ``to`` that convert to something other than a device: units (pint, astropy,
# unyt), time zones, currencies.
OTHER_TARGETS = ("unit", "other", "tz", "timezone", "currency")


def moves(value: Any) -> bool:
    """Whether a value goes to the device: a tensor, or an object whose method ``to`` takes a device."""
    kind: Any = type(value)
    return isinstance(value, torch.Tensor) or _takes_device(kind)


@functools.lru_cache(maxsize=256)
def _takes_device(kind: type) -> bool:
    to = getattr(kind, "to", None)
    if not callable(to):
        return False
    try:
        names = list(inspect.signature(to).parameters)
    except (TypeError, ValueError):  # some methods written in C have no signature
        return True
    first = names[1] if len(names) > 1 else ""
    return "device" in names or not first.startswith(OTHER_TARGETS)


def moved(device: torch.device, then: Callable[[Any], Any] | None, batch: Any) -> Any:
    """Copies a batch to a device on the current stream, and waits for it."""
    leaves, skeleton = flatten(batch, moves)
    batch = rebuilt(skeleton, {place: leaf.to(device) for place, leaf in leaves.items()})
    return batch if then is None else then(batch)
