"""`SlotFeed`: the slots that a `Pipeline` fills, as batches for a device queue."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable

import numpy as np
import torch

from lit_async_data.batch.spec import BatchLayout
from lit_async_data.device.feed import Arrived, Batch, Clone, DeviceBuffers, HostBatch
from lit_async_data.device.small_copies import SmallCopies
from lit_async_data.host.metrics.stats import ReadStats
from lit_async_data.host.pipeline.pipeline import Pipeline
from lit_async_data.host.pipeline.read_task import FilledSlot
from lit_async_data.order.plan import BatchIndex, Schedule

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class SlotFeed:
    """Batches in slots, lent to the user on the host or copied to a device. Keeps `Feed`.

    Args:
        pipeline: Fills the slots. Closed with the feed.
        depth: Slots that can wait.
        give_back: Called when the feed is closed.
    """

    def __init__(self, pipeline: Pipeline, depth: int = 0, give_back: Callable[[], None] = _nothing) -> None:
        self.pipeline = pipeline
        self._slots, self._coalesced = depth, 1  # and the batches of the slot that is being handed out
        self.check = pipeline.check
        self.copied = 0
        self._give_back = give_back
        self._layout = pipeline.layout
        fields = self._layout.spec.fields.items()
        self._copies = SmallCopies()
        # How each field is delivered whose axes move.
        self._delivered = {name: None if field.channel in (None, 0) else field.delivered for name, field in fields}
        # The rest of the slot that is being handed out: batches, and errors in their places.
        self._lent: collections.deque[tuple[BatchIndex, Batch | Exception]] = collections.deque()

    @property
    def ready(self) -> int:
        return self.pipeline.ready + len(self._lent)

    @property
    def depth(self) -> int:
        return self._slots * self._coalesced

    def follow(self, schedule: Schedule) -> None:
        """Claim batches in this order from now on; a pass begins, and may be shorter than those before."""
        self.pipeline.follow(schedule)

    def following(self, key: BatchIndex) -> BatchIndex:
        return self.pipeline.schedule.following(key)

    def prefetch(self, key: BatchIndex) -> None:
        if self._lent:
            if self._lent[0][0] == key:
                return  # the batches behind this slot are being read
            self._lent.clear()
        self.pipeline.prefetch(key)

    def stats(self) -> ReadStats:
        return self.pipeline.stats()

    @property
    def forked(self) -> bool:
        return self.pipeline.forked

    def rest(self, *, wait: bool) -> None:  # noqa: ARG002
        self._lent.clear()

    def close(self, *, wait: bool = False) -> None:  # noqa: ARG002
        self._lent.clear()
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
        if torch.is_inference_mode_enabled():
            # No inference tensors, even where Lightning validates: they may outlive that.
            with torch.inference_mode(False):
                return self._batches(filled)
        if not filled.good:
            return [(batch.key, batch.error) for batch in filled.batches if batch.error is not None]
        pool, layout, last = self.pipeline.pool, self._layout, filled.batches[-1]
        self._coalesced = len(filled.batches)
        lent = bool(layout.large) and not self.pipeline.must_copy()
        memory = pool.lend(filled.slot) if lent else pool.memory(filled.slot)
        views = layout.views(memory, last.first + last.rows)
        copied = layout.small if lent else tuple(views)
        batches: list[tuple[BatchIndex, Batch | Exception]] = []
        for key, first, rows, error in filled.batches:
            if error is not None:
                batches.append((key, error))
                continue
            tensors = {}
            for name, view in views.items():
                array = view[first : first + rows]
                if name in copied:
                    array = self._copies.of(array)
                delivered = self._delivered[name]
                tensors[name] = torch.from_numpy(array if delivered is None else delivered(array))
            batches.append((key, layout.spec.packed(tensors)))
        if not lent:
            pool.drop(filled.slot)
            if layout.large:
                self._warn_once(len(pool))
        return batches

    def _warn_once(self, slots: int) -> None:
        self.copied += 1
        if self.copied == 1:
            log.warning(
                "all %d slots hold batches that are still in use, and there can be no more: batches are handed out as "
                "copies from here on, which costs time; keep fewer batches, or raise memory_budget (with a reader "
                "process, there are at most 512 slots)",
                slots,
            )

    # -- to a device -----------------------------------------------------------------------------------------------

    def buffers(self, key: BatchIndex) -> DeviceBuffers:
        layout, count = self._layout, self.pipeline.schedule.plan(key.epoch).count(key.step)
        large = {name: ((count, *layout.spec[name].stored_shape), _dtype(layout, name)) for name in layout.large}
        return DeviceBuffers(large, layout.nbytes - layout.small_start if layout.small else None)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        filled = self.pipeline.poll(key)
        return None if filled is None else self._host_batch(filled)

    def get(self, key: BatchIndex) -> HostBatch:
        return self._host_batch(self.pipeline.get(key))

    def _host_batch(self, filled: FilledSlot) -> HostBatch:
        (batch,) = filled.batches  # one per slot: its small fields travel in one block
        if batch.error is not None:
            return HostBatch(error=batch.error)
        layout, pool, count = self._layout, self.pipeline.pool, batch.rows
        pool.copy(filled.slot)
        with torch.inference_mode(False):
            memory = torch.from_numpy(pool.memory(filled.slot))
            return HostBatch(
                {name: _field(layout, name, memory, count) for name in layout.large},
                memory[layout.small_start : layout.nbytes] if layout.small else None,
                unpack=functools.partial(_unpacked, layout, count),
                release=functools.partial(pool.copied, filled.slot),
                nbytes=count * layout.spec.nbytes,
            )


def _unpacked(layout: BatchLayout, count: int, arrived: Arrived, clone: Clone) -> Batch:
    """The fields as the user gets them; small ones are cloned out of their block."""
    tensors = {}
    for name, field in layout.spec.fields.items():
        if name in arrived.large:
            stored = arrived.large[name]
        else:
            assert arrived.block is not None
            stored = clone(_field(layout, name, arrived.block, count, start=layout.small_start))
        tensors[name] = field.delivered(stored)
    return layout.spec.packed(tensors)


def _dtype(layout: BatchLayout, name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, layout.spec[name].dtype)).dtype


def _field(layout: BatchLayout, name: str, memory: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """A field as a view of a uint8 tensor, on whichever device; `BatchLayout.views` does this with numpy."""
    field, offset = layout.spec[name], layout.offsets[name] - start
    raw = memory[offset : offset + count * field.nbytes]
    return raw.view(_dtype(layout, name)).reshape((count, *field.stored_shape))
