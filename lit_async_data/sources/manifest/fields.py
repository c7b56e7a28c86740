"""`Fields`: everything that a table's samples are made of, and how it is read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.chunk_order import ChunkRun
from lit_async_data.errors import ConfigError, SourceError
from lit_async_data.permutation import Indices, Words
from lit_async_data.sources.base import ChunkLayout, Reading, Turn
from lit_async_data.sources.concat import READING
from lit_async_data.sources.manifest.column import FILES, Column, Kind
from lit_async_data.sources.manifest.decoders import decoder_of
from lit_async_data.sources.manifest.entries import Entries
from lit_async_data.sources.manifest.fetching import Fetching
from lit_async_data.sources.manifest.file_field import MOST_BYTES, FileField
from lit_async_data.sources.manifest.hdf5_fields import (
    HDF5Fields,
    More,
    alike,
    dataset_column,
    row_numbers,
    with_places,
    without_row,
)
from lit_async_data.sources.manifest.kinds import kind_of, left, without_path
from lit_async_data.sources.manifest.label_field import LabelField
from lit_async_data.sources.manifest.paths import Paths
from lit_async_data.sources.manifest.stored_file import Root
from lit_async_data.sources.manifest.table import Table
from lit_async_data.spec import FieldSpec

# Files of a folder that make a chunk of a shuffle by chunks.
FOLDER_ROWS = 256


class Fields:
    """What samples are made of. Safe to read from several threads.

    Args:
        columns: By batch key.
        table: With the columns of ``columns`` and of ids.
        more: Reads further columns.
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
        table: Table,
        more: More,
        root: Root,
        id: str | None,  # noqa: A002  # the user's word
    ) -> None:
        self._order = tuple(columns)
        kinds = {key: kind_of(key, column, table, root) for key, column in columns.items()}
        table = with_places({key: columns[key] for key, kind in kinds.items() if kind == "hdf5"}, table, more)
        self.labels = {key: _built(key, column, table) for key, column in columns.items() if kinds[key] not in FILES}
        dropped = [field.labels.dropped for field in self.labels.values()]
        dropped += [without_path(key, columns[key], table) for key, kind in kinds.items() if kind in FILES]
        dropped += [without_row(columns[key], table) for key, kind in kinds.items() if kind == "hdf5"]
        self.entries = Entries(table, left(table, dropped), id)
        self.fetching = Fetching()
        self.files = {
            key: self._file_field(columns[key], kind, root)
            for key, kind in kinds.items()
            if kind is not None and kind in ("image", "npy")
        }
        self.stored = [
            self._hdf5_fields(group, root)
            for group in alike({key: columns[key] for key, kind in kinds.items() if kind == "hdf5"}, table)
        ]

    def _file_field(self, column: Column, kind: Kind, root: Root) -> FileField:
        paths = Paths(self.entries, column.names[0], root)
        if kind == "image" and column.image.image_size is not None:
            return FileField(paths, decoder_of(kind, column.image, b"", ""), self.fetching)
        (path,) = paths.of(np.zeros(1, np.int64))
        try:
            data = self.fetching.read(root.checked(path), MOST_BYTES)
            decoder = decoder_of(kind, column.image, data, path)
        except SourceError as error:
            raise self.entries.blamed(error, 0, path) from error.__cause__
        return FileField(paths, decoder, self.fetching)

    def _hdf5_fields(self, columns: Mapping[str, Column], root: Root) -> HDF5Fields:
        first, table, rows = next(iter(columns.values())), self.entries.table, self.entries.rows
        paths = Paths(self.entries, first.names[0], root)
        places = row_numbers(first, table)
        named = dataset_column(first, table)
        datasets = None if named is None else table.coded(named, rows)
        return HDF5Fields(columns, paths, places if rows is None else places[rows], datasets)

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
    def draws(self) -> bool:
        """Whether a random part of any file is taken."""
        return any(field.decoder.draws for field in self.files.values())

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
            key: field.with_classes(classes[key])
            if key in classes and field.spec.classes and field.column.classes is None
            else field
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
        rows = self.entries.rows_of(samples)
        for key, label in self.labels.items():
            if key in out:
                label.read(rows, out[key])
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

    def held_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks."""
        return sum(stored.source.decoded_bytes(chunks) for stored in self.stored)

    def keep(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for both; what is returned takes it back."""
        whole = max(sum(stored.source.decodable_bytes for stored in self.stored), 1)
        with contextlib.ExitStack() as stack:  # what was made is given back if one fails
            stack.callback(self.fetching.keep())
            for stored in self.stored:
                share = cache_bytes * stored.source.decodable_bytes // whole
                stack.callback(stored.source.keep(chunks, share))
            return stack.pop_all().close

    # -- how samples lie ---------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> ChunkLayout:
        """How rows of HDF5 files lie together, of the field with the largest chunks; and how all are read."""
        layouts = [stored.chunks for stored in self.stored]
        found = max(layouts, key=lambda layout: layout.rows, default=ChunkLayout(reading="copied"))
        # Arrays are copied: two threads that open small files get in each other's way (14 to 12 thousand per second).
        readings: list[Reading] = [
            "decoded" if any(field.decoder.images for field in self.files.values()) else "copied"
        ]
        readings += [layout.reading for layout in layouts]
        return dataclasses.replace(found, reading=max(readings, key=READING.index))

    def layout(self) -> ChunkLayout:
        """As `chunks`; where nothing else lies together, files of one folder do."""
        found, paths = self.chunks, self.paths
        if found.runs or paths is None or self.stored:
            return found
        folders, _ = paths.grouped(os.path.dirname)
        order = np.argsort(folders, kind="stable")
        runs = tuple(ChunkRun(count, FOLDER_ROWS) for count in np.bincount(folders).tolist())
        return dataclasses.replace(found, runs=runs, order=None if (np.diff(order) == 1).all() else order)


# What the user calls what a table calls otherwise.
_CALLED = {"vocabulary": "classes", "columns": "name", "multi": "separator"}


def _built(key: str, column: Column, table: Table) -> LabelField:
    try:
        return LabelField.of(column, table)
    except ConfigError as error:
        option, _, said = str(error).partition(": ")
        raise ConfigError(f"fields.{key}.{_CALLED.get(option, option)}: {said}") from None
