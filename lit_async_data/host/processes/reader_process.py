"""`ReaderProcess`: a reader or worker process as its parent sees it: its start, its messages, and its end."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import operator
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.messages import REPORT_BYTES, Command, Report, ReportKind
from lit_async_data.host.processes.remote_errors import unpacked_errors
from lit_async_data.host.processes.shared_slots import SharedSlots

READ_BYTES = 2**16
# Seconds that `close` waits for the process before it kills it.
CLOSE_S = 1.0
# Libraries that would start threads of their own for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


class ReaderProcess:
    """A reader process, or one of its worker processes. One thread at a time.

    Args:
        worker: Number of the worker; None for a reader process.

    Attributes:
        started: Whether `start` has come to its end.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._worker = worker
        # What the process takes is stored by C code as soon as it exists, so that `close` finds it also where an
        # interrupt (Ctrl-C) came in between.
        self._commands: list[io.FileIO] = []
        self._reports: list[io.FileIO] = []
        self._process: list[subprocess.Popen[bytes]] = []
        self._data = b""
        self._failure: BaseException | None = None
        self.started = False

    def start(self, setup: int, slots: SharedSlots) -> None:
        """Start the process.

        Args:
            setup: Descriptor of a `ReaderSetup`.
            slots: The slots that it will fill.

        Raises:
            WorkerError: The system refuses to start a process.
        """
        _open_pipe(self._commands)
        _open_pipe(self._reports)
        os.set_blocking(self._reports[0].fileno(), False)
        passed = (setup, slots.fd, self._commands[0].fileno(), self._reports[1].fileno())
        # The child finds modules where this process does. Without -P it would look in the working directory first.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= dict.fromkeys(ONE_THREAD, "1")
        number = str(-1 if self._worker is None else self._worker)
        program = [sys.executable, "-P", "-m", "lit_async_data.host.processes.child"]
        # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
        started: Callable[..., subprocess.Popen[bytes]] = functools.partial(  # type: ignore[assignment]  # bytes: no text
            subprocess.Popen, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            self._process.extend(map(started, ([*program, *map(str, passed), str(os.getpid()), number],)))
        except OSError as error:
            raise WorkerError(
                f"a {self._kind} process could not be started: {error}; raise the system's limit on processes, or set "
                "worker_kind=thread"
            ) from error
        self._commands[0].close()
        self._reports[1].close()
        self.started = True

    @property
    def _kind(self) -> str:
        return "reader" if self._worker is None else "worker"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process[0].pid

    def send(self, command: Command) -> None:
        """Send a command.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            os.write(self._commands[1].fileno(), command.packed())
        except BrokenPipeError:
            raise self.ended() from None

    def receive(self) -> list[tuple[Report, bytes]]:
        """All reports that have arrived, and their payloads. Log records are logged here.

        Raises:
            WorkerError: The process has ended, or failed.
        """
        try:
            data = os.read(self._reports[0].fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        found = []
        self._data += data
        at = 0
        while len(self._data) - at >= REPORT_BYTES:
            report = Report.unpacked(self._data[at : at + REPORT_BYTES])
            end = at + REPORT_BYTES + report.payload
            if end > len(self._data):
                break
            payload = self._data[at + REPORT_BYTES : end]
            at = end
            if report.kind is ReportKind.LOG:
                record = pickle.loads(payload)  # noqa: S301  # from the reader process
                logging.getLogger(record.name).handle(record)
            elif report.kind is ReportKind.FAILED:
                self._failure = unpacked_errors(payload, self.pid)[0]
            else:
                found.append((report, payload))
        self._data = self._data[at:]
        if not data and not found:
            raise self.ended()
        return found

    def wait(self, timeout: float) -> None:
        """Wait until a report arrives, or the process ends."""
        select.select([self._reports[0]], [], [], timeout)

    def ended(self) -> WorkerError:
        """The error that tells why the process has ended."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            error = WorkerError(f"{self._kind} process {self.pid} could not begin: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process[0].wait(CLOSE_S)
        code = self._process[0].poll()
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            # Python has no names for most of the realtime signals.
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        advice = "; close the loader, or set worker_kind=thread" if self._worker is None else ""
        return WorkerError(f"{self._kind} process {self.pid} {how}{advice}")

    def close(self) -> None:
        """End the process. Idempotent. If it was interrupted, call it again."""
        for end in self._commands + self._reports:
            end.close()  # the process ends when its commands do
        for process in self._process:
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
                    process.wait(CLOSE_S)


def _open_pipe(ends: list[io.FileIO]) -> None:
    """Add the two ends of a new pipe, without a moment at which an interrupt could lose their descriptors."""
    descriptors = itertools.chain.from_iterable(map(operator.call, (os.pipe,)))
    ends.extend(map(io.FileIO, descriptors, ("rb", "wb")))
