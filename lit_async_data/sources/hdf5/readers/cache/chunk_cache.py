"""`DecodedChunkCache`: recently decoded slabs, of which the older ones are evicted.

A *slab* is a range of rows that is decoded together: the chunks that share these rows, as one array, rows first.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.order.due import Turn
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.reservations import Owner, Reservations
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.threads import Gate

Array = npt.NDArray[Any]
# Seconds after which a thread that waits for another's decoding checks again.
POLL_S = 0.5
# Turns that are distinguished: the current one, the next, and earlier ones that slow workers still read.
TURNS = 8


# Cached slabs with their numbers and the places that need them; None at the end.
Cached = collections.deque[tuple[int, Array, Indices] | None]


class _Entry(NamedTuple):
    """A cached slab."""

    turn: int  # number of its turn
    slab: Array


class DecodedChunkCache:
    """Recently decoded slabs, each decoded by one thread. Thread-safe.

    Evicts slabs of the earliest turn first: a chunk shuffle deals from one group of slabs while the next is decoded,
    and earlier groups are used up. Within a turn it evicts in the order of decoding, not of use. (By age alone, a slab
    that was decoded late would evict one that is still needed.)

    An interrupt (Ctrl-C) can end any method at any call, and garbage collection can close a loader there, which calls
    `set_room`. So related attributes change in statements without a call between them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since garbage collection can close a loader while it is held
        self._slabs: dict[Hashable, _Entry] = {}
        self.held_bytes = 0  # size of these slabs
        # Keys in the order of eviction, by turn number. A hint: it may list evicted slabs or an old turn, and is
        # rebuilt when it lists too few.
        self._order: dict[int, collections.OrderedDict[Hashable, None]] = {}
        self._turns: dict[Turn, int] = {}  # numbers of the latest turns, in order
        self._newest = 0
        self._decoding: dict[Hashable, Gate] = {}  # slabs that threads are decoding; the gate opens at the end
        self._given = Reservations()

    @property
    def room(self) -> int:
        """Bytes that all owners reserve together."""
        return self._given.nbytes

    def set_room(self, owner: Owner, nbytes: int) -> None:
        """Set how many bytes one owner reserves. If an interrupt ends it early, call it again."""
        with self._lock:
            self._given.set(owner, nbytes)
            self._make_room()

    def get(self, key: Hashable, decode: Callable[[], Array], *, wait: bool, turn: Turn | None = None) -> Array | None:
        """A slab, decoded now if it is not cached.

        Args:
            key: Identifies the slab.
            decode: Decodes it; called without a lock.
            wait: Whether to wait if another thread is decoding it.
            turn: The turn it is decoded for; None if it is read at once, or the order has no turns.

        Returns:
            The slab, or None if another thread is decoding it and ``wait`` is false.
        """
        own = None
        try:  # around everything: after an interrupt, no key may remain for which other threads would wait
            while own is None:
                with self._lock:
                    if key in self._slabs:
                        return self._slabs[key].slab
                    other = self._decoding.get(key)
                    if other is None:
                        started = Gate()
                        self._decoding[key] = own = started
                if other is not None:
                    if not wait:
                        return None
                    began = time.perf_counter()
                    other.wait(POLL_S)
                    CLOCK.waited_for_others(time.perf_counter() - began)
            slab = decode()
            self._store(key, slab, turn)
            return slab
        finally:
            if own is not None:
                # Without the lock: an interrupt could come while it is acquired.
                if key in self._decoding and self._decoding[key] is own:
                    del self._decoding[key]
                own.open()

    def _store(self, key: Hashable, slab: Array, turn: Turn | None) -> None:
        """Cache a slab if it fits."""
        with self._lock:
            if slab.nbytes > self.room:
                return
            self._make_room(slab.nbytes)
            self._insert(key, _Entry(self._turn_number(turn), slab))
            self._make_room()  # garbage collection may have removed room in between

    def cached(self, name: object, groups: Iterable[tuple[int, Indices]]) -> tuple[Cached, list[tuple[int, Indices]]]:
        """Look up several slabs of a dataset.

        Args:
            name: Identifies the dataset.
            groups: Numbers of the slabs, each with the places that need it.

        Returns:
            A queue of the cached ones: number, slab, places; it ends with None. And the other groups.
        """
        cached: Cached = collections.deque()
        others = []
        with self._lock:
            for number, where in groups:
                entry = self._slabs.get((name, number))
                if entry is None:
                    others.append((number, where))
                else:
                    cached.append((number, entry.slab, where))
        cached.append(None)
        return cached, others

    def missing(self, name: object, numbers: Indices, turn: Turn | None) -> Indices:
        """The slabs of a dataset that are neither cached nor being decoded.

        Args:
            name: Identifies the dataset.
            numbers: Numbers of the slabs.
            turn: Turn that needs them, to which cached ones are assigned; None for none.
        """
        keys = [(name, number) for number in numbers.tolist()]
        with self._lock:
            cached = [key for key in keys if key in self._slabs] if turn else []
            turn_number = self._turn_number(turn) if cached else 0
            for key in cached:
                self._move(key, turn_number)
            left = [number for _, number in keys if (name, number) not in self._slabs]
            if self._decoding:
                left = [number for number in left if (name, number) not in self._decoding]
        return np.array(left, np.int64)

    def clear(self) -> None:
        """Drop all slabs."""
        with self._lock:
            slabs: dict[Hashable, _Entry] = {}
            order: dict[int, collections.OrderedDict[Hashable, None]] = {}
            self._slabs, self.held_bytes, self._order = slabs, 0, order

    def _insert(self, key: Hashable, entry: _Entry) -> None:
        """Cache a slab that this thread has decoded, in the room made for it."""
        nbytes = entry.slab.nbytes
        self._add_to_order(key, entry.turn)
        # No calls from here on.
        self._slabs[key] = entry
        self.held_bytes += nbytes

    def _move(self, key: Hashable, turn: int) -> None:
        """Assign a cached slab to another turn."""
        if key not in self._slabs:
            return
        before, slab = self._slabs[key]
        if before == turn:
            return
        moved = _Entry(turn, slab)
        self._add_to_order(key, turn)
        if key in self._slabs:  # garbage collection in a call above may have evicted it
            self._slabs[key] = moved
        if before in self._order:
            keys = self._order[before]
            keys.pop(key, None)
            if not keys and before in self._order:
                del self._order[before]

    def _add_to_order(self, key: Hashable, turn: int) -> None:
        """List a slab for eviction. Before it is cached, since the order must not miss one."""
        keys = self._order.setdefault(turn, collections.OrderedDict())
        keys[key] = None

    def _turn_number(self, turn: Turn | None) -> int:
        """The number of a turn. None counts as the turn before the newest, which is being read."""
        if turn is None:
            return self._newest - 1
        if turn not in self._turns:
            newest = self._newest + 1
            self._turns = dict([*self._turns.items(), (turn, newest)][-TURNS:])
            self._newest = newest
        return self._turns[turn]

    def _make_room(self, nbytes: int = 0) -> None:
        """Evict slabs until this many bytes are free."""
        while self._slabs and self.held_bytes + nbytes > self.room:
            first = self._next_victim()
            if first is None:
                continue
            key, turn = first
            # No calls from here on.
            if key in self._slabs and self._slabs[key].turn == turn:
                slab = self._slabs[key].slab
                del self._slabs[key]
                self.held_bytes -= slab.nbytes

    def _next_victim(self) -> tuple[Hashable, int] | None:
        """The key and turn to evict next, removed from the order; None if the order has just become empty."""
        if not self._order:
            for key, entry in list(self._slabs.items()):
                self._add_to_order(key, entry.turn)
        turn = min(list(self._order), default=None)
        keys = None if turn is None else self._order.get(turn)
        if turn is None or keys is None:
            return None
        try:
            key, _ = keys.popitem(last=False)
        except KeyError:
            key = None
        if not keys and self._order.get(turn) is keys:
            self._order.pop(turn, None)
        return None if key is None else (key, turn)
