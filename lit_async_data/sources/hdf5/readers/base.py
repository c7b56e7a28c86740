"""`Reader`: reads rows of one dataset. Here those without an index: `StridedReader`, `KeptReader`, `H5pyReader`."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, FormatError
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import Reading
from lit_async_data.sources.hdf5.index.records import check_chunk_lengths
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, source_error
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.images.image import Shown
from lit_async_data.sources.local_files import retry_once

Array = npt.NDArray[Any]


class Reader:
    """Reads rows of one dataset. The caller checks the file before and after. Thread-safe.

    Attributes:
        reading: As in `StorageLayout`.
        rows: Rows that are decoded together.
        slab_bytes: Bytes of these rows, if they are cached for later batches; else 0.
        cacheable_bytes: Bytes of everything that must be decoded.
        thread_bytes: Bytes that a thread needs while it decodes, beside what is cached.
    """

    reading: Reading = "locked"
    rows = 1
    slab_bytes = 0
    cacheable_bytes = 0
    thread_bytes = 0

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        """Fill ``out`` of shape ``(n, *stored_shape)`` with rows; int64, in range, in any order.

        Of images that are cropped at random, each key selects the part. Returns what images show, None for others.
        """
        raise NotImplementedError

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        """Fill ``out`` of shape ``(counts.sum(), *stored_shape)`` with ranges of rows, one after the other.

        ``firsts`` and ``counts`` (≥ 0) are int64, shape (n,).
        """
        ends = np.cumsum(counts)
        for first, count, end in zip(firsts.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if count:
                self.read(np.arange(first, first + count), out[end - count : end])

    def fetch(self, _firsts: Indices, _counts: Indices | None, /) -> bool:
        """Have the kernel read ranges of rows from the disk; returns whether some of them were not in memory.

        Without counts, these are single rows.
        """
        return False

    def decode(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        """Decode the chunks of these ranges for a group of chunks, unless they are cached or being decoded."""


class StridedReader(Reader):
    """Copies samples out of contiguous values whose first axis does not count samples."""

    reading: Reading = "copied"

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        assert stored.offset is not None
        raw = self._file.map(random_access=False)[stored.offset : stored.offset + stored.nbytes]
        table = np.moveaxis(raw.view(stored.dtype).reshape(stored.shape), stored.axis, 0)
        for first, end, where in runs(rows):
            out[where] = checked_labels(table[first:end], stored, out.dtype, np.arange(first, end))


class KeptReader(Reader):
    """Copies values that are kept in memory: one for each row, or one for all."""

    reading: Reading = "copied"

    def __init__(self, values: Array) -> None:
        self._values = values

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        out[...] = self._values[rows] if len(self._values) > 1 else self._values


class H5pyReader(Reader):
    """Reads rows and slices of consecutive rows through h5py, under its lock.

    h5py's fancy selection is 2 to 30 times slower than single rows.
    """

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        for first, end, where in runs(rows):
            values = h5py_rows(self._stored, self._file, first, end)
            out[where] = checked_labels(values, self._stored, out.dtype, np.arange(first, end))


def h5py_rows(stored: StoredDataset, file: OpenFile, first: int, end: int, *, cached: bool = True) -> Array:
    """Rows ``first`` to ``end - 1`` through h5py, with the axis of samples first.

    With ``cached``, libhdf5 caches chunks; not needed if they are read as a whole.
    """
    try:
        dataset = file.dataset(stored.name, stored.chunk_rows * stored.spec.nbytes if cached else 0)
        if not cached:
            check_chunk_lengths(dataset, stored.axis, first, end)
        values: Any = dataset.astype(stored.member.record) if stored.member else dataset
        block = retry_once(lambda: values[(*(slice(None),) * stored.axis, slice(first, end))])
    except AsyncDataError:
        raise
    except LIBRARY_ERRORS as error:
        rows = f"row {first}" if end - first == 1 else f"rows {first} to {end - 1}"
        raise source_error(
            error, f"{stored}, {rows}", "cannot be read", file=stored.path, dataset=stored.name, row=first
        ) from error
    if block.dtype.kind in "SV" and stored.dtype == np.uint8:  # encoded images, or compound values
        block = block.view(np.uint8).reshape(*block.shape, -1)
    return np.moveaxis(block, stored.axis, 0)


def checked_labels(values: Array, stored: StoredDataset, to: np.dtype[Any], rows: Indices) -> Array:
    """Values of these rows, unchanged. Checks that uint64 values which are delivered as int64 fit."""
    if to == np.int64 and values.dtype.kind == "u" and int(values.max()) > np.iinfo(np.int64).max:
        row = int(rows[values.reshape(len(rows), -1).max(axis=1).argmax()])
        raise FormatError(
            f"{stored.at(row)}: holds the label {values.max()}, which int64 cannot hold; correct the file",
            file=stored.path,
            dataset=stored.name,
            row=row,
        )
    return values


def runs(rows: Indices) -> list[tuple[int, int, Indices]]:
    """Runs of consecutive rows, in storage order, each with its places in the batch.

    In storage order, a chunk that several rows share is decoded once.

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


class Pieces(NamedTuple):
    """Pieces of ranges, each within one chunk; int64, shape (m,)."""

    chunk: Indices
    inside: Indices  # first row, counted from the start of the chunk
    rows: Indices
    where: Indices  # first row among those of all ranges, one after the other


def pieces(firsts: Indices, counts: Indices, rows: int) -> Pieces:
    """Cut ranges at the borders of chunks of ``rows`` rows. Counts may be 0.

    Example:
        >>> [part.tolist() for part in pieces(np.array([3, 8]), np.array([4, 1]), rows=5)]
        [[0, 1, 1], [3, 0, 3], [2, 2, 1], [0, 2, 4]]
    """
    wheres = np.cumsum(counts) - counts
    there = counts > 0
    if not there.all():
        firsts, counts, wheres = firsts[there], counts[there], wheres[there]
    ends = firsts + counts
    low = firsts // rows
    each = (ends - 1) // rows - low + 1
    which = np.repeat(np.arange(len(firsts)), each)
    chunk = low[which] + np.arange(len(which)) - (np.cumsum(each) - each)[which]
    begin = np.maximum(firsts[which], chunk * rows)
    count = np.minimum(ends[which], (chunk + 1) * rows) - begin
    return Pieces(chunk, begin - chunk * rows, count, wheres[which] + begin - firsts[which])


def touched(firsts: Indices, counts: Indices | None, rows: int) -> Indices:
    """The distinct chunks, of this many rows, that ranges touch, or single rows."""
    return distinct_of(firsts // rows if counts is None else pieces(firsts, counts, rows).chunk)
