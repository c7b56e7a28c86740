"""`Fields`: everything that a table's samples are made of, and how it is read."""

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
from lit_async_data.sources.base import Reading, StorageLayout, Turn, slowest
from lit_async_data.sources.manifest.column import FILES, Column, Kind
from lit_async_data.sources.manifest.file_field import MOST_BYTES, FileField
from lit_async_data.sources.manifest.files.decoders import decoder_of
from lit_async_data.sources.manifest.files.prefetcher import FilePrefetcher
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.hdf5_fields import (
    HDF5Fields,
    alike,
    dataset_column,
    missing_rows,
    row_numbers,
    with_places,
)
from lit_async_data.sources.manifest.infer_kind import check_paths, kind_of, missing_of
from lit_async_data.sources.manifest.label_field import LabelField, labels_of_column
from lit_async_data.sources.manifest.paths import Paths
from lit_async_data.sources.manifest.rows import Rows
from lit_async_data.sources.manifest.table.labels import Labels
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.manifest.table.table_reader import TableReader
from lit_async_data.sources.room import reserved

# Samples whose files are asked for their size, to know how much room reading ahead takes.
SIZED = 16
# Files of a folder that make a chunk of a shuffle by chunks.
FOLDER_ROWS = 256


class Fields:
    """What samples are made of. Safe to read from several threads.

    Args:
        columns: By batch key.
        given: The table.
        root: Where files lie.
        id: Column of ids, or None.

    Attributes:
        entries: The samples: all rows but those that are dropped.
        labels: Fields whose values stand in the table, by batch key.
        files: Fields of one file for each sample.
        stored: Fields of rows of HDF5 files, those of the same rows together.
        fetching: Reads files ahead.

    Raises:
        ConfigError: Options do not fit the table.
        SourceError: A row is wrong, or the first file cannot be read where it says what samples look like.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        given: TableReader,
        root: RootDirectory,
        id: str | None,  # noqa: A002  # the user's word
    ) -> None:
        self._order = tuple(columns)
        names = [name for column in columns.values() for name in column.names]
        table = given.columns([*names, *([] if id is None else [id])])
        kinds: dict[str, Kind | None] = {key: kind_of(key, column, table, root) for key, column in columns.items()}
        files = {key: columns[key] for key, kind in kinds.items() if kind in FILES}
        stored = {key: column for key, column in files.items() if kinds[key] == "hdf5"}
        inline = {key: column for key, column in columns.items() if key not in files}
        table = _without(table, given, missing_of(columns.values(), table))
        table = with_places(stored, table, given.columns)
        table = _without(table, given, missing_rows(stored.values(), table))
        if id is not None:
            table.check_ids(id)
            table = table.called(id)
        for key, column in files.items():
            check_paths(key, column, table)
        table, labels = _labels(inline, table, given)
        self.labels = {key: _cast(key, inline[key], found, table) for key, found in labels.items()}
        self.entries = Rows(table, id)
        self.fetching = FilePrefetcher(root)
        self.files = {
            key: self._file_field(key, column, kinds[key], root) for key, column in files.items() if key not in stored
        }
        self.stored = [self._hdf5_fields(group, root) for group in alike(stored, table)]

    def _file_field(self, key: str, column: Column, kind: Kind | None, root: RootDirectory) -> FileField:
        paths = Paths(self.entries, column.names[0], root)
        if kind == "image" and column.image.image_size is not None:
            return FileField(paths, decoder_of(kind, column.image, b"", ""), self.fetching)
        (path,) = paths.of(np.zeros(1, np.int64))
        try:
            data = self.fetching.read(path, MOST_BYTES)
            decoder = decoder_of(str(kind), column.image, data, path)
        except SourceError as error:
            raise self.entries.blamed(error, 0, path) from error.__cause__
        except ConfigError as error:
            raise ConfigError(f"fields.{key}.{error}") from None
        return FileField(paths, decoder, self.fetching)

    def _hdf5_fields(self, columns: Mapping[str, Column], root: RootDirectory) -> HDF5Fields:
        (key, first), table = next(iter(columns.items())), self.entries.table
        paths = Paths(self.entries, first.names[0], root)
        named = dataset_column(first, table)
        datasets = None if named is None else table.coded(named)
        try:
            return HDF5Fields(columns, paths, row_numbers(first, table), datasets)
        except ConfigError as error:
            raise ConfigError(f"fields.{key}.{error}") from None

    # -- what samples look like ------------------------------------------------------------------------------------

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """By batch key, in the order of the user."""
        found = {key: label.spec for key, label in self.labels.items()}
        found |= {key: file.spec for key, file in self.files.items()}
        for stored in self.stored:
            found.update(stored.specs)
        return {key: found[key] for key in self._order}

    @property
    def is_random(self) -> bool:
        """Whether a random part of any file is taken."""
        return any(field.decoder.is_random for field in self.files.values())

    @property
    def paths(self) -> Paths | None:
        """The files of the first field that has any."""
        by_key = {key: field.paths for key, field in self.files.items()}
        by_key |= {key: stored.paths for stored in self.stored for key in stored.specs}
        return next((by_key[key] for key in self._order if key in by_key), None)

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same with the numbers of other classes, in fields whose classes were found in the table."""
        changed = copy.copy(self)
        changed.labels = {
            key: field.with_classes(classes[key], self.entries.table) if key in classes else field
            for key, field in self.labels.items()
        }
        return changed

    def read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        """Read samples.

        Args:
            samples: int64, shape (n,).
            out: By batch key, shape (n, ...), to be overwritten; of all keys or some.
            keys: For what is drawn; uint64, shape (n,). None: the middle.

        Raises:
            SourceError: A file cannot be read; names row, id and path.
        """
        for key, label in self.labels.items():
            if key in out:
                label.read(samples, out[key])
        for stored in self.stored:
            wanted = {key: out[key] for key in stored.specs if key in out}
            if wanted:
                stored.read(samples, wanted)
        for key, file in self.files.items():
            if key in out:
                file.read(samples, out[key], keys)

    # -- what is made ready before it is read ------------------------------------------------------------------------

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Decode chunks of HDF5 files, or have files read ahead; whether there was anything to do."""
        useful = [stored.source.prepare(samples, decode=decode) for stored in self.stored]
        if decode is False:
            useful += [file.fetch(samples) for file in self.files.values()]
        return any(useful)

    @functools.cached_property
    def file_bytes(self) -> int:
        """Bytes of the files of one sample that are read as a whole: the mean of a few, spread over the table."""
        count = len(self.entries)
        samples = np.unique(np.linspace(0, count - 1, min(SIZED, count)).astype(np.int64))
        return int(sum(file.mean_bytes(samples) for file in self.files.values()))

    def held_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks."""
        return sum(stored.source.decoded_bytes(chunks) for stored in self.stored)

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks; what is returned takes it back."""
        whole = max(sum(stored.source.decodable_bytes for stored in self.stored), 1)
        return reserved(
            functools.partial(stored.source.reserve, chunks, cache_bytes * stored.source.decodable_bytes // whole)
            for stored in self.stored
        )

    # -- how samples lie ---------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> StorageLayout:
        """How rows of HDF5 files lie together, of the field with the largest chunks; and how all are read."""
        layouts = [stored.chunks for stored in self.stored]
        found = max(layouts, key=lambda layout: layout.rows, default=StorageLayout(reading="copied"))
        # Arrays are copied: two threads that open small files get in each other's way (14 to 12 thousand per second).
        readings: list[Reading] = [
            "decoded" if any(field.decoder.images for field in self.files.values()) else "copied"
        ]
        readings.extend(layout.reading for layout in layouts)
        return dataclasses.replace(found, reading=slowest(readings))

    @functools.cached_property
    def layout(self) -> StorageLayout:
        """As `chunks`; where nothing else lies together, files of one folder do."""
        found, paths = self.chunks, self.paths
        if found.runs or paths is None or self.stored:
            return found
        folders = paths.folders()
        order = np.argsort(folders, kind="stable")
        runs = tuple(ChunkRun(count, FOLDER_ROWS) for count in np.bincount(folders).tolist())
        return dataclasses.replace(found, runs=runs, order=None if (np.diff(order) == 1).all() else order)


# What the user calls what a table calls otherwise.
_CALLED = {"vocabulary": "classes", "columns": "name", "multi": "separator"}


def _labels(columns: Mapping[str, Column], table: Table, given: TableReader) -> tuple[Table, dict[str, Labels]]:
    """The values that stand in the table, and the rows of it that all of them leave."""
    while True:
        found = {key: _built(key, column, table) for key, column in columns.items()}
        dropped = [labels.dropped for labels in found.values()]
        if not any(rows.size for rows in dropped):
            return table, found
        # Lists in which a value is missing, and NaN: known only now. What they bring with them is gone too.
        table = _without(table, given, dropped)


def _built(key: str, column: Column, table: Table) -> Labels:
    try:
        return labels_of_column(column, table)
    except ConfigError as error:
        option, _, said = str(error).partition(": ")
        raise ConfigError(f"fields.{key}.{_CALLED.get(option, option)}: {said}") from None


def _cast(key: str, column: Column, labels: Labels, table: Table) -> LabelField:
    try:
        return LabelField.of(column, labels, table)
    except ConfigError as error:
        raise ConfigError(f"fields.{key}.{error}") from None


def _without(table: Table, given: TableReader, dropped: Sequence[Indices]) -> Table:
    """The table without some of its rows."""
    gone = np.zeros(len(table), np.bool_)
    for rows in dropped:
        gone[rows] = True
    if not gone.any():
        return table
    if gone.all():
        raise table.origin.error("null: drop leaves none of its rows")
    rows = np.flatnonzero(~gone)
    given.keep(rows)
    return table.taken(rows)
