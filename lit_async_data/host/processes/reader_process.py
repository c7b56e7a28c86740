"""`ReaderProcess`: a reader or worker process as its parent sees it: its start and its end."""

from __future__ import annotations

import _socket
import array
import contextlib
import functools
import itertools
import operator
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes import inherited
from lit_async_data.threads import ProcessGuard

# Seconds that the end of the process is waited for before it is killed.
CLOSE_S = 1.0
# Libraries that would start threads of their own for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


class ReaderProcess:
    """A reader process, which loaders share, or one of its worker processes.

    It starts with the first `Channel` that is opened, and ends with the last that is closed. If it died, it starts anew
    with the next one. Safe to use from several threads. A copy, and a forked child, begin with no process.

    Args:
        worker: Number of the worker; None for a reader process.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._worker = worker
        self._guard = ProcessGuard()
        # Reentrant: garbage collection can close a loader inside any allocation.
        self._lock = threading.RLock()
        self._users: list[object] = []
        # Ours and its end of the control, and of a lifeline, at whose end the system kills the process.
        # What is taken is stored by C code as soon as it exists, so that it is found also where an interrupt (Ctrl-C)
        # came in between.
        self._control: list[_socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __reduce__(self) -> tuple[type[ReaderProcess], tuple[int | None]]:
        return type(self), (self._worker,)

    @property
    def kind(self) -> str:
        """``"reader"`` or ``"worker"``."""
        return "reader" if self._worker is None else "worker"

    def open(self, user: object, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Pass descriptors to the process, started if need be.

        Args:
            user: Who needs the process; see `leave`.
            descriptors: As the program of the process expects them.

        Raises:
            WorkerError: The system refuses to start a process.
        """
        if self._guard.forked:
            ReaderProcess.__init__(self, self._worker)  # the lock may have been held when the fork was made
        with self._lock:
            if user not in self._users:
                self._users.append(user)
            if self._processes and self._processes[-1].poll() is not None:
                self._end()
            if not self._processes:
                self._start()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the user finds that it has ended
                self._control[0].sendmsg([b"+"], rights)
            return self._processes[-1]

    def leave(self, user: object) -> None:
        """Note that a user needs the process no more; the last one ends it, which takes two seconds at most.

        Idempotent. If it was interrupted, call it again.
        """
        if self._guard.forked:
            return
        with self._lock:
            if self._users in ([user], []):
                self._end()
            if user in self._users:
                self._users.remove(user)

    def _start(self) -> None:
        for end in self._control:
            end.close()
        self._control.clear()
        pair = functools.partial(_socket.socketpair, socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.extend(itertools.chain.from_iterable(map(operator.call, (pair, pair))))
        control, lifeline = (end.fileno() for end in self._control[1::2])
        # The child finds modules where this process does. Without -P it would look in the working directory first.
        environment = {
            **inherited.environment(),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        environment |= dict.fromkeys(ONE_THREAD, "1")
        # Several arenas of malloc hold more than is in use: 16 MiB of 138, where two threads decode gzip.
        environment.setdefault("MALLOC_ARENA_MAX", "1")
        number = str(-1 if self._worker is None else self._worker)
        program = [sys.executable, "-P", "-m", "lit_async_data.host.processes.child"]
        # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
        started: Callable[..., subprocess.Popen[bytes]] = functools.partial(  # type: ignore[assignment]  # bytes: no text
            subprocess.Popen, pass_fds=[control, lifeline], env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            self._processes.extend(map(started, ([*program, *map(str, (control, lifeline, os.getpid())), number],)))
        except OSError as error:
            raise WorkerError(
                f"a {self.kind} process could not be started: {error}; raise the system's limit on processes, or set "
                "worker_kind=thread"
            ) from error
        for end in self._control[1::2]:
            end.close()

    def _end(self) -> None:
        for end in self._control[:2]:
            end.close()  # the process ends when its control does
        for process in self._processes:
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
                    process.wait(CLOSE_S)
        for end in self._control:
            end.close()  # the lifeline, too
        self._processes.clear()
        self._control.clear()


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended, for a message."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_S)
    code = process.poll()
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    # Python has no names for most of the realtime signals.
    names = {number.value: number.name for number in signal.Signals}
    how = f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"{how} (out of memory?)" if code == -signal.SIGKILL else how
