"""Columns of text whose cells are read as numbers, exactly, or as several values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import (
    arrow,
    as_one,
    first_row,
    first_true,
    is_coded,
    is_list,
    is_text,
    texts_of,
    truth_of,
    values_of,
)
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, shown

# From here on a float64 does not tell whole numbers apart.
INEXACT = 2**53
# What spreadsheets and pandas write where there is no number.
_NOTHING = ["", "nan", "NaN", "NAN", "NA", "N/A"]


def as_numbers(array: Any, column: str, origin: RowOrigin, owners: Indices | None = None) -> Any:
    """Text as int64, or as float64 if some of it is no whole number.

    Args:
        array: Of text; what is null stays so.
        column: Its name.
        origin: Of its rows.
        owners: The row that each value belongs to; int64. None: its own.

    Raises:
        ManifestError: A row holds no number, or one that would be rounded; names it.
    """
    library, compute = arrow(), arrow("compute")

    def fail(place: int, message: str) -> ManifestError:
        row = place if owners is None else int(owners[place])
        return origin.error(f"{shown(array[place].as_py())} {message}", row=row, column=column)

    trimmed = compute.utf8_trim_whitespace(array)
    nothing = compute.is_in(trimmed, texts_of(_NOTHING).cast(trimmed.type))
    trimmed = compute.if_else(nothing, library.nulls(len(trimmed), trimmed.type), trimmed)
    odd = first_true(compute.match_substring_regex(trimmed, r"(?i)^[+-]?(0x|inf)"))
    if odd >= 0:
        raise fail(odd, "is not a number that a label can be; leave the cell empty where there is none")
    whole = _cast(trimmed, library.int64())
    if whole is not None:
        return whole
    numbers = _cast(trimmed, library.float64())
    if numbers is None:
        place = first_row(trimmed, lambda part: _cast(part, library.float64()) is None)
        if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", trimmed[place].as_py()):
            raise fail(place, "is not a number: write it with a point, not a comma")
        raise fail(place, "is not a number; leave the cell empty where there is none, or say kind: class")
    long = compute.match_substring_regex(trimmed, r"^[+-]?[0-9]{16,}$")
    rounded = compute.and_kleene(long, compute.greater_equal(compute.abs(numbers), float(INEXACT)))
    place = first_true(rounded)
    if place >= 0:
        raise fail(place, "is more than an int64 holds, or would be rounded beside fractions; keep it as text")
    return numbers


def read_as(array: Any, column: str, origin: RowOrigin, separator: str | None, *, numbers: bool) -> Any:
    """A column with its text cut into lists, and read as numbers, where that is wanted.

    Args:
        array: As from `as_one`.
        column: Its name.
        origin: Of its rows.
        separator: What stands between the values of a cell; None for cells of one value.
        numbers: Whether text is read as numbers.

    Raises:
        ConfigError: There is a separator, and no text.
        ManifestError: As `as_numbers`.
    """
    if is_coded(array.type) and (separator is not None or numbers):
        array = array.dictionary_decode()
    if separator is not None:
        if not is_text(array.type):
            raise ConfigError(f"separator: column {shown(column)} holds {array.type}, and not text")
        array = _trimmed(as_one(arrow().chunked_array([arrow("compute").split_pattern(array, separator)])))
    if not numbers or not is_text(array.type.value_type if is_list(array.type) else array.type):
        return array
    return _numbers_of_lists(array, column, origin) if is_list(array.type) else as_numbers(array, column, origin)


def _trimmed(array: Any) -> Any:
    """Lists of text without the space around each, and without those of which nothing is left."""
    compute = arrow("compute")
    lengths = values_of(compute.list_value_length(array)).astype(np.int64)
    texts = compute.utf8_trim_whitespace(array.flatten())
    there = compute.not_equal(texts, "")
    owners = np.repeat(np.arange(len(array)), lengths)[truth_of(there)]
    ends = np.cumsum(np.bincount(owners, minlength=len(array)))
    return arrow().LargeListArray.from_arrays(np.append(0, ends), texts.filter(there), mask=array.is_null())


def _numbers_of_lists(array: Any, column: str, origin: RowOrigin) -> Any:
    """Lists of text as lists of numbers."""
    compute = arrow("compute")
    lengths = values_of(compute.list_value_length(array)).astype(np.int64)
    values = as_numbers(array.flatten(), column, origin, np.repeat(np.arange(len(array)), lengths))
    return arrow().LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), values, mask=array.is_null())


def _cast(array: Any, kind: Any) -> Any:
    """The array as another type; None if some of it does not fit."""
    try:
        return array.cast(kind)
    except arrow().ArrowInvalid:
        return None
