"""Readers of samples of variable length, and of encoded images."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import Reading
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.index.records import check_chunk_lengths
from lit_async_data.sources.hdf5.readers.base import Reader, checked_labels
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredSequences, of_row
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, in_group
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.global_heap import HEAD
from lit_async_data.sources.hdf5.storage.open_file import OpenFile, ReadAhead
from lit_async_data.sources.images.image import Shown
from lit_async_data.sources.local_files import retry_once

Array = npt.NDArray[Any]


class GroupsReader(Reader):
    """Reads datasets of many groups through h5py, under its lock."""

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        for place, row in enumerate(rows.tolist()):
            with as_source_errors(stored.at(row), "cannot be read", file=stored.path, dataset=stored.name, row=row):
                dataset = self._file.dataset(in_group(stored.name, stored.names, row), 0, kept=False)
                if dataset.chunks:
                    check_chunk_lengths(dataset, 0, 0, len(dataset))
                values = retry_once(functools.partial(dataset.__getitem__, ()))
            out[place] = checked_labels(values, stored, out.dtype, rows[place : place + 1])


class SequenceReader(Reader):
    """Reads sequences, padded with zeros; those in the global heap without a lock."""

    reading: Reading = "decoded"  # Python code follows each reference

    def __init__(self, sequences: StoredSequences, file: OpenFile) -> None:
        self._stored, self._file, self._ahead = sequences.rows, file, ReadAhead(file)
        self._sequences: Any = sequences
        if sequences.heap is None and sequences.rows.index is None:
            self.reading = "locked"  # by h5py

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        stored = self._stored
        if self._ahead.cold:
            self.fetch(rows, None)
        out[...] = 0
        began = time.perf_counter()
        for place, row in enumerate(rows.tolist()):
            try:
                values = self._values(row)
            except CorruptError as error:
                raise CorruptError(str(error), file=stored.path, dataset=stored.name, row=row) from error.__cause__
            out[place, : len(values)] = values
        CLOCK.decoded(time.perf_counter() - began, int(self._pieces(rows)[1].sum()), out.nbytes)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        return self._ahead.fetch(*self._pieces(rows))

    def _values(self, row: int) -> Array:
        reference, where = self._sequences.references[row].tolist(), self._stored.at(row)
        value: Array = self._sequences.heap.value(reference, self._file.bytes_at, where)
        return value.view(self._sequences.dtype)

    def _pieces(self, rows: Indices) -> tuple[Indices, Indices]:
        """Offsets and sizes of what is read."""
        lengths, addresses, _ = self._sequences.references[rows].T
        return addresses, lengths + 2 * HEAD


class GroupSequenceReader(SequenceReader):
    """Reads sequences of which each is a dataset in a group; without a lock if there is an index."""

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


# Bytes of rows that are read into a temporary block and decoded from there.
BLOCK_BYTES = 2**20
# How images begin whose last bytes may be zeros. Of the others, all zeros at the end of a row are padding: behind the
# bytes of a truncated JPEG, libjpeg would decode them.
MAY_END_IN_ZEROS = (b"BM", b"II", b"MM", b"RIFF")


class ImageReader(Reader):
    """Decodes images into a batch, without a lock."""

    reading: Reading = "decoded"

    def __init__(self, images: StoredImages, rows: Reader | None, file: OpenFile) -> None:
        self._images, self._stored = images, images.rows
        self._rows = rows  # None if images are read one by one
        self._padded = rows is not None and images.heap is None
        self._file, self._ahead = file, ReadAhead(file)
        self._block = max(BLOCK_BYTES // self._stored.shape[1], 1)

    def read(self, rows: Indices, out: Array, keys: Words | None = None, /) -> list[Shown]:
        images, decode_s, nbytes, shown = self._images, 0.0, 0, list[Shown]()
        drawn = images.decoder.draws(keys, len(rows))
        for first in range(0, len(rows), self._block):
            block = rows[first : first + self._block]
            bytes_of = self._bytes_of(block)
            for place, row in enumerate(block.tolist()):
                where = f"{self._stored}/{images.names[row]}" if images.names else self._stored.at(row)
                pixels = out[first + place]
                try:
                    data = self._image(bytes_of(place, where), row, where)
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

    def _image(self, stored: Bytes, row: int, where: str) -> bytes:
        """The bytes of an image, from those of its row."""
        lengths, end = self._images.lengths, len(stored)
        if lengths is not None:
            if not 0 <= lengths[row] <= end:
                what = f"its length is {lengths[row]}, but it has {end} bytes"
                raise CorruptError(f"{where}: {what}; correct the lengths")
            end = int(lengths[row])
        elif self._padded and not stored[:4].tobytes().startswith(MAY_END_IN_ZEROS):
            end = (stored != 0).tobytes().rfind(b"\1") + 1  # in a tenth of the time of bytes.rstrip
        return stored[:end].tobytes()

    def _bytes_of(self, rows: Indices) -> Callable[[int, str], Bytes]:
        """A function from the place of a row, and what errors call it, to its bytes."""
        heap = self._images.heap
        if self._ahead.cold and (heap is not None or self._rows is None):
            self.fetch(rows, None)
        if self._rows is None:
            return lambda place, where: self._alone(int(rows[place]), where)
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(rows, stored)
        if heap is None:
            return lambda place, _: stored[place]
        references = heap.references(stored).tolist()
        return lambda place, where: heap.value(references[place], self._file.bytes_at, where)

    def _alone(self, row: int, where: str) -> Bytes:
        stored, index, names = self._stored, self._stored.index, self._images.names
        if index is not None and index.offsets[row] >= 0:
            return self._file.bytes_at(int(index.offsets[row]), int(index.sizes[row]))
        with as_source_errors(where, "cannot be read", file=stored.path, dataset=stored.name):
            name = f"{stored.name}/{names[row]}" if names else stored.name  # in a group, too many to keep open
            if stored.names is not None:
                name, names = in_group(stored.name, stored.names, row), (stored.name,)
            value = self._file.dataset(name, 0, kept=not names)[() if names else row]
            return np.frombuffer(np.asarray(value).tobytes(), np.uint8)

    def fetch(self, rows: Indices, _: Indices | None, /) -> bool:
        index, heap = self._stored.index, self._images.heap
        if self._rows is None:
            return index is not None and self._ahead.fetch(index.offsets[rows], index.sizes[rows].astype(np.int64))
        cold = self._rows.fetch(rows, None)
        if heap is None:
            return cold
        stored = np.empty((len(rows), self._stored.shape[1]), np.uint8)
        self._rows.read(rows, stored)
        lengths, addresses, _ = heap.references(stored).T
        return self._ahead.fetch(addresses, lengths + 2 * HEAD) or cold

    def decode(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        if self._rows is not None:
            self._rows.decode(firsts, counts, chunk_group)
