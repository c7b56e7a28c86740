"""`Fields`: all fields of the samples of a table, and how to read them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import ConfigError, SourceError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.reservations import reserved
from lit_async_data.sources.contract.storage_layout import Reading, StorageLayout, slowest
from lit_async_data.sources.manifest.fields.column import FILES, Column, Kind, check_paths, kind_of, missing_of
from lit_async_data.sources.manifest.fields.file import MOST_BYTES, FileField
from lit_async_data.sources.manifest.fields.hdf5 import (
    HDF5Fields,
    dataset_column,
    grouped_by_location,
    missing_rows,
    row_numbers,
    with_hdf5_columns,
)
from lit_async_data.sources.manifest.fields.label_field import LabelField, labels_of_column
from lit_async_data.sources.manifest.fields.rows import Paths, Rows
from lit_async_data.sources.manifest.files.decoders import decoder_of
from lit_async_data.sources.manifest.files.prefetcher import FilePrefetcher
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.table.label_values import Labels
from lit_async_data.sources.manifest.table.table import Table, TableReader

# Samples whose file sizes are looked up to estimate the memory for reading ahead.
SIZE_SAMPLES = 16
# Files of a folder in one chunk of ``shuffle="chunk"``.
FOLDER_ROWS = 256


class Fields:
    """The fields of samples. Thread-safe.

    Args:
        columns: By batch key.
        reader: The table.
        root: The folder that relative paths start from.
        id: Column of ids, or None.

    Attributes:
        rows: The samples: all rows except dropped ones.
        labels: Fields with values in the table, by batch key.
        files: Fields with one file per sample, by batch key.
        hdf5: Fields with rows of HDF5 files; those that use the same columns together.
        prefetcher: Reads files ahead.

    Raises:
        ConfigError: Options do not fit the table.
        SourceError: A row is invalid, or the first file, which determines the shape, cannot be read.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        reader: TableReader,
        root: RootDirectory,
        id: str | None,  # noqa: A002  # the user's word
    ) -> None:
        self._order = tuple(columns)
        names = [name for column in columns.values() for name in column.names]
        table = reader.columns([*names, *([] if id is None else [id])])
        kinds: dict[str, Kind | None] = {key: kind_of(key, column, table, root) for key, column in columns.items()}
        files = {key: columns[key] for key, kind in kinds.items() if kind in FILES}
        hdf5 = {key: column for key, column in files.items() if kinds[key] == "hdf5"}
        inline = {key: column for key, column in columns.items() if key not in files}
        table = _without(table, reader, missing_of(columns.values(), table))
        table = with_hdf5_columns(hdf5, table, reader.columns)
        table = _without(table, reader, missing_rows(hdf5.values(), table))
        if id is not None:
            table.check_ids(id)
            table = table.with_ids(id)
        for key, column in files.items():
            check_paths(key, column, table)
        table, labels = _labels(inline, table, reader)
        self.labels = {key: _label_field(key, inline[key], values, table) for key, values in labels.items()}
        self.rows = Rows(table, id)
        self.prefetcher = FilePrefetcher(root)
        self.files = {
            key: self._file_field(key, column, kinds[key], root) for key, column in files.items() if key not in hdf5
        }
        self.hdf5 = [self._hdf5_fields(group, root) for group in grouped_by_location(hdf5, table)]

    def _file_field(self, key: str, column: Column, kind: Kind | None, root: RootDirectory) -> FileField:
        paths = Paths(self.rows, column.names[0], root)
        if kind == "image" and column.image.image_size is not None:
            return FileField(paths, decoder_of(kind, column.image, b"", ""), self.prefetcher)
        (path,) = paths.of(np.zeros(1, np.int64))
        try:
            data = self.prefetcher.read(path, MOST_BYTES)
            decoder = decoder_of(str(kind), column.image, data, path)
        except SourceError as error:
            raise paths.failed(error, 0, path) from error.__cause__
        except ConfigError as error:
            raise error.within(f"fields.{key}.") from None
        return FileField(paths, decoder, self.prefetcher)

    def _hdf5_fields(self, columns: Mapping[str, Column], root: RootDirectory) -> HDF5Fields:
        (key, first), table = next(iter(columns.items())), self.rows.table
        paths = Paths(self.rows, first.names[0], root)
        named = dataset_column(first, table)
        datasets = None if named is None else table.encoded(named)
        try:
            return HDF5Fields(columns, paths, row_numbers(first, table), datasets)
        except ConfigError as error:
            raise error.within(f"fields.{key}.") from None

    # -- what samples look like ------------------------------------------------------------------------------------

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """The fields by batch key, in the order of the user."""
        specs = {key: label.spec for key, label in self.labels.items()}
        specs |= {key: file.spec for key, file in self.files.items()}
        for fields in self.hdf5:
            specs.update(fields.specs)
        return {key: specs[key] for key in self._order}

    @property
    def is_random(self) -> bool:
        """Whether any field reads a random part of its files."""
        return any(field.decoder.is_random for field in self.files.values())

    @property
    def paths(self) -> Paths | None:
        """The paths of the first field with files; None if no field has files."""
        by_key = {key: field.paths for key, field in self.files.items()}
        by_key |= {key: fields.paths for fields in self.hdf5 for key in fields.specs}
        return next((by_key[key] for key in self._order if key in by_key), None)

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same fields, with text labels encoded by other classes where the user gave none."""
        changed = copy.copy(self)
        changed.labels = {
            key: field.with_classes(classes[key], self.rows.table) if key in classes else field
            for key, field in self.labels.items()
        }
        return changed

    def read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        """Read samples.

        Args:
            samples: int64, shape (n,).
            out: By batch key, shape (n, ...), overwritten; some keys or all.
            keys: Select random parts; uint64, shape (n,). None: the middle.
        """
        for key, label in self.labels.items():
            if key in out:
                label.read(samples, out[key])
        for fields in self.hdf5:
            requested = {key: out[key] for key in fields.specs if key in out}
            if requested:
                fields.read(samples, requested)
        for key, file in self.files.items():
            if key in out:
                file.read(samples, out[key], keys)

    # -- preparing samples before they are read ----------------------------------------------------------------------

    def fetch(self, samples: Indices) -> bool:
        """Have the kernel read HDF5 files, and read other files ahead; returns whether some were not in memory."""
        cold = [fields.source.fetch(samples) for fields in self.hdf5]
        cold += [file.fetch(samples) for file in self.files.values()]
        return any(cold)

    @functools.cached_property
    def file_bytes(self) -> int:
        """Bytes of the whole files of one sample: the mean of a few samples across the table."""
        count = len(self.rows)
        samples = np.unique(np.linspace(0, count - 1, min(SIZE_SAMPLES, count)).astype(np.int64))
        return int(sum(file.mean_bytes(samples) for file in self.files.values()))

    def held_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks."""
        return sum(fields.source.decoded_bytes(chunks) for fields in self.hdf5)

    def reserve(self, chunks: int, cache_bytes: int, fetched_bytes: int) -> Callable[[], None]:
        """Reserve memory for decoded chunks and for files that are read ahead; returns a function that releases it."""
        total = max(sum(fields.source.decodable_bytes for fields in self.hdf5), 1)
        reserve: list[Callable[[], Callable[[], None]]] = [
            functools.partial(fields.source.reserve, chunks, cache_bytes * fields.source.decodable_bytes // total, 0)
            for fields in self.hdf5
        ]
        if fetched_bytes:
            reserve.append(functools.partial(self.prefetcher.reserve, fetched_bytes))
        return reserved(reserve)

    # -- storage order ----------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> StorageLayout:
        """The chunks of the HDF5 field with the largest ones, and the most expensive way of reading."""
        layouts = [fields.chunks for fields in self.hdf5]
        largest = max(layouts, key=lambda layout: layout.rows, default=StorageLayout(reading="copied"))
        readings: list[Reading] = ["copied"]
        readings.extend("decoded" if field.decoder.images else "opened" for field in self.files.values())
        readings.extend(layout.reading for layout in layouts)
        return dataclasses.replace(largest, reading=slowest(readings))

    @functools.cached_property
    def layout(self) -> StorageLayout:
        """As `chunks`; without HDF5 files, the files of one folder form chunks."""
        layout, paths = self.chunks, self.paths
        if layout.runs or paths is None or self.hdf5:
            return layout
        folders = paths.folders()
        order = np.argsort(folders, kind="stable")
        runs = tuple(ChunkRun(count, FOLDER_ROWS) for count in np.bincount(folders).tolist())
        return dataclasses.replace(layout, runs=runs, order=None if (np.diff(order) == 1).all() else order)


def _labels(columns: Mapping[str, Column], table: Table, reader: TableReader) -> tuple[Table, dict[str, Labels]]:
    """The labels of inline columns, and the table without the rows that any of them drops."""
    while True:
        labels = {key: _labels_of(key, column, table) for key, column in columns.items()}
        dropped = [each.dropped for each in labels.values()]
        if not any(rows.size for rows in dropped):
            return table, labels
        # NaN and missing values in lists are known only now. Classes that only dropped rows have must vanish too.
        table = _without(table, reader, dropped)


def _labels_of(key: str, column: Column, table: Table) -> Labels:
    try:
        return labels_of_column(column, table)
    except ConfigError as error:
        raise error.within(f"fields.{key}.") from None


def _label_field(key: str, column: Column, labels: Labels, table: Table) -> LabelField:
    try:
        return LabelField.of(column, labels, table)
    except ConfigError as error:
        raise error.within(f"fields.{key}.") from None


def _without(table: Table, reader: TableReader, dropped: Sequence[Indices]) -> Table:
    """The table without dropped rows."""
    kept = np.ones(len(table), np.bool_)
    for rows in dropped:
        kept[rows] = False
    if kept.all():
        return table
    if not kept.any():
        raise table.origin.error("null: drop removes all of its rows; check the column, or set null: ignore")
    rows = np.flatnonzero(kept)
    reader.select(rows)
    return table.taken(rows)
