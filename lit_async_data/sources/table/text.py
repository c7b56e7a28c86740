"""Text columns: checked, read as exact numbers or as lists; and text that only looks like numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.table.arrow import (
    arrow,
    arrow_strings,
    as_single_array,
    booleans_of,
    first_true_row,
    is_categorical,
    is_list,
    is_text,
    list_lengths,
    lists_of,
)
from lit_async_data.sources.table.row_origin import RowOrigin, listed, quoted

# From here on, float64 cannot represent every whole number.
INEXACT = 2**53
# Cells that spreadsheets and pandas write for a missing number.
MISSING = ["", "nan", "NaN", "NAN", "NA", "N/A"]

_DIGITS = r"[+\-\u2212]?(\d+([.,]\d*)?|[.,]\d+)([eE][+\-]?\d+)?"
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
# What people write where there is no number. Whole numbers beside one of them may be classes.
_NO_NUMBER = frozenset({"?", "-", "--", ".", "na", "n/a", "nan", "none", "null", "unknown", "missing"})
# A decimal comma, the minus sign of typesetters, per cent; groups of thousands; a vector with or without brackets.
_OTHER = re.compile(
    rf"{_DIGITS}\s*%?|[+\-\u2212]?\d{{1,3}}([.,' \u00a0\u202f]\d{{3}})+([.,]\d+)?"
    rf"|{_DIGITS}([ \t,;]+{_DIGITS})+|[\[(]\s*({_DIGITS}([\s,;]+{_DIGITS})*)?[\s,;]*[\])]",
    re.ASCII,
)
_MEANINGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}
# Text with more distinct values than this is not taken for classes.
MOST_CLASSES = 2**16


def check_text(array: Any, column: str, origin: RowOrigin) -> None:
    """Check that text is UTF-8 without NUL bytes; other columns pass."""
    if not _holds_text(array.type):
        return
    for is_bad, what in ((_is_not_utf8, "text that is not UTF-8"), (_has_nul, "a NUL byte")):
        if is_bad(array):
            hint = "; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8" if origin.untyped else ""
            raise origin.error(what + hint, row=_first_bad_row(array, is_bad), column=column)


def _holds_text(kind: Any) -> bool:
    return is_text(kind) or is_categorical(kind) or (is_list(kind) and _holds_text(kind.value_type))


def _entries(array: Any) -> Any:
    """The texts of an array, without texts outside of it that share its buffers."""
    if is_list(array.type):
        return _entries(array.flatten())
    return array.dictionary.take(array.unique().indices.drop_null()) if is_categorical(array.type) else array


def _is_not_utf8(array: Any) -> bool:
    try:
        _entries(array).validate(full=True)
    except arrow().ArrowInvalid:
        return True
    return False


def _has_nul(array: Any) -> bool:
    entries = _entries(array)
    data = entries.buffers()[2]
    # The buffer may be larger than the array, so a NUL byte in it is searched again in the array.
    if data is None or re.search(b"\0", memoryview(data)) is None:
        return False
    return bool(arrow("compute").any(arrow("compute").match_substring(entries, "\0")).as_py())


def _first_bad_row(array: Any, is_bad: Callable[[Any], bool]) -> int:
    """The first bad row, found by bisection: ``is_bad`` tells whether a slice has one, and the whole array has."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if is_bad(array.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def as_numbers(array: Any, column: str, origin: RowOrigin, owners: Indices | None = None) -> Any:
    """Text as int64, or as float64 if some of it is not a whole number; a number that would be rounded is an error.

    ``owners`` is the row of each value; None: value i is in row i.
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
        place = _first_bad_row(trimmed, lambda part: _cast(part, library.float64()) is None)
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

    A separator separates the values of a cell, and an empty cell has none. Kind ``"number"`` reads text as numbers;
    ``"class"`` reads whole numbers in lists as text.
    """
    compute, numbers = arrow("compute"), kind == "number"
    if is_categorical(array.type) and (separator is not None or numbers):
        array = array.dictionary_decode()
    if separator is not None:
        if not is_text(array.type):
            raise ConfigError(f"column {quoted(column)} holds {array.type}, not text; leave it out", "separator")
        array = compute.if_else(compute.equal(compute.utf8_trim_whitespace(array), ""), None, array)
        array = _trimmed(as_single_array(arrow().chunked_array([compute.split_pattern(array, separator)])))
    if not is_list(array.type):
        return as_numbers(array, column, origin) if numbers and is_text(array.type) else array
    values, lengths = array.flatten(), list_lengths(array)
    if kind == "class" and arrow("types").is_integer(values.type):
        values = values.cast(arrow().large_string())
    elif numbers and is_text(values.type):
        values = as_numbers(values, column, origin, np.repeat(np.arange(len(array)), lengths))
    else:
        return array
    return lists_of(values, lengths, array.is_null())


def _trimmed(array: Any) -> Any:
    """Lists of text with each text stripped, and empty texts removed."""
    compute = arrow("compute")
    texts = compute.utf8_trim_whitespace(array.flatten())
    filled = compute.not_equal(texts, "")
    owners = np.repeat(np.arange(len(array)), list_lengths(array))[booleans_of(filled)]
    return lists_of(texts.filter(filled), np.bincount(owners, minlength=len(array)), array.is_null())


def _cast(array: Any, kind: Any) -> Any:
    try:
        return array.cast(kind)
    except arrow().ArrowInvalid:
        return None


def check_notation(array: Any, column: str, origin: RowOrigin) -> None:
    """Refuse text that is numbers, vectors or booleans in another notation, before it becomes classes.

    Dates, ``1-2`` and ``1.2.3`` are none.
    """
    entries = array.flatten() if is_list(array.type) else array
    if is_categorical(entries.type):
        entries = entries.dictionary_decode()
    distinct = entries.unique().drop_null()
    if len(distinct) > MOST_CLASSES:
        return
    texts = [text for text in map(str.strip, distinct.to_pylist()) if text not in MISSING]
    other = [text for text in texts if not _PLAIN.fullmatch(text)]
    numbers = [text for text in texts if _PLAIN.fullmatch(text)]
    meanings = {_MEANINGS.get(text.casefold()) for text in texts}
    if other and all(map(_OTHER.fullmatch, texts)):
        shown, what = (
            other,
            "numbers; write them with a decimal point and without groups, and a vector as several columns",
        )
    elif not all(map(_WHOLE.fullmatch, numbers)) and all(text.casefold() in _NO_NUMBER for text in other):
        shown, what = other + numbers, "numbers; give them as numbers, and leave a cell empty that has none"
    elif None not in meanings and len(texts) > len(meanings):
        shown, what = texts, "true and false in several spellings; write each in one"
    else:
        return
    raise origin.error(
        f"{listed(shown[:5])} look like {what}, or set kind: class if these are the names of classes", column=column
    )
