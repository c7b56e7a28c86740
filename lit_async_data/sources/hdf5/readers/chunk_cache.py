"""Decoded slabs: the caches that keep them, and the reader that copies rows from them."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract.source import Reservation
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.readers.readers import Reader
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder, SlabDecoder
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.select import Pieces, Select, grouped
from lit_async_data.system import POLL_S, Gate

# Groups of chunks that have a number: the current group, the next, and earlier groups that slow workers still read.
GROUPS = 8

# Cached slabs: the number of a slab, its rows, and the places in the batch that need it. None at the end.
Cached = collections.deque[tuple[int, Array, Indices] | None]


class Room:
    """The bytes that loaders have reserved for slabs, and the lock of all slabs."""

    def __init__(self) -> None:
        # Garbage collection can close a loader, and give its room back, while its thread holds the lock.
        self.lock = threading.RLock()
        self.reserved: dict[object, tuple[Mapping[str, int], int]] = {}
        self.recent = collections.Counter[str]()  # by dataset
        self.kept = self.taken = 0  # bytes that kept slabs may take, and bytes that they take

    def count(self) -> None:
        counted: dict[object, tuple[Mapping[str, int], int]] = {object(): ({}, 0)}
        while counted != self.reserved:  # again, if garbage collection has given room back
            counted = dict(self.reserved)
            self.kept = sum(kept for _, kept in counted.values())
            self.recent = collections.Counter()
            for recent, _ in counted.values():
                self.recent.update(recent)


class ChunkCache:
    """The decoded slabs of a source: the latest of each dataset, and slabs that are kept for good. Thread-safe."""

    def __init__(self) -> None:
        self.room = Room()
        self._recent: dict[str, RecentSlabs] = {}
        self._kept: list[KeptSlabs] = []

    def recent(self, dataset: str) -> RecentSlabs:
        return self._recent.setdefault(dataset, RecentSlabs(dataset, self.room))

    def kept(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KeptSlabs:
        self._kept.append(KeptSlabs(samples, rows, shape, dtype, self.room))
        return self._kept[-1]

    def reserve(self, recent: Mapping[str, int], kept: int) -> Reservation:
        key = object()
        reservation = Reservation(functools.partial(self._give_back, key))
        self.room.reserved[key] = recent, kept
        with self.room.lock:
            self.room.count()
        return reservation

    def _give_back(self, key: object) -> None:
        room = self.room
        room.reserved.pop(key, None)
        with room.lock:
            room.count()
            for dataset, slabs in list(self._recent.items()):
                if not room.recent[dataset]:
                    slabs.clear()  # with less room, the next slab evicts others
            for table in self._kept if room.taken > room.kept else ():
                table.clear()

    def clear(self) -> None:
        with self.room.lock:
            for recent in self._recent.values():
                recent.clear()
            for kept in self._kept:
                kept.clear()


class _Held:
    """Slabs by key, each with the number of its group; and the keys of each group in the order of decoding."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, tuple[int, Array]] = {}
        self._by_group: dict[int, dict[Hashable, None]] = {}
        self._nbytes = 0

    def put(self, key: Hashable, slab: Array, group: int, room: int) -> None:
        """Assign a slab to a group. Evicts slabs of the earliest groups if there is no room."""
        self._remove(key)
        while self.slabs and self._nbytes + slab.nbytes > room >= slab.nbytes:
            self._remove(next(iter(self._by_group[min(self._by_group)])))
        if slab.nbytes <= room:
            self.slabs[key] = group, slab
            self._by_group.setdefault(group, {})[key] = None
            self._nbytes += slab.nbytes

    def _remove(self, key: Hashable) -> None:
        if (entry := self.slabs.pop(key, None)) is None:
            return
        group, slab = entry
        del self._by_group[group][key]
        if not self._by_group[group]:
            del self._by_group[group]
        self._nbytes -= slab.nbytes


class RecentSlabs:
    """The latest slabs of one dataset. Evicts slabs of the earliest group of chunks first. Thread-safe."""

    def __init__(self, dataset: str, room: Room) -> None:
        self._dataset, self._room, self._lock = dataset, room, room.lock
        self._held = _Held()
        self._groups: dict[ChunkGroup, int] = {}  # numbers of the latest groups, in order
        self._newest = 0
        self._decoding: dict[Hashable, Gate] = {}  # slabs that threads are decoding; the gate then opens

    def get(
        self, key: Hashable, decode: Callable[[], Array], *, wait: bool, chunk_group: ChunkGroup | None = None
    ) -> Array | None:
        """A slab, cached or decoded by this thread. Without ``wait``, None if another thread is decoding it."""
        own = None
        try:  # an interrupt must not leave a closed gate, for which other threads wait
            while True:
                with self._lock:
                    if (entry := self._held.slabs.get(key)) is not None:
                        return entry[1]
                    other = self._decoding.get(key)
                    if other is None:
                        own = self._decoding[key] = Gate()
                        break
                if not wait:
                    return None
                began = time.perf_counter()
                other.wait(POLL_S)
                CLOCK.add(cpu_s=time.perf_counter() - began)
            slab = decode()
            with self._lock:
                self._put(key, slab, self._group_number(chunk_group))
            return slab
        finally:
            if own is not None:
                self._decoding.pop(key, None)
                own.open()

    def cached(self, name: object, groups: Iterable[tuple[int, Indices]]) -> tuple[Cached, list[tuple[int, Indices]]]:
        """The cached slabs, and the numbers of missing slabs, each with the places that need it."""
        cached: Cached = collections.deque()
        others = []
        with self._lock:
            for number, where in groups:
                entry = self._held.slabs.get((name, number))
                if entry is None:
                    others.append((number, where))
                else:
                    cached.append((number, entry[1], where))
        cached.append(None)
        return cached, others

    def missing(self, name: object, numbers: Indices, chunk_group: ChunkGroup | None) -> Indices:
        """The slabs that are neither cached nor being decoded. Assigns cached slabs to the group, if there is one."""
        with self._lock:
            keys = [(name, number) for number in numbers.tolist()]
            group, slabs = self._group_number(chunk_group), self._held.slabs
            for key in keys if chunk_group else ():
                if key in slabs and slabs[key][0] != group:
                    self._put(key, slabs[key][1], group)
            return np.array([key[1] for key in keys if key not in slabs and key not in self._decoding], np.int64)

    def clear(self) -> None:
        """Drop all slabs. A thread that is changing them changes only the dropped ones."""
        self._held = _Held()

    def _put(self, key: Hashable, slab: Array, group: int) -> None:
        """Hold the lock."""
        try:
            self._held.put(key, slab, group, self._room.recent[self._dataset])
        except BaseException:
            self.clear()  # an interrupt may have left half of a change
            raise

    def _group_number(self, chunk_group: ChunkGroup | None) -> int:
        """The number of a group of chunks. None stands for the group that is being read: the one before the newest."""
        if chunk_group is None:
            return self._newest - 1
        if chunk_group not in self._groups:
            self._newest += 1
            self._groups = dict([*self._groups.items(), (chunk_group, self._newest)][-GROUPS:])
        return self._groups[chunk_group]


class KeptSlabs:
    """Slabs of a dataset of one file in one table of rows: the first slabs, as many as fit. Thread-safe."""

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: Room) -> None:
        self._rows, self._shape, self._dtype = rows, shape, dtype
        self._room, self._lock = room, room.lock
        self._slab_bytes = rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._slabs = -(-samples // rows)
        # The table of rows, and the place of each slab in it, -1 if absent. One attribute, so that no thread combines
        # an old table with new places while another clears and refills the cache.
        self._content: tuple[Array, Indices] | None = None
        self._next = 0  # place of the next slab

    @property
    def enabled(self) -> bool:
        return self._room.kept > 0

    def missing(self, numbers: Indices) -> Indices:
        found = self._found(numbers)
        return numbers if found is None else numbers[found[1] < 0]

    def slab(self, number: int) -> Array | None:
        """A slab, if cached. The last slab of a dataset may have extra rows at its end."""
        found = self._found(number)
        if found is None or found[1] < 0:
            return None
        return found[0][found[1] * self._rows : (found[1] + 1) * self._rows]

    def copy_rows(self, rows: Indices, out: Array) -> Indices:
        """Copy cached rows to their places in ``out``. Returns the places of other rows."""
        slabs, inside = np.divmod(rows, self._rows)
        found = self._found(slabs)
        if found is None:
            return np.arange(len(rows))
        table, places = found
        cached = places >= 0
        table_rows = places * self._rows + inside
        if cached.all() and out.dtype == self._dtype:
            table.take(table_rows, axis=0, out=out, mode="clip")
        elif cached.any():
            out[cached] = table[table_rows[cached]]
        return np.flatnonzero(~cached)

    def put(self, number: int, slab: Array) -> None:
        with self._lock:
            begin, content = self._next_row(number), self._content
        if begin is None or content is None:
            return
        table, place = content
        table[begin : begin + len(slab)] = slab  # without the lock, for which all readers wait
        with self._lock:
            if self._content is content:  # else it was cleared meanwhile
                place[number] = begin // self._rows

    def _next_row(self, number: int) -> int | None:
        """The first row of the table for a slab; None if the slab is in the table, or does not fit. Hold the lock."""
        most = min(self._slabs, self._room.kept // self._slab_bytes)
        if self._content is None or len(self._content[0]) == self._next * self._rows < most * self._rows:
            # If a table is full and another loader has added room, a larger table starts empty.
            self.clear()
            table = np.empty((most * self._rows, *self._shape), self._dtype)
            self._content = table, np.full(self._slabs, -1, np.int64)
        table, place = self._content
        begin = self._next * self._rows
        fits = self._room.taken + self._slab_bytes <= self._room.kept
        if place[number] >= 0 or begin >= len(table) or not fits:
            return None
        self._next += 1
        self._room.taken += self._slab_bytes
        return begin

    def clear(self) -> None:
        """Drop all slabs. Hold the lock."""
        self._room.taken -= self._next * self._slab_bytes
        self._content, self._next = None, 0

    def _found(self, numbers: Any) -> tuple[Array, Any] | None:
        # A processor such as ARM may show another thread the place of a slab before the slab itself. Without the GIL,
        # only a lock that both threads take prevents this.
        if (content := self._content) is None:
            return None
        with self._lock:
            return content[0], content[1][numbers]


ONE_BY_ONE = 4096  # rows of this many bytes and more are copied one by one; a fancy index would copy each twice


class ChunkedReader(Reader):
    def __init__(
        self, stored: StoredDataset, decoder: SlabDecoder, cache: ChunkCache, name: str, *, repeats: bool = False
    ) -> None:
        self.decoder = decoder
        self._native = native = stored.dtype.newbyteorder("=")
        rows = min(decoder.rows, stored.rows)
        self._recent = cache.recent(name)
        self._kept = cache.kept(stored.rows, rows, stored.spec.stored_shape, native)
        # A slab of one row is decoded straight into the batch, unless several samples or fields read the row.
        self._single_rows = decoder.rows == 1 and not repeats
        self._large = stored.nbytes // stored.rows >= ONE_BY_ONE
        self.rows = decoder.rows
        self.reading = decoder.reading
        slab_bytes = rows * stored.nbytes // stored.rows
        self.slab_bytes = 0 if self._single_rows else slab_bytes
        # A reader still holds the slab it copies from after the cache has evicted it.
        self.thread_bytes = decoder.thread_bytes + self.slab_bytes
        self.cacheable_bytes = -(-stored.rows // decoder.rows) * slab_bytes
        self._name = object()  # not the reader itself, which would make a reference cycle with the cache

    def read(self, select: Select, out: Array, _: Words | None = None, /) -> None:
        if select.counts is not None and not self._single_rows:
            self._read_ranges(select.pieces(self.rows), out)
            return
        rows = select.rows
        missing = self._kept.copy_rows(rows, out)
        if missing.size:
            self.read_places(rows, missing, out)

    def read_places(self, rows: Indices, missing: Indices, out: Array) -> None:
        """Fill the ``missing`` places of the batch, whose slabs are not kept for good."""
        if self._single_rows:
            self._read_single_rows(rows, missing, out)
            return
        groups = [(number, missing[where]) for number, where in grouped(rows[missing] // self.rows)]
        # One call for all cached slabs. They leave the queue one by one, so that this thread holds no evicted slab.
        cached, others = self._recent.cached(self._name, groups)
        for number, slab, where in itertools.chain(iter(cached.popleft, None), self._iter_slabs(others)):
            inside = rows[where] - number * self.rows
            if len(where) == 1:
                out[where[0]] = slab[inside[0]]
            elif self._large:
                for at, row in zip(where.tolist(), inside.tolist(), strict=True):
                    out[at] = slab[row]
            else:
                out[where] = slab[inside]
            del slab  # before the next slab is decoded

    def _read_ranges(self, cut: Pieces, out: Array) -> None:
        begins, ends, firsts_out = cut.inside, cut.inside + cut.rows, cut.where
        for _, slab, which in self._iter_slabs(grouped(cut.chunk)):
            for piece in which.tolist():
                begin, end, first = int(begins[piece]), int(ends[piece]), int(firsts_out[piece])
                out[first : first + end - begin] = slab[begin:end]
            del slab

    def _iter_slabs(self, slabs: list[tuple[int, Indices]]) -> Iterator[tuple[int, Array, Indices]]:
        left, postponed = collections.deque(slabs), 0
        while left:
            number, where = left.popleft()
            # Slabs that other threads are decoding come last: then this thread has nothing to do but wait.
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
            out[where] = self._decode(int(rows[where]))[0]

    def fetch(self, select: Select, /) -> bool:
        numbers = self._missing(select, None)
        return len(numbers) > 0 and self.decoder.fetch(numbers)

    def decode(self, select: Select, chunk_group: ChunkGroup | None, /) -> None:
        numbers = self._missing(select, chunk_group)
        if not len(numbers):
            return
        self.decoder.fetch(numbers)
        for number in numbers.tolist() if not self._single_rows else ():
            decode = functools.partial(self._decode, number)
            self._recent.get((self._name, number), decode, wait=False, chunk_group=chunk_group)

    def _missing(self, select: Select, chunk_group: ChunkGroup | None) -> Indices:
        """The slabs that are not cached. Cached slabs are assigned to the group."""
        return self._recent.missing(self._name, self._kept.missing(self._numbers(select)), chunk_group)

    def _numbers(self, select: Select) -> Indices:
        return select.chunks(self.rows)
