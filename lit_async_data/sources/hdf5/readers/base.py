"""`Reader`: reading one stored dataset; those that need no index: by strides from a map of the file, and by h5py.

Readers are safe to call from several threads.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Reading, Turn
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.failures import FOREIGN, retried, source_error
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.short_chunks import refuse_short

Array = npt.NDArray[Any]


class Reader:
    """Reads rows of one dataset. The caller checks the file before and after.

    Attributes:
        reading: As in `StorageLayout`.
        rows: Samples that it reads together.
        band_bytes: Bytes of these, if they are held for the batches to come.
        decodable_bytes: Bytes of everything that it decodes.
        work_bytes: Bytes that a thread takes for itself while it decodes, beside what is held.
    """

    reading: Reading = "locked"
    rows = 1
    chunk_bytes = 0
    decodable_bytes = 0
    work_bytes = 0

    def read(self, rows: Indices, out: Array) -> None:
        """Fill ``out`` of shape ``(n, *stored_shape)`` with rows; int64, in range, in any order."""
        raise NotImplementedError

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        """Fill ``out`` of shape ``(counts.sum(), *stored_shape)`` with ranges of rows, one after the other.

        Args:
            firsts: First row of each; int64, shape (n,).
            counts: Rows of each, ≥ 0; likewise.
            out: To be filled.
        """
        ends = np.cumsum(counts)
        for first, count, end in zip(firsts.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if count:
                self.read(np.arange(first, first + count), out[end - count : end])

    def prepare(self, rows: Indices, *, decode: Turn) -> bool:
        """Do now what reading these rows will need; returns whether there was anything to do."""
        return self.prepare_ranges(rows, np.ones(len(rows), np.int64), decode=decode)

    def prepare_ranges(self, firsts: Indices, counts: Indices, *, decode: Turn) -> bool:  # noqa: ARG002
        return False

    def forget(self) -> None:
        """Let go of what is held."""


class StridedReader(Reader):
    """Copies samples out of values that lie in one piece, where samples are not counted by the first axis."""

    reading: Reading = "copied"

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file

    def read(self, rows: Indices, out: Array) -> None:
        stored = self._stored
        assert stored.offset is not None
        raw = self._file.map(at_random=False)[stored.offset : stored.offset + stored.nbytes]
        table = np.moveaxis(raw.view(stored.dtype).reshape(stored.shape), stored.axis, 0)
        for first, end, where in runs(rows):
            out[where] = labels(table[first:end], stored, out.dtype, np.arange(first, end))


class H5pyReader(Reader):
    """Reads rows one by one, or in slices where they follow each other, through h5py and under its lock.

    Never by its fancy selection, which is 2 to 30 times slower than rows.
    """

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file

    def read(self, rows: Indices, out: Array) -> None:
        for first, end, where in runs(rows):
            values = h5py_rows(self._stored, self._file, first, end)
            out[where] = labels(values, self._stored, out.dtype, np.arange(first, end))


def h5py_rows(stored: StoredDataset, file: OpenFile, first: int, end: int, *, cached: bool = True) -> Array:
    """Rows ``first`` to ``end - 1`` through h5py, the axis of samples first.

    Args:
        stored: The dataset.
        file: The file.
        first: The first row.
        end: One more than the last.
        cached: Whether libhdf5 shall hold chunks; not where they are read whole.

    Raises:
        CorruptError: libhdf5 cannot read them, or a chunk has too few bytes.
        SourceError: The system does not let it; says what to do.
    """
    try:
        dataset = file.dataset(stored.name, stored.chunk_rows * stored.spec.nbytes if cached else 0)
        if not cached:
            refuse_short(dataset, stored.axis, first, end)
        block = retried(lambda: dataset[(*(slice(None),) * stored.axis, slice(first, end))])
    except AsyncDataError:
        raise
    except FOREIGN as error:
        rows = f"row {first}" if end - first == 1 else f"rows {first} to {end - 1}"
        raise source_error(
            error, f"{stored}, {rows}", "cannot be read", file=stored.path, dataset=stored.name, row=first
        ) from error
    return np.moveaxis(block, stored.axis, 0)


def labels(values: Array, stored: StoredDataset, to: np.dtype[Any], rows: Indices) -> Array:
    """Values of these rows as they are, after a look at whether those of uint64 that are delivered as int64 can be."""
    if to == np.int64 and values.dtype.kind == "u" and int(values.max()) > np.iinfo(np.int64).max:
        row = int(rows[values.reshape(len(rows), -1).max(axis=1).argmax()])
        raise FormatError(
            f"{stored}, row {row}, holds the label {values.max()}, which no int64 holds",
            file=stored.path,
            dataset=stored.name,
            row=row,
        )
    return values


def runs(rows: Indices) -> list[tuple[int, int, Indices]]:
    """Rows as pieces that follow each other in storage, in storage order, each with its places in the batch.

    Storage order, so that a chunk which several rows share is decoded once.

    Example:
        >>> [(first, end, where.tolist()) for first, end, where in runs(np.array([7, 3, 8]))]
        [(3, 4, [1]), (7, 9, [0, 2])]
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [
        (int(ordered[begin]), int(ordered[end - 1]) + 1, order[begin:end]) for begin, end in itertools.pairwise(edges)
    ]
