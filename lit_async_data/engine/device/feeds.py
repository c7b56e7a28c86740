"""Feeds give a queue batches in host memory, and free that memory; `SlotFeed` takes them from slots of a `Pipeline`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lit_async_data.batch.spec import ALIGNMENT, MASK, SMALL_BYTES, Array, Bytes, Extent
from lit_async_data.batch.tree import flatten, rebuilt
from lit_async_data.engine.device.streams import no_inference
from lit_async_data.engine.pipeline.pipeline import COPYING, BatchResult, FilledSlot, Pipeline, SlotPool
from lit_async_data.engine.resources import allocated
from lit_async_data.engine.stats import LoaderStats
from lit_async_data.order.plan import BatchIndex, Schedule

Batch = Any
# Copies a tensor, on the current stream.
Clone = Callable[[torch.Tensor], torch.Tensor]

# Names of the first parameter of methods ``to`` that take a unit (pint, astropy, unyt), a time zone or a currency.
OTHER_TARGETS = ("unit", "other", "tz", "timezone", "currency")


class DeviceBuffers(NamedTuple):
    large: dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensors that are copied by themselves, by name
    block: int | None  # bytes of the block of small tensors; None if there are none


class Arrived(NamedTuple):
    large: Mapping[str, torch.Tensor]  # tensors that were copied by themselves
    block: torch.Tensor | None  # the block of small tensors, uint8; None if there are none
    moved: Mapping[str, Any]  # objects that moved themselves with their own ``to(device)``


@dataclasses.dataclass
class HostBatch:
    """A batch in host memory, or the error in its place."""

    large: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # tensors to copy by themselves
    block: torch.Tensor | None = None  # small tensors in one piece of memory, uint8
    # Objects to be moved by their own ``to(device)``, by name.
    movable: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Assembles the batch from its parts on the device, on the current stream.
    unpack: Callable[[Arrived, Clone], Batch] = lambda *_: None
    # Called once, when nobody reads the host memory any more.
    release: Callable[[], None] = lambda: None
    done: Any = None  # the event after which side reads the host memory no more
    # The array of a slot: its memory is pinned as long as it lives, and views of it refer to another array.
    memory: Bytes | None = None
    error: BaseException | None = None  # raised in place of the batch
    nbytes: int = 0
    known: DeviceBuffers | None = None  # the device memory of the batch, if it is known already

    @property
    def buffers(self) -> DeviceBuffers:
        large = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.large.items()}
        return DeviceBuffers(large, None if self.block is None else self.block.numel())


class Feed:
    """Hands out batches in order, lent in host memory or to be copied. Only the consumer's thread calls it."""

    following: Callable[[BatchIndex], BatchIndex]
    #: Raises the error that prevents the next batch: the feed is closed, or belongs to another process.
    check: Callable[[], None]
    #: Has the batches from one on read ahead. Never blocks on storage.
    prefetch: Callable[[BatchIndex], None]
    #: A batch in host memory, waiting for it. Raises the error in its place.
    lend: Callable[[BatchIndex], Batch]
    #: The device memory that a batch will take; None if it is unknown before the batch has been read.
    buffers: Callable[[BatchIndex], DeviceBuffers | None]
    #: A batch to copy, which the caller releases: None if it has not been read yet, or waiting for it.
    poll: Callable[[BatchIndex], HostBatch | None]
    get: Callable[[BatchIndex], HostBatch]
    stats: Callable[[], LoaderStats]  # ``read``, ``copied``, ``workers`` and ``slots``
    ready: int  # batches that have been read and wait on the host
    forked: bool  # whether this process is a fork without the threads of the feed
    has_room: bool  # whether `get` can succeed before any batch is released
    how = ""  # slots × batches in each, for people
    depth: int  # the most batches that wait on the host
    #: Ends the pass; ``wait=True`` for a read under way, however long it takes, or else a few seconds at most.
    rest: Callable[..., None]
    #: Ends the threads and gives all memory back. Idempotent, also after an interrupt. See `rest`.
    close: Callable[..., None]


def moves(value: Any) -> bool:
    """Whether a value goes to the device: a tensor, or an object whose method ``to`` takes a device."""
    kind: Any = type(value)
    return isinstance(value, torch.Tensor) or _takes_device(kind)


@functools.lru_cache(maxsize=256)
def _takes_device(kind: type) -> bool:
    to = getattr(kind, "to", None)
    if not callable(to):
        return False
    try:
        names = list(inspect.signature(to).parameters)
    except (TypeError, ValueError):  # some methods written in C have no signature
        return True
    first = names[1] if len(names) > 1 else ""
    return "device" in names or not first.startswith(OTHER_TARGETS)


def moved(device: torch.device, then: Callable[[Any], Any] | None, batch: Any) -> Any:
    """Copy a batch to a device on the current stream, waiting for it; then call ``then``."""
    leaves, skeleton = flatten(batch, moves)
    batch = rebuilt(skeleton, {place: leaf.to(device) for place, leaf in leaves.items()})
    return batch if then is None else then(batch)


log = logging.getLogger(__name__)

# Bytes of a block, which lives as long as any copy in it; and the most blocks.
BLOCK, MOST_BLOCKS = 2 * SMALL_BYTES, 16
NOTHING: Bytes = np.empty(0, np.uint8)


class SlotFeed(Feed):
    """Batches of a pipeline; ``depth`` slots can wait. `close` closes the pipeline, and calls ``give_back`` once."""

    _begin: Callable[[], None]

    def __init__(self, pipeline: Pipeline, depth: int = 0, give_back: Callable[[], None] = lambda: None) -> None:
        self.pipeline = pipeline
        self._slots, self._coalesced = depth, 1  # the second: batches in the last slot
        self.check, self.following = pipeline.check, pipeline.schedule.following
        self._copied = 0
        self._give_back = give_back
        self._layout = pipeline.layout
        # The batches of the last slot that have not been handed out, as tuples that begin with the key.
        self._left: collections.deque[Any] = collections.deque()
        # By field: moves its axes; None if they stay.
        fields = pipeline.layout.spec.fields.items()
        self._delivered = {name: field.delivered if field.moves else None for name, field in fields}
        self._begin()

    @property
    def ready(self) -> int:  # type: ignore[override]
        return self.pipeline.ready + len(self._left)

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self._slots * self._coalesced

    @property
    def how(self) -> str:  # type: ignore[override]
        return f" ({self._slots} × {self._coalesced})" if self._coalesced > 1 else ""

    def follow(self, schedule: Schedule) -> None:
        self.pipeline.follow(schedule)
        self.following = schedule.following

    def prefetch(self, key: BatchIndex) -> None:
        left = self._left
        if left and key == left[0][0]:
            if self.pipeline.pool.vacant.empty():
                return  # the batches behind this slot are being read
            key = self.following(left[-1][0])
        elif left:
            self.rest(wait=False)
        self.pipeline.prefetch(key)

    def stats(self) -> LoaderStats:
        pipeline = self.pipeline
        workers, slots = pipeline.worker_count, len(pipeline.pool)
        return LoaderStats(read=pipeline.done, copied=self._copied, workers=workers, slots=slots)

    @property
    def forked(self) -> bool:  # type: ignore[override]
        return self.pipeline.forked

    def rest(self, *, wait: bool) -> None:  # noqa: ARG002
        self._left.clear()

    def close(self, *, wait: bool = False) -> None:  # noqa: ARG002
        self._left.clear()
        try:
            self.pipeline.close()
        finally:
            self._give_back()  # if this is interrupted, it is called again
            self._give_back = lambda: None

    def _extent(self, batch: BatchResult) -> Extent:
        """The extent of a batch that is alone in its slot."""
        plan, around = self.pipeline.schedule.plan(batch.key.epoch), batch.around
        return self._layout.extent(plan.batch(batch.key.step) if around is None else np.array(around.samples))

    def _tensor(self, name: str, stored: torch.Tensor, missing: int) -> torch.Tensor:
        if missing:  # repeat the last sample, with mask False
            more = stored[-1:].expand(missing, *stored.shape[1:])
            stored = torch.cat([stored, torch.zeros_like(more) if name == MASK else more])
        delivered = self._delivered[name]
        return stored if delivered is None else delivered(stored)


class LentFeed(SlotFeed):
    """Lends slots to the user, or hands out copies."""

    def _begin(self) -> None:
        self._copies = SmallCopies()

    def lend(self, key: BatchIndex) -> Batch:
        if not self._left or self._left[0][0] != key:
            self._left.clear()
            self._left.extend(self._batches(self.pipeline.poll(key) or self.pipeline.get(key)))
        batch = self._left.popleft()[1]
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # else error, traceback and this frame form a cycle, which keeps a dropped loader alive
        return batch

    def _batches(self, filled: FilledSlot) -> list[tuple[BatchIndex, Batch | Exception]]:
        """The batches of a slot, which keep it as long as they live."""
        if not filled.good:
            return [(batch.key, batch.error) for batch in filled.batches if batch.error is not None]
        pool, layout = self.pipeline.pool, self._layout
        self._coalesced = len(filled.batches)
        lent = bool(layout.large) and not self.pipeline.must_copy()
        memory = pool.lend(filled.slot) if lent else pool.memories[filled.slot]
        last = filled.batches[-1]
        extent = self._extent(last) if layout.alone else Extent(last.first + last.rows)
        views = layout.views(memory, extent)
        copied = layout.small if lent else tuple(views)
        batches: list[tuple[BatchIndex, Batch | Exception]] = []
        with no_inference():
            for key, first, rows, error, _ in filled.batches:
                if error is not None:
                    batches.append((key, error))
                    continue
                arrays, tensors, missing = {}, {}, layout.missing(rows, extent) if layout.least else 0
                for name, view in views.items():
                    arrays[name] = view if layout.alone else view[first : first + rows]
                self._copies.replace(arrays, copied)
                for name, array in arrays.items():
                    tensor = torch.from_numpy(array)
                    plain = not missing and self._delivered[name] is None
                    tensors[name] = tensor if plain else self._tensor(name, tensor, missing)
                batches.append((key, layout.spec.packed(tensors)))
        if not lent:
            pool.move(filled.slot, "drop")
            self._copied += bool(layout.large)
        if not lent and self._copied == 1:
            log.warning(
                "all %d slots hold batches that are still in use, and there can be no more: batches are handed out as "
                "copies from here on, which costs time; keep fewer batches, or raise memory_budget (with a reader "
                "process, there are at most 512 slots)",
                len(pool),
            )
        return batches


class CopyFeed(SlotFeed):
    """Hands out the batches in slots to be copied: large fields by themselves, and small ones in one block.

    If a slot has several batches, all fields travel by themselves: small fields of one batch are not adjacent there.
    """

    def _begin(self) -> None:
        layout = self._layout
        self._in_block = layout.small if layout.batches == 1 else ()
        fields = layout.spec.fields.items()
        self._dtypes = {name: torch.from_numpy(np.empty(0, field.dtype)).dtype for name, field in fields}
        # By size: the last batch of an epoch has another one, and each bucket its own.
        self._known: dict[Extent, DeviceBuffers] = {}

    def rest(self, *, wait: bool) -> None:  # noqa: ARG002
        while self._left:
            self._left.popleft()[1].release()

    def buffers(self, key: BatchIndex) -> DeviceBuffers:
        plan = self.pipeline.schedule.plan(key.epoch)
        count, layout = plan.batch_size if key.step < plan.whole_steps else plan.count(key.step), self._layout
        extent = self._extent(BatchResult(key, 0, count)) if layout.alone else Extent(count)
        known = self._known.get(extent)
        if known is None:
            shapes = layout.shapes(extent).items()
            large = {name: (shape, self._dtypes[name]) for name, shape in shapes if name not in self._in_block}
            known = DeviceBuffers(large, layout.nbytes - layout.small_start if self._in_block else None)
            if not layout.concat:
                self._known[extent] = known
        return known

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        # A slot without a copy under way has the next batch, or will be free without the device.
        return self.pipeline.pool.count(COPYING) < len(self.pipeline.pool)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        if not self._left or self._left[0][0] != key:
            filled = self.pipeline.poll(key)
            if filled is None:
                return None
            self._take(filled)
        return self._left.popleft()[1]  # type: ignore[no-any-return]

    def get(self, key: BatchIndex) -> HostBatch:
        if not self._left or self._left[0][0] != key:
            self._take(self.pipeline.get(key))
        return self._left.popleft()[1]  # type: ignore[no-any-return]

    def _take(self, filled: FilledSlot) -> None:
        if self._left:
            self.rest(wait=False)
        pool, layout = self.pipeline.pool, self._layout
        if filled.good:
            pool.move(filled.slot, "copy")
        self._coalesced = len(filled.batches)
        release: Callable[[], None] = functools.partial(pool.move, filled.slot, "copied")
        if filled.good > 1:
            release = functools.partial(_called_last, release, iter(range(1, filled.good)))
        memory, last = pool.memories[filled.slot], filled.batches[-1]
        size = self._extent(last) if layout.alone else Extent(last.first + last.rows)
        views = layout.views(memory, size)
        for name in self._in_block:
            del views[name]
        block = torch.from_numpy(memory[layout.small_start : layout.nbytes]) if self._in_block else None
        for key, first, count, error, _ in filled.batches:
            if error is not None:
                self._left.append((key, HostBatch(error=error)))
                continue
            missing, large = layout.missing(count, size) if layout.least else 0, {}
            for name, view in views.items():
                large[name] = torch.from_numpy(view if layout.alone else view[first : first + count])
            host = HostBatch(
                large,
                block,
                unpack=functools.partial(self._unpacked, count, missing),
                release=release,
                memory=memory,
                nbytes=count * layout.sample_bytes,
                known=self._known.get(size if layout.alone else Extent(count)),
            )
            self._left.append((key, host))

    def _unpacked(self, count: int, missing: int, arrived: Arrived, clone: Clone) -> Batch:
        layout, tensors = self._layout, {}
        for name, field in layout.spec.fields.items():
            if name in self._in_block:
                assert arrived.block is not None
                offset = layout.offsets[name] - layout.small_start
                rows = count + (name in layout.edges)
                raw = arrived.block[offset : offset + rows * field.nbytes]
                stored = clone(raw.view(self._dtypes[name]).reshape((rows, *field.stored_shape)))
            else:
                stored = arrived.large[name]
            plain = not missing and self._delivered[name] is None
            tensors[name] = stored if plain else self._tensor(name, stored, missing)
        return layout.spec.packed(tensors)


def _called_last(call: Callable[[], None], others: Iterator[int]) -> None:
    """Call a function, if this is the last of several calls."""
    if next(others, None) is None:
        call()


class SmallCopies:
    """Copies arrays into blocks of memory, each used again when the last of its copies is gone. One thread at a time.

    A large array gets memory of its own, and so does a small one if the user keeps copies in all blocks. If every array
    did, each batch would be slower: see docs/design/engine.md.
    """

    def __init__(self) -> None:
        self._blocks = SlotPool([])
        self._block, self._end = NOTHING, 0

    def replace(self, arrays: dict[str, Array], names: Iterable[str]) -> None:
        for name in names:
            array = arrays[name]
            if array.nbytes <= SMALL_BYTES and self._end + array.nbytes > len(self._block):
                self._block, self._end = NOTHING, 0  # vacant now, if no copy in the block is left
                self._block = self._new_block()
            if array.nbytes > SMALL_BYTES or self._block is NOTHING:
                arrays[name] = array.copy()
                continue
            arrays[name] = copy = np.ndarray(array.shape, array.dtype, self._block, self._end)
            copy[...] = array
            self._end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT

    def _new_block(self) -> Bytes:
        slot = self._blocks.take(timeout=0)
        if slot is None and len(self._blocks) < MOST_BLOCKS:
            self._blocks.add(allocated(BLOCK, pinned=False))
            slot = self._blocks.take(timeout=0)
        if slot is None:
            return NOTHING
        self._blocks.move(slot, "filled")
        return self._blocks.lend(slot)
