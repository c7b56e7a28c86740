"""Readers of patches: from contiguous values, through h5py, or from chunks, each of which is decoded by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import CorruptError
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.hdf5.index.index import ChunkIndex, check_chunk_lengths
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache, ChunkedReader
from lit_async_data.sources.hdf5.readers.readers import Reader, mapped
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder
from lit_async_data.sources.hdf5.schema.encoded import of_row
from lit_async_data.sources.hdf5.schema.patches import Box, StoredPatches
from lit_async_data.sources.hdf5.select import Select, grouped
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.local_files import retry_once


class PatchReader(Reader):
    """Patches of contiguous values from the map of the file, and others through h5py."""

    def __init__(self, patches: StoredPatches, file: OpenFile) -> None:
        self._patches, self._stored, self._file = patches, patches.values, file
        self._strided = self._stored.offset is not None and file.mapped and not file.remote
        self.reading = "copied" if self._strided else "locked"

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> None:
        patches = self._patches
        inside, table = out[_inside(patches)], mapped(self._stored, self._file) if self._strided else None
        for place, box in enumerate(patches.boxes(select.rows, keys)):
            inside[place] = self._by_h5py(box, int(select.rows[place])) if table is None else table[box]
        _pad(patches, out)

    def _by_h5py(self, box: Box, row: int) -> Array:
        stored, where = self._stored, f"{self._stored}, patch {row}"
        with as_source_errors(where, "cannot be read", file=stored.path, dataset=stored.name, row=row):
            dataset = self._file.dataset(stored.name, 8 * self._patches.spec.nbytes)
            if stored.filtered:
                check_chunk_lengths(dataset, enumerate(box), row=row)
            values: Array = retry_once(lambda: dataset[box])
        return values


class PointsReader(Reader):
    """Reads random points as ranges of rows."""

    def __init__(self, patches: StoredPatches, rows: Reader) -> None:
        self._patches, self._rows, self.reading = patches, rows, rows.reading

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> None:
        values = np.ascontiguousarray(out)  # a channel is not contiguous
        self._rows.read(self._patches.ranges(select.rows, keys), values.reshape(-1, *out.shape[2:]))
        if values is not out:
            out[...] = values


def _inside(patches: StoredPatches) -> Box:
    """The places in a batch that are read; the others are padding."""
    return (slice(None), *patches.stored(map(slice, patches.extent), slice(None)))


def _pad(patches: StoredPatches, out: Array) -> None:
    for axis, (size, n) in enumerate(patches.stored(zip(patches.size, patches.extent, strict=True), (0, 0)), 1):
        values = np.moveaxis(out, axis, 0)
        if n < size:
            values[n:] = values[n - 1] if patches.pad == "last" else 0


class ChunkedPatchReader(ChunkedReader):
    """Copies patches from the chunks that they touch."""

    def __init__(self, patches: StoredPatches, index: ChunkIndex, file: OpenFile, cache: ChunkCache, name: str) -> None:
        stored, self._patches, self._index, count = patches.values, patches, index, len(index.offsets)
        # Each chunk is a row, and is cached by its number.
        shape, spec = (count, *index.shape), FieldSpec(index.shape, stored.dtype.newbyteorder("="))
        rows = dataclasses.replace(stored, shape=shape, axis=0, spec=spec)
        chunks = dataclasses.replace(index, shape=(1, *index.shape), grid=(count, *(1 for _ in index.shape)))
        super().__init__(rows, IndexedSlabDecoder(rows, chunks, file, (stored, index)), cache, name)
        self._single_rows = False
        if not index.filters.filters:
            self.reading, self.cacheable_bytes = "copied", 0
            return
        if patches.decoding[0]:
            extents = patches.stored(patches.extent, stored.shape[patches.channel or 0])
            sizes = zip(extents, index.shape, index.grid, strict=True)
            touched = math.prod(min((n + c - 2) // c + 1, most) for n, c, most in sizes)
            # The chunks of a volume, or those that all of its patches can touch.
            self.slab_bytes = min(patches.rows * touched, count) * rows.nbytes // count
        self.thread_bytes += rows.nbytes // count

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> None:
        boxes, inside = self._patches.boxes(select.rows, keys), out[_inside(self._patches)]
        pieces = [(place, *piece) for place, box in enumerate(boxes) for piece in self._pieces(box)]
        numbers = np.array([number for _, number, _, _ in pieces])
        try:
            for _, chunk, which in self._iter_slabs(grouped(numbers)):
                for place, _, source, target in map(pieces.__getitem__, which.tolist()):
                    inside[place][target] = chunk[0][source]
                del chunk
        except CorruptError as error:
            place = pieces[int((numbers == error.row).argmax())][0]
            raise of_row(error, self._patches.values, int(select.rows[place])) from error.__cause__
        _pad(self._patches, out)

    def _pieces(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """The number of each chunk of a box, and the elements that both share, counted from the begin of each."""
        axes, step = list[list[tuple[int, slice, slice]]](), len(self._index.offsets)
        for span, n, chunks in zip(box, self._index.shape, self._index.grid, strict=True):
            step //= chunks
            places = range(span.start // n, (span.stop - 1) // n + 1)
            shared = [(place, max(span.start, place * n), min(span.stop, place * n + n)) for place in places]
            cut = [(k * step, slice(i - k * n, j - k * n), slice(i - span.start, j - span.start)) for k, i, j in shared]
            axes.append(cut)
        for along in itertools.product(*axes):
            numbers, source, target = zip(*along, strict=True)
            yield sum(numbers), source, target

    def _numbers(self, select: Select) -> Indices:
        known = self._patches.drawn is None  # else only when they are read
        boxes = self._patches.boxes(select.rows, None) if known else ()
        return distinct_of(np.array([number for box in boxes for number, _, _ in self._pieces(box)], np.int64))
