"""Reading chunked datasets without libhdf5: raw bytes from a map of the file, decoded in the reader's own thread."""

from __future__ import annotations

import collections
import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.permutation import Indices
from lit_async_data.sources.hdf5.dataset import StoredDataset
from lit_async_data.sources.hdf5.index import ChunkIndex
from lit_async_data.sources.hdf5.readers import OpenFile, labels

Array = npt.NDArray[Any]
# Decoded chunks kept between reads, in bytes, or two chunks if those are larger: so that batches smaller than a chunk,
# read in order, decode it once. As much as h5py is given for the same purpose.
KEPT_BYTES = 16 * 2**20


class DecodedChunks:
    """The chunks decoded last. Safe from several threads; two that want the same at once may both decode it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._chunks: collections.OrderedDict[int, Array] = collections.OrderedDict()

    def get(self, number: int) -> Array | None:
        """A chunk, if it is there; it is then the newest."""
        with self._lock:
            if number in self._chunks:
                self._chunks.move_to_end(number)
            return self._chunks.get(number)

    def put(self, number: int, values: Array) -> None:
        """Keep a chunk; the oldest goes."""
        with self._lock:
            self._chunks[number] = values
            while len(self._chunks) > self._most:
                self._chunks.popitem(last=False)


class ChunkedReader:
    """Decodes each chunk that a batch touches once, and takes its rows.

    Args:
        stored: The dataset.
        index: Where its chunks lie.
        file: The file.
    """

    def __init__(self, stored: StoredDataset, index: ChunkIndex, file: OpenFile) -> None:
        self._stored = stored
        self._index = index
        self._file = file
        self._rows = index.shape[stored.axis]
        # A chunk of one row serves no other batch.
        self._decoded = DecodedChunks(max(2, KEPT_BYTES // index.filters.nbytes)) if self._rows > 1 else None

        # One sample per chunk, lying in it as it shall lie in the batch: each is decoded by itself, in few steps.
        self._single = stored.axis == 0 and self._rows == 1 and index.grid[1:] == (1,) * (len(index.grid) - 1)
        self._single &= index.shape[1:] == stored.shape[1:]

    def read(self, rows: Indices, out: Array) -> None:
        """As `Reader.read`.

        Raises:
            CorruptError: A chunk does not decode to exactly its bytes; names the chunk.
        """
        if self._single and out.dtype == self._stored.dtype.newbyteorder("="):
            self._read_singles(rows, out)
            return
        stacked = rows // self._rows
        order = np.argsort(stacked, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(stacked[order])) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(edges):
            where = order[begin:end]
            for place in self._places(int(stacked[where[0]])):
                self._take(place, rows[where] % self._rows, out, where)

    def _read_singles(self, rows: Indices, out: Array) -> None:
        index, file = self._index, self._file.map()
        target = out.view(np.uint8).reshape(len(rows), -1)
        found = zip(rows.tolist(), index.offsets[rows].tolist(), index.sizes[rows].tolist(), strict=True)
        for number, (row, offset, size) in enumerate(found):
            if offset < 0:
                target[number] = self._read(row).view(np.uint8).ravel()
                continue
            try:
                target[number] = index.filters.decoded(file[offset : offset + size], int(index.masks[row]))
            except CorruptError as error:
                raise self._corrupt(row, error) from error
        if not self._stored.dtype.isnative:
            out.byteswap(inplace=True)

    def _places(self, row: int) -> itertools.product[tuple[int, ...]]:
        """The places in the grid of the chunks that hold a row of chunks along the axis of samples."""
        axes = ([row] if axis == self._stored.axis else range(n) for axis, n in enumerate(self._index.grid))
        return itertools.product(*axes)

    def _take(self, place: tuple[int, ...], inside: Indices, out: Array, where: Indices) -> None:
        stored = self._stored
        spans: list[Any] = [
            slice(p * c, min((p + 1) * c, n)) for p, c, n in zip(place, self._index.shape, stored.shape, strict=True)
        ]
        spans.pop(stored.axis)
        values = np.moveaxis(self._chunk(place), stored.axis, 0)
        values = values[(slice(None), *(slice(span.stop - span.start) for span in spans))]
        if len(where) == 1:
            out[(int(where[0]), *spans)] = labels(values[int(inside[0])], stored)
        else:
            out[(where, *spans)] = labels(values[inside], stored)

    def _chunk(self, place: tuple[int, ...]) -> Array:
        index = self._index
        number = int(np.ravel_multi_index(place, index.grid))
        kept = None if self._decoded is None else self._decoded.get(number)
        if kept is not None:
            return kept
        values = self._read(number)
        if self._decoded is not None:
            self._decoded.put(number, values)
        return values

    def _read(self, number: int) -> Array:
        index, stored = self._index, self._stored
        offset, size = int(index.offsets[number]), int(index.sizes[number])
        if offset < 0:
            return np.full(index.shape, index.fill, stored.dtype)
        try:
            data = index.filters.decoded(self._file.map()[offset : offset + size], int(index.masks[number]))
        except CorruptError as error:
            raise self._corrupt(number, error) from error
        return data.view(stored.dtype).reshape(index.shape)

    def _corrupt(self, number: int, error: CorruptError) -> CorruptError:
        index, stored = self._index, self._stored
        place = np.unravel_index(number, index.grid)
        corner = tuple(int(p) * c for p, c in zip(place, index.shape, strict=True))
        return CorruptError(
            f"{stored}, chunk {corner} at byte {index.offsets[number]}: {error}; restore the file, or copy what can be "
            "read of it",
            file=stored.path,
            dataset=stored.name,
            row=corner[stored.axis],
        )
