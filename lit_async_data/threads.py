"""Threads and waits that survive an interrupt (Ctrl-C), and a guard against use in a fork.

The module uses only ``threading.Lock``, which is implemented in C, to track its threads. Python's own classes do not
survive an interrupt everywhere. Inside `is_alive` or `join` of `threading.Thread`, it makes that class take a living
thread for a dead one for ever (bpo-45274). Inside ``threading.Condition.__enter__``, it leaves the lock locked. Inside
`Thread.start`, it becomes a RuntimeError; so a helper thread makes that call, since interrupts arrive only in the main
thread.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable

from lit_async_data.errors import WorkerError

# What the names of the threads of this package begin with.
OURS = "lit_async_data"


def leave_at_exit() -> None:
    """Ends a daemon thread at interpreter exit, when the modules and files that it uses may be closed already.

    Raises:
        SystemExit: The interpreter exits. It ends the thread without a traceback.
    """
    if threading.current_thread() is not threading.main_thread() and not threading.main_thread().is_alive():
        raise SystemExit


class ProcessGuard:
    """Detects use in a fork of the process that built it: threads, locks and HDF5 handles do not survive a fork.

    Example:
        >>> ProcessGuard().forked
        False
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that built the guard."""
        return self._pid != os.getpid()

    def error(self, event: str, advice: str, *, file: str | None = None) -> WorkerError:
        """Returns the error to raise in a fork.

        Args:
            event: What happened in the parent, such as ``"this loader was built"``.
            advice: Why it cannot be used in the fork, and what to do.
            file: Path of the file concerned.
        """
        pids = f"in process {self._pid} and cannot be used in its fork {os.getpid()}"
        return WorkerError(f"{event} {pids}: {advice}", file=file)


class Bell:
    """Wakes one waiting thread, or the next one that waits. Safe to interrupt at any point.

    Example:
        >>> bell = Bell()
        >>> bell.ring()
        >>> bell.wait(60.0)  # returns at once
        True
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held until a ring
        self._silent.acquire()

    def ring(self) -> None:
        """Wakes the waiting thread, or the next one that waits. Several rings may count as one."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silent.release()

    def wait(self, timeout: float) -> bool:
        """Waits for a ring, at most ``timeout`` seconds.

        Returns:
            Whether it has rung.
        """
        return self._silent.acquire(timeout=timeout)


class Gate:
    """Opens once, for all threads that wait for it. Safe to interrupt at any point.

    Example:
        >>> gate = Gate()
        >>> gate.wait(0.0)
        False
        >>> gate.open()
        >>> gate.wait(60.0)  # returns at once
        True
    """

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


class ThreadWorker:
    """Repeats a function in a daemon thread. One stuck in a dead disk cannot keep the interpreter from exiting.

    Args:
        number: Number of the worker, for messages.
        work: Does one piece of work and returns True, or returns False to end the thread. It gets the worker, and
            reports what it does with `begin` and `rest`.
        name: Purpose of the thread, for its name.

    Attributes:
        error: The error of ``work`` that ended the thread; None if there was none.
    """

    def __init__(self, number: int, work: Callable[[ThreadWorker], bool], name: str = "reader") -> None:
        self.number = number
        self._work: Callable[[ThreadWorker], bool] | None = work  # None once the thread will do no more work
        self._task: tuple[object, float] | None = None
        self.error: BaseException | None = None
        self._started = False  # whether `start` has returned
        self._launching = False  # whether the helper thread runs `_launch`
        self._start_error: RuntimeError | None = None
        self._launched = threading.Lock()  # held until `_launch` ends
        self._launched.acquire()
        self._began = False  # whether the thread has tried to take the claim
        self._claim = threading.Lock()  # taken by the thread before it works, or by `join` to keep it from working
        self._working = threading.Lock()  # held until the thread has done its last work
        self._working.acquire()
        self._thread = threading.Thread(target=self._main, name=f"{OURS} {name} {number}", daemon=True)

    def start(self) -> None:
        """Starts the thread. If an interrupt ends this call, the thread does no work once `join` was called.

        Raises:
            WorkerError: The system refuses to start another thread.
        """
        try:
            self._launching = True  # no interrupt can come before the next call: there is no call in between
            _thread.start_new_thread(self._launch, ())
        except RuntimeError as error:
            self._launching, self._start_error = False, error.with_traceback(None)
        if self._launching:
            self._launched.acquire()
        if self._start_error is not None:
            raise WorkerError(
                f"worker {self.number} could not be started: {self._start_error}; use fewer threads, or raise the "
                "system's limit on them",
                worker=self.number,
            ) from self._start_error
        self._started = True

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._started and self._work is not None

    @property
    def reason(self) -> str:
        """The error that ended the thread, for a message; empty if there was none."""
        return "" if self.error is None else f" by {type(self.error).__name__}: {self.error}"

    def begin(self, task: object) -> None:
        """Records the current task. It is converted to text only for messages."""
        self._task = (task, time.monotonic())

    def rest(self) -> None:
        """Records that the worker is idle."""
        self._task = None

    def __str__(self) -> str:
        doing = "is waiting for a slot"
        if (current := self._task) is not None:  # read once: the thread may come to its end meanwhile
            task, since = current
            doing = f"has been at {task} for {time.monotonic() - since:.1f} s"
        return f"worker {self.number} {doing if self.alive else 'is dead'}"

    def join(self, timeout: float) -> bool:
        """Waits for the thread to end, at most about ``timeout`` seconds. A thread that has not begun never will.

        Returns:
            Whether it has ended.
        """
        if threading.current_thread() is self._thread:
            return False
        if self._claim.acquire(blocking=False) or not self._began:
            self._work = None
        elif self._work is not None:
            if not self._working.acquire(timeout=timeout):
                return False
            self._working.release()
        if self._launching and not self._launched.acquire(timeout=timeout):
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout)  # its work is done; it is about to end
        return True

    def _launch(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._start_error = error.with_traceback(None)
        finally:
            self._launching = False
            self._launched.release()

    def _main(self) -> None:
        self._began = True
        try:
            if self._claim.acquire(blocking=False):
                self._run()
        except BaseException as error:  # noqa: BLE001  # the consumer raises it
            self.error = error
        finally:
            self._work = None
            self._working.release()

    def _run(self) -> None:
        while self._work is not None and self._work(self):
            pass
