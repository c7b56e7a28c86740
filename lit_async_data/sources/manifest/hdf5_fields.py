"""`HDF5Fields`: fields whose values are rows of HDF5 files, which the table names one by one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import StorageLayout
from lit_async_data.sources.concat import ConcatSource
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.manifest.column import Column
from lit_async_data.sources.manifest.rows import Paths
from lit_async_data.sources.manifest.table.row_origin import NoColumnError
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.places import starts
from lit_async_data.sources.subset import SubsetSource

# Column of datasets, and the dataset itself, where nothing else is said.
DATASET_COLUMN, DATASET = "dataset", "data"


# Reads further columns of the table.
More = Callable[[Sequence[str]], Table]


class HDF5Fields:
    """Rows of HDF5 files, one for each sample. Safe to read from several threads.

    Args:
        columns: By batch key; all of them name files, rows and datasets by the same columns.
        paths: The files.
        rows: int64: the row of each sample in its file.
        datasets: Number of its dataset for each sample, and their names; None where each column says its own.

    Attributes:
        paths: The files.
        source: The samples, as a part of all rows of these files.

    Raises:
        ConfigError: Options do not fit the files.
        ManifestError: There is no such row in a file; names the row of the table.
        SourceError: A file or dataset is not there, or cannot be a field.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        paths: Paths,
        rows: Indices,
        datasets: tuple[Indices, Sequence[str]] | None,
    ) -> None:
        self._columns, self.paths = dict(columns), paths
        self._codes, self._files = _merged(*paths.distinct())
        which, names = datasets or (np.zeros_like(rows), [""])
        sources: list[HDF5Source] = []
        numbers, total = np.empty_like(rows), 0
        for dataset, name in enumerate(names):
            samples = np.flatnonzero(which == dataset)
            if samples.size:
                source, found = self._of_dataset(name, samples, rows[samples])
                self._check_same(source, sources, int(samples[0]))
                numbers[samples] = total + found
                total += len(source)
                sources.append(source)
        whole = sources[0] if len(sources) == 1 else ConcatSource(sources)
        self.source = SubsetSource(whole, numbers)

    def _of_dataset(self, name: str, samples: Indices, rows: Indices) -> tuple[HDF5Source, Indices]:
        """The files in which a dataset is wanted, and which of their samples are."""
        used, place = np.unique(self._codes[samples], return_inverse=True)
        files = [self._files[code] for code in used.tolist()]
        fields = {
            key: Field(name or column.dataset or DATASET, dtype=column.dtype) for key, column in self._columns.items()
        }
        layout = {key: column.layout for key, column in self._columns.items() if column.layout is not None}
        try:
            source = HDF5Source(files, fields, layout=layout)
        except SourceError as error:
            if error.file not in files:
                raise
            sample = int(samples[place == files.index(error.file)][0])
            raise self.paths.entries.blamed(error, sample) from None
        lengths = np.array([part.samples for part in source.parts], np.int64)
        wrong = np.flatnonzero((rows < 0) | (rows >= lengths[place]))
        if wrong.size:
            first = int(wrong[0])
            message = f"{files[place[first]]} has rows 0 to {lengths[place[first]] - 1}, and no row {rows[first]}"
            raise self.paths.entries.error(int(samples[first]), message, column=next(iter(self._columns.values())).row)
        return source, starts(lengths)[place] + rows

    def _check_same(self, source: HDF5Source, others: Sequence[HDF5Source], sample: int) -> None:
        for key, field in source.spec.fields.items():
            first = others[0].spec[key] if others else field
            if (first.shape, first.dtype) != (field.shape, field.dtype):
                (path,) = self.paths.of(np.array([sample]))
                error = FormatError(
                    f"{path}: {key!r} is {field.dtype} of shape {field.shape} there, and {first.dtype} of shape "
                    f"{first.shape} in rows before; all of a field must be alike"
                )
                raise self.paths.entries.blamed(error, sample, path)

    @property
    def specs(self) -> Mapping[str, FieldSpec]:
        """What samples look like, by batch key."""
        return self.source.spec.fields

    @property
    def chunks(self) -> StorageLayout:
        """How the samples lie together; in storage, whatever the order of the table."""
        whole = self.source.source.chunks
        if not whole.runs:
            return whole
        order = np.argsort(self.source.samples, kind="stable")
        as_stored = SubsetSource(self.source.source, self.source.samples[order])
        return dataclasses.replace(as_stored.chunks, order=None if (np.diff(order) == 1).all() else order)

    def read(self, samples: Indices, out: Mapping[str, Array]) -> None:
        """Read the rows of samples.

        Args:
            samples: int64, shape (n,).
            out: By batch key, shape (n, ...); of all keys or some.

        Raises:
            SourceError: A row cannot be read; names the row of the table too.
        """
        try:
            self.source.read_into(samples, out)
        except AsyncDataError:
            for place, sample in enumerate(samples.tolist()):
                self._read_one(sample, {key: array[place : place + 1] for key, array in out.items()})
            raise

    def _read_one(self, sample: int, out: Mapping[str, Array]) -> None:
        try:
            self.source.read_into(np.array([sample]), out)
        except AsyncDataError as error:
            raise self.paths.entries.blamed(error, sample) from error.__cause__


def _merged(codes: Indices, paths: Sequence[str]) -> tuple[Indices, list[str]]:
    """Files that a table names by several paths as one."""
    real: dict[str, int] = {}
    numbers = np.array([real.setdefault(os.path.realpath(path), len(real)) for path in paths], np.int64)
    return numbers[codes], list(real)


def with_places(columns: Mapping[str, Column], table: Table, more: More) -> Table:
    """The table with the columns that say which row of a file is meant, and which dataset."""
    wanted = [name for name in dict.fromkeys(column.row for column in columns.values()) if name not in table]
    optional = list(dict.fromkeys(column.dataset or DATASET_COLUMN for column in columns.values()))
    if wanted:
        table = table.beside(more(wanted))
    for name in optional if columns else []:
        if name not in table:
            try:
                table = table.beside(more([name]))
            except NoColumnError:
                continue  # it is the name of a dataset
    return table


def dataset_column(column: Column, table: Table) -> str | None:
    """The column that says which dataset a row is of; None where all are of one."""
    name = column.dataset or DATASET_COLUMN
    return name if name in table else None


def alike(columns: Mapping[str, Column], table: Table) -> list[dict[str, Column]]:
    """Fields that the same columns say the places of, together: their files are opened once."""
    groups: dict[tuple[str, str, str | None], dict[str, Column]] = {}
    for key, column in columns.items():
        place = column.names[0], column.row, dataset_column(column, table)
        groups.setdefault(place, {})[key] = column
    return list(groups.values())


def missing_rows(columns: Iterable[Column], table: Table) -> list[Indices]:
    """The rows of the table that name no row of their file, where such rows are dropped."""
    return [table.missing(column.row) for column in columns if column.null == "drop"]


def row_numbers(column: Column, table: Table) -> Indices:
    """The row of its file that each row of the table names; int64.

    Raises:
        ManifestError: A row of the table names none.
        ConfigError: They are no whole numbers.
    """
    missing = table.missing(column.row)
    if missing.size:
        raise table.origin.error("no row number; give one, or say null: drop", row=int(missing[0]), column=column.row)
    found = table.labels(column.row, numbers=True).values
    if found.dtype.kind == "f" and found.ndim == 1 and (np.abs(found) < 2**53).all() and (found % 1 == 0).all():
        found = found.astype(np.int64)  # pandas has no other numbers where one is missing
    if found.dtype.kind != "i" or found.ndim > 1:
        raise ConfigError(f"row: column {column.row!r} holds no whole numbers, which rows of HDF5 files must be")
    return found
