"""`IteratorFeed`: what somebody else's loader gives, as batches for a device queue.

A key's epoch is the number of the pass, its step the number of the batch in it. A pass begins when its first batch is
asked for: only then is ``iter(loader)`` called, on the consumer's thread, so that whoever names an epoch has done so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lit_async_data.device.feed import DeviceBuffers, HostBatch
from lit_async_data.host.stats import ReadStats
from lit_async_data.order.plan import BatchIndex
from lit_async_data.prefetch.accelerate_marks import Mark, Marks
from lit_async_data.prefetch.draw_watch import DrawWatch
from lit_async_data.prefetch.packing import Ask
from lit_async_data.prefetch.reader_thread import Pulled, ReaderThread
from lit_async_data.prefetch.state_snapshot import Snapshot

log = logging.getLogger(__name__)


class _Note(NamedTuple):
    """What is to be known about a loader after a batch.

    Attributes:
        state: Of the loader; None where that is not taken.
        mark: Whether Accelerate takes the batch for the last; None for other loaders.
    """

    state: Snapshot | None
    mark: Mark | None


class IteratorFeed:
    """Batches of a loader, pass after pass. Keeps `Feed`.

    Args:
        loader: Any iterable.
        prepare: Makes a batch ready to be copied.
        depth: Batches that are read ahead, in a thread; 0 reads each when it is asked for.
        state: The loader's ``state_dict``, to be called for each batch that is read ahead.
        watch: Says whether the loader may be read ahead at all; it is known after the first batches.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        prepare: Callable[[Any, Ask[Any]], HostBatch],
        depth: int,
        state: Callable[[], Any] | None = None,
        watch: DrawWatch | None = None,
    ) -> None:
        self._loader = loader
        self._prepare = prepare
        self._depth = depth
        self._state = state
        self._watch = DrawWatch(loader) if watch is None else watch
        self._marks = Marks.of(loader)
        self._puller: ReaderThread | None = None
        self._expected = BatchIndex(-1, 0)  # what the puller gives next
        self._notes: dict[BatchIndex, _Note] = {}
        # What the last batches took.
        self._rooms: tuple[DeviceBuffers | None, DeviceBuffers | None] = (None, None)
        self._read = ReadStats()
        self._once = False
        # The id of one that is yet to be raised, and so is alive. The error itself would keep whatever it refers to.
        self._error: int | None = None

    @property
    def depth(self) -> int:
        """Batches that are read ahead; it can be set at any time. 0 where the loader may not be read ahead."""
        return 0 if self._watch.is_random else self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._depth = depth
        if self._puller is not None:
            self._puller.depth = self._ahead

    @property
    def ready(self) -> int:
        """Batches that wait on the host."""
        return 0 if self._puller is None else self._puller.ready

    @property
    def stats(self) -> ReadStats:
        """What has been read and asked for."""
        return self._read

    def room(self, key: BatchIndex) -> DeviceBuffers | None:  # noqa: ARG002
        """A guess: as the last batch, unless that was unlike the one before. A wrong one costs an allocation."""
        if self._puller is None:
            return None  # nothing comes after the end
        last, before = self._rooms
        return last if before is None or last == before else None

    def following(self, key: BatchIndex) -> BatchIndex:
        return BatchIndex(key.epoch, key.step + 1)

    def prefetch(self, key: BatchIndex) -> None:  # noqa: ARG002
        """Do what the thread may need. It reads on by itself, and a pass begins when its first batch is asked for."""
        if self._puller is not None:
            self._puller.serve()

    def poll(self, key: BatchIndex) -> HostBatch | None:
        if self._puller is None or key != self._expected:
            return None
        pulled = self._puller.poll()
        return None if pulled is None else self._host_batch(pulled)

    def get(self, key: BatchIndex) -> HostBatch:
        """The batch of a key, waiting for it; at the end of the pass a `StopIteration`.

        Raises:
            WorkerError: The system gives no more threads.
        """
        if key.epoch != self._expected.epoch:
            self._begin(key.epoch)
        if self._puller is None:
            return HostBatch(error=StopIteration())
        if self._watch.over or not self._depth:
            return self._host_batch(self._puller.get())
        pulled = self._watch.watched(self._puller.get, first=key.step == 0)
        self._puller.depth = self._ahead
        if pulled.host.error is None:
            self._puller.start()
        return self._host_batch(pulled)

    def given(self, key: BatchIndex) -> bool:
        """Whether the batch of a key, or the error in its place, has been given out."""
        return key.epoch == self._expected.epoch and key.step < self._expected.step

    def handed_over(self, key: BatchIndex) -> Snapshot | None:
        """The consumer has the batch of a key from now on.

        Returns:
            The loader's state after it; None where it is as the loader says, since nothing has been read ahead.
        """
        note = self._notes.pop(key, None)
        if note is None:
            return None
        if self._marks is not None and note.mark is not None:
            self._marks.show(note.mark)
        return note.state

    def gave(self, error: BaseException) -> bool:
        """Whether this error, which has been raised, is what the loader gave in place of a batch."""
        gave, self._error = self._error == id(error), None
        return gave

    def end(self, *, wait: bool) -> None:
        """End the pass. What has been read ahead goes.

        Args:
            wait: For a `next` of the loader that is under way, as long as it takes; else a few seconds at most.
        """
        self._end_reading(wait=wait)
        if self._marks is not None:
            self._marks.end()

    @property
    def _ahead(self) -> int:
        """Batches that may be read ahead at present."""
        return self.depth if self._watch.over else 0

    def _end_reading(self, *, wait: bool) -> None:
        while self._puller is not None and not self._puller.close() and wait:
            log.warning("ending a pass: the loader's next() has not returned yet")
        self._puller = None  # and with it the iterator, and whatever ends with that

    def _note(self) -> _Note:
        """What is to be known about the loader after a batch. Called by whichever thread has read it."""
        # Where nothing is read ahead the loader says it itself, and it may take long to say.
        state = Snapshot.of(self._state) if self._state is not None and self.depth else None
        return _Note(state, None if self._marks is None else self._marks.now())

    def _begin(self, epoch: int) -> None:
        self.end(wait=True)
        self._notes.clear()
        self._error = None
        if self._marks is not None:
            self._marks.begin()
        iterator = iter(self._loader)
        if iterator is self._loader and self._expected.epoch >= 0 and not self._once:
            self._once = True
            log.warning(
                "%s is an iterator, which its first pass has used up; give prefetched() something that iter() begins "
                "anew, such as a DataLoader",
                type(iterator).__name__,
            )
        self._puller = ReaderThread(iterator, self._prepare, self._ahead, self._note)
        self._expected, self._rooms = BatchIndex(epoch, 0), (None, None)

    def _host_batch(self, pulled: Pulled) -> HostBatch:
        host = pulled.host
        self._error = None if host.error is None else id(host.error)
        if isinstance(host.error, StopIteration):
            self._end_reading(wait=True)  # the consumer may still have batches to come
            return host
        if host.error is None:
            self._rooms = host.room, self._rooms[0]
            self._read = self._read.plus(1, host.nbytes, pulled.seconds)
            self._notes[self._expected] = pulled.note
        self._expected = self.following(self._expected)
        return host
