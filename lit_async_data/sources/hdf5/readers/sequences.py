"""Samples that are datasets of groups, or lie in the global heap of a file: `GroupsReader`, `SequenceReader`."""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.index.short_chunks import check_chunk_lengths
from lit_async_data.sources.hdf5.readers.base import Reader, checked_labels
from lit_async_data.sources.hdf5.schema.encoded import StoredSequences
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, in_group
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.global_heap import HEAD
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.readahead import ReadAhead
from lit_async_data.sources.local_files.retrying import retry_once

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
