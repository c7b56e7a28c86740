"""Columns of text that are read as numbers, exactly."""

from __future__ import annotations

from typing import Any

from lit_async_data.sources.manifest.arrow import arrow, first_row
from lit_async_data.sources.manifest.origin import Origin, shown

# From here on a float64 does not tell whole numbers apart.
INEXACT = 2**53


def as_numbers(array: Any, column: str, origin: Origin) -> Any:
    """Text as int64, or as float64 if some of it is no whole number.

    Args:
        array: Of text; what is null stays so.
        column: Its name.
        origin: Of its rows.

    Raises:
        ManifestError: A row holds no number, or one that would be rounded; names it.
    """
    library, compute = arrow(), arrow("compute")
    trimmed = compute.utf8_trim_whitespace(array)
    whole = _cast(trimmed, library.int64())
    if whole is not None:
        return whole
    numbers = _cast(trimmed, library.float64())
    if numbers is None:
        row = first_row(trimmed, lambda part: _cast(part, library.float64()) is None)
        message = f"{shown(array[row].as_py())} is not a number; leave the cell empty where there is none"
        raise origin.error(message, row=row, column=column)
    long = compute.match_substring_regex(trimmed, r"^[+-]?[0-9]{16,}$")
    rounded = compute.and_kleene(long, compute.greater_equal(compute.abs(numbers), float(INEXACT)))
    row = compute.index(rounded, True).as_py()
    if row >= 0:
        message = f"{shown(array[row].as_py())} is more than an int64 holds, or would be rounded beside fractions"
        raise origin.error(f"{message}; keep it as text", row=row, column=column)
    return numbers


def _cast(array: Any, kind: Any) -> Any:
    """The array as another type; None if some of it does not fit."""
    try:
        return array.cast(kind)
    except arrow().ArrowInvalid:
        return None
