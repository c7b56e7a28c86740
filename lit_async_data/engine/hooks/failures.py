"""What a host hook returned, as arrays of a batch; or an error that names the hook, the sample and its file.

Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lit_async_data.batch.spec import TENSOR_TYPES, Array
from lit_async_data.errors import TransformError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source

# The end of the error where a host hook changes the length of a sample of a concatenated field.
FIXED = "with ragged='concat' only device_transform may change a length"


class UnfitError(Exception):
    """A value cannot become part of a batch. The message says why, with a ``{}`` for the words for the samples."""


def failure(where: str, source: Source, samples: Indices, what: str) -> TransformError:
    """The error of a hook on a sample or a batch of samples, whose words take the place of ``{}`` in ``what``."""
    ids = source.ids(samples)
    place = source.locate(ids[:1])[0]
    first = f"row {place.row} of {place.file}"
    several = f"the batch of samples {few(ids.tolist())} (the first is {first})"
    return TransformError(
        f"{where}: {what.replace('{}', several if len(ids) > 1 else f'sample {ids[0]} ({first})', 1)}",
        file=place.file,
        row=place.row,
        sample_id=int(ids[0]),
        stage="transform",
    )


def raised(error: Exception) -> str:
    hint = "; return_indices=True gives it" if isinstance(error, KeyError) and error.args == ("index",) else ""
    return f"failed on {{}}: {type(error).__name__}: {error}{hint}"


def no_dict(made: object) -> str:
    return (
        f"returned a {type(made).__name__} for {{}}; return a dict with an array for each key, or None if the one that "
        "was given has been changed"
    )


def other_keys(made: Mapping[str, object], wanted: Iterable[str]) -> str:
    listed = [", ".join(map(str, keys)) or "none" for keys in (made, wanted)]
    return (
        f"returned the keys {listed[0]} for {{}}, but {listed[1]} for the first sample; return the same keys for every "
        "sample"
    )


def fitting(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A value as an array of the shape and dtype that the first sample had; else an `UnfitError`."""
    array = named_array(key, value)
    if array.shape != shape:
        raise UnfitError(
            f"field {key!r} of {{}} has shape {array.shape}, but {shape} for the first sample; return one shape for "
            "all samples: resize, crop or pad"
        )
    if array.dtype.newbyteorder("=") != dtype:
        raise UnfitError(
            f"field {key!r} of {{}} has dtype {array.dtype}, but {dtype} for the first sample; return one dtype for "
            f"all samples, as .astype({dtype.name!r}) gives it"
        )
    return array


def fitting_rows(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A value of a batch as an array whose rows have the shape and dtype that the first sample had."""
    array = with_rows(key, value, shape[0])
    fitting(key, array[0], shape[1:], dtype)
    return array


def with_rows(key: object, value: object, count: int) -> Array:
    """A value of a batch as an array with this many rows."""
    array = named_array(key, value)
    if array.shape[:1] != (count,):
        raise UnfitError(
            f"field {key!r} of {{}} has shape {array.shape}, but the first axis must have one row for each of the "
            f"{count} samples; leave out what does not belong to one sample each"
        )
    return array


def named_array(key: object, value: object) -> Array:
    if not isinstance(key, str):
        raise UnfitError(f"the key {key!r} in the result for {{}} is not text; name each field by text")
    try:
        return as_array(value)
    except UnfitError as error:
        raise UnfitError(f"field {key!r} of {{}} {error}") from None


def as_array(value: Any) -> Array:
    """A value as an array, without a copy where there is memory to share. Numbers of Python: int64, float32, bool."""
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
