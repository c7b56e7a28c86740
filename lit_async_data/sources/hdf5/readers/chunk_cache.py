"""`ChunkCache`: decoded slabs: a room for each dataset, and one for kept slabs; both are parts of ``memory_budget``.

A *slab* is a range of rows that is decoded together: the chunks that share these rows, as one array, rows first.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Reservation
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.system import POLL_S, Gate

Array = npt.NDArray[Any]
log = logging.getLogger(__name__)

# Groups of chunks that are distinguished: the current one, the next, and earlier ones that slow workers still read.
GROUPS = 8

# Cached slabs with their numbers and the places that need them; None at the end.
Cached = collections.deque[tuple[int, Array, Indices] | None]


class Room:
    """The bytes that loaders have reserved for slabs, and the lock of all slabs."""

    def __init__(self) -> None:
        # Garbage collection can close a loader, and give its room back, while its thread holds the lock.
        self.lock = threading.RLock()
        self.reserved: dict[object, tuple[Mapping[str, int], int]] = {}
        self.recent = collections.Counter[str]()  # by dataset
        self.kept = self.taken = 0  # bytes that kept slabs may take, and those that they take

    def count(self) -> None:
        counted: dict[object, tuple[Mapping[str, int], int]] = {object(): ({}, 0)}
        while counted != self.reserved:  # again, if garbage collection has given room back
            counted = dict(self.reserved)
            self.kept = sum(kept for _, kept in counted.values())
            self.recent = collections.Counter()
            for recent, _ in counted.values():
                self.recent.update(recent)


class ChunkCache:
    """The decoded slabs of a source. Thread-safe.

    * Each dataset has room for `RecentSlabs`, of which the oldest are evicted: so slabs of images evict none of labels.
    * All datasets share room for `KeptSlabs`, which stay. Any order that visits all samples once per epoch profits
      equally from every cached byte, while the least recently used slab is the one needed next.
    """

    def __init__(self) -> None:
        self.room = Room()
        self._recent: dict[str, RecentSlabs] = {}
        self._kept: list[KeptSlabs] = []

    def recent(self, dataset: str) -> RecentSlabs:
        """The recent slabs of a dataset, in all files."""
        return self._recent.setdefault(dataset, RecentSlabs(dataset, self.room))

    def kept(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KeptSlabs:
        """The kept slabs of a dataset of one file; see `KeptSlabs`."""
        self._kept.append(KeptSlabs(samples, rows, shape, dtype, self.room))
        return self._kept[-1]

    def reserve(self, recent: Mapping[str, int], kept: int) -> Reservation:
        """Add room for recent slabs of each dataset, and for kept ones."""
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
    """Slabs with the numbers of their groups, and the keys of each group in the order of decoding."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, tuple[int, Array]] = {}
        self._by_group: dict[int, dict[Hashable, None]] = {}
        self._nbytes = 0

    def put(self, key: Hashable, slab: Array, group: int, room: int) -> None:
        """Assign a slab to a group if there is room, in place of slabs of the earliest groups."""
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
    """Slabs of one dataset that were decoded last, each by one thread. Thread-safe.

    Evicts slabs of the earliest group of chunks first: a chunk shuffle deals from one group while the next is decoded,
    and earlier groups are used up. Within a group it evicts in the order of decoding, not of use. (By age alone, a slab
    that was decoded late would evict one that is still needed.)
    """

    def __init__(self, dataset: str, room: Room) -> None:
        self._dataset, self._room, self._lock = dataset, room, room.lock
        self._held = _Held()
        self._groups: dict[ChunkGroup, int] = {}  # numbers of the latest ones, in order
        self._newest = 0
        self._decoding: dict[Hashable, Gate] = {}  # slabs that threads are decoding; the gate opens at the end

    def get(
        self, key: Hashable, decode: Callable[[], Array], *, wait: bool, chunk_group: ChunkGroup | None = None
    ) -> Array | None:
        """A slab, decoded now for a group of chunks, and without a lock, if it is not cached.

        None if another thread is decoding it and ``wait`` is false. The group is None if the slab is read at once, or
        the order has none.
        """
        own = None
        try:  # from here on, so that no interrupt leaves a gate that others wait for
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
                CLOCK.waited_for_others(time.perf_counter() - began)
            slab = decode()
            with self._lock:
                self._put(key, slab, self._group_number(chunk_group))
            return slab
        finally:
            if own is not None:
                self._decoding.pop(key, None)
                own.open()

    def cached(self, name: object, groups: Iterable[tuple[int, Indices]]) -> tuple[Cached, list[tuple[int, Indices]]]:
        """Look up slabs by their numbers, each with the places that need it; returns the cached ones and the others."""
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
        """The slabs that are neither cached nor being decoded. Assigns the cached ones to the group, if any."""
        with self._lock:
            keys = [(name, number) for number in numbers.tolist()]
            group, slabs = self._group_number(chunk_group), self._held.slabs
            for key in keys if chunk_group else ():
                if key in slabs and slabs[key][0] != group:
                    self._put(key, slabs[key][1], group)
            return np.array([key[1] for key in keys if key not in slabs and key not in self._decoding], np.int64)

    def clear(self) -> None:
        """Drop all slabs. A thread that is changing them goes on with what is dropped."""
        self._held = _Held()

    def _put(self, key: Hashable, slab: Array, group: int) -> None:
        """Hold the lock."""
        try:
            self._held.put(key, slab, group, self._room.recent[self._dataset])
        except BaseException:
            self.clear()  # an interrupt came in the middle
            raise

    def _group_number(self, chunk_group: ChunkGroup | None) -> int:
        """The number of a group of chunks. None counts as the group before the newest, which is being read."""
        if chunk_group is None:
            return self._newest - 1
        if chunk_group not in self._groups:
            self._newest += 1
            self._groups = dict([*self._groups.items(), (chunk_group, self._newest)][-GROUPS:])
        return self._groups[chunk_group]


class KeptSlabs:
    """Slabs of a dataset of one file that are kept for good, as many as fit, in one table of rows. Thread-safe."""

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: Room) -> None:
        self._rows, self._shape, self._dtype = rows, shape, dtype
        self._room, self._lock = room, room.lock
        self._slab_bytes = rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._slabs = -(-samples // rows)
        # The table of rows, and the place of each slab in it, -1 if absent. One attribute, so that no thread combines
        # an old table with new places while another clears and refills the cache.
        self._content: tuple[Array, Indices] | None = None
        self._next = 0  # place of the next slab
        self._refused = False  # whether the system had no memory for the table

    @property
    def enabled(self) -> bool:
        return self._room.kept > 0 and not self._refused

    def missing(self, numbers: Indices) -> Indices:
        found = self._found(numbers)
        return numbers if found is None else numbers[found[1] < 0]

    def slab(self, number: int) -> Array | None:
        """A slab, if cached. The last one of a dataset may have extra rows at its end."""
        found = self._found(number)
        if found is None or found[1] < 0:
            return None
        return found[0][found[1] * self._rows : (found[1] + 1) * self._rows]

    def copy_rows(self, rows: Indices, out: Array, check: Callable[[Array, Indices], Array]) -> Indices | None:
        """Copy the cached ones of some rows to their places in ``out``.

        Returns the places of the others; None if there are none. ``check`` converts values, of these rows, whose dtype
        is not that of ``out``.
        """
        if self._content is None:
            return np.arange(len(rows))
        slabs, inside = np.divmod(rows, self._rows)
        found = self._found(slabs)
        if found is None:  # cleared meanwhile
            return np.arange(len(rows))
        table, places = found
        cached = places >= 0
        table_rows = places * self._rows + inside
        if cached.all() and out.dtype == self._dtype:
            table.take(table_rows, axis=0, out=out, mode="clip")
            return None
        if cached.any():
            out[cached] = check(table[table_rows[cached]], rows[cached])
        return None if cached.all() else np.flatnonzero(~cached)

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
        """Where a slab goes in the table; None if it is there, or does not fit. Hold the lock."""
        most = min(self._slabs, self._room.kept // self._slab_bytes)
        if self._content is None or len(self._content[0]) == self._next * self._rows < most * self._rows:
            # When a table is full and another loader has added room, a larger one starts empty.
            self.clear()
            self._content = self._new_table(most)
        if self._content is None:
            return None
        table, place = self._content
        begin = self._next * self._rows
        fits = self._room.taken + self._slab_bytes <= self._room.kept
        if place[number] >= 0 or begin >= len(table) or not fits:
            return None
        self._next += 1
        self._room.taken += self._slab_bytes
        return begin

    def _new_table(self, slabs: int) -> tuple[Array, Indices] | None:
        if self._refused:
            return None
        try:
            return np.empty((slabs * self._rows, *self._shape), self._dtype), np.full(self._slabs, -1, np.int64)
        except MemoryError as error:
            self._refused = True
            log.warning(
                "cache_bytes: %s; chunks of one dataset are decoded each time; choose a smaller cache_bytes", error
            )
            return None

    def clear(self) -> None:
        """Drop all slabs. Hold the lock."""
        self._room.taken -= self._next * self._slab_bytes
        self._content, self._next = None, 0

    def _found(self, numbers: Any) -> tuple[Array, Any] | None:
        """The table, and the places of slabs in it."""
        # 1. A thread writes a slab, and then its place. 2. Another sees the place, but not yet the slab: a processor
        # such as ARM may make writes of one thread visible to others in another order. The GIL prevented that; without
        # it, only a lock that both threads take does. See test_places_are_read_and_written_under_the_lock.
        if (content := self._content) is None:
            return None
        with self._lock:
            return content[0], content[1][numbers]
