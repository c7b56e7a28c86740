"""`Reader`, which reads rows of a dataset; readers without slabs, and readers that convert the rows of others."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract.source import Reading, slowest
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.index.index import check_chunk_lengths
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.categories import Conversion
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredRanges, StoredSequences, of_row
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.patches import StoredPatches
from lit_async_data.sources.hdf5.select import Select, runs
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.open_file import GlobalHeap, OpenFile
from lit_async_data.sources.images.image import Shown
from lit_async_data.sources.local_files import retry_once


class Reader:
    """Reads rows of one dataset. The caller checks the file before and after. Thread-safe.

    Attributes:
        reading: As in `StorageLayout`.
        rows: Number of rows that are decoded together.
        slab_bytes: Bytes of these rows, if they are cached for later batches; else 0.
        cacheable_bytes: Bytes of all rows that must be decoded.
        thread_bytes: Bytes that a thread needs while it decodes, beside the cache.
    """

    reading: Reading = "locked"
    rows = 1
    slab_bytes = 0
    cacheable_bytes = 0
    thread_bytes = 0

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        """Fill ``out`` of shape ``(rows, *stored_shape)`` with rows in any order, or with ranges, end to end.

        Each key selects the random crop of an image. Returns the parts that images show; None for other rows.
        """
        raise NotImplementedError

    def fetch(self, _select: Select, /) -> bool:
        """Have the kernel read rows. Returns whether some were not in memory."""
        return False

    def decode(self, select: Select, chunk_group: ChunkGroup | None, /) -> None:
        """Decode the chunks of rows for a group of chunks, unless they are cached or being decoded."""


class FileReader(Reader):
    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file


class StridedReader(FileReader):
    reading: Reading = "copied"

    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        if self._file.remote:
            self._file.need(*self._pieces(select.rows))
        table = np.moveaxis(mapped(stored, self._file), stored.axis, 0)
        for first, end, where in runs(select.rows):
            out[where] = table[first:end]

    def fetch(self, select: Select, /) -> bool:
        return self._file.remote and self._file.fetch(*self._pieces(select.rows))

    def _pieces(self, rows: Indices) -> tuple[Indices, int]:
        """Where the values of single rows lie: a piece for each place on the axes before that of the samples."""
        stored = self._stored
        assert stored.offset is not None
        size = math.prod(stored.shape[stored.axis + 1 :]) * stored.dtype.itemsize
        places = np.arange(math.prod(stored.shape[: stored.axis]))[:, None] * stored.shape[stored.axis] + rows
        return stored.offset + places.ravel() * size, size


def mapped(stored: StoredDataset, file: OpenFile) -> Array:
    """All values of a contiguous dataset, in the map of the file."""
    assert stored.offset is not None
    raw = file.map(random_access=False)[stored.offset : stored.offset + stored.nbytes]
    return raw.view(stored.dtype).reshape(stored.shape)


class KeptReader(Reader):
    """Values of rows that are in memory, or computed."""

    reading: Reading = "copied"

    def __init__(self, values_of: Callable[[Indices, Words | None], Array]) -> None:
        self._values_of = values_of

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> None:
        out[...] = self._values_of(select.rows, keys)


class H5pyReader(FileReader):
    """Reads runs of rows through h5py, whose fancy selection is 2 to 30 times slower than single rows."""

    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        rows, steps = select.rows, self._stored.steps
        apart = 0 if steps is None else rows // steps.chunk[1]  # so that no run leaves its place on the first axis
        for _first, _end, where in runs(rows + apart):
            out[where] = h5py_rows(self._stored, self._file, int(rows[where[0]]), int(rows[where[-1]]) + 1)


def h5py_rows(stored: StoredDataset, file: OpenFile, first: int, end: int, *, cached: bool = True) -> Array:
    """Rows through h5py, samples on the first axis. With ``cached``, libhdf5 caches chunks."""
    steps = stored.steps
    box: tuple[slice, ...] = steps.box(first, end) if steps else (slice(first, end),)
    row = steps.row(first) if steps else first
    where = stored.at(row) if steps or end - first == 1 else f"{stored}, rows {first} to {end - 1}"
    with as_source_errors(where, "cannot be read", file=stored.path, dataset=stored.name, row=row):
        dataset = file.dataset(stored.name, stored.chunk_rows * stored.spec.nbytes if cached else 0)
        if not cached:
            check_chunk_lengths(dataset, enumerate(box, stored.axis), stored.axis, row if steps else None)
        values: Any = dataset.astype(stored.member.record) if stored.member else dataset
        block = retry_once(lambda: values[(*(slice(None),) * stored.axis, *box)])
    if block.dtype.kind in "SV" and stored.dtype == np.uint8:  # encoded images, or compound values
        block = block.view(np.uint8).reshape(*block.shape, -1)
    if steps is None:
        return np.moveaxis(block, stored.axis, 0)
    found: Array = np.moveaxis(block, (stored.axis, stored.axis + 1), (0, 1))
    if found.shape[0] * found.shape[1] < end - first:  # of a chunk at an edge
        full = np.zeros((*steps.chunk, *found.shape[2:]), found.dtype)
        full[: found.shape[0], : found.shape[1]] = found
        found = full
    return found.reshape(-1, *found.shape[2:])


BLOCK_BYTES = 2**20  # of a temporary block, from which rows are converted, decoded or copied


class PlacedReader(Reader):
    """Reads rows by other readers, which have them at other ``places``."""

    def __init__(self, places: Callable[[Indices], Select], *readers: Reader) -> None:
        self._places, self._readers = places, readers
        self.reading = slowest(each.reading for each in readers)

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        return self._readers[0].read(self._places(select.rows), out, keys)

    def fetch(self, select: Select, /) -> bool:
        places = self._places(select.rows)
        return any([reader.fetch(places) for reader in self._readers])  # noqa: C419  # of every reader

    def decode(self, select: Select, chunk_group: ChunkGroup | None, /) -> None:
        places = self._places(select.rows)
        for reader in self._readers:
            reader.decode(places, chunk_group)


class FieldReader(PlacedReader):
    """Reads the windows around anchors, which its callers select as rows, and converts and pads their values."""

    def __init__(self, field: StoredField, reader: Reader) -> None:
        super().__init__(functools.partial(_window_rows, field), reader)
        self._field, self._window = field, field.window

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        field, anchors, shown = self._field, select.rows, None
        if field.conversion is None:
            shown = self._read(anchors, out, keys)
        else:
            self._read_converted(field.conversion, anchors, out, keys)
        if self._window.pad == "zero":
            out[~self._window.real(anchors)] = 0
        if isinstance(field.stored, StoredRanges | StoredSequences) and (field.fill or field.spec.padded == "left"):
            self._pad(field.stored.lengths[anchors], out)
        return shown

    def _pad(self, lengths: Indices, out: Array) -> None:
        places = np.arange(out.shape[1])
        if self._field.spec.padded == "left":
            places = places[::-1]
            for row, length in zip(out, lengths.tolist(), strict=True):
                row[len(row) - length :] = row[:length]
        out[places >= lengths[:, None]] = self._field.fill

    def _read_converted(self, conversion: Conversion, anchors: Indices, out: Array, keys: Words | None) -> None:
        field, window = self._field, self._window
        of: Any = field.values
        stored = of.spec.stored_shape
        if isinstance(field.stored, StoredRanges | StoredSequences | StoredPatches):
            of, stored = field.stored.spec, out.shape[1:]
        shape, dtype = (len(window.offsets), *stored) if window.axis else stored, of.dtype.newbyteorder("=")
        block = max(BLOCK_BYTES // max(math.prod(shape) * dtype.itemsize, 1), 1)
        values = np.empty((min(block, len(anchors)), *shape), dtype)
        # In storage order if rows may share a chunk, which is then decoded once.
        order = None if self.reading == "copied" or len(anchors) <= block else np.argsort(anchors, kind="stable")
        for first in range(0, len(anchors), block):
            places = slice(first, first + block) if order is None else order[first : first + block]
            own = anchors[places]
            self._read(own, values[: len(own)], None if keys is None else keys[places])
            rows = window.rows if window.axis else window.begins
            out[places] = conversion(values[: len(own)], functools.partial(rows, own), out.dtype)

    def _read(self, anchors: Indices, out: Array, keys: Words | None = None) -> list[Shown] | None:
        select, window = self._places(anchors), self._window
        values = out.reshape(-1, *out.shape[1 + window.axis :])
        shown = self._readers[0].read(select, values, None if keys is None else np.repeat(keys, len(window.offsets)))
        if select.counts is not None and window.pad:
            moved = np.flatnonzero(~window.real(anchors).all(axis=1))
            out[moved] = out[moved[:, None], window.rows(anchors[moved]) - select.firsts[moved, None]]
        return shown


def _window_rows(field: StoredField, anchors: Indices) -> Select:
    window = field.window
    if window.consecutive and 1 < window.length == len(window.offsets) and not field.images:
        return Select(window.begins(anchors), np.full(len(anchors), window.length))
    return Select(window.rows(anchors).ravel())


class RangesReader(PlacedReader):
    def __init__(self, stored: StoredRanges, *elements: Reader) -> None:
        super().__init__(stored.places, *elements)
        self._stored = stored


class SparseReader(RangesReader):
    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        assert stored.columns is not None
        places = stored.places(select.rows)
        counts: Any = places.counts
        values = np.empty(counts.sum(), stored.values.dtype.newbyteorder("="))
        columns = np.empty(len(values), stored.columns.dtype.newbyteorder("="))
        self._readers[0].read(places, values)
        self._readers[1].read(places, columns)
        width = stored.spec.shape[0]
        if (wrong := (columns < 0) | (columns >= width)).any():
            place = int(wrong.argmax())
            row = int(select.rows[np.searchsorted(np.cumsum(counts), place, side="right")])
            raise stored.error(CorruptError, f"has a value in column {columns[place]} of {width}; write it again", row)
        out[...] = 0
        cells = np.repeat(np.arange(len(counts)) * width, counts) + columns.astype(np.int64)
        # Added, not assigned: a column that is stored twice means the sum, as in scipy.
        np.add.at(out.reshape(-1), cells, values.astype(out.dtype, copy=False))


class PaddedReader(RangesReader):
    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        places, stored = self._stored.places(select.rows), self._stored.values
        counts: Any = places.counts
        values = np.empty((counts.sum(), *stored.spec.stored_shape), stored.dtype.newbyteorder("="))
        self._readers[0].read(places, values)
        values = stored.member.of(values) if stored.member else values
        out[...] = 0
        out[np.arange(out.shape[1]) < counts[:, None]] = values


class GroupsReader(FileReader):
    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        for place, row in enumerate(select.rows.tolist()):
            out[place] = dataset_of(self._stored, self._file, row)


def dataset_of(stored: StoredDataset, file: OpenFile, row: int, *, checked: bool = True) -> Any:
    """The values of a row that is a dataset, through h5py."""
    name = stored.dataset(row)
    with as_source_errors(stored.at(row), "cannot be read", file=stored.path, dataset=name, row=row):
        dataset = file.dataset(name, 0, kept=False)  # too many to keep open
        if checked and dataset.chunks:
            check_chunk_lengths(dataset)
        return retry_once(functools.partial(dataset.__getitem__, ()))


class SequenceReader(Reader):
    """Reads sequences in the global heap, padded with zeros; without a lock."""

    reading: Reading = "decoded"  # Python code follows each reference

    def __init__(self, sequences: StoredSequences, file: OpenFile) -> None:
        self._stored, self._file = sequences.values, file
        self._sequences: Any = sequences
        if sequences.heap is None and sequences.values.index is None:
            self.reading = "locked"  # by h5py

    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        stored, rows = self._stored, select.rows
        out[...] = 0
        began = time.perf_counter()
        for place, row in enumerate(rows.tolist()):
            try:
                values = self._values(row)
            except CorruptError as error:
                raise of_row(error, stored, row) from error.__cause__
            out[place, : len(values)] = values
        nbytes = int(self._pieces(rows)[1].sum())
        CLOCK.add(decode_s=time.perf_counter() - began, stored=nbytes, decoded=out.nbytes)

    def fetch(self, select: Select, /) -> bool:
        return self._file.fetch(*self._pieces(select.rows))

    def _values(self, row: int) -> Array:
        reference, where = self._sequences.references[row].tolist(), self._stored.at(row)
        value: Array = self._sequences.heap.value(reference, self._file.bytes_at, where)
        return value.view(self._sequences.dtype)

    def _pieces(self, rows: Indices) -> tuple[Indices, Indices]:
        heap: GlobalHeap = self._sequences.heap
        return heap.pieces(self._sequences.references[rows], remote=self._file.remote)


class GroupSequenceReader(SequenceReader):
    """Reads sequences that are datasets of groups; without a lock if there is an index."""

    def _values(self, row: int) -> Array:
        index, stored = self._stored.index, self._stored.dtype
        values = np.empty((self._sequences.lengths[row], *self._stored.shape[2:]), stored.newbyteorder("="))
        _, first, end = self._sequences.references[row].tolist()
        if index is None or (index.offsets[first:end] < 0).any():  # some were never written
            values[...] = dataset_of(self._stored, self._file, row)
            return values
        shape = self._sequences.chunks[row].tolist()
        pipeline = FilterPipeline(index.filters.filters, math.prod(shape) * stored.itemsize)
        corners = itertools.product(*(range(0, n, c) for n, c in zip(values.shape, shape, strict=True)))
        for number, corner in enumerate(corners, first):
            offset, size, mask = (int(each[number]) for each in (index.offsets, index.sizes, index.masks))
            try:
                chunk = pipeline.decode(self._file.bytes_at(offset, size), mask).view(stored).reshape(shape)
            except CorruptError as error:
                what = f"chunk {corner} at byte {offset}: {error}; restore the file"
                raise self._stored.error(CorruptError, what, row) from error
            part = values[tuple(slice(at, at + c) for at, c in zip(corner, shape, strict=True))]
            part[...] = chunk[tuple(map(slice, part.shape))]
        return values

    def _pieces(self, rows: Indices) -> tuple[Indices, Indices]:
        index, places = self._stored.index, self._sequences.references[rows, 1:].tolist()
        chunks = np.concatenate([np.arange(*place) for place in places])[: None if index else 0]
        return (chunks, chunks) if index is None else (index.offsets[chunks], index.sizes[chunks].astype(np.int64))


# The first bytes of formats whose images may end in zeros. In other formats, zeros at the end of a row are padding.
MAY_END_IN_ZEROS = (b"BM", b"II", b"MM", b"RIFF")


class ImageReader(Reader):
    reading: Reading = "decoded"

    def __init__(self, images: StoredImages, rows: Reader | None, file: OpenFile) -> None:
        self._images, self._stored = images, images.values
        self._rows = rows  # None if images are read one by one
        self._padded = rows is not None and images.heap is None
        self._file = file
        self._block = max(BLOCK_BYTES // self._stored.shape[1], 1)

    def read(self, select: Select, out: Array, keys: Words | None = None, /) -> list[Shown]:
        rows, images, decode_s, nbytes, shown = select.rows, self._images, 0.0, 0, list[Shown]()
        drawn = images.decoder.draws(keys, len(rows))
        for first in range(0, len(rows), self._block):
            block = rows[first : first + self._block]
            bytes_of = self._bytes_of(block)
            for place, row in enumerate(block.tolist()):
                where, pixels = self._stored.at(row), out[first + place]
                try:
                    data = self._image(bytes_of(place, where), row)
                    began = time.perf_counter()
                    shown.append(images.decoder.decode(data, pixels, drawn[first + place], where))
                except SourceError as error:
                    raise of_row(error, self._stored, row) from error.__cause__
                if images.swapped:
                    flat, step = pixels.reshape(-1), pixels.shape[-1]  # a fifth of the time of pixels[..., 2::-1]
                    flat[::step], flat[2::step] = flat[2::step].copy(), flat[::step].copy()
                decode_s += time.perf_counter() - began
                nbytes += len(data)
        CLOCK.add(decode_s=decode_s, stored=nbytes, decoded=out.nbytes)
        return shown

    def _image(self, stored: Bytes, row: int) -> bytes:
        end = len(stored)
        if self._images.ranges:
            end = int(self._images.ranges.lengths[row])
        elif self._padded and not stored[:4].tobytes().startswith(MAY_END_IN_ZEROS):
            end = (stored != 0).tobytes().rfind(b"\1") + 1  # in a tenth of the time of bytes.rstrip
        return stored[:end].tobytes()

    def _bytes_of(self, rows: Indices) -> Callable[[int, str], Bytes]:
        """A function that returns the bytes of a row, given its place in ``rows`` and its name in messages."""
        heap = self._images.heap
        if self._rows is None:
            return lambda place, _: self._alone(int(rows[place]))
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(Select(rows), stored)
        if heap is None:
            return lambda place, _: stored[place]
        references = heap.references(stored).tolist()
        return lambda place, where: heap.value(references[place], self._file.bytes_at, where)

    def _alone(self, row: int) -> Bytes:
        stored, index = self._stored, self._stored.index
        if index is not None and index.offsets[row] >= 0:
            return self._file.bytes_at(int(index.offsets[row]), int(index.sizes[row]))
        if stored.names is not None:
            value = dataset_of(stored, self._file, row, checked=False)  # a check can take as long as decoding one
        else:
            value = h5py_rows(stored, self._file, row, row + 1)[0]
        return np.frombuffer(np.asarray(value).tobytes(), np.uint8)

    def fetch(self, select: Select, /) -> bool:
        rows, index, heap = select.rows, self._stored.index, self._images.heap
        if self._rows is None:
            return index is not None and self._file.fetch(index.offsets[rows], index.sizes[rows].astype(np.int64))
        cold = self._rows.fetch(Select(rows))
        if heap is None:
            return cold
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(Select(rows), stored)
        return self._file.fetch(*heap.pieces(heap.references(stored), remote=self._file.remote)) or cold

    def decode(self, select: Select, chunk_group: ChunkGroup | None, /) -> None:
        if self._rows is not None:
            self._rows.decode(select, chunk_group)
