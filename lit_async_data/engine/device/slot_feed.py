"""`SlotFeed`: the slots that a `Pipeline` fills, as batches for a device queue."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from lit_async_data.batch.spec import ALIGNMENT, MASK, SMALL_BYTES, Array, BatchLayout, Bytes, Extent
from lit_async_data.engine.device.feed import Arrived, Batch, Clone, DeviceBuffers, HostBatch
from lit_async_data.engine.device.streams import no_inference
from lit_async_data.engine.pipeline.pipeline import Pipeline
from lit_async_data.engine.pipeline.read_task import BatchResult, FilledSlot
from lit_async_data.engine.pipeline.slots import COPYING, SlotPool
from lit_async_data.engine.resources.memory import allocated
from lit_async_data.engine.stats import LoaderStats
from lit_async_data.order.plan import BatchIndex, Schedule

log = logging.getLogger(__name__)

# Bytes of a block, all of which one copy that is kept keeps; and the most blocks.
BLOCK, MOST_BLOCKS = 2 * SMALL_BYTES, 16
NOTHING: Bytes = np.empty(0, np.uint8)


def _nothing() -> None:
    pass


class SlotFeed:
    """Batches in slots, lent to the user on the host or copied to a device. Keeps `Feed`."""

    def __init__(self, pipeline: Pipeline, depth: int = 0, give_back: Callable[[], None] = _nothing) -> None:
        self.pipeline = pipeline
        self._slots, self._coalesced = depth, 1  # and the batches of the slot that was taken last
        self.check = pipeline.check
        self._copied = 0
        self._give_back = give_back
        self._layout = pipeline.layout
        self._copies = SmallCopies()
        # The rest of the slot that was taken last: batches for the user, and errors in their places; or batches that go
        # to a device, its parts, and what is called when one of them has been copied. A feed has only one of the two.
        self._lent: collections.deque[tuple[BatchIndex, Batch | Exception]] = collections.deque()
        self._to_copy: collections.deque[BatchResult] = collections.deque()
        self._parts = _Parts({}, None, Extent(0))
        self._release: Callable[[], None] = _nothing
        self._travel = _Travel(pipeline.layout)

    @property
    def ready(self) -> int:
        return self.pipeline.ready + len(self._lent) + len(self._to_copy)

    @property
    def depth(self) -> int:
        return self._slots * self._coalesced

    def follow(self, schedule: Schedule) -> None:
        """Claim batches in this order from now on; a pass begins, and may be shorter than those before."""
        self.pipeline.follow(schedule)

    def following(self, key: BatchIndex) -> BatchIndex:
        return self.pipeline.schedule.following(key)

    def prefetch(self, key: BatchIndex) -> None:
        ahead = self._lent or self._to_copy
        if ahead and key == ahead[0][0]:
            if self.pipeline.pool.vacant.empty():
                return  # the batches behind this slot are being read
            key = self.following(ahead[-1][0])
        else:
            self._drop_rest()
        self.pipeline.prefetch(key)

    def stats(self) -> LoaderStats:
        pipeline = self.pipeline
        return LoaderStats(
            read=pipeline.done, copied=self._copied, workers=pipeline.worker_count, slots=len(pipeline.pool)
        )

    @property
    def forked(self) -> bool:
        return self.pipeline.forked

    def rest(self, *, wait: bool) -> None:  # noqa: ARG002
        self._drop_rest()

    def _drop_rest(self) -> None:
        self._lent.clear()
        while self._to_copy:
            if self._to_copy.popleft().error is None:
                self._release()

    def close(self, *, wait: bool = False) -> None:  # noqa: ARG002
        self._lent.clear()
        self._to_copy.clear()  # nobody will fill their slot again
        self._parts, self._release = _Parts({}, None, Extent(0)), _nothing
        try:
            self.pipeline.close()
        finally:
            self._give_back()  # if this is interrupted, it is called again
            self._give_back = _nothing

    # -- on the host -----------------------------------------------------------------------------------------------

    def lend(self, key: BatchIndex) -> Batch:
        if not self._lent or self._lent[0][0] != key:
            self._lent.clear()
            self._lent.extend(self._batches(self.pipeline.get(key)))
        batch = self._lent.popleft()[1]
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # else error, traceback and this frame form a cycle, which keeps a dropped loader alive
        return batch

    def _batches(self, filled: FilledSlot) -> list[tuple[BatchIndex, Batch | Exception]]:
        """All batches of a slot; each holds the slot for as long as it lives."""
        if not filled.good:
            return [(batch.key, batch.error) for batch in filled.batches if batch.error is not None]
        pool, layout, last = self.pipeline.pool, self._layout, filled.batches[-1]
        self._coalesced = len(filled.batches)
        lent = bool(layout.large) and not self.pipeline.must_copy()
        memory = pool.lend(filled.slot) if lent else pool.memory(filled.slot)
        extent = self._extent(last) if layout.alone else Extent(last.first + last.rows)
        views = layout.views(memory, extent)
        copied = layout.small if lent else tuple(views)
        batches: list[tuple[BatchIndex, Batch | Exception]] = []
        with no_inference():
            for key, first, rows, error, _ in filled.batches:
                if error is not None:
                    batches.append((key, error))
                    continue
                tensors, missing = {}, layout.missing(rows, extent) if layout.least else 0
                for name, view in views.items():
                    array = view if layout.alone else view[first : first + rows]
                    if name in copied:
                        array = self._copies.of(array)
                    tensor, delivered = torch.from_numpy(array), self._travel.delivered[name]
                    if missing:
                        tensor = filled_up(name, tensor, missing)
                    tensors[name] = tensor if delivered is None else delivered(tensor)
                batches.append((key, layout.spec.packed(tensors)))
        if not lent:
            pool.drop(filled.slot)
            if layout.large:
                self._warn_once(len(pool))
        return batches

    def _warn_once(self, slots: int) -> None:
        self._copied += 1
        if self._copied == 1:
            log.warning(
                "all %d slots hold batches that are still in use, and there can be no more: batches are handed out as "
                "copies from here on, which costs time; keep fewer batches, or raise memory_budget (with a reader "
                "process, there are at most 512 slots)",
                slots,
            )

    # -- to a device -----------------------------------------------------------------------------------------------

    def buffers(self, key: BatchIndex) -> DeviceBuffers:
        count = self.pipeline.schedule.plan(key.epoch).count(key.step)
        return self._travel.buffers(self._extent(BatchResult(key, 0, count)) if self._layout.alone else Extent(count))

    def _extent(self, batch: BatchResult) -> Extent:
        """The size of a batch that is alone in its slot."""
        plan, around = self.pipeline.schedule.plan(batch.key.epoch), batch.around
        return self._layout.extent(plan.batch(batch.key.step) if around is None else np.array(around.samples))

    @property
    def has_room(self) -> bool:
        # Any slot that nothing is copied from holds the next batch, or will be free without the device.
        return self.pipeline.pool.count(COPYING) < len(self.pipeline.pool)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        if not self._to_copy or self._to_copy[0].key != key:
            filled = self.pipeline.poll(key)
            if filled is None:
                return None
            self._take(filled)
        return self._next()

    def get(self, key: BatchIndex) -> HostBatch:
        if not self._to_copy or self._to_copy[0].key != key:
            self._take(self.pipeline.get(key))
        return self._next()

    def _take(self, filled: FilledSlot) -> None:
        """Have the batches of a slot copied; it is free when all of them have been."""
        if self._to_copy:
            self._drop_rest()
        pool, last = self.pipeline.pool, filled.batches[-1]
        memory = pool.memory(filled.slot)
        if filled.good:
            pool.move(filled.slot, "copy")
        self._coalesced = len(filled.batches)
        self._release = _Release(filled.good, functools.partial(pool.copied, filled.slot), memory)
        extent = self._extent(last) if self._layout.alone else Extent(last.first + last.rows)
        self._parts = self._travel.parts(memory, extent)
        self._to_copy.extend(filled.batches)

    def _next(self) -> HostBatch:
        batch = self._to_copy[0]
        if batch.error is None:
            with no_inference():
                host = self._travel.host_batch(self._parts, batch.first, batch.rows, self._release)
        else:
            host = HostBatch(error=batch.error)
        self._to_copy.popleft()
        return host


class _Release:
    """Called for each batch of a slot that has been copied; after the last, the slot is free.

    Args:
        batches: How many there are.
        free: Called then.
        memory: The slot's own array, which is kept as long as a copy may be under way: its memory is pinned as long as
            it lives, and numpy lets the views of it refer to another array.
    """

    def __init__(self, batches: int, free: Callable[[], None], memory: Bytes) -> None:
        self._left, self._free, self._memory = batches, free, memory

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._free()


class _Parts(NamedTuple):
    """The parts of a slot that are copied."""

    views: Mapping[str, Array]  # the fields that travel by themselves, over all batches
    block: Bytes | None  # the bytes of the other fields; None if there are none
    extent: Extent  # the size of all batches


class _Travel:
    """How the fields of a batch travel from a slot to a device.

    Large fields travel by themselves, and small ones in one block. Where a slot has several batches, all travel by
    themselves: the small fields of one batch do not lie side by side there.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self._layout, self._nbytes = layout, layout.sample_bytes
        self._alone = layout.large if layout.batches == 1 else tuple(layout.spec.fields)
        self._in_block = layout.small if layout.batches == 1 else ()
        self._dtypes = {
            name: torch.from_numpy(np.empty(0, field.dtype)).dtype for name, field in layout.spec.fields.items()
        }
        # Batches have one size, and the last of an epoch another; by length, one of each bucket.
        self._known: dict[Extent, DeviceBuffers] = {}
        # How each field is delivered whose axes move.
        fields = layout.spec.fields.items()
        self.delivered = {name: field.delivered if field.moves else None for name, field in fields}

    def buffers(self, extent: Extent) -> DeviceBuffers:
        known, layout = self._known.get(extent), self._layout
        if known is None:
            shapes = layout.shapes(extent)
            large = {name: (shapes[name], self._dtypes[name]) for name in self._alone}
            known = DeviceBuffers(large, layout.nbytes - layout.small_start if self._in_block else None)
            if not layout.concat:
                self._known[extent] = known
        return known

    def parts(self, memory: Bytes, extent: Extent) -> _Parts:
        """The parts of a slot with batches of this size together."""
        layout = self._layout
        views = layout.views(memory, extent)
        for name in self._in_block:
            del views[name]
        return _Parts(views, memory[layout.small_start : layout.nbytes] if self._in_block else None, extent)

    def host_batch(self, parts: _Parts, first: int, count: int, release: Callable[[], None]) -> HostBatch:
        """The batch whose samples begin at row ``first`` of a slot."""
        large, layout = {}, self._layout
        missing = layout.missing(count, parts.extent) if layout.least else 0
        for name, view in parts.views.items():
            large[name] = torch.from_numpy(view if layout.alone else view[first : first + count])
        return HostBatch(
            large,
            None if parts.block is None else torch.from_numpy(parts.block),
            unpack=functools.partial(self._unpacked, count, missing),
            release=release,
            nbytes=count * self._nbytes,
            known=self._known.get(parts.extent if layout.alone else Extent(count)),
        )

    def _unpacked(self, count: int, missing: int, arrived: Arrived, clone: Clone) -> Batch:
        """The fields as the user gets them; those of the block are cloned out of it."""
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
            if missing:
                stored = filled_up(name, stored, missing)
            delivered = self.delivered[name]
            tensors[name] = stored if delivered is None else delivered(stored)
        return layout.spec.packed(tensors)


def filled_up(name: str, values: torch.Tensor, missing: int) -> torch.Tensor:
    """A field with its last sample repeated; that of real samples with False."""
    more = values[-1:].expand(missing, *values.shape[1:])
    return torch.cat([values, torch.zeros_like(more) if name == MASK else more])


class SmallCopies:
    """Copies arrays into blocks of memory, each used again when the last of its copies is gone.

    One thread at a time.

    A large array, and one for which no block is left because the user keeps copies in all of them, gets memory of its
    own. If every array did, the C library would merge the free pieces of its heap at each allocation of 1 KiB or more
    (``malloc_consolidate``). A loop of many small operations leaves many such pieces; beside it, a batch took 1.3 ms
    instead of 0.3 ms.
    """

    def __init__(self) -> None:
        self._blocks = SlotPool([])
        self._block, self._end = NOTHING, 0

    def of(self, array: Array) -> Array:
        if array.nbytes > SMALL_BYTES:
            return array.copy()
        if self._end + array.nbytes > len(self._block):
            self._block, self._end = NOTHING, 0  # if no copy of it is left, it is vacant now
            self._block = self._new_block()
            if self._block is NOTHING:
                return array.copy()
        copy: Array = np.ndarray(array.shape, array.dtype, self._block, self._end)
        copy[...] = array
        self._end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return copy

    def _new_block(self) -> Bytes:
        slot = self._blocks.take(timeout=0)
        if slot is None and len(self._blocks) < MOST_BLOCKS:
            self._blocks.add(allocated(BLOCK, pinned=False))
            slot = self._blocks.take(timeout=0)
        if slot is None:
            return NOTHING
        self._blocks.filled(slot)
        return self._blocks.lend(slot)
