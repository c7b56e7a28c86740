"""`TaskServer`: the part of a worker process that reads for one loader, one task after the other."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.batch.spec import Bytes
from lit_async_data.host.pipeline.read_task import Read
from lit_async_data.host.processes.child.noted_read import NotedRead
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, Report, ReportKind, Reports
from lit_async_data.host.processes.ipc.remote_errors import packed_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots, worker_note
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex
from lit_async_data.order.shares import Share
from lit_async_data.sources.contract.stage_clock import CLOCK


class TaskServer(abc.ABC):
    """Carries out each command, and reports.

    Args:
        setup: What to read, and the order of batches.
        slots: Where to.
        read: Reads samples.
        reports: Where to report.
        worker: Number of this worker.
    """

    def __init__(self, setup: ReaderSetup, slots: SharedSlots, read: Read, reports: Reports, worker: int) -> None:
        self._read = NotedRead(read, slots, first=worker_note(worker))
        self._setup, self._slots, self._reports, self._worker = setup, slots, reports, worker
        reports.send(Report(ReportKind.READY))

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        error = b""
        CLOCK.start()
        try:
            self._carry_out(command)
        except BaseException as caught:  # noqa: BLE001  # the reader process raises it
            error = packed_errors([(0, caught)])
        report = Report(ReportKind.DONE, generation=command.generation)
        self._reports.send(report._replace(**CLOCK.take()._asdict()), error)

    @abc.abstractmethod
    def _carry_out(self, command: Command) -> None: ...

    def close(self) -> None:
        """Give memory back."""
        self._slots.close()


class PythonTasks(TaskServer):
    """Reads whole batches, or transforms what the reader process has read; see `PythonWorkers`.

    Args:
        setup: See `TaskServer`.
        slots: See there.
        memory: Descriptor of the scratch memory of all workers, if samples come there; else empty.
        reports: See there.
        worker: See there.
    """

    def __init__(
        self, setup: ReaderSetup, slots: SharedSlots, memory: Sequence[int], reports: Reports, worker: int
    ) -> None:
        read: Read = setup.read
        for descriptor in memory:
            assert setup.read.transformation is not None
            scratch = SharedSlots(setup.read.transformation.scratch_bytes, descriptor)
            read = functools.partial(setup.read.transform_raw, scratch.slot(worker))
        super().__init__(setup, slots, read, reports, worker)

    def _carry_out(self, command: Command) -> None:
        epoch, step = command.key
        samples, _ = self._setup.schedule.limited(command.limits).plan(epoch).stretch(step, command.batches)
        out = self._setup.layout.views(self._slots.slot(command.slot), len(samples), command.row)
        self._read(epoch, samples, out)


class DecodingTasks(TaskServer):
    """Reads a share of each batch; see `DecodingWorkers`.

    Args:
        setup: See `TaskServer`.
        slots: See there.
        memory: Descriptor of the `SharedTasks`.
        reports: See there.
        worker: See there.
    """

    def __init__(
        self, setup: ReaderSetup, slots: SharedSlots, memory: Sequence[int], reports: Reports, worker: int
    ) -> None:
        self._tasks = setup.tasks(*memory)
        self._readers = 1
        self._release: Callable[[], None] | None = None
        super().__init__(setup, slots, setup.read, reports, worker)

    def _carry_out(self, command: Command) -> None:
        if command.readers != self._readers:
            self._hold_share_of(command.readers)
        if command.kind is CommandKind.AHEAD:
            assert self._setup.ahead is not None
            epoch, step = command.key
            keys = [BatchIndex(epoch, number) for number in range(step, step + command.batches)]
            self._setup.ahead(keys, command.cursor, None, command.limits, Share(self._worker, command.readers))
            return
        samples, rows, count = self._tasks.read(command.thread, self._worker)
        out = self._setup.layout.views(self._slots.slot(command.slot), count, command.row)
        if len(samples):
            self._fill(command.key.epoch, samples, rows, out)

    def close(self) -> None:
        """Give memory back."""
        super().close()
        self._tasks.close()
        if self._release is not None:
            self._release()

    def _hold_share_of(self, readers: int) -> None:
        """Reserve room for the chunks that this process decodes, as one of ``readers`` processes."""
        if self._release is not None:
            self._release()
        self._release = self._setup.plan.reserve(self._setup.read.source, readers)
        self._readers = readers

    def _fill(self, epoch: int, samples: Indices, rows: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        first, end = int(rows[0]), int(rows[-1]) + 1
        if end - first == len(rows):
            self._read(epoch, samples, {key: array[first:end] for key, array in out.items()})
            return
        own = self._setup.layout.views(self._apart, len(rows))
        self._read(epoch, samples, own)
        for key, array in own.items():
            out[key][rows] = array

    @functools.cached_property
    def _apart(self) -> Bytes:
        """Where samples come that do not lie side by side in the slot. The system adds pages as they are used."""
        return np.frombuffer(system.private_memory(self._setup.layout.nbytes), np.uint8)
