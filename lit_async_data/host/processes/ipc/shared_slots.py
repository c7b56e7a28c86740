"""`SharedSlots`: memory for slots that the trainer's process and a reader process both map.

They lie in one `SharedFile`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.processes.ipc.shared_file import SharedFile
from lit_async_data.host.resources.memory import readable
from lit_async_data.order.permutation import Indices

# The file begins with notes of what each worker reads: int64, shape (MOST_NOTES, 2 + NOTED). A note is the epoch, the
# number of samples, which is 0 if the worker reads nothing, and the first of them.
MOST_NOTES, NOTED = 128, 62
NOTES_BYTES = MOST_NOTES * (2 + NOTED) * 8  # whole pages


def worker_note(worker: int) -> int:
    """The number of the note of a worker process. The threads of the reader process have those before."""
    return (MOST_NOTES // 2 + worker) % MOST_NOTES


class SharedSlots:
    """The slots of one loader, in shared memory, and notes of what each worker reads.

    A process that did not create them gets the descriptor ``fd``, which stays open.
    """

    def __init__(self, slot_bytes: int, fd: int | None = None) -> None:
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = slot_bytes
        self._created: SharedFile | None = None
        if fd is None:
            self._created = SharedFile("lit_async_data slots")
            self._file = self._created.file
            try:
                with self._refused(NOTES_BYTES, "the notes of workers"):
                    self._created.reach(NOTES_BYTES)
            except MemoryBudgetError:
                self._file.close()
                raise
        else:
            self._file = io.FileIO(fd, "r+b", closefd=False)
        self.notes = np.frombuffer(mmap.mmap(self.fd, NOTES_BYTES), np.int64).reshape(MOST_NOTES, 2 + NOTED)
        self._slots: list[Bytes] = []

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def add(self, count: int) -> list[Bytes]:
        """More slots, for the creator of the file. Their memory is not touched yet."""
        known = len(self._slots)
        if not count:
            return []
        assert self._created is not None
        with self._refused(count * self._stride, f"{count} slots"):
            self._created.reach(NOTES_BYTES + (known + count) * self._stride)
            self._map()
        return self._slots[known:]

    def being_read(self) -> list[tuple[int, int, Indices]]:
        """For each worker that reads: the epoch, the number of samples, and the first of them."""
        return [(int(note[0]), int(note[1]), note[2 : 2 + note[1]].copy()) for note in self.notes if note[1]]

    def was_reading(self, note: int) -> Indices:
        """The first samples that a worker was reading when its process ended; clears its note."""
        found = self.notes[note]
        samples: Indices = found[2 : 2 + found[1]].copy()
        found[1] = 0
        return samples

    @contextlib.contextmanager
    def _refused(self, nbytes: int, what: str) -> Iterator[None]:
        assert self._created is not None
        try:
            yield
        except OSError as error:
            raise MemoryBudgetError(
                f"memory_budget: the system refuses {readable(nbytes)} for {what} ({error.strerror}); "
                f"{self._created.advice()}"
            ) from error

    def slot(self, number: int) -> Bytes:
        if number >= len(self._slots):
            self._map()
        return self._slots[number]

    def _map(self) -> None:
        """Map the slots that the file has and that are not mapped, at once: each map holds a descriptor."""
        begin = NOTES_BYTES + len(self._slots) * self._stride
        memory = np.frombuffer(mmap.mmap(self.fd, os.fstat(self.fd).st_size - begin, offset=begin), np.uint8)
        self._slots += [memory[first : first + self._slot_bytes] for first in range(0, len(memory), self._stride)]

    def close(self) -> None:
        """Close the descriptor. Memory lives on with the arrays that see it."""
        self._slots.clear()
        self.notes = self.notes[:0].copy()
        self._file.close()


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
