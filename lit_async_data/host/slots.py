"""Who owns which slot: `SlotPool`, the states of a slot as one table, and the leases on what was handed out.

No I/O, no torch, no threads of its own. A slot belongs to one party at a time; `TRANSITIONS` says how it passes on.
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
    READY = "nobody; it holds a batch, or several small ones, whose turn will come"
    LENT = "the user, for as long as any view of it lives"
    COPYING = "the device reads from it"


FREE, FILLING, READY, LENT, COPYING = SlotState

# (state, event) -> state. Every other pair is a mistake of the program: it raises and changes nothing.
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
    """An event that the table does not know in this state: a bug in this package."""


class Lease:
    """What keeps a slot with the user: every array made from it holds it, and when it dies the slot is free.

    It is an exporter of memory and not an ndarray: numpy lets views of a view refer to the memory's owner directly, so
    an ndarray in the middle dies while its slices live.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = dict(memory.__array_interface__)


class _Ended(weakref.ref[Lease]):
    """A reference to a lease that knows its slot: it puts itself among the vacant slots when the lease dies."""

    __slots__ = ("slot",)
    slot: int


class SlotPool:
    """The slots of one loader. Safe to use from several threads.

    Args:
        memories: One uint8 array per slot.
    """

    def __init__(self, memories: list[Bytes]) -> None:
        # Reentrant: garbage collection can close a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self._memories: list[Bytes] = []
        self._states: list[SlotState] = []
        self._leases: dict[int, _Ended] = {}
        # Slots that nobody can see any more. A SimpleQueue because a lease can end inside any allocation of any
        # thread, also of one that is in the middle of `put` or `get` here, or that holds our lock: its put is
        # reentrant, where a queue.Queue or a lock of ours would wait for itself. It is itself the callback of a lease:
        # it runs no Python code, in which CPython would take an interrupt (Ctrl-C), print it and drop it.
        self._vacant: queue.SimpleQueue[int | _Ended | None] = queue.SimpleQueue()
        for memory in memories:
            self.add(memory)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, memory: Bytes) -> None:
        """One more slot, free."""
        with self._lock:
            self._memories.append(memory)
            self._states.append(FREE)
            slot = len(self._states) - 1
        self._vacant.put(slot)

    def memory(self, slot: int) -> Bytes:
        """The bytes of a slot, for the party that owns it."""
        return self._memories[slot]

    def state(self, slot: int) -> SlotState:
        """The state of a slot. One whose lease has ended counts as LENT until it is taken."""
        return self._states[slot]

    def count(self, state: SlotState) -> int:
        """How many slots are in this state."""
        return self._states.count(state)

    @property
    def held(self) -> int:
        """Slots that the user can still see."""
        with self._lock:
            # By the leases and not by what is vacant: a slot that a worker is just taking is in neither.
            return sum(state is LENT and self._leases[slot]() is not None for slot, state in enumerate(self._states))

    def take(self, timeout: float | None = None) -> int | None:
        """A slot to fill, waiting for one to become free: that let go last, which the processor's cache may still hold.

        Args:
            timeout: Seconds to wait at most; 0 does not wait, None waits until `wake`.

        Returns:
            The slot, now FILLING, or None if there was none in time or the caller was woken.
        """
        try:
            vacant = [self._vacant.get(timeout=timeout) if timeout != 0 else self._vacant.get_nowait()]
        except queue.Empty:
            return None
        with contextlib.suppress(queue.Empty):
            while True:
                vacant.append(self._vacant.get_nowait())
        last = vacant.pop()
        for other in vacant:  # whoever else waits is woken by them
            self._vacant.put(other)
        slot = last.slot if isinstance(last, _Ended) else last
        if slot is not None:
            if self._states[slot] is LENT:
                self._move(slot, "returned")
            self._move(slot, "take")
        return slot

    def wake(self, takers: int) -> None:
        """Let this many waiting `take` return None."""
        for _ in range(takers):
            self._vacant.put(None)

    def filled(self, slot: int) -> None:
        """The worker has written what belongs there."""
        self._move(slot, "filled")

    def abandon(self, slot: int) -> None:
        """The worker gives up: the read failed, or nobody wants it any more."""
        self._move(slot, "abandon")
        self._vacant.put(slot)

    def drop(self, slot: int) -> None:
        """Nobody wants what is there any more, or it was handed out as a copy."""
        self._move(slot, "drop")
        self._vacant.put(slot)

    def copy(self, slot: int) -> None:
        """The device begins to read."""
        self._move(slot, "copy")

    def copied(self, slot: int) -> None:
        """The device has read everything."""
        self._move(slot, "copied")
        self._vacant.put(slot)

    def lend(self, slot: int) -> Bytes:
        """Hand a slot to the user.

        Returns:
            A uint8 array over the slot. When the last array made from it is gone, whatever thread drops it, the slot
            is vacant.
        """
        self._move(slot, "lend")
        lease = Lease(self._memories[slot])
        # The callback does one thing, because it can run inside any allocation of any thread: no lock, no log.
        ended = _Ended(lease, self._vacant.put)
        ended.slot = slot
        self._leases[slot] = ended
        return np.asarray(lease)

    def clear(self) -> None:
        """Give the memory back, when nothing will be filled any more; what is lent lives on with its views."""
        self._memories.clear()

    def _move(self, slot: int, event: str) -> None:
        with self._lock:
            state = self._states[slot]
            try:
                self._states[slot] = TRANSITIONS[state, event]
            except KeyError:
                raise IllegalTransitionError(f"slot {slot} is {state.name} and cannot {event}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram; the package's README shows it, and a test keeps it up to date."""
    lines = ["stateDiagram-v2", "    [*] --> FREE"]
    lines += [f"    {state.name} --> {after.name}: {event}" for (state, event), after in TRANSITIONS.items()]
    return "\n".join(lines)
