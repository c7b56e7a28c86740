"""`SharedSlots`: memory for slots that the trainer's process and a reader process both map.

Slots lie in a memfd: an anonymous file in memory. It has no name, so nothing is left behind however the processes end,
and it takes nothing of ``/dev/shm``, which containers limit to 64 MB.
"""

from __future__ import annotations

import io
import mmap
import os

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.memory import readable

# The file begins with a page in which each worker notes what it reads: int64, shape (workers, NOTE).
NOTES_BYTES = mmap.PAGESIZE
# Epoch, first sample, and number of samples that a worker reads; 0 samples if it reads nothing.
NOTE = 3
MOST_NOTES = NOTES_BYTES // (8 * NOTE)


class SharedSlots:
    """The slots of one loader, in shared memory.

    Args:
        slot_bytes: Bytes of one slot.
        fd: Descriptor of the file, in the process that did not create it; it stays open.

    Attributes:
        notes: What each worker reads.
    """

    def __init__(self, slot_bytes: int, fd: int | None = None) -> None:
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = slot_bytes
        self._file = memory_file("lit_async_data slots") if fd is None else io.FileIO(fd, "r+b", closefd=False)
        if fd is None:
            os.ftruncate(self.fd, NOTES_BYTES)
        page = np.frombuffer(mmap.mmap(self.fd, NOTES_BYTES), np.int64)
        self.notes = page[: MOST_NOTES * NOTE].reshape(MOST_NOTES, NOTE)
        self._slots: list[Bytes] = []

    @property
    def fd(self) -> int:
        """Descriptor of the file."""
        return self._file.fileno()

    def add(self, count: int) -> list[Bytes]:
        """More slots, for the creator of the file. Their memory is not touched yet.

        Raises:
            MemoryBudgetError: The system refuses the memory.
        """
        known = len(self._slots)
        if not count:
            return []
        try:
            os.ftruncate(self.fd, NOTES_BYTES + (known + count) * self._stride)
            self._map()
        except OSError as error:
            raise MemoryBudgetError(
                f"memory_budget: the system refuses {readable(count * self._stride)} for {count} slots "
                f"({error.strerror}); set a smaller batch_size or queue_depth, or a higher limit (ulimit -v)"
            ) from error
        return self._slots[known:]

    def slot(self, number: int) -> Bytes:
        """The memory of a slot."""
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


def memory_file(name: str) -> io.FileIO:
    """A new anonymous file in memory; its descriptor is closed with the object.

    Args:
        name: For people who look at the process's descriptors.
    """
    return open(name, "w+b", buffering=0, opener=_memory_descriptor)


def _memory_descriptor(name: str, _: int) -> int:
    (descriptor,) = map(os.memfd_create, (name,))  # returned without another call: see `opening`
    return descriptor
