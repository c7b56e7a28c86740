"""`ReaderThread`: one pass over somebody else's iterator, read ahead in a thread.

The contract:

1. Batches come in the iterator's order; an error comes at its place, once, as it was raised; then the end.
2. After an error the thread reads nothing before the consumer asks again, so that it does not call a broken iterator
   for ever.
3. The thread never calls the device. It asks the consumer's thread to do so, which answers when it comes by or while it
   waits.
4. `close` wakes the thread and waits for it a few seconds at most. A thread whose `next` does not return is left
   behind, and ends when that returns.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lit_async_data.engine.device.feed import HostBatch
from lit_async_data.engine.prefetch.packing import Ask, T
from lit_async_data.engine.supervisor import LONG_S, Bell, ThreadWorker, all_ended, awaited
from lit_async_data.errors import ClosedError
from lit_async_data.system import POLL_S

log = logging.getLogger(__name__)


class Pulled(NamedTuple):
    """The result of one `next`, or the error that came instead; of ``note`` after it; and the seconds of `next`."""

    host: HostBatch
    note: Any
    seconds: float


class ReaderThread:
    """Reads an iterator. One consumer at a time.

    Args:
        iterator: The iterator of a loader.
        prepare: Makes a batch ready to be copied, in the thread that has read it.
        depth: Batches that are read ahead; 0 reads each in the consumer's thread when it asks.
        note: Called after each `next`, in the same thread; its result comes with the batch.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        prepare: Callable[[Any, Ask[Any]], HostBatch],
        depth: int,
        note: Callable[[], Any] = lambda: None,
    ) -> None:
        self.iterator = iterator
        self._prepare = prepare
        self._note = note
        self.arrived = Bell()
        # Guards everything below. The consumer's thread takes the lock itself, not through the condition: see
        # `supervisor`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._depth = depth
        self.pulled: collections.deque[Pulled] = collections.deque()  # the batches that are read ahead
        # The call that the thread asks the consumer to make, which returns None while it is not possible; and its
        # result, or the error that it raised; None while there is no answer.
        self.asked: Callable[[], Any] | None = None
        self._answer: tuple[Any, Exception | None] | None = None
        self.worker: ThreadWorker | None = None
        self.reading = False
        self._closed = False

    @property
    def depth(self) -> int:
        """It can be set at any time; no batch that has been read is lost."""
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        with self._lock:
            self._depth = depth
            self._changed.notify_all()

    @property
    def ready(self) -> int:
        return len(self.pulled)

    # -- the consumer ----------------------------------------------------------------------------------------------

    def poll(self) -> Pulled | None:
        if self.asked is not None:
            self.serve()
        with self._lock:
            if not self.pulled:
                return None
            self._changed.notify_all()
            return self.pulled.popleft()

    def get(self) -> Pulled:
        """The next batch, waiting for it; read in this thread if nothing is read ahead."""
        return awaited(self._come, warn_after_s=LONG_S, warn=functools.partial(self._warn, "no batch"))

    def _come(self, seconds: float) -> Pulled | None:
        if (found := self.poll()) is not None:
            return found
        with self._lock:
            if self.pulled:
                return None  # it has come meanwhile
            worker = self._reader()
        if worker is None:
            return self._pull(_at_once)
        if seconds:
            self.arrived.wait(seconds)
        return None

    def pause(self) -> None:
        """Have the thread read no more, until `depth` is set again; waits for its `next`. What has been read stays."""
        self.depth = 0
        awaited(self._paused, warn_after_s=LONG_S, warn=functools.partial(self._warn, "cannot begin a pass"))

    def _paused(self, seconds: float) -> bool | None:
        if not self.reading or not self.serve():  # the thread holds a batch, and waits for memory
            return True
        if seconds:
            self.arrived.wait(seconds)
        return None

    def _warn(self, what: str, seconds: float) -> None:
        log.warning("%s for %.0f s: %s", what, seconds, self.worker)

    def close(self) -> bool:
        """Whether the thread has ended, within a few seconds; not if its `next` does not return. From any thread."""
        with self._lock:
            self._closed = True
            left = list(self.pulled)
            self.pulled.clear()
            self.asked = None
            self._changed.notify_all()
        self.arrived.ring()
        for pulled in left:
            pulled.host.release()
        worker = self.worker  # read once: another thread may close it, too
        if worker is not None and not all_ended([worker]):
            return False
        self.worker = None  # it refers to us
        # An error that the user keeps refers to this object, too; the iterator, and its worker processes, must go now.
        self.iterator = iter(())
        return True

    def _reader(self) -> ThreadWorker | None:
        """The thread that reads ahead, started if need be; after an error it is another one."""
        if not self.reading and self._depth and not self._closed:
            if self.worker is not None:
                all_ended([self.worker])  # it has read its last batch, and only has to return
            self.worker = ThreadWorker(0, self._work)
            self.worker.start()
            self.reading = True
        worker = self.worker  # read once: `close`, in another thread, forgets it
        return worker if self.reading and worker is not None and worker.alive else None

    def serve(self) -> bool:
        """Make the call that the thread asks for. Returns whether none is left; never waits for the thread."""
        if (asked := self.asked) is None:
            return True
        result, error = None, None
        try:
            result = asked()
        except Exception as caught:  # noqa: BLE001  # raised in the thread, which returns it in its batch's place
            error = caught
        if result is None and error is None:
            return False
        with self._lock:
            self._answer, self.asked = (result, error), None
            self._changed.notify_all()
        del error  # see `SlotFeed.lend`
        return True

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self, worker: ThreadWorker) -> bool:
        with self._lock:
            while len(self.pulled) >= self._depth > 0 and not self._closed:
                self._changed.wait(POLL_S)
            if self._closed or not self._depth:
                self.reading = False
                self.arrived.ring()
                return False
        worker.begin("the loader's next()")
        # No name holds it: see `ThreadPipeline._fill`.
        going_on = self._deliver(self._pull(self._ask))
        worker.rest()
        return going_on

    def _pull(self, ask: Ask[Any]) -> Pulled:
        began = time.perf_counter()
        try:
            batch = next(self.iterator)
            seconds = time.perf_counter() - began
            note = self._note()
            return Pulled(self._prepare(batch, ask), note, seconds)
        except BaseException as caught:
            if ask is _at_once and isinstance(caught, KeyboardInterrupt):
                raise  # Ctrl-C in the consumer's own thread, which ends the pass
            # Any error is raised in its batch's place.
            return Pulled(HostBatch(error=caught), None, time.perf_counter() - began)

    def _deliver(self, pulled: Pulled) -> bool:
        with self._lock:
            if self._closed:
                pulled.host.release()
                return False
            self.pulled.append(pulled)
            self.reading = pulled.host.error is None
            self._changed.notify_all()
            self.arrived.ring()
            return self.reading

    def _ask(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            if not self._closed:
                self.asked = work
                self.arrived.ring()
            while not self._changed.wait_for(lambda: self._answer is not None or self._closed, POLL_S):
                pass
            if self._answer is None:
                raise ClosedError("the pass has been ended")
            # Taken after the end of the pass, too: it may be memory, which goes back with the batch.
            (result, error), self._answer = self._answer, None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # see `SlotFeed.lend`


def _at_once(work: Callable[[], T | None]) -> T:
    """`Ask` in the consumer's own thread, where every call is possible."""
    result = work()
    assert result is not None
    return result
