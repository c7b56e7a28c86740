"""`Table`: the rows of a manifest, one per sample, read once and held in Arrow's memory."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ChangedError, ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import (
    arrow,
    as_one,
    first_true,
    is_coded,
    is_ordered,
    is_text,
    lists_text,
    numbered,
    text_fault,
    truth_of,
    values_of,
)
from lit_async_data.sources.manifest.table.delimited import PLAIN, TextForm
from lit_async_data.sources.manifest.table.duplicate_ids import repeats
from lit_async_data.sources.manifest.table.filters import Filter
from lit_async_data.sources.manifest.table.labels import Labels, Null, labels_of
from lit_async_data.sources.manifest.table.numeric import as_numbers, read_as
from lit_async_data.sources.manifest.table.reading import read_table
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, shown

# Rows that a message names.
_NAMED = 5
_NONE = np.empty(0, np.int64)

_log = logging.getLogger(__name__)


class Table:
    """Columns of a manifest. Nothing in it changes; it can be read from several threads and be pickled.

    Text takes its bytes and 4 bytes per row (8 where a column has 2 GiB or more), numbers what their type takes; no
    row has an object of its own.

    Args:
        columns: Arrays as from `as_one`, all of one length ≥ 1.
        origin: Where the rows come from.

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
        form: TextForm = PLAIN,
        numbers: Sequence[str] = (),
    ) -> Table:
        """Read the wanted columns of a table.

        Args:
            given: Path of a file (``.csv``, ``.tsv``, ``.jsonl``, ``.ndjson``, also with ``.gz``; ``.parquet``), a
                pattern for several, a folder of Parquet files; a DataFrame of pandas or polars, a ``pyarrow.Table`` or
                anything with ``__arrow_c_stream__``. Several files come in the order of their paths.
            columns: Names of those that are wanted. In CSV and TSV all are text, and an empty cell is no value.
            filters: ``[["quality", ">", 0.5]]``: conditions that rows must all meet, with ``==``, ``!=``, ``<``,
                ``<=``, ``>``, ``>=``, ``in``, ``not in``. A row without a value meets none. Text that is compared with
                a number is read as one.
            form: How CSV and TSV are written.
            numbers: Those of the columns whose text is to be read as numbers: int64, or float64 if some are fractions.

        Raises:
            ConfigError: An option is wrong, or pyarrow is missing.
            MissingError: There is no such file.
            ManifestError: The table is empty, a column is missing, or a row is not what it should be; names file and
                row.
            CorruptError: A Parquet file does not decode.
        """
        names = _names("columns", columns)
        if not names:
            raise ConfigError("columns: none are wanted")
        as_number = _names("numbers", numbers)
        stray = [name for name in as_number if name not in names]
        if stray:
            raise ConfigError(f"numbers: {shown(stray[0])} is not one of the columns {', '.join(map(shown, names))}")
        read, origin = read_table(given, names, Filter.all_of(filters), form)
        left: Any = read
        held = {}
        for name in names:
            column = left.column(name)
            # Not held twice: this was all that still needed it.
            left = left.drop_columns(name) if left.num_columns > 1 else None
            array = as_one(column)
            if is_ordered(column.type) and not is_ordered(array.type):
                _log.warning(
                    "%s, column %s: its parts have ordered categories in different orders, so classes are sorted by "
                    "name; say in which order with classes: [...]",
                    origin.name,
                    shown(name),
                )
            del column
            fault = text_fault(array)
            if fault:
                raise origin.error(fault[1], row=fault[0], column=name)
            if name in as_number and (is_text(array.type) or is_coded(array.type)):
                array = as_numbers(array.dictionary_decode() if is_coded(array.type) else array, name, origin)
            held[name] = array
        return cls(held, origin)

    def __len__(self) -> int:
        """Number of rows, ≥ 1."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns take."""
        kept = 0 if self.origin.kept is None else self.origin.kept.nbytes
        return kept + sum(int(array.nbytes) for array in self._columns.values())

    def text(self, name: str, rows: Sequence[int] | Indices) -> list[str]:
        """The text of some rows; whole numbers as digits.

        Args:
            name: A column of text or whole numbers.
            rows: int64, shape (n,), in any order.

        Raises:
            IndexError: A row is not in ``range(len(self))``.
            ManifestError: A row has no value, or the column holds something else.
        """
        array = self._worded(name)
        wanted = np.asarray(rows, np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"rows: {self.origin.name} has {len(self)}, from 0 on")
        numbers = numbered(wanted)
        codes = array.indices if is_coded(array.type) else None
        found = array.take(numbers) if codes is None else array.dictionary.take(codes.take(numbers))
        if found.null_count:
            place = first_true(found.is_null())
            raise self.origin.error("no value; give one, or leave the row out", row=int(wanted[place]), column=name)
        values: list[Any] = found.to_pylist()
        return values if not values or isinstance(values[0], str) else list(map(str, values))

    def labels(
        self,
        name: str | Sequence[str],
        *,
        vocabulary: Sequence[str] | None = None,
        null: Null = "error",
        multi: bool = False,
        numbers: bool = False,
        separator: str | None = None,
    ) -> Labels:
        """One value per row.

        Whole numbers become int64; floats and bools stay what they are; text becomes the number of its class; a list
        of numbers becomes a vector, and all must be equally long.

        Args:
            name: A column; or several of numbers, which become the columns of one array.
            vocabulary: Names of all classes in their order, such as those of the training set. None: the categories of
                an ordered categorical column, all of them in their order; of other text what occurs, sorted.
            null: Of rows without a value, or with NaN: ``"error"``, ``"ignore"`` (−100, or NaN in floats) or
                ``"drop"`` (they are listed).
            multi: The column holds lists of text: 1 for each class that is in the list, else 0.
            numbers: Text is read as numbers: int64, or float64 if some are fractions.
            separator: What stands between several values of one cell of text, which then count as a list.

        Raises:
            ConfigError: An option does not fit the column.
            ManifestError: A row has no value, one that is not in the vocabulary, or one that does not fit; the column
                holds dates, decimals or other things that are no labels.
        """
        if null not in ("error", "ignore", "drop"):
            raise ConfigError(f"null: {shown(null)} is not one of error, ignore, drop")
        together = not isinstance(name, str)
        names = _names("columns", name if together else [name])
        if not names or (together and (vocabulary is not None or multi)):
            raise ConfigError("columns: several must be one or more, of numbers, without vocabulary and multi")
        columns = [(each, read_as(self._column(each), each, self.origin, separator, numbers=numbers)) for each in names]
        return labels_of(columns, self.origin, vocabulary=vocabulary, null=null, multi=multi, together=together)

    def first(self, name: str, separator: str | None = None) -> Any:
        """The first value of a column that is one: text, a number, a list; None if no row has a value.

        Args:
            name: A column.
            separator: As for `labels`; then the first of the cell.
        """
        array = self._column(name)
        valid = array.is_valid()
        row = first_true(valid)
        if row < 0:
            return None
        value = array[row].as_py()
        return value.split(separator)[0] if separator is not None and isinstance(value, str) else value

    def coded(self, name: str) -> tuple[Indices, list[str]]:
        """A number for each value of a column of text or whole numbers, and the values.

        Raises:
            ManifestError: A row has no value, or the column holds something else.
        """
        array, missing = self._worded(name), self.missing(name)
        if missing.size:
            raise self.origin.error("no value; give one, or leave the row out", row=int(missing[0]), column=name)
        encoded = array if is_coded(array.type) else array.dictionary_encode()
        return values_of(encoded.indices).astype(np.int64), list(map(str, encoded.dictionary.to_pylist()))

    def array(self, name: str) -> Any:
        """A column as it is held: an array of Arrow, as from `as_one`."""
        return self._column(name)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def beside(self, other: Table) -> Table:
        """This table with the columns of another one of the same rows.

        Raises:
            ChangedError: It has not as many: the file has been written to meanwhile.
        """
        if len(other) != len(self):
            raise ChangedError(f"{self.origin.name}: had {len(self)} rows, and now {len(other)}; do not write to it")
        return Table(self._columns | other._columns, self.origin)

    def taken(self, rows: Indices) -> Table:
        """Some of its rows.

        Args:
            rows: int64, shape (n,), ascending.
        """
        numbers = numbered(rows)
        return Table({name: array.take(numbers) for name, array in self._columns.items()}, self.origin.taken(rows))

    def called(self, name: str) -> Table:
        """This table, whose messages name rows by a column too."""
        return Table(self._columns, self.origin.called(self._worded(name)))

    def missing(self, name: str) -> Indices:
        """The rows in which a column has no value; int64, ascending."""
        array = self._column(name)
        return np.flatnonzero(truth_of(array.is_null())) if array.null_count else _NONE

    @property
    def untyped(self) -> bool:
        """Whether everything in it was read as text: CSV and TSV say nothing of types."""
        return self.origin.untyped

    def is_text(self, name: str) -> bool:
        """Whether a column holds text."""
        kind = self._column(name).type
        return is_text(kind) or is_coded(kind)

    def lists_text(self, name: str, separator: str | None) -> bool:
        """Whether cells hold several texts: lists, or what a separator cuts."""
        kind = self._column(name).type
        return lists_text(kind) or (separator is not None and self.is_text(name))

    def check_ids(self, name: str) -> None:
        """Check that no two rows have the same value.

        Args:
            name: A column of text or whole numbers.

        Raises:
            ManifestError: Some have, or a row has no value; names the first five.
        """
        array = self._worded(name)
        if array.null_count:
            row = first_true(array.is_null())
            raise self.origin.error(f"no id, as in {array.null_count} rows in all", row=row, column=name)
        again, first = repeats(array)
        if again.size:
            pairs = zip(again[:_NAMED].tolist(), first[:_NAMED].tolist(), strict=True)
            named = ", ".join(
                f"{shown(array[row].as_py())} in {self.origin.where(row)} and {self.origin.where(before)}"
                for row, before in pairs
            )
            more = f", … ({again.size} rows in all)" if again.size > _NAMED else ""
            message = f"ids stand more than once: {named}{more}; each sample needs one of its own"
            raise self.origin.error(message, row=int(again[0]), column=name)

    def _worded(self, name: str) -> Any:
        """A column of text or whole numbers."""
        array = self._column(name)
        if not (is_text(array.type) or is_coded(array.type) or arrow("types").is_integer(array.type)):
            raise self.origin.error(f"holds {array.type}; it must be text or whole numbers", column=name)
        return array

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            near = difflib.get_close_matches(name, self._columns, 1)
            hint = f"did you mean {shown(near[0])}?" if near else f"they are {', '.join(map(shown, self._columns))}"
            raise ConfigError(f"columns: {shown(name)} is not one of those that were read; {hint}")
        return self._columns[name]


def _names(option: str, given: Any) -> list[str]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{option}: {shown(given)} is not a list of names")
    return list(dict.fromkeys(given))
