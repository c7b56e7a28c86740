"""`Engine`: feed and device queue of any loader, from its first batch until it is closed; `Run`: what runs now."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, cast

import torch

from lit_async_data.engine.device import streams
from lit_async_data.engine.device.feed import CopyingFeed, Feed, LendingFeed
from lit_async_data.engine.device.inline_queue import DeviceQueue, InlineQueue
from lit_async_data.engine.device.stream_queue import StreamQueue
from lit_async_data.engine.device.transform import Transform
from lit_async_data.engine.stats import LoaderStats, QueueFill


class Engine:
    """A feed, which reads batches ahead, and a device queue, which copies them ahead.

    It refers to no loader, so that a dropped loader is closed at once.

    Args:
        feed: Where batches come from. Closed with the engine.
        device: Where batches are handed out; they are copied only to a device with streams.
        depth: Batches that are copied ahead; 0 to read and copy nothing ahead.
        inline: Whether to copy nothing, so that ``transform`` gets each batch in host memory.
        transform: Called with each batch on its device.
        asks: Whether the feed must be asked after each batch; False where its threads go on by themselves.
    """

    def __init__(
        self,
        feed: Feed,
        device: torch.device,
        *,
        depth: int,
        inline: bool = False,
        transform: Transform | None = None,
        asks: bool = True,
    ) -> None:
        self.feed, self.device = feed, device
        side = None if inline else streams.streams_of(device)
        self.copies = side is not None
        self.asks = asks or self.copies
        self.queue: DeviceQueue
        if side is None:
            self.queue = InlineQueue(cast("LendingFeed", feed), depth, transform)
        else:
            self.queue = StreamQueue(cast("CopyingFeed", feed), side, depth, transform)

    @property
    def ready(self) -> int:
        """Batches that are ready, on host and device together."""
        return self.feed.ready + self.queue.ready

    @property
    def fill(self) -> QueueFill:
        # There is one slot more than the depth, for the batch that is being handed out.
        host = min(self.feed.ready, self.feed.depth)
        return QueueFill(host, self.feed.depth, self.queue.ready, self.queue.depth if self.copies else 0)

    def stats(self, before: LoaderStats) -> LoaderStats:
        """With what feed and queue have counted: sums are added, and what is of this moment replaced."""
        found, waited = self.feed.stats(), self.queue.waited
        return dataclasses.replace(
            before,
            read=before.read.plus(found.read),
            copied=before.copied + found.copied,
            device=waited + before.device if waited and before.device else waited,
            workers=found.workers,
            slots=found.slots,
        )

    def rest(self, *, wait: bool = True) -> None:
        """End the pass and free its device memory; see `Feed.rest`. If it was interrupted, only `close` may follow."""
        try:
            self.queue.close()
        finally:
            self.feed.rest(wait=wait)

    def close(self, *, wait: bool = False) -> None:
        """End everything and give all memory back. Idempotent, also after an interrupt."""
        if self.feed.forked:
            return  # threads and device belong to another process, and so may the thread that held a lock at the fork
        try:
            self.queue.close()
        finally:
            self.feed.close(wait=wait)


@dataclasses.dataclass
class Run:
    """The running part of a loader."""

    engine: Engine | None = None  # None before the first request, and after the loader was stopped
    closer: weakref.finalize[Any, Any] | None = None  # closes the engine when the loader is dropped
    # Whether a request did not come to its end. The engine may be in any state, and must be replaced.
    interrupted: bool = False
    unanswered: bool = False  # whether the last request for a batch gave none: it goes on, or ended in an error
    closed: bool = False  # whether the loader is closed for good
    stats: LoaderStats = dataclasses.field(default_factory=LoaderStats)  # without what the engine counts
    # The thread that is inside ``next``, by the key ``"thread"``; empty if none is.
    inside: dict[str, int] = dataclasses.field(default_factory=dict)
