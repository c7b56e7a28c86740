"""`TaskServer`: the part of a worker process that reads for one loader, one task after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lit_async_data.host.pipeline.read_task import Read
from lit_async_data.host.processes.ipc.messages import Command, Report, ReportKind, Reports
from lit_async_data.host.processes.ipc.remote_errors import packed_errors
from lit_async_data.host.processes.ipc.shared_slots import NotedRead, SharedSlots, worker_note
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.sources.contract.stage_clock import CLOCK


class TaskServer:
    """Reads whole batches, or transforms what the reader process has read; see `WorkerProcesses`.

    Then ``memory`` has the descriptor of the scratch memory of all workers.
    """

    def __init__(
        self, setup: ReaderSetup, slots: SharedSlots, memory: Sequence[int], reports: Reports, worker: int
    ) -> None:
        read: Read = setup.read
        for descriptor in memory:
            assert setup.read.transformation is not None
            scratch = SharedSlots(setup.read.transformation.scratch_bytes, descriptor)
            read = functools.partial(setup.read.transform_raw, scratch.slot(worker))
        self._read = NotedRead(read, slots, first=worker_note(worker))
        self._setup, self._slots, self._reports = setup, slots, reports
        reports.send(Report(ReportKind.READY))

    def obey(self, command: Command) -> None:
        error = b""
        CLOCK.start()
        try:
            self._carry_out(command)
        except BaseException as caught:  # noqa: BLE001  # the reader process raises it
            error = packed_errors([(0, caught)])
        report = Report(ReportKind.DONE, generation=command.generation)
        self._reports.send(report._replace(**CLOCK.take()._asdict()), error)

    def _carry_out(self, command: Command) -> None:
        epoch, step = command.key
        samples, _ = self._setup.schedule.limited(command.limits).plan(epoch).stretch(step, command.batches)
        out = self._setup.layout.views(self._slots.slot(command.slot), len(samples), command.row)
        self._read(epoch, samples, out)

    def close(self) -> None:
        self._slots.close()
