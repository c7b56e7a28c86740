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
    if _casts(trimmed, library.int64()):
        return trimmed.cast(library.int64())
    if not _casts(trimmed, library.float64()):
        row = first_row(trimmed, lambda part: not _casts(part, library.float64()))
        message = f"{shown(array[row].as_py())} is not a number; leave the cell empty where there is none"
        raise origin.error(message, row=row, column=column)
    numbers = trimmed.cast(library.float64())
    whole = compute.match_substring_regex(trimmed, r"^[+-]?[0-9]{16,}$")
    rounded = compute.and_kleene(whole, compute.greater_equal(compute.abs(numbers), float(INEXACT)))
    row = compute.index(rounded, True).as_py()
    if row >= 0:
        message = f"{shown(array[row].as_py())} is more than an int64 holds, or would be rounded beside fractions"
        raise origin.error(f"{message}; keep it as text", row=row, column=column)
    return numbers


def _casts(array: Any, kind: Any) -> bool:
    try:
        array.cast(kind)
    except arrow().ArrowInvalid:
        return False
    return True
