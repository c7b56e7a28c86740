"""Text columns read as exact numbers or as lists of values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import (
    arrow,
    arrow_strings,
    as_single_array,
    booleans_of,
    first_bad_row,
    first_true_row,
    is_categorical,
    is_list,
    is_text,
    text_fault,
    values_of,
)
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, quoted

# From here on, float64 cannot represent every whole number.
INEXACT = 2**53
# Cells that spreadsheets and pandas write for a missing number.
MISSING = ["", "nan", "NaN", "NAN", "NA", "N/A"]


def check_text(array: Any, column: str, origin: RowOrigin) -> None:
    """Check that text is UTF-8 without NUL bytes."""
    fault = text_fault(array)
    if fault:
        row, what = fault
        hint = "; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8" if origin.untyped else ""
        raise origin.error(what + hint, row=row, column=column)


def as_numbers(array: Any, column: str, origin: RowOrigin, owners: Indices | None = None) -> Any:
    """Text as int64, or as float64 if some of it is not a whole number.

    Args:
        array: Text; nulls stay null.
        column: Name of the column.
        origin: Origin of the rows.
        owners: The row of each value, int64; None: value i is in row i.

    Raises:
        ManifestError: A row has no number, or one that would be rounded; names the row.
    """
    library, compute = arrow(), arrow("compute")

    def fail(place: int, message: str) -> ManifestError:
        row = place if owners is None else int(owners[place])
        return origin.error(f"{quoted(array[place].as_py())} {message}", row=row, column=column)

    trimmed = compute.utf8_trim_whitespace(array)
    missing = compute.is_in(trimmed, arrow_strings(MISSING).cast(trimmed.type))
    trimmed = compute.if_else(missing, library.nulls(len(trimmed), trimmed.type), trimmed)
    odd = first_true_row(compute.match_substring_regex(trimmed, r"(?i)^[+-]?(0x|inf)"))
    if odd >= 0:
        raise fail(odd, "is not a finite decimal number; leave the cell empty if there is no value")
    whole = _cast(trimmed, library.int64())
    if whole is not None:
        return whole
    numbers = _cast(trimmed, library.float64())
    if numbers is None:
        place = first_bad_row(trimmed, lambda part: _cast(part, library.float64()) is None)
        if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", trimmed[place].as_py()):
            raise fail(place, "is not a number; write it with a point, not a comma")
        raise fail(place, "is not a number; leave the cell empty if there is no value, or set kind: class")
    long = compute.match_substring_regex(trimmed, r"^[+-]?[0-9]{16,}$")
    rounded = compute.and_kleene(long, compute.greater_equal(compute.abs(numbers), float(INEXACT)))
    place = first_true_row(rounded)
    if place >= 0:
        raise fail(place, "does not fit into int64, or would be rounded in a column with fractions; keep it as text")
    return numbers


def parsed_text(array: Any, column: str, origin: RowOrigin, separator: str | None, *, kind: str | None) -> Any:
    """A column with its text split into lists and read as numbers, as the options say.

    Args:
        array: As from `as_single_array`.
        column: Name of the column.
        origin: Origin of the rows.
        separator: Separates the values of a cell, and an empty cell has none; None for one value per cell.
        kind: ``"number"``: text is read as numbers. ``"class"``: whole numbers in lists are read as text.
    """
    compute, numbers = arrow("compute"), kind == "number"
    if is_categorical(array.type) and (separator is not None or numbers):
        array = array.dictionary_decode()
    if separator is not None:
        if not is_text(array.type):
            raise ConfigError(
                f"separator: column {quoted(column)} holds {array.type}, not text; leave it out", option="separator"
            )
        array = compute.if_else(compute.equal(compute.utf8_trim_whitespace(array), ""), None, array)
        array = _trimmed(as_single_array(arrow().chunked_array([compute.split_pattern(array, separator)])))
    if kind == "class" and is_list(array.type) and arrow("types").is_integer(array.type.value_type):
        return _lists_of_text(array)
    if not numbers or not is_text(array.type.value_type if is_list(array.type) else array.type):
        return array
    return _numbers_of_lists(array, column, origin) if is_list(array.type) else as_numbers(array, column, origin)


def _trimmed(array: Any) -> Any:
    """Lists of text with each text stripped, and empty texts removed."""
    compute = arrow("compute")
    lengths = values_of(compute.list_value_length(array)).astype(np.int64)
    texts = compute.utf8_trim_whitespace(array.flatten())
    filled = compute.not_equal(texts, "")
    owners = np.repeat(np.arange(len(array)), lengths)[booleans_of(filled)]
    ends = np.cumsum(np.bincount(owners, minlength=len(array)))
    return arrow().LargeListArray.from_arrays(np.append(0, ends), texts.filter(filled), mask=array.is_null())


def _lists_of_text(array: Any) -> Any:
    """Lists of whole numbers as lists of their digits."""
    library = arrow()
    lengths = values_of(arrow("compute").list_value_length(array)).astype(np.int64)
    texts = array.flatten().cast(library.large_string())
    return library.LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), texts, mask=array.is_null())


def _numbers_of_lists(array: Any, column: str, origin: RowOrigin) -> Any:
    """Lists of text as lists of numbers."""
    compute = arrow("compute")
    lengths = values_of(compute.list_value_length(array)).astype(np.int64)
    values = as_numbers(array.flatten(), column, origin, np.repeat(np.arange(len(array)), lengths))
    return arrow().LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), values, mask=array.is_null())


def _cast(array: Any, kind: Any) -> Any:
    """The array as another type; None if a value does not fit."""
    try:
        return array.cast(kind)
    except arrow().ArrowInvalid:
        return None
