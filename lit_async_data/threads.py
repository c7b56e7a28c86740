"""What threads need to know of their process: whether it exits, whether it is a fork; and a gate to wait at."""

from __future__ import annotations

import contextlib
import os
import threading

from lit_async_data.errors import WorkerError

# What the names of the threads of this package begin with.
OURS = "lit_async_data"


def leave_at_exit() -> None:
    """Ends a daemon thread at interpreter exit, when the modules and files that it uses may be closed already."""
    if threading.current_thread() is not threading.main_thread() and not threading.main_thread().is_alive():
        raise SystemExit


class ProcessGuard:
    """Detects use in a fork of the process that built it: threads, locks and HDF5 handles do not survive a fork."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that built the guard."""
        return self._pid != os.getpid()

    def error(self, event: str, advice: str, *, file: str | None = None) -> WorkerError:
        """Returns the error to raise in a fork."""
        pids = f"in process {self._pid} and cannot be used in its fork {os.getpid()}"
        return WorkerError(f"{event} {pids}: {advice}", file=file)


class Gate:
    """Opens once, for all threads that wait for it. Safe to interrupt at any point."""

    def __init__(self) -> None:
        self._opened = False
        self._closed = threading.Lock()  # held until `open`, and then briefly by each thread that passes
        self._closed.acquire()

    def open(self) -> None:
        """Lets all threads pass from now on. Idempotent."""
        self._opened = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._closed.release()

    def wait(self, timeout: float) -> bool:
        """Waits until the gate is open, at most ``timeout`` seconds.

        Returns:
            Whether it is open. If an interrupt hits another thread that passes, this one may wait the whole time.
        """
        if not self._opened and self._closed.acquire(timeout=timeout):
            with contextlib.suppress(RuntimeError):  # `open` was called again meanwhile
                self._closed.release()
        return self._opened
