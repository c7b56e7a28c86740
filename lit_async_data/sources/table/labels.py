"""`Labels`: one numeric value per row, from columns of numbers or text; and checks that text names classes."""

from __future__ import annotations

import ast
import bisect
import collections
import contextlib
import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError, ManifestError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.table import formats
from lit_async_data.sources.table.formats import RowOrigin, arrow, booleans_of, is_list, is_text, listed, quoted

INEXACT = 2**53  # from here on, float64 cannot represent every whole number
MISSING = ["", "nan", "NaN", "NAN", "NA", "N/A"]  # as spreadsheets and pandas write

_DIGITS = r"[+\-\u2212]?(\d+([.,]\d*)?|[.,]\d+)([eEdD][+\-]?\d+)?"
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
# Words for a missing number. A column of these and whole numbers may hold classes.
_NO_NUMBER = frozenset({"?", "-", "--", ".", "na", "n/a", "nan", "none", "null", "unknown", "missing"})
_NO_NUMBER |= {"inf", "-inf", "<na>", "#n/a"}
_UNITS = "[numckµμ]?m|[mckuµμ]?m[23²³]|in|ft|[mkuµμn]?g|lbs?|[muµμn]s|sec|mins?|hrs?|[kmg]?hz|°[cf]?|deg|rad|[mk]?v"
_UNITS += "|k?wh?|[kmgt]i?b|[km]?pa|m?bar|mmhg|db|[mcdµμ]?l|bpm|px|k?cal|usd|eur|[$€£¥]"
# Numbers in other notations: a decimal comma, a typographic minus, per cent, a unit or currency; groups of thousands; a
# fraction; other bases than ten; a vector. Without a blank, one letter is no unit: 3D, 20s.
_OTHER = re.compile(
    rf"[$€£¥]?\s*{_DIGITS}\s*(%|‰)?|{_DIGITS}(\s+([smghlvwkj]|{_UNITS})|(?![a-z]\b)({_UNITS}))"
    rf"|[$€£¥]?[+\-\u2212]?\d{{1,3}}([.,'_ \u00a0\u202f]\d{{3}})+([.,]\d+)?|[+\-\u2212]?\d+\s*[/\u2044]\s*\d+"
    rf"|[+-]?0(x[0-9a-f]+|b[01]+|o[0-7]+)"
    rf"|{_DIGITS}([ \t,;]+{_DIGITS})+|[\[(]\s*({_DIGITS}([\s,;]+{_DIGITS})*)?[\s,;]*[\])]",
    re.ASCII | re.IGNORECASE,
)
# The repr of a Python object.
_REPR = re.compile(r"[\w.]+\([\[{'\"].*\)|((np|torch|datetime)\.\w+|tensor)\(.*\)|b'.*'|<.+ at 0x\w+>", re.DOTALL)
# Suffixes of data files, and first folders of absolute paths; /m/01g317 is a class of AudioSet.
_FILES = "jpe?g|png|tiff?|webp|bmp|gif|npy|npz|h5|hdf5?|h5ad|nc4?|zarr|dcm|dicom|nii|nrrd|mha|mhd|svs|czi|csv|tsv|txt"
_FILES += "|xml|ya?ml|jsonl?|parquet|arrow|feather|pkl|pickle|pth?|ckpt|mat|wav|mp3|flac|ogg|m4a|mp4|avi|mov|mkv"
_FILES += "|webm|zip|tar|t?gz|bz2|xz|7z|edf|bdf|fif|las|laz|ply|pcd|stl|pdf|docx?|bam|vcf|fast[aq]|tfrecords?|bin|raw"
_ROOTS = "home|root|data|mnt|media|scratch|users|volumes|tmp|var|opt|srv|datasets?|projects?|work|workspaces?|share"
_ROOTS += "|storage|gpfs|lustre|nfs|beegfs|fsx|efs|dbfs|cluster|export|net|raid|ssd|nvme|content|kaggle"
# An address; a path from a drive, a share, the home folder, a variable or the working directory; a file name.
_PATH = re.compile(
    r"[a-z][a-z0-9+.-]*://.+|[a-z]:[\\/].+|\\\\\w.*|(~\w*|\.\.?|\$\w+|\$\{\w+\}|%\w+%)[\\/].+"
    rf"|/({_ROOTS})\d*/.+|(.*[\\/])?[^\\/]+\.({_FILES})[\\/]?|([\w.-]+\\)+[\w.-]+",
    re.IGNORECASE | re.DOTALL,
)
_MEANINGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}
# Texts that programs write for a missing value.
_ABSENT = frozenset({"nan", "NaN", "NAN", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A", "None", "null", "NULL"})
_STORED = "store numbers as numbers; Parquet and JSON Lines keep lists, and with separator= a cell holds several texts"
MOST_CLASSES = 2**16  # text with more distinct values is not taken for classes

_log = logging.getLogger(__name__)


def check_text(array: Any, column: str, origin: RowOrigin) -> None:
    if holds_text(array.type) and _is_not_utf8(array):
        hint = "; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8" if origin.untyped else ""
        raise origin.error(f"text that is not UTF-8{hint}", row=_first_bad_row(array, _is_not_utf8), column=column)


def holds_text(kind: Any) -> bool:
    return is_text(kind) or formats.is_categorical(kind) or (is_list(kind) and holds_text(kind.value_type))


def _entries(array: Any) -> Any:
    """The texts of an array, without others in its buffers."""
    if is_list(array.type):
        return _entries(array.flatten())
    return array.dictionary.take(array.unique().indices.drop_null()) if formats.is_categorical(array.type) else array


def _is_not_utf8(array: Any) -> bool:
    try:
        _entries(array).validate(full=True)
    except arrow().ArrowInvalid:
        return True
    return False


def _first_bad_row(array: Any, is_bad: Callable[[Any], bool]) -> int:
    """By bisection; ``is_bad`` says whether a slice has a bad row, as the whole array does."""
    return bisect.bisect_left(range(len(array)), True, key=lambda row: is_bad(array.slice(0, row + 1)))


def as_numbers(array: Any, column: str, origin: RowOrigin, owners: Indices | None = None) -> Any:
    """Text as int64, or float64 if some numbers are not whole; a number that would be rounded is an error.

    ``owners`` is the row of each value; None: value i is in row i.
    """
    library, compute = arrow(), arrow("compute")

    def fail(place: int, message: str) -> ManifestError:
        row = place if owners is None else int(owners[place])
        return origin.error(f"{quoted(array[place].as_py())} {message}", row=row, column=column)

    trimmed = compute.utf8_trim_whitespace(array)
    missing = compute.match_substring_regex(trimmed, rf"^({'|'.join(map(re.escape, MISSING))})$")
    trimmed = compute.if_else(missing, library.nulls(len(trimmed), trimmed.type), trimmed)
    odd = formats.first_true_row(compute.match_substring_regex(trimmed, r"(?i)^[+-]?(0x|inf)"))
    if odd >= 0:
        raise fail(odd, "is not a finite decimal number; leave the cell empty if there is no value")
    whole = _cast(trimmed, library.int64())
    if whole is not None:
        return whole
    numbers = _cast(trimmed, library.float64())
    if numbers is None:
        place = _first_bad_row(trimmed, lambda part: _cast(part, library.float64()) is None)
        ways = "write it with a point, not a comma, leave the cell empty if there is no value, or set kind: class"
        raise fail(place, f"is not a number; {ways}")
    long = compute.match_substring_regex(trimmed, r"^[+-]?[0-9]{16,}$")
    rounded = compute.and_kleene(long, compute.greater_equal(compute.abs(numbers), float(INEXACT)))
    place = formats.first_true_row(rounded)
    if place >= 0:
        raise fail(place, "does not fit into int64, or would be rounded in a column with fractions; keep it as text")
    return numbers


def parsed_text(array: Any, column: str, origin: RowOrigin, separator: str | None, *, kind: str | None) -> Any:
    """Text split into lists by a separator, and read as numbers if the kind says so. An empty cell becomes null."""
    compute, numbers = arrow("compute"), kind == "number"
    if formats.is_categorical(array.type) and (separator is not None or numbers):
        if separator is None and array.type.ordered and not any(map(formats.is_number, array.dictionary.to_pylist())):
            return array.indices  # such as the stored numbers of a ClassLabel
        array = array.dictionary_decode()
    if separator is not None:
        if not is_text(array.type):
            raise ConfigError(f"column {quoted(column)} holds {array.type}, not text; leave it out", "separator")
        array = compute.if_else(compute.equal(compute.utf8_trim_whitespace(array), ""), None, array)
        array = _trimmed(formats.as_single_array(arrow().chunked_array([compute.split_pattern(array, separator)])))
    if not is_list(array.type):
        return as_numbers(array, column, origin) if numbers and is_text(array.type) else array
    values, lengths = array.flatten(), formats.list_lengths(array)
    if kind == "class" and arrow("types").is_integer(values.type):
        values = values.cast(arrow().large_string())
    elif numbers and is_text(values.type):
        values = as_numbers(values, column, origin, np.repeat(np.arange(len(array)), lengths))
    else:
        return array
    return formats.lists_of(values, lengths, array.is_null())


def _trimmed(array: Any) -> Any:
    compute = arrow("compute")
    texts = compute.utf8_trim_whitespace(array.flatten())
    filled = compute.not_equal(texts, "")
    owners = np.repeat(np.arange(len(array)), formats.list_lengths(array))[booleans_of(filled)]
    return formats.lists_of(texts.filter(filled), np.bincount(owners, minlength=len(array)), array.is_null())


def digits_of(array: Any) -> Any:
    """Whole numbers, also those stored as floats, and times as text; other arrays unchanged."""
    if arrow("types").is_temporal(array.type):
        return array.cast(arrow().string())
    whole = _cast(array, arrow().int64()) if arrow("types").is_floating(array.type) else array
    return whole.cast(arrow().string()) if whole and arrow("types").is_integer(whole.type) else array


def _cast(array: Any, kind: Any) -> Any:
    try:
        return array.cast(kind)
    except arrow().ArrowInvalid:
        return None


def check_notation(array: Any, column: str, origin: RowOrigin) -> None:
    distinct = _entries(array).unique().drop_null()
    if len(distinct) > MOST_CLASSES:
        return
    texts = distinct.to_pylist()
    if not origin.folder and (what := no_classes(texts)):  # folders of classes are classes
        raise origin.error(f"{what}, or set kind: class if these are the names of classes", column=column)
    note_names(f"{origin.name}: column {quoted(column)}", tuple(texts))


def no_classes(distinct: Iterable[str]) -> str:
    """Says that texts look like paths, JSON, numbers or booleans, not like names of classes, and what to do; else "".

    Dates, ``1-2``, ``1.2.3``, ``a/b`` and ``3D`` are names.
    """
    texts = [text for text in map(str.strip, distinct) if text not in MISSING]
    known = [text for text in texts if text.casefold() not in _NO_NUMBER]
    other = [text for text in texts if not _PLAIN.fullmatch(text)]
    numbers = [text for text in texts if _PLAIN.fullmatch(text)]
    meanings = {_MEANINGS.get(text.casefold()) for text in texts}
    if known and all(map(_PATH.fullmatch, known)):
        ways = "if they only name something, set kind: text; ManifestSource reads files with kind: image, npy or hdf5"
        shown, what = known, f"paths; {ways}"
    elif known and all(map(_is_structure, known)):
        shown, what = known, f"JSON or Python objects; {_STORED}"
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
    """A name without blanks and byte order mark around it, in Unicode form NFC; a blank name is unchanged."""
    return unicodedata.normalize("NFC", name.strip().strip("\ufeff").strip()) or name


@functools.lru_cache(maxsize=16)
def note_names(where: str, names: tuple[str, ...]) -> None:
    """Warn once of names that are equal but for blanks or case, and of names that may stand for a missing value."""
    counts = collections.Counter(map(trim, names))
    if alike := [name for name in names if trim(name) != name and counts[trim(name)] > 1]:
        what = "differ from other names only by blanks or Unicode form, and count as these"
        _log.warning("%s: %s %s", where, listed(alike[:5]), what)
    cases = collections.Counter(map(str.casefold, counts))
    if cased := sorted(name for name in counts if len(name) > 1 and cases[name.casefold()] > 1):
        _log.warning("%s: %s differ only in upper and lower case, and count as different", where, listed(cased[:5]))
    if absent := sorted(_ABSENT.intersection(names)):
        what = "may stand for no value; if so, leave cells empty, and set null"
        _log.warning("%s: names %s %s", where, listed(absent), what)


def _is_structure(text: str) -> bool:
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        plain = re.sub(r"\b(true|false|null|NaN)\b", "0", text) if text[0] in "[{(" else ""
        return isinstance(ast.literal_eval(plain), list | dict | tuple | set)
    return _REPR.fullmatch(text) is not None


# -- one value per row -------------------------------------------------------------------------------------------------


Null = Literal["error", "ignore", "drop", "zero"]
_NAMED = 5  # most rows that a message names
_NONE = np.empty(0, np.int64)
Fail = Callable[[int, str], SourceError]


class Labels(NamedTuple):
    # int64, bool or floats, shape (rows, ...). For several classes per row: uint8, shape (rows, classes); float32 with
    # ``null="ignore"``.
    values: Array
    # Names of the values 0, 1, 2, …; for several classes per row, names of the columns; empty for numbers.
    classes: tuple[str, ...] = ()
    # Rows to drop, ascending; int64. Their values are undefined.
    dropped: Indices = _NONE
    texts: tuple[str, ...] = ()  # texts with the numbers 0, 1, 2, …, if they are not classes
    real: npt.NDArray[np.bool_] | None = None  # which values are no padding, where there may be some
    ignored: Indices = _NONE  # rows that lack a value, or one of several

    def mask(self, samples: Indices) -> npt.NDArray[np.bool_]:
        assert self.real is not None
        return np.asarray(self.real[samples])

    @property
    def spec(self) -> FieldSpec:
        names: dict[str, Any] = {"classes": self.classes, "texts": self.texts}
        return FieldSpec(self.values.shape[1:], self.values.dtype, masked=self.real is not None, **names)

    def of_classes(self, classes: Sequence[str], fail: Fail) -> Labels:
        """Renumbered by other names; ``fail`` gets the first row whose name is not among them, and the name."""
        values, own = self.values, self.classes or self.texts
        numbers = {name: number for number, name in enumerate(classes)}
        trimmed = str if self.texts else trim
        new = np.array([numbers.get(name, numbers.get(trimmed(name), -1)) for name in own], np.int64)
        several = values.ndim > 1 and not self.texts
        for lost in np.flatnonzero(new < 0).tolist():
            has = np.asarray(values[:, lost] == 1 if several else values == lost)
            if has.any():
                raise fail(int(np.argwhere(has)[0, 0]), own[lost])
        if not several:
            numbered = np.nan_to_num(values, nan=IGNORED).astype(np.int64)
            # Ignored rows keep their value; without a name of its own, all rows are ignored.
            renumbered = np.where(numbered < 0, numbered, new[numbered.clip(0)]) if own else numbered
        else:
            renumbered = np.zeros((len(values), len(classes)), values.dtype)
            for number in np.flatnonzero(new >= 0).tolist():
                np.maximum(renumbered[:, new[number]], values[:, number], out=renumbered[:, new[number]])
            renumbered[np.isnan(values).any(axis=1)] = np.nan if values.dtype.kind == "f" else 0
        named: dict[str, Any] = {"texts" if self.texts else "classes": tuple(classes)}
        return self._replace(values=renumbered, **named)

    def cast(self, dtype: np.dtype[Any] | None, fail: Fail) -> Labels:
        """May round fractions; ``fail`` gets the first row whose value does not fit."""
        values = self.values
        if dtype is None or values.dtype == dtype:
            return self
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
            if dtype.kind in "fc" and values.dtype.kind in "fc":
                fits = np.isfinite(cast) == np.isfinite(values)
            else:
                fits = cast.astype(values.dtype) == values
        for row in np.flatnonzero(~fits.reshape(len(values), -1).all(axis=1))[:1].tolist():
            raise fail(row, f"{values[row].tolist()} does not fit into {dtype}; choose another dtype")
        if dtype.kind == "f":
            cast[self.ignored] = np.where(values[self.ignored] == IGNORED, np.nan, cast[self.ignored])
        return self._replace(values=cast)


class _Column(NamedTuple):
    values: Array
    missing: npt.NDArray[np.bool_]
    classes: tuple[str, ...] = ()
    real: npt.NDArray[np.bool_] | None = None


def texts_of(array: Any, name: str, origin: RowOrigin, null: Null, max_length: int | None) -> Labels:
    """Text, or whole numbers as digits, numbered in order of its distinct values; lists are padded with `IGNORED`."""
    flat = array.flatten() if is_list(array.type) else array
    if not (is_text(flat.type) or formats.is_categorical(flat.type) or arrow("types").is_integer(flat.type)):
        raise origin.error(f"holds {array.type}; give text or whole numbers", column=name)
    text = flat.cast(arrow().large_string()) if arrow("types").is_integer(flat.type) else flat
    first = text.slice(0, 100).drop_null().to_pylist() if origin.untyped and not is_list(array.type) else []
    if first and all(each.strip()[:1] == "[" and _is_structure(each.strip()) for each in first):
        raise origin.error(f"{quoted(first[0])} looks like a list; {_STORED}", column=name)
    column = _classes_of_text(
        text, None, lambda row, message: origin.error(message, row=row), ids=True, blanks=not is_list(array.type)
    )
    if is_list(array.type):
        lengths, missing = formats.list_lengths(array), np.array(booleans_of(array.is_null()))
        length, masked = padded_length(lengths, max_length, origin, name)
        values, rows = np.full((len(array), length), IGNORED, np.int64), np.repeat(np.arange(len(array)), lengths)
        values[np.arange(length) < lengths[:, None]] = column.values
        missing[rows[column.missing]] = True
        column = _Column(values, missing, column.classes, values != IGNORED if masked else None)
    labels = with_null(column, null, origin, name)
    return labels._replace(classes=(), texts=labels.classes)


def padded_length(lengths: Indices, most: int | None, origin: RowOrigin, name: str) -> tuple[int, bool]:
    """The length that lists are padded to, and whether padding may occur."""
    longest = int(lengths.max(initial=0))
    if not longest:
        raise origin.error("every list in it is empty", column=name)
    if most is not None and longest > most:
        row = int(np.argmax(lengths > most))
        what = f"a list of {lengths[row]}, more than max_length {most}; the longest has {longest}: raise it to that"
        raise origin.error(what, row=row, column=name)
    return most or longest, most is not None or bool(((lengths >= 0) & (lengths < longest)).any())


def column_of(
    array: Any, name: str, origin: RowOrigin, classes: Sequence[str] | None, null: Null, *, most: int | None
) -> _Column:
    """The values of an array as `as_single_array` returns it."""

    def fail(row: int, message: str) -> ManifestError:
        return origin.error(message, row=row, column=name)

    kind, vocabulary = array.type, None if classes is None else tuple(classes)
    listed = formats.is_text_list(kind)
    of_text = holds_text(kind) and not is_list(kind)
    if arrow("types").is_null(kind):
        raise origin.error("no row has a value", column=name)
    if vocabulary is not None and not (of_text or listed):
        raise ConfigError(f"column {quoted(name)} holds {kind}; only text has classes", "classes")
    if listed:
        if most is not None:
            raise ConfigError("lists of classes are not padded; leave it out, or set kind: text", "max_length")
        return _class_lists(array, vocabulary, fail, empty_is_zero=null == "zero")
    if of_text:
        if vocabulary is None and name in origin.orders:
            message = f"its ordered categories have several orders: {origin.orders[name]}; write one, or give classes"
            raise origin.error(message, column=name)
        return _classes_of_text(array, vocabulary, fail)
    if is_list(kind) and is_list(kind.value_type):
        ways = "write all numbers of a row as one list, and reshape batches, as in boxes.reshape(len(boxes), -1, 4)"
        raise origin.error(f"holds {kind}, lists in lists, which cannot be a label; {ways}", column=name)
    return _number_lists(array, origin, name, most, fail) if is_list(kind) else _numbers(array, origin, name, fail)


def side_by_side(columns: Sequence[tuple[str, _Column]], origin: RowOrigin, null: Null) -> Labels:
    """All columns as one vector per row."""
    kinds = {column.values.dtype.kind for _, column in columns}
    for name, column in columns:
        if null == "error":
            with_null(column, null, origin, name)
        if column.classes or column.values.ndim > 1:
            what = "does not hold one number per row; only such columns form a vector"
            raise ConfigError(f"{quoted(name)} {what}", "name")
        if kinds == {"i", "f"} and column.values.dtype.kind == "i":
            large = np.flatnonzero((column.values >= INEXACT) | (column.values <= -INEXACT))
            if large.size:
                row = int(large[0])
                what = f"{column.values[row]} would be rounded in a vector with fractions; use two fields"
                raise origin.error(what, row=row, column=name)
    if "b" in kinds and len(kinds) > 1:
        raise ConfigError("bools and numbers cannot form one vector; use two fields", "name")
    values = np.stack([column.values for _, column in columns], axis=1)
    missing = np.stack([column.missing for _, column in columns], axis=1)
    values[missing] = _missing_value(values.dtype)
    return with_null(_Column(values, np.asarray(missing.any(axis=1))), null, origin, None)


def with_null(column: _Column, null: Null, origin: RowOrigin, name: str | None, *, lists: bool = False) -> Labels:
    values, missing, classes, real = column
    if null == "zero" and not lists:
        raise ConfigError("zero is for several classes per row; set ignore or drop", "null")
    if lists and null == "ignore":
        # Also without missing values, so that the dtype does not depend on the rows.
        values = values.astype(np.float32)
        values[missing] = np.nan
    rows = np.flatnonzero(missing)
    if not rows.size or null == "ignore":
        if rows.size and values.dtype.kind == "b":
            raise origin.error("null: bool has no value for ignore; set null: drop", row=int(rows[0]), column=name)
        return Labels(values, classes, real=real, ignored=rows)
    if null == "drop":
        return Labels(values, classes, rows, real=real)
    named = f" in {', '.join(origin.where(int(row)) for row in rows[:_NAMED])}" if len(rows) > 1 else ""
    named += f", … ({len(rows)} in all)" if len(rows) > _NAMED else ""
    ways = "null: zero if it has none of the classes, null: ignore" if lists else "null: ignore"
    raise origin.error(f"no value{named}; give one, or set {ways} or null: drop", row=int(rows[0]), column=name)


def _numbers(array: Any, origin: RowOrigin, name: str, fail: Fail) -> _Column:
    types, kind = arrow("types"), array.type
    missing = booleans_of(array.is_null(nan_is_null=True))
    if types.is_boolean(kind):
        values = booleans_of(array)
    elif types.is_integer(kind):
        whole = _cast(array, arrow().int64())
        if whole is None:
            row = _first_bad_row(array, lambda part: _cast(part, arrow().int64()) is None)
            raise fail(row, f"{array[row].as_py()} does not fit into int64; store it as text")
        values = formats.values_of(whole, IGNORED)
    elif types.is_floating(kind):
        values = np.array(formats.values_of(array))
        values[missing] = np.nan
    else:
        ways = "give numbers, text or lists of them"
        if types.is_temporal(kind):
            ways = f"set kind: class, or leave it out of fields: source.column({name!r}) gives its values"
        raise origin.error(f"holds {kind}, which cannot be a label; {ways}", column=name)
    return _Column(np.require(values, requirements=["C", "W"]), missing)


def _classes_of_text(
    array: Any, vocabulary: tuple[str, ...] | None, fail: Fail, *, ids: bool = False, blanks: bool = True
) -> _Column:
    """With ``blanks``, text of blanks is missing."""
    encoded = array if formats.is_categorical(array.type) else array.dictionary_encode()
    missing = booleans_of(encoded.is_null())
    codes = formats.values_of(encoded.indices).astype(np.int64)
    if vocabulary is None and not ids and len(encoded.dictionary) > MOST_CLASSES:
        what = "distinct texts, which seem to be ids or paths; set kind: text, or kind: image, npy or hdf5 for paths"
        raise ConfigError(f"{len(encoded.dictionary)} {what} of files to read", "classes")
    entries, trimmed = encoded.dictionary.to_pylist(), str if ids else trim
    blank = [blanks and not entry.strip() and entry not in (vocabulary or ()) for entry in entries]
    missing = missing | np.array([*blank, False])[codes]
    present = {trimmed(entries[code]) for code in np.flatnonzero(np.bincount(codes[~missing])).tolist()}
    named = [trimmed(entry) for entry, has_no in zip(entries, blank, strict=True) if not has_no]
    own = tuple(dict.fromkeys(named)) if formats.is_ordered(encoded.type) else in_order(present)
    classes = own if vocabulary is None else vocabulary
    numbers = {entry: number for number, entry in enumerate(classes)}
    table = np.array([numbers.get(entry, numbers.get(trimmed(entry), -1)) for entry in [*entries, ""]], np.int64)
    values = table[codes]
    unknown = np.flatnonzero((values < 0) & ~missing)
    if unknown.size:
        row = int(unknown[0])
        raise fail(row, f"{quoted(entries[codes[row]])} is not one of the classes {few(classes)}")
    values[missing] = IGNORED
    return _Column(values, missing, classes)


def in_order(classes: Iterable[str]) -> tuple[str, ...]:
    """Distinct names, sorted; whole numbers as numbers: 2 before 10."""
    names = set(classes)
    whole = all(re.fullmatch(r"[+-]?[0-9]{1,18}", name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if whole else None))


def _number_lists(array: Any, origin: RowOrigin, name: str, most: int | None, fail: Fail) -> _Column:
    lengths, missing = formats.list_lengths(array), np.array(booleans_of(array.is_null()))
    rows = np.flatnonzero(~missing)
    if not rows.size:
        raise origin.error("no row has a value", column=name)
    length = int(lengths[rows[0]])
    if most is not None:
        length, _ = padded_length(lengths, most, origin, name)
    elif (other := rows[lengths[rows] != length]).size:
        longer = f"a list of {lengths[other[0]]}, but {origin.where(int(rows[0]))} has {length}"
        ways = f"or set max_length: {lengths.max()}, which pads them, or set kind: class if the numbers are classes"
        raise fail(int(other[0]), f"{longer}; make all lists equally long, {ways}")
    elif not length:
        raise fail(int(rows[0]), "an empty list; give at least one number")
    owner, real = np.repeat(np.arange(len(array)), lengths), np.arange(length) < lengths[:, None]
    inner = _numbers(array.flatten(), origin, name, lambda place, message: fail(int(owner[place]), message))
    values = np.zeros((len(array), length), inner.values.dtype)
    values[missing] = _missing_value(values.dtype)
    values[real] = inner.values
    missing[owner[inner.missing]] = True
    return _Column(values, missing, (), None if most is None else real)


def _missing_value(dtype: np.dtype[Any]) -> float:
    return {"f": np.nan, "i": IGNORED}.get(dtype.kind, 0)


def _class_lists(array: Any, vocabulary: tuple[str, ...] | None, fail: Fail, *, empty_is_zero: bool) -> _Column:
    owner = np.repeat(np.arange(len(array)), formats.list_lengths(array))  # without a list, a row has the length 0
    inner = _classes_of_text(array.flatten(), vocabulary, lambda place, message: fail(int(owner[place]), message))
    values = np.zeros((len(array), len(inner.classes)), np.uint8)
    values[owner[~inner.missing], inner.values[~inner.missing]] = 1
    missing = np.array(booleans_of(array.is_null()) & (not empty_is_zero))
    missing[owner[booleans_of(array.flatten().is_null())]] = True  # text of blanks is no class of the list
    return _Column(values, missing, inner.classes)
