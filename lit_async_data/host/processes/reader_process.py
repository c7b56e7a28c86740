"""`ReaderProcess`: a reader process as the trainer's process sees it: its start, its messages, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys

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
    """A reader process. One thread at a time.

    Args:
        setup: Descriptor of a `ReaderSetup`.
        slots: The slots that it will fill.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, setup: int, slots: SharedSlots) -> None:
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        self._data = b""
        self._failure: BaseException | None = None
        os.set_blocking(self._reports, False)
        passed = (setup, slots.fd, commands, reports)
        # The child finds modules where this process does. Without -P it would look in the working directory first.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= dict.fromkeys(ONE_THREAD, "1")
        program = [sys.executable, "-P", "-m", "lit_async_data.host.processes.child"]
        try:
            # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, with numbers
                [*program, *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            self._close_pipes()
            raise WorkerError(
                f"a reader process could not be started: {error}; raise the system's limit on processes, or set "
                "worker_kind=thread"
            ) from error
        finally:
            os.close(commands)
            os.close(reports)
        self.pid = self._process.pid

    def send(self, command: Command) -> None:
        """Send a command.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            os.write(self._commands, command.packed())
        except BrokenPipeError:
            raise self.ended() from None

    def receive(self) -> list[tuple[Report, bytes]]:
        """All reports that have arrived, and their payloads. Log records are logged here.

        Raises:
            WorkerError: The process has ended, or failed.
        """
        try:
            data = os.read(self._reports, READ_BYTES)
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
        select.select([self._reports], [], [], timeout)

    def ended(self, doing: str = "") -> WorkerError:
        """The error that tells why the process has ended."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            error = WorkerError(f"reader process {self.pid} could not begin: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        code = self._process.poll()
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return WorkerError(f"reader process {self.pid} {how}{doing}; close the loader, or set worker_kind=thread")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._close_pipes()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipes(self) -> None:
        for name in ("_commands", "_reports"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
