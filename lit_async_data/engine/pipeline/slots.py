"""`SlotPool`: who owns which slot; the states of a slot as one table; leases on slots that were handed out.

No I/O, no torch, no threads. A slot has one owner at a time; `TRANSITIONS` lists how it passes on.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import weakref

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import AsyncDataError


class SlotState(enum.Enum):
    """Who may touch a slot."""

    FREE = "nobody; it waits to be filled"
    FILLING = "one worker writes to it"
    READY = "nobody; it holds batches whose turn will come"
    LENT = "the user, as long as any view of it lives"
    COPYING = "the device reads from it"

    __hash__ = object.__hash__  # of an Enum it is a Python function, which each transition would call


FREE, FILLING, READY, LENT, COPYING = SlotState

# (state, event) -> state. Every other pair is a bug: it raises and changes nothing.
TRANSITIONS: dict[tuple[SlotState, str], SlotState] = {
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
    """An event that is not in the table for this state: a bug in this package."""


class Lease:
    """Keeps a slot with the user: every array made from it refers to it, and when it dies the slot is free.

    It exports memory and is no ndarray: numpy lets a view of a view refer to the memory's owner directly, so an ndarray
    in the middle dies while its slices live.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class _Ended(weakref.ref[Lease]):
    """A weak reference to a lease that knows its slot; when the lease dies, it is put among the vacant slots."""

    __slots__ = ("slot",)
    slot: int


# A vacant slot; one whose lease has ended; None to wake who waits for a slot.
Vacancy = int | _Ended | None


class SlotPool:
    """The slots of one loader: a uint8 array each. Safe to use from several threads."""

    def __init__(self, memories: list[Bytes]) -> None:
        # Reentrant: garbage collection can close a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self.memories: list[Bytes] = []  # by slot
        self._states: list[SlotState] = []
        self._leases: dict[int, _Ended] = {}
        # Slots that nobody can see any more. A lease can end inside any allocation of any thread, also of one that is
        # in the middle of `put` or `get` here, or that holds the lock: the put of a SimpleQueue is reentrant, where a
        # queue.Queue or a lock would wait for itself. The put itself is the callback of a lease: it runs no Python
        # code, in which CPython would take an interrupt (Ctrl-C), print it and drop it.
        self.vacant: queue.SimpleQueue[Vacancy] = queue.SimpleQueue()
        for memory in memories:
            self.add(memory)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, memory: Bytes) -> None:
        with self._lock:
            self.memories.append(memory)
            self._states.append(FREE)
            slot = len(self._states) - 1
        self.vacant.put(slot)

    def count(self, state: SlotState) -> int:
        """Slots in a state. One that nobody can see any more may count as LENT until it is taken."""
        return self._states.count(state)

    @property
    def held(self) -> int:
        """Slots that the user can still see."""
        with self._lock:
            # By the leases and not by what is vacant: a slot that a worker is just taking is in neither.
            return sum(state is LENT and self._leases[slot]() is not None for slot, state in enumerate(self._states))

    def take(self, timeout: float | None = None) -> int | None:
        """Take a slot to fill: the one freed last, which the processor's cache may still hold; None if none came.

        A ``timeout`` of 0 does not wait, and None waits until a slot comes, or `wake`.
        """
        try:
            vacant = [self.vacant.get(timeout=timeout) if timeout != 0 else self.vacant.get_nowait()]
        except queue.Empty:
            return None
        with contextlib.suppress(queue.Empty):
            while True:
                vacant.append(self.vacant.get_nowait())
        last = vacant.pop()
        for other in vacant:  # they wake the other waiting threads
            self.vacant.put(other)
        return None if last is None else self._taken(last)

    def take_all(self) -> list[int]:
        """Take all slots that are vacant, to fill them. Does not wait."""
        taken = []
        try:
            while True:
                if (vacant := self.vacant.get_nowait()) is not None:
                    taken.append(self._taken(vacant))
        except queue.Empty:
            return taken

    def _taken(self, vacant: int | _Ended) -> int:
        slot = vacant if isinstance(vacant, int) else vacant.slot
        if self._states[slot] is FREE:
            self.move(slot, "take")
        else:
            self.move(slot, "returned", "take")
        return slot

    def wake(self, takers: int) -> None:
        """Let this many waiting `take` return None."""
        for _ in range(takers):
            self.vacant.put(None)

    def lend(self, slot: int) -> Bytes:
        """A slot for the user, as uint8. When any thread drops the last array made from it, the slot is vacant."""
        self.move(slot, "lend")
        lease = Lease(self.memories[slot])
        # The callback can run inside any allocation of any thread, so it takes no lock and logs nothing.
        ended = _Ended(lease, self.vacant.put)
        ended.slot = slot
        self._leases[slot] = ended
        return np.asarray(lease)

    def clear(self) -> None:
        """Free the memory when nothing will be filled any more; lent slots live on with their views."""
        self.memories.clear()

    def move(self, slot: int, *events: str) -> None:
        """Change the state of a slot as `TRANSITIONS` says, or raise an error and leave it where it was.

        A slot that is free afterwards can be taken.
        """
        with self._lock:
            state = self._states[slot]
            for event in events:
                try:
                    state = TRANSITIONS[state, event]
                except KeyError:
                    raise IllegalTransitionError(f"slot {slot} is {state.name} and cannot {event}") from None
            self._states[slot] = state
        if state is FREE:
            self.vacant.put(slot)
