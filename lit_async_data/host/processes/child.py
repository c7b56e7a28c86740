"""The reader process: a `ThreadPipeline` that fills slots in memory shared with the trainer's process.

``python -m lit_async_data.host.processes.child SETUP SLOTS COMMANDS REPORTS PARENT``: four descriptors and a process
id. The main thread obeys commands; the workers read, and report each slot in the order of its batches. The process ends
with its parent, also if the parent is killed, or has forks that keep the pipes open.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import logging
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy.typing as npt

from lit_async_data.batch.spec import Bytes
from lit_async_data.host.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.host.processes.messages import COMMAND_BYTES, Command, CommandKind, Report, ReportKind
from lit_async_data.host.processes.remote_errors import packed_errors
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.processes.shared_slots import SharedSlots
from lit_async_data.order.permutation import Indices

# Seconds between two checks whether the parent is alive.
PARENT_S = 1.0
COMMANDS_AT_ONCE = 64
FOREVER_S = 1e9
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_NAME = 15


class Reports:
    """Writes reports. Thread-safe.

    Args:
        fd: The pipe.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, report: Report, payload: bytes = b"") -> None:
        """Write a report; waits while the pipe is full."""
        data = memoryview(report._replace(payload=len(payload)).packed() + payload)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class LogToParent(logging.Handler):
    """Sends log records to the trainer's process."""

    def __init__(self, reports: Reports) -> None:
        super().__init__()
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sent = copy.copy(record)
            sent.msg, sent.args = record.getMessage(), None
            if record.exc_info:
                sent.msg += "\n" + logging.Formatter().formatException(record.exc_info)
            sent.exc_info = sent.exc_text = sent.stack_info = None
            self._reports.send(Report(ReportKind.LOG), pickle.dumps(sent))
        except Exception:  # noqa: BLE001  # as every handler: a record that cannot be sent does not stop who logs it
            self.handleError(record)


class NotedRead:
    """Notes in shared memory what each worker reads, so that it is known if the process crashes.

    Args:
        setup: Reads the samples.
        slots: Has the notes.
    """

    def __init__(self, setup: ReaderSetup, slots: SharedSlots) -> None:
        self._read = setup.read
        self._notes = slots.notes
        self._numbers = itertools.count()
        self._thread = threading.local()

    def __call__(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        if not hasattr(self._thread, "number"):
            self._thread.number = next(self._numbers) % len(self._notes)
        note = self._notes[self._thread.number]
        note[:] = epoch, samples[0], len(samples)
        try:
            self._read(epoch, samples, out)
        finally:
            note[2] = 0


class ReaderServer:
    """Obeys commands, and reports filled slots.

    Args:
        setup: What to read.
        slots: Where to.
        reports: Where to report.
    """

    def __init__(self, setup: ReaderSetup, slots: SharedSlots, reports: Reports) -> None:
        self._schedule, self._slots, self._reports = setup.schedule, slots, reports
        self._generation = self._pauses = 0
        self._lock = threading.Lock()  # keeps reports in order, and SEEK between two of them
        # Slots come by commands, and wait for as long as the trainer's process keeps them.
        self._pipeline = ThreadPipeline(
            NotedRead(setup, slots),
            setup.schedule,
            setup.layout,
            _no_memory,
            workers=setup.plan.workers.threads,
            slots=0,
            most_slots=0,
            timeout_s=FOREVER_S,
            after_read=setup.ahead,
            ids=setup.read.source.ids,
            on_filled=self._report,
            on_quiet=self._report_quiet,
        )
        self._release = setup.plan.reserve(setup.read.source)

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        pool = self._pipeline.pool
        if command.kind is CommandKind.FILL:
            if command.slot < len(pool):
                pool.copied(command.slot)
            else:
                pool.add(self._slots.slot(command.slot))
            return
        if command.kind is CommandKind.PAUSE:
            self._pauses = command.generation
            self._pipeline.pause(command.nanoseconds / 1e9)
            return
        if command.kind is CommandKind.RESUME:
            self._pipeline.resume()
            return
        with self._lock:
            self._pipeline.follow(self._schedule.limited(command.limits))
            if command.kind is CommandKind.SEEK:
                self._generation = command.generation
                self._pipeline.prefetch(command.key)

    def _report(self) -> None:
        """Report all slots that are next in the order. Called by the worker that has filled one."""
        with self._lock:
            while (key := self._pipeline.head) is not None and (filled := self._pipeline.poll(key)) is not None:
                errors = [(n, batch.error) for n, batch in enumerate(filled.batches) if batch.error is not None]
                if filled.good:
                    self._pipeline.pool.copy(filled.slot)
                report = Report(
                    ReportKind.FILLED,
                    generation=self._generation,
                    slot=filled.slot,
                    key=key,
                    batches=len(filled.batches),
                    good=filled.good,
                    seconds=self._pipeline.stats().seconds,
                )
                self._reports.send(report, packed_errors(errors) if errors else b"")

    def _report_quiet(self) -> None:
        self._reports.send(Report(ReportKind.QUIET, generation=self._pauses))


def main(arguments: list[str]) -> NoReturn:
    """Run until the trainer's process closes the pipe, or ends."""
    setup_fd, slots_fd, commands_fd, reports_fd, parent = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"lit_data reader", 0, 0, 0)
    reports = Reports(reports_fd)
    try:
        setup = ReaderSetup.loaded(setup_fd)
        logging.getLogger().addHandler(LogToParent(reports))
        logging.getLogger().setLevel(setup.level)
        logging.captureWarnings(capture=True)
        server = ReaderServer(setup, SharedSlots(setup.layout.nbytes, slots_fd), reports)
        while os.getppid() == parent:
            if select.select([commands_fd], [], [], PARENT_S)[0]:
                data = os.read(commands_fd, COMMANDS_AT_ONCE * COMMAND_BYTES)
                if not data:
                    break
                for first in range(0, len(data), COMMAND_BYTES):
                    server.obey(Command.unpacked(data[first : first + COMMAND_BYTES]))
    except BaseException as error:  # noqa: BLE001  # the trainer's process raises it
        with contextlib.suppress(OSError):
            reports.send(Report(ReportKind.FAILED), packed_errors([(0, error)]))
    # Workers may be inside a read that does not return, and shared memory needs no clean-up.
    os._exit(0)


def _no_memory() -> Bytes:
    raise AssertionError


if __name__ == "__main__":
    main(sys.argv[1:])
