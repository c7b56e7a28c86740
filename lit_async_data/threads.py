"""`ThreadWorker`: a thread that does one piece of work after another until there is none.

What it knows of its thread it keeps itself, in locks made of C. An interrupt (Ctrl-C) inside `is_alive` or `join` of
`threading.Thread` makes that class take a living thread for a dead one for ever (bpo-45274), and one inside
`threading.Condition.__enter__` leaves its lock locked. One inside `Thread.start` becomes a RuntimeError; so that is
called in a thread of its own, since interrupts arrive in the main thread alone.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable

from lit_async_data.errors import WorkerError


def leave_at_exit() -> None:
    """End this thread if it is a daemon thread and the interpreter is on its way out, which has closed what it uses.

    Raises:
        SystemExit: It is; a thread that ends by it prints no traceback.
    """
    if threading.current_thread() is not threading.main_thread() and not threading.main_thread().is_alive():
        raise SystemExit


class Bell:
    """Wakes one thread that waits, now or when it next does. An interrupt can come at any point of it.

    Example:
        >>> bell = Bell()
        >>> bell.ring()
        >>> bell.wait(60.0)  # returns at once
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held while there is nothing to wake up for
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next that does; several rings may count as one."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silent.release()

    def wait(self, timeout: float) -> None:
        """Wait for a ring, at most this many seconds."""
        self._silent.acquire(timeout=timeout)


class Gate:
    """Is opened once, for all threads that wait for it. An interrupt can come at any point of it.

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
        self._shut = threading.Lock()  # held until it is opened, then by each thread for a moment as it passes
        self._shut.acquire()

    def open(self) -> None:
        """Let all threads pass from now on; may be called again."""
        self._opened = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._shut.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is open, at most this many seconds.

        Returns:
            Whether it is open. An interrupt in another thread that passes can hold this one up until the time is over.
        """
        if not self._opened and self._shut.acquire(timeout=timeout):
            with contextlib.suppress(RuntimeError):  # it was opened again meanwhile
                self._shut.release()
        return self._opened


class ThreadWorker:
    """A daemon thread, so that one stuck in a dead disk cannot keep the interpreter from ending.

    Args:
        number: Which worker it is, for messages.
        work: Does one piece and returns True, or returns False to end the thread. It gets the worker, and says in
            `begin` and `rest` what it is doing.
        name: What it is for, in the name of its thread.

    Attributes:
        error: What has ended the thread, if ``work`` raised it.
    """

    def __init__(self, number: int, work: Callable[[ThreadWorker], bool], name: str = "reader") -> None:
        self.number = number
        self._work: Callable[[ThreadWorker], bool] | None = work  # None when the thread has ended, or will never work
        self._task: tuple[object, float] | None = None
        self.error: BaseException | None = None
        self._started = False  # whether `start` has returned
        self._launching = False  # whether `_launch` has been begun, and has not come to its end
        self._refused: RuntimeError | None = None  # why there is no thread
        self._launched = threading.Lock()  # held until `_launch` has come to its end
        self._launched.acquire()
        self._began = False  # whether the thread has tried to take its fate
        self._fate = threading.Lock()  # taken by the thread that begins to work, or by whoever keeps it from that
        self._working = threading.Lock()  # held until the thread has done its last work
        self._working.acquire()
        self._thread = threading.Thread(target=self._main, name=f"lit_async_data {name} {number}", daemon=True)

    def start(self) -> None:
        """Start the thread. If that is interrupted, `join` sees to it that it does no work.

        Raises:
            WorkerError: The system gives no more threads.
        """
        try:
            self._launching = True  # no interrupt comes between this and the call: nothing else is called
            _thread.start_new_thread(self._launch, ())
        except RuntimeError as error:
            self._launching, self._refused = False, error.with_traceback(None)
        if self._launching:
            self._launched.acquire()
        if self._refused is not None:
            message = f"worker {self.number} could not be started: {self._refused}"
            raise WorkerError(message, worker=self.number) from self._refused
        self._started = True

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._started and self._work is not None

    @property
    def reason(self) -> str:
        """What has ended the thread, for a message; empty if no error has."""
        return "" if self.error is None else f" by {type(self.error).__name__}: {self.error}"

    def begin(self, task: object) -> None:
        """Note what the worker is at from now on; it is made text only if somebody asks."""
        self._task = (task, time.monotonic())

    def rest(self) -> None:
        """Note that it does nothing."""
        self._task = None

    def __str__(self) -> str:
        doing = "is waiting for a slot"
        if self._task is not None:
            task, since = self._task
            doing = f"has been at {task} for {time.monotonic() - since:.1f} s"
        return f"worker {self.number} {doing if self.alive else 'is dead'}"

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, at most this many seconds.

        Returns:
            Whether it has ended. One that has not begun to work never will.
        """
        if threading.current_thread() is self._thread:
            return False
        if self._fate.acquire(blocking=False) or not self._began:
            self._work = None
        elif self._work is not None:
            if not self._working.acquire(timeout=timeout):
                return False
            self._working.release()
        if self._launching and not self._launched.acquire(timeout=timeout):
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout)  # it has only to leave
        return True

    def _launch(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._refused = error.with_traceback(None)
        finally:
            self._launching = False
            self._launched.release()

    def _main(self) -> None:
        self._began = True
        try:
            if self._fate.acquire(blocking=False):
                self._run()
        except BaseException as error:  # noqa: BLE001  # whoever waits for this worker raises it
            self.error = error
        finally:
            self._work = None
            self._working.release()

    def _run(self) -> None:
        while self._work is not None and self._work(self):
            pass
