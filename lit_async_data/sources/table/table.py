"""`Table`: the columns of a manifest, one row per sample, in Arrow memory. `TableReader` reads further ones later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ChangedError, ConfigError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.local_files import opening_errors
from lit_async_data.sources.table.formats import (
    DEFAULT_FORMAT,
    TextFormat,
    arrow,
    arrow_integers,
    as_single_array,
    booleans_of,
    first_true_row,
    is_categorical,
    is_text,
    is_text_list,
    orders_of,
    values_of,
)
from lit_async_data.sources.table.labels import Labels, Null, labels_of, texts_of
from lit_async_data.sources.table.reading import files_of, filters_of, read_table
from lit_async_data.sources.table.row_origin import RowOrigin, printable_path, quoted
from lit_async_data.sources.table.text import check_notation, check_text, parsed_text

_NONE = np.empty(0, np.int64)


class Table:
    """Columns, arrays as from `as_single_array`. Immutable, thread-safe and picklable.

    Text takes its bytes and 4 bytes per row (8 if a column has 2 GiB or more); numbers take the size of their type.
    """

    def __init__(self, columns: Mapping[str, Any], origin: RowOrigin) -> None:
        self._columns = dict(columns)
        self.origin = origin

    @classmethod
    def of(
        cls, given: Any, columns: Sequence[str], filters: Any = None, text_format: TextFormat = DEFAULT_FORMAT
    ) -> Table:
        """Read columns of a table; arguments are those of `ManifestSource`.

        Several files are read in the order of their paths. All columns of CSV and TSV are text, and an empty cell is
        null. A row without a value meets no filter. Text is read as a number if it is compared with one.
        """
        names = list(dict.fromkeys(columns))
        read, origin = read_table(given, names, filters_of(filters), text_format)
        remaining: Any = read
        arrays = {}
        for name in names:
            column = remaining.column(name)
            # Drop the chunks of this column, so that it is not held twice.
            remaining = remaining.drop_columns(name) if remaining.num_columns > 1 else None
            if len(orders := orders_of(column)) > 1:
                origin = origin._replace(orders={**origin.orders, name: " and ".join(map(quoted, orders))})
            arrays[name] = as_single_array(column)
            del column
            check_text(arrays[name], name, origin)
        return cls(arrays, origin)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def text(self, name: str, rows: Sequence[int] | Indices) -> list[str]:
        """In any order; whole numbers as digits."""
        array = self._text_column(name)
        wanted = np.asarray(rows, np.int64).reshape(-1)
        numbers = arrow_integers(wanted)
        codes = array.indices if is_categorical(array.type) else None
        texts = array.take(numbers) if codes is None else array.dictionary.take(codes.take(numbers))
        if texts.null_count:
            place = first_true_row(texts.is_null())
            raise self.origin.error("no value; give one, or leave the row out", row=int(wanted[place]), column=name)
        values: list[Any] = texts.to_pylist()
        return values if not values or isinstance(values[0], str) else list(map(str, values))

    def labels(
        self,
        name: str | Sequence[str],
        *,
        classes: Sequence[str] | None = None,
        null: Null = "error",
        kind: str | None = None,
        separator: str | None = None,
    ) -> Labels:
        """One value per row; the other arguments are those of `Column`.

        Whole numbers become int64; floats and bools keep their type; text becomes the number of its class; lists of
        numbers become vectors, and all must have one length; lists of text become 1 for each class in the list, else 0.
        Several columns of numbers become the columns of one array. Kind ``"number"`` reads text as numbers: int64, or
        float64 if some are fractions; ``"class"`` takes whole numbers in lists as classes, too; ``"text"`` numbers text
        that is no class.
        """
        if kind == "text" and isinstance(name, str):
            return texts_of(self._text_column(name), name, self.origin, null)
        names = [name] if isinstance(name, str) else name
        columns = [(each, parsed_text(self.array(each), each, self.origin, separator, kind=kind)) for each in names]
        for each, array in columns:
            text = is_text(array.type) or is_categorical(array.type) or is_text_list(array.type)
            if kind == "class" and not text:
                raise ConfigError(
                    f"column {quoted(each)} does not hold text; leave out kind to use its numbers as labels", "kind"
                )
            if text and kind is None and classes is None and names is not name:
                check_notation(array, each, self.origin)
        vocabulary = None if classes is None else tuple(classes)
        return labels_of(columns, self.origin, classes=vocabulary, null=null, together=names is name)

    def first(self, name: str, separator: str | None = None) -> Any:
        """Of a cell with a separator, the first value in it; None without any."""
        array = self.array(name)
        row = first_true_row(array.is_valid())
        if row < 0:
            return None
        value = array[row].as_py()
        return value.split(separator)[0] if separator is not None and isinstance(value, str) else value

    def encoded(self, name: str) -> tuple[Indices, list[str]]:
        """A number for each row of a column of text or whole numbers, and the distinct values."""
        array, missing = self._text_column(name), self.missing(name)
        if missing.size:
            raise self.origin.error("no value; give one, or leave the row out", row=int(missing[0]), column=name)
        encoded = array if is_categorical(array.type) else array.dictionary_encode()
        return values_of(encoded.indices).astype(np.int64), list(map(str, encoded.dictionary.to_pylist()))

    def array(self, name: str) -> Any:
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def with_columns_of(self, other: Table) -> Table:
        if len(other) != len(self):
            raise ChangedError(
                f"{self.origin.name}: had {len(self)} rows, and now has {len(other)}; build the source again"
            )
        return Table(self._columns | other._columns, self.origin)

    def taken(self, rows: Indices) -> Table:
        numbers, origin = arrow_integers(rows), self.origin
        kept = rows if origin.kept is None else origin.kept[rows]
        ids = None if origin.ids is None else origin.ids.take(numbers)
        columns = {name: array.take(numbers) for name, array in self._columns.items()}
        return Table(columns, origin._replace(kept=kept, ids=ids))

    def with_ids(self, name: str) -> Table:
        return Table(self._columns, self.origin._replace(ids=self._text_column(name)))

    def missing(self, name: str) -> Indices:
        array = self.array(name)
        return np.flatnonzero(booleans_of(array.is_null())) if array.null_count else _NONE

    def is_text(self, name: str) -> bool:
        kind = self.array(name).type
        return is_text(kind) or is_categorical(kind)

    def check_ids(self, name: str) -> None:
        array = self._text_column(name)
        if array.null_count:
            row = first_true_row(array.is_null())
            raise self.origin.error(
                f"no id, as in {array.null_count} rows in all; give each row one", row=row, column=name
            )
        texts = array.dictionary_decode() if is_categorical(array.type) else array
        values, counts = arrow("compute").value_counts(texts).flatten()
        repeated = np.flatnonzero(values_of(counts) > 1)
        if repeated.size:
            value = values[int(repeated[0])].as_py()
            first, again = np.flatnonzero(booleans_of(arrow("compute").equal(texts, value)))[:2].tolist()
            where = f"{quoted(value)} in {self.origin.where(again)} and {self.origin.where(first)}"
            message = f"{repeated.size} ids occur more than once, as {where}; give each row another id"
            raise self.origin.error(message, row=again, column=name)

    def _text_column(self, name: str) -> Any:
        array = self.array(name)
        if not (is_text(array.type) or is_categorical(array.type) or arrow("types").is_integer(array.type)):
            raise self.origin.error(f"holds {array.type}; give text or whole numbers", column=name)
        return array


class TableReader:
    """A table and the selection of its rows, which columns that are read later have, too.

    The arguments are those of `Table.of`. A stream is read as a whole, because it can be read only once.
    """

    def __init__(self, given: Any, filters: Any, text_format: TextFormat = DEFAULT_FORMAT) -> None:
        if isinstance(given, str | os.PathLike):
            # Absolute, because the working directory may change.
            given = os.path.abspath(os.path.expanduser(given))
        elif hasattr(given, "read_all"):
            given = arrow().table(given)
        self._given, self._filters, self._text_format = given, filters, text_format
        self._is_detached = False
        self._selected: Indices | None = None
        self._states: dict[str, tuple[int, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without the user's table in memory; the columns in use are pickled with `Fields`.
        return vars(self) if isinstance(self._given, str) else {**vars(self), "_given": None, "_is_detached": True}

    def columns(self, names: Sequence[str]) -> Table:
        if self._is_detached:
            raise MissingError(
                f"column {names[0]!r}: was not read before pickling, and the table is in another process; make it a "
                "field, or give a file"
            )
        before = self._states or self._file_states()
        table = Table.of(self._given, names, self._filters, self._text_format)
        after = self._file_states()
        for file in {**before, **after}:
            if before.get(file) != after.get(file):
                raise ChangedError(
                    f"{printable_path(file)}: changed since the source was built; build the source again", file=file
                )
        self._states = after
        return table if self._selected is None else table.taken(self._selected)

    def unfiltered(self, name: str) -> set[str]:
        """The texts of a column in all rows, also in those that the filters leave out."""
        array = Table.of(self._given, [name], None, self._text_format).array(name)
        return set(map(str, array.unique().drop_null().to_pylist()))

    def _file_states(self) -> dict[str, tuple[int, ...]]:
        """Inode, bytes and time of each file; empty for a table in memory."""
        states: dict[str, tuple[int, ...]] = {}
        for file in files_of(self._given) if isinstance(self._given, str) else []:
            with opening_errors(file):
                status = os.stat(file)
            states[file] = status.st_ino, status.st_size, status.st_mtime_ns
        return states

    def select(self, rows: Indices) -> None:
        self._selected = rows if self._selected is None else self._selected[rows]
