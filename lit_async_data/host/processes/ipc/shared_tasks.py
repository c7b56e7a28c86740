"""`SharedTasks`: which samples each of several worker processes reads, and where in the slot they go."""

from __future__ import annotations

import numpy as np

from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.order.permutation import Indices


class SharedTasks:
    """The samples of the tasks of a reader process, in memory that it shares with its worker processes.

    Each of its threads has an area of its own for the task that it is at: int64 numbers, first the end of each
    process's samples in the lists that follow, then the samples and their rows in the slot, process by process.

    Args:
        readers: Most worker processes.
        samples: Most samples of a task.
        fd: Descriptor of the memory, in a worker process.

    Attributes:
        fd: Descriptor of the memory.
    """

    def __init__(self, readers: int, samples: int, fd: int | None = None) -> None:
        self._readers, self._samples = readers, samples
        self._areas = SharedSlots(8 * (readers + 2 * samples), fd)
        self.fd = self._areas.fd

    def add(self, threads: int) -> None:
        """Make room for the tasks of threads, in the reader process.

        Raises:
            MemoryBudgetError: The system refuses the memory.
        """
        self._areas.add(threads)

    def write(self, thread: int, samples: Indices, readers: Indices) -> None:
        """Write the task of a thread.

        Args:
            thread: Number of the thread.
            samples: All samples of the task, in the order of their rows.
            readers: The process that reads each of them.
        """
        ends, listed, rows = self._parts(thread)
        # Two bytes at most: numpy sorts these in linear time.
        order = np.argsort(readers.astype(np.uint16), kind="stable")
        ends[:] = np.cumsum(np.bincount(readers, minlength=self._readers))
        listed[: len(samples)], rows[: len(samples)] = samples[order], order

    def read(self, thread: int, reader: int) -> tuple[Indices, Indices, int]:
        """The task of a thread, in a worker process.

        Args:
            thread: Number of the thread.
            reader: Number of the process.

        Returns:
            The samples that this process reads, their rows in ascending order, and the number of all samples.
        """
        ends, samples, rows = self._parts(thread)
        begin, end = int(ends[reader - 1]) if reader else 0, int(ends[reader])
        return samples[begin:end], rows[begin:end], int(ends[-1])

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._areas.close()

    def _parts(self, thread: int) -> tuple[Indices, Indices, Indices]:
        numbers = self._areas.slot(thread).view(np.int64)
        ends, samples, rows = np.split(numbers, (self._readers, self._readers + self._samples))
        return ends, samples, rows
