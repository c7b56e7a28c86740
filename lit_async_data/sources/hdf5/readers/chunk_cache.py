"""`ChunkCache`: decoded slabs: a room for each dataset, and one for what is kept; both are parts of ``memory_budget``.

A *slab* is a range of rows that is decoded together: the chunks that share these rows, as one array, rows first.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

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


class ChunkCache:
    """The decoded slabs of a source. Thread-safe.

    * Each dataset has room for `RecentSlabs`, of which the oldest are evicted: so slabs of images evict none of labels.
    * All datasets share room for `KeptSlabs`, which stay. Any order that visits all samples once per epoch profits
      equally from every cached byte, while the least recently used slab is the one needed next.
    """

    def __init__(self) -> None:
        # Garbage collection can close a loader, and give its room back, while its thread holds the lock.
        self._lock = threading.RLock()
        self._recent: dict[str, RecentSlabs] = {}
        self._room = KeptRoom(self._lock)
        self._kept: list[KeptSlabs] = []
        self._reserved: dict[object, tuple[Mapping[str, int], int]] = {}

    def recent(self, dataset: str) -> RecentSlabs:
        """The recent slabs of a dataset, in all files."""
        return self._recent.setdefault(dataset, RecentSlabs(self._lock))

    def kept(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> KeptSlabs:
        """The kept slabs of a dataset of one file; see `KeptSlabs`."""
        self._kept.append(KeptSlabs(samples, rows, shape, dtype, self._room))
        return self._kept[-1]

    def reserve(self, recent: Mapping[str, int], kept: int) -> Reservation:
        """Add room for recent slabs of each dataset, and for kept ones."""
        key = object()
        reservation = Reservation(functools.partial(self._give_back, key))
        for dataset in recent:
            self.recent(dataset)
        self._reserved[key] = recent, kept
        self._resize()
        return reservation

    def _give_back(self, key: object) -> None:
        self._reserved.pop(key, None)
        self._resize()

    def _resize(self) -> None:
        reserved: list[tuple[Mapping[str, int], int]] | None = None
        with self._lock:
            while reserved != list(self._reserved.values()):  # again, if garbage collection has given room back
                reserved = list(self._reserved.values())
                for dataset, slabs in list(self._recent.items()):
                    slabs.room = sum(recent.get(dataset, 0) for recent, _ in reserved)
                    if not slabs.room:
                        slabs.clear()  # with less room, the next slab evicts others
                self._room.nbytes = sum(kept for _, kept in reserved)
                for table in self._kept if self._room.taken > self._room.nbytes else ():
                    table.clear()

    def clear(self) -> None:
        with self._lock:
            for recent in self._recent.values():
                recent.clear()
            for kept in self._kept:
                kept.clear()


class _Entry(NamedTuple):
    group: int  # number of the group of chunks that needs it
    slab: Array


class _Held:
    """Slabs, and their keys by group, in the order of decoding."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, _Entry] = {}
        self._by_group: dict[int, collections.OrderedDict[Hashable, None]] = {}
        self._nbytes = 0

    def add(self, key: Hashable, slab: Array, group: int) -> None:
        self.slabs[key] = _Entry(group, slab)
        self._by_group.setdefault(group, collections.OrderedDict())[key] = None
        self._nbytes += slab.nbytes

    def remove(self, key: Hashable) -> None:
        group, slab = self.slabs.pop(key)
        keys = self._by_group[group]
        del keys[key]
        if not keys:
            del self._by_group[group]
        self._nbytes -= slab.nbytes

    def evict(self, most: int) -> None:
        """Remove slabs until the others take at most this many bytes."""
        while self._nbytes > most:
            self.remove(next(iter(self._by_group[min(self._by_group)])))


class RecentSlabs:
    """Slabs of one dataset that were decoded last, each by one thread. Thread-safe.

    Evicts slabs of the earliest group of chunks first: a chunk shuffle deals from one group while the next is decoded,
    and earlier groups are used up. Within a group it evicts in the order of decoding, not of use. (By age alone, a slab
    that was decoded late would evict one that is still needed.)
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.room = 0
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
                        return entry.slab
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
        """Look up several slabs, by their numbers, each with the places that need it.

        Returns a queue of the cached ones (number, slab, places), which ends with None; and the other groups.
        """
        cached: Cached = collections.deque()
        others = []
        with self._lock:
            for number, where in groups:
                entry = self._held.slabs.get((name, number))
                if entry is None:
                    others.append((number, where))
                else:
                    cached.append((number, entry.slab, where))
        cached.append(None)
        return cached, others

    def missing(self, name: object, numbers: Indices, chunk_group: ChunkGroup | None) -> Indices:
        """The slabs that are neither cached nor being decoded. Assigns the cached ones to the group, if any."""
        with self._lock:
            keys = [(name, number) for number in numbers.tolist()]
            group, slabs = self._group_number(chunk_group), self._held.slabs
            for key in keys if chunk_group else ():
                if key in slabs and slabs[key].group != group:
                    self._put(key, slabs[key].slab, group)
            return np.array([key[1] for key in keys if key not in slabs and key not in self._decoding], np.int64)

    def clear(self) -> None:
        """Drop all slabs. A thread that is changing them goes on with what is dropped."""
        self._held = _Held()

    def _put(self, key: Hashable, slab: Array, group: int) -> None:
        """Assign a slab to a group, if there is room. Hold the lock."""
        held = self._held
        try:
            if key in held.slabs:
                held.remove(key)
            if slab.nbytes <= self.room:
                held.evict(self.room - slab.nbytes)
                held.add(key, slab, group)
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


@dataclasses.dataclass
class KeptRoom:
    """Bytes that all kept slabs may take, and those that they take. Change them under the lock of the cache."""

    lock: threading.RLock
    nbytes: int = 0
    taken: int = 0


class KeptSlabs:
    """Slabs of a dataset of one file that are kept for good, as many as fit, in one table of rows. Thread-safe."""

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: KeptRoom) -> None:
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
        return self._room.nbytes > 0 and not self._refused

    def missing(self, numbers: Indices) -> Indices:
        content = self._content
        return numbers if content is None else numbers[self._places(content[1], numbers) < 0]

    def slab(self, number: int) -> Array | None:
        """A slab, if cached. The last one of a dataset may have extra rows at its end."""
        content = self._content
        place = -1 if content is None else int(self._places(content[1], number))
        if content is None or place < 0:
            return None
        return content[0][place * self._rows : (place + 1) * self._rows]

    def copy_rows(self, rows: Indices, out: Array, check: Callable[[Array, Indices], Array]) -> Indices | None:
        """Copy the cached ones of some rows to their places in ``out``.

        Returns the places of the others; None if there are none. ``check`` converts values, of these rows, whose dtype
        is not that of ``out``.
        """
        content = self._content
        if content is None:
            return np.arange(len(rows))
        table, place = content
        slabs, inside = np.divmod(rows, self._rows)
        places = self._places(place, slabs)
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
            begin = self._next_row(number)
            content = self._content
        if begin is None or content is None:
            return
        table, place = content
        table[begin : begin + len(slab)] = slab  # without the lock, for which all readers wait
        with self._lock:
            if self._content is content:  # else it was cleared meanwhile
                place[number] = begin // self._rows

    def _next_row(self, number: int) -> int | None:
        """Where a slab goes in the table; None if it is there, or does not fit. Hold the lock."""
        most = min(self._slabs, self._room.nbytes // self._slab_bytes)
        if self._content is None or len(self._content[0]) == self._next * self._rows < most * self._rows:
            # When a table is full and another loader has added room, a larger one starts empty.
            self.clear()
            self._content = self._new_table(most)
        if self._content is None:
            return None
        table, place = self._content
        begin = self._next * self._rows
        fits = self._room.taken + self._slab_bytes <= self._room.nbytes
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

    def _places(self, place: Indices, numbers: Any) -> Any:
        # 1. A thread writes a slab, and then its place. 2. Another sees the place, but not yet the slab: a processor
        # such as ARM may make writes of one thread visible to others in another order. The GIL prevented that; without
        # it, only a lock that both threads take does. See test_places_are_read_and_written_under_the_lock.
        with self._lock:
            return place[numbers]
