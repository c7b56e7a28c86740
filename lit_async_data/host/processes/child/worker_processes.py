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
from lit_async_data.host.processes.channel import Channel
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, ReportKind
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import NotedRead, SharedSlots, worker_note
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.supervisor import POLL_S
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.sources.contract.stage_clock import CLOCK, Work

log = logging.getLogger(__name__)

# How often batches are given to processes that end before they begin to read them.
ATTEMPTS = 3
# Processes that may end while they start; after that this process reads by itself.
MOST_FAILED = 3


class NotBegunError(WorkerError):
    """A process ended before it got a command, which another one may carry out."""


class WorkerProcess:
    """Carries out one command at a time, for one thread at a time.

    Args:
        number: Number of the worker.
        stored: Descriptor of the setup.
        slots: The slots that it fills.
        memory: Descriptor of further memory that it needs; None for none.

    Attributes:
        was_ready: Whether it has ever taken commands.
        ended: Why it takes no more commands; None as long as it does.
    """

    def __init__(self, number: int, stored: int, slots: SharedSlots, memory: int | None) -> None:
        self.number, self.was_ready = number, False
        self.ended: WorkerError | None = None
        self._channel = Channel(ReaderProcess(number))
        self._done: list[tuple[Work, bytes]] = []
        try:
            self._channel.open(stored, slots, memory)
        except WorkerError:
            self._channel.close()
            raise

    def ready(self, *, wait: bool) -> bool:
        """Whether it takes commands; a `WorkerError` if it has ended."""
        if not self.was_ready:
            self._receive(0.0)
        while wait and not self.was_ready:
            self._receive(POLL_S)
        return self.was_ready

    def carry_out(self, command: Command) -> Work:
        """Have a command carried out; returns what was done for it."""
        try:
            self._channel.send(command)
        except WorkerError as error:
            self.ended = error
            raise NotBegunError(str(error)) from error.__cause__
        while not self._done:
            self._receive(POLL_S)
        work, raised = self._done.pop()
        if raised:
            raise unpacked_errors(raised, self._channel.pid)[0]
        return work

    def close(self) -> None:
        self._channel.close()

    def _receive(self, seconds: float) -> None:
        if seconds:
            self._channel.wait(seconds)
        try:
            reports = self._channel.receive()
        except WorkerError as error:
            self.ended = error
            raise
        for report, payload in reports:
            if report.kind == ReportKind.READY:
                self.was_ready = True
            else:
                self._done.append((report.work, payload))


class WorkerProcesses:
    """The worker processes. They end with this process. Used by all reader threads.

    With one worker there are none, and this process reads by itself; also while they start, so that the first batches
    do not wait for them.
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
        # Each is held by the thread that uses the process of this number.
        self._seats = [threading.Lock() for _ in range(setup.plan.workers.processes)]
        self._processes: list[WorkerProcess | None] = [None for _ in self._seats]
        self._count = _in_use(setup.plan.workers.threads)
        self._begun: set[int] = set()  # numbers of the workers that have been ready
        self._failed = 0  # processes that ended while they started

    def set_workers(self, count: int) -> None:
        """Use another number of processes for the tasks that begin from now on."""
        if self._failed < MOST_FAILED:
            self._count = _in_use(count)
            self._end_unused()

    def run(self, task: ReadTask, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        return task.run(functools.partial(self._read_for, task), layout, memory)

    def ahead(self, schedule: Schedule, keys: Sequence[BatchIndex], unread: BatchIndex) -> None:
        """Fetch and decode for the batches after these, if this process reads them; see `Ahead`."""
        ahead = self._setup.ahead
        if ahead is not None and (not self._count or self._scratch is not None):
            ahead(schedule, keys, unread)

    def close(self) -> None:
        self._count = 0
        for number in range(len(self._seats)):
            self._end(number)
        if self._scratch is not None:
            self._scratch.close()
        self._release()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_for(self, task: ReadTask, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read batches of a task, or have them read."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(NotBegunError):
                return self._read_once(task, epoch, samples, out)
        return self._read_once(task, epoch, samples, out)

    def _read_once(self, task: ReadTask, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        number = task.worker
        assert number is not None
        try:
            with self._seats[number]:
                process = self._process(number) if number < self._count else None
                if process is None:
                    self._read(epoch, samples, out)
                else:
                    self._have_read(process, task, epoch, samples)
        finally:
            if number >= self._count:
                self._end_unused()

    def _have_read(self, process: WorkerProcess, task: ReadTask, epoch: int, samples: Indices) -> None:
        if self._scratch is not None:
            assert task.worker is not None
            self._read_raw(epoch, samples, self._scratch.slot(task.worker))
        first, count, limits = task.reading[0], len(task.reading), task.schedule.limits
        command = Command(CommandKind.READ, task.slot, key=first.key, limits=limits, row=first.first, batches=count)
        began = time.perf_counter()
        try:
            CLOCK.done_elsewhere(process.carry_out(command))
        except WorkerError as error:
            if process.ended is None or isinstance(error, NotBegunError):
                raise
            raise self._explained(error, task, process, samples) from error.__cause__
        finally:
            CLOCK.waited(began)
            self._replace_ended(process)

    def _explained(self, error: WorkerError, task: ReadTask, process: WorkerProcess, samples: Indices) -> WorkerError:
        """The error with what the process that has ended was reading."""
        source = self._setup.read.source
        if len(noted := self._slots.was_reading(worker_note(process.number))):
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

    def _process(self, number: int) -> WorkerProcess | None:
        """The process of a worker, started if need be; None while it takes no commands."""
        try:
            process = self._processes[number]
            if process is None:
                process = self._processes[number] = self._start(number)
            # One that takes the place of another is waited for: what ended that one should not end this process.
            if not process.ready(wait=number in self._begun):
                return None
        except WorkerError as error:
            self._note_failure(error)
            self._end(number)
            return None
        self._begun.add(number)
        return process

    def _replace_ended(self, process: WorkerProcess) -> None:
        if process.ended is not None:
            log.warning("%s; a new one starts when one is needed", process.ended)
            self._end(process.number)

    def _note_failure(self, error: WorkerError) -> None:
        self._failed += 1
        then = "itself until another one has started"
        if self._failed >= MOST_FAILED:
            self._count, then = 0, "itself from now on"
        log.warning("%s, while it started; the reader process reads %s", error, then)

    def _end_unused(self) -> None:
        """End the processes that are too many, unless a thread uses them, which calls this when it is done."""
        for number in range(self._count, len(self._seats)):
            self._begun.discard(number)
            if self._seats[number].acquire(blocking=False):
                self._end(number)
                self._seats[number].release()

    def _end(self, number: int) -> None:
        process, self._processes[number] = self._processes[number], None
        if process is not None:
            process.close()


def _in_use(workers: int) -> int:
    """The number of worker processes for a number of workers: a single worker reads in the reader process."""
    return workers if workers > 1 else 0
