"""`DeviceQueue`: the last step of a batch on its way to training; and `InlineQueue`, which copies nothing.

On CPU and MPS the user gets the batches in host memory themselves. For devices with streams see `stream_queue`.
"""

from __future__ import annotations

import time
from typing import Protocol

from lit_async_data.engine.device.feed import Batch, LendingFeed
from lit_async_data.engine.device.transform import Transform
from lit_async_data.engine.stats import Wait
from lit_async_data.order.plan import BatchIndex


class DeviceQueue(Protocol):
    """Hands out batches in order. All calls come from the consumer's thread."""

    #: Batches copied ahead. It can be set at any time: batches on their way are handed out all the same.
    depth: int
    #: Seconds of the last `take` in which it ran ``device_transform``; 0 where a stream runs it.
    transform_s: float

    def take(self, key: BatchIndex) -> Batch:
        """A batch on its device, waiting for it."""

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:
        """Start what can be started of the batches from ``key`` on: reads, and with ``copy`` copies. Never blocks."""

    @property
    def waited(self) -> Wait | None:
        """How long the device waited for data; None where it has no streams."""

    @property
    def ready(self) -> int:
        """Batches on the device, or on their way there."""
        ...

    def close(self) -> None:
        """Wait for copies that are under way, and drop everything."""


class InlineQueue:
    """Hands out the batches in host memory themselves. Keeps `DeviceQueue`."""

    waited = None
    ready = 0

    def __init__(self, feed: LendingFeed, depth: int, transform: Transform | None) -> None:
        self._feed = feed
        self.depth = depth
        self.transform_s = 0.0
        self._transform = transform
        if transform is None:
            self.take = feed.lend  # type: ignore[method-assign]  # without a call between: each batch is taken here

    def take(self, key: BatchIndex) -> Batch:
        assert self._transform is not None
        batch = self._feed.lend(key)
        began = time.perf_counter()
        try:
            return self._transform(batch, key)
        finally:
            self.transform_s = time.perf_counter() - began

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:  # noqa: ARG002
        if self.depth:
            self._feed.prefetch(key)

    def close(self) -> None:
        pass
