"""Decoded chunks in memory: `DecodedChunkCache`, until newer ones need room; `PersistentChunkCache`, for good.

A *band* is what is decoded together: the samples that share chunks, as one array with the samples on its first axis.
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
from lit_async_data.sources.hdf5.readers.band_memory import BandMemory
from lit_async_data.sources.room import Giver, Room
from lit_async_data.threads import Gate

Array = npt.NDArray[Any]
# Seconds between two looks of a thread that waits for another to decode what it wants too.
POLL_S = 0.5
# Of Linux; Python has no name for it before 3.12.
MAP_NORESERVE = 0x4000
# Turns that are told apart: that which is dealt, the next, and what a slow worker may still be at.
TURNS = 8

_log = logging.getLogger(__name__)


class _Held(NamedTuple):
    """A band that is kept."""

    turn: int  # its number
    band: Array


class _Decoding:
    """A band that one thread is decoding."""

    def __init__(self) -> None:
        self.nbytes = 0  # room that it takes already
        self.ended = Gate()


class DecodedChunkCache:
    """The bands that were decoded last, each by one thread only. Safe from several threads.

    Those of the earliest turn go first: a shuffle by chunks deals from one group of bands while the next is decoded,
    and what is older is used up. Among those of one turn the oldest goes first, by when it was decoded, not by when it
    was used. (By age alone, a band that is decoded late pushes one out that is still wanted, which is then late.)

    An interrupt (Ctrl-C) can end any method at any call, and garbage collection that closes a loader can call
    `set_room` inside it. So what belongs together changes in statements between which nothing is called.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since garbage collection can close a loader inside it
        self._bands: dict[Hashable, _Held] = {}
        self._held = 0  # bytes of these bands
        # Which go first, by the number of their turn. Only a hint: it may name bands that are gone or of another turn,
        # and where it names too few it is made anew.
        self._order: dict[int, collections.OrderedDict[Hashable, None]] = {}
        self._turns: dict[Turn, int] = {}  # numbers of the last turns, in their order
        self._newest = 0
        self._decoding: dict[Hashable, _Decoding] = {}
        self._given = Room()
        self._memory = BandMemory()

    @property
    def _room(self) -> int:
        return self._given.nbytes

    def set_room(self, giver: Giver, nbytes: int) -> None:
        """Set how many bytes one giver allows. Where that was interrupted, it is to be called again."""
        with self._lock:
            self._given.set(giver, nbytes)
            self._make_room()

    def fetch(self, key: Hashable, decode: Callable[[], Array], *, wait: bool, turn: Turn = False) -> Array | None:
        """A band; decoded now, if it is not there.

        Args:
            key: Which band.
            decode: Makes it; called without any lock.
            wait: Whether to wait if another thread is decoding it.
            turn: The turn that it is decoded for; False where it is read at once.

        Returns:
            The band, or None if another thread is decoding it and ``wait`` is false.
        """
        mine = None
        try:  # around everything: an interrupt must leave no key behind for which others would wait
            while mine is None:
                with self._lock:
                    if key in self._bands:
                        return self._bands[key].band
                    other = self._decoding.get(key)
                    if other is None:
                        begun = _Decoding()
                        self._decoding[key] = mine = begun
                if other is not None:
                    if not wait:
                        return None
                    other.ended.wait(POLL_S)
            band = decode()
            return self._kept(key, band, mine, turn)
        finally:
            if mine is not None:
                # Without the lock, for which an interrupt could come before it.
                if key in self._decoding and self._decoding[key] is mine:
                    del self._decoding[key]
                mine.ended.open()

    def _kept(self, key: Hashable, band: Array, mine: _Decoding, turn: Turn) -> Array:
        """A band, kept if there can be room for it."""
        with self._lock:
            if band.nbytes > self._room:
                return band
            mine.nbytes = band.nbytes
            self._make_room()
        band = self._memory.copied(band)
        with self._lock:
            self._put(key, _Held(self._number(turn), band))
            self._make_room()  # some may have been taken back meanwhile
        return band

    def missing(self, name: object, numbers: Indices, turn: Turn) -> Indices:
        """Those of these bands of one dataset that are neither here nor being decoded.

        Args:
            name: Of the dataset.
            numbers: Of its bands.
            turn: The turn that they are wanted for, which those here then belong to; False for none.
        """
        keys = [(name, number) for number in numbers.tolist()]
        with self._lock:
            here = [key for key in keys if key in self._bands] if turn else []
            number = self._number(turn) if here else 0
            for key in here:
                self._move(key, number)
            left = [number for _, number in keys if (name, number) not in self._bands]
            if self._decoding:
                left = [number for number in left if (name, number) not in self._decoding]
        return np.array(left, np.int64)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            bands: dict[Hashable, _Held] = {}
            order: dict[int, collections.OrderedDict[Hashable, None]] = {}
            self._bands, self._held, self._order = bands, 0, order
            self._memory.clear()

    def _put(self, key: Hashable, held: _Held) -> None:
        """Keep a band that this thread has decoded, in the room that it has taken."""
        nbytes = held.band.nbytes
        self._named(key, held.turn)
        # From here on nothing is called.
        self._bands[key] = held
        self._held += nbytes
        if key in self._decoding:
            self._decoding[key].nbytes = 0

    def _move(self, key: Hashable, turn: int) -> None:
        """Make a band that is here one of another turn."""
        if key not in self._bands:
            return
        before, band = self._bands[key]
        if before == turn:
            return
        moved = _Held(turn, band)
        self._named(key, turn)
        if key in self._bands:  # what was called may have collected garbage, and made room
            self._bands[key] = moved
        if before in self._order:
            of_turn = self._order[before]
            of_turn.pop(key, None)
            if not of_turn and before in self._order:
                del self._order[before]

    def _named(self, key: Hashable, turn: int) -> None:
        """Name a band in the order; before it belongs there, since none must be missing."""
        of_turn = self._order.setdefault(turn, collections.OrderedDict())
        of_turn[key] = None

    def _number(self, turn: Turn) -> int:
        """The number of a turn. What has none belongs to the one before the newest, which is being dealt."""
        if not isinstance(turn, tuple):
            return self._newest - 1
        if turn not in self._turns:
            newest = self._newest + 1
            self._turns = dict([*self._turns.items(), (turn, newest)][-TURNS:])
            self._newest = newest
        return self._turns[turn]

    def _make_room(self) -> None:
        while self._bands and self._held + self._reserved() > self._room:
            first = self._first()
            if first is None:
                continue
            key, turn = first
            # From here on nothing is called.
            if key in self._bands and self._bands[key].turn == turn:
                band = self._bands[key].band
                del self._bands[key]
                self._held -= band.nbytes

    def _reserved(self) -> int:
        """Bytes of what is being copied, which is not among the bands yet."""
        # A list, since other threads end their decoding without the lock.
        return sum([each.nbytes for each in list(self._decoding.values())]) if self._decoding else 0

    def _first(self) -> tuple[Hashable, int] | None:
        """The band that goes first and its turn, taken out of the order; None if the order has no longer known any."""
        if not self._order:
            for key, held in list(self._bands.items()):
                self._named(key, held.turn)
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

    Attributes:
        lock: To be held where ``taken`` changes. Reentrant: garbage collection can close a loader inside it.
        taken: Bytes that are kept.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken = 0
        self._given = Room()

    @property
    def limit(self) -> int:
        """Bytes that may be kept."""
        return self._given.nbytes

    def set_room(self, giver: Giver, nbytes: int) -> int:
        """Set how many bytes one giver allows; returns how many are left, below 0 if more are taken."""
        with self.lock:
            self._given.set(giver, nbytes)
            return self.limit - self.taken


class PersistentChunkCache:
    """Bands of one dataset that stay, as many as there is room for; their samples lie in one table.

    What came first stays: under any order that goes through all samples once per epoch, each byte of room then saves as
    much as any other, where the most recent would be dropped just before they are wanted again. Safe from several
    threads.

    Args:
        samples: Samples in the dataset.
        rows: Samples in one band.
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
        self._band_bytes = rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._bands = -(-samples // rows)
        # The table, and the place of each band in it, -1 where it is not there: together, so that nobody looks up in
        # one what is in another, when all is let go of and kept anew meanwhile.
        self._kept: tuple[Array, Indices] | None = None
        self._next = 0
        self._refused = False  # by the system, for want of address space

    @property
    def wanted(self) -> bool:
        """Whether there is any room."""
        return self._room.limit > 0 and not (self._refused and self._kept is None)

    def missing(self, numbers: Indices) -> Indices:
        """Those of these bands that are not kept."""
        kept = self._kept
        return numbers if kept is None else numbers[kept[1][numbers] < 0]

    def band(self, number: int) -> Array | None:
        """A band, if it is kept; the last of a dataset may have rows behind its own."""
        kept = self._kept
        if kept is None or kept[1][number] < 0:
            return None
        first = int(kept[1][number]) * self._rows
        return kept[0][first : first + self._rows]

    def taken(self, rows: Indices, out: Array, check: Callable[[Array, Indices], Array]) -> Indices | None:
        """Copy those of these rows that are kept.

        Args:
            rows: Which rows.
            out: Where all of them go.
            check: Called with values whose type is not that of ``out``, and their rows.

        Returns:
            Places of the rows that are not there; None if all are.
        """
        kept = self._kept
        if kept is None:
            return np.arange(len(rows))
        table, place = kept
        bands, inside = np.divmod(rows, self._rows)
        places = place[bands]
        there = places >= 0
        wanted = places * self._rows + inside
        if there.all() and out.dtype == self._dtype:
            table.take(wanted, axis=0, out=out, mode="clip")
            return None
        if there.any():
            out[there] = check(table[wanted[there]], rows[there])
        return None if there.all() else np.flatnonzero(~there)

    def put(self, number: int, band: Array) -> None:
        """Keep a band, if there is room."""
        if not self.wanted:
            return
        with self._lock:
            kept = self._made()
            if kept is None:
                return
            table, place = kept
            first = self._next * self._rows
            if place[number] >= 0 or first + self._rows > len(table):
                return
            unused = 0  # bytes that are taken and of no band
            try:
                with self._room.lock:
                    if self._room.taken + self._band_bytes > self._room.limit:
                        return
                    # An interrupt comes only where something is called: not between these two, nor these three.
                    self._room.taken += self._band_bytes
                    unused = self._band_bytes
                table[first : first + len(band)] = band
                if self._kept is kept:  # garbage collection may have closed the loader, and cleared this
                    place[number] = self._next  # now: whoever sees it finds the band there
                    self._next += 1
                    unused = 0
            finally:
                if unused:
                    with self._room.lock:
                        self._room.taken -= unused

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock, self._room.lock:
            # Nothing is called between these two.
            self._room.taken -= self._next * self._band_bytes
            self._kept, self._next, self._refused = None, 0, False

    def _made(self) -> tuple[Array, Indices] | None:
        """The table, for as many bands as there may be; None if there can be none."""
        bands = min(self._bands, self._room.limit // max(self._band_bytes, 1))
        # One that is full begins anew, larger, when another loader has made more room.
        full = self._kept is None or self._next * self._rows == len(self._kept[0])
        if self._refused or not full or bands <= self._next:
            return self._kept
        # Not reserved: other datasets may have taken the room meanwhile. `ByteBudget` says how many bands are kept.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, bands * self._band_bytes, flags=flags)
        except (OSError, MemoryError, OverflowError) as error:
            self._refused = True
            _log.warning(
                "%d bytes for the cache of decoded chunks cannot be mapped (%s): no more are kept of this dataset; "
                "raise the limit on memory (ulimit -v), or set a smaller cache_bytes",
                bands * self._band_bytes,
                error,
            )
            return self._kept
        self.clear()
        table = np.frombuffer(memory, self._dtype).reshape(-1, *self._shape)
        self._kept = table, np.full(self._bands, -1, np.int64)
        return self._kept
