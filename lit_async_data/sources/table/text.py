"""Text columns: checked, read as exact numbers or as lists; and text that is no names of classes."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.table.formats import (
    arrow,
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

INEXACT = 2**53  # from here on, float64 cannot represent every whole number
MISSING = ["", "nan", "NaN", "NAN", "NA", "N/A"]  # as spreadsheets and pandas write

_DIGITS = r"[+\-\u2212]?(\d+([.,]\d*)?|[.,]\d+)([eEdD][+\-]?\d+)?"
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
# What people write where there is no number. Whole numbers beside one of them may be classes.
_NO_NUMBER = frozenset({"?", "-", "--", ".", "na", "n/a", "nan", "none", "null", "unknown", "missing"})
_NO_NUMBER |= {"inf", "-inf", "<na>", "#n/a"}
_UNITS = "[numckµμ]?m|[mckuµμ]?m[23²³]|in|ft|[mkuµμn]?g|lbs?|[muµμn]s|sec|mins?|hrs?|[kmg]?hz|°[cf]?|deg|rad|[mk]?v"
_UNITS += "|k?wh?|[kmgt]i?b|[km]?pa|m?bar|mmhg|db|[mcdµμ]?l|bpm|px|k?cal|usd|eur|[$€£¥]"
# A decimal comma, the minus sign of typesetters, per cent, a unit or currency; groups of thousands; a fraction; other
# bases than ten; a vector with or without brackets. Without a blank, one letter is no unit: 3D, 20s.
_OTHER = re.compile(
    rf"[$€£¥]?\s*{_DIGITS}\s*(%|‰)?|{_DIGITS}(\s+([smghlvwkj]|{_UNITS})|(?![a-z]\b)({_UNITS}))"
    rf"|[$€£¥]?[+\-\u2212]?\d{{1,3}}([.,'_ \u00a0\u202f]\d{{3}})+([.,]\d+)?|[+\-\u2212]?\d+\s*[/\u2044]\s*\d+"
    rf"|[+-]?0(x[0-9a-f]+|b[01]+|o[0-7]+)"
    rf"|{_DIGITS}([ \t,;]+{_DIGITS})+|[\[(]\s*({_DIGITS}([\s,;]+{_DIGITS})*)?[\s,;]*[\])]",
    re.ASCII | re.IGNORECASE,
)
# How Python shows an object.
_REPR = re.compile(r"[\w.]+\([\[{'\"].*\)|(np|torch|datetime)\.\w+\(.*\)|b'.*'|<.+ at 0x\w+>", re.DOTALL)
# Endings of files that hold data; and folders that absolute paths begin with, unlike /m/01g317, a class of AudioSet.
_FILES = "jpe?g|png|tiff?|webp|bmp|gif|npy|npz|h5|hdf5?|h5ad|nc4?|zarr|dcm|dicom|nii|nrrd|mha|mhd|svs|czi|csv|tsv|txt"
_FILES += "|xml|ya?ml|jsonl?|parquet|arrow|feather|pkl|pickle|pth?|ckpt|mat|wav|mp3|flac|ogg|m4a|mp4|avi|mov|mkv"
_FILES += "|webm|zip|tar|t?gz|bz2|xz|7z|edf|bdf|fif|las|laz|ply|pcd|stl|pdf|docx?|bam|vcf|fast[aq]|tfrecords?|bin|raw"
_ROOTS = "home|root|data|mnt|media|scratch|users|volumes|tmp|var|opt|srv|datasets?|projects?|work|workspaces?|share"
_ROOTS += "|storage|gpfs|lustre|nfs|beegfs|fsx|efs|dbfs|cluster|export|net|raid|ssd|nvme|content|kaggle"
# An address; a path of a drive, a share, the home folder, a variable, or the folder that a program runs in; a file.
_PATH = re.compile(
    r"[a-z][a-z0-9+.-]*://.+|[a-z]:[\\/].+|\\\\\w.*|(~\w*|\.\.?|\$\w+|\$\{\w+\}|%\w+%)[\\/].+"
    rf"|/({_ROOTS})\d*/.+|(.*[\\/])?[^\\/]+\.({_FILES})[\\/]?",
    re.IGNORECASE | re.DOTALL,
)
_MEANINGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}
# What programs write for a missing value.
_ABSENT = frozenset({"nan", "NaN", "NAN", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A", "None", "null", "NULL"})
MOST_CLASSES = 2**16  # text with more distinct values is not taken for classes

_log = logging.getLogger(__name__)


def check_text(array: Any, column: str, origin: RowOrigin) -> None:
    if _holds_text(array.type) and _is_not_utf8(array):
        hint = "; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8" if origin.untyped else ""
        raise origin.error(f"text that is not UTF-8{hint}", row=_first_bad_row(array, _is_not_utf8), column=column)


def _holds_text(kind: Any) -> bool:
    return is_text(kind) or is_categorical(kind) or (is_list(kind) and _holds_text(kind.value_type))


def _entries(array: Any) -> Any:
    """Without texts outside of the array that share its buffers."""
    if is_list(array.type):
        return _entries(array.flatten())
    return array.dictionary.take(array.unique().indices.drop_null()) if is_categorical(array.type) else array


def _is_not_utf8(array: Any) -> bool:
    try:
        _entries(array).validate(full=True)
    except arrow().ArrowInvalid:
        return True
    return False


def _first_bad_row(array: Any, is_bad: Callable[[Any], bool]) -> int:
    """By bisection: ``is_bad`` tells whether a slice has a bad row, and the whole array has."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if is_bad(array.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def as_numbers(array: Any, column: str, origin: RowOrigin, owners: Indices | None = None) -> Any:
    """As int64, or as float64 if some are no whole numbers; a number that would be rounded is an error.

    ``owners`` is the row of each value; None: value i is in row i.
    """
    library, compute = arrow(), arrow("compute")

    def fail(place: int, message: str) -> ManifestError:
        row = place if owners is None else int(owners[place])
        return origin.error(f"{quoted(array[place].as_py())} {message}", row=row, column=column)

    trimmed = compute.utf8_trim_whitespace(array)
    missing = compute.match_substring_regex(trimmed, rf"^({'|'.join(map(re.escape, MISSING))})$")
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
    """Text as lists and numbers, as the options say: with a separator, an empty cell has no value."""
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
    several = is_list(array.type)
    entries = array.flatten() if several else array
    if is_categorical(entries.type):
        entries = entries.dictionary_decode()
    distinct = entries.unique().drop_null()
    if len(distinct) > MOST_CLASSES:
        return
    what = "" if origin.folder else no_classes(distinct.to_pylist(), several=several)  # folders of classes are classes
    if what:
        raise origin.error(f"{what}, or set kind: class if these are the names of classes", column=column)
    note_names(f"{origin.name}: column {quoted(column)}", tuple(distinct.to_pylist()))


def no_classes(distinct: Iterable[str], *, several: bool = False) -> str:
    """What texts seem to be if not names of classes, and what to do; empty for names.

    They are paths, JSON, or numbers, vectors or booleans in another notation. Dates, ``1-2``, ``1.2.3``, ``a/b`` and
    ``3D`` are names.
    """
    texts = [text for text in map(str.strip, distinct) if text not in MISSING]
    known = [text for text in texts if text.casefold() not in _NO_NUMBER]
    other = [text for text in texts if not _PLAIN.fullmatch(text)]
    numbers = [text for text in texts if _PLAIN.fullmatch(text)]
    meanings = {_MEANINGS.get(text.casefold()) for text in texts}
    if known and all(map(_PATH.fullmatch, known)):
        ways = "if they only name something, set kind: text; ManifestSource reads files with kind: image, npy or hdf5"
        if several:
            ways = "a field takes one file per row: spread the list over columns, with a field for each"
        shown, what = known, f"paths; {ways}"
    elif known and all(map(_is_structure, known)):
        shown, what = known, "JSON or Python objects; store numbers as numbers"
    elif other and all(_OTHER.fullmatch(unicodedata.normalize("NFKC", text)) for text in texts):
        ways = "without groups and units, and a vector as several columns"
        shown, what = other, f"numbers; write them in digits with a decimal point, {ways}"
    elif not all(map(_WHOLE.fullmatch, numbers)) and all(text.casefold() in _NO_NUMBER for text in other):
        shown, what = other + numbers, "numbers; give them as numbers, and leave a cell empty that has none"
    elif None not in meanings and len(texts) > len(meanings):
        shown, what = texts, "true and false in several spellings; write each in one"
    else:
        return ""
    return f"{listed(shown[:5])} look like {what}"


def trim(name: str) -> str:
    """Blank names stay."""
    return name.strip() or name


@functools.lru_cache(maxsize=16)
def note_names(where: str, names: tuple[str, ...]) -> None:
    """Warn once of names that are alike but for blanks, and of those that may stand for no value."""
    counts = collections.Counter(map(trim, names))
    if alike := [name for name in names if trim(name) != name and counts[trim(name)] > 1]:
        _log.warning("%s: %s differ from other classes only by blanks, and count as these", where, listed(alike[:5]))
    if absent := sorted(_ABSENT.intersection(names)):
        _log.warning(
            "%s: classes %s may stand for no value; if so, leave cells empty, and set null", where, listed(absent)
        )


def _is_structure(text: str) -> bool:
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        plain = re.sub(r"\b(true|false|null|NaN)\b", "0", text) if text[0] in "[{(" else ""
        return isinstance(ast.literal_eval(plain), list | dict | tuple | set)
    return _REPR.fullmatch(text) is not None
