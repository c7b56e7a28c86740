"""Starts, ends and watches threads, waits for them, ends processes, and logs unexpected errors.

An interrupt (Ctrl-C) must leave no lock locked: the consumer's thread waits only for ``threading.Lock``, and a helper
thread calls `Thread.start` (docs/design/engine.md).
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import logging
import math
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lit_async_data.errors import AsyncDataError, WorkerError
from lit_async_data.system import OURS, POLL_S, Gate

PREPARING = "preparing batches that come later failed; they are read all the same"
REPORTED: dict[str, object] = {}  # the keys that `report_once` has logged


def report_once(log: logging.Logger, what: str, error: Exception) -> None:
    """Log a bug in optional work, such as reading ahead, with its traceback; each ``what`` once."""
    # An `AsyncDataError` recurs. At interpreter exit, files that a daemon thread uses are closed before it ends.
    if isinstance(error, AsyncDataError) or not threading.main_thread().is_alive():
        return
    # In one step, so that only one of two threads logs.
    if REPORTED.setdefault(what, own := object()) is own:
        trace = "".join(traceback.format_exception(error))
        log.warning("%s. This is a bug, of lit_async_data or of the source; please report:\n%s", what, trace)


T = TypeVar("T")

# Seconds to wait for threads in the middle of a read, and for a process before it is killed.
THREADS_S, PROCESS_S = 5.0, 1.0
# Seconds between two checks whether another thread has freed a slot.
FREED_S = 0.02
# Seconds to wait for a batch of a foreign iterator before the first warning.
LONG_S = 30.0


def awaited(
    found: Callable[[float], T | None],
    *,
    limit_s: float = math.inf,
    late: Callable[[], object] | None = None,
    warn_after_s: float = math.inf,
    warn: Callable[[float], object] | None = None,
) -> T:
    """Call ``found`` until it returns something, which is the result.

    ``found`` waits at most for the seconds that it gets, and raises if the other side has ended. After ``limit_s``,
    ``late`` is called, which raises. After ``warn_after_s``, ``warn`` is called with the seconds so far, and again
    whenever they have doubled.
    """
    began, result = time.monotonic(), found(0.0)
    while result is None:
        waited = time.monotonic() - began
        if late is not None and waited > limit_s:
            late()
        if warn is not None and waited > warn_after_s:
            warn(waited)
            warn_after_s = 2 * waited
        result = found(POLL_S)
    try:
        return result
    finally:
        del result  # the traceback of an error in it may refer to this frame, and the cycle would keep a pass alive


class Bell:
    """Wakes the thread that waits, or the next one; several rings may count as one. An interrupt ends a wait."""

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held until a ring
        self._silent.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silent.release()

    def wait(self, timeout: float) -> bool:
        return self._silent.acquire(timeout=timeout)


class ThreadWorker:
    """Repeats a function in a daemon thread, which cannot keep the interpreter from exiting.

    ``work`` does one piece of work and returns True, or False to end the thread. It reports by `begin` and `rest`.
    """

    def __init__(self, number: int, work: Callable[[ThreadWorker], bool]) -> None:
        self.number = number
        self.work: Callable[[ThreadWorker], bool] | None = work  # None once the thread will do no more work
        # The task under way, and the `time.monotonic` of its begin; None while the thread rests.
        self.task: tuple[object, float] | None = None
        # The error that ended the thread, or kept it from starting; None if there was none.
        self.error: BaseException | None = None
        self._started = self._refused = False
        self._claim = threading.Lock()  # taken by the thread before it works, or by `join` to keep it from working
        self._ended, self._launched = Gate(), Gate()  # opened after the last work, and once the thread runs, or cannot
        self._thread = threading.Thread(target=self._main, name=f"{OURS} reader {number}", daemon=True)

    def start(self) -> None:
        self._started = True
        try:
            _thread.start_new_thread(self._launch, ())
            self._launched.wait(-1)
        except RuntimeError as error:
            self._failed(error)
        if self._refused:
            self.check()

    @property
    def alive(self) -> bool:
        return self._started and self.work is not None

    def check(self) -> None:
        if self.alive:
            return
        if self._refused:
            advice = "use fewer threads, or raise the system's limit on them"
            what = f"worker {self.number} could not be started: {self.error}; {advice}"
        else:
            why = "" if self.error is None else f" by {type(self.error).__name__}: {self.error}"
            what = f"{self}: its thread has ended{why}; close the loader"
        raise WorkerError(what, worker=self.number) from self.error

    def begin(self, task: object) -> None:
        """The task is converted to text only for messages."""
        self.task = (task, time.monotonic())

    def rest(self) -> None:
        self.task = None

    def __str__(self) -> str:
        doing = "is waiting for a slot"
        if (current := self.task) is not None:  # read once: the thread may end meanwhile
            task, since = current
            doing = f"has been at {task} for {time.monotonic() - since:.1f} s"
        return f"worker {self.number} {doing if self.alive else 'is dead'}"

    def join(self, timeout: float) -> bool:
        """Whether the thread ends within about so many seconds. A thread that has not begun will never work."""
        if threading.current_thread() is self._thread:
            return False
        if self._claim.acquire(blocking=False):
            self.work = None
        if self._started and not self._ended.wait(timeout):
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout)  # its work is done; it is about to end
        return True

    def _launch(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._failed(error)
        finally:
            self._launched.open()

    def _failed(self, error: RuntimeError) -> None:
        self.error, self.work, self._refused = error.with_traceback(None), None, True
        self._ended.open()

    def _main(self) -> None:
        try:
            if self._claim.acquire(blocking=False):
                while self.work is not None and self.work(self):
                    pass
        except BaseException as error:  # noqa: BLE001  # the consumer raises it
            self.error = error
        finally:
            self.work = None
            self._ended.open()


def all_ended(workers: Iterable[ThreadWorker]) -> bool:
    limit = time.monotonic() + THREADS_S
    ended = [worker.join(max(limit - time.monotonic(), 0)) for worker in workers]
    return all(ended)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that were told to end, and kill the others. A process stuck in the kernel is left behind."""
    for _ in range(2):
        limit = time.monotonic() + PROCESS_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0))
        for process in processes:
            process.kill()


def dump_stacks() -> None:
    """Write the stacks of all threads to standard error, even if Python has replaced ``sys.stderr``."""
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, f"{OURS}: the threads of process {os.getpid()}\n".encode())
    faulthandler.dump_traceback(2)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PROCESS_S)
    code = process.poll()
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    # Python has no names for most of the realtime signals.
    names = {number.value: number.name for number in signal.Signals}
    need = "out of memory? fewer workers, or a smaller cache_bytes, queue_depth or shuffle_chunks need less"
    return f"was killed by {names.get(-code, f'signal {-code}')}{f' ({need})' * (code == -signal.SIGKILL)}"
