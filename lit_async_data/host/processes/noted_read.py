"""`NotedRead`: notes in shared memory what is read, so that it is known if the process crashes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.processes.shared_slots import SharedSlots
from lit_async_data.order.permutation import Indices


class NotedRead:
    """Reads samples, and notes for each thread what it reads.

    Args:
        setup: Reads the samples.
        slots: Has the notes.
        first: Number of the first note to be used.
    """

    def __init__(self, setup: ReaderSetup, slots: SharedSlots, first: int = 0) -> None:
        self._read = setup.read
        self._notes = slots.notes
        self._numbers = itertools.count(first)
        self._thread = threading.local()

    def __call__(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        if not hasattr(self._thread, "number"):
            self._thread.number = next(self._numbers) % len(self._notes)
        note = self._notes[self._thread.number]
        note[:] = epoch, samples[0], len(samples)
        try:
            self._read(epoch, samples, out)
        finally:
            note[2] = 0
