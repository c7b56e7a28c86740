"""Values that a host hook returns, as arrays. Reader processes import this module, so it imports no torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from lit_async_data.batch.spec import TENSOR_TYPES, Array


class UnfitError(Exception):
    """A value cannot become part of a batch; the message says what it is, and what to return."""


def as_array(value: Any) -> Array:
    """A value as an array, without a copy where there is memory to share. Numbers of Python: int64, float32, bool.

    Raises:
        UnfitError: It is neither a number nor an array of numbers that a tensor can hold.
    """
    array: Array
    if isinstance(value, np.ndarray | np.generic | bool) and not isinstance(value, np.ma.MaskedArray):
        array = np.asarray(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise UnfitError(f"is {value}, which does not fit into int64; return it as a float")
        array = np.asarray(value, np.int64)
    elif isinstance(value, float):
        array = np.asarray(value, np.float32)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        array = _tensor_array(value)
    else:
        hint = "numpy.asarray(…) of it" if hasattr(value, "__array__") else "an array or a number, or leave it out"
        raise UnfitError(f"is a {type(value).__name__}; return {hint}")
    if (array.dtype.kind, array.dtype.itemsize) not in TENSOR_TYPES:
        raise UnfitError(f"is an array of {array.dtype}, which no tensor can hold; return numbers, or leave it out")
    return array


def _tensor_array(tensor: Any) -> Array:
    if not tensor.is_cpu:
        raise UnfitError(f"is a tensor on {tensor.device}; return it on the CPU, the loader copies batches")
    try:
        # `force` also detaches the tensor and resolves conjugates.
        array: Array = tensor.numpy(force=True)
    except (TypeError, RuntimeError):
        raise UnfitError(
            f"is a tensor of {tensor.dtype}, {tensor.layout}, which numpy cannot hold; return a dense tensor of "
            "another dtype, such as .float(), and cast it in device_transform"
        ) from None
    return array
