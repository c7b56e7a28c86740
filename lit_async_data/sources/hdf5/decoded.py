"""Decoded chunks in memory: `RecentBands`, kept until newer ones need their room, and `KeptBands`, kept for good.

A *band* is what is decoded together: the samples that share chunks, as one array with the samples on its first axis.
"""

from __future__ import annotations

import collections
import logging
import mmap
import threading
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.permutation import Indices
from lit_async_data.sources.base import Turn
from lit_async_data.sources.hdf5.band_memory import BandMemory

Array = npt.NDArray[Any]
# Seconds between two looks of a thread that waits for another to decode what it wants too.
POLL_S = 0.5
# Of Linux; Python has no name for it before 3.12.
MAP_NORESERVE = 0x4000
# Turns that are told apart: that which is dealt, the next, and what a slow worker may still be at.
TURNS = 8

_log = logging.getLogger(__name__)


class RecentBands:
    """The bands that were decoded last, each by one thread only. Safe from several threads.

    Those of the earliest turn go first: a shuffle by chunks deals from one group of bands while the next is decoded,
    and what is older is used up. Among those of one turn the oldest goes first, by when it was decoded, not by when it
    was used. (By age alone, a band that is decoded late pushes one out that is still wanted, which is then late.)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken directly: an interrupt inside `Condition.__enter__` leaves it locked
        self._changed = threading.Condition(self._lock)
        self._bands: dict[int, collections.OrderedDict[Hashable, Array]] = {}  # by the number of their turn
        self._turn_of: dict[Hashable, int] = {}  # of each band
        self._turns: dict[Turn, int] = {}  # numbers of the last turns, in their order
        self._newest = 0
        self._decoding: set[Hashable] = set()
        self._room = 0
        self._taken = 0
        self._memory = BandMemory()

    def add_room(self, nbytes: int) -> None:
        """Room for this many bytes more, or less."""
        with self._lock:
            self._room += nbytes
            self._make_room(0)

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
        band, mine, kept = None, False, False
        try:  # around everything: Ctrl-C must leave no key behind for which others would wait
            with self._lock:
                while key not in self._turn_of and key in self._decoding:
                    if not wait:
                        return None
                    self._changed.wait(POLL_S)
                if key in self._turn_of:
                    return self._bands[self._turn_of[key]][key]
                mine = True
                self._decoding.add(key)
            band = decode()
            band, kept = self._copied(band)
        finally:
            if mine:
                with self._lock:
                    self._decoding.discard(key)
                    if kept:
                        assert band is not None
                        self._put(key, band, turn)
                    self._changed.notify_all()
        return band

    def _copied(self, band: Array) -> tuple[Array, bool]:
        """A band as it can be kept, once there is room for it; and whether there can be."""
        with self._lock:
            if band.nbytes > self._room:
                return band, False
            self._make_room(band.nbytes)
            self._taken += band.nbytes
        try:
            return self._memory.copied(band), True
        except BaseException:
            with self._lock:
                self._taken -= band.nbytes
            raise

    def missing(self, name: object, numbers: Indices, turn: Turn) -> Indices:
        """Those of these bands of one dataset that are neither here nor being decoded.

        Args:
            name: Of the dataset.
            numbers: Of its bands.
            turn: The turn that they are wanted for, which those here then belong to; False for none.
        """
        with self._lock:
            for key in [(name, number) for number in numbers.tolist()] if turn else ():
                if key in self._turn_of:
                    self._put(key, self._taken_out(key), turn)
            left = [n for n in numbers.tolist() if (name, n) not in self._turn_of and (name, n) not in self._decoding]
        return np.array(left, np.int64)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            # Not what is being copied now, whose bytes are taken already.
            self._taken -= sum(band.nbytes for bands in self._bands.values() for band in bands.values())
            self._bands.clear()
            self._turn_of.clear()
            self._memory.clear()

    def _taken_out(self, key: Hashable) -> Array:
        """A band that is no longer of its turn; of a turn without any nothing is left."""
        number = self._turn_of.pop(key)
        bands = self._bands[number]
        band = bands.pop(key)
        if not bands:
            del self._bands[number]
        return band

    def _put(self, key: Hashable, band: Array, turn: Turn) -> None:
        number = self._number(turn)
        self._turn_of[key] = number
        self._bands.setdefault(number, collections.OrderedDict())[key] = band

    def _number(self, turn: Turn) -> int:
        """The number of a turn. What has none belongs to the one before the newest, which is being dealt."""
        if not isinstance(turn, tuple):
            return self._newest - 1
        if turn not in self._turns:
            self._newest += 1
            self._turns = dict([*self._turns.items(), (turn, self._newest)][-TURNS:])
        return self._turns[turn]

    def _make_room(self, nbytes: int) -> None:
        while self._turn_of and self._taken + nbytes > self._room:
            earliest = self._bands[min(self._bands)]
            band = self._taken_out(next(iter(earliest)))
            self._taken -= band.nbytes  # after it: popping may collect garbage, and come here again


class Room:
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

    def taken(self, nbytes: int) -> bool:
        """Take this many bytes of it, if they are left."""
        with self._lock:
            fits = self._taken + nbytes <= self.limit
            self._taken += nbytes if fits else 0
            return fits


class KeptBands:
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

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: Room) -> None:
        self._rows = rows
        self._shape = shape
        self._dtype = dtype
        self._room = room
        self._lock = threading.RLock()  # as in `Room`
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
            if place[number] >= 0 or first + self._rows > len(table) or not self._room.taken(self._band_bytes):
                return
            table[first : first + len(band)] = band
            place[number] = self._next  # now: whoever sees it finds the band there
            self._next += 1

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._room.give_back(self._next * self._band_bytes)
            self._kept, self._next, self._refused = None, 0, False

    def _made(self) -> tuple[Array, Indices] | None:
        """The table, for as many bands as there may be; None if there can be none."""
        bands = min(self._bands, self._room.limit // max(self._band_bytes, 1))
        # One that is full begins anew, larger, when another loader has made more room.
        full = self._kept is None or self._next * self._rows == len(self._kept[0])
        if self._refused or not full or bands <= self._next:
            return self._kept
        # Not reserved: other datasets may have taken the room meanwhile. `Room` says how many bands are kept.
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
