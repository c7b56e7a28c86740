"""`Channel`: commands to a reader or worker process, and its reports: one channel for each loader or worker."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import select
import subprocess
from collections.abc import Sequence

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.ipc.given_slots import packed_slots
from lit_async_data.host.processes.ipc.messages import REPORT_BYTES, Command, CommandKind, Report, ReportKind
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.supervisor import how_it_ended

# Bytes that are read at a time.
READ_BYTES = 2**16

log = logging.getLogger(__name__)


class Channel:
    """A channel to a process, which it starts if need be. One thread at a time."""

    def __init__(self, process: ReaderProcess) -> None:
        self._process = process
        # Both ends of each pipe.
        self._commands: Sequence[io.FileIO] = ()
        self._reports: Sequence[io.FileIO] = ()
        self._vacant: Sequence[io.FileIO] = ()
        self._running: subprocess.Popen[bytes] | None = None
        # Allocated once: a new buffer for each batch took up to 0.7 ms.
        self._buffer = bytearray(READ_BYTES)
        self._data = b""
        self._failure: BaseException | None = None
        self.opened = False

    def open(self, setup: int, slots: SharedSlots, memory: int | None = None) -> None:
        """Have the process read, by descriptors: of a `ReaderSetup`, and of further memory for a worker process."""
        try:
            self._commands, self._reports = _pipe(), _pipe()
            self._vacant = _pipe() if self._process.kind == "reader" else ()
        except OSError as error:
            raise WorkerError(
                f"no pipe to a {self._process.kind} process: {error}; raise the limit on open files (ulimit -n), or "
                "set worker_kind=thread"
            ) from error
        os.set_blocking(self._reports[0].fileno(), False)
        passed = [setup, slots.fd, self._commands[0].fileno(), self._reports[1].fileno()]
        for end in self._vacant[:1]:
            os.set_blocking(end.fileno(), False)
        passed += [end.fileno() for end in self._vacant]
        passed += [] if memory is None else [memory]
        self._running = self._process.open(self, passed)
        for unused in (self._commands[0], self._reports[1], *self._vacant[:1]):
            unused.close()
        self.opened = True

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def send(self, command: Command) -> None:
        try:
            os.write(self._commands[1].fileno(), command.packed())
        except BrokenPipeError:
            raise self._ended() from None

    def give(self, slots: list[int]) -> None:
        """Let a reader process fill slots that it knows."""
        try:
            self._vacant[1].write(packed_slots(slots))
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> list[tuple[Report, bytes]]:
        """All reports that have arrived, and their payloads. Log records are logged here."""
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
            if report.kind == ReportKind.LOG:
                _log(payload)
            elif report.kind == ReportKind.FAILED:
                self._failure = unpacked_errors(payload, self.pid)[0]
            else:
                found.append((report, payload))
        if not count and not found:
            raise self._ended()
        return found

    def wait(self, timeout: float) -> None:
        poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
        poll.register(self._reports[0], select.POLLIN)
        poll.poll(1e3 * timeout)

    def close(self) -> None:
        """Have the process read no more; it ends if nobody else uses it. Idempotent."""
        if self.opened and not self._commands[1].closed:
            with contextlib.suppress(OSError):  # it has ended, or obeys no commands any more
                os.set_blocking(self._commands[1].fileno(), False)
                os.write(self._commands[1].fileno(), Command(CommandKind.END).packed())
        for end in (*self._commands, *self._reports, *self._vacant):
            end.close()
        self._process.leave(self)

    def _ended(self) -> WorkerError:
        name = f"{self._process.kind} process {self.pid}"
        if self._failure is not None:
            failure, self._failure = self._failure, None
            error = WorkerError(f"{name} failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        assert self._running is not None
        advice = "; close the loader, or set worker_kind=thread" if self._process.kind == "reader" else ""
        return WorkerError(f"{name} {how_it_ended(self._running)}{advice}")


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
