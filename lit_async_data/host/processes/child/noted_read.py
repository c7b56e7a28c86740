"""`NotedRead`: notes in shared memory what is read, so that it is known if the process crashes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from lit_async_data.host.processes.ipc.shared_slots import NOTED, SharedSlots
from lit_async_data.order.permutation import Indices


class NotedRead:
    """Reads samples, and notes for each thread what it reads, from a first note on."""

    def __init__(self, read: Callable[[int, Indices, Any], None], slots: SharedSlots, first: int = 0) -> None:
        self._read = read
        self._notes = slots.notes
        self._numbers = itertools.count(first)
        self._thread = threading.local()

    def __call__(self, epoch: int, samples: Indices, out: Any) -> None:
        if not hasattr(self._thread, "number"):
            self._thread.number = next(self._numbers) % len(self._notes)
        note = self._notes[self._thread.number]
        first = samples[:NOTED]
        note[0], note[2 : 2 + len(first)] = epoch, first
        note[1] = len(samples)
        try:
            self._read(epoch, samples, out)
        finally:
            note[1] = 0
