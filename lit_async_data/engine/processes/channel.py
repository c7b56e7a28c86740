"""`Channel`: tasks for a reader process, and its reports."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import select
import subprocess
from collections.abc import Iterable, Sequence

from lit_async_data.engine.processes.messages import REPORT_BYTES, Report, ReportKind, Task
from lit_async_data.engine.processes.reader_process import ReaderProcess
from lit_async_data.engine.processes.remote_errors import unpacked_errors
from lit_async_data.engine.processes.shared_slots import SharedSlots
from lit_async_data.engine.resources.control_groups import out_of_memory_kills
from lit_async_data.engine.supervisor import hindered, how_it_ended
from lit_async_data.errors import WorkerError

# Bytes that are read at a time.
READ_BYTES = 2**16

log = logging.getLogger(__name__)


class Channel:
    """A channel to a process for one loader, which it starts if need be. One thread at a time."""

    def __init__(self, process: ReaderProcess) -> None:
        self._process = process
        # Both ends of each pipe.
        self._end: Sequence[io.FileIO] = ()
        self._reports: Sequence[io.FileIO] = ()
        self._tasks: Sequence[io.FileIO] = ()
        self._running: subprocess.Popen[bytes] | None = None
        self._kills = out_of_memory_kills()  # before it starts
        # Allocated once: a new buffer for each batch took up to 0.7 ms.
        self._buffer = bytearray(READ_BYTES)
        self._data = b""
        # The error with which the process has ended: another one would raise it, too.
        self.failure: BaseException | None = None
        self.ready = False  # whether the process takes tasks

    def open(self, setup: int, slots: SharedSlots) -> None:
        """Have the process read what a `ReaderSetup` says, given by its descriptor."""
        try:
            self._end, self._reports, self._tasks = _pipe(), _pipe(), _pipe()
        except OSError as error:
            raise WorkerError(
                f"no pipe to a reader process: {error}; raise the limit on open files (ulimit -n), or "
                "set worker_kind=thread"
            ) from error
        os.set_blocking(self._reports[0].fileno(), False)
        os.set_blocking(self._tasks[0].fileno(), False)
        passed = (self._end[0], self._reports[1], *self._tasks)
        self._running = self._process.open(self, [setup, slots.fd, *(end.fileno() for end in passed)])
        for unused in (self._end[0], self._reports[1], self._tasks[0]):
            unused.close()

    @property
    def descriptor(self) -> int:
        """Readable when reports have arrived."""
        return self._reports[0].fileno()

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def send(self, task: Task) -> None:
        """Send a task. If the process has ended, `receive` says so."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks[1].write(task.packed())

    def receive(self) -> list[tuple[Report, bytes]]:
        """The reports that have arrived, and their payloads; a `WorkerError` if the process has ended.

        Log records are logged here.
        """
        count = self._reports[0].readinto(self._buffer)
        if count is None:  # nothing has arrived
            return []
        found = []
        self._data += self._buffer[:count]
        while len(self._data) >= REPORT_BYTES:
            report = Report.unpacked(self._data)
            end = REPORT_BYTES + report.payload
            if end > len(self._data):
                break
            payload, self._data = self._data[REPORT_BYTES:end], self._data[end:]
            if report.kind == ReportKind.READY:
                self.ready = True
            elif report.kind == ReportKind.LOG:
                _log(payload)
            elif report.kind == ReportKind.FAILED:
                self.failure = unpacked_errors(payload, self.pid)[0]
            else:
                found.append((report, payload))
        if not count and not found:
            raise self._ended()
        return found

    def stacks(self) -> str:
        return f"the threads of reader process {self.pid}{hindered(self.pid)}:\n{self._process.stacks()}"

    def close(self) -> None:
        """Have the process read no more; it ends if nobody else uses it. Idempotent."""
        for end in self._end[1:]:
            with contextlib.suppress(OSError, ValueError):  # it has ended; or this is the second call
                end.write(b".")  # a fork of this process may keep the pipe open
        for end in (*self._end, *self._reports, *self._tasks):
            end.close()
        self._process.leave(self)

    def _ended(self) -> WorkerError:
        if (failure := self.failure) is not None:
            error = WorkerError(f"reader process {self.pid} failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        assert self._running is not None
        out_of_memory = out_of_memory_kills() > self._kills
        return WorkerError(f"reader process {self.pid} {how_it_ended(self._running, out_of_memory=out_of_memory)}")


def wait_for_reports(channels: Iterable[Channel], timeout: float) -> None:
    """Wait until a report arrives by one of these channels, or a process ends."""
    poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
    for channel in channels:
        poll.register(channel.descriptor, select.POLLIN)
    poll.poll(1e3 * timeout)


def _log(payload: bytes) -> None:
    try:
        record = pickle.loads(payload)  # noqa: S301  # from the reader process
    except Exception as error:  # noqa: BLE001  # objects in it may need arguments that they do not keep
        log.warning("a log record of another process could not be read: %s: %s", type(error).__name__, error)
    else:
        logging.getLogger(record.name).handle(record)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    read, write = os.pipe()
    return io.FileIO(read, "rb"), io.FileIO(write, "wb")
