"""`Engine`: the running part of a loader, pipeline and device queue, from its first batch until it is closed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.device.copy_verifier import CopyVerifier
from lit_async_data.device.inline_queue import DeviceQueue, InlineQueue, Transform
from lit_async_data.device.slot_feed import SlotFeed
from lit_async_data.device.stream_queue import StreamQueue
from lit_async_data.device.streams import TorchStreams, has_streams
from lit_async_data.device.transform import DeviceTransform, widened
from lit_async_data.errors import ConfigError
from lit_async_data.host import memory
from lit_async_data.host.decode_ahead import DecodeAhead
from lit_async_data.host.nan_check import NanCheck
from lit_async_data.host.pipeline import Pipeline
from lit_async_data.host.resource_plan import AHEAD, ResourcePlan
from lit_async_data.host.stats import LoaderStats, QueueFill
from lit_async_data.options import LoaderOptions
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.sources.base import CachingSource, FetchingSource, RandomizedSource, Source, ids_of, is_random
from lit_async_data.sources.room import reserved

INDEX = "index"
# Tell the keys of what is drawn, for samples and for whole batches, from those of the order.
DRAWN, DRAWN_ON_DEVICE = 1, 2


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
        verify_copies: Batches that are watched on their way.
        nans: Looks at the first batch.
    """

    def __init__(
        self,
        source: Source,
        options: LoaderOptions,
        schedule: Schedule,
        footprint: ResourcePlan,
        *,
        device: torch.device,
        spec: BatchSpec,
        depth: int,
        transform: Transform | None,
        verify_copies: int,
        nans: NanCheck,
    ) -> None:
        seed = options.seed if options.augments and is_random(source) else None
        on_device, keeping = has_streams(device), source if isinstance(source, CachingSource) else None
        ahead = AHEAD + footprint.layout.batches
        self.pipeline = Pipeline(
            _Reader(source, options.return_indices, seed, nans),
            schedule,
            footprint.layout,
            functools.partial(memory.allocated, footprint.layout.nbytes, pinned=on_device),
            workers=footprint.workers,
            slots=footprint.budget.slots,
            most_slots=footprint.budget.most_slots,
            timeout_s=options.timeout_s,
            ids=functools.partial(ids_of, source),
            prepare=None if keeping is None else DecodeAhead(keeping, schedule, ahead),
        )
        # Host memory is filled in the type that is delivered.
        cast = widened(spec) if on_device else None
        number = functools.partial(_drawn, source, schedule, options.seed) if options.augments else None
        called = DeviceTransform(transform, device, number=number, cast=cast) if transform or cast else None
        streams = TorchStreams(device) if on_device else None
        watch = CopyVerifier(verify_copies, streams) if verify_copies else None
        self.queue: DeviceQueue = (
            InlineQueue(self.pipeline, depth, called, watch)
            if streams is None
            else StreamQueue(SlotFeed(self.pipeline), streams, depth, called, watch)
        )
        self._depths = options.queue_depth * footprint.layout.batches if footprint.workers else 0, depth * on_device
        self._give_back = _kept(source, footprint)

    def stats(self, so_far: LoaderStats) -> LoaderStats:
        """What the loader saw, with what was read for it."""
        if self.pipeline.forked:
            return so_far
        return so_far.of(self.pipeline.stats(), copied=self.queue.copied, device=self.queue.waited)

    @property
    def fill(self) -> QueueFill:
        """What is ready at this moment."""
        host_depth, device_depth = self._depths
        ready, queued = self.pipeline.ready, self.queue.ready
        if not device_depth:
            # Of a slot that holds several batches, those that are yet to be handed out are ready, too.
            ready, queued = ready + queued, 0
        # There is one slot more than the depth, for what is being handed out.
        return QueueFill(min(ready, host_depth), host_depth, queued, device_depth)

    def close(self) -> None:
        """End everything and give all memory back. Idempotent, also where it was interrupted."""
        if self.pipeline.forked:
            return  # threads and device belong to another process, and so may be whoever held a lock at the fork
        try:
            self.queue.close()
        finally:
            try:
                self.pipeline.close()
            finally:
                self._give_back()
                self._give_back = _nothing


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads samples, and adds what belongs to the loader: their numbers, and what is drawn for each, by its number.

    Attributes:
        source: Where samples come from.
        return_indices: Whether numbers are wanted.
        seed: Of what is drawn; None where nothing is.
        nans: Looks at what has been read.
    """

    source: Source
    return_indices: bool
    seed: int | None
    nans: NanCheck

    def __call__(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        numbers = ids_of(self.source, samples) if self.return_indices or self.seed is not None else samples
        if self.return_indices:
            out[INDEX][...] = numbers
            out = {key: array for key, array in out.items() if key != INDEX}
        if self.seed is None:
            self.source.read_into(samples, out)
        else:
            assert isinstance(self.source, RandomizedSource)
            self.source.read_random(samples, out, derived_keys(derived_key(self.seed, epoch, DRAWN), numbers))
        self.nans(epoch, samples, out)


def _drawn(source: Source, schedule: Schedule, seed: int, key: BatchIndex) -> int:
    """What the generator of a batch begins with: by its first sample, whichever rank and step it falls to."""
    first = schedule.plan(key.epoch).batch(key.step).samples[:1]
    return derived_key(seed, key.epoch, DRAWN_ON_DEVICE, int(ids_of(source, first)[0]))


def indexed_spec(spec: BatchSpec) -> BatchSpec:
    """The fields of batches, with the numbers of their samples.

    Raises:
        ConfigError: There is a field of that name.
    """
    if INDEX in spec.fields:
        raise ConfigError(f"return_indices: the source has a field {INDEX!r} of its own; give that field another key")
    return spec.with_field(INDEX, FieldSpec((), np.dtype(np.int64)))


def _kept(source: Source, footprint: ResourcePlan) -> Callable[[], None]:
    """Make room in a source for what is read ahead; what is returned takes it back."""
    budget = footprint.budget
    reserve: list[Callable[[], Callable[[], None]]] = []
    if isinstance(source, CachingSource):
        reserve.append(functools.partial(source.reserve, footprint.chunks, budget.cache))
    if budget.fetched and isinstance(source, FetchingSource):
        reserve.append(functools.partial(source.read_ahead, budget.fetched))
    return reserved(reserve)


def _nothing() -> None:
    pass
