"""`DecodingWorkers`: worker processes that decode small samples, or read under a lock. All share each batch.

Each chunk is decoded by one of them; see `Shares`. Each decodes and fetches ahead for its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_async_data.errors import WorkerError
from lit_async_data.host.pipeline.read_task import Read, ReadTask
from lit_async_data.host.processes.child.worker_process import WorkerProcess
from lit_async_data.host.processes.child.worker_processes import WorkerProcesses
from lit_async_data.host.processes.ipc.messages import Command, CommandKind
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Limits


class DecodingWorkers(WorkerProcesses):
    """Worker processes that share each batch.

    Args:
        setup: See `WorkerProcesses`.
        stored: See there.
        slots: See there.
        read: See there.
    """

    def __init__(self, setup: ReaderSetup, stored: int, slots: SharedSlots, read: Read) -> None:
        self._tasks = setup.tasks()
        self._tasks.add(self.threads(setup.plan.workers.processes))
        super().__init__(setup, stored, slots, read, self._tasks.fd)
        self._shares = setup.read.source.chunks.shares
        # Gives back the room for chunks that this process decodes; None while the others decode them.
        self._release: Callable[[], None] | None = None
        self._reserve()

    def threads(self, count: int) -> int:
        """One reader thread more than processes: while one thread hands over a slot, the processes fill another."""
        return count + 1 if count > 1 else count

    def set_workers(self, count: int) -> None:
        super().set_workers(count)
        if count < 2:
            self._reserve()

    def after_read(
        self, keys: Sequence[BatchIndex], cursor: BatchIndex | None, oldest: BatchIndex | None, limits: Limits
    ) -> None:
        processes: list[WorkerProcess] = []
        try:
            processes = self._taken_by()
            if processes and cursor is not None:
                command = Command(CommandKind.AHEAD, key=keys[0], limits=limits, cursor=cursor, batches=len(keys))
                self._tell(processes, command._replace(readers=len(processes)))
        except WorkerError:
            return  # `_leave` names it in the log; a new process decodes these chunks when it reads them
        finally:
            self._leave(processes)
        if not processes and self._setup.ahead is not None:  # no process reads ahead, so this one does
            self._setup.ahead(keys, cursor, oldest, limits)

    def close(self) -> None:
        super().close()
        self._tasks.close()
        if self._release is not None:
            self._release()

    def _taken_by(self, worker: int = 0) -> list[WorkerProcess]:  # noqa: ARG002
        processes = self._taken(range(self._count))
        if len(processes) > 1:
            self._give_back()
            return processes
        self._leave(processes)  # this process is as fast as a single one
        self._reserve()
        return []

    def _have_read(self, processes: Sequence[WorkerProcess], task: ReadTask, epoch: int, samples: Indices) -> None:
        assert task.worker is not None
        first, plan = task.reading[0], task.schedule.plan(epoch)
        readers = self._shares.readers(plan, plan.bounds(first.key.step)[0], samples, len(processes))
        self._tasks.write(task.worker, samples, readers)
        command = Command(CommandKind.READ, task.slot, key=first.key, row=first.first, thread=task.worker)
        self._tell(processes, command._replace(readers=len(processes)))

    def _reserve(self) -> None:
        with self._lock:
            if self._release is None:
                self._release = self._setup.plan.reserve(self._setup.read.source)

    def _give_back(self) -> None:
        # 1. A thread has found two processes. 2. `set_workers(1)` reserves room, to read here. 3. That thread gives the
        # room back. So it does nothing once no process is in use.
        with self._lock:
            if self._release is not None and self._count:
                self._release()
                self._release = None
