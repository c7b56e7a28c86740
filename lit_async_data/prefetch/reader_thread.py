"""`ReaderThread`: one pass over somebody else's iterator, read ahead in a thread.

The contract:

1. What the iterator gives comes in its order; an error at its place, once, as it was raised; then the end.
2. After an error nothing is read before the consumer asks again: what is broken is not to be called for ever.
3. The thread makes no call to a device. What only the consumer's thread may do, it asks of it, and the consumer does it
   when it comes by or while it waits.
4. `close` wakes the thread and waits for it a few seconds at most; what sits in a `next` that does not return is left
   behind, and ends when that does.

No wait is without a time-out and a look at whether the other side is alive.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lit_async_data.device.feed import HostBatch
from lit_async_data.errors import ClosedError, WorkerError
from lit_async_data.prefetch.packing import Ask, T
from lit_async_data.threads import Bell, ThreadWorker

log = logging.getLogger(__name__)

# Seconds between two looks at whether the other side lives.
POLL_S = 0.5
# Seconds that `close` waits for a `next` that is under way.
CLOSE_S = 5.0
# Seconds after which waiting is worth a line.
LONG_S = 60.0


def _no_note() -> None:
    pass


class Pulled(NamedTuple):
    """What one `next` gave.

    Attributes:
        host: The batch, made ready, or the error that came instead; at the end a `StopIteration`.
        note: What was to be known about the loader after it.
        seconds: Spent in `next`.
    """

    host: HostBatch
    note: Any
    seconds: float


class Asked(NamedTuple):
    """Something that the thread wants done.

    Attributes:
        work: What is to be done; gives None as long as it is not possible.
        answer: Takes what it gave, or what it raised. Not a Future: an interrupt in there leaves its lock locked.
    """

    work: Callable[[], Any]
    answer: queue.SimpleQueue[tuple[Any, Exception | None]]


class ReaderThread:
    """Pulls from an iterator. One consumer at a time.

    Args:
        iterator: What `iter` of a loader gave.
        prepare: Makes a batch ready to be copied, in the thread that pulled it.
        depth: Batches that are read ahead; 0 reads each in the consumer's thread when it asks.
        note: Called after each `next`, in the thread that made it; what it returns comes with the batch.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        prepare: Callable[[Any, Ask[Any]], HostBatch],
        depth: int,
        note: Callable[[], Any] = _no_note,
    ) -> None:
        self._iterator = iterator
        self._prepare = prepare
        self._note = note
        # Wakes the consumer; see `Pipeline`.
        self._arrived = Bell()
        # Everything below is guarded by this lock. The consumer's thread takes it directly, and not by way of the
        # condition: an interrupt in there leaves it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._depth = depth
        self._pulled: collections.deque[Pulled] = collections.deque()
        self._asked: Asked | None = None
        self._worker: ThreadWorker | None = None
        self._reading = False  # whether the worker will pull more
        self._closed = False

    @property
    def depth(self) -> int:
        """Batches that are read ahead. It can be set at any time: what has been read is handed out all the same."""
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        with self._lock:
            self._depth = depth
            self._changed.notify_all()

    @property
    def ready(self) -> int:
        """Batches that have been read."""
        return len(self._pulled)

    # -- the consumer ----------------------------------------------------------------------------------------------

    def poll(self) -> Pulled | None:
        """What comes next, if it is there."""
        self.serve()
        with self._lock:
            return self._next()

    def get(self) -> Pulled:
        """What comes next, waiting for it; read here, if nobody reads ahead.

        Raises:
            WorkerError: The system gives no more threads.
        """
        deadline = time.monotonic() + LONG_S
        while True:
            left = self.serve()
            with self._lock:
                pulled = self._next()
                if pulled is not None:
                    return pulled
                worker = self._reader()
                if worker is None:
                    break
                idle = self._asked is left
            if idle:
                self._arrived.wait(POLL_S)
            if time.monotonic() > deadline:
                deadline = math.inf
                log.warning("no batch for %.0f s: %s", LONG_S, worker)
        return self._pull(_at_once)

    def start(self) -> None:
        """Begin to read ahead now, not with the next `get`, which reports what keeps a thread from being started."""
        with self._lock, contextlib.suppress(WorkerError):
            self._reader()

    def close(self) -> bool:
        """Read nothing more; waits a few seconds at most. Idempotent, from any thread.

        Returns:
            Whether nothing is under way any more; False where a `next` has not returned.
        """
        with self._lock:
            self._closed = True
            left, asked = list(self._pulled), self._asked
            self._pulled.clear()
            self._asked = None
            self._changed.notify_all()
        self._arrived.ring()
        if asked is not None:
            asked.answer.put((None, ClosedError("the pass has been ended")))
        for pulled in left:
            pulled.host.release()
        if self._worker is not None and not self._worker.join(CLOSE_S):
            return False
        self._worker = None  # it refers to us
        # An error that the user keeps refers to us, too; what an iterator holds, worker processes perhaps, must go now.
        self._iterator = iter(())
        return True

    def _next(self) -> Pulled | None:
        if not self._pulled:
            return None
        self._changed.notify_all()
        return self._pulled.popleft()

    def _reader(self) -> ThreadWorker | None:
        """Whoever reads ahead, started if need be: after an error it is another thread."""
        if not self._reading and self._depth and not self._closed:
            if self._worker is not None:
                self._worker.join(CLOSE_S)  # it has pulled its last, and has only to return
            self._worker = ThreadWorker(0, self._work)
            self._worker.start()
            self._reading = True
        return self._worker if self._reading and self._worker is not None and self._worker.alive else None

    def serve(self) -> Asked | None:
        """Do what the thread has asked for; returns it if that is not possible yet. Never waits for the thread."""
        asked = self._asked
        if asked is None:
            return None
        try:
            result = asked.work()
        except Exception as error:  # noqa: BLE001  # it is raised in the thread, and comes back at its batch's place
            asked.answer.put((None, error))
        else:
            if result is None:
                return asked
            asked.answer.put((result, None))
        with self._lock:
            # 1. The answer is there. 2. The thread goes on, and asks again. 3. That must not be taken for answered: see
            # test_the_thread_may_ask_again_at_once.
            if self._asked is asked:
                self._asked = None
        return None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self, worker: ThreadWorker) -> bool:
        with self._lock:
            while len(self._pulled) >= self._depth > 0 and not self._closed:
                self._changed.wait(POLL_S)
            if self._closed or not self._depth:
                self._reading = False
                self._arrived.ring()
                return False
        worker.begin("the loader's next()")
        # No name holds it: see `Pipeline._fill`.
        going_on = self._deliver(self._pull(self._ask))
        worker.rest()
        return going_on

    def _pull(self, ask: Ask[Any]) -> Pulled:
        began = time.perf_counter()
        try:
            batch = next(self._iterator)
            seconds = time.perf_counter() - began
            note = self._note()
            return Pulled(self._prepare(batch, ask), note, seconds)
        except BaseException as caught:
            if ask is _at_once and isinstance(caught, KeyboardInterrupt):
                raise  # Ctrl-C in the consumer's own thread, which ends the pass
            # Whatever it is, it is raised at its place.
            return Pulled(HostBatch(error=caught), None, time.perf_counter() - began)

    def _deliver(self, pulled: Pulled) -> bool:
        with self._lock:
            if self._closed:
                pulled.host.release()
                return False
            self._pulled.append(pulled)
            self._reading = pulled.host.error is None
            self._changed.notify_all()
            self._arrived.ring()
            return self._reading

    def _ask(self, work: Callable[[], Any]) -> Any:
        asked = Asked(work, queue.SimpleQueue())
        with self._lock:
            closed = self._closed
            if closed:
                raise ClosedError("the pass has been ended")
            self._asked = asked
            self._changed.notify_all()
            self._arrived.ring()
        while True:
            try:
                result, error = asked.answer.get(timeout=POLL_S)
            except queue.Empty:
                if self._closed:
                    raise ClosedError("the pass has been ended") from None
                continue
            if error is None:
                return result
            try:
                raise error
            finally:
                del error  # see `SlotFeed.lend`


def _at_once(work: Callable[[], T | None]) -> T:
    """What `Ask` is in the consumer's own thread: whatever must be free for it, is."""
    result = work()
    assert result is not None
    return result
