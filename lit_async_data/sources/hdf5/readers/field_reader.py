"""`FieldReader`: reads fields whose samples are windows of rows, or need a conversion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Turn
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.stored_field import StoredField

Array = npt.NDArray[Any]
# Bytes of values that are read into a temporary block and converted from there.
BLOCK_BYTES = 2**20


class FieldReader(Reader):
    """Reads a field whose samples are not stored rows as they are.

    Args:
        field: The field.
        reader: Reads the rows of its dataset.
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
        # In storage order where rows may share a chunk, which is then decoded once.
        order = None if self.reading == "copied" else np.argsort(rows, kind="stable")
        for first in range(0, len(rows), block):
            places = slice(first, first + block) if order is None else order[first : first + block]
            block_rows = rows[places]
            self._read(block_rows, values[: len(block_rows)])
            out[places] = field.conversion(values[: len(block_rows)], block_rows + field.span[0], out.dtype)

    def _read(self, rows: Indices, out: Array) -> None:
        begin, end = self._field.span
        if self._field.windowed:
            counts = np.full(len(rows), end - begin)
            self._reader.read_ranges(rows + begin, counts, out.reshape(-1, *out.shape[2:]))
        else:
            self._reader.read(rows + begin if begin else rows, out)

    def fetch(self, rows: Indices) -> bool:
        begin, end = self._field.span
        if end - begin == 1:
            return self._reader.fetch(rows + begin)
        return self._reader.fetch_ranges(rows + begin, np.full(len(rows), end - begin))

    def decode_ahead(self, rows: Indices, turn: Turn | None) -> None:
        begin, end = self._field.span
        if end - begin == 1:
            self._reader.decode_ahead(rows + begin, turn)
        else:
            self._reader.decode_ranges_ahead(rows + begin, np.full(len(rows), end - begin), turn)
