"""`ThreadWorker`: a thread that does one piece of work after another until there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lit_async_data.errors import WorkerError


class ThreadWorker:
    """A daemon thread, so that one stuck in a dead disk cannot keep the interpreter from ending.

    Args:
        number: Which worker it is, for messages.
        work: Does one piece and returns True, or returns False to end the thread. It gets the worker, and says in
            `begin` and `rest` what it is doing.
    """

    def __init__(self, number: int, work: Callable[[ThreadWorker], bool]) -> None:
        self.number = number
        self._work = work
        self._task: tuple[object, float] | None = None
        self._thread = threading.Thread(target=self._run, name=f"lit_async_data reader {number}", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            WorkerError: The system gives no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise WorkerError(f"worker {self.number} could not be started: {error}", worker=self.number) from error

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

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

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most this many seconds."""
        if self.alive and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._work(self):
            pass
