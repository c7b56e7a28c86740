"""`SlotFeed`: the slots that a pipeline fills, as batches for `StreamQueue`."""

from __future__ import annotations

import functools

import numpy as np
import torch

from lit_async_data.batch.spec import BatchLayout
from lit_async_data.device.feed import Arrived, Cloned, DeviceBuffers, HostBatch
from lit_async_data.device.inline_queue import Batch
from lit_async_data.host.job import FilledSlot
from lit_async_data.host.pipeline import Pipeline
from lit_async_data.order.plan import BatchIndex


class SlotFeed:
    """Filled slots, one batch in each. Keeps `Feed`.

    Args:
        pipeline: Where they come from; their memory is pinned.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._layout: BatchLayout = pipeline.layout

    def room(self, key: BatchIndex) -> DeviceBuffers:
        layout, count = self._layout, self.pipeline.schedule.plan(key.epoch).count(key.step)
        large = {name: ((count, *layout.spec[name].stored_shape), _type(layout, name)) for name in layout.large}
        return DeviceBuffers(large, layout.nbytes - layout.small_start if layout.small else None)

    def following(self, key: BatchIndex) -> BatchIndex:
        return self.pipeline.schedule.following(key)

    def prefetch(self, key: BatchIndex) -> None:
        self.pipeline.prefetch(key)

    def poll(self, key: BatchIndex) -> HostBatch | None:
        filled = self.pipeline.poll(key)
        return None if filled is None else self._host_batch(filled)

    def get(self, key: BatchIndex) -> HostBatch:
        return self._host_batch(self.pipeline.get(key))

    def _host_batch(self, filled: FilledSlot) -> HostBatch:
        (batch,) = filled.batches  # one to a slot: the small fields of a batch travel in one block
        if batch.error is not None:
            return HostBatch(error=batch.error)
        layout, ring, count = self._layout, self.pipeline.ring, len(batch.samples)
        ring.copy(filled.slot)
        with torch.inference_mode(False):
            memory = torch.from_numpy(ring.memory(filled.slot))
            return HostBatch(
                {name: _field(layout, name, memory, count) for name in layout.large},
                memory[layout.small_start : layout.nbytes] if layout.small else None,
                unpacked=functools.partial(_unpacked, layout, count),
                release=functools.partial(ring.copied, filled.slot),
                nbytes=count * layout.spec.nbytes,
            )


def _unpacked(layout: BatchLayout, count: int, arrived: Arrived, cloned: Cloned) -> Batch:
    """The fields as the user sees them; the small ones copied out of their block."""
    tensors = {}
    for name, field in layout.spec.fields.items():
        if name in arrived.large:
            stored = arrived.large[name]
        else:
            assert arrived.block is not None
            stored = cloned(_field(layout, name, arrived.block, count, start=layout.small_start))
        tensors[name] = field.delivered(stored)
    return layout.spec.packed(tensors)


def _type(layout: BatchLayout, name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, layout.spec[name].dtype)).dtype


def _field(layout: BatchLayout, name: str, memory: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """One field as a view of bytes, on whichever device they lie; as `BatchLayout.views` does with numpy."""
    field, offset = layout.spec[name], layout.offsets[name] - start
    raw = memory[offset : offset + count * field.nbytes]
    return raw.view(_type(layout, name)).reshape((count, *field.stored_shape))
