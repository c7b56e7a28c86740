"""Results of host hooks as arrays of a batch; or errors that name the hook, the sample and its file.

`failure` puts the words for the samples in place of ``{}`` in the message of an `UnfitError` raised here.


Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import TransformError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import UnfitError, as_array
from lit_async_data.sources.contract.source import Source

# The end of the error where a host hook changes the length of a sample of a concatenated field.
FIXED = "with ragged='concat' only device_transform may change a length"


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
        raise UnfitError(f"field {key!r} of {{}} is {error}") from None
