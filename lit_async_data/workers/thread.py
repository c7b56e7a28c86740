"""`ThreadWorker`: a thread that does one piece of work after another until there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lit_async_data.errors import WorkerError, few
from lit_async_data.permutation import Indices
from lit_async_data.plan import Key


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
        self._job: tuple[Key, Indices, float] | None = None
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

    def begin(self, key: Key, samples: Indices) -> None:
        """Note which batch the worker reads from now on; it is made text only if somebody asks."""
        self._job = (key, samples, time.monotonic())

    def rest(self) -> None:
        """Note that it reads nothing."""
        self._job = None

    def __str__(self) -> str:
        doing = "is waiting for a slot"
        if self._job is not None:
            key, samples, since = self._job
            what = f"batch {key.step} of epoch {key.epoch}, samples {few(samples.tolist())}"
            doing = f"has been at {what} for {time.monotonic() - since:.1f} s"
        return f"worker {self.number} {doing if self.alive else 'is dead'}"

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most this many seconds."""
        if self.alive and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._work(self):
            pass
