"""Readers of groups that stand for a dataset: sparse matrices made dense, padded samples, and their lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.order.due import Turn
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges

Array = npt.NDArray[Any]


class SparseReader(Reader):
    """Rows of a sparse matrix, made dense."""

    def __init__(self, stored: StoredRanges, values: Reader, columns: Reader) -> None:
        self._stored = stored
        self._values, self._columns = values, columns
        # Zeroing and scattering takes longer than copying the stored values, and mostly without the GIL.
        self.reading = "decoded" if "decoded" in (values.reading, columns.reading) else values.reading

    def read(self, rows: Indices, out: Array) -> None:
        stored = self._stored
        assert stored.columns is not None
        begins, counts = _ranges(stored, rows)
        values = np.empty(counts.sum(), stored.values.dtype.newbyteorder("="))
        columns = np.empty(len(values), stored.columns.dtype.newbyteorder("="))
        self._values.read_ranges(begins, counts, values)
        self._columns.read_ranges(begins, counts, columns)
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

    def fetch(self, rows: Indices) -> bool:
        begins, counts = _ranges(self._stored, rows)
        cold = [reader.fetch_ranges(begins, counts) for reader in (self._values, self._columns)]
        return any(cold)

    def decode(self, rows: Indices, turn: Turn | None) -> None:
        begins, counts = _ranges(self._stored, rows)
        for reader in (self._values, self._columns):
            reader.decode_ranges(begins, counts, turn)


class PaddedReader(Reader):
    """Samples of variable length, padded with zeros."""

    def __init__(self, stored: StoredRanges, values: Reader) -> None:
        self._stored = stored
        self._values = values
        self.reading = values.reading

    def read(self, rows: Indices, out: Array) -> None:
        begins, counts = _ranges(self._stored, rows)
        values = np.empty((counts.sum(), *out.shape[2:]), self._stored.values.dtype.newbyteorder("="))
        self._values.read_ranges(begins, counts, values)
        out[...] = 0
        out[np.arange(out.shape[1]) < counts[:, None]] = values

    def fetch(self, rows: Indices) -> bool:
        return self._values.fetch_ranges(*_ranges(self._stored, rows))

    def decode(self, rows: Indices, turn: Turn | None) -> None:
        self._values.decode_ranges(*_ranges(self._stored, rows), turn)


class LengthsReader(Reader):
    """Lengths of samples of variable length."""

    reading = "copied"

    def __init__(self, stored: StoredRanges) -> None:
        self._stored = stored

    def read(self, rows: Indices, out: Array) -> None:
        out[...] = _ranges(self._stored, rows)[1]


def _ranges(stored: StoredRanges, rows: Indices) -> tuple[Indices, Indices]:
    """The first element of each row, and its number of elements."""
    begins = stored.offsets[rows]
    return begins, stored.offsets[rows + 1] - begins
