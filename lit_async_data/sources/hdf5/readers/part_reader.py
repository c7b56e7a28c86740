"""`PartReader`: reads the samples of one part, each dataset by the fastest reader that reads it right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Reading, Turn
from lit_async_data.sources.hdf5.readers.bands import H5pyBands, IndexedBands
from lit_async_data.sources.hdf5.readers.base import H5pyReader, Reader, StridedReader
from lit_async_data.sources.hdf5.readers.chunk_cache import ByteBudget, DecodedChunkCache
from lit_async_data.sources.hdf5.readers.chunked import ChunkedReader
from lit_async_data.sources.hdf5.readers.ranged import LengthsReader, PaddedReader, SparseReader
from lit_async_data.sources.hdf5.readers.raw import RawReader, lies_raw
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.part import StoredPart
from lit_async_data.sources.hdf5.schema.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.window_starts import Span
from lit_async_data.sources.hdf5.storage.open_file import OpenFile

Array = npt.NDArray[Any]
# Bytes of values that are read aside and converted at a time.
BLOCK_BYTES = 2**20


class FieldReader(Reader):
    """Reads a field that is more than a row as it is stored.

    Args:
        field: The field.
        reader: Reads its rows.
    """

    def __init__(self, field: StoredField, reader: Reader) -> None:
        self._field = field
        self._reader = reader
        self.reading = reader.reading

    def read(self, rows: Indices, out: Array) -> None:
        """Fill ``out`` with the samples at these anchors."""
        field = self._field
        if field.conversion is None:
            self._read(rows, out)
            return
        stored = field.stored.spec.stored_shape
        shape = (field.span[1] - field.span[0], *stored) if field.windowed else stored
        dtype = field.values.dtype.newbyteorder("=")
        block = max(BLOCK_BYTES // max(math.prod(shape) * dtype.itemsize, 1), 1)
        values = np.empty((min(block, len(rows)), *shape), dtype)
        if len(rows) <= block:
            self._read(rows, values)
            out[...] = field.conversion(values, rows + field.span[0], out.dtype)
            return
        # In the order in which they lie, where they may share a chunk: it is then decoded once.
        order = None if self.reading == "copied" else np.argsort(rows, kind="stable")
        for first in range(0, len(rows), block):
            places = slice(first, first + block) if order is None else order[first : first + block]
            some = rows[places]
            self._read(some, values[: len(some)])
            out[places] = field.conversion(values[: len(some)], some + field.span[0], out.dtype)

    def _read(self, rows: Indices, out: Array) -> None:
        begin, end = self._field.span
        if self._field.windowed:
            counts = np.full(len(rows), end - begin)
            self._reader.read_ranges(rows + begin, counts, out.reshape(-1, *out.shape[2:]))
        else:
            self._reader.read(rows + begin if begin else rows, out)

    def prepare(self, rows: Indices, *, decode: Turn) -> bool:
        begin, end = self._field.span
        if end - begin == 1:
            return self._reader.prepare(rows + begin, decode=decode)
        return self._reader.prepare_ranges(rows + begin, np.full(len(rows), end - begin), decode=decode)


class PartReader:
    """Reads one part. Safe from several threads.

    Args:
        part: The part.
        file: Its file.
        recent: The bands decoded last, of all parts, by the name of the dataset.
        room: Room for bands that are kept for good.

    Attributes:
        datasets: The reader of each dataset; fields of the same one share it, so that it is decoded once.
        fields: The reader of each field.
    """

    def __init__(
        self, part: StoredPart, file: OpenFile, recent: Mapping[str, DecodedChunkCache], room: ByteBudget
    ) -> None:
        self._part = part
        self._file, self._recent, self._room = file, recent, room
        self.datasets: dict[str, Reader] = {}
        self.fields = {key: self._field_reader(field) for key, field in part.fields.items()}

    def read(self, samples: Indices, out: Mapping[str, Array]) -> None:
        """Fill arrays with samples, counted from the first of the part."""
        rows = self._part.anchors.rows(samples)
        for key, array in out.items():
            self.fields[key].read(rows, array)

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        rows = self._part.anchors.rows(samples)
        useful = [reader.prepare(rows, decode=decode) for reader in self.fields.values()]
        return any(useful)

    @property
    def reading(self) -> Iterator[Reading]:
        """How each field is read."""
        return (reader.reading for reader in self.fields.values())

    def spans(self) -> dict[str, Span | None]:
        """The rows around an anchor that are read of each dataset; None where it holds elements and not rows."""
        found: dict[str, Span | None] = {}
        for field in self._part.fields.values():
            if isinstance(field.stored, StoredRanges):
                found |= dict.fromkeys(map(self.name, field.datasets), None)
                continue
            name = self.name(field.stored)
            begin, end = found.get(name) or field.span
            found[name] = min(begin, field.span[0]), max(end, field.span[1])
        return found

    def forget(self) -> None:
        """Let go of decoded values that are kept for good."""
        for reader in self.datasets.values():
            reader.forget()

    def _field_reader(self, field: StoredField) -> Reader:
        stored = field.stored
        if field.lengths:
            assert isinstance(stored, StoredRanges)
            return LengthsReader(stored)
        if not isinstance(stored, StoredRanges):
            reader = self._dataset_reader(stored)
        elif stored.columns is None:
            reader = PaddedReader(stored, self._dataset_reader(stored.values))
        else:
            columns = self._dataset_reader(stored.columns)
            reader = SparseReader(stored, self._dataset_reader(stored.values), columns)
        return reader if field.plain else FieldReader(field, reader)

    def _dataset_reader(self, stored: StoredDataset) -> Reader:
        name = self.name(stored)
        if name not in self.datasets:
            self.datasets[name] = self._fastest(stored)
        return self.datasets[name]

    def name(self, stored: StoredDataset) -> str:
        """A dataset, the same in all groups, and its axis of rows: two fields may lay it out in two ways."""
        return f"{stored.name.strip('/').removeprefix(self._part.group.strip('/') + '/')} {stored.axis}"

    def _fastest(self, stored: StoredDataset) -> Reader:
        """The fastest reader that reads a dataset right."""
        recent = self._recent[self.name(stored)]
        if lies_raw(stored):
            return RawReader(stored, self._file)
        if stored.offset is not None and self._file.mapped:
            return StridedReader(stored, self._file)
        if stored.index is not None:
            return ChunkedReader(stored, IndexedBands(stored, stored.index, self._file), recent, self._room)
        if stored.filtered:
            return ChunkedReader(stored, H5pyBands(stored, self._file), recent, self._room)
        return H5pyReader(stored, self._file)
