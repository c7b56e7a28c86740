"""What is wrong with what a host hook returned, as errors that name the hook, the sample and its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import TransformError, few
from lit_async_data.hooks.values import UnfitError, as_array
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source


def failure(where: str, source: Source, samples: Indices, what: str) -> TransformError:
    """The error of a hook on some samples.

    Args:
        where: The hook, as errors name it.
        source: Where the samples come from.
        samples: The sample, or those of the batch; at least one.
        what: What went wrong, with a ``{}`` for the words for the samples.
    """
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
    """What went wrong, where the hook raised an error."""
    hint = "; return_indices=True gives it" if isinstance(error, KeyError) and error.args == ("index",) else ""
    return f"failed on {{}}: {type(error).__name__}: {error}{hint}"


def no_dict(made: object) -> str:
    """What went wrong, where the hook returned something other than a dict."""
    return (
        f"returned a {type(made).__name__} for {{}}; return a dict with an array for each key, or None if the one that "
        "was given has been changed"
    )


def other_keys(made: Mapping[str, object], wanted: Iterable[str]) -> str:
    """What went wrong, where a result has other keys than the first."""
    listed = [", ".join(map(str, keys)) or "none" for keys in (made, wanted)]
    return (
        f"returned the keys {listed[0]} for {{}}, but {listed[1]} for the first sample; return the same keys for every "
        "sample"
    )


def fitting(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A value as an array of the shape and dtype that the first sample had.

    Raises:
        UnfitError: It has another; the message says what went wrong.
    """
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
    """A value of a batch as an array whose rows have the shape and dtype that the first sample had.

    Raises:
        UnfitError: It has not; the message says what went wrong.
    """
    array = with_rows(key, value, shape[0])
    fitting(key, array[0], shape[1:], dtype)
    return array


def with_rows(key: object, value: object, count: int) -> Array:
    """A value of a batch as an array with this many rows.

    Raises:
        UnfitError: It has not; the message says what went wrong.
    """
    array = named_array(key, value)
    if array.shape[:1] != (count,):
        raise UnfitError(
            f"field {key!r} of {{}} has shape {array.shape}, but the first axis must have one row for each of the "
            f"{count} samples; leave out what does not belong to one sample each"
        )
    return array


def named_array(key: object, value: object) -> Array:
    """A value as an array.

    Raises:
        UnfitError: It cannot be one, or its key is not text; the message says what went wrong.
    """
    if not isinstance(key, str):
        raise UnfitError(f"the key {key!r} in the result for {{}} is not text; name each field by text")
    try:
        return as_array(value)
    except UnfitError as error:
        raise UnfitError(f"field {key!r} of {{}} {error}") from None
