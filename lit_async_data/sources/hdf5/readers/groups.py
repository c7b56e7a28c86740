"""Fields that no dataset of rows holds: `KeptReader` for values in memory, `GroupsReader` for a dataset per sample."""

from __future__ import annotations

import functools
from typing import Any

import numpy.typing as npt

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.index.short_chunks import check_chunk_lengths
from lit_async_data.sources.hdf5.readers.base import Reader, checked_labels
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, in_group
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.local_files.retrying import retry_once

Array = npt.NDArray[Any]


class KeptReader(Reader):
    """Copies values that are kept in memory: one for each row, or one for all."""

    reading: Reading = "copied"

    def __init__(self, values: Array) -> None:
        self._values = values

    def read(self, rows: Indices, out: Array) -> None:
        out[...] = self._values[rows] if len(self._values) > 1 else self._values


class GroupsReader(Reader):
    """Reads datasets of many groups through h5py, under its lock."""

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored, self._file = stored, file

    def read(self, rows: Indices, out: Array) -> None:
        stored = self._stored
        for place, row in enumerate(rows.tolist()):
            with as_source_errors(stored.at(row), "cannot be read", file=stored.path, dataset=stored.name, row=row):
                dataset = self._file.dataset(in_group(stored.name, stored.names, row), 0, kept=False)
                if dataset.chunks:
                    check_chunk_lengths(dataset, 0, 0, len(dataset))
                values = retry_once(functools.partial(dataset.__getitem__, ()))
            out[place] = checked_labels(values, stored, out.dtype, rows[place : place + 1])
