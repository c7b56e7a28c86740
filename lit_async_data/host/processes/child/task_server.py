"""`TaskServer`: reads batches in a worker process, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lit_async_data.host.pipeline.read_task import Read
from lit_async_data.host.processes.child.noted_read import NotedRead
from lit_async_data.host.processes.ipc.messages import Command, Report, ReportKind, Reports
from lit_async_data.host.processes.ipc.remote_errors import packed_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.sources.contract.stage_clock import CLOCK


class TaskServer:
    """Reads the batch of each command into a slot, and reports.

    Args:
        setup: What to read, and the order of batches.
        slots: Where to.
        scratch_fds: Descriptor of the scratch memory of all workers, if samples come there; else empty.
        reports: Where to report.
        worker: Number of this worker.
    """

    def __init__(
        self, setup: ReaderSetup, slots: SharedSlots, scratch_fds: Sequence[int], reports: Reports, worker: int
    ) -> None:
        read: Read = setup.read
        for descriptor in scratch_fds:
            assert setup.read.transformation is not None
            scratch = SharedSlots(setup.read.transformation.scratch_bytes, descriptor)
            read = functools.partial(setup.read.transform_raw, scratch.slot(worker))
        self._read = NotedRead(read, slots, first=len(slots.notes) // 2 + worker)
        self._schedule, self._layout = setup.schedule, setup.layout
        self._slots, self._reports = slots, reports
        reports.send(Report(ReportKind.READY))

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        epoch, step = command.key
        error = b""
        CLOCK.start()
        try:
            samples, _ = self._schedule.limited(command.limits).plan(epoch).stretch(step, 1)
            self._read(epoch, samples, self._layout.views(self._slots.slot(command.slot), len(samples)))
        except BaseException as caught:  # noqa: BLE001  # raised at the batch's place in the order
            error = packed_errors([(0, caught)])
        report = Report(ReportKind.FILLED, slot=command.slot, epoch=epoch, step=step, batches=1)
        self._reports.send(report._replace(**CLOCK.take()._asdict()), error)

    def close(self) -> None:
        """Give memory back."""
        self._slots.close()
