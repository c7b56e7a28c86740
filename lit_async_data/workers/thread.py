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
            `job` what it is doing.
    """

    def __init__(self, number: int, work: Callable[[ThreadWorker], bool]) -> None:
        self.number = number
        self._work = work
        self._job: tuple[str, float] | None = None
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

    def begin(self, job: str | None) -> None:
        """Say what the worker does from now on; None when it waits."""
        self._job = None if job is None else (job, time.monotonic())

    def __str__(self) -> str:
        job = self._job
        doing = (
            "is waiting for a slot" if job is None else f"has been at {job[0]} for {time.monotonic() - job[1]:.1f} s"
        )
        return f"worker {self.number} {doing if self.alive else 'is dead'}"

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most this many seconds."""
        if self.alive and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._work(self):
            pass
