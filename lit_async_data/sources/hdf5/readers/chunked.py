"""`ChunkedReader`: reading chunked datasets band by band; each that a batch touches is decoded once for it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Turn
from lit_async_data.sources.hdf5.readers.base import Reader, labels
from lit_async_data.sources.hdf5.readers.chunk_cache import ByteBudget, DecodedChunkCache, PersistentChunkCache
from lit_async_data.sources.hdf5.readers.ranges import pieces, touched
from lit_async_data.sources.hdf5.readers.slabs import Bands, IndexedBands
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset

Array = npt.NDArray[Any]
# Bytes of a row from which rows are copied one by one: taken together, each is copied twice. Of 64 chunks at a time,
# rows of 12 KiB then take 0.6 of the time.
ONE_BY_ONE = 4096


class ChunkedReader(Reader):
    """Takes rows from bands that are decoded when they are first wanted.

    Args:
        stored: The dataset.
        bands: Decodes them.
        recent: The bands decoded last, of all fields and files.
        room: Room for bands that are kept for good.
    """

    def __init__(self, stored: StoredDataset, bands: Bands, recent: DecodedChunkCache, room: ByteBudget) -> None:
        self.bands = bands
        self._stored = stored
        self._recent = recent
        native = stored.dtype.newbyteorder("=")
        rows = min(bands.rows, stored.rows)
        self._kept = PersistentChunkCache(stored.rows, rows, stored.spec.stored_shape, native, room)
        # Nobody else wants anything of a band of one row: it goes straight into the batch.
        self._alone = bands.rows == 1
        self._large = stored.nbytes // stored.rows >= ONE_BY_ONE
        self.rows = bands.rows
        self.reading = bands.reading
        chunk_bytes = rows * stored.nbytes // stored.rows
        self.chunk_bytes = 0 if self._alone else chunk_bytes
        # A band that is copied from stays with its reader, although others may have pushed it out of those held.
        self.work_bytes = bands.work_bytes + self.chunk_bytes
        self.decodable_bytes = -(-stored.rows // bands.rows) * chunk_bytes
        self._name = object()  # not the reader itself, which refers to the recent bands

    def read(self, rows: Indices, out: Array) -> None:
        """As `Reader.read`.

        Raises:
            CorruptError: A chunk does not decode to exactly its bytes; names the chunk.
        """
        missing = self._kept.taken(rows, out, lambda values, which: labels(values, self._stored, out.dtype, which))
        if missing is None:
            return
        if self.bands.cold:
            self.bands.fetch(np.unique(rows[missing] // self.rows))
        if self._alone:
            self._read_alone(rows, missing, out)
            return
        wanted = [(number, missing[where]) for number, where in _by_band(rows[missing] // self.rows)]
        for number, band, where in self._decoded(wanted):
            self._put(number, band, rows, out, where)
            del band  # before the next is decoded

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        if self._alone:
            super().read_ranges(firsts, counts, out)
            return
        cut = pieces(firsts, counts, self.rows)
        if self.bands.cold:
            self.bands.fetch(np.unique(cut.chunk))
        begins, ends, firsts_out = cut.inside, cut.inside + cut.rows, cut.where
        for number, band, which in self._decoded(_by_band(cut.chunk)):
            self._kept.put(number, band)
            for piece in which.tolist():
                begin, end, first = int(begins[piece]), int(ends[piece]), int(firsts_out[piece])
                out[first : first + end - begin] = band[begin:end]
            del band

    def _decoded(self, wanted: list[tuple[int, Indices]]) -> Iterator[tuple[int, Array, Indices]]:
        """Bands as they come to be there, with what each is wanted for."""
        left = collections.deque(wanted)
        postponed = 0
        while left:
            number, where = left.popleft()
            # What another thread is decoding is wanted last, when there is nothing else to do but wait for it.
            band = self._kept.band(number)
            if band is None:
                band = self._band(number, wait=postponed > len(left))
            if band is None:
                left.append((number, where))
                postponed += 1
                continue
            postponed = 0
            yield number, band, where
            del band

    def _read_alone(self, rows: Indices, missing: Indices, out: Array) -> None:
        native = self._stored.dtype.newbyteorder("=") == out.dtype
        if native and isinstance(self.bands, IndexedBands) and self.bands.plain:
            self.bands.read_chunks(rows, missing, out)
            for where in missing.tolist() if self._kept.wanted else ():
                self._kept.put(int(rows[where]), out[where : where + 1])
            return
        for where in missing.tolist():
            self._put(int(rows[where]), self.bands.decoded(int(rows[where])), rows, out, [where])

    def prepare(self, rows: Indices, *, decode: Turn) -> bool:
        """Have the kernel fetch these rows, and decode their bands, unless that has been done or is being done."""
        return self._prepare(np.unique(rows // self.rows), decode=decode)

    def prepare_ranges(self, firsts: Indices, counts: Indices, *, decode: Turn) -> bool:
        return self._prepare(touched(firsts, counts, self.rows), decode=decode)

    def _prepare(self, bands: Indices, *, decode: Turn) -> bool:
        numbers = self._recent.missing(self._name, self._kept.missing(bands), decode)
        if not len(numbers):
            return False
        self.bands.fetch(numbers)
        if not decode or self._alone:
            return self.bands.cold
        for number in numbers.tolist():
            self._band(number, wait=False, turn=decode)
        return True

    def forget(self) -> None:
        """Let go of what is kept for good; the recent bands are their owner's."""
        self._kept.clear()

    def _band(self, number: int, *, wait: bool, turn: Turn = False) -> Array | None:
        return self._recent.fetch((self._name, number), lambda: self.bands.decoded(number), wait=wait, turn=turn)

    def _put(self, number: int, band: Array, rows: Indices, out: Array, where: Any) -> None:
        self._kept.put(number, band)
        if len(where) == 1:
            at = int(where[0])
            inside = int(rows[at]) - number * self.rows
            out[at] = labels(band[inside : inside + 1], self._stored, out.dtype, rows[at : at + 1])[0]
        elif self._large and band.dtype == out.dtype:
            for at, inside in zip(where.tolist(), (rows[where] - number * self.rows).tolist(), strict=True):
                out[at] = band[inside]
        else:
            out[where] = labels(band[rows[where] - number * self.rows], self._stored, out.dtype, rows[where])


def _by_band(numbers: Indices) -> list[tuple[int, Indices]]:
    """Each of these bands once, with its places among them."""
    order = np.argsort(numbers, kind="stable")
    edges = [0, *(np.flatnonzero(np.diff(numbers[order])) + 1).tolist(), len(numbers)] if len(numbers) else [0]
    return [(int(numbers[order[begin]]), order[begin:end]) for begin, end in itertools.pairwise(edges)]
