"""Who owns which slot: `Ring`, the states of a place as one table, and the leases on what was handed out.

A slot is memory that is filled in one go. It has a place for each of the batches that are read together, one or, where
they are small, several. A place belongs to one party at a time; `TRANSITIONS` says how it passes on. A slot is filled
again when all its places are free. No I/O, no torch, no threads of its own.
"""

from __future__ import annotations

import enum
import queue
import threading
import weakref

import numpy as np

from lit_async_data.errors import AsyncDataError
from lit_async_data.spec import Bytes


class PlaceState(enum.Enum):
    """Who may touch a place."""

    FREE = "nobody; it waits to be filled"
    FILLING = "one worker writes to it"
    READY = "nobody; it holds a batch that waits for its turn"
    LENT = "the user, for as long as any view of it lives"
    COPYING = "the device reads from it"


FREE, FILLING, READY, LENT, COPYING = PlaceState

# (state, event) -> state. Every other pair is a mistake of the program: it raises and changes nothing.
TRANSITIONS: dict[tuple[PlaceState, str], PlaceState] = {
    (FREE, "take"): FILLING,
    (FILLING, "filled"): READY,
    (FILLING, "abandon"): FREE,
    (READY, "lend"): LENT,
    (READY, "copy"): COPYING,
    (READY, "drop"): FREE,
    (LENT, "returned"): FREE,
    (COPYING, "copied"): FREE,
}


class IllegalTransitionError(AsyncDataError):
    """An event that the table does not know in this state: a bug in this package."""


class Lease:
    """What keeps a place with the user: every array made from it holds it, and when it dies the place is free.

    It is an exporter of memory and not an ndarray: numpy lets views of a view refer to the memory's owner directly, so
    an ndarray in the middle dies while its slices live.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = dict(memory.__array_interface__)


class Ring:
    """The slots of one loader. Safe to use from several threads.

    Slots and places are numbered: slot s has the places ``s * batches`` to ``(s + 1) * batches - 1``.

    Args:
        memories: One uint8 array per slot.
        batches: Places in each slot.
    """

    def __init__(self, memories: list[Bytes], batches: int = 1) -> None:
        self.batches = batches
        # Reentrant: garbage collection can close a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self._memories: list[Bytes] = []
        self._states: list[PlaceState] = []
        self._leases: dict[int, weakref.ref[Lease]] = {}
        # Places that nobody can see any more. A SimpleQueue because a lease can end inside any allocation of any
        # thread, also of one that is in the middle of `put` or `get` here, or that holds our lock: its put is
        # reentrant, where a queue.Queue or a lock of ours would wait for itself.
        self._vacant: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._gathered: list[int] = []  # of each slot, how many places have come out of that queue
        for memory in memories:
            self.add(memory)

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, memory: Bytes) -> None:
        """One more slot, free."""
        with self._lock:
            slot = len(self._memories)
            self._memories.append(memory)
            self._states += [FREE] * self.batches
            self._gathered.append(0)
        for place in self.places(slot):
            self._vacant.put(place)

    def places(self, slot: int) -> range:
        """The places of a slot, in the order in which they are filled."""
        return range(slot * self.batches, (slot + 1) * self.batches)

    def memory(self, place: int) -> Bytes:
        """The bytes of the slot that a place is in, for the party that owns the place."""
        return self._memories[place // self.batches]

    def state(self, place: int) -> PlaceState:
        """The state of a place. One whose lease has ended counts as LENT until its slot is taken."""
        return self._states[place]

    def count(self, state: PlaceState) -> int:
        """How many places are in this state."""
        return self._states.count(state)

    @property
    def held(self) -> set[int]:
        """Slots of which the user can still see something."""
        with self._lock:
            # By the leases and not by what is vacant: a place that a worker is just taking is in neither.
            lent = [place for place, state in enumerate(self._states) if state is LENT]
            return {place // self.batches for place in lent if self._leases[place]() is not None}

    def take(self, timeout: float | None = None) -> int | None:
        """A slot to fill, waiting for one to become free.

        Args:
            timeout: Seconds to wait at most for each place; 0 does not wait, None waits until `wake`.

        Returns:
            The slot, its places now FILLING, or None if there was none in time or the caller was woken.
        """
        while True:
            try:
                place = self._vacant.get(timeout=timeout) if timeout != 0 else self._vacant.get_nowait()
            except queue.Empty:
                return None
            if place is None:
                return None
            if self._completes(place):
                slot = place // self.batches
                for each in self.places(slot):
                    self._move(each, "take")
                return slot

    def _completes(self, place: int) -> bool:
        """Whether with this place, which has become vacant, all of its slot are free."""
        with self._lock:
            if self._states[place] is LENT:
                self._move(place, "returned")
            slot = place // self.batches
            self._gathered[slot] = (self._gathered[slot] + 1) % self.batches
            return self._gathered[slot] == 0

    def wake(self, takers: int) -> None:
        """Let this many waiting `take` return None."""
        for _ in range(takers):
            self._vacant.put(None)

    def filled(self, place: int) -> None:
        """The worker has written the batch."""
        self._move(place, "filled")

    def abandon(self, place: int) -> None:
        """The worker gives up: the read failed, nobody wants the batch any more, or there is none for this place."""
        self._move(place, "abandon")
        self._vacant.put(place)

    def drop(self, place: int) -> None:
        """Nobody wants the batch any more, or it was handed out as a copy."""
        self._move(place, "drop")
        self._vacant.put(place)

    def copy(self, place: int) -> None:
        """The device begins to read."""
        self._move(place, "copy")

    def copied(self, place: int) -> None:
        """The device has read everything."""
        self._move(place, "copied")
        self._vacant.put(place)

    def lend(self, place: int) -> Bytes:
        """Hand a place to the user.

        Returns:
            A uint8 array over its whole slot. When the last array made from it is gone, whatever thread drops it, the
            place is vacant.
        """
        self._move(place, "lend")
        lease = Lease(self.memory(place))
        self._leases[place] = weakref.ref(lease)
        # The callback does one thing, because it can run inside any allocation of any thread: no lock, no log.
        weakref.finalize(lease, self._vacant.put, place).atexit = False
        return np.asarray(lease)

    def clear(self) -> None:
        """Give the memory back, when nothing will be filled any more; what is lent lives on with its views."""
        self._memories.clear()

    def _move(self, place: int, event: str) -> None:
        with self._lock:
            state = self._states[place]
            try:
                self._states[place] = TRANSITIONS[state, event]
            except KeyError:
                raise IllegalTransitionError(f"place {place} is {state.name} and cannot {event}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram; the package's README shows it, and a test keeps it up to date."""
    lines = ["stateDiagram-v2", "    [*] --> FREE"]
    lines += [f"    {state.name} --> {after.name}: {event}" for (state, event), after in TRANSITIONS.items()]
    return "\n".join(lines)
