"""`ReaderServer`: the part of a reader process that reads for one loader."""

from __future__ import annotations

import threading

from lit_async_data.batch.spec import Bytes
from lit_async_data.host.pipeline.slots import SlotPool
from lit_async_data.host.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.host.processes.child.worker_processes import WorkerProcesses
from lit_async_data.host.processes.ipc.given_slots import GivenSlots
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, Report, ReportKind, Reports
from lit_async_data.host.processes.ipc.remote_errors import packed_errors
from lit_async_data.host.processes.ipc.shared_slots import NotedRead, SharedSlots
from lit_async_data.host.processes.setup import ReaderSetup

FOREVER_S = 1e9


class ReaderServer:
    """Obeys commands, and reports filled slots. Worker processes get the setup by its descriptor, ``stored``."""

    def __init__(
        self, setup: ReaderSetup, stored: int, slots: SharedSlots, vacant: GivenSlots, reports: Reports
    ) -> None:
        workers, read = setup.plan.workers, NotedRead(setup.read, slots)
        processes = WorkerProcesses(setup, stored, slots, read) if workers.processes else None
        self._processes = processes
        ahead = setup.ahead if processes is None else processes.ahead
        self._schedule, self._slots, self._reports = setup.schedule, slots, reports
        self._generation = 0
        self._lock = threading.Lock()  # keeps reports in order, and SEEK between two of them
        # Slots come from the trainer's process, which keeps them for as long as it likes.
        self._pipeline = ThreadPipeline(
            read,
            setup.schedule,
            setup.layout,
            _no_memory,
            workers=workers.threads,
            slots=0,
            most_slots=0,
            timeout_s=FOREVER_S,
            ahead=None if setup.ahead is None else ahead,
            ids=setup.read.source.ids,
            on_filled=self._report,
            run=None if processes is None else processes.run,
            pool=SlotPool([], vacant),
        )
        self._release = setup.plan.reserve(setup.read.source) if processes is None else processes.close

    def obey(self, command: Command) -> None:
        pool = self._pipeline.pool
        if command.kind is CommandKind.FILL:
            if command.slot < len(pool):
                pool.vacant.put(command.slot)
            else:
                pool.add(self._slots.slot(command.slot))
            return
        if command.kind is CommandKind.WORKERS:
            if self._processes is not None:
                self._processes.set_workers(command.slot)
            self._pipeline.set_workers(command.slot)
            return
        with self._lock:
            self._pipeline.follow(self._schedule.limited(command.limits))
            if command.kind is CommandKind.SEEK:
                self._generation = command.generation
                self._pipeline.prefetch(command.key)

    def check(self) -> None:
        self._pipeline.check()

    def _report(self) -> None:
        """Report all slots that are next in the order. Called by the worker that has filled one."""
        self._reports.wait()  # without the lock, which the main thread needs
        with self._lock:
            while (key := self._pipeline.head) is not None and (filled := self._pipeline.poll(key)) is not None:
                errors = [(n, batch.error) for n, batch in enumerate(filled.batches) if batch.error is not None]
                if filled.good:
                    self._pipeline.pool.copy(filled.slot)
                meter = self._pipeline.meter
                report = Report(
                    ReportKind.FILLED,
                    generation=self._generation,
                    slot=filled.slot,
                    epoch=key.epoch,
                    step=key.step,
                    batches=len(filled.batches),
                    good=filled.good,
                    samples=filled.samples,
                    idle_s=meter.slot_s + meter.loop_s,
                    **meter.work._asdict(),
                )
                self._reports.send(report, packed_errors(errors) if errors else b"")

    def close(self) -> None:
        """Read no more, and give memory back; waits a few seconds for what is being read."""
        self._pipeline.close()
        self._release()
        self._slots.close()


def _no_memory() -> Bytes:
    raise AssertionError
