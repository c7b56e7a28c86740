"""`IteratorFeed`: the batches of somebody else's loader, for a device queue.

In a `BatchIndex` the epoch is the number of the pass, the step the number of the batch in it. A pass begins when its
first batch is asked for: only then the feed calls ``iter(loader)``, on the consumer's thread, so that the Trainer has
already named the epoch.
"""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from lit_async_data.batch.tree import leaves_in
from lit_async_data.engine.device.feed import Arrived, Batch, DeviceBuffers, HostBatch
from lit_async_data.engine.prefetch.packing import Ask
from lit_async_data.engine.prefetch.reader_thread import Pulled, ReaderThread
from lit_async_data.engine.stats import ReadMeter, ReadStats
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.system import ProcessGuard

log = logging.getLogger(__name__)

# The code of ``def __iter__(self): return self``.
_ITSELF = (lambda self: self).__code__.co_code


class Snapshot(NamedTuple):
    """A copy of a state, which does not change with the loader; or what ``state_dict`` raised instead."""

    state: Any
    error: Exception | None = None

    @staticmethod
    def of(state_dict: Callable[[], Any]) -> Snapshot:
        try:
            return Snapshot(copy.deepcopy(state_dict()))  # a loader may go on to change the dict that it returned
        except Exception as error:  # noqa: BLE001  # raised when the state is asked for
            return Snapshot(None, error.with_traceback(None))  # a traceback refers to frames, and those to batches

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.state


class PassState(NamedTuple):
    """Where a loader is in its pass."""

    started: int = 0  # passes that have begun
    fresh: bool = True  # whether the next batch begins a pass
    step: int = 0  # the next batch of the pass
    over: bool = False  # whether the pass has come to its end
    lost: bool = False  # whether an interrupt has ended the pass
    # The loader's state after the batch that was handed out last; None where the loader's own is right.
    state: Snapshot | None = None
    before: Snapshot | None = None  # the state before that batch; None where it is not known
    counted: int | None = None  # what the consumer counted as done when the pass began; None if it counts nothing


class IteratorFeed:
    """Batches of a loader, pass after pass. Keeps `Feed`.

    Args:
        depth: Batches that are read ahead, in a thread; 0 reads each when it is asked for.
        state: The loader's ``state_dict``, called for each batch that is read ahead.
    """

    copied = 0

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
        #: The loader's state before the first batch of the pass; None where none is taken.
        self.begun: Snapshot | None = None
        # Begins the next pass in the middle, in place of ``iter(loader)``; None for a whole pass.
        self.continued: Callable[[], Iterator[Any]] | None = None
        self._process = ProcessGuard()
        #: Reads the current pass; None between passes.
        self.reader: ReaderThread | None = None
        #: The next batch that the reader yields; what comes before it, batch or error, has been handed out.
        self.expected = BatchIndex(-1, 0)
        #: The state of the loader after each batch that was read ahead; None where the loader's own is right.
        self.states: dict[BatchIndex, Snapshot | None] = {}
        # The device memory of the last two batches.
        self._buffers: tuple[DeviceBuffers | None, DeviceBuffers | None] = (None, None)
        self._meter, self._starved = ReadMeter(), 0
        self._warned = False
        # The id of an error that is yet to be raised, and so is alive. The error itself would keep what it refers to.
        self._error: int | None = None

    @property
    def depth(self) -> int:
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._depth = depth
        if self.reader is not None:
            self.reader.depth = depth

    @property
    def has_room(self) -> bool:
        return self.ready > 0 or getattr(self._prepare, "has_room", True)

    @property
    def ready(self) -> int:
        reader = self.reader  # read once: the pass may end in another thread
        return 0 if reader is None else len(reader.pulled)

    def stats(self) -> ReadStats:
        return self._meter.stats(ready=self.ready, starved=self._starved)

    @property
    def forked(self) -> bool:
        return self._process.forked

    def check(self) -> None:
        if self._process.forked:
            raise self._process.error(
                "this loader reads", "its thread does not exist there; call prefetched() in the child"
            )

    def buffers(self, key: BatchIndex) -> DeviceBuffers | None:  # noqa: ARG002
        """A guess: as the last batch, unless that was unlike the one before. A wrong guess costs an allocation."""
        if self.reader is None:
            return None  # no batch comes after the end
        last, before = self._buffers
        return last if before is None or last == before else None

    def following(self, key: BatchIndex) -> BatchIndex:
        return BatchIndex(key.epoch, key.step + 1)

    def prefetch(self, key: BatchIndex) -> None:  # noqa: ARG002
        """Serve the thread, which reads on by itself. A pass begins when its first batch is asked for."""
        if self.reader is not None and self.reader.asked is not None:
            self.reader.serve()

    def lend(self, key: BatchIndex) -> Batch:
        host = self.get(key)
        if host.error is not None:
            try:
                raise host.error
            finally:
                del host  # see `SlotFeed.lend`
        return host.unpack(Arrived({}, None, {}), torch.clone)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        if self.reader is None or key != self.expected:
            return None
        pulled = self.reader.poll()
        return None if pulled is None else self._host_batch(pulled)

    def get(self, key: BatchIndex) -> HostBatch:
        """A batch to be copied, waiting for it; at the end of the pass a `StopIteration` as its error."""
        if key.epoch != self.expected.epoch:
            self._begin(key.epoch)
        if self.reader is None:
            return HostBatch(error=StopIteration())
        self._starved += not self.reader.ready
        return self._host_batch(self.reader.get())

    def raised_by_loader(self, error: BaseException) -> bool:
        """Whether this error, which has been raised, is one that the loader raised in place of a batch."""
        raised_by_loader, self._error = self._error == id(error), None
        return raised_by_loader

    def rest(self, *, wait: bool) -> None:
        """End the pass; ``wait`` for a `next` of the loader that does not return, or a few seconds at most."""
        while self.reader is not None and not self.reader.close() and wait:
            log.warning("ending a pass: the loader's next() has not returned yet")
        self.reader = None  # and with it the iterator, and whatever ends with that

    def close(self, *, wait: bool = False) -> None:
        self.rest(wait=wait)

    def _state_now(self) -> Snapshot | None:
        """The state of the loader after a batch. Called by the thread that has read it."""
        # Where nothing is read ahead, the loader's own state is right, and taking it may be slow.
        return Snapshot.of(self._state) if self._state is not None and self._depth else None

    def _begin(self, epoch: int) -> None:
        self.states.clear()
        self._error = None
        continued, self.continued = self.continued, None
        iterator = iter(self._loader) if continued is None else continued()
        self.begun = None if self._state is None else Snapshot.of(self._state)
        self.reader = ReaderThread(iterator, self._prepare, self._depth, self._state_now)
        self.expected, self._buffers = BatchIndex(epoch, 0), (None, None)

    def _host_batch(self, pulled: Pulled) -> HostBatch:
        host = pulled.host
        self._error = None if host.error is None else id(host.error)
        if isinstance(host.error, StopIteration):
            assert self.reader is not None
            if (
                self.reader.iterator is self._loader
                and self.expected.epoch
                and not (self.expected.step or self._warned)
            ):
                self._warned = True
                log.warning(
                    "%s is an iterator, which its first pass has used up; give prefetched() something that iter() "
                    "begins anew, such as a DataLoader",
                    type(self._loader).__name__,
                )
            self.rest(wait=True)  # the consumer may still have batches to come
            return host
        if host.error is None:
            self._buffers = host.known, self._buffers[0]
            self._meter.read(1, host.nbytes, Work(pulled.seconds))
            self.states[self.expected] = pulled.note
        self.expected = BatchIndex(self.expected.epoch, self.expected.step + 1)
        return host


def uncopied(batch: Batch, ask: Ask[Any]) -> HostBatch:  # noqa: ARG001
    """A batch that is handed out as the very object that was read."""
    tensors = leaves_in(batch, lambda value: isinstance(value, torch.Tensor)).values()
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
    return HostBatch(unpack=lambda *_: batch, nbytes=nbytes)


def begins_nothing(iterator: object) -> bool:
    """Whether this is an iterator whose ``iter`` is itself, unchanged, as of generators, ``map`` and ``zip``."""
    begins = getattr(type(iterator), "__iter__", None)
    return isinstance(iterator, Iterator) and (
        begins is Iterator.__iter__
        or isinstance(begins, types.WrapperDescriptorType)
        or getattr(getattr(begins, "__code__", None), "co_code", None) == _ITSELF
    )
