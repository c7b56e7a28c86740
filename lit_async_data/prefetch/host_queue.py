"""`HostQueue`: batches of somebody else's loader, handed out as they came, where no copy could overlap with work."""

from __future__ import annotations

import functools
from typing import Any

import torch

from lit_async_data.batch.tree import leaves_in
from lit_async_data.device.feed import Arrived, Cloned, Feed, HostBatch
from lit_async_data.device.inline_queue import Batch, Transform, transformed
from lit_async_data.order.plan import BatchIndex
from lit_async_data.prefetch.packing import Ask


class HostQueue:
    """Hands out the very objects that were read. Keeps `DeviceQueue`.

    Args:
        feed: Where batches come from.
        depth: Reading ahead is the feed's business; this is only held.
        transform: Applied to each batch as it is handed out.
    """

    waited = None

    def __init__(self, feed: Feed, depth: int, transform: Transform | None) -> None:
        self._feed = feed
        self.depth = depth
        self._transform = transform
        self.copied = 0
        self.ready = 0

    def take(self, key: BatchIndex) -> Batch:
        host = self._feed.get(key)
        if host.error is not None:
            try:
                raise host.error
            finally:
                del host  # as in `InlineQueue.take`
        batch = host.unpacked(Arrived({}, None, {}), torch.clone)
        return batch if self._transform is None else transformed(self._transform, batch, key)

    def top_up(self, key: BatchIndex) -> None:
        self._feed.prefetch(key)

    def read_ahead(self, key: BatchIndex) -> None:
        self._feed.prefetch(key)

    def close(self) -> None:
        pass


def as_it_came(batch: Batch, ask: Ask[Any]) -> HostBatch:  # noqa: ARG001
    """A batch of which nothing is copied."""
    tensors = leaves_in(batch, lambda value: isinstance(value, torch.Tensor))
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
    return HostBatch(unpacked=functools.partial(_itself, batch), nbytes=nbytes)


def _itself(batch: Batch, arrived: Arrived, cloned: Cloned) -> Batch:  # noqa: ARG001
    return batch
