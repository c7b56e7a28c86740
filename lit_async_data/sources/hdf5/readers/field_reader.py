"""`FieldReader`: fields whose samples are windows of rows, or need a conversion. `MaskReader`: what is padding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.images.image import Shown

Array = npt.NDArray[Any]
# Bytes of values that are read into a temporary block and converted from there.
BLOCK_BYTES = 2**20


class FieldReader(Reader):
    """Reads a field whose samples are not stored rows as they are."""

    def __init__(self, field: StoredField, reader: Reader) -> None:
        self._field = field
        self._reader = reader
        self.reading = reader.reading
        # Whether rows are not read as ranges: there are gaps, or nothing to gain.
        self._one_by_one = field.length == 1 or field.step > 1 or field.images is not None

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        shown = None
        if self._field.images is None:
            self._read_converted(rows, out)
        else:
            shown = self._read(rows, out, keys)
        if self._field.pad == "zero":
            out[~real_rows(rows, self._field)] = 0
        if self._field.fill or self._field.left:
            self._pad(self._field.lengths_of(rows), out)
        return shown

    def _pad(self, lengths: Indices, out: Array) -> None:
        places = np.arange(out.shape[1])
        if not self._field.left:
            out[places >= lengths[:, None]] = self._field.fill
            return
        for row, length in zip(out, lengths.tolist(), strict=True):
            row[len(row) - length :] = row[:length]
        out[places < out.shape[1] - lengths[:, None]] = self._field.fill

    def _read_converted(self, rows: Indices, out: Array) -> None:
        field = self._field
        if field.conversion is None:
            self._read(rows, out)
            return
        stored = out.shape[1:] if field.spec.ragged or field.sequences else field.stored.spec.stored_shape
        begin, end = field.span
        shape = (len(range(begin, end, field.step)), *stored) if field.windowed else stored
        dtype = (field.sequences or field.values).dtype.newbyteorder("=")
        block = max(BLOCK_BYTES // max(math.prod(shape) * dtype.itemsize, 1), 1)
        values = np.empty((min(block, len(rows)), *shape), dtype)
        if len(rows) <= block:
            self._read(rows, values)
            out[...] = field.conversion(values, rows + begin, out.dtype)
            return
        # In storage order where rows may share a chunk, which is then decoded once.
        order = None if self.reading == "copied" else np.argsort(rows, kind="stable")
        for first in range(0, len(rows), block):
            places = slice(first, first + block) if order is None else order[first : first + block]
            block_rows = rows[places]
            self._read(block_rows, values[: len(block_rows)])
            out[places] = field.conversion(values[: len(block_rows)], block_rows + begin, out.dtype)

    def _read(self, rows: Indices, out: Array, keys: Words | None = None) -> list[Shown] | None:
        field = self._field
        if self._one_by_one:
            wanted = field.window_rows(rows)
            every = None if keys is None else np.repeat(keys, wanted.shape[1])
            return self._reader.read(wanted.ravel(), out.reshape(-1, *out.shape[1 + field.windowed :]), every)
        begins, counts = field.begins(rows), np.full(len(rows), field.length)
        short = field.length < out.shape[1]  # a part that is shorter than a window
        values = np.empty((len(rows), field.length, *out.shape[2:]), out.dtype) if short else out
        self._reader.read_ranges(begins, counts, values.reshape(-1, *out.shape[2:]))
        wanted = rows + field.span[0]
        moved = np.arange(len(rows)) if short else np.flatnonzero(begins != wanted)
        if moved.size:
            inside = np.clip(wanted[moved, None] + np.arange(out.shape[1]), 0, field.stored.rows - 1)
            out[moved] = values[moved[:, None], inside - begins[moved, None]]
        return None

    def _ranges(self, rows: Indices) -> tuple[Indices, Indices | None]:
        """The rows that samples need: as ranges, or one by one."""
        if self._one_by_one:
            return self._field.window_rows(rows).ravel(), None
        return self._field.begins(rows), np.full(len(rows), self._field.length)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        return self._reader.fetch(*self._ranges(rows))

    def decode(self, rows: Indices, _: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        self._reader.decode(*self._ranges(rows), chunk_group)


class MaskReader(Reader):
    """Marks the rows of padded windows that are real."""

    reading = "copied"

    def __init__(self, field: StoredField) -> None:
        self._field = field

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        out[...] = real_rows(rows, self._field)


def real_rows(anchors: Indices, field: StoredField) -> Array:
    """Which rows of windows lie inside the part; bool, shape (n, window)."""
    inside = anchors[:, None] + np.arange(*(field.mask_of or field.span), field.step)
    real: Array = (inside >= 0) & (inside < field.stored.rows)
    return real


class RangesReader(Reader):
    """Reads samples that are ranges of elements."""

    def __init__(self, stored: StoredRanges, *elements: Reader) -> None:
        self._stored, self._elements = stored, elements
        self.reading = elements[0].reading

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        places = self._stored.places(rows)
        return any([reader.fetch(*places) for reader in self._elements])  # noqa: C419  # each of them

    def decode(self, rows: Indices, _: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        for reader in self._elements:
            reader.decode(*self._stored.places(rows), chunk_group)


class SparseReader(RangesReader):
    """Rows of a sparse matrix, made dense."""

    def __init__(self, stored: StoredRanges, values: Reader, columns: Reader) -> None:
        super().__init__(stored, values, columns)
        # Zeroing and scattering takes longer than copying the stored values, and mostly without the GIL.
        self.reading = "decoded" if "decoded" in (values.reading, columns.reading) else values.reading

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        assert stored.columns is not None
        begins, counts = stored.places(rows)
        values = np.empty(counts.sum(), stored.values.dtype.newbyteorder("="))
        columns = np.empty(len(values), stored.columns.dtype.newbyteorder("="))
        self._elements[0].read_ranges(begins, counts, values)
        self._elements[1].read_ranges(begins, counts, columns)
        width = stored.spec.shape[0]
        wrong = columns >= width if columns.dtype.kind == "u" else (columns < 0) | (columns >= width)
        if wrong.any():
            place = int(wrong.argmax())
            row = int(rows[np.searchsorted(np.cumsum(counts), place, side="right")])
            raise CorruptError(
                f"{stored}, row {row}: has a value in column {columns[place]} of {width}; write the file again",
                file=stored.path,
                dataset=stored.name,
                row=row,
            )
        out[...] = 0
        places = np.repeat(np.arange(len(rows)) * width, counts) + columns.astype(np.int64)
        # Added, not assigned: a column that is stored twice means the sum, as in scipy.
        np.add.at(out.reshape(-1), places, values.astype(out.dtype, copy=False))


class PaddedReader(RangesReader):
    """Samples of variable length, padded with zeros."""

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        begins, counts = self._stored.places(rows)
        values = np.empty((counts.sum(), *out.shape[2:]), self._stored.values.dtype.newbyteorder("="))
        self._elements[0].read_ranges(begins, counts, values)
        out[...] = 0
        out[np.arange(out.shape[1]) < counts[:, None]] = values
