"""`WorkerProcess`: a worker process as the threads of its reader process see it."""

from __future__ import annotations

import itertools
import threading

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.channel import Channel
from lit_async_data.host.processes.ipc.messages import Command, Report, ReportKind
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.sources.contract.stage_clock import Work

# Seconds after which a wait begins anew; a report, and the end of a process, end it at once.
POLL_S = 60.0


class NotBegunError(WorkerError):
    """A process ended before it began to carry out a command, which another one may carry out."""


class WorkerProcess:
    """Carries out commands in the order in which they come. Thread-safe, except for `close`.

    Args:
        number: Number of the worker.
        stored: Descriptor of the setup.
        slots: The slots that it fills.
        memory: Descriptor of further memory that it needs; None for none.

    Attributes:
        number: Number of the worker.
        users: Threads that use it at present; `WorkerProcesses` counts them.
        was_ready: Whether it has ever taken commands; `ready` notices.
        ended: Why it takes no more commands; None as long as it does.

    Raises:
        WorkerError: The system refuses to start a process.
    """

    def __init__(self, number: int, stored: int, slots: SharedSlots, memory: int | None) -> None:
        self.number, self.users, self.was_ready = number, 0, False
        self.ended: WorkerError | None = None
        self._channel = Channel(ReaderProcess(number))
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        # Guards everything below, `was_ready` and `ended`. One thread at a time receives, without it, for all.
        self._changed = threading.Condition()
        self._receiving = False
        self._last = 0  # the last command that was carried out
        self._done: dict[int, tuple[Report, bytes]] = {}
        try:
            self._channel.open(stored, slots, memory)
        except WorkerError:
            self._channel.close()
            raise

    def ready(self, *, wait: bool) -> bool:
        """Whether it takes commands.

        Args:
            wait: Whether to wait until it does.

        Raises:
            WorkerError: It has ended.
        """
        with self._changed:
            if not self.was_ready and not self._receiving:
                self._receive(0.0)
            while not self.was_ready and (wait or self.ended is not None):
                self._receive(POLL_S)
            return self.was_ready

    def send(self, command: Command) -> int:
        """Send a command; returns the number by which `wait` knows it.

        Raises:
            NotBegunError: The process has ended.
        """
        try:
            with self._sending:
                number = next(self._numbers)
                self._channel.send(command._replace(generation=number))
        except WorkerError as error:
            with self._changed:
                while self.ended is None:  # what it has done before may not be received yet
                    self._receive(POLL_S)
            raise NotBegunError(str(error)) from error.__cause__
        return number

    def wait(self, number: int) -> Work:
        """Wait until a command has been carried out; returns what was done for it.

        Raises:
            NotBegunError: The process ended while it carried out an earlier command.
            WorkerError: The process ended while it carried out this one.
            Exception: As raised there.
        """
        with self._changed:
            while number not in self._done:
                self._receive(POLL_S, number)
            report, payload = self._done.pop(number)
        if payload:
            raise unpacked_errors(payload, self._channel.pid)[0]
        return report.work

    def close(self) -> None:
        """End the process. Idempotent."""
        self._channel.close()

    def _receive(self, timeout: float, number: int = 0) -> None:
        """Wait for reports, here or until another thread has received some."""
        if self.ended is not None:
            # Each thread has an error of its own: they belong to different batches.
            kind = NotBegunError if number > self._last + 1 else WorkerError
            raise kind(str(self.ended)) from self.ended.__cause__
        if self._receiving:
            self._changed.wait(timeout)
            return
        self._receiving, error = True, None
        reports: list[tuple[Report, bytes]] = []
        self._changed.release()
        try:
            if timeout:
                self._channel.wait(timeout)
            reports = self._channel.receive()
        except WorkerError as caught:
            error = caught
        finally:
            self._changed.acquire()
            self._receiving = False
            self._changed.notify_all()
        for report, payload in reports:
            if report.kind == ReportKind.READY:
                self.was_ready = True
            else:
                self._done[report.generation] = report, payload
                self._last = report.generation
        self.ended = self.ended or error
