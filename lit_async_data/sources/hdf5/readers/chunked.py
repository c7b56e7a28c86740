"""`ChunkedReader`: reads chunked datasets slab by slab, and decodes each slab once per batch at most."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.hdf5.readers.base import Reader, checked_labels, pieces, touched
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder, SlabDecoder
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset

Array = npt.NDArray[Any]
# Rows of this size and more are copied one by one; a fancy index would copy each twice. With 64 chunks at a time, rows
# of 12 KiB then take 0.6 of the time.
ONE_BY_ONE = 4096


class ChunkedReader(Reader):
    """Copies rows from slabs, which it decodes on first use."""

    def __init__(self, stored: StoredDataset, decoder: SlabDecoder, cache: ChunkCache, name: str) -> None:
        self.decoder = decoder
        self._stored = stored
        self._native = native = stored.dtype.newbyteorder("=")
        rows = min(decoder.rows, stored.rows)
        self._recent = cache.recent(name)
        self._kept = cache.kept(stored.rows, rows, stored.spec.stored_shape, native)
        # A slab of one row is decoded straight into the batch: no other row needs it.
        self._single_rows = decoder.rows == 1
        self._large = stored.nbytes // stored.rows >= ONE_BY_ONE
        self.rows = decoder.rows
        self.reading = decoder.reading
        slab_bytes = rows * stored.nbytes // stored.rows
        self.slab_bytes = 0 if self._single_rows else slab_bytes
        # A reader still holds the slab it copies from after the cache has evicted it.
        self.thread_bytes = decoder.thread_bytes + self.slab_bytes
        self.cacheable_bytes = -(-stored.rows // decoder.rows) * slab_bytes
        self._name = object()  # not the reader itself, which would make a reference cycle with the cache

    def read(self, rows: Indices, out: Array, _: Words | None = None, /) -> None:
        missing = self._kept.copy_rows(
            rows, out, lambda values, which: checked_labels(values, self._stored, out.dtype, which)
        )
        if missing is not None:
            self.read_places(rows, missing, out)

    def read_places(self, rows: Indices, missing: Indices, out: Array) -> None:
        """Fill some places of the batch only, from slabs that are not kept for good."""
        if self.decoder.cold:
            self.decoder.fetch(distinct_of(rows[missing] // self.rows))
        if self._single_rows:
            self._read_single_rows(rows, missing, out)
            return
        same = self._native == out.dtype
        groups = [(number, missing[where]) for number, where in _group_by_slab(rows[missing] // self.rows)]
        # One call for all that are cached. They leave the queue one by one, so that this thread holds no evicted slab.
        cached, others = self._recent.cached(self._name, groups)
        for number, slab, where in itertools.chain(iter(cached.popleft, None), self._iter_slabs(others)):
            inside = rows[where] - number * self.rows
            if not same:
                out[where] = checked_labels(slab[inside], self._stored, out.dtype, rows[where])
            elif len(where) == 1:
                out[where[0]] = slab[inside[0]]
            elif self._large:
                for at, row in zip(where.tolist(), inside.tolist(), strict=True):
                    out[at] = slab[row]
            else:
                out[where] = slab[inside]
            del slab  # before the next one is decoded

    def read_ranges(self, firsts: Indices, counts: Indices, out: Array) -> None:
        if self._single_rows:
            super().read_ranges(firsts, counts, out)
            return
        cut = pieces(firsts, counts, self.rows)
        if self.decoder.cold:
            self.decoder.fetch(distinct_of(cut.chunk))
        begins, ends, firsts_out = cut.inside, cut.inside + cut.rows, cut.where
        for _, slab, which in self._iter_slabs(_group_by_slab(cut.chunk)):
            for piece in which.tolist():
                begin, end, first = int(begins[piece]), int(ends[piece]), int(firsts_out[piece])
                out[first : first + end - begin] = slab[begin:end]
            del slab

    def _iter_slabs(self, slabs: list[tuple[int, Indices]]) -> Iterator[tuple[int, Array, Indices]]:
        """Yields slabs in any order, each with the places that need it."""
        left = collections.deque(slabs)
        postponed = 0
        while left:
            number, where = left.popleft()
            # Slabs that other threads are decoding come last, when waiting is all that is left to do.
            slab = self._kept.slab(number) if self._kept.enabled else None
            if slab is None:
                decode = functools.partial(self._decode, number)
                slab = self._recent.get((self._name, number), decode, wait=postponed > len(left))
            if slab is None:
                left.append((number, where))
                postponed += 1
                continue
            postponed = 0
            yield number, slab, where
            del slab

    def _decode(self, number: int) -> Array:
        slab = self.decoder.decode(number)
        if self._kept.enabled:
            self._kept.put(number, slab)
        return slab

    def _read_single_rows(self, rows: Indices, missing: Indices, out: Array) -> None:
        if self._native == out.dtype and isinstance(self.decoder, IndexedSlabDecoder) and self.decoder.plain:
            self.decoder.read_chunks(rows, missing, out)
            for where in missing.tolist() if self._kept.enabled else ():
                self._kept.put(int(rows[where]), out[where : where + 1])
            return
        for where in missing.tolist():
            slab = self._decode(int(rows[where]))
            out[where] = checked_labels(slab, self._stored, out.dtype, rows[where : where + 1])[0]

    def fetch(self, firsts: Indices, counts: Indices | None, /) -> bool:
        numbers = self._missing(firsts, counts, None)
        return len(numbers) > 0 and self.decoder.fetch(numbers)

    def decode(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None, /) -> None:
        numbers = self._missing(firsts, counts, chunk_group)
        if not len(numbers):
            return
        self.decoder.fetch(numbers)
        for number in numbers.tolist() if not self._single_rows else ():
            decode = functools.partial(self._decode, number)
            self._recent.get((self._name, number), decode, wait=False, chunk_group=chunk_group)

    def _missing(self, firsts: Indices, counts: Indices | None, chunk_group: ChunkGroup | None) -> Indices:
        """The slabs of these rows that are not cached; the others are assigned to the group."""
        return self._recent.missing(self._name, self._kept.missing(touched(firsts, counts, self.rows)), chunk_group)


def _group_by_slab(numbers: Indices) -> list[tuple[int, Indices]]:
    """The distinct slab numbers, each with its places in ``numbers``."""
    order = np.argsort(numbers, kind="stable")
    edges = [0, *(np.flatnonzero(np.diff(numbers[order])) + 1).tolist(), len(numbers)] if len(numbers) else [0]
    return [(int(numbers[order[begin]]), order[begin:end]) for begin, end in itertools.pairwise(edges)]
