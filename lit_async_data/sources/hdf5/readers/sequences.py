"""`SequenceReader`: reads samples of variable length that lie in the global heap of a file."""

from __future__ import annotations

import time
from typing import Any

import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.sequences import StoredSequences
from lit_async_data.sources.hdf5.storage.global_heap import HEAD
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.readahead import ReadAhead

Array = npt.NDArray[Any]


class SequenceReader(Reader):
    """Reads sequences, padded with zeros, without a lock."""

    reading: Reading = "decoded"  # Python code follows each reference

    def __init__(self, sequences: StoredSequences, file: OpenFile) -> None:
        self._sequences, self._file, self._ahead = sequences, file, ReadAhead(file)

    def read(self, rows: Indices, out: Array) -> None:
        stored, heap, dtype = self._sequences.rows, self._sequences.heap, self._sequences.dtype
        if self._ahead.cold:
            self.fetch(rows)
        out[...] = 0
        began, references = time.perf_counter(), self._sequences.references[rows]
        for place, (row, reference) in enumerate(zip(rows.tolist(), references.tolist(), strict=True)):
            try:
                values = heap.value(reference, self._file.bytes_at, f"{stored}, row {row}").view(dtype)
            except CorruptError as error:
                raise CorruptError(str(error), file=stored.path, dataset=stored.name, row=row) from error.__cause__
            out[place, : len(values)] = values
        CLOCK.decoded(time.perf_counter() - began, int(references[:, 0].sum()), out.nbytes)

    def fetch(self, rows: Indices) -> bool:
        lengths, addresses, _ = self._sequences.references[rows].T
        self._ahead.fetch(addresses, lengths + 2 * HEAD)
        return self._ahead.cold
