"""Decoded chunks in memory: `DecodedChunkCache`, until newer ones need room; `PersistentChunkCache`, for good.

A *slab* is what is decoded together: the samples that share chunks, as one array with the samples on its first axis.
"""

from __future__ import annotations

import collections
import logging
import mmap
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Turn
from lit_async_data.sources.hdf5.readers.slab_pool import SlabPool
from lit_async_data.threads import Gate

Array = npt.NDArray[Any]
# Seconds between two looks of a thread that waits for another to decode what it wants too.
POLL_S = 0.5
# Of Linux; Python has no name for it before 3.12.
MAP_NORESERVE = 0x4000
# Turns that are told apart: that which is dealt, the next, and what a slow worker may still be at.
TURNS = 8

_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A slab that is kept."""

    turn: int  # its number
    slab: Array


class _Decoding:
    """A slab that one thread is decoding."""

    def __init__(self) -> None:
        self.nbytes = 0  # room that it takes already
        self.ended = Gate()


class DecodedChunkCache:
    """The slabs that were decoded last, each by one thread only. Safe from several threads.

    Those of the earliest turn go first: a shuffle by chunks deals from one group of slabs while the next is decoded,
    and what is older is used up. Among those of one turn the oldest goes first, by when it was decoded, not by when it
    was used. (By age alone, a slab that is decoded late pushes one out that is still wanted, which is then late.)

    An interrupt (Ctrl-C) can end any method at any call, and garbage collection that closes a loader can call
    `add_room` inside it. So what belongs together changes in statements between which nothing is called.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since garbage collection can close a loader inside it
        self._slabs: dict[Hashable, _Entry] = {}
        self._held_bytes = 0  # bytes of these slabs
        # Which go first, by the number of their turn. Only a hint: it may name slabs that are gone or of another turn,
        # and where it names too few it is made anew.
        self._order: dict[int, collections.OrderedDict[Hashable, None]] = {}
        self._turns: dict[Turn, int] = {}  # numbers of the last turns, in their order
        self._newest = 0
        self._decoding: dict[Hashable, _Decoding] = {}
        self._room = 0
        self._pool = SlabPool()

    def add_room(self, nbytes: int) -> None:
        """Room for this many bytes more, or less."""
        with self._lock:
            self._room += nbytes
            self._make_room()

    def fetch(self, key: Hashable, decode: Callable[[], Array], *, wait: bool, turn: Turn = False) -> Array | None:
        """A slab; decoded now, if it is not there.

        Args:
            key: Which slab.
            decode: Makes it; called without any lock.
            wait: Whether to wait if another thread is decoding it.
            turn: The turn that it is decoded for; False where it is read at once.

        Returns:
            The slab, or None if another thread is decoding it and ``wait`` is false.
        """
        own = None
        try:  # around everything: an interrupt must leave no key behind for which others would wait
            while own is None:
                with self._lock:
                    if key in self._slabs:
                        return self._slabs[key].slab
                    other = self._decoding.get(key)
                    if other is None:
                        begun = _Decoding()
                        self._decoding[key] = own = begun
                if other is not None:
                    if not wait:
                        return None
                    other.ended.wait(POLL_S)
            slab = decode()
            return self._store(key, slab, own, turn)
        finally:
            if own is not None:
                # Without the lock, for which an interrupt could come before it.
                if key in self._decoding and self._decoding[key] is own:
                    del self._decoding[key]
                own.ended.open()

    def _store(self, key: Hashable, slab: Array, own: _Decoding, turn: Turn) -> Array:
        """A slab, kept if there can be room for it."""
        with self._lock:
            if slab.nbytes > self._room:
                return slab
            own.nbytes = slab.nbytes
            self._make_room()
        slab = self._pool.copy(slab)
        with self._lock:
            self._insert(key, _Entry(self._turn_number(turn), slab))
            self._make_room()  # some may have been taken back meanwhile
        return slab

    def missing(self, name: object, numbers: Indices, turn: Turn) -> Indices:
        """Those of these slabs of one dataset that are neither here nor being decoded.

        Args:
            name: Of the dataset.
            numbers: Of its slabs.
            turn: The turn that they are wanted for, which those here then belong to; False for none.
        """
        keys = [(name, number) for number in numbers.tolist()]
        with self._lock:
            here = [key for key in keys if key in self._slabs] if turn else []
            number = self._turn_number(turn) if here else 0
            for key in here:
                self._move(key, number)
            left = [number for _, number in keys if (name, number) not in self._slabs]
            if self._decoding:
                left = [number for number in left if (name, number) not in self._decoding]
        return np.array(left, np.int64)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            slabs: dict[Hashable, _Entry] = {}
            order: dict[int, collections.OrderedDict[Hashable, None]] = {}
            self._slabs, self._held_bytes, self._order = slabs, 0, order
            self._pool.clear()

    def _insert(self, key: Hashable, held: _Entry) -> None:
        """Keep a slab that this thread has decoded, in the room that it has taken."""
        nbytes = held.slab.nbytes
        self._add_to_order(key, held.turn)
        # From here on nothing is called.
        self._slabs[key] = held
        self._held_bytes += nbytes
        if key in self._decoding:
            self._decoding[key].nbytes = 0

    def _move(self, key: Hashable, turn: int) -> None:
        """Make a slab that is here one of another turn."""
        if key not in self._slabs:
            return
        before, slab = self._slabs[key]
        if before == turn:
            return
        moved = _Entry(turn, slab)
        self._add_to_order(key, turn)
        if key in self._slabs:  # what was called may have collected garbage, and made room
            self._slabs[key] = moved
        if before in self._order:
            of_turn = self._order[before]
            of_turn.pop(key, None)
            if not of_turn and before in self._order:
                del self._order[before]

    def _add_to_order(self, key: Hashable, turn: int) -> None:
        """Name a slab in the order; before it belongs there, since none must be missing."""
        of_turn = self._order.setdefault(turn, collections.OrderedDict())
        of_turn[key] = None

    def _turn_number(self, turn: Turn) -> int:
        """The number of a turn. What has none belongs to the one before the newest, which is being dealt."""
        if not isinstance(turn, tuple):
            return self._newest - 1
        if turn not in self._turns:
            newest = self._newest + 1
            self._turns = dict([*self._turns.items(), (turn, newest)][-TURNS:])
            self._newest = newest
        return self._turns[turn]

    def _make_room(self) -> None:
        while self._slabs and self._held_bytes + self._reserved_bytes() > self._room:
            first = self._next_victim()
            if first is None:
                continue
            key, turn = first
            # From here on nothing is called.
            if key in self._slabs and self._slabs[key].turn == turn:
                slab = self._slabs[key].slab
                del self._slabs[key]
                self._held_bytes -= slab.nbytes

    def _reserved_bytes(self) -> int:
        """Bytes of what is being copied, which is not among the slabs yet."""
        # A list, since other threads end their decoding without the lock.
        return sum([each.nbytes for each in list(self._decoding.values())]) if self._decoding else 0

    def _next_victim(self) -> tuple[Hashable, int] | None:
        """The slab that goes first and its turn, taken out of the order; None if the order has no longer known any."""
        if not self._order:
            for key, held in list(self._slabs.items()):
                self._add_to_order(key, held.turn)
        turn = min(list(self._order), default=None)
        of_turn = None if turn is None else self._order.get(turn)
        if turn is None or of_turn is None:
            return None
        try:
            key, _ = of_turn.popitem(last=False)
        except KeyError:
            key = None
        if not of_turn and self._order.get(turn) is of_turn:
            self._order.pop(turn, None)
        return None if key is None else (key, turn)


class ByteBudget:
    """Bytes that may be kept for good, shared by all fields and files of a source. Safe from several threads.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int = 0) -> None:
        self._lock = threading.RLock()  # garbage collection can close a loader, and give room back, inside it
        self.limit = limit
        self._taken = 0

    def add(self, nbytes: int) -> int:
        """Room for this many bytes more, or less; returns how many are left, below 0 if more are taken."""
        with self._lock:
            self.limit += nbytes
            return self.limit - self._taken

    def give_back(self, nbytes: int) -> None:
        """Let others take these bytes."""
        with self._lock:
            self._taken -= nbytes

    def try_take(self, nbytes: int) -> bool:
        """Take this many bytes of it, if they are left."""
        with self._lock:
            fits = self._taken + nbytes <= self.limit
            self._taken += nbytes if fits else 0
            return fits


class PersistentChunkCache:
    """SlabDecoder of one dataset that stay, as many as there is room for; their samples lie in one table.

    What came first stays: under any order that goes through all samples once per epoch, each byte of room then saves as
    much as any other, where the most recent would be dropped just before they are wanted again. Safe from several
    threads.

    Args:
        samples: Samples in the dataset.
        rows: Samples in one slab.
        shape: Of a sample, as stored.
        dtype: Of a value, in native byte order.
        room: Where bytes are taken from.
    """

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: ByteBudget) -> None:
        self._rows = rows
        self._shape = shape
        self._dtype = dtype
        self._room = room
        self._lock = threading.RLock()  # as in `ByteBudget`
        self._slab_bytes = rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._slabs = -(-samples // rows)
        # The table, and the place of each slab in it, -1 where it is not there: together, so that nobody looks up in
        # one what is in another, when all is let go of and kept anew meanwhile.
        self._content: tuple[Array, Indices] | None = None
        self._next = 0
        self._map_failed = False  # by the system, for want of address space

    @property
    def enabled(self) -> bool:
        """Whether there is any room."""
        return self._room.limit > 0 and not (self._map_failed and self._content is None)

    def missing(self, numbers: Indices) -> Indices:
        """Those of these slabs that are not kept."""
        kept = self._content
        return numbers if kept is None else numbers[kept[1][numbers] < 0]

    def slab(self, number: int) -> Array | None:
        """A slab, if it is kept; the last of a dataset may have rows behind its own."""
        kept = self._content
        if kept is None or kept[1][number] < 0:
            return None
        first = int(kept[1][number]) * self._rows
        return kept[0][first : first + self._rows]

    def copy_rows(self, rows: Indices, out: Array, check: Callable[[Array, Indices], Array]) -> Indices | None:
        """Copy those of these rows that are kept.

        Args:
            rows: Which rows.
            out: Where all of them go.
            check: Called with values whose type is not that of ``out``, and their rows.

        Returns:
            Places of the rows that are not there; None if all are.
        """
        kept = self._content
        if kept is None:
            return np.arange(len(rows))
        table, place = kept
        slabs, inside = np.divmod(rows, self._rows)
        places = place[slabs]
        there = places >= 0
        table_rows = places * self._rows + inside
        if there.all() and out.dtype == self._dtype:
            table.take(table_rows, axis=0, out=out, mode="clip")
            return None
        if there.any():
            out[there] = check(table[table_rows[there]], rows[there])
        return None if there.all() else np.flatnonzero(~there)

    def put(self, number: int, slab: Array) -> None:
        """Keep a slab, if there is room."""
        if not self.enabled:
            return
        with self._lock:
            kept = self._ensure_table()
            if kept is None:
                return
            table, place = kept
            first = self._next * self._rows
            if place[number] >= 0 or first + self._rows > len(table) or not self._room.try_take(self._slab_bytes):
                return
            table[first : first + len(slab)] = slab
            place[number] = self._next  # now: whoever sees it finds the slab there
            self._next += 1

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._room.give_back(self._next * self._slab_bytes)
            self._content, self._next, self._map_failed = None, 0, False

    def _ensure_table(self) -> tuple[Array, Indices] | None:
        """The table, for as many slabs as there may be; None if there can be none."""
        slabs = min(self._slabs, self._room.limit // max(self._slab_bytes, 1))
        # One that is full begins anew, larger, when another loader has made more room.
        full = self._content is None or self._next * self._rows == len(self._content[0])
        if self._map_failed or not full or slabs <= self._next:
            return self._content
        # Not reserved: other datasets may have taken the room meanwhile. `ByteBudget` says how many slabs are kept.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, slabs * self._slab_bytes, flags=flags)
        except (OSError, MemoryError, OverflowError) as error:
            self._map_failed = True
            _log.warning(
                "%d bytes for the cache of decoded chunks cannot be mapped (%s): no more are kept of this dataset; "
                "raise the limit on memory (ulimit -v), or set a smaller cache_bytes",
                slabs * self._slab_bytes,
                error,
            )
            return self._content
        self.clear()
        table = np.frombuffer(memory, self._dtype).reshape(-1, *self._shape)
        self._content = table, np.full(self._slabs, -1, np.int64)
        return self._content
