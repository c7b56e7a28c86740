"""`HDF5Fields`: fields whose samples are rows of HDF5 files that the table names."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.concat import ConcatSource
from lit_async_data.sources.composed.subset import SubsetSource
from lit_async_data.sources.contract.places import numbered, starts
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.sources.hdf5.readers.values import LOOKS
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.manifest.fields.column import Column
from lit_async_data.sources.manifest.fields.rows import Paths
from lit_async_data.sources.table.row_origin import NoColumnError
from lit_async_data.sources.table.table import Table, TableReader

# Default column of dataset names, and default dataset.
DATASET_COLUMN, DATASET = "dataset", "data"


class HDF5Fields:
    """Rows of HDF5 files, one per sample: ``source``, a subset of all rows of these files. Thread-safe.

    All columns use the same columns of paths, rows and datasets. ``datasets`` has the number of each sample's dataset,
    and their names; None if the columns give the datasets.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        paths: Paths,
        rows: Indices,
        datasets: tuple[Indices, Sequence[str]] | None,
    ) -> None:
        self._columns, self.paths = dict(columns), paths
        codes, named = paths.distinct()
        numbers, self._files = numbered(map(os.path.realpath, named))  # a table can name one file by several paths
        self._codes = numbers[codes]
        which, names = datasets or (np.zeros_like(rows), [""])
        sources: list[HDF5Source] = []
        selected, total = np.empty_like(rows), 0
        for dataset, name in enumerate(names):
            samples = np.flatnonzero(which == dataset)
            if samples.size:
                source, numbers = self._open_dataset(name, samples, rows[samples])
                self._check_same_spec(source, sources, int(samples[0]))
                selected[samples] = total + numbers
                total += len(source)
                sources.append(source)
        whole = sources[0] if len(sources) == 1 else ConcatSource(sources)
        self.source = SubsetSource(whole, selected)

    def _open_dataset(self, name: str, samples: Indices, rows: Indices) -> tuple[HDF5Source, Indices]:
        """A source of the files of one dataset, and the numbers of the samples in it."""
        used, place = np.unique(self._codes[samples], return_inverse=True)
        files = [self._files[code] for code in used.tolist()]
        fields = dict[str, Field]()
        for key, column in self._columns.items():
            null = column.null if column.null == "ignore" else "error"
            of = name or column.dataset or DATASET
            fields[key] = Field(of, dtype=column.dtype, classes=column.classes, null=null)
        layout = {key: column.layout for key, column in self._columns.items() if column.layout is not None}
        try:
            context = contextvars.copy_context()
            context.run(LOOKS.set, False)  # at rows that the table may not name
            source = context.run(HDF5Source, files, fields, layout=layout)
        except SourceError as error:
            if error.file not in files:
                raise
            sample = int(samples[place == files.index(error.file)][0])
            raise self.paths.rows.with_row(error, sample) from None
        lengths = np.array([part.samples for part in source.parts], np.int64)
        wrong = np.flatnonzero((rows < 0) | (rows >= lengths[place]))
        if wrong.size:
            first = int(wrong[0])
            message = (
                f"{files[place[first]]} has rows 0 to {lengths[place[first]] - 1}, not {rows[first]}; correct the row "
                "number"
            )
            raise self.paths.rows.error(int(samples[first]), message, column=next(iter(self._columns.values())).row)
        return source, starts(lengths)[place] + rows

    def _check_same_spec(self, source: HDF5Source, others: Sequence[HDF5Source], sample: int) -> None:
        for key, field in source.spec.fields.items():
            first = others[0].spec[key] if others else field
            if (first.shape, first.dtype) != (field.shape, field.dtype):
                (path,) = self.paths.of(np.array([sample]))
                error = FormatError(
                    f"{path}: {key!r} is {field.dtype} of shape {field.shape} here, but {first.dtype} of shape "
                    f"{first.shape} in previous rows; all samples of a field need one shape and dtype"
                )
                raise self.paths.rows.with_row(error, sample, path)

    @property
    def specs(self) -> Mapping[str, FieldSpec]:
        return self.source.spec.fields

    @property
    def chunks(self) -> StorageLayout:
        """The chunks of the samples in storage order, which does not depend on the order of the table."""
        whole = self.source.source.chunks
        if not whole.runs:
            return whole
        order = np.argsort(self.source.samples, kind="stable")
        as_stored = SubsetSource(self.source.source, self.source.samples[order])
        return dataclasses.replace(as_stored.chunks, order=None if (np.diff(order) == 1).all() else order)

    def read(self, samples: Indices, out: Mapping[str, Array]) -> None:
        """Read the rows of samples. If that fails, each is read by itself, to name the row of the table."""
        try:
            self.source.read_into(samples, out)
        except AsyncDataError as error:
            if len(samples) == 1:
                raise self.paths.rows.with_row(error, int(samples[0])) from error.__cause__
            for place in range(len(samples)):
                self.read(samples[place : place + 1], {key: array[place : place + 1] for key, array in out.items()})
            raise


def with_hdf5_columns(columns: Mapping[str, Column], table: Table, reader: TableReader) -> Table:
    wanted = {column.row for column in columns.values()} - set(table.names)
    if wanted:
        table = table.with_columns_of(reader.columns(sorted(wanted)))
    for name in sorted({column.dataset or DATASET_COLUMN for column in columns.values()} - set(table.names)):
        # Otherwise it is the name of a dataset, not of a column.
        with contextlib.suppress(NoColumnError):
            table = table.with_columns_of(reader.columns([name]))
    return table


def dataset_column(column: Column, table: Table) -> str | None:
    name = column.dataset or DATASET_COLUMN
    return name if name in table.names else None


def grouped_by_location(columns: Mapping[str, Column], table: Table) -> list[dict[str, Column]]:
    """Group fields that use the same columns of paths, rows and datasets, so that each file is opened once."""
    groups: dict[tuple[str, str, str | None], dict[str, Column]] = {}
    for key, column in columns.items():
        place = column.names[0], column.row, dataset_column(column, table)
        groups.setdefault(place, {})[key] = column
    return list(groups.values())


def row_numbers(column: Column, table: Table) -> Indices:
    missing = table.missing(column.row)
    if missing.size:
        raise table.origin.error("no row number; give one, or set null: drop", row=int(missing[0]), column=column.row)
    rows = table.labels(column.row, kind="number").values
    if rows.dtype.kind == "f" and rows.ndim == 1 and (np.abs(rows) < 2**53).all() and (rows % 1 == 0).all():
        rows = rows.astype(np.int64)  # pandas holds whole numbers as floats if one is missing
    if rows.dtype.kind != "i" or rows.ndim > 1:
        raise ConfigError(
            f"column {column.row!r} does not hold whole numbers; rows of HDF5 files are counted from 0", "row"
        )
    return rows
