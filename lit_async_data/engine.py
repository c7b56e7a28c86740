"""`Engine`: the running part of a loader, pipeline and device queue, from its first batch until it is closed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch

from lit_async_data import memory
from lit_async_data.device import DeviceQueue, InlineQueue, Transform, widened
from lit_async_data.footprint import Footprint
from lit_async_data.options import LoaderOptions
from lit_async_data.permutation import Indices, derived_key, derived_keys
from lit_async_data.pipeline import Pipeline
from lit_async_data.plan import Schedule
from lit_async_data.preparation import Preparation
from lit_async_data.slot_feed import SlotFeed
from lit_async_data.sources.base import DrawingSource, KeepingSource, Source, draws, ids_of
from lit_async_data.spec import BatchSpec
from lit_async_data.stats import LoaderStats
from lit_async_data.stream_queue import StreamQueue
from lit_async_data.streams import TorchStreams, has_streams

IDS = "ids"
# Tells the keys of what is drawn from those of the order.
DRAWN = 1
# Batches between what is read and what the kernel is told to fetch from the disk, if that must be.
AHEAD = 8


class Engine:
    """Pipeline and device queue. Refers to no loader, so that one that is dropped is closed at once.

    Args:
        source: Where samples come from.
        options: Of the loader.
        schedule: The order of batches.
        footprint: What it may take.
        device: Where batches are handed out.
        spec: What batches look like when they are handed out.
        depth: Batches copied ahead.
        transform: Called with each batch on its device.
    """

    def __init__(
        self,
        source: Source,
        options: LoaderOptions,
        schedule: Schedule,
        footprint: Footprint,
        *,
        device: torch.device,
        spec: BatchSpec,
        depth: int,
        transform: Transform | None,
    ) -> None:
        seed = options.seed if options.augments and draws(source) else None
        on_device, keeping = has_streams(device), source if isinstance(source, KeepingSource) else None
        ahead = AHEAD + footprint.layout.batches
        self.pipeline = Pipeline(
            _Reader(source, options.with_ids, seed),
            schedule,
            footprint.layout,
            functools.partial(memory.allocated, footprint.layout.nbytes, pinned=on_device),
            workers=footprint.workers,
            slots=footprint.budget.slots,
            most_slots=footprint.budget.most_slots,
            timeout_s=options.timeout_s,
            ids=functools.partial(ids_of, source),
            prepare=None if keeping is None else Preparation(keeping, schedule, ahead),
        )
        self.queue: DeviceQueue = (
            StreamQueue(SlotFeed(self.pipeline), TorchStreams(device), depth, widened(spec, transform))
            if on_device
            else InlineQueue(self.pipeline, depth, transform)
        )
        self._give_back: Callable[[], None] = (
            _nothing if keeping is None else keeping.keep(footprint.chunks, footprint.budget.cache)
        )

    def stats(self, so_far: LoaderStats) -> LoaderStats:
        """What the loader saw, with what was read for it."""
        return so_far if self.pipeline.forked else so_far.of(self.pipeline.stats(), copied=self.queue.copied)

    def close(self) -> None:
        """End everything and give all memory back. Idempotent."""
        if self.pipeline.forked:
            return  # threads and device belong to another process, and so may be whoever held a lock at the fork
        give_back, self._give_back = self._give_back, _nothing
        try:
            self.queue.close()
        finally:
            try:
                self.pipeline.close()
            finally:
                give_back()


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads samples, and adds what belongs to the loader: their numbers, and what is drawn for each, by its number.

    Attributes:
        source: Where samples come from.
        with_ids: Whether numbers are wanted.
        seed: Of what is drawn; None where nothing is.
    """

    source: Source
    with_ids: bool
    seed: int | None

    def __call__(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        numbers = ids_of(self.source, samples) if self.with_ids or self.seed is not None else samples
        if self.with_ids:
            out[IDS][...] = numbers
            out = {key: array for key, array in out.items() if key != IDS}
        if self.seed is None:
            self.source.read_into(samples, out)
        else:
            assert isinstance(self.source, DrawingSource)
            self.source.read_drawn(samples, out, derived_keys(derived_key(self.seed, epoch, DRAWN), numbers))


def _nothing() -> None:
    pass
