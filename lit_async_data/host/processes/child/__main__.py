"""The program of a reader process, and of the worker processes that it starts.

``python -m lit_async_data.host.processes.child CONTROL LIFELINE PARENT WORKER``: the descriptors of two sockets, a
process id, and the number of a worker or -1 for a reader process. Each message on the control brings the descriptors of
a channel: the setup, the slots, the pipes of commands and reports, and for a reader process both ends of a pipe of
vacant slots; for a worker process further memory, if it needs any. The main thread obeys the commands of all
channels. A channel ends with the command END, or with its pipe. The process ends with the control, and with its parent,
also if the parent is killed, or has forks that keep the sockets open. On Linux, the system kills it when the other end
of the lifeline is closed, even if C code holds the GIL.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fcntl
import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import NoReturn

from lit_async_data.host.processes.child.reader_server import ReaderServer
from lit_async_data.host.processes.child.task_server import TaskServer
from lit_async_data.host.processes.ipc.given_slots import GivenSlots
from lit_async_data.host.processes.ipc.messages import COMMAND_BYTES, Command, CommandKind, Report, ReportKind, Reports
from lit_async_data.host.processes.ipc.remote_errors import packed_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.supervisor import POLL_S

COMMANDS_AT_ONCE = 64
MOST_DESCRIPTORS = 6  # of a channel
IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)),
)
PR_SET_NAME = 15


class LogToParent(logging.Handler):
    """Sends log records to the parent, by the channel whose commands came last, since its reports are read."""

    reports: Reports

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sent = copy.copy(record)
            sent.msg, sent.args = record.getMessage(), None
            if record.exc_info:
                sent.msg += "\n" + logging.Formatter().formatException(record.exc_info)
            sent.exc_info = sent.exc_text = sent.stack_info = None
            self.reports.send(Report(ReportKind.LOG), pickle.dumps(sent), droppable=True)
        except Exception:  # noqa: BLE001  # as every handler: a record that cannot be sent does not stop who logs it
            self.handleError(record)


class Endpoint:
    """The end of a channel in this process, by its descriptors. Used by the main thread."""

    def __init__(self, descriptors: list[int], worker: int, log: LogToParent) -> None:
        setup_fd, slots_fd, self.commands, reports_fd, *others = descriptors
        self._descriptors, self._log = [setup_fd, slots_fd, self.commands], log
        self.reports = log.reports = Reports(reports_fd)
        self._server: ReaderServer | TaskServer | None = None
        self._vacant = GivenSlots(*others) if worker < 0 else None
        self._descriptors += others if worker >= 0 else []
        try:
            setup = ReaderSetup.loaded(setup_fd)
            logging.getLogger().setLevel(setup.level)
            slots = SharedSlots(setup.layout.nbytes, slots_fd)
            if self._vacant is not None:
                self._server = ReaderServer(setup, setup_fd, slots, self._vacant, self.reports)
            else:
                self._server = TaskServer(setup, slots, others, self.reports, worker)
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            self._fail(error)

    def obey(self) -> bool:
        """Carry out the commands that have come; False if the channel has ended."""
        data = os.read(self.commands, COMMANDS_AT_ONCE * COMMAND_BYTES)
        if data:
            self._log.reports = self.reports
        try:
            for first in range(0, len(data), COMMAND_BYTES):
                command = Command.unpacked(data[first : first + COMMAND_BYTES])
                if command.kind is CommandKind.END:
                    return False
                if self._server is not None:
                    self._server.obey(command)
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            self._fail(error)
        return bool(data)

    def check(self) -> None:
        try:
            if isinstance(self._server, ReaderServer):
                self._server.check()
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            self._fail(error)

    def close(self) -> None:
        # In a thread: a read may not return, and other channels go on.
        threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            gc.collect()  # the memory of its slots: servers and pipelines refer to each other
        if self._vacant is not None:
            self._vacant.close()
        self.reports.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _fail(self, error: BaseException) -> None:
        self.reports.send(Report(ReportKind.FAILED), packed_errors([(0, error)]))
        self.reports.close()  # the parent raises the error when it finds the end of the reports


def main(arguments: list[str]) -> NoReturn:
    control_fd, lifeline, parent, worker = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(OSError, AttributeError):
        name = b"lit_data reader" if worker < 0 else b"lit_data worker"
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
    log = LogToParent()
    logging.getLogger().addHandler(log)
    logging.captureWarnings(capture=True)
    control = socket.socket(fileno=control_fd)
    channels: dict[int, Endpoint] = {}
    opened = b"+"
    while opened and os.getppid() == parent:
        poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
        for descriptor in (control_fd, *channels):
            poll.register(descriptor, select.POLLIN)
        events = poll.poll(1e3 * POLL_S)
        for endpoint in channels.values() if not events else ():
            endpoint.check()
        for readable, _ in events:
            if readable == control_fd:
                opened, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
                if opened:
                    endpoint = Endpoint(descriptors, worker, log)
                    channels[endpoint.commands] = endpoint
            elif not channels[readable].obey():
                channels.pop(readable).close()
                log.reports = next((each.reports for each in channels.values()), log.reports)
    # Workers may be inside a read that does not return, and shared memory needs no clean-up.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
