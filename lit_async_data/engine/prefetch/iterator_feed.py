"""`IteratorFeed`: the batches of a foreign loader, for a device queue; `ReaderThread` reads one pass ahead.

In a `BatchIndex` the epoch is the number of the pass, the step the number of the batch in it. With the request for the
first batch of a pass, the feed calls ``iter(loader)`` in the consumer's thread: then the Trainer has named the epoch.
The contract of the thread:

1. Batches come in the iterator's order; an error comes at its place, once, as it was raised; then the end.
2. After an error the thread reads nothing before the next request, so that it does not call a broken iterator for ever.
3. The thread never calls the device. The consumer's thread packs a batch that needs such a call.
4. `close` waits for the thread a few seconds at most. A thread whose `next` does not return is left behind, and ends
   when that returns.

`Packer` packs pageable tensors into one pinned block: large ones, which are copied by themselves, and small ones side
by side. Subclasses of Tensor, sparse tensors and those that require a gradient move themselves in their batch's turn.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from lit_async_data.batch.spec import ALIGNMENT, SMALL_BYTES, Bytes
from lit_async_data.batch.tree import flatten, leaves_in, rebuilt
from lit_async_data.engine.device.feeds import Arrived, Batch, Clone, DeviceBuffers, Feed, HostBatch, moves
from lit_async_data.engine.resources import pinned_bytes, readable
from lit_async_data.engine.stats import LoaderStats
from lit_async_data.engine.supervisor import LONG_S, Bell, ThreadWorker, all_ended, awaited
from lit_async_data.errors import ClosedError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.system import POLL_S, ProcessGuard

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Unpacked(HostBatch):
    """A batch that the consumer's thread must pack, since that calls the device."""

    batch: Batch = None


class Packer:
    """Packs the batches of one loader."""

    def __init__(
        self, staging: PinnedBufferPool, is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
    ) -> None:
        self._staging = staging
        self._is_pinned = is_pinned
        # The places of pinned tensors in the first batch. A later tensor there may be pageable: its copy is slower.
        self._pinned: frozenset[str] | None = None

    @property
    def has_room(self) -> bool:
        return self._staging.has_room

    def __call__(self, batch: Batch, *, here: bool) -> HostBatch:
        """Pack a batch. ``here``: in the consumer's thread, which may call the device; else it may stay `Unpacked`."""
        leaves, skeleton = flatten(batch, moves)
        with torch.inference_mode(False):  # blocks that are written in inference mode could not be reused
            tensors = {place: dense(leaf) for place, leaf in leaves.items() if is_plain(leaf)}
            if self._pinned is None and tensors:
                if not here:
                    return Unpacked(batch=batch)
                self._pinned = frozenset(place for place in tensors if self._is_pinned(tensors[place]))
            pinned = {place: flat(tensor) for place, tensor in tensors.items() if place in (self._pinned or ())}
            forms = {at: TensorForm(each.shape, each.stride(), each.dtype, each.nbytes) for at, each in tensors.items()}
            layout = PackedLayout.of({place: form.nbytes for place, form in forms.items() if place not in pinned})
            host = HostBatch(
                pinned,
                movable={place: leaf for place, leaf in leaves.items() if place not in tensors},
                unpack=functools.partial(_unpacked, skeleton, forms, layout),
                nbytes=sum(form.nbytes for form in forms.values()),
            )
            if layout.end:
                block = self._staging.claim(layout.end, allocate=here)
                if block is None:
                    assert not here
                    return Unpacked(batch=batch)
                try:
                    large, host.block = layout.packed(tensors, block)
                except BaseException:
                    self._staging.give_back(block)  # nobody else will
                    raise
                host.large, host.release = pinned | large, functools.partial(self._staging.give_back, block)
        host.known = host.buffers  # computed here, beside training
        return host


class PackedLayout(NamedTuple):
    """The places of tensors in a block, in bytes, aligned: large ones first, then small ones."""

    offsets: dict[str, int]
    small_start: int
    end: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> PackedLayout:
        offsets: dict[str, int] = {}
        end, small_start = 0, None
        for place, size in sorted(sizes.items(), key=lambda item: item[1] <= SMALL_BYTES):
            if size <= SMALL_BYTES and small_start is None:
                small_start = end
            offsets[place] = end
            # At least one unit, so that a batch of empty tensors has a block, too.
            end += max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        return PackedLayout(offsets, end if small_start is None else small_start, end)

    def packed(
        self, tensors: Mapping[str, torch.Tensor], block: Bytes
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Copy tensors to their places; returns the large ones there, flat, and all small ones as bytes."""
        memory, large = torch.from_numpy(block), {}
        for place, offset in self.offsets.items():
            end = offset + tensors[place].nbytes
            # With numpy, in this thread alone: torch would use several threads, beside training.
            block[offset:end] = raw_bytes(tensors[place])
            if offset < self.small_start:
                large[place] = memory[offset:end].view(tensors[place].dtype)
        return large, memory[self.small_start : self.end] if self.small_start < self.end else None


def _unpacked(
    skeleton: Any, forms: Mapping[str, TensorForm], layout: PackedLayout, arrived: Arrived, clone: Clone
) -> Batch:
    leaves, large, block = dict(arrived.moved), arrived.large, arrived.block
    for place, (shape, stride, dtype, nbytes) in forms.items():
        if place in large:
            values = large[place]
        else:
            assert block is not None
            first = layout.offsets[place] - layout.small_start
            values = clone(block[first : first + nbytes])
        leaves[place] = values.view(dtype).as_strided(shape, stride)
    return rebuilt(skeleton, leaves)


def is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_nested)
    )


class TensorForm(NamedTuple):
    """How a flat row of values becomes a tensor without gaps and overlaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: torch.dtype
    nbytes: int


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy without gaps and overlaps, with the strides that ``tensor.to(device)`` gives it."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_contiguous() or plain.stride() == torch.empty_like(plain, device="meta").stride():
        return plain
    return plain.clone()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    return flat(tensor).view(torch.uint8).numpy()


class PinnedBufferPool:
    """At most ``most`` blocks of pinned memory, which can be set at any time. Thread-safe."""

    def __init__(self, allocate: Callable[[int], Bytes], most: int) -> None:
        self._allocate = allocate
        self.most = most
        # Reentrant: garbage collection can end a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self._free: list[Bytes] = []
        self._count = 0

    @property
    def has_room(self) -> bool:
        with self._lock:
            return bool(self._free) or self._count < self.most

    def claim(self, nbytes: int, *, allocate: bool) -> Bytes | None:
        """A free block of at least this size, or None. ``allocate``: on the consumer's thread, which may.

        The first such call allocates all blocks; if the free ones are too small, it replaces them all.
        """
        with self._lock:
            fitting = [number for number, block in enumerate(self._free) if len(block) >= nbytes]
            if fitting:  # the block that came back last may still be in the processor's cache
                return self._free.pop(fitting[-1])
            if not allocate or not (self._free or self._count < self.most):
                return None
            self._count -= len(self._free)
            self._free.clear()
            size = max(pinned_bytes(nbytes), ALIGNMENT)
            log.info("%d pinned blocks of %s for batches to be packed into", self.most - self._count, readable(size))
            while self._count < self.most or not self._free:  # fewer may be allowed than are in use
                self._free.append(self._allocate(size))
                self._count += 1
            return self._free.pop()

    def give_back(self, block: Bytes) -> None:
        with self._lock:
            if self._count > self.most:
                self._count -= 1
            else:
                self._free.append(block)


CLOSED = "another thread has closed or stopped this loader; build a new one, or, after stop(), write iter(loader)"


# Makes a batch ready to be copied; see `Packer.__call__`.
Prepare = Callable[..., HostBatch]


class Pulled(NamedTuple):
    """The result or error of a `next`, the result of ``note`` after it, and the seconds of `next`."""

    host: HostBatch
    note: Any
    seconds: float


class ReaderThread:
    """Reads an iterator ``depth`` batches ahead, or, with 0, in the consumer's thread. One consumer at a time."""

    def __init__(
        self, iterator: Iterator[Any], prepare: Prepare, depth: int, note: Callable[[], Any] = lambda: None
    ) -> None:
        self.iterator = iterator
        self._prepare = prepare
        self._note = note
        self.arrived = Bell()
        # Guards everything below. The consumer takes the lock itself: an interrupt in a condition would keep it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.depth = depth
        self.pulled: collections.deque[Pulled] = collections.deque()  # the batches that are read ahead
        self.worker: ThreadWorker | None = None
        self.reading = False
        self._closed = False

    # -- the consumer ----------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return getattr(self._prepare, "has_room", True)

    def wake(self) -> None:
        """Call when there may be room again, or `depth` has been set."""
        with self._lock:
            self._changed.notify_all()

    def poll(self) -> Pulled | None:
        with self._lock:
            self._changed.notify_all()
            if not self.pulled:
                return None
            pulled = self.pulled[0]
        if isinstance(pulled.host, Unpacked):  # it stays in `pulled`, so that the thread takes no memory
            if not self.has_room:
                return None
            try:
                pulled = pulled._replace(host=self._prepare(pulled.host.batch, here=True))
            except Exception as error:  # noqa: BLE001  # raised in the batch's place
                pulled = Pulled(HostBatch(error=error), None, pulled.seconds)
        with self._lock:
            if self.pulled:  # else another thread has ended the pass
                self.pulled.popleft()
            self._changed.notify_all()
        return pulled

    def get(self) -> Pulled:
        """As `poll`, waiting; reads the batch in this thread if nothing is read ahead."""
        return awaited(self._come, warn_after_s=LONG_S, warn=functools.partial(self._warn, "no batch"))

    def _come(self, seconds: float) -> Pulled | None:
        if (found := self.poll()) is not None:
            return found
        with self._lock:
            if self.pulled:
                return None  # a batch has come meanwhile
            if self._closed:
                raise ClosedError(CLOSED)
            worker = self._reader()
        if worker is None:
            return self._pull(here=True)
        if seconds:
            self.arrived.wait(seconds)
        return None

    def pause(self) -> None:
        """Keep the thread from reading until `depth` is set again; waits for its `next`."""
        self.depth = 0
        self.wake()
        awaited(self._paused, warn_after_s=LONG_S, warn=functools.partial(self._warn, "cannot begin a pass"))

    def _paused(self, seconds: float) -> bool | None:
        if self._closed:
            raise ClosedError(CLOSED)
        if not self.reading:
            return True
        if seconds:
            self.arrived.wait(seconds)
        return None

    def _warn(self, what: str, seconds: float) -> None:
        log.warning("%s for %.0f s: %s", what, seconds, self.worker)

    def close(self) -> bool:
        """End the thread; returns whether it has ended within a few seconds. From any thread."""
        with self._lock:
            self._closed = True
            left = list(self.pulled)
            self.pulled.clear()
            self._changed.notify_all()
        self.arrived.ring()
        for pulled in left:
            pulled.host.release()
        worker = self.worker  # read once: another thread may close it, too
        if worker is not None and not all_ended([worker]):
            return False
        self.worker = None  # it refers to this object
        # Free the iterator and its worker processes, even if an error that the user keeps refers to this object.
        self.iterator = iter(())
        return True

    def _reader(self) -> ThreadWorker | None:
        if not self.reading and self.depth and not self._closed:
            if self.worker is not None:
                all_ended([self.worker])  # it has read its last batch
            self.worker = ThreadWorker(0, self._work)
            self.worker.start()
            self.reading = True
        worker = self.worker  # read once: `close`, in another thread, forgets it
        return worker if self.reading and worker is not None and worker.alive else None

    # -- the thread ------------------------------------------------------------------------------------------------

    @property
    def _may_read(self) -> bool:
        """Whether there is room, and no batch waits to be packed."""
        waits = bool(self.pulled) and isinstance(self.pulled[-1].host, Unpacked)
        return len(self.pulled) < self.depth and not waits and self.has_room

    def _work(self, worker: ThreadWorker) -> bool:
        with self._lock:
            while self.depth and not self._closed and not self._may_read:
                self._changed.wait(POLL_S)
            if self._closed or not self.depth:
                self.reading = False
                self.arrived.ring()
                return False
        worker.begin("the loader's next()")
        # No name holds it: see `Pipeline._fill`.
        going_on = self._deliver(self._pull(here=False))
        worker.rest()
        return going_on

    def _pull(self, *, here: bool) -> Pulled:
        began = time.perf_counter()
        try:
            batch = next(self.iterator)
            seconds = time.perf_counter() - began
            note = self._note()
            return Pulled(self._prepare(batch, here=here), note, seconds)
        except BaseException as caught:
            if here and isinstance(caught, KeyboardInterrupt):
                raise  # Ctrl-C in the consumer's thread ends the pass
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


# The code of ``def __iter__(self): return self``.
_ITSELF = (lambda self: self).__code__.co_code


# Returns a loader's state at some moment, or raises the error of its ``state_dict``.
State = Callable[[], Any]


def state_of(state_dict: Callable[[], Any]) -> State:
    try:
        state = copy.deepcopy(state_dict())  # a loader may go on to change the dict that it returned
    except Exception as error:  # noqa: BLE001  # raised when the state is asked for
        return functools.partial(_fail, error.with_traceback(None))  # frames refer to batches
    return lambda: state


def _fail(error: Exception) -> NoReturn:
    raise error


class PassState(NamedTuple):
    started: int = 0  # passes that have begun
    fresh: bool = True  # whether the next batch begins a pass
    step: int = 0  # the next batch of the pass
    over: bool = False  # whether the pass has come to its end
    lost: str = ""  # why the pass has ended early: an interrupt, an exit of the loader, or a stop
    # The loader's state after the batch that was handed out last; None if the loader still has it.
    state: State | None = None
    before: State | None = None  # the state before that batch; None if it is not known
    counted: int | None = None  # the consumer's count of done batches when the pass began; None if it counts nothing


class IteratorFeed(Feed):
    """Batches of a loader, pass after pass, with its state after each batch that is read ahead."""

    def __init__(
        self, loader: Iterable[Any], prepare: Prepare, depth: int, state: Callable[[], Any] | None = None
    ) -> None:
        self._loader = loader
        self._prepare = prepare
        self._depth = depth
        self._state = state
        #: The loader's state before the first batch of the pass; None if states are not taken.
        self.begun: State | None = None
        # Begins the next pass in the middle, in place of ``iter(loader)``; None for a whole pass.
        self.continued: Callable[[], Iterator[Any]] | None = None
        self._process = ProcessGuard()
        #: Reads the current pass; None between passes.
        self.reader: ReaderThread | None = None
        #: The next batch that the reader yields; batches and errors before it have been handed out.
        self.expected = BatchIndex(-1, 0)
        #: The state of the loader after each batch that was read ahead; None if the loader still has it.
        self.states: dict[BatchIndex, State | None] = {}
        # The device memory of the last two batches.
        self._buffers: tuple[DeviceBuffers | None, DeviceBuffers | None] = (None, None)
        self._work, self._starved = Work(), 0
        self._warned = self._closed = False

    @property
    def depth(self) -> int:
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._depth = depth
        if (reader := self.reader) is not None:  # read once, here and below: another thread may close the loader
            reader.depth = depth
            reader.wake()

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        first = [] if (reader := self.reader) is None else list(reader.pulled)[:1]
        return bool(first and not isinstance(first[0].host, Unpacked)) or getattr(self._prepare, "has_room", True)

    @property
    def ready(self) -> int:  # type: ignore[override]
        reader = self.reader
        return 0 if reader is None else len(reader.pulled)

    def stats(self) -> LoaderStats:
        return LoaderStats(read=self._work._replace(starved=self._starved))

    @property
    def forked(self) -> bool:  # type: ignore[override]
        return self._process.forked

    def check(self) -> None:
        if self._process.forked:
            advice = "its thread does not exist there; call prefetched() in the child"
            raise self._process.error("this loader reads", advice)
        if self._closed:
            raise ClosedError(CLOSED)

    def buffers(self, key: BatchIndex) -> DeviceBuffers | None:  # noqa: ARG002
        """The buffers of the last batch, unless the one before had others. A wrong guess costs an allocation."""
        if self.reader is None:
            return None  # no batch comes after the end
        last, before = self._buffers
        return last if before is None or last == before else None

    def following(self, key: BatchIndex) -> BatchIndex:
        return BatchIndex(key.epoch, key.step + 1)

    def prefetch(self, key: BatchIndex) -> None:  # noqa: ARG002
        """The thread reads on by itself. A pass begins when its first batch is asked for."""
        if (reader := self.reader) is not None:
            reader.wake()

    def lend(self, key: BatchIndex) -> Batch:
        host = self.get(key)
        error, host.error = host.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `LentFeed.lend`; frames in its traceback refer to ``host``
        return host.unpack(Arrived({}, None, {}), torch.clone)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        reader = self.reader
        if reader is None or key != self.expected:
            return None
        pulled = reader.poll()
        return None if pulled is None else self._host_batch(reader, pulled)

    def get(self, key: BatchIndex) -> HostBatch:
        if key.epoch != self.expected.epoch:
            self._begin(key.epoch)
        if (reader := self.reader) is None:
            self.check()
            return HostBatch(error=StopIteration())
        self._starved += not reader.pulled
        return self._host_batch(reader, reader.get())

    def rest(self, *, wait: bool) -> None:
        reader = self.reader
        while reader is not None and not reader.close() and wait:
            log.warning("ending a pass: the loader's next() has not returned yet")
        self.reader = None

    def close(self, *, wait: bool = False) -> None:
        self._closed = True
        self.rest(wait=wait)

    def _state_now(self) -> State | None:
        # If nothing is read ahead, the loader itself has this state, and taking it may be slow.
        return state_of(self._state) if self._state is not None and self._depth else None

    def _begin(self, epoch: int) -> None:
        self.check()
        self.states.clear()
        begin, self.continued = self.continued or functools.partial(iter, self._loader), None
        self.reader = ReaderThread(begin(), self._prepare, self._depth, self._state_now)
        self.begun = None if self._state is None else state_of(self._state)
        self.expected, self._buffers = BatchIndex(epoch, 0), (None, None)
        if self._closed:  # another thread found no reader to close
            self.rest(wait=False)

    def _host_batch(self, reader: ReaderThread, pulled: Pulled) -> HostBatch:
        host = pulled.host
        if isinstance(host.error, StopIteration):
            self.check()  # `close` puts an empty iterator in place of the loader's
            used_up = reader.iterator is self._loader and self.expected.epoch and not self.expected.step
            if used_up and not self._warned:
                self._warned = True
                log.warning(
                    "%s is an iterator, which its first pass has used up; give prefetched() an object that iter() "
                    "begins anew, such as a DataLoader",
                    type(self._loader).__name__,
                )
            self.rest(wait=True)  # the consumer may still have batches to come
            return host
        if host.error is None:
            self._buffers = host.known, self._buffers[0]
            self._work = self._work.plus(Work(pulled.seconds, batches=1, bytes=host.nbytes))
            self.states[self.expected] = pulled.note
        self.expected = BatchIndex(self.expected.epoch, self.expected.step + 1)
        return host


def uncopied(batch: Batch, *, here: bool) -> HostBatch:  # noqa: ARG001
    tensors = leaves_in(batch, lambda value: isinstance(value, torch.Tensor)).values()
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
    return HostBatch(unpack=lambda *_: batch, nbytes=nbytes)


def begins_nothing(iterator: object) -> bool:
    """Whether ``iter`` returns this very iterator, unchanged, as for generators, ``map`` and ``zip``."""
    begins = getattr(type(iterator), "__iter__", None)
    code = getattr(getattr(begins, "__code__", None), "co_code", None)
    return isinstance(iterator, Iterator) and (isinstance(begins, types.WrapperDescriptorType) or code == _ITSELF)
