"""Values of samples: what Python code returns, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.spec import TENSOR_TYPES, Array

ELSEWHERE = "prefetched(loader) takes a DataLoader of your own for such batches"
# Values of fewer elements than this torch copies in the calling thread; more it shares among threads of its own, which
# the training step wants.
GRAIN = 32768
_MOST = np.iinfo(np.int64).max


class UnfitError(Exception):
    """A value cannot become part of a batch; the message says why and what to do."""


def as_array(value: Any) -> Array:
    """A value as an array, without a copy; whole numbers without an axis as int64.

    Raises:
        UnfitError: It is no number and no array of numbers, or one that no tensor in host memory holds.
    """
    if isinstance(value, torch.Tensor):
        array = _of_tensor(value)
    elif isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        array = np.asarray(value)
    elif isinstance(value, bool | int | float):
        kind = bool if isinstance(value, bool) else int if isinstance(value, int) else float
        try:
            return np.asarray(value, np.dtype(kind))
        except OverflowError:
            raise UnfitError(f"{value} is more than an int64 holds; give it as a float") from None
    else:
        raise UnfitError(_refusal(value))
    if (array.dtype.kind, array.dtype.itemsize) not in TENSOR_TYPES:
        raise UnfitError(f"a numpy array of {array.dtype}, which no tensor holds; give numbers, or: {ELSEWHERE}")
    if array.ndim or array.dtype.kind not in "iu":
        return array
    if array.dtype.kind == "u" and int(array) > _MOST:
        raise UnfitError(f"{array} is more than an int64 holds; give it an axis of its own, or as a float")
    return array.astype(np.int64, copy=False)


def _of_tensor(tensor: torch.Tensor) -> Array:
    if not tensor.is_cpu:
        raise UnfitError(
            f"a tensor on {tensor.device}; leave it on the CPU in the dataset, batches go to the device by themselves"
        )
    try:
        # With `force`, also without its gradient, and conjugates are computed.
        array: Array = tensor.numpy(force=True)
    except (TypeError, RuntimeError):
        layout = "" if tensor.layout is torch.strided else f"{tensor.layout} "
        raise UnfitError(
            f"a {layout}tensor of {tensor.dtype}, which numpy does not know; return a dense one of another type from "
            "the dataset, such as .float(), and cast it in device_transform"
        ) from None
    return array


def _refusal(value: object) -> str:
    kind = type(value)
    if any(base.__module__.split(".")[0] == "PIL" for base in kind.__mro__):
        return f"an image of PIL ({kind.__name__}); make it a tensor in the dataset (ToTensor) or numpy.asarray of it"
    if isinstance(value, Mapping | tuple | list):
        return f"a {kind.__name__} inside a sample; make one flat dict or tuple of it in the dataset, or: {ELSEWHERE}"
    return f"{kind.__name__} is nothing that a tensor holds; leave it out in the dataset, or: {ELSEWHERE}"


def filled_at_once(array: Array, values: list[Any]) -> bool:
    """Fill an array from values that are all of its type and shape, which costs less than one by one.

    Args:
        array: Of shape (n, ...), C-contiguous.
        values: As many, ≥ 1.

    Returns:
        Whether they are: plain tensors, Python's int or Python's float. Else each must be looked at.
    """
    kinds = set(map(type, values))
    if kinds == {torch.Tensor}:
        return _stacked(torch.from_numpy(array), values)
    if not (kinds == {int} and array.dtype == np.int64) and not (kinds == {float} and array.dtype == np.float64):
        return False
    if array.ndim > 1:
        return False
    try:
        array[...] = values
    except OverflowError:
        return False
    return True


def _stacked(target: torch.Tensor, tensors: list[Any]) -> bool:
    dtype, shape = target.dtype, target.shape[1:]
    if math.prod(shape) >= GRAIN:
        return False
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu or tensor.layout != torch.strided:
            return False
    with torch.no_grad():
        torch.stack(tensors, out=target)
    return True
