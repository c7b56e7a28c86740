"""The program of a reader process.

``python -m lit_async_data.engine.processes PARENT NUMBER CONTROL LIFELINE REPORTS TASKS SETUP SLOTS``: a process id,
the number of the process in its loader, and the descriptors of two sockets, two pipes and two files. The process ends
with the control socket, with its parent and, on Linux, when the other end of the lifeline is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from lit_async_data.engine.processes.messages import ASKED, Report, ReportKind, Reports, packed_errors
from lit_async_data.engine.processes.reader_server import LogToParent, ReaderServer
from lit_async_data.engine.processes.setup import loaded
from lit_async_data.engine.processes.shared_slots import SharedSlots
from lit_async_data.system import POLL_S

IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)),
)
PR_SET_NAME = 15


def main(arguments: list[str]) -> NoReturn:
    parent, number, control_fd, lifeline, reports_fd, tasks, setup_fd, slots = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"lit_data reader", 0, 0, 0)
    reports = Reports(reports_fd)
    logging.getLogger().addHandler(LogToParent(reports))
    logging.captureWarnings(capture=True)
    try:
        setup = loaded(setup_fd)
        memory = SharedSlots(setup.layout.nbytes, slots)
        server = ReaderServer(setup, memory, tasks, reports, process=number)
        control = socket.socket(fileno=control_fd)
        control.settimeout(POLL_S)
        while os.getppid() == parent:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            except TimeoutError:
                server.check()
                continue
            if not message:
                break
            if message == ASKED:
                faulthandler.dump_traceback(descriptors[0])
                os.close(descriptors[0])
            else:
                server.renew(loaded(descriptors[0]))
    except BaseException as error:  # noqa: BLE001  # the parent raises it
        reports.send(Report(ReportKind.FAILED), packed_errors([(0, error)]))
    # Threads may be inside a read that does not return, and shared memory needs no clean-up.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
