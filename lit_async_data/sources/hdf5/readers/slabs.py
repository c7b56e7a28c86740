"""Reads rows of contiguous bytes, and decodes slabs: the chunks that share a range of rows."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import Reading
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.index.index import ChunkIndex
from lit_async_data.sources.hdf5.readers.readers import Reader, h5py_rows
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.select import Pieces, Select
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, unshuffle
from lit_async_data.sources.hdf5.storage.open_file import PREAD_BYTES, OpenFile

# Pieces of this size and more are copied one by one; smaller pieces by an index, so many bytes at a time.
_ONE_BY_ONE = 8192
_GATHERED_BYTES = 2**18
# Pieces of different sizes with fewer bytes on average are copied by rows, in one call.
_ROW_BY_ROW = 2048


def is_raw(stored: StoredDataset) -> bool:
    index = stored.index
    by_rows = index is not None and not index.filters.filters and index.shape[1:] == stored.shape[1:]
    return stored.axis == 0 and (by_rows or stored.offset is not None)


class RawReader(Reader):
    """Gathers rows from the file without the GIL and without the lock of libhdf5."""

    reading: Reading = "copied"

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file
        self._nbytes = stored.nbytes
        self._row_bytes = self._nbytes // stored.rows
        self._native = stored.dtype.newbyteorder("=")
        self._mapped = file.mapped and self._row_bytes < PREAD_BYTES
        # The number of contiguous rows: all rows, or the rows of a chunk.
        self._chunk_rows = stored.rows if stored.index is None else stored.index.shape[0]

    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        if select.counts is not None:
            self._read_ranges(select.pieces(self._chunk_rows), out)
            return
        stored, rows = self._stored, select.rows
        as_stored = out.dtype == self._native
        values = out if as_stored else np.empty((len(rows), *stored.spec.stored_shape), stored.dtype)
        self._gather(rows, values.view(np.uint8).reshape(len(rows), -1))
        if not as_stored:
            out[...] = values  # a cast to int64
        elif not stored.dtype.isnative:
            out.byteswap(inplace=True)

    def _read_ranges(self, cut: Pieces, out: Array) -> None:
        target = out.view(np.uint8).reshape(len(out), self._row_bytes)
        apart = not out.flags.c_contiguous
        begins = self._offsets(cut.chunk * self._chunk_rows + cut.inside)
        if self._file.remote:
            self._file.need(begins, cut.rows * self._row_bytes)
        uniform = len(begins) > 0 and bool((cut.rows == cut.rows[0]).all()) and bool((begins >= 0).all())
        if uniform and self._mapped and not apart:
            gather_windows(self._file.map(), begins, target.reshape(len(begins), -1))
        elif apart or (self._mapped and target.size < _ROW_BY_ROW * len(begins)):
            rows = np.repeat(cut.chunk * self._chunk_rows + cut.inside - cut.where, cut.rows) + np.arange(len(out))
            self._gather(rows, target)
        else:
            spans = zip(begins.tolist(), cut.where.tolist(), (cut.where + cut.rows).tolist(), strict=True)
            for begin, first, end in spans:
                piece = target[first:end]
                if begin < 0:
                    piece[...] = self._fill()
                elif self._mapped:
                    piece.reshape(-1)[...] = self._file.map()[begin : begin + piece.size]
                else:
                    self._file.read_at(begin, piece.reshape(-1))
        if not self._stored.dtype.isnative:
            out.byteswap(inplace=True)

    def _fill(self) -> Bytes:
        stored = self._stored
        assert stored.index is not None
        return np.full(stored.shape[1:], stored.index.fill, stored.dtype).reshape(-1).view(np.uint8)

    def fetch(self, select: Select, /) -> bool:
        if select.counts is None:
            return self._file.fetch(self._offsets(select.firsts), self._row_bytes)
        cut = select.pieces(self._chunk_rows)
        return self._file.fetch(self._offsets(cut.chunk * self._chunk_rows + cut.inside), cut.rows * self._row_bytes)

    def _offsets(self, rows: Indices) -> Indices:
        """The offset of each row in the file; -1 if its chunk was never written."""
        stored, index = self._stored, self._stored.index
        if stored.offset is not None:
            return stored.offset + rows * self._row_bytes
        assert index is not None
        chunks, inside = np.divmod(rows, index.shape[0])
        begins = index.offsets[chunks]
        return np.where(begins < 0, -1, begins + inside * self._row_bytes)

    def _gather(self, rows: Indices, out: Bytes) -> None:
        stored = self._stored
        if self._file.remote:
            self._file.need(self._offsets(rows), self._row_bytes)
        if stored.offset is not None and self._mapped and out.flags.c_contiguous:
            # As bytes, since numpy would copy an unaligned table; mode="clip", since "raise" gathers into a buffer.
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
    """Copy pieces of equal length to the rows of a C-contiguous array of bytes."""
    if not out.size:
        return
    length = out.shape[1]
    if length >= _ONE_BY_ONE:
        for place, begin in enumerate(offsets.tolist()):
            out[place] = data[begin : begin + length]
        return
    # A table of overlapping rows. The index copies rows to a temporary, which stays in the processor's cache.
    windows = as_strided(data, (len(data) - length + 1, length), (1, 1), writeable=False)
    step = _GATHERED_BYTES // length
    for first in range(0, len(offsets), step):
        out[first : first + step] = windows[offsets[first : first + step]]


# Bytes of chunks that are unshuffled together: they fit into the L2 cache of a core.
PLANES_BYTES = 256 * 1024
# Smaller chunks are copied without releasing the GIL; see `_read_planes`.
COPY_BYTES = 64 * 1024
Named = tuple[StoredDataset, ChunkIndex]  # the dataset and the chunks in messages


class IndexedSlabDecoder:
    """Decodes in the calling thread, without a lock."""

    reading: Reading = "decoded"

    def __init__(self, stored: StoredDataset, index: ChunkIndex, file: OpenFile, named: Named | None = None) -> None:
        self._stored, self._index, self._file, self._named = stored, index, file, named or (stored, index)
        self.rows = index.shape[stored.axis]
        # The numbers of the chunks of slab 0, and the step to the same chunk of the next slab.
        places = np.indices([1 if axis == stored.axis else n for axis, n in enumerate(index.grid)])
        self._first = np.ravel_multi_index(tuple(places.reshape(len(index.grid), -1)), index.grid)
        self._stride = math.prod(index.grid[stored.axis + 1 :])
        whole = math.prod(index.grid[1:]) == 1 and index.shape[1:] == stored.spec.stored_shape
        self.plain = stored.axis == 0 and whole  # whether a slab is one chunk, with the axes of the batch
        self.thread_bytes = self._thread_bytes()

    def _thread_bytes(self) -> int:
        """Bytes of a stored chunk, the results of its filters, and the slab that chunks are copied to."""
        index, stored = self._index, self._stored
        chunk = math.prod(index.shape) * stored.dtype.itemsize
        slab = min(self.rows, stored.rows) * (stored.nbytes // stored.rows)
        steps = sum(each.number != FLETCHER32 for each in index.filters.filters)
        made = min(steps, 2) * chunk  # each step frees the input of the step before
        if self.rows == 1 and self.plain and index.filters.shuffle_itemsize > 1:
            made = chunk + 2 * max(chunk, PLANES_BYTES)
        elif not self.plain:
            made += slab
        if not stored.dtype.isnative:
            made = max(made, 2 * slab)
        return int(index.sizes.max()) + int(made)

    def fetch(self, numbers: Indices) -> bool:
        chunks = (self._first + numbers[:, None] * self._stride).ravel()
        return self._file.fetch(self._index.offsets[chunks], self._index.sizes[chunks].astype(np.int64))

    def decode(self, number: int) -> Array:
        """A slab, in native byte order."""
        stored, native = self._stored, self._stored.dtype.newbyteorder("=")
        count = min(self.rows, stored.rows - number * self.rows)
        if self.plain:
            values = self.chunk(number)
            # A view of some rows would keep the whole chunk in memory.
            return (values if count == len(values) else values[:count].copy()).astype(native, copy=False)
        slab = np.empty((count, *stored.spec.stored_shape), stored.dtype)
        axes = ([number] if axis == stored.axis else range(n) for axis, n in enumerate(self._index.grid))
        for place in itertools.product(*axes):
            spans = [slice(p * c, p * c + c) for p, c in zip(place, self._index.shape, strict=True)]
            spans.pop(stored.axis)
            part = slab[(slice(None), *spans)]
            values = np.moveaxis(self.chunk(int(np.ravel_multi_index(place, self._index.grid))), stored.axis, 0)
            part[...] = values[tuple(map(slice, part.shape))]
        return slab.astype(native, copy=False)

    def chunk(self, number: int) -> Array:
        index, stored = self._index, self._stored
        offset, size = int(index.offsets[number]), int(index.sizes[number])
        if offset < 0:
            return np.full(index.shape, index.fill, stored.dtype)
        read, began = self._file.bytes_at(offset, size), time.perf_counter()
        try:
            data = index.filters.decode(read, int(index.masks[number]))
        except CorruptError as error:
            raise self._corrupt(number, error) from error
        CLOCK.add(decode_s=time.perf_counter() - began, stored=size, decoded=data.nbytes)
        return data.view(stored.dtype).reshape(index.shape)

    def read_chunks(self, numbers: Indices, where: Indices, out: Array) -> None:
        """Decode chunks of one sample each straight into places of a batch; ``numbers`` has the chunk of each place."""
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
            self._copy(numbers[usual], lambda data: index.filters.decode(data, 0), usual.tolist(), target)
        # Once for all chunks, which may be small.
        stored, decoded = int(index.sizes[numbers[usual]].sum()), len(usual) * target.shape[1]
        CLOCK.add(decode_s=time.perf_counter() - began, stored=stored, decoded=decoded)
        if self._stored.dtype.isnative:
            return
        if len(where) == len(out):
            out.byteswap(inplace=True)
        else:
            for place in where.tolist():  # not out[where], which copies the batch twice
                out[place : place + 1].byteswap(inplace=True)

    def _read_planes(self, chosen: Indices, where: Indices, target: Bytes) -> None:
        """Decode chunks, and unshuffle several in one call: numpy takes the GIL after each call."""
        itemsize = self._index.filters.shuffle_itemsize
        together = max(PLANES_BYTES // target.shape[1], 1)
        planes = np.empty((min(together, len(chosen)), target.shape[1]), np.uint8)
        for first in range(0, len(chosen), together):
            places, own = where[first : first + together], chosen[first : first + together]
            self._copy(own, self._index.filters.decode_to_planes, range(len(places)), planes)
            decoded = planes[: len(places)].reshape(len(places), itemsize, -1)
            if places[-1] - places[0] == len(places) - 1:
                unshuffle(decoded, target[places[0] : places[-1] + 1])
            else:
                values = np.empty((len(places), target.shape[1]), np.uint8)
                unshuffle(decoded, values)
                target[places] = values

    def _copy(self, chosen: Indices, decode: Callable[[Bytes], Bytes], places: Sequence[int], target: Bytes) -> None:
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

    def _corrupt(self, number: int, error: CorruptError) -> CorruptError:
        row = int(np.unravel_index(number, self._index.grid)[self._stored.axis]) * self.rows
        stored, index = self._named
        place = np.unravel_index(number, index.grid)
        corner = tuple(int(p) * c for p, c in zip(place, index.shape, strict=True))
        if stored.steps:
            corner = *corner[: stored.axis], *stored.steps.at(row), *corner[stored.axis + 1 :]
            row = stored.steps.row(row)
        where = f"{stored}, chunk {corner}" if stored.names is None else f"{stored.at(row)}, chunk {corner[1:]}"
        what = f"{where} at byte {index.offsets[number]}: {error}; restore the file, or copy what can be read of it"
        return CorruptError(what, file=stored.path, dataset=stored.dataset(row), row=row)


class H5pySlabDecoder:
    """Decodes through h5py, under its lock: for filters that only libhdf5 knows."""

    reading: Reading = "locked"

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file
        self.rows = stored.chunk_rows
        # The values that libhdf5 returns, and its own buffer. Only one thread at a time decodes.
        self.thread_bytes = 2 * min(self.rows, stored.rows) * (stored.nbytes // stored.rows)

    def fetch(self, _numbers: Indices) -> bool:
        return False

    def decode(self, number: int) -> Array:
        first, began = number * self.rows, time.perf_counter()
        rows = h5py_rows(self._stored, self._file, first, min(first + self.rows, self._stored.rows), cached=False)
        CLOCK.add(decode_s=time.perf_counter() - began, decoded=rows.nbytes)  # libhdf5 reads and decodes in one call
        return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))


SlabDecoder = IndexedSlabDecoder | H5pySlabDecoder
