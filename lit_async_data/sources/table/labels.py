"""`Labels`: one numeric value per row, from columns of numbers or text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError, ManifestError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.table.formats import (
    arrow,
    booleans_of,
    is_categorical,
    is_list,
    is_ordered,
    is_text,
    is_text_list,
    list_lengths,
    values_of,
)
from lit_async_data.sources.table.row_origin import RowOrigin, quoted
from lit_async_data.sources.table.text import INEXACT, MOST_CLASSES, trim

Null = Literal["error", "ignore", "drop", "zero"]
_NAMED = 5  # most rows that a message names
_NONE = np.empty(0, np.int64)
Fail = Callable[[int, str], SourceError]


class Labels(NamedTuple):
    # As int64, bool or floats, shape (rows, ...). With several classes per row: uint8 of shape (rows, classes), or
    # float32 with ``null="ignore"``.
    values: Array
    # The names of the values 0, 1, 2, …; with several classes per row, of the columns; empty for numbers.
    classes: tuple[str, ...] = ()
    # Rows without a value that are to be dropped, ascending; int64. Their values are undefined.
    dropped: Indices = _NONE
    texts: tuple[str, ...] = ()  # what the values 0, 1, 2, … stand for, if that is text but no class

    @property
    def spec(self) -> FieldSpec:
        return FieldSpec(self.values.shape[1:], self.values.dtype, classes=self.classes, texts=self.texts)

    def of_classes(self, classes: Sequence[str], fail: Fail) -> Labels:
        """As numbers of other names; ``fail`` takes a row with another name, and that name."""
        values, own = self.values, self.classes or self.texts
        numbers = {name: number for number, name in enumerate(classes)}
        trimmed = str if self.texts else trim
        new = np.array([numbers.get(name, numbers.get(trimmed(name), -1)) for name in own], np.int64)
        for lost in np.flatnonzero(new < 0).tolist():
            has = values[:, lost] == 1 if values.ndim > 1 else values == lost
            if has.any():
                raise fail(int(has.argmax()), own[lost])
        if values.ndim == 1:
            renumbered = values.astype(np.int64)
            known = renumbered >= 0  # ignored rows keep their value
            renumbered[known] = new[renumbered[known]]
        else:
            renumbered = np.zeros((len(values), len(classes)), values.dtype)
            for number in np.flatnonzero(new >= 0).tolist():
                np.maximum(renumbered[:, new[number]], values[:, number], out=renumbered[:, new[number]])
            renumbered[np.isnan(values).any(axis=1)] = np.nan if values.dtype.kind == "f" else 0
        named = Labels(renumbered, tuple(classes), self.dropped)
        return named._replace(classes=(), texts=named.classes) if self.texts else named

    def cast(self, dtype: np.dtype[Any] | None, fail: Fail) -> Labels:
        """May round fractions; ``fail`` takes a row that does not fit."""
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
        return self._replace(values=cast)


class _Column(NamedTuple):
    values: Array
    missing: npt.NDArray[np.bool_]
    classes: tuple[str, ...] = ()


def labels_of(
    columns: Sequence[tuple[str, Any]],
    origin: RowOrigin,
    *,
    classes: tuple[str, ...] | None = None,
    null: Null = "error",
    together: bool = False,
) -> Labels:
    """From arrays as of `as_single_array`; see `Table.labels`. With ``together``, the values get an axis of columns."""
    several = not together and is_text_list(columns[0][1].type)
    if null == "zero" and not several:
        raise ConfigError("zero is for several classes per row; set ignore or drop", "null")
    parsed = [(name, _column_of(array, name, origin, classes, null)) for name, array in columns]
    if not together:
        return _with_null_option(parsed[0][1], null, origin, parsed[0][0], several=several)
    if null == "error":
        for name, column in parsed:
            _with_null_option(column, null, origin, name)
    return _with_null_option(_side_by_side(parsed, origin), null, origin, None)


def texts_of(array: Any, name: str, origin: RowOrigin, null: Null) -> Labels:
    """Text, or whole numbers as digits, as numbers of its distinct values in order."""
    if null == "zero":
        raise ConfigError("zero is for several classes per row; set ignore or drop", "null")
    text = array if is_text(array.type) or is_categorical(array.type) else array.cast(arrow().large_string())
    column = _classes_of_text(text, None, lambda row, message: origin.error(message, row=row), ids=True)
    labels = _with_null_option(column, null, origin, name)
    return labels._replace(classes=(), texts=labels.classes)


def _column_of(array: Any, name: str, origin: RowOrigin, vocabulary: tuple[str, ...] | None, null: Null) -> _Column:
    def fail(row: int, message: str) -> ManifestError:
        return origin.error(message, row=row, column=name)

    kind = array.type
    of_text = is_text(kind) or is_categorical(kind)
    listed = is_text_list(kind)
    if arrow("types").is_null(kind):
        raise origin.error("no row has a value", column=name)
    if vocabulary is not None and not (of_text or listed):
        raise ConfigError(f"column {quoted(name)} holds {kind}; only text has classes", "classes")
    if listed:
        return _class_lists(array, vocabulary, fail, empty_is_zero=null == "zero")
    if of_text:
        if vocabulary is None and name in origin.orders:
            message = f"its ordered categories have several orders: {origin.orders[name]}; write one, or give classes"
            raise origin.error(message, column=name)
        return _classes_of_text(array, vocabulary, fail)
    if is_list(kind):
        return _number_lists(array, origin, name, fail)
    return _numbers(array, origin, name, fail)


def _side_by_side(columns: Sequence[tuple[str, _Column]], origin: RowOrigin) -> _Column:
    kinds = {column.values.dtype.kind for _, column in columns}
    for name, column in columns:
        if column.classes or column.values.ndim > 1:
            raise ConfigError(
                f"{quoted(name)} does not hold one number per row; only such columns form a vector", "name"
            )
        if kinds == {"i", "f"} and column.values.dtype.kind == "i":
            large = np.flatnonzero((column.values >= INEXACT) | (column.values <= -INEXACT))
            if large.size:
                row = int(large[0])
                raise origin.error(
                    f"{column.values[row]} would be rounded in a vector with fractions; use two fields",
                    row=row,
                    column=name,
                )
    if "b" in kinds and len(kinds) > 1:
        raise ConfigError("bools and numbers cannot form one vector; use two fields", "name")
    values = np.stack([column.values for _, column in columns], axis=1)
    missing = np.stack([column.missing for _, column in columns], axis=1)
    values[missing] = _missing_value(values.dtype)
    return _Column(values, np.asarray(missing.any(axis=1)))


def _with_null_option(
    column: _Column, null: Null, origin: RowOrigin, name: str | None, *, several: bool = False
) -> Labels:
    values, missing, classes = column
    if several and null == "ignore":
        # Always, so that the dtype does not depend on the rows.
        values = values.astype(np.float32)
        values[missing] = np.nan
    rows = np.flatnonzero(missing)
    if not rows.size or null == "ignore":
        if rows.size and values.dtype.kind == "b":
            raise origin.error("null: bool has no value for ignore; set null: drop", row=int(rows[0]), column=name)
        return Labels(values, classes)
    if null == "drop":
        return Labels(values, classes, rows)
    named = f" in {', '.join(origin.where(int(row)) for row in rows[:_NAMED])}" if len(rows) > 1 else ""
    named += f", … ({len(rows)} in all)" if len(rows) > _NAMED else ""
    ways = "null: zero if it has none of the classes, null: ignore" if several else "null: ignore"
    message = f"no value{named}; give one, or set {ways} or null: drop"
    raise origin.error(message, row=int(rows[0]), column=name)


def _numbers(array: Any, origin: RowOrigin, name: str, fail: Fail) -> _Column:
    library, types = arrow(), arrow("types")
    kind = array.type
    missing = booleans_of(array.is_null(nan_is_null=True))
    if types.is_boolean(kind):
        values = booleans_of(array)
    elif types.is_integer(kind):
        if types.is_uint64(kind):
            large = np.flatnonzero(values_of(array) > np.iinfo(np.int64).max)
            if large.size:
                raise fail(int(large[0]), f"{array[int(large[0])].as_py()} does not fit into int64; store it as text")
        values = values_of(array.cast(library.int64()), IGNORED)
    elif types.is_floating(kind):
        values = np.array(values_of(array))
        values[missing] = np.nan
    else:
        raise origin.error(f"holds {kind}, which cannot be a label; give numbers, text or lists of them", column=name)
    return _Column(np.require(values, requirements=["C", "W"]), missing)


def _classes_of_text(array: Any, vocabulary: tuple[str, ...] | None, fail: Fail, *, ids: bool = False) -> _Column:
    encoded = array if is_categorical(array.type) else array.dictionary_encode()
    missing = booleans_of(encoded.is_null())
    codes = values_of(encoded.indices).astype(np.int64)
    if vocabulary is None and not ids and len(encoded.dictionary) > MOST_CLASSES:
        raise ConfigError(
            f"{len(encoded.dictionary)} distinct texts, which seem to be ids or paths; set kind: text, or "
            "kind: image, npy or hdf5 for paths of files to read",
            "classes",
        )
    entries, trimmed = encoded.dictionary.to_pylist(), str if ids else trim
    used = np.zeros(len(entries), np.bool_)
    used[codes[~missing]] = True
    present = {trimmed(entry) for entry, each in zip(entries, used.tolist(), strict=True) if each}
    own = tuple(dict.fromkeys(map(trimmed, entries))) if is_ordered(encoded.type) else in_order(present)
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


def _lengths(array: Any) -> tuple[Indices, Indices, Any]:
    rows = np.flatnonzero(booleans_of(array.is_valid()))
    lists = array.drop_null()
    return rows, list_lengths(lists), lists.flatten()


def _number_lists(array: Any, origin: RowOrigin, name: str, fail: Fail) -> _Column:
    rows, lengths, flat = _lengths(array)
    if not rows.size:
        raise origin.error("no row has a value", column=name)
    length = int(lengths[0])
    other = np.flatnonzero(lengths != length)
    if other.size:
        row, size = int(rows[other[0]]), int(lengths[other[0]])
        longer = f"a list of {size}, but {origin.where(int(rows[0]))} has {length}"
        raise fail(row, f"{longer}; make all lists equally long, or set kind: class if the numbers are classes")
    if not length:
        raise fail(int(rows[0]), "an empty list; give at least one number")
    owner = np.repeat(rows, lengths)
    inner = _numbers(flat, origin, name, lambda place, message: fail(int(owner[place]), message))
    values = np.full((len(array), length), _missing_value(inner.values.dtype), inner.values.dtype)
    values[rows] = inner.values.reshape(-1, length)
    missing = np.ones(len(array), np.bool_)
    missing[rows] = inner.missing.reshape(-1, length).any(axis=1)
    return _Column(values, missing)


def _missing_value(dtype: np.dtype[Any]) -> float:
    return {"f": np.nan, "i": IGNORED}.get(dtype.kind, 0)


def _class_lists(array: Any, vocabulary: tuple[str, ...] | None, fail: Fail, *, empty_is_zero: bool) -> _Column:
    rows, lengths, flat = _lengths(array)
    owner = np.repeat(rows, lengths)
    inner = _classes_of_text(flat, vocabulary, lambda place, message: fail(int(owner[place]), message))
    values = np.zeros((len(array), len(inner.classes)), np.uint8)
    values[owner[~inner.missing], inner.values[~inner.missing]] = 1
    missing = np.full(len(array), not empty_is_zero)
    missing[rows] = False
    missing[owner[inner.missing]] = True
    return _Column(values, missing, inner.classes)
