"""`Labels`: one value per row, as numbers that a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.manifest.table.arrow import (
    arrow,
    is_coded,
    is_list,
    is_ordered,
    is_text,
    lists_text,
    truth_of,
    values_of,
)
from lit_async_data.sources.manifest.table.numeric import INEXACT
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, shown

Null = Literal["error", "ignore", "drop"]
# More different texts than this are no classes.
MOST_CLASSES = 2**16
# Rows that a message names.
_NAMED = 5
# What is asked about a row, and the error that says so.
Fail = Callable[[int, str], ManifestError]
Missing = npt.NDArray[np.bool_]


class Labels(NamedTuple):
    """One value per row.

    Attributes:
        values: int64, bool or floats; shape (rows, ...). uint8, or float32 with ``null="ignore"``, of shape
            (rows, classes) where a row has several classes.
        classes: Names of the values 0, 1, 2, …, or, where a row has several, of the columns; empty for numbers.
        dropped: Rows without a value that are to be left out, ascending; int64. Their values mean nothing.
    """

    values: Array
    classes: tuple[str, ...]
    dropped: Indices


class _Column(NamedTuple):
    """Values, where there is none, and the names of classes."""

    values: Array
    missing: Missing
    classes: tuple[str, ...] = ()


def labels_of(
    columns: Sequence[tuple[str, Any]],
    origin: RowOrigin,
    *,
    vocabulary: Sequence[str] | None = None,
    null: Null = "error",
    multi: bool = False,
    together: bool = False,
) -> Labels:
    """The values of a column, or of several; see `Table.labels`.

    Args:
        columns: Names, and arrays as from `as_one`.
        origin: Of their rows.
        vocabulary: Names of all classes, in their order.
        null: What becomes of rows without a value.
        multi: Whether a row lists its classes.
        together: Whether the values get an axis of columns.
    """
    names = _vocabulary(vocabulary)
    found = [(name, _column_of(array, name, origin, names, multi=multi)) for name, array in columns]
    if not together:
        return _settled(found[0][1], null, origin, found[0][0], several=multi)
    if null == "error":
        for name, column in found:
            _settled(column, null, origin, name)
    return _settled(_side_by_side(found, origin), null, origin, None)


def _column_of(array: Any, name: str, origin: RowOrigin, vocabulary: tuple[str, ...] | None, *, multi: bool) -> _Column:
    def fail(row: int, message: str) -> ManifestError:
        return origin.error(message, row=row, column=name)

    kind = array.type
    of_text = is_text(kind) or is_coded(kind)
    listed = lists_text(kind)
    if arrow("types").is_null(kind):
        raise origin.error("no row has a value", column=name)
    if multi and not listed:
        raise ConfigError(f"multi: column {shown(name)} holds {kind}; it must hold lists of text")
    if listed and not multi:
        raise ConfigError(f"multi: column {shown(name)} holds lists of text; say multi=True for several classes a row")
    if vocabulary is not None and not (of_text or listed):
        raise ConfigError(f"vocabulary: column {shown(name)} holds {kind}; only text has classes")
    if listed:
        return _several(array, vocabulary, fail)
    if of_text:
        return _classed(array, vocabulary, fail)
    if is_list(kind):
        return _vectors(array, origin, name, fail)
    return _plain(array, origin, name, fail)


def _side_by_side(columns: Sequence[tuple[str, _Column]], origin: RowOrigin) -> _Column:
    """Numbers of several columns as one array of shape (rows, columns)."""
    kinds = {column.values.dtype.kind for _, column in columns}
    for name, column in columns:
        if column.classes or column.values.ndim > 1:
            raise ConfigError(f"columns: {shown(name)} does not hold one number per row; only those can stand together")
        if kinds == {"i", "f"} and column.values.dtype.kind == "i":
            large = np.flatnonzero((column.values >= INEXACT) | (column.values <= -INEXACT))
            if large.size:
                row = int(large[0])
                raise origin.error(f"{column.values[row]} would be rounded beside fractions", row=row, column=name)
    if "b" in kinds and len(kinds) > 1:
        raise ConfigError("columns: true or false beside numbers; take them as fields of their own")
    values = np.stack([column.values for _, column in columns], axis=1)
    missing = np.stack([column.missing for _, column in columns], axis=1)
    values[missing] = _nothing(values.dtype)
    return _Column(values, np.asarray(missing.any(axis=1)))


def _vocabulary(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"vocabulary: {shown(given)} is not a list of names")
    for name in given:
        if not isinstance(name, str):
            raise ConfigError(f"vocabulary: {shown(name)} is not text")
    if len(set(given)) < len(given):
        raise ConfigError(f"vocabulary: {shown(list(given))} holds a name twice")
    return tuple(given)


def _settled(column: _Column, null: Null, origin: RowOrigin, name: str | None, *, several: bool = False) -> Labels:
    values, missing, classes = column
    if several and null == "ignore":
        # In any case, so that the type does not depend on the rows.
        values = values.astype(np.float32)
        values[missing] = np.nan
    rows = np.flatnonzero(missing)
    if not rows.size or null == "ignore":
        if rows.size and values.dtype.kind == "b":
            raise origin.error("null: nothing in bool says ignore; drop such rows", row=int(rows[0]), column=name)
        return Labels(values, classes, np.empty(0, np.int64))
    if null == "drop":
        return Labels(values, classes, rows)
    named = ", ".join(origin.where(int(row)) for row in rows[:_NAMED])
    more = f", … ({len(rows)} in all)" if len(rows) > _NAMED else ""
    message = f"no value in {named}{more}; give one, or say null: ignore or null: drop"
    raise origin.error(message, row=int(rows[0]), column=name)


def _plain(array: Any, origin: RowOrigin, name: str, fail: Fail) -> _Column:
    library, types = arrow(), arrow("types")
    kind = array.type
    missing = truth_of(array.is_null(nan_is_null=True))
    if types.is_boolean(kind):
        values = truth_of(array)
    elif types.is_integer(kind):
        if types.is_uint64(kind):
            large = np.flatnonzero(values_of(array) > np.iinfo(np.int64).max)
            if large.size:
                raise fail(int(large[0]), f"{array[int(large[0])].as_py()} is more than an int64 holds")
        values = values_of(array.cast(library.int64()), IGNORED)
    elif types.is_floating(kind):
        values = np.array(values_of(array))
        values[missing] = np.nan
    else:
        hint = "; cast it to float64, or to int64 if it holds whole numbers" if types.is_decimal(kind) else ""
        raise origin.error(f"holds {kind}, which is no label; give numbers, text or lists of them{hint}", column=name)
    return _Column(np.require(values, requirements=["C", "W"]), missing)


def _classed(array: Any, vocabulary: tuple[str, ...] | None, fail: Fail) -> _Column:
    encoded = array if is_coded(array.type) else array.dictionary_encode()
    missing = truth_of(encoded.is_null())
    codes = values_of(encoded.indices).astype(np.int64)
    if vocabulary is None and len(encoded.dictionary) > MOST_CLASSES:
        raise ConfigError(
            f"classes: there are {len(encoded.dictionary)} different texts; are they ids, or paths? Paths of files "
            "that do not end as such need kind: image, npy or hdf5"
        )
    entries = encoded.dictionary.to_pylist()
    used = np.zeros(len(entries), np.bool_)
    used[codes[~missing]] = True
    present = {entry for entry, each in zip(entries, used.tolist(), strict=True) if each}
    own = tuple(dict.fromkeys(entries)) if is_ordered(encoded.type) else tuple(sorted(present))
    classes = own if vocabulary is None else vocabulary
    numbers = {entry: number for number, entry in enumerate(classes)}
    table = np.array([numbers.get(entry, -1) for entry in [*entries, ""]], np.int64)
    values = table[codes]
    unknown = np.flatnonzero((values < 0) & ~missing)
    if unknown.size:
        row = int(unknown[0])
        raise fail(row, f"{shown(entries[codes[row]])} is not one of the {len(classes)} classes of the vocabulary")
    values[missing] = IGNORED
    return _Column(values, missing, classes)


def _lengths(array: Any) -> tuple[Indices, Indices, Any]:
    """Rows that have a list, how long those are, and their values one after the other."""
    rows = np.flatnonzero(truth_of(array.is_valid()))
    lists = array.drop_null()
    lengths = values_of(arrow("compute").list_value_length(lists)).astype(np.int64)
    return rows, lengths, lists.flatten()


def _vectors(array: Any, origin: RowOrigin, name: str, fail: Fail) -> _Column:
    rows, lengths, flat = _lengths(array)
    if not rows.size:
        raise origin.error("no row has a value", column=name)
    length = int(lengths[0])
    other = np.flatnonzero(lengths != length)
    if other.size:
        row, found = int(rows[other[0]]), int(lengths[other[0]])
        raise fail(row, f"a list of {found}, but {origin.where(int(rows[0]))} has {length}; all must be equally long")
    if not length:
        raise fail(int(rows[0]), "an empty list")
    owner = np.repeat(rows, lengths)
    inner = _plain(flat, origin, name, lambda place, message: fail(int(owner[place]), message))
    values = np.full((len(array), length), _nothing(inner.values.dtype), inner.values.dtype)
    values[rows] = inner.values.reshape(-1, length)
    missing = np.ones(len(array), np.bool_)
    missing[rows] = inner.missing.reshape(-1, length).any(axis=1)
    return _Column(values, missing)


def _nothing(dtype: np.dtype[Any]) -> float:
    return {"f": np.nan, "i": IGNORED}.get(dtype.kind, 0)


def _several(array: Any, vocabulary: tuple[str, ...] | None, fail: Fail) -> _Column:
    rows, lengths, flat = _lengths(array)
    owner = np.repeat(rows, lengths)
    inner = _classed(flat, vocabulary, lambda place, message: fail(int(owner[place]), message))
    values = np.zeros((len(array), len(inner.classes)), np.uint8)
    values[owner[~inner.missing], inner.values[~inner.missing]] = 1
    missing = np.ones(len(array), np.bool_)
    missing[rows] = False
    missing[owner[inner.missing]] = True
    return _Column(values, missing, inner.classes)
