"""`WorkerProcess`: a worker process as a thread of its reader process sees it."""

from __future__ import annotations

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.channel import Channel
from lit_async_data.host.processes.ipc.messages import Command, ReportKind
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.supervisor import POLL_S
from lit_async_data.sources.contract.stage_clock import Work


class NotBegunError(WorkerError):
    """A process ended before it got a command, which another one may carry out."""


class WorkerProcess:
    """Carries out one command at a time, for one thread at a time.

    Args:
        number: Number of the worker.
        stored: Descriptor of the setup.
        slots: The slots that it fills.
        memory: Descriptor of further memory that it needs; None for none.

    Attributes:
        was_ready: Whether it has ever taken commands.
        ended: Why it takes no more commands; None as long as it does.
    """

    def __init__(self, number: int, stored: int, slots: SharedSlots, memory: int | None) -> None:
        self.number, self.was_ready = number, False
        self.ended: WorkerError | None = None
        self._channel = Channel(ReaderProcess(number))
        self._done: list[tuple[Work, bytes]] = []
        try:
            self._channel.open(stored, slots, memory)
        except WorkerError:
            self._channel.close()
            raise

    def ready(self, *, wait: bool) -> bool:
        """Whether it takes commands; a `WorkerError` if it has ended."""
        if not self.was_ready:
            self._receive(0.0)
        while wait and not self.was_ready:
            self._receive(POLL_S)
        return self.was_ready

    def carry_out(self, command: Command) -> Work:
        """Have a command carried out; returns what was done for it.

        Raises:
            NotBegunError: The process had ended before.
            WorkerError: The process has ended meanwhile.
            Exception: As raised there.
        """
        try:
            self._channel.send(command)
        except WorkerError as error:
            self.ended = error
            raise NotBegunError(str(error)) from error.__cause__
        while not self._done:
            self._receive(POLL_S)
        work, raised = self._done.pop()
        if raised:
            raise unpacked_errors(raised, self._channel.pid)[0]
        return work

    def close(self) -> None:
        self._channel.close()

    def _receive(self, seconds: float) -> None:
        if seconds:
            self._channel.wait(seconds)
        try:
            reports = self._channel.receive()
        except WorkerError as error:
            self.ended = error
            raise
        for report, payload in reports:
            if report.kind == ReportKind.READY:
                self.was_ready = True
            else:
                self._done.append((report.work, payload))
