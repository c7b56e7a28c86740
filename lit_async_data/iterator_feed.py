"""`IteratorFeed`: what somebody else's loader gives, as batches for a device queue.

A key's epoch is the number of the pass, its step the number of the batch in it. A pass begins when its first batch is
asked for: only then is ``iter(loader)`` called, on the consumer's thread, so that whoever names an epoch has done so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from lit_async_data.feed import HostBatch, Room
from lit_async_data.packing import Ask
from lit_async_data.plan import Key
from lit_async_data.puller import Pulled, Puller
from lit_async_data.stats import ReadStats

log = logging.getLogger(__name__)


class IteratorFeed:
    """Batches of a loader, pass after pass. Keeps `Feed`.

    Args:
        loader: Any iterable.
        prepare: Makes a batch ready to be copied.
        depth: Batches that are read ahead, in a thread; 0 reads each when it is asked for.
        state: The loader's state, to be known for each batch that is read ahead.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        prepare: Callable[[Any, Ask[Any]], HostBatch],
        depth: int,
        state: Callable[[], Any] | None = None,
    ) -> None:
        self._loader = loader
        self._prepare = prepare
        self._depth = depth
        self._state = state
        self._puller: Puller | None = None
        self._expected = Key(-1, 0)  # what the puller gives next
        self._states: dict[Key, Any] = {}
        # What the last batches took.
        self._rooms: tuple[Room | None, Room | None] = (None, None)
        self._read = ReadStats()
        self._once = False
        self._error: int | None = None  # its id: the error itself would keep whatever it refers to

    @property
    def depth(self) -> int:
        """Batches that are read ahead; it can be set at any time."""
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._depth = depth
        if self._puller is not None:
            self._puller.depth = depth

    @property
    def ready(self) -> int:
        """Batches that wait on the host."""
        return 0 if self._puller is None else self._puller.ready

    @property
    def stats(self) -> ReadStats:
        """What has been read and asked for."""
        return self._read

    def room(self, key: Key) -> Room | None:  # noqa: ARG002
        """A guess: as the last batch, unless that was unlike the one before. A wrong one costs an allocation."""
        if self._puller is None:
            return None  # nothing comes after the end
        last, before = self._rooms
        return last if before is None or last == before else None

    def following(self, key: Key) -> Key:
        return Key(key.epoch, key.step + 1)

    def prefetch(self, key: Key) -> None:  # noqa: ARG002
        """Do what the thread may need. It reads on by itself, and a pass begins when its first batch is asked for."""
        if self._puller is not None:
            self._puller.serve()

    def poll(self, key: Key) -> HostBatch | None:
        if self._puller is None or key != self._expected:
            return None
        pulled = self._puller.poll()
        return None if pulled is None else self._host_batch(pulled)

    def get(self, key: Key) -> HostBatch:
        """The batch of a key, waiting for it; at the end of the pass a `StopIteration`.

        Raises:
            WorkerError: The system gives no more threads.
        """
        if key.epoch != self._expected.epoch:
            self._begin(key.epoch)
        if self._puller is None:
            return HostBatch(error=StopIteration())
        return self._host_batch(self._puller.get())

    def given(self, key: Key) -> bool:
        """Whether the batch of a key, or the error in its place, has been given out."""
        return key.epoch == self._expected.epoch and key.step < self._expected.step

    def gave(self, error: BaseException) -> bool:
        """Whether this error is what the loader raised last in place of a batch: an interrupt that came there."""
        return self._error == id(error)

    def settle(self) -> None:
        """What was asked for last has been handed out."""
        if self._puller is not None:
            self._puller.settle()

    def untouched(self, key: Key) -> bool:
        """Whether the batch of a key, which is wanted next, is still to come, and nothing after it has been taken."""
        if key.epoch != self._expected.epoch:
            return True  # nothing has been read
        return key == self._expected and self._puller is not None and not self._puller.touched

    def state_after(self, key: Key) -> Any:
        """The loader's state after a batch; None where it was not read ahead."""
        return self._states.pop(key, None)

    def end(self, *, wait: bool) -> None:
        """End the pass. What has been read ahead goes.

        Args:
            wait: For a `next` of the loader that is under way, as long as it takes; else a few seconds at most.
        """
        while self._puller is not None and not self._puller.close() and wait:
            log.warning("ending a pass: the loader's next() has not returned yet")
        self._puller = None  # and with it the iterator, and whatever ends with that

    def _begin(self, epoch: int) -> None:
        self.end(wait=True)
        self._states.clear()
        iterator = iter(self._loader)
        if iterator is self._loader and self._expected.epoch >= 0 and not self._once:
            self._once = True
            log.warning(
                "%s is an iterator, which its first pass has used up; give prefetched() something that iter() begins "
                "anew, such as a DataLoader",
                type(iterator).__name__,
            )
        self._puller = Puller(iterator, self._prepare, self._depth, self._state)
        self._expected, self._rooms = Key(epoch, 0), (None, None)

    def _host_batch(self, pulled: Pulled) -> HostBatch:
        host = pulled.host
        self._error = None if host.error is None else id(host.error)
        if isinstance(host.error, StopIteration):
            self.end(wait=True)
            return host
        if host.error is None:
            self._rooms = host.room, self._rooms[0]
            self._read = self._read.plus(1, host.nbytes, pulled.seconds)
            if pulled.state is not None:
                self._states[self._expected] = pulled.state
        self._expected = self.following(self._expected)
        return host
