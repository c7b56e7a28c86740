"""`WorkerProcesses`: the worker processes of a reader process, for Python code, of which one GIL runs one thread.

Each worker thread of the reader process has a process of its own, which it tells what to read, and for which it waits.
The order, the slots and reading ahead stay with the reader process. If samples share compressed chunks, their reading
and decoding does, too: worker processes find them in scratch memory, and transform them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from lit_async_data.batch.spec import BatchLayout, Bytes
from lit_async_data.errors import WorkerError
from lit_async_data.host.pipeline.read_task import FilledSlot, Read, ReadTask
from lit_async_data.host.processes.channel import Channel
from lit_async_data.host.processes.child.noted_read import NotedRead
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, ReportKind
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.stage_clock import CLOCK

log = logging.getLogger(__name__)

# Seconds after which a wait begins anew; a report, and the end of a process, end it at once.
POLL_S = 60.0


class WorkerProcesses:
    """Worker processes, each for one thread. They end with this process.

    Args:
        setup: What they read, and how many there may be.
        stored: Descriptor of the same.
        slots: The slots that they fill.
        read: Reads samples here while a worker process starts, so that the first batches do not wait for it.
    """

    def __init__(self, setup: ReaderSetup, stored: int, slots: SharedSlots, read: Read) -> None:
        count = setup.plan.workers.processes
        self._read, self._stored, self._slots = read, stored, slots
        self._scratch: SharedSlots | None = None
        if setup.read.shares_chunks:
            assert setup.read.transformation is not None
            self._scratch = SharedSlots(setup.read.transformation.scratch_bytes)
            self._scratch.add(count)
        self._read_raw = NotedRead(setup.read.read_raw, slots, first=len(slots.notes) // 4)
        self._channels: list[Channel | None] = [None] * count
        self._ready = [False] * count
        self._several = False

    def start(self) -> None:
        """Use worker processes from now on: there is more than one worker."""
        self._several = True

    @property
    def read_themselves(self) -> bool:
        """Whether the processes read samples, and not this process for them."""
        return self._several and self._scratch is None

    def run(self, task: ReadTask, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        """Read the batch of a task into its slot."""
        return task.run(functools.partial(self._read_for, task), layout, memory)

    def _read_for(self, task: ReadTask, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Have the worker process of a task's thread read its batch.

        Raises:
            WorkerError: The process has ended; another one is started for the next task.
            Exception: As raised there.
        """
        assert task.worker is not None
        if not self._several:
            self._read(epoch, samples, out)
            return
        (key,) = task.keys  # Python code reads batches one at a time
        try:
            channel = self._channels[task.worker] or self._opened(task.worker)
        except WorkerError as error:
            log.warning("%s; the reader process does the work itself", error)
            self._read(epoch, samples, out)
            return
        try:
            if not self._is_ready(task.worker, channel):
                self._read(epoch, samples, out)
                return
            if self._scratch is not None:
                self._read_raw(epoch, samples, self._scratch.slot(task.worker))
            channel.send(Command(CommandKind.READ, slot=task.slot, key=key, limits=task.schedule.limits))
            while not (reports := channel.receive()):
                channel.wait(POLL_S)
        except WorkerError as error:
            channel.close()
            self._channels[task.worker], self._ready[task.worker] = None, False
            raise WorkerError(
                f"{error}, while it read {task}; the next batches are read by a new process",
                stage="read",
                worker=task.worker,
            ) from error.__cause__
        ((report, payload),) = reports
        CLOCK.done_elsewhere(report.work)
        if payload:
            raise unpacked_errors(payload, channel.pid)[0]

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            if channel is not None:
                channel.close()
        if self._scratch is not None:
            self._scratch.close()

    def _is_ready(self, worker: int, channel: Channel) -> bool:
        if not self._ready[worker]:
            self._ready[worker] = any(report.kind == ReportKind.READY for report, _ in channel.receive())
        return self._ready[worker]

    def _opened(self, worker: int) -> Channel:
        channel = Channel(ReaderProcess(worker))
        try:
            channel.open(self._stored, self._slots, self._scratch)
        except WorkerError:
            channel.close()
            raise
        self._channels[worker] = channel
        return channel
