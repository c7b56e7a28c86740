"""`Channel`: a reader process, as its parent sees it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from lit_async_data.engine import supervisor
from lit_async_data.engine.processes.messages import (
    ASKED,
    RENEWED,
    REPORT,
    REPORT_BYTES,
    Report,
    ReportKind,
    unpacked_errors,
)
from lit_async_data.engine.processes.setup import environment
from lit_async_data.engine.processes.shared_slots import SharedSlots
from lit_async_data.errors import WorkerError
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.sources.local_files import advice_on

# Variables that keep libraries from starting threads for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
# Seconds that a process has to send the stacks of its threads.
STACKS_S = 1.0
# Bytes of reports that are read at a time.
READ_BYTES = 2**16

log = logging.getLogger(__name__)

E = TypeVar("E", socket.socket, io.FileIO)


class Channel:
    """Starts a reader process, which reads by the `ReaderSetup` in a file, and ends it. One thread at a time."""

    def __init__(self, number: int, setup: int, slots: SharedSlots) -> None:
        # Allocated once: a new buffer for each batch took up to 0.7 ms.
        self._buffer = bytearray(READ_BYTES)
        self._data = b""
        # The error with which the process has ended, and another one would end.
        self.failure: BaseException | None = None
        self.ready = False  # whether the process takes tasks
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as its:

                def ends(one: E, other: E) -> tuple[E, int]:
                    return ours.enter_context(one), its.enter_context(other).fileno()

                self.control, control = ends(*socket.socketpair())
                # At its end the system kills the process.
                self.lifeline, lifeline = ends(*socket.socketpair())
                self.reports, reports = ends(*_pipe())
                self.tasks, tasks = ends(*reversed(_pipe()))
                os.set_blocking(self.reports.fileno(), False)
                descriptors = control, lifeline, reports, tasks, setup, slots.fd
                self.process = _started(descriptors, number)
                ours.pop_all()
        except OSError as error:
            advice = advice_on(error) or f"{error}; raise the system's limit on processes"
            what = f"a reader process could not be started: {advice}, or set worker_kind=thread"
            raise WorkerError(what) from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def renew(self, setup: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` finds that it has ended
            socket.send_fds(self.control, [RENEWED], [setup])

    def receive(self) -> list[tuple[Report, bytes]]:
        """The reports that have arrived, with payloads; logs log records. A WorkerError if the process has ended."""
        count = self.reports.readinto(self._buffer)
        if count is None:  # nothing has arrived
            return []
        found = []
        self._data += self._buffer[:count]
        while len(self._data) >= REPORT_BYTES:
            kind, length, slot, step, *work, idle_s = REPORT.unpack_from(self._data)
            if (end := REPORT_BYTES + length) > len(self._data):
                break
            payload, self._data = self._data[REPORT_BYTES:end], self._data[end:]
            if kind == ReportKind.READY:
                self.ready = True
            elif kind == ReportKind.LOG:
                _log(payload)
            elif kind == ReportKind.FAILED:
                self.failure = unpacked_errors(payload, self.pid)[0]
            else:
                found.append((Report(kind, length, slot, step, Work(*work), idle_s), payload))
        if not count and not found:
            raise self._ended()
        return found

    def stacks(self) -> str:
        found = "no answer: it is stopped, has not started yet, or C code in it holds the GIL\n"
        ours, its = socket.socketpair()
        with ours, its, contextlib.suppress(OSError):  # the process takes too long, or has ended
            socket.send_fds(self.control, [ASKED], [its.fileno()])
            its.close()
            ours.settimeout(STACKS_S)
            found = b"".join(iter(lambda: ours.recv(2**16), b"")).decode(errors="replace")
        return f"the threads of reader process {self.pid}:\n{found}"

    def _ended(self) -> WorkerError:
        if (failure := self.failure) is not None:
            error = WorkerError(f"reader process {self.pid} failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        return WorkerError(f"reader process {self.pid} {supervisor.how_it_ended(self.process)}")


def close(channels: Sequence[Channel]) -> None:
    """End processes, within two seconds. Idempotent."""
    for channel in channels:
        with contextlib.suppress(OSError):  # the process has ended, or this is the second call
            channel.control.shutdown(socket.SHUT_RDWR)  # a fork of this process may keep it open
        channel.reports.close()
        channel.tasks.close()
    supervisor.end([channel.process for channel in channels])
    for channel in channels:
        channel.control.close()
        channel.lifeline.close()


def _started(descriptors: Iterable[int], number: int) -> subprocess.Popen[bytes]:
    # The child finds modules where this process does. Without -P it would look in the working directory first.
    variables = {
        **environment(),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    variables |= dict.fromkeys(ONE_THREAD, "1")
    # Several arenas of malloc hold more than is in use: 16 MiB of 138, where two threads decode gzip.
    variables.setdefault("MALLOC_ARENA_MAX", "1")
    program = [sys.executable, "-P", "-m", "lit_async_data.engine.processes"]
    program += map(str, (os.getpid(), number, *descriptors))
    # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
    return subprocess.Popen(  # noqa: S603  # our own program
        program, pass_fds=tuple(descriptors), env=variables, stdin=subprocess.DEVNULL, process_group=0
    )


def wait_for_reports(pipes: Iterable[int], timeout: float) -> None:
    """Wait until a report arrives by one of these descriptors, or a process ends."""
    poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    poll.poll(1e3 * timeout)


def _log(payload: bytes) -> None:
    try:
        record = pickle.loads(payload)  # noqa: S301  # from the reader process
    except Exception as error:  # noqa: BLE001  # its objects may need arguments that they do not keep
        log.warning("a log record of another process could not be read: %s: %s", type(error).__name__, error)
    else:
        logging.getLogger(record.name).handle(record)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    read, write = os.pipe()
    return io.FileIO(read, "rb"), io.FileIO(write, "wb")
