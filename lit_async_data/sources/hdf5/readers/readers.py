"""`Reader`, which reads rows of a dataset; readers without slabs, and readers that convert the rows of others."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import Reading, slowest
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.index.index import check_chunk_lengths
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredRanges, StoredSequences, of_row
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
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

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        """Fill ``out`` of shape ``(n, *stored_shape)`` with rows: int64, in range, in any order.

        Each key selects the random crop of an image. Returns the parts that images show; None for other rows.
        """
        raise NotImplementedError

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        """Fill ``out`` of shape ``(counts.sum(), *stored_shape)`` with ranges of rows, one after the other."""
        ends = np.cumsum(counts)
        for first, count, end in zip(firsts.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if count:
                self.read(np.arange(first, first + count), out[end - count : end])

    def fetch(self, _firsts: Indices, _counts: Indices | None, /) -> bool:
        """Have the kernel read ranges, or single rows. Returns whether some were not in memory."""
        return False

    def decode(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        """Decode the chunks of ranges for a group of chunks, unless they are cached or being decoded."""


class FileReader(Reader):
    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file


class StridedReader(FileReader):
    reading: Reading = "copied"

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        assert stored.offset is not None
        if self._file.remote:
            self._file.need(*self._pieces(rows))
        raw = self._file.map(random_access=False)[stored.offset : stored.offset + stored.nbytes]
        table = np.moveaxis(raw.view(stored.dtype).reshape(stored.shape), stored.axis, 0)
        for first, end, where in runs(rows):
            out[where] = table[first:end]

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        return self._file.remote and self._file.fetch(*self._pieces(rows))

    def _pieces(self, rows: Indices) -> tuple[Indices, int]:
        """Where the values of single rows lie: a piece for each place on the axes before that of the samples."""
        stored = self._stored
        assert stored.offset is not None
        size = math.prod(stored.shape[stored.axis + 1 :]) * stored.dtype.itemsize
        places = np.arange(math.prod(stored.shape[: stored.axis]))[:, None] * stored.shape[stored.axis] + rows
        return stored.offset + places.ravel() * size, size


class KeptReader(Reader):
    reading: Reading = "copied"

    def __init__(self, values: Array) -> None:
        self._values = values

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        out[...] = self._values[rows] if len(self._values) > 1 else self._values


class H5pyReader(FileReader):
    """Reads runs of rows through h5py, whose fancy selection is 2 to 30 times slower than single rows."""

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        for first, end, where in runs(rows):
            out[where] = h5py_rows(self._stored, self._file, first, end)


def h5py_rows(stored: StoredDataset, file: OpenFile, first: int, end: int, *, cached: bool = True) -> Array:
    """Rows through h5py, samples on the first axis. With ``cached``, libhdf5 caches chunks."""
    where = f"{stored}, row {first}" if end - first == 1 else f"{stored}, rows {first} to {end - 1}"
    with as_source_errors(where, "cannot be read", file=stored.path, dataset=stored.name, row=first):
        dataset = file.dataset(stored.name, stored.chunk_rows * stored.spec.nbytes if cached else 0)
        if not cached:
            check_chunk_lengths(dataset, stored.axis, first, end)
        values: Any = dataset.astype(stored.member.record) if stored.member else dataset
        block = retry_once(lambda: values[(*(slice(None),) * stored.axis, slice(first, end))])
    if block.dtype.kind in "SV" and stored.dtype == np.uint8:  # encoded images, or compound values
        block = block.view(np.uint8).reshape(*block.shape, -1)
    return np.moveaxis(block, stored.axis, 0)


def runs(rows: Indices, step: int = 1) -> list[tuple[int, int, Indices]]:
    """Runs of consecutive rows, in storage order: the first row, the end, and the places in the batch."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered) != step) + 1).tolist(), len(rows)] if len(rows) else [0]
    return [
        (int(ordered[begin]), int(ordered[end - 1]) + 1, order[begin:end]) for begin, end in itertools.pairwise(edges)
    ]


def grouped(numbers: Indices) -> list[tuple[int, Indices]]:
    """The distinct numbers, ascending, each with its places."""
    return [(number, where) for number, _, where in runs(numbers, step=0)]


class Pieces(NamedTuple):
    """Pieces of ranges, each within one chunk; int64, shape (m,)."""

    chunk: Indices
    inside: Indices  # first row, counted from the start of the chunk
    rows: Indices
    where: Indices  # place of the first row in the output, in which ranges lie end to end


def pieces(firsts: Indices, counts: Indices, rows: int) -> Pieces:
    """Cut ranges at the borders of chunks of ``rows`` rows. Counts may be 0."""
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
    return distinct_of(firsts // rows if counts is None else pieces(firsts, counts, rows).chunk)


# Bytes of a temporary block, from which rows are converted, decoded or copied.
BLOCK_BYTES = 2**20


class FieldReader(Reader):
    def __init__(self, field: StoredField, reader: Reader) -> None:
        self._field, self._reader = field, reader
        self.reading = reader.reading
        # Whether rows are not read as ranges: there are gaps, or nothing to gain.
        self._one_by_one = field.length == 1 or field.step > 1 or field.images is not None

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown] | None:
        shown = None
        if self._field.images is None:
            self._read_converted(rows, out)
        else:
            shown = self._read(rows, out, keys)
        if self._field.pad == "zero":
            out[~real_rows(rows, self._field)] = 0
        if self._field.fill or self._field.left:
            self._pad(self._field.lengths_of(rows), out)
        return shown

    def _pad(self, lengths: Indices, out: Array) -> None:
        places = np.arange(out.shape[1])
        if not self._field.left:
            out[places >= lengths[:, None]] = self._field.fill
            return
        for row, length in zip(out, lengths.tolist(), strict=True):
            row[len(row) - length :] = row[:length]
        out[places < out.shape[1] - lengths[:, None]] = self._field.fill

    def _read_converted(self, rows: Indices, out: Array) -> None:
        field = self._field
        if field.conversion is None:
            self._read(rows, out)
            return
        stored = out.shape[1:] if field.spec.ragged or field.sequences else field.stored.spec.stored_shape
        begin, end = field.span
        shape = (len(range(begin, end, field.step)), *stored) if field.windowed else stored
        of = field.sequences or (field.stored.spec if isinstance(field.stored, StoredRanges) else field.stored)
        dtype = of.dtype.newbyteorder("=")
        block = max(BLOCK_BYTES // max(math.prod(shape) * dtype.itemsize, 1), 1)
        values = np.empty((min(block, len(rows)), *shape), dtype)
        # In storage order if rows may share a chunk, which is then decoded once.
        order = None if self.reading == "copied" or len(rows) <= block else np.argsort(rows, kind="stable")
        for first in range(0, len(rows), block):
            places = slice(first, first + block) if order is None else order[first : first + block]
            block_rows = rows[places]
            self._read(block_rows, values[: len(block_rows)])
            out[places] = field.conversion(values[: len(block_rows)], block_rows + begin, out.dtype)

    def _read(self, rows: Indices, out: Array, keys: Words | None = None) -> list[Shown] | None:
        field = self._field
        if self._one_by_one:
            wanted = field.window_rows(rows)
            every = None if keys is None else np.repeat(keys, wanted.shape[1])
            return self._reader.read(wanted.ravel(), out.reshape(-1, *out.shape[1 + field.windowed :]), every)
        begins, counts = field.begins(rows), np.full(len(rows), field.length)
        short = field.length < out.shape[1]  # a part that is shorter than a window
        values = np.empty((len(rows), field.length, *out.shape[2:]), out.dtype) if short else out
        self._reader.read_ranges(begins, counts, values.reshape(-1, *out.shape[2:]))
        wanted = rows + field.span[0]
        moved = np.arange(len(rows)) if short else np.flatnonzero(begins != wanted)
        if moved.size:
            inside = np.clip(wanted[moved, None] + np.arange(out.shape[1]), 0, field.stored.rows - 1)
            out[moved] = values[moved[:, None], inside - begins[moved, None]]
        return None

    def _ranges(self, rows: Indices) -> tuple[Indices, Indices | None]:
        if self._one_by_one:
            return self._field.window_rows(rows).ravel(), None
        return self._field.begins(rows), np.full(len(rows), self._field.length)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        return self._reader.fetch(*self._ranges(rows))

    def decode(self, rows: Indices, _: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        self._reader.decode(*self._ranges(rows), chunk_group)


class MaskReader(Reader):
    reading = "copied"

    def __init__(self, field: StoredField) -> None:
        self._field = field

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        out[...] = real_rows(rows, self._field)


def real_rows(anchors: Indices, field: StoredField) -> Array:
    """Whether rows of windows lie inside the part; bool, shape (n, window)."""
    inside = anchors[:, None] + np.arange(*(field.mask_of or field.span), field.step)
    real: Array = (inside >= 0) & (inside < field.stored.rows)
    return real


class RangesReader(Reader):
    def __init__(self, stored: StoredRanges, *elements: Reader) -> None:
        self._stored, self._elements = stored, elements
        self.reading = slowest(each.reading for each in elements)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        places = self._stored.places(rows)
        return any([reader.fetch(*places) for reader in self._elements])  # noqa: C419  # of every reader

    def decode(self, rows: Indices, _: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        for reader in self._elements:
            reader.decode(*self._stored.places(rows), chunk_group)


class SparseReader(RangesReader):
    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        assert stored.columns is not None
        begins, counts = stored.places(rows)
        values = np.empty(counts.sum(), stored.values.dtype.newbyteorder("="))
        columns = np.empty(len(values), stored.columns.dtype.newbyteorder("="))
        self._elements[0].read_ranges(begins, counts, values)
        self._elements[1].read_ranges(begins, counts, columns)
        width = stored.spec.shape[0]
        wrong = columns >= width if columns.dtype.kind == "u" else (columns < 0) | (columns >= width)
        if wrong.any():
            place = int(wrong.argmax())
            row = int(rows[np.searchsorted(np.cumsum(counts), place, side="right")])
            what = f"has a value in column {columns[place]} of {width}; write the file again"
            raise stored.error(CorruptError, what, row)
        out[...] = 0
        places = np.repeat(np.arange(len(rows)) * width, counts) + columns.astype(np.int64)
        # Added, not assigned: a column that is stored twice means the sum, as in scipy.
        np.add.at(out.reshape(-1), places, values.astype(out.dtype, copy=False))


class PaddedReader(RangesReader):
    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        begins, counts = self._stored.places(rows)
        stored = self._stored.values
        values = np.empty((counts.sum(), *stored.spec.stored_shape), stored.dtype.newbyteorder("="))
        self._elements[0].read_ranges(begins, counts, values)
        values = stored.member.of(values) if stored.member else values
        out[...] = 0
        out[np.arange(out.shape[1]) < counts[:, None]] = values


class GroupsReader(FileReader):
    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        for place, row in enumerate(rows.tolist()):
            name = stored.dataset(row)
            with as_source_errors(stored.at(row), "cannot be read", file=stored.path, dataset=name, row=row):
                dataset = self._file.dataset(name, 0, kept=False)
                if dataset.chunks:
                    check_chunk_lengths(dataset, 0, 0, len(dataset))
                out[place] = retry_once(functools.partial(dataset.__getitem__, ()))


class SequenceReader(Reader):
    """Reads sequences in the global heap, padded with zeros; without a lock."""

    reading: Reading = "decoded"  # Python code follows each reference

    def __init__(self, sequences: StoredSequences, file: OpenFile) -> None:
        self._stored, self._file = sequences.rows, file
        self._sequences: Any = sequences
        if sequences.heap is None and sequences.rows.index is None:
            self.reading = "locked"  # by h5py

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        out[...] = 0
        began = time.perf_counter()
        for place, row in enumerate(rows.tolist()):
            try:
                values = self._values(row)
            except CorruptError as error:
                raise of_row(error, stored, row) from error.__cause__
            out[place, : len(values)] = values
        CLOCK.decoded(time.perf_counter() - began, int(self._pieces(rows)[1].sum()), out.nbytes)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        return self._file.fetch(*self._pieces(rows))

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
            GroupsReader(self._stored, self._file).read(np.array([row]), values[None])
            return values
        shape = self._sequences.chunks[row].tolist()
        pipeline = FilterPipeline(index.filters.filters, math.prod(shape) * stored.itemsize)
        corners = itertools.product(*(range(0, n, c) for n, c in zip(values.shape, shape, strict=True)))
        for number, corner in enumerate(corners, first):
            offset, size, mask = (int(each[number]) for each in (index.offsets, index.sizes, index.masks))
            try:
                chunk = pipeline.decode(self._file.bytes_at(offset, size), mask).view(stored).reshape(shape)
            except CorruptError as error:
                where = f"{self._stored.at(row)}: chunk {corner} at byte {offset}"
                raise CorruptError(f"{where}: {error}; restore the file") from error
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
        self._images, self._stored = images, images.rows
        self._rows = rows  # None if images are read one by one
        self._padded = rows is not None and images.heap is None
        self._file = file
        self._block = max(BLOCK_BYTES // self._stored.shape[1], 1)

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown]:
        images, decode_s, nbytes, shown = self._images, 0.0, 0, list[Shown]()
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
        CLOCK.decoded(decode_s, nbytes, out.nbytes)
        return shown

    def _image(self, stored: Bytes, row: int) -> bytes:
        end = len(stored)
        if self._images.lengths is not None:
            end = int(self._images.lengths[row])
        elif self._padded and not stored[:4].tobytes().startswith(MAY_END_IN_ZEROS):
            end = (stored != 0).tobytes().rfind(b"\1") + 1  # in a tenth of the time of bytes.rstrip
        return stored[:end].tobytes()

    def _bytes_of(self, rows: Indices) -> Callable[[int, str], Bytes]:
        """A function that returns the bytes of a row, given its place in ``rows`` and its name in messages."""
        heap = self._images.heap
        if self._rows is None:
            return lambda place, where: self._alone(int(rows[place]), where)
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(rows, stored)
        if heap is None:
            return lambda place, _: stored[place]
        references = heap.references(stored).tolist()
        return lambda place, where: heap.value(references[place], self._file.bytes_at, where)

    def _alone(self, row: int, where: str) -> Bytes:
        stored, index = self._stored, self._stored.index
        if index is not None and index.offsets[row] >= 0:
            return self._file.bytes_at(int(index.offsets[row]), int(index.sizes[row]))
        with as_source_errors(where, "cannot be read", file=stored.path, dataset=stored.name):
            own = stored.names is not None  # a dataset per image: too many to keep open
            value = self._file.dataset(stored.dataset(row), 0, kept=not own)[() if own else row]
            return np.frombuffer(np.asarray(value).tobytes(), np.uint8)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        index, heap = self._stored.index, self._images.heap
        if self._rows is None:
            return index is not None and self._file.fetch(index.offsets[rows], index.sizes[rows].astype(np.int64))
        cold = self._rows.fetch(rows, None)
        if heap is None:
            return cold
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(rows, stored)
        return self._file.fetch(*heap.pieces(heap.references(stored), remote=self._file.remote)) or cold

    def decode(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        if self._rows is not None:
            self._rows.decode(firsts, counts, chunk_group)
