"""The program of a reader process.

``python -m lit_async_data.engine.processes CONTROL LIFELINE PARENT NUMBER``: the descriptors of two sockets, a
process id, and the number of the process among those of a loader. A message on the control brings the descriptors of a
channel: the setup, the slots, a pipe whose end or first byte ends the channel, the pipe of reports, and both ends of
the pipe of tasks; or a socket to which the stacks of all threads are to be written. The main thread waits for channels
to begin and to end. The process ends with the control, and with its parent, also if the parent is killed, or has forks
that keep the sockets open. On Linux, the system kills it when the other end of the lifeline is closed, even if C code
holds the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import NoReturn

from lit_async_data.engine.processes.messages import (
    ASKED,
    OPENED,
    Report,
    ReportKind,
    Reports,
    TaskQueue,
    packed_errors,
)
from lit_async_data.engine.processes.reader_server import LogToParent, ReaderServer
from lit_async_data.engine.processes.setup import ReaderSetup
from lit_async_data.engine.processes.shared_slots import SharedSlots
from lit_async_data.system import POLL_S

MOST_DESCRIPTORS = 6  # of a channel
IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)),
)
PR_SET_NAME = 15


class Endpoint:
    """The end of a channel in this process, by its descriptors. Used by the main thread.

    Attributes:
        end: The descriptor of the pipe that ends it.
    """

    def __init__(self, descriptors: list[int], number: int, log: LogToParent) -> None:
        setup_fd, slots_fd, self.end, reports_fd, *tasks = descriptors
        self._descriptors = [setup_fd, slots_fd, self.end]
        self.reports = log.reports = Reports(reports_fd)
        self._server: ReaderServer | None = None
        self._tasks = TaskQueue(*tasks)
        try:
            setup = ReaderSetup.loaded(setup_fd)
            logging.getLogger().setLevel(setup.level)
            slots = SharedSlots(setup.layout.nbytes + setup.raw_bytes, slots_fd)
            self._server = ReaderServer(setup, slots, self._tasks, self.reports, records=log, process=number)
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            self._fail(error)

    def check(self) -> None:
        try:
            if self._server is not None:
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
        self._tasks.close()
        self.reports.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _fail(self, error: BaseException) -> None:
        self.reports.send(Report(ReportKind.FAILED), packed_errors([(0, error)]))
        self.reports.close()  # the parent raises the error when it finds the end of the reports


def main(arguments: list[str]) -> NoReturn:
    control_fd, lifeline, parent, number = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"lit_data reader", 0, 0, 0)
    log = LogToParent()
    logging.getLogger().addHandler(log)
    logging.captureWarnings(capture=True)
    control = socket.socket(fileno=control_fd)
    channels: dict[int, Endpoint] = {}
    message = OPENED
    while message and os.getppid() == parent:
        poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
        for descriptor in (control_fd, *channels):
            poll.register(descriptor, select.POLLIN)
        events = poll.poll(1e3 * POLL_S)
        for endpoint in channels.values() if not events else ():
            endpoint.check()
        for readable, _ in events:
            if readable == control_fd:
                message, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
                if message == ASKED:
                    faulthandler.dump_traceback(descriptors[0])
                    os.close(descriptors[0])
                elif message:
                    endpoint = Endpoint(descriptors, number, log)
                    channels[endpoint.end] = endpoint
            else:
                channels.pop(readable).close()
                log.reports = next((each.reports for each in channels.values()), log.reports)
    # Threads may be inside a read that does not return, and shared memory needs no clean-up.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
