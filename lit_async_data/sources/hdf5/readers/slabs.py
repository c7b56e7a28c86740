"""`SlabDecoder`: decodes a chunked dataset slab by slab, without libhdf5 or through it.

A *slab* is a range of rows that is decoded together: the chunks that share these rows.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.index.index import ChunkIndex
from lit_async_data.sources.hdf5.readers.base import h5py_rows
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, unshuffle
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.readahead import ReadAhead

Array = npt.NDArray[Any]
# Bytes of chunks that are unshuffled together. They fit into the L2 cache of a core.
PLANES_BYTES = 256 * 1024
# Smaller chunks are copied without releasing the GIL; see `_read_planes`.
COPY_BYTES = 64 * 1024


class IndexedSlabDecoder:
    """Finds chunks by an index and decodes them in the calling thread, without a lock."""

    reading: Reading = "decoded"

    def __init__(self, stored: StoredDataset, index: ChunkIndex, file: OpenFile) -> None:
        self._stored = stored
        self._index = index
        self._file = file
        self.rows = index.shape[stored.axis]
        self._ahead = ReadAhead(file)
        # Numbers of the chunks of slab 0, and the step to those of the next slab.
        places = np.indices([1 if axis == stored.axis else n for axis, n in enumerate(index.grid)])
        self._first = np.ravel_multi_index(tuple(places.reshape(len(index.grid), -1)), index.grid)
        self._stride = math.prod(index.grid[stored.axis + 1 :])
        # Whether one chunk makes a slab, with the layout it has in the batch.
        across = [n for axis, n in enumerate(index.grid) if axis != stored.axis]
        whole = [n for axis, n in enumerate(index.shape) if axis != stored.axis]
        self.plain = stored.axis == 0 and math.prod(across) == 1 and tuple(whole) == stored.spec.stored_shape
        self.thread_bytes = self._thread_bytes()

    def _thread_bytes(self) -> int:
        """Bytes for a stored chunk, for the results of its filters, and for the slab that chunks are copied to."""
        index, stored = self._index, self._stored
        chunk = math.prod(index.shape) * stored.dtype.itemsize
        slab = min(self.rows, stored.rows) * (stored.nbytes // stored.rows)
        steps = sum(each.number != FLETCHER32 for each in index.filters.filters)
        made = min(steps, 2) * chunk  # each step frees the input of the one before
        if self.rows == 1 and self.plain and index.filters.shuffle_itemsize > 1:
            made = chunk + 2 * max(chunk, PLANES_BYTES)
        elif not self.plain:
            made += slab
        if not stored.dtype.isnative:
            made = max(made, 2 * slab)
        return int(index.sizes.max()) + int(made)

    @property
    def cold(self) -> bool:
        return self._ahead.cold

    def fetch(self, numbers: Indices) -> bool:
        """Have the kernel read the chunks of slabs; returns whether some of them were not in memory."""
        chunks = (self._first + numbers[:, None] * self._stride).ravel()
        return self._ahead.fetch(self._index.offsets[chunks], self._index.sizes[chunks].astype(np.int64))

    def decode(self, number: int) -> Array:
        """A slab: an array of shape ``(n, *stored sample shape)`` in native byte order."""
        stored = self._stored
        count = min(self.rows, stored.rows - number * self.rows)
        if self.plain:
            values = self.chunk(number)
            # A view of few rows would keep the whole chunk in memory.
            return self._native(values if count == len(values) else values[:count].copy())
        slab = np.empty((count, *stored.spec.stored_shape), stored.dtype)
        axes = ([number] if axis == stored.axis else range(n) for axis, n in enumerate(self._index.grid))
        for place in itertools.product(*axes):
            spans = [
                slice(p * c, min((p + 1) * c, n))
                for p, c, n in zip(place, self._index.shape, stored.shape, strict=True)
            ]
            spans.pop(stored.axis)
            values = np.moveaxis(self.chunk(int(np.ravel_multi_index(place, self._index.grid))), stored.axis, 0)
            slab[(slice(None), *spans)] = values[(slice(count), *(slice(span.stop - span.start) for span in spans))]
        return self._native(slab)

    def chunk(self, number: int) -> Array:
        """The values of a chunk, as stored."""
        index, stored = self._index, self._stored
        offset, size = int(index.offsets[number]), int(index.sizes[number])
        if offset < 0:
            return np.full(index.shape, index.fill, stored.dtype)
        read, began = self._file.bytes_at(offset, size), time.perf_counter()
        try:
            data = index.filters.decode(read, int(index.masks[number]))
        except CorruptError as error:
            raise self._corrupt(number, error) from error
        CLOCK.decoded(time.perf_counter() - began, size, data.nbytes)
        return data.view(stored.dtype).reshape(index.shape)

    def read_chunks(self, numbers: Indices, where: Indices, out: Array) -> None:
        """Decode chunks of one sample each straight into places of a batch; ``numbers`` is as long as the batch."""
        index, began = self._index, time.perf_counter()
        target = out.view(np.uint8).reshape(len(out), -1)
        chosen = numbers[where]
        special = (index.offsets[chosen] < 0) | (index.masks[chosen] != 0)  # never written, or with skipped filters
        for place, number in zip(where[special].tolist(), chosen[special].tolist(), strict=True):
            target[place] = self.chunk(number).view(np.uint8).ravel()
        usual = where[~special]
        if index.filters.shuffle_itemsize > 1:
            self._read_planes(numbers[usual], usual, target)
        else:
            self._copy(numbers[usual], self._decode_usual, usual.tolist(), target)
        # Once for all of them: these chunks are single samples, and may be small.
        decoded = len(usual) * target.shape[1]
        CLOCK.decoded(time.perf_counter() - began, int(index.sizes[numbers[usual]].sum()), decoded)
        if self._stored.dtype.isnative:
            return
        if len(where) == len(out):
            out.byteswap(inplace=True)
        else:
            for place in where.tolist():  # not out[where], which copies the batch twice
                out[place : place + 1].byteswap(inplace=True)

    def _read_planes(self, chosen: Indices, where: Indices, target: Bytes) -> None:
        """Decode chunks, and unshuffle several of them at once.

        numpy releases the GIL for every copy, however short. If another thread takes it, this one must sleep and be
        woken, which takes longer than the copy. With four such copies per chunk of 16 KiB, two threads were no faster
        than one.
        """
        itemsize = self._index.filters.shuffle_itemsize
        together = max(PLANES_BYTES // target.shape[1], 1)
        planes = np.empty((min(together, len(chosen)), target.shape[1]), np.uint8)
        for first in range(0, len(chosen), together):
            places = where[first : first + together]
            self._copy(
                chosen[first : first + together], self._index.filters.decode_to_planes, range(len(places)), planes
            )
            decoded = planes[: len(places)].reshape(len(places), itemsize, -1)
            if places[-1] - places[0] == len(places) - 1:
                unshuffle(decoded, target[places[0] : places[-1] + 1])
            else:
                values = np.empty((len(places), target.shape[1]), np.uint8)
                unshuffle(decoded, values)
                target[places] = values

    def _copy(self, chosen: Indices, decode: Callable[[Bytes], Bytes], places: Sequence[int], target: Bytes) -> None:
        """Decode chunks into rows of an array of bytes."""
        index, nbytes = self._index, target.shape[1]
        small = nbytes < COPY_BYTES and target.flags.c_contiguous
        view = target.data.cast("B") if small else target.data
        stored = self._file.pieces(index.offsets[chosen].tolist(), index.sizes[chosen].tolist())
        for at, (place, data) in enumerate(zip(places, stored, strict=True)):
            try:
                decoded = decode(data)
            except CorruptError as error:
                raise self._corrupt(int(chosen[at]), error) from error
            if small:
                view[place * nbytes : (place + 1) * nbytes] = decoded.data
            else:
                target[place] = decoded

    def _decode_usual(self, data: Bytes) -> Bytes:
        return self._index.filters.decode(data, 0)

    def _native(self, values: Array) -> Array:
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))

    def _corrupt(self, number: int, error: CorruptError) -> CorruptError:
        index, stored = self._index, self._stored
        place = np.unravel_index(number, index.grid)
        corner = tuple(int(p) * c for p, c in zip(place, index.shape, strict=True))
        row, advice = corner[stored.axis], "restore the file, or copy what can be read of it"
        where = f"{stored}, chunk {corner}" if stored.names is None else f"{stored.at(row)}, chunk {corner[1:]}"
        what = f"{where} at byte {index.offsets[number]}: {error}; {advice}"
        return CorruptError(what, file=stored.path, dataset=stored.name, row=row)


class H5pySlabDecoder:
    """Decodes through h5py, under its lock: for filters that only libhdf5 knows."""

    reading: Reading = "locked"
    cold = False

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file
        self.rows = stored.chunk_rows
        # The values that libhdf5 returns, and its own buffer. Only one thread at a time decodes.
        self.thread_bytes = 2 * min(self.rows, stored.rows) * (stored.nbytes // stored.rows)

    def fetch(self, _numbers: Indices) -> bool:
        return False

    def decode(self, number: int) -> Array:
        first, began = number * self.rows, time.perf_counter()
        rows = h5py_rows(self._stored, self._file, first, min(first + self.rows, self._stored.rows), cached=False)
        CLOCK.decoded(time.perf_counter() - began, 0, rows.nbytes)  # libhdf5 reads and decodes in one call
        return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))


SlabDecoder = IndexedSlabDecoder | H5pySlabDecoder
