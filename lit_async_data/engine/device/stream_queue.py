"""`StreamQueue`: copies batches to a device on a side stream, while the device computes.

On a device with streams a batch travels in five steps. *Compute* is the stream of the training step, *side* that of all
queues of this process for the device:

1. The queue allocates destinations on compute and records the event ``allocated`` there.
2. Side waits for ``allocated``: the allocator may give out memory that kernels of an earlier step still read. (Without
   this wait: write after read.)
3. Side copies from pinned host memory and records an event. When that has happened, the host memory is free.
4. Side runs the device transform, and moves objects that move themselves. Both allocate from side's memory.
5. Side records ``ready``. At hand-over compute waits for it (without this wait: read before write). Only then the raw
   tensors may be dropped, since side still reads them. What lies in side's memory is noted as used by compute
   (``record_stream``): the allocator gives it to nobody on side before compute has read it. Objects that cannot note
   that have side wait for compute in step 4, from then on.

No reader thread calls the device, and none of these waits stops the host.

An interrupt (Ctrl-C) can come between any two of these steps. So the queue holds all memory that side may read or write
from before the copy until `close` has waited for side. After an interrupt only `close` may be called.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.tree import leaves_in
from lit_async_data.engine.device.clock import COPY, DeviceClock, profiled, ranged
from lit_async_data.engine.device.feed import Arrived, Batch, Clone, DeviceBuffers, Feed, HostBatch
from lit_async_data.engine.device.streams import Streams, no_inference
from lit_async_data.engine.device.transform import Transform
from lit_async_data.engine.stats import DeviceWait
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)


def _may_hold_memory(value: Any) -> bool:
    known = isinstance(value, Mapping | Sequence | np.ndarray | np.generic) or dataclasses.is_dataclass(value)
    return not known or hasattr(value, "record_stream")


@dataclasses.dataclass
class Ticket:
    """One batch on its way: reserved (destinations may exist), then submitted (``ready`` is recorded)."""

    key: BatchIndex
    following: BatchIndex
    buffers: DeviceBuffers | None = None
    raw: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    block: torch.Tensor | None = None
    moved: dict[str, Any] = dataclasses.field(default_factory=dict)
    allocated: Any = None
    unpack: Callable[[Arrived, Clone], Batch] | None = None
    ready: Any = None
    batch: Batch = None
    error: BaseException | None = None


@dataclasses.dataclass
class Copying:
    """Host memory that side reads until ``done`` has happened."""

    host: HostBatch
    done: Any = None


class StreamQueue:
    """Copies batches to a device while it computes. Keeps `DeviceQueue`."""

    transform_s = 0.0

    def __init__(self, feed: Feed, streams: Streams, depth: int, transform: Transform | None) -> None:
        self.feed = feed
        self.streams = streams
        self.depth = depth
        self._transform = transform
        self._clock = DeviceClock(streams)
        self.tickets: collections.deque[Ticket] = collections.deque()  # batches on their way to the device, in order
        # Host memory that side may still read, in the order of the copies.
        self.copying: collections.deque[Copying] = collections.deque()

    @property
    def ready(self) -> int:
        count = 0  # a loop: a generator would be a call for each ticket
        for ticket in self.tickets:
            count += ticket.ready is not None and ticket.error is None
        return count

    @property
    def waited(self) -> DeviceWait:
        return self._clock.waited

    def take(self, key: BatchIndex) -> Batch:
        self._clock.asked()
        if self.tickets and self.tickets[0].key != key:
            self._forget()
        if not self.tickets:
            self.tickets.append(self._reserved(key))
        ticket = self.tickets[0]  # it stays there while side may write to its memory
        if ticket.ready is None and ticket.error is None:
            self.reclaim(block=True)
            try:
                self._submit(ticket, self.feed.get(key))
            except Exception:
                self._let_go(ticket)
                self.tickets.popleft()
                raise
        if ticket.error is not None:
            self._let_go(ticket)
            self.tickets.popleft()
            error, ticket.error = ticket.error, None
            try:
                raise error
            finally:
                del error, ticket  # see `SlotFeed.lend`
        batch = self._handed_out(ticket)
        self.tickets.popleft()
        return batch

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:
        if self.streams.capturing:
            return  # a copy would become part of the user's CUDA graph, or break it; the next hook tries again
        if not copy:
            self._read(key)
            return
        self.reclaim(block=False)
        if self.tickets and self.tickets[0].key != key:
            self._forget()
        while len(self.tickets) < self.depth:
            self.tickets.append(self._reserved(self.tickets[-1].following if self.tickets else key))
        for ticket in self.tickets:
            if ticket.ready is not None or ticket.error is not None:
                continue
            host = self.feed.poll(ticket.key)
            if host is None:
                self.feed.prefetch(ticket.key)
                return
            self._submit(ticket, host)
            if isinstance(host.error, StopIteration):
                while self.tickets[-1] is not ticket:
                    self.tickets.pop()  # no batch after the end needs the memory
                return
        if self.tickets:
            self.feed.prefetch(self.tickets[-1].following)

    def _read(self, key: BatchIndex) -> None:
        if self.tickets and self.tickets[0].key == key:
            return  # the batches behind are being read
        self._forget()
        if self.depth:
            self.feed.prefetch(key)

    def close(self) -> None:
        try:
            # For all of side: an interrupt may have come before an event was recorded.
            self.streams.happened(self.streams.record(self.streams.side), block=True)
            self.tickets.clear()
            while self.copying:
                self.copying.popleft().host.release()
        except RuntimeError as error:  # the device is in trouble; the rest must be closed all the same
            log.warning("waiting for copies to the device failed: %s", error)

    def _reserved(self, key: BatchIndex) -> Ticket:
        """A ticket; with destinations, if the feed knows their sizes before the batch has been read."""
        ticket, buffers = Ticket(key, self.feed.following(key)), self.feed.buffers(key)
        if buffers is not None:
            self._reserve(ticket, buffers)
        return ticket

    def _reserve(self, ticket: Ticket, buffers: DeviceBuffers) -> None:
        with no_inference():
            ticket.raw = {name: self.streams.empty(shape, dtype) for name, (shape, dtype) in buffers.large.items()}
            ticket.block = None if buffers.block is None else self.streams.empty((buffers.block,), torch.uint8)
        ticket.buffers, ticket.allocated = buffers, self.streams.record(self.streams.compute())

    def _submit(self, ticket: Ticket, host: HostBatch) -> None:
        if host.error is not None:
            ticket.error = host.error
            ticket.raw, ticket.block = {}, None  # nothing will be copied there
            return
        ticket.unpack = host.unpack
        try:
            if profiled():
                ranged(COPY, self._copy, ticket, host)
            else:
                self._copy(ticket, host)
            if self._transform is not None:
                self._wait_for_compute()
                with no_inference(), self.streams.on_side():
                    ticket.batch = self._transform(self._unpacked(ticket), ticket.key)
        except Exception as error:  # noqa: BLE001  # raised when it is this batch's turn
            ticket.error = error
        ticket.ready = self.streams.record(self.streams.side)

    def _copy(self, ticket: Ticket, host: HostBatch) -> None:
        streams = self.streams
        # With the batch itself: its memory lives as long as side may read it.
        copying, began = Copying(host), None
        self.copying.append(copying)
        try:
            if ticket.buffers != (buffers := host.known or host.buffers):
                self._reserve(ticket, buffers)
            streams.wait(streams.side, ticket.allocated)
            began = self._clock.copy_begins()
            with no_inference(), streams.on_side():
                for name, destination in ticket.raw.items():
                    streams.copy(destination, host.large[name])
                if ticket.block is not None:
                    assert host.block is not None
                    streams.copy(ticket.block, host.block)
            if host.movable:
                self._wait_for_compute()
                # Always, as this also turns gradients on: they must not depend on when the copy begins.
                with torch.inference_mode(False), streams.on_side():
                    ticket.moved = {name: streams.moved(value) for name, value in host.movable.items()}
        finally:
            copying.done = streams.record(streams.side)
            self._clock.copy_ends(began, host.nbytes)

    def _wait_for_compute(self) -> None:
        """Before side allocates memory that compute may be reading: that of objects that have not noted it."""
        if self.streams.unnoted:
            self.streams.wait(self.streams.side, self.streams.record(self.streams.compute()))

    def _handed_out(self, ticket: Ticket) -> Batch:
        compute = self.streams.compute()
        self.streams.wait(compute, ticket.ready)
        self._clock.came(first=ticket.key.step == 0)
        batch = of_side = ticket.batch
        if self._transform is None:
            with no_inference():
                batch, of_side = self._unpacked(ticket), ticket.moved
            if not ticket.moved:
                return batch
        for value in leaves_in(of_side, _may_hold_memory).values():
            self.streams.record_stream(value, compute)
        return batch

    def _unpacked(self, ticket: Ticket) -> Batch:
        """The batch as the user gets it, on the current stream."""
        assert ticket.unpack is not None
        return ticket.unpack(Arrived(ticket.raw, ticket.block, ticket.moved), self._cloned)

    def _cloned(self, tensor: torch.Tensor) -> torch.Tensor:
        clone = self.streams.empty(tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            self.streams.copy(clone, tensor)
        return clone

    def reclaim(self, *, block: bool) -> None:
        """Release host memory whose copy has happened.

        With ``block``, wait for copies as long as the feed has no memory for another batch, which only this can free.
        """
        while self.copying and self.streams.happened(self.copying[0].done, block=block and not self.feed.has_room):
            self.copying.popleft().host.release()

    def _forget(self) -> None:
        for ticket in self.tickets:
            self._let_go(ticket)
        self.tickets.clear()

    def _let_go(self, ticket: Ticket) -> None:
        """Call before a ticket that was never handed over is dropped.

        Its memory returns to compute's pool, while a copy may still be writing to it.
        """
        if ticket.ready is not None:
            self.streams.wait(self.streams.compute(), ticket.ready)
