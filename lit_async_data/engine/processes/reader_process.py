"""`ReaderProcess`: a reader process as its parent sees it: its start and its end; `ReaderProcesses`: all of them."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from lit_async_data.engine import supervisor
from lit_async_data.engine.processes.messages import ASKED, OPENED
from lit_async_data.engine.processes.setup import environment
from lit_async_data.errors import WorkerError
from lit_async_data.sources.local_files.descriptors import advice_on
from lit_async_data.system import ProcessGuard

# Libraries that would start threads of their own for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
# Seconds in which a process is to say the stacks of its threads.
STACKS_S = 1.0


class ReaderProcess:
    """A reader process, which loaders share, by its number among those of a loader.

    It starts with the first `Channel` that is opened, and ends with the last that is closed. If it died, it starts anew
    with the next one. Safe to use from several threads. A forked child begins with no process.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._guard = ProcessGuard()
        # Reentrant: garbage collection can close a loader inside any allocation.
        self._lock = threading.RLock()
        self._users: list[object] = []
        # Our ends of the control, and of a lifeline, at whose end the system kills the process.
        self._control: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, user: object, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Pass descriptors to the process, started if need be, for a user who calls `leave` in the end."""
        if self._guard.forked:
            ReaderProcess.__init__(self, self._number)  # the lock may have been held when the fork was made
        with self._lock:
            if user not in self._users:
                self._users.append(user)
            if self._process is None or self._process.poll() is not None:
                self._end()
                try:
                    self._process = self._started()
                except OSError as error:
                    advice = advice_on(error) or f"{error}; raise the system's limit on processes"
                    what = f"a reader process could not be started: {advice}, or set worker_kind=thread"
                    raise WorkerError(what) from error
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the user finds that it has ended
                self._control[0].sendmsg([OPENED], rights)
            return self._process

    def keep(self, user: object) -> None:
        """Note a user, if the process has one."""
        if not self._guard.forked:
            with self._lock:
                self._users += [user] if self._users else []

    def leave(self, user: object) -> None:
        """Note that a user needs the process no more; the last one ends it, which takes two seconds at most."""
        if self._guard.forked:
            return
        with self._lock:
            if self._users in ([user], []):
                self._end()
            if user in self._users:
                self._users.remove(user)

    def stacks(self) -> str:
        """The stacks of its threads, as it says them; or that it does not answer in time."""
        ours, its = socket.socketpair()
        with ours, its, contextlib.suppress(OSError, IndexError):  # it takes too long, or has ended
            with self._lock:
                socket.send_fds(self._control[0], [ASKED], [its.fileno()])
            its.close()
            ours.settimeout(STACKS_S)
            return b"".join(iter(lambda: ours.recv(2**16), b"")).decode(errors="replace")
        return "no answer: it is stopped, has not started yet, or C code in it holds the GIL\n"

    def _started(self) -> subprocess.Popen[bytes]:
        pairs = [socket.socketpair() for _ in range(2)]
        self._control = [ours for ours, _ in pairs]
        control, lifeline = (its.fileno() for _, its in pairs)
        # The child finds modules where this process does. Without -P it would look in the working directory first.
        variables = {
            **environment(),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        variables |= dict.fromkeys(ONE_THREAD, "1")
        # Several arenas of malloc hold more than is in use: 16 MiB of 138, where two threads decode gzip.
        variables.setdefault("MALLOC_ARENA_MAX", "1")
        program = [sys.executable, "-P", "-m", "lit_async_data.engine.processes"]
        program += map(str, (control, lifeline, os.getpid(), self._number))
        try:
            # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
            return subprocess.Popen(  # noqa: S603  # our own program
                program, pass_fds=[control, lifeline], env=variables, stdin=subprocess.DEVNULL, process_group=0
            )
        finally:
            for _, its in pairs:
                its.close()

    def _end(self) -> None:
        for ours in self._control[:1]:
            ours.close()  # the process ends when its control does
        if self._process is not None:
            supervisor.end(self._process)
        for ours in self._control:
            ours.close()  # the lifeline, too
        self._process, self._control = None, []


class ReaderProcesses(dict[int, ReaderProcess]):
    """The reader processes that loaders share, by their numbers. A copy begins with none."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Those that run do not end, though nobody uses them for a while."""
        user = object()
        with contextlib.ExitStack() as stack:
            for process in self.values():
                stack.callback(process.leave, user)
                process.keep(user)
            yield

    def __missing__(self, number: int) -> ReaderProcess:
        return self.setdefault(number, ReaderProcess(number))

    def __reduce__(self) -> tuple[type[ReaderProcesses], tuple[()]]:
        return type(self), ()
