"""`Transport`: threads that fetch ranges, those that somebody waits for first. Nobody else calls a store."""

from __future__ import annotations

import contextlib
import copy
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from lit_async_data.errors import ClosedError, StalledError, WorkerError
from lit_async_data.system import OURS, POLL_S, ProcessGuard

FETCHER = f"{OURS} fetcher"
MOST_REQUESTS, FIRST_REQUESTS = 64, 8
# A larger window stays if the rate grows by this factor; it is tried again after as many windows.
_GAIN, _TRY_AGAIN = 1.15, 16
# A thread without work ends after as many seconds.
_IDLE_S = 5.0
# Seconds without any bytes before the first warning; from one warning to the next they double.
_WARN_S = 5.0
_log = logging.getLogger(__name__)
T = TypeVar("T")


def forked(process: ProcessGuard) -> WorkerError:
    return process.error("a store was used", "its connections hang in a fork; start processes by spawn")


class Started(Future[T]):
    """The answer to a call. Cancelled if the transport closes before a thread has begun it."""

    def __init__(self, function: Callable[[], T], closings: int) -> None:
        super().__init__()
        self.function, self.closings = function, closings  # of the transport when it was started
        self.urgent = False


class Transport:
    """At most ``most`` threads, which begin when there is work and end soon after. Thread-safe.

    Whoever waits gives up after ``timeout_s`` without any bytes; warnings tell before.
    """

    def __init__(self, most: int = MOST_REQUESTS, timeout_s: float = 180) -> None:
        self._most, self._timeout_s, self._warn_s = most, timeout_s, _WARN_S
        self._begin()

    def _begin(self) -> None:
        self._process, self._changed = ProcessGuard(), threading.Condition()
        # Guarded by the condition, as all below. Urgent work has 0 in front, and other work 1.
        self._work = list[tuple[int, int, Started[Any]]]()
        self._threads, self._idle, self._number, self._closed = set[threading.Thread](), 0, 0, False
        self.active, self.window = 0, min(FIRST_REQUESTS, self._most)
        self._answers = self._closings = 0  # whoever waits for work from before the last closing gets no answer
        self._done, self._nbytes, self._since, self._best = 0, 0, time.monotonic(), 0.0

    def check_process(self) -> None:
        if self._process.forked:
            raise forked(self._process)

    def start(self, function: Callable[[], T], *, urgent: bool = True) -> Started[T]:
        """Have a thread call a function that calls a store."""
        self.check_process()
        with self._changed:
            started = Started(function, self._closings)
            self._closed = False
            self._push(started, urgent=urgent)
            if self._idle < len(self._work) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=FETCHER, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system gives no more
                    if not self._threads:
                        self._work.clear()
                        raise WorkerError("the system gives no thread to fetch with; end other work") from error
                else:
                    self._threads.add(thread)
        return started

    def _push(self, started: Started[Any], *, urgent: bool) -> None:
        started.urgent = urgent
        heapq.heappush(self._work, (not urgent, self._number, started))
        self._number += 1
        if self._ready():
            self._changed.notify()

    def hurry(self, several: Iterable[Started[Any]]) -> None:
        """Put work that nobody has begun before all that nobody waits for."""
        with self._changed:
            for each in several:
                if not (each.urgent or each.running() or each.done()):
                    self._push(each, urgent=True)

    def result_of(self, started: Started[T], name: str) -> T:
        """What a started function returns or raises, or a `ClosedError`, or a `StalledError`.

        An interrupt, or `close`, does not wait for the function.
        """
        self.hurry([started])
        seen, since = self._answers, time.monotonic()
        while not started.done() and self._closings == started.closings:
            with contextlib.suppress(TimeoutError, CancelledError):
                started.exception(POLL_S)
            silent = time.monotonic() - since
            if self._answers != seen:
                seen, since = self._answers, time.monotonic()
            elif not started.done() and silent > self._timeout_s:
                raise StalledError(f"{name}: no answer for {self._timeout_s:g} s; check the network", file=name)
            elif not started.done() and silent > self._warn_s:
                self._warn_s *= 2
                what = "%s: no answer for %.0f s; waiting for at most %g s, until the store gives up; check the address"
                _log.warning(what, name, silent, self._timeout_s)
        if started.cancelled() or not started.done():
            raise ClosedError(f"{name}: the source was closed")
        if error := started.exception():
            raise copy.copy(error) from error.__cause__  # several threads may wait for it
        return started.result()

    def _next(self) -> Started[Any] | None:
        """Waits for work; None if there was none for a while."""
        with self._changed:
            self._idle += 1
            try:
                ends = time.monotonic() + _IDLE_S
                while not self._ready():
                    left = ends - time.monotonic()
                    if self._closed or (left <= 0 and not self._work):
                        self._threads.discard(threading.current_thread())
                        return None
                    self._changed.wait(max(left, POLL_S))
                self.active += 1
                started = heapq.heappop(self._work)[2]
                started.set_running_or_notify_cancel()
                return started
            finally:
                self._idle -= 1

    def _ready(self) -> bool:
        while self._work and (self._work[0][2].running() or self._work[0][2].done()):
            heapq.heappop(self._work)  # it was hurried, and has begun since
        return bool(self._work) and (not self._work[0][0] or self.active < self.window)

    def _run(self) -> None:
        while (started := self._next()) is not None:
            try:
                started.set_result(started.function())
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it
                started.set_exception(error)
            del started  # it holds a mirror
            with self._changed:
                self.active -= 1
                self._answers += 1
                window = self.window
                self._measure()
                if self.window > window:  # else only this thread can begin something
                    self._changed.notify_all()

    def arrived(self, nbytes: int) -> None:
        """Count bytes that a store has sent."""
        with self._changed:
            self._nbytes, self._answers = self._nbytes + nbytes, self._answers + 1

    def _measure(self) -> None:
        self._done += 1
        if self._done % self.window:
            return
        now = time.monotonic()
        rate, self._nbytes, self._since = self._nbytes / max(now - self._since, 1e-6), 0, now
        if rate > self._best * _GAIN or self._done >= _TRY_AGAIN * self.window:
            self._best, self._done = rate, 0
            if self._work:  # else it was not the window that held requests back
                self.window = min(2 * self.window, self._most)

    def close(self) -> None:
        """Drop the work that nobody has begun, and end the threads; those in a call end behind it."""
        if self._process.forked:
            self._begin()
            return
        with self._changed:
            dropped, self._work, self._closed, self._closings = self._work, [], True, self._closings + 1
            self._changed.notify_all()
            threads = list(self._threads)
        for *_, started in dropped:
            started.cancel()
        ends = time.monotonic() + POLL_S
        for thread in set(threads) - {threading.current_thread()}:
            thread.join(max(ends - time.monotonic(), 0))
