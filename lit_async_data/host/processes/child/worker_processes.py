"""`WorkerProcesses`: the worker processes of a reader process, where one GIL is not enough for Python code.

The order and the slots stay with the reader process. Each of its threads has a worker process of its own, tells it
which batches to read, and waits for it. If samples share compressed chunks, the reader process decodes them: each chunk
once. The worker processes find the samples in scratch memory, and transform them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from lit_async_data.batch.spec import BatchLayout, Bytes
from lit_async_data.errors import WorkerError
from lit_async_data.host.pipeline.read_task import FilledSlot, Read, ReadTask
from lit_async_data.host.processes.child.noted_read import NotedRead
from lit_async_data.host.processes.child.worker_process import NotBegunError, WorkerProcess
from lit_async_data.host.processes.ipc.messages import Command, CommandKind
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots, worker_note
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Limits
from lit_async_data.sources.contract.stage_clock import CLOCK

log = logging.getLogger(__name__)

# How often batches are given to processes that end before they begin to read them.
ATTEMPTS = 3
# Processes that may end while they start; after that this process reads by itself.
MOST_FAILED = 3


class WorkerProcesses:
    """The worker processes. They end with this process. Used by all reader threads.

    With one worker there are none, and this process reads by itself; also while they start, so that the first batches
    do not wait for them.

    Args:
        setup: What they read, and how many there may be.
        stored: Descriptor of the same.
        slots: The slots that they fill.
        read: Reads samples here.
    """

    def __init__(self, setup: ReaderSetup, stored: int, slots: SharedSlots, read: Read) -> None:
        self._setup, self._read, self._slots = setup, read, slots
        self._scratch: SharedSlots | None = None
        if setup.read.shares_chunks:
            assert setup.read.transformation is not None
            self._scratch = SharedSlots(setup.read.transformation.scratch_bytes)
            self._scratch.add(setup.plan.workers.processes)
        memory = None if self._scratch is None else self._scratch.fd
        self._start = functools.partial(WorkerProcess, stored=stored, slots=slots, memory=memory)
        self._read_raw = NotedRead(setup.read.read_raw, slots, first=len(slots.notes) // 4)
        self._release = setup.plan.reserve(setup.read.source)
        # The lock guards everything below.
        self._lock = threading.Lock()
        self._processes: list[WorkerProcess | None] = [None] * setup.plan.workers.processes
        self._count = _in_use(setup.plan.workers.threads)
        self._begun: set[int] = set()  # numbers of the workers that have been ready
        self._failed = 0  # processes that ended while they started

    def set_workers(self, count: int) -> None:
        """Use another number of processes for the tasks that begin from now on."""
        with self._lock:
            self._count = in_use = _in_use(count)
            self._begun &= set(range(in_use))
        self._end_unused(in_use)

    def run(self, task: ReadTask, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        """Read the batches of a task into its slot."""
        return task.run(functools.partial(self._read_for, task), layout, memory)

    def after_read(
        self, keys: Sequence[BatchIndex], cursor: BatchIndex | None, oldest: BatchIndex | None, limits: Limits
    ) -> None:
        """Decode and fetch for the batches after these, if this process reads them; see `DecodeAhead`."""
        ahead = self._setup.ahead
        if ahead is not None and (not self._count or self._scratch is not None):
            ahead(keys, cursor, oldest, limits)

    def close(self) -> None:
        """End the processes, and give memory back."""
        self._count = 0
        for process in self._processes:
            if process is not None:
                process.close()
        if self._scratch is not None:
            self._scratch.close()
        self._release()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_for(self, task: ReadTask, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read batches of a task, or have them read.

        Raises:
            WorkerError: A process has ended; another one is started for the next batches.
            Exception: As raised there.
        """
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(NotBegunError):
                return self._read_once(task, epoch, samples, out)
        return self._read_once(task, epoch, samples, out)

    def _read_once(self, task: ReadTask, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        assert task.worker is not None
        process = self._taken(task.worker) if self._count else None
        if process is None:
            self._read(epoch, samples, out)
            return
        try:
            self._have_read(process, task, epoch, samples)
        except NotBegunError:
            raise
        except WorkerError as error:
            raise self._explained(error, task, process, samples) from error.__cause__
        finally:
            self._leave(process)

    def _have_read(self, process: WorkerProcess, task: ReadTask, epoch: int, samples: Indices) -> None:
        """Have a process read the batches that a task is at, and wait for it."""
        if self._scratch is not None:
            assert task.worker is not None
            self._read_raw(epoch, samples, self._scratch.slot(task.worker))
        first, count, limits = task.reading[0], len(task.reading), task.schedule.limits
        command = Command(CommandKind.READ, task.slot, key=first.key, limits=limits, row=first.first, batches=count)
        began = time.perf_counter()
        try:
            CLOCK.done_elsewhere(process.wait(process.send(command)))
        finally:
            CLOCK.waited(began)

    def _explained(self, error: WorkerError, task: ReadTask, process: WorkerProcess, samples: Indices) -> WorkerError:
        """The error with what the process that has ended was reading."""
        source = self._setup.read.source
        if process.ended is not None and len(noted := self._slots.was_reading(worker_note(process.number))):
            samples = noted
        number = int(source.ids(samples[:1])[0])
        place = source.locate([number])[0]
        what = f"{error}, while it read {task}; its first sample was {number}, row {place.row} of {place.file}"
        if len(task.reading) > 1:
            log.warning("%s; a new process reads these batches again, one by one", what)
        return WorkerError(
            f"{what}; the next batches are read by a new process",
            file=place.file,
            row=place.row,
            sample_id=number,
            stage="read",
            worker=task.worker,
        )

    # -- processes ---------------------------------------------------------------------------------------------------

    def _taken(self, number: int) -> WorkerProcess | None:
        """A process, to be used until `_leave`, started if need be; None while it takes no commands."""
        if self._failed >= MOST_FAILED:
            self._end_unused(0)
            return None
        with self._lock:
            try:
                process = self._running(number)
            except WorkerError as error:
                self._note_failure(error)
                return None
            process.users += 1
            # One that takes the place of another is waited for: what ended that one should not end this process.
            wait = number in self._begun
        ready = False
        with contextlib.suppress(WorkerError):  # `_leave` names it
            ready = process.ready(wait=wait)
        if not ready:
            self._leave(process)
            return None
        with self._lock:
            self._begun.add(number)
        return process

    def _end_unused(self, first: int) -> None:
        """End the processes from a number on that no thread uses; `_leave` ends the others."""
        with self._lock:
            unused = [process for process in self._processes[first:] if process is not None and not process.users]
            self._remove(unused)
        for process in unused:
            process.close()

    def _note_failure(self, error: WorkerError) -> None:
        """Note that a process could not start."""
        self._failed += 1
        then = "itself from now on" if self._failed >= MOST_FAILED else "itself until another one has started"
        log.warning("%s, while it started; the reader process reads %s", error, then)

    def _running(self, number: int) -> WorkerProcess:
        process = self._processes[number]
        if process is not None and process.ended is not None:
            self._give_up(process)
            process = None
        if process is None:
            process = self._processes[number] = self._start(number)
        return process

    def _leave(self, process: WorkerProcess) -> None:
        """Use a process no more. The last to do so closes one that has ended, or that is one too many."""
        with self._lock:
            process.users -= 1
            if process.ended is not None:
                self._give_up(process)
            unused = not process.users and (process.ended is not None or process.number >= self._count)
            if unused:
                self._remove([process])
        if unused:
            process.close()

    def _give_up(self, process: WorkerProcess) -> None:
        """Name a process that has ended, and make room for another. The first thread that notices does so."""
        assert process.ended is not None
        if self._processes[process.number] is process:
            self._processes[process.number] = None
            if process.was_ready:
                log.warning("%s; a new one starts when one is needed", process.ended)
            else:
                self._note_failure(process.ended)

    def _remove(self, processes: Sequence[WorkerProcess]) -> None:
        for process in processes:
            if self._processes[process.number] is process:
                self._processes[process.number] = None


def _in_use(workers: int) -> int:
    """The number of worker processes for a number of workers: a single worker reads in the reader process."""
    return workers if workers > 1 else 0
