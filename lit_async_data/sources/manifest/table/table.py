"""`Table`: the columns of a manifest, one row per sample, in Arrow memory. `TableReader` reads further ones later."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lit_async_data.errors import ChangedError, ConfigError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import (
    arrow,
    arrow_integers,
    as_single_array,
    booleans_of,
    first_true_row,
    is_categorical,
    is_ordered,
    is_text,
    is_text_list,
    values_of,
)
from lit_async_data.sources.manifest.table.delimited import DEFAULT_FORMAT, TextFormat
from lit_async_data.sources.manifest.table.filters import Filter
from lit_async_data.sources.manifest.table.label_values import Labels, Null, labels_of
from lit_async_data.sources.manifest.table.notation import check_notation
from lit_async_data.sources.manifest.table.numeric import check_text, parsed_text
from lit_async_data.sources.manifest.table.reading import files_of, read_table
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, printable_path, quoted

# Most rows that a message names.
_NAMED = 5
_NONE = np.empty(0, np.int64)
# From this number of ids on, grouping them takes a third of the time of `value_counts`; but it imports pandas.
_GROUPED_ROWS = 10**5

_log = logging.getLogger(__name__)


class Table:
    """Columns of a manifest. Immutable, thread-safe and picklable.

    Text takes its bytes and 4 bytes per row (8 if a column has 2 GiB or more); numbers take the size of their type. No
    row has a Python object.

    Args:
        columns: Arrays as from `as_single_array`, all of one length ≥ 1.
        origin: Origin of the rows.

    Example:
        >>> import pyarrow
        >>> given = pyarrow.table({"path": ["a.jpg", "b.jpg", "c.jpg"], "species": ["owl", "auk", "owl"]})
        >>> table = Table.of(given, ["path", "species"])
        >>> table.text("path", [2, 0])
        ['c.jpg', 'a.jpg']
        >>> labels = table.labels("species")
        >>> labels.values.tolist(), labels.classes
        ([1, 0, 1], ('auk', 'owl'))
    """

    def __init__(self, columns: Mapping[str, Any], origin: RowOrigin) -> None:
        self._columns = dict(columns)
        self.origin = origin
        self._length = len(next(iter(self._columns.values())))

    @classmethod
    def of(
        cls,
        given: Any,
        columns: Sequence[str],
        filters: Any = None,
        text_format: TextFormat = DEFAULT_FORMAT,
    ) -> Table:
        """Read columns of a table.

        Args:
            given: Path of a file (``.csv``, ``.tsv``, ``.jsonl``, ``.ndjson``, also with ``.gz``; ``.parquet``), a
                pattern for several files, or a folder of Parquet files; a DataFrame of pandas or polars, a
                ``pyarrow.Table`` or any object with ``__arrow_c_stream__``. Several files are read in the order of
                their paths.
            columns: Names of the columns to read. All columns of CSV and TSV are text, and an empty cell is null.
            filters: Conditions that rows must all meet, such as ``[["quality", ">", 0.5]]``, with ``==``, ``!=``,
                ``<``, ``<=``, ``>``, ``>=``, ``in``, ``not in``. A row without a value meets none. Text is read as a
                number if it is compared with one.
            text_format: How CSV and TSV are written.

        Raises:
            ConfigError: An option is invalid, or pyarrow is missing.
            MissingError: A file does not exist.
            ManifestError: The table is empty, a column is missing, or a row is invalid; names file and row.
            CorruptError: A Parquet file does not decode.
        """
        names = list(dict.fromkeys(columns))
        read, origin = read_table(given, names, Filter.all_of(filters), text_format)
        remaining: Any = read
        arrays = {}
        for name in names:
            column = remaining.column(name)
            # Drop the chunks of this column, so that it is not held twice.
            remaining = remaining.drop_columns(name) if remaining.num_columns > 1 else None
            array = as_single_array(column)
            if is_ordered(column.type) and not is_ordered(array.type):
                _log.warning(
                    "%s, column %s: chunks have ordered categories in different orders, so classes are sorted by name; "
                    "give the order by classes: [...]",
                    origin.name,
                    quoted(name),
                )
            del column
            check_text(array, name, origin)
            arrays[name] = array
        return cls(arrays, origin)

    def __len__(self) -> int:
        """Number of rows, ≥ 1."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the columns."""
        kept = 0 if self.origin.kept is None else self.origin.kept.nbytes
        return kept + sum(int(array.nbytes) for array in self._columns.values())

    def text(self, name: str, rows: Sequence[int] | Indices) -> list[str]:
        """The text of selected rows; whole numbers as digits.

        Args:
            name: A column of text or whole numbers.
            rows: int64, shape (n,), in any order.
        """
        array = self._text_column(name)
        wanted = np.asarray(rows, np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"rows: {self.origin.name} has the rows 0 to {len(self) - 1}")
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
        kind: Literal["class", "number"] | None = None,
        separator: str | None = None,
    ) -> Labels:
        """One value per row.

        Whole numbers become int64; floats and bools keep their type; text becomes the number of its class; lists of
        numbers become vectors, and all must have one length; lists of text become 1 for each class in the list, else 0.

        Args:
            name: A column; or several columns of numbers, which become the columns of one array.
            classes: Names of all classes in order, such as those of the training set. None: the categories of an
                ordered categorical column, in their order; for other text, the distinct values, sorted.
            null: What to do with rows without a value, or with NaN: ``"error"``, ``"ignore"`` (−100, or NaN in floats),
                ``"drop"`` (they are listed), or, for several classes per row, ``"zero"`` (none of the classes).
            kind: ``"number"``: text is read as numbers: int64, or float64 if some are fractions. ``"class"``: text, and
                whole numbers in lists, are classes. None: text is classes, unless it looks like numbers.
            separator: Separates several values in one text cell, which then counts as a list.

        Raises:
            ConfigError: An option does not fit the column.
            ManifestError: A row has no value, one that is not in ``classes``, or one that does not fit; or the
                column has a type that cannot be a label, such as dates or decimals.
        """
        names = [name] if isinstance(name, str) else name
        columns = [(each, parsed_text(self._column(each), each, self.origin, separator, kind=kind)) for each in names]
        for each, array in columns:
            text = is_text(array.type) or is_categorical(array.type) or is_text_list(array.type)
            if kind == "class" and not text:
                raise ConfigError(
                    f"kind: column {quoted(each)} does not hold text; leave out kind to use its numbers as labels",
                    option="kind",
                )
            if text and kind is None and classes is None:
                check_notation(array, each, self.origin)
        vocabulary = None if classes is None else tuple(classes)
        return labels_of(columns, self.origin, classes=vocabulary, null=null, together=names is name)

    def first(self, name: str, separator: str | None = None) -> Any:
        """The first value of a column: text, a number or a list; None if no row has a value.

        Args:
            name: A column.
            separator: As for `labels`; then the first value of the cell.
        """
        array = self._column(name)
        valid = array.is_valid()
        row = first_true_row(valid)
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
        """A column as an Arrow array, as from `as_single_array`."""
        return self._column(name)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def with_columns_of(self, other: Table) -> Table:
        """This table with the columns of another table that has the same rows."""
        if len(other) != len(self):
            raise ChangedError(
                f"{self.origin.name}: had {len(self)} rows, and now has {len(other)}; build the source again"
            )
        return Table(self._columns | other._columns, self.origin)

    def taken(self, rows: Indices) -> Table:
        """Selected rows of the table.

        Args:
            rows: int64, shape (n,), ascending.
        """
        numbers = arrow_integers(rows)
        return Table({name: array.take(numbers) for name, array in self._columns.items()}, self.origin.taken(rows))

    def with_ids(self, name: str) -> Table:
        """This table, whose messages name rows by a column of ids too."""
        return Table(self._columns, self.origin.with_ids(self._text_column(name)))

    def missing(self, name: str) -> Indices:
        """The rows in which a column has no value; int64, ascending."""
        array = self._column(name)
        return np.flatnonzero(booleans_of(array.is_null())) if array.null_count else _NONE

    @property
    def untyped(self) -> bool:
        """Whether all columns were read as text because the files store no types."""
        return self.origin.untyped

    def is_text(self, name: str) -> bool:
        """Whether a column holds text."""
        kind = self._column(name).type
        return is_text(kind) or is_categorical(kind)

    def check_ids(self, name: str) -> None:
        """Check that no two rows have the same id."""
        array = self._text_column(name)
        if array.null_count:
            row = first_true_row(array.is_null())
            raise self.origin.error(
                f"no id, as in {array.null_count} rows in all; give each row one", row=row, column=name
            )
        texts = array.dictionary_decode() if is_categorical(array.type) else array
        if len(texts) < _GROUPED_ROWS:
            values, counts = arrow("compute").value_counts(texts).flatten()
        else:
            table = arrow().Table.from_arrays([texts], ["id"]).group_by("id", use_threads=False)
            values, counts = map(as_single_array, table.aggregate([("id", "count")]).columns)
        repeated = np.flatnonzero(values_of(counts) > 1)
        if repeated.size:
            named, row = [], 0
            for value in values.take(arrow_integers(repeated[:_NAMED])).to_pylist():
                first, again = np.flatnonzero(booleans_of(arrow("compute").equal(texts, value)))[:2].tolist()
                named.append(f"{quoted(value)} in {self.origin.where(again)} and {self.origin.where(first)}")
                row = row or again
            more = f", … ({repeated.size} ids in all)" if repeated.size > _NAMED else ""
            message = f"ids occur more than once: {', '.join(named)}{more}; give each row another id"
            raise self.origin.error(message, row=row, column=name)

    def _text_column(self, name: str) -> Any:
        """A column of text or whole numbers, else an error."""
        array = self._column(name)
        if not (is_text(array.type) or is_categorical(array.type) or arrow("types").is_integer(array.type)):
            raise self.origin.error(f"holds {array.type}; give text or whole numbers", column=name)
        return array

    def _column(self, name: str) -> Any:
        return self._columns[name]


class TableReader:
    """A table and the selection of its rows. Columns that are read later have the same rows.

    Args:
        given: As for `Table.of`. A stream is read as a whole, because it can be read only once.
        filters: As for `Table.of`.
        text_format: How CSV and TSV are written.
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
        """Read columns of the selected rows.

        Raises:
            ChangedError: The files have changed since the first read.
            MissingError: The table is in the memory of another process.
            ManifestError: As `Table.of`.
        """
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

    def _file_states(self) -> dict[str, tuple[int, ...]]:
        """Inode, bytes and time of each file; empty for a table in memory."""
        return {file: _state_of(file) for file in files_of(self._given)} if isinstance(self._given, str) else {}

    def select(self, rows: Indices) -> None:
        """Select rows from those selected so far; int64, ascending."""
        self._selected = rows if self._selected is None else self._selected[rows]


def _state_of(file: str) -> tuple[int, ...]:
    try:
        status = os.stat(file)
    except OSError as error:
        raise MissingError(f"{printable_path(file)}: cannot be opened: {error.strerror}", file=file) from error
    return status.st_ino, status.st_size, status.st_mtime_ns
