"""Values of samples that Python code returns, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.spec import TENSOR_TYPES, Array

ALTERNATIVE = "prefetched(loader) takes a DataLoader of your own for such batches"
# torch copies fewer elements than this in the calling thread. For more it uses its thread pool, which the training step
# needs.
GRAIN = 32768
_MAX_INT64 = np.iinfo(np.int64).max


class UnfitError(Exception):
    """A value cannot become part of a batch; the message says why and what to do."""


def as_array(value: Any) -> Array:
    """A value as an array, without a copy. Whole-number scalars become int64."""
    if isinstance(value, torch.Tensor):
        array = _tensor_array(value)
    elif isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        array = np.asarray(value)
    elif isinstance(value, bool | int | float):
        kind = bool if isinstance(value, bool) else int if isinstance(value, int) else float
        try:
            return np.asarray(value, np.dtype(kind))
        except OverflowError:
            raise UnfitError(f"{value} does not fit into int64; return it as a float") from None
    else:
        raise UnfitError(_reason(value))
    if (array.dtype.kind, array.dtype.itemsize) not in TENSOR_TYPES:
        raise UnfitError(f"a numpy array of {array.dtype}, which no tensor can hold; return numbers, or: {ALTERNATIVE}")
    if array.ndim or array.dtype.kind not in "iu":
        return array
    if array.dtype.kind == "u" and int(array) > _MAX_INT64:
        raise UnfitError(f"{array} does not fit into int64; return it as an array of one axis, or as a float")
    return array.astype(np.int64, copy=False)


def _tensor_array(tensor: torch.Tensor) -> Array:
    if not tensor.is_cpu:
        raise UnfitError(f"a tensor on {tensor.device}; return it on the CPU, the loader copies batches to the device")
    try:
        # `force` also detaches the tensor and resolves conjugates.
        array: Array = tensor.numpy(force=True)
    except (TypeError, RuntimeError):
        layout = "" if tensor.layout is torch.strided else f"{tensor.layout} "
        raise UnfitError(
            f"a {layout}tensor of {tensor.dtype}, which numpy cannot hold; return a dense tensor of another dtype, "
            "such as .float(), and cast it in device_transform"
        ) from None
    return array


def _reason(value: object) -> str:
    kind = type(value)
    if any(base.__module__.split(".")[0] == "PIL" for base in kind.__mro__):
        return f"a PIL image ({kind.__name__}); convert it in the dataset with ToTensor or numpy.asarray"
    if isinstance(value, Mapping | tuple | list):
        return f"a {kind.__name__} inside a sample; return one flat dict or tuple, or: {ALTERNATIVE}"
    return f"{kind.__name__} is not a value that a tensor can hold; leave it out of the sample, or: {ALTERNATIVE}"


def fill_from_equal(array: Array, values: list[Any]) -> bool:
    """Fill an array from values of equal type and shape in one call, which is faster than one by one.

    Args:
        array: Shape (n, ...), C-contiguous.
        values: n values, n ≥ 1.

    Returns:
        Whether the array is filled: all values are plain tensors, Python ints or Python floats that fit. Otherwise the
        caller must convert each value.
    """
    kinds = set(map(type, values))
    if kinds == {torch.Tensor}:
        return _stack(torch.from_numpy(array), values)
    if not (kinds == {int} and array.dtype == np.int64) and not (kinds == {float} and array.dtype == np.float64):
        return False
    if array.ndim > 1:
        return False
    try:
        array[...] = values
    except OverflowError:
        return False
    return True


def _stack(target: torch.Tensor, tensors: list[Any]) -> bool:
    dtype, shape = target.dtype, target.shape[1:]
    if math.prod(shape) >= GRAIN:
        return False
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu or tensor.layout != torch.strided:
            return False
    with torch.no_grad():
        torch.stack(tensors, out=target)
    return True
