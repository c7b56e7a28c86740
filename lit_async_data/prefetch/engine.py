"""`Relay`: the running part of a prefetched loader, feed and device queue, from its first batch until it is closed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lit_async_data.device.copy_verifier import CopyVerifier
from lit_async_data.device.inline_queue import Transform
from lit_async_data.device.stream_queue import StreamQueue
from lit_async_data.device.streams import TorchStreams, has_streams
from lit_async_data.device.transform import DeviceTransform
from lit_async_data.host import memory
from lit_async_data.host.stats import QueueFill
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.plan import BatchIndex
from lit_async_data.prefetch.draw_watch import DrawWatch
from lit_async_data.prefetch.host_queue import HostQueue, as_it_came
from lit_async_data.prefetch.iterator_feed import IteratorFeed
from lit_async_data.prefetch.packing import Packer
from lit_async_data.prefetch.pinned_buffers import PinnedBufferPool
from lit_async_data.threads import ProcessGuard


class Relay:
    """Feed and device queue. Refers to no prefetched loader, so that one that is dropped is closed at once.

    Args:
        loader: Any iterable.
        device: Where batches are handed out.
        depth: Batches copied ahead.
        threaded: Whether the loader may be read in a thread.
        transform: Called with each batch on its device; what it draws begins with the numbers of rank, pass
            and batch.
        verify_copies: Batches that are watched on their way.
        state: The loader's ``state_dict``, to be called for each batch that is read ahead.
        watch: Says whether the loader may be read ahead.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        device: torch.device,
        depth: int,
        threaded: bool,
        transform: Transform | None,
        verify_copies: int,
        state: Callable[[], Any] | None,
        watch: DrawWatch,
    ) -> None:
        self.device = device
        self._threaded = threaded
        self._process = ProcessGuard()
        self._staging = PinnedBufferPool(functools.partial(memory.allocated, pinned=True), most=0)
        on_device = has_streams(device)
        self.feed = IteratorFeed(loader, Packer(self._staging) if on_device else as_it_came, 0, state, watch)
        called = (
            DeviceTransform(transform, device, number=functools.partial(_drawn, _rank()))
            if transform is not None
            else None
        )
        self.queue: StreamQueue | HostQueue
        if on_device:
            streams = TorchStreams(device)
            self.queue = StreamQueue(
                self.feed, streams, 0, called, CopyVerifier(verify_copies, streams) if verify_copies else None
            )
        else:
            self.queue = HostQueue(self.feed, 0, called)
        self.set_depth(depth)

    def set_depth(self, depth: int) -> None:
        """Read and copy so many batches ahead from now on; what is on its way is handed out all the same."""
        self.feed.depth = depth if self._threaded else 0
        # Without a thread the next batch is read when it is asked for: room for more than that one would lie idle.
        self.queue.depth = depth if self._threaded else min(depth, 1)
        # Those of batches that are being copied, that are ready, and one that is being packed.
        self._staging.most = self.queue.depth + self.feed.depth + 1

    @property
    def ready(self) -> int:
        """Batches that are ready, on host and device together."""
        return self.feed.ready + self.queue.ready

    @property
    def fill(self) -> QueueFill:
        """What is ready at this moment."""
        on_device = isinstance(self.queue, StreamQueue)
        return QueueFill(self.feed.ready, self.feed.depth, self.queue.ready, self.queue.depth if on_device else 0)

    def check(self) -> None:
        """Raise `WorkerError` in a fork of the process that began to read."""
        if self._process.forked:
            raise self._process.error(
                "this loader reads", "its thread does not exist there; call prefetched() in the child"
            )

    def rest(self, *, wait: bool = True) -> None:
        """End the pass and free what it took on the device. If it is interrupted, only `close` may follow.

        Args:
            wait: For a `next` of the loader that is under way, as long as it takes; else a few seconds at most.
        """
        try:
            self.queue.close()
        finally:
            self.feed.end(wait=wait)

    def close(self, *, wait: bool = False) -> None:
        """End everything. Idempotent, also if it was interrupted.

        Args:
            wait: As for `rest`.
        """
        if not self._process.forked:  # else thread and device are another process's, and so may be whoever held a lock
            self.rest(wait=wait)


def _drawn(rank: int, key: BatchIndex) -> int:
    return derived_key(0, rank, key.epoch, key.step)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
