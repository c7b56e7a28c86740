"""`RawReader`: copies rows that are stored as they are delivered, without libhdf5.

Reads contiguous values and chunks without filters, from a map of the file or, for large rows, by ``pread``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from lit_async_data.batch.spec import Bytes
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.readers.base import Reader, checked_labels, pieces
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.open_file import PREAD_BYTES, OpenFile
from lit_async_data.sources.hdf5.storage.readahead import ReadAhead

Array = npt.NDArray[Any]
# Pieces of this size and more are copied one by one, smaller ones by an index, this many bytes at a time. From 6 B to
# 128 KiB, this takes 0.4 to 0.9 of the time of torch's index_select, which a reader process would have to import.
_ONE_BY_ONE = 8192
_GATHERED_BYTES = 2**18
# Pieces of different sizes that have fewer bytes on average are copied row by row, in one call.
_ROW_BY_ROW = 2048


def is_raw(stored: StoredDataset) -> bool:
    """Whether each row of a dataset is contiguous in the file."""
    if stored.axis != 0:
        return False
    if stored.offset is not None:
        return True
    index = stored.index
    return index is not None and not index.filters.filters and index.shape[1:] == stored.shape[1:]


class RawReader(Reader):
    """Gathers rows from the file without the GIL and without the lock of libhdf5."""

    reading: Reading = "copied"

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file
        self._nbytes = stored.nbytes
        self._row_bytes = self._nbytes // stored.rows
        self._native = stored.dtype.newbyteorder("=")
        self._mapped = file.mapped and self._row_bytes < PREAD_BYTES
        # Rows that are contiguous: all of them, or those of a chunk.
        self._chunk_rows = stored.rows if stored.index is None else stored.index.shape[0]
        self._ahead = ReadAhead(file)

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        if self._ahead.cold:
            self.fetch(rows, None)
        stored = self._stored
        as_stored = out.dtype == self._native
        values = out if as_stored else np.empty((len(rows), *stored.spec.stored_shape), stored.dtype)
        self._gather(rows, values.view(np.uint8).reshape(len(rows), -1))
        if not as_stored:
            out[...] = checked_labels(values, stored, out.dtype, rows)  # delivered as int64
        elif not stored.dtype.isnative:
            out.byteswap(inplace=True)

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        if self._ahead.cold:
            self.fetch(firsts, counts)
        target = out.view(np.uint8).reshape(len(out), self._row_bytes)
        apart = not out.flags.c_contiguous
        cut = pieces(firsts, counts, self._chunk_rows)
        begins = self._offsets(cut.chunk * self._chunk_rows + cut.inside)
        uniform = len(begins) > 0 and bool((cut.rows == cut.rows[0]).all()) and bool((begins >= 0).all())
        if uniform and self._mapped and not apart:
            gather_windows(self._file.map(), begins, target.reshape(len(begins), -1))
        elif apart or (self._mapped and target.size < _ROW_BY_ROW * len(begins)):
            rows = np.repeat(cut.chunk * self._chunk_rows + cut.inside - cut.where, cut.rows) + np.arange(len(out))
            self._gather(rows, target)
        else:
            spans = zip(begins.tolist(), cut.where.tolist(), (cut.where + cut.rows).tolist(), strict=True)
            for begin, first, end in spans:
                self._read_piece(begin, target[first:end])
        if not self._stored.dtype.isnative:
            out.byteswap(inplace=True)

    def _read_piece(self, begin: int, out: Bytes) -> None:
        if begin < 0:
            out[...] = self._fill()
        elif self._mapped:
            out.reshape(-1)[...] = self._file.map()[begin : begin + out.size]
        else:
            self._file.read_at(begin, out.reshape(-1))

    def _fill(self) -> Bytes:
        stored = self._stored
        assert stored.index is not None
        return np.full(stored.shape[1:], stored.index.fill, stored.dtype).reshape(-1).view(np.uint8)

    def fetch(self, firsts: Indices, counts: Indices | None, /) -> bool:
        if counts is None:
            return self._ahead.fetch(self._offsets(firsts), self._row_bytes)
        cut = pieces(firsts, counts, self._chunk_rows)
        return self._ahead.fetch(self._offsets(cut.chunk * self._chunk_rows + cut.inside), cut.rows * self._row_bytes)

    def _offsets(self, rows: Indices) -> Indices:
        """Offset in the file of each row; -1 if it was never written."""
        stored, index = self._stored, self._stored.index
        if stored.offset is not None:
            return stored.offset + rows * self._row_bytes
        assert index is not None
        chunks, inside = np.divmod(rows, index.shape[0])
        begins = index.offsets[chunks]
        return np.where(begins < 0, -1, begins + inside * self._row_bytes)

    def _gather(self, rows: Indices, out: Bytes) -> None:
        stored = self._stored
        if stored.offset is not None and self._mapped and out.flags.c_contiguous:
            # As bytes, since numpy copies an unaligned table as a whole before it takes rows; and with mode="clip",
            # since "raise" gathers into a buffer first. The caller has checked the rows.
            table = self._file.map()[stored.offset : stored.offset + self._nbytes]
            table.reshape(stored.rows, -1).take(rows, axis=0, out=out, mode="clip")
            return
        offsets = self._offsets(rows)
        missing = offsets < 0
        if missing.any():
            out[missing] = self._fill()
            written = np.flatnonzero(~missing)
            values = np.empty((len(written), out.shape[1]), np.uint8)
            self._copy(offsets[written], values)
            out[written] = values
        else:
            self._copy(offsets, out)

    def _copy(self, offsets: Indices, out: Bytes) -> None:
        if self._mapped:
            gather_windows(self._file.map(), offsets, out)
            return
        for place, offset in enumerate(offsets.tolist()):
            self._file.read_at(offset, out[place])


def gather_windows(data: Bytes, offsets: Indices, out: Bytes) -> None:
    """Copy pieces of equal length from any offsets to the rows of a C-contiguous array of bytes."""
    if not out.size:
        return
    length = out.shape[1]
    if length >= _ONE_BY_ONE:
        for place, begin in enumerate(offsets.tolist()):
            out[place] = data[begin : begin + length]
        return
    # A table of overlapping rows. The index copies them to a temporary, which stays in the processor's cache.
    windows = as_strided(data, (len(data) - length + 1, length), (1, 1), writeable=False)
    step = _GATHERED_BYTES // length
    for first in range(0, len(offsets), step):
        out[first : first + step] = windows[offsets[first : first + step]]
