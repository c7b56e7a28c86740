"""`PythonWorkers`: worker processes for Python code. Each reader thread has one of its own, for whole batches.

If samples share compressed chunks, the reader process decodes them: each chunk once. The worker processes find the
samples in scratch memory, and transform them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_async_data.host.pipeline.read_task import Read, ReadTask
from lit_async_data.host.processes.child.noted_read import NotedRead
from lit_async_data.host.processes.child.worker_process import WorkerProcess
from lit_async_data.host.processes.child.worker_processes import WorkerProcesses
from lit_async_data.host.processes.ipc.messages import Command, CommandKind
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Limits


class PythonWorkers(WorkerProcesses):
    """Worker processes that each read or transform the batches of one thread.

    Args:
        setup: See `WorkerProcesses`.
        stored: See there.
        slots: See there.
        read: See there.
    """

    def __init__(self, setup: ReaderSetup, stored: int, slots: SharedSlots, read: Read) -> None:
        self._scratch: SharedSlots | None = None
        if setup.read.shares_chunks:
            assert setup.read.transformation is not None
            self._scratch = SharedSlots(setup.read.transformation.scratch_bytes)
            self._scratch.add(setup.plan.workers.processes)
        super().__init__(setup, stored, slots, read, None if self._scratch is None else self._scratch.fd)
        self._read_raw = NotedRead(setup.read.read_raw, slots, first=len(slots.notes) // 4)
        self._release = setup.plan.reserve(setup.read.source)

    def after_read(
        self, keys: Sequence[BatchIndex], cursor: BatchIndex | None, oldest: BatchIndex | None, limits: Limits
    ) -> None:
        ahead = self._setup.ahead
        if ahead is not None and (not self._count or self._scratch is not None):
            ahead(keys, cursor, oldest, limits)

    def close(self) -> None:
        super().close()
        if self._scratch is not None:
            self._scratch.close()
        self._release()

    def _taken_by(self, worker: int) -> list[WorkerProcess]:
        return self._taken([worker] if self._count else [])

    def _have_read(self, processes: Sequence[WorkerProcess], task: ReadTask, epoch: int, samples: Indices) -> None:
        if self._scratch is not None:
            assert task.worker is not None
            self._read_raw(epoch, samples, self._scratch.slot(task.worker))
        first, count, limits = task.reading[0], len(task.reading), task.schedule.limits
        command = Command(CommandKind.READ, task.slot, key=first.key, limits=limits, row=first.first, batches=count)
        self._tell(processes, command)
