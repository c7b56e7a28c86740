"""`FieldReader`: fields whose samples are windows of rows, or need a conversion. `MaskReader`: what is padding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.due import Turn
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.window_starts import Span

Array = npt.NDArray[Any]
# Bytes of values that are read into a temporary block and converted from there.
BLOCK_BYTES = 2**20


class FieldReader(Reader):
    """Reads a field whose samples are not stored rows as they are."""

    def __init__(self, field: StoredField, reader: Reader) -> None:
        self._field = field
        self._reader = reader
        self.reading = reader.reading

    def read(self, rows: Indices, out: Array) -> None:
        """Fill ``out`` with the samples at these anchors."""
        self._read_converted(rows, out)
        if self._field.pad == "zero":
            out[~real_rows(rows, self._field.span, self._field.stored.rows)] = 0

    def _read_converted(self, rows: Indices, out: Array) -> None:
        field = self._field
        if field.conversion is None:
            self._read(rows, out)
            return
        stored = field.stored.spec.stored_shape
        begin, end = field.span
        shape = (end - begin, *stored) if field.windowed else stored
        dtype = field.values.dtype.newbyteorder("=")
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

    def _read(self, rows: Indices, out: Array) -> None:
        field, begins = self._field, self._field.begins(rows)
        if not field.windowed:
            self._reader.read(begins, out)
            return
        short = field.length < out.shape[1]  # a part that is shorter than a window
        values = np.empty((len(rows), field.length, *out.shape[2:]), out.dtype) if short else out
        self._reader.read_ranges(begins, self._counts(rows), values.reshape(-1, *out.shape[2:]))
        wanted = rows + field.span[0]
        moved = np.arange(len(rows)) if short else np.flatnonzero(begins != wanted)
        if moved.size:
            inside = np.clip(wanted[moved, None] + np.arange(out.shape[1]), 0, field.stored.rows - 1)
            out[moved] = values[moved[:, None], inside - begins[moved, None]]

    def _counts(self, rows: Indices) -> Indices:
        return np.full(len(rows), self._field.length)

    def fetch(self, rows: Indices) -> bool:
        begins = self._field.begins(rows)
        if self._field.length == 1:
            return self._reader.fetch(begins)
        return self._reader.fetch_ranges(begins, self._counts(rows))

    def decode(self, rows: Indices, turn: Turn | None) -> None:
        begins = self._field.begins(rows)
        if self._field.length == 1:
            self._reader.decode(begins, turn)
        else:
            self._reader.decode_ranges(begins, self._counts(rows), turn)


class MaskReader(Reader):
    """Marks the rows of padded windows that are real."""

    reading = "copied"

    def __init__(self, span: Span, rows: int) -> None:
        self._span, self._rows = span, rows

    def read(self, rows: Indices, out: Array) -> None:
        out[...] = real_rows(rows, self._span, self._rows)


def real_rows(anchors: Indices, span: Span, rows: int) -> Array:
    """Which rows of windows lie in a part of so many rows; bool, shape (n, window)."""
    inside = anchors[:, None] + np.arange(*span)
    real: Array = (inside >= 0) & (inside < rows)
    return real
