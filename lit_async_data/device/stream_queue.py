"""`StreamQueue`: batches on their way to a device, on a stream of their own, while it computes.

On a device with streams a batch travels like this; *compute*
is the stream the training step runs on, *side* is ours:

1. Destinations are allocated on compute, and an event is recorded there: ``allocated``.
2. Side waits for ``allocated``: memory that the allocator gives out again may still be read by kernels of an earlier
   step, which were enqueued before. (Without this wait: write after read.)
3. Side copies from pinned host memory; an event: ``copied``. That memory is free when the event has happened.
4. A device transform runs on side, after a wait for an event recorded on compute at that moment: what it allocates
   comes from memory of side, which compute may still be reading. So do objects that move themselves.
5. Side records ``ready``. At hand-over compute waits for it (without this wait: read before write), and only then the
   raw tensors may die, since side still reads them.

No call to the device is made in a reader thread, and none of these waits stops the host.

An interrupt (Ctrl-C) can arrive between any two of these steps. So the queue holds whatever side may read or write from
before the copy until `close` has waited for side; nothing but that may be called after an interrupt.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from lit_async_data.device.clock import DeviceClock
from lit_async_data.device.copy_verifier import CopyVerifier
from lit_async_data.device.feed import Arrived, Cloned, DeviceBuffers, Feed, HostBatch
from lit_async_data.device.inline_queue import Batch, Transform, transformed
from lit_async_data.device.streams import Streams
from lit_async_data.host.stats import DeviceWait
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Ticket:
    """One batch on its way: reserved (destinations may exist), then submitted (``ready`` is recorded)."""

    key: BatchIndex
    room: DeviceBuffers | None = None
    raw: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    block: torch.Tensor | None = None
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    allocated: Any = None
    unpacked: Callable[[Arrived, Cloned], Batch] | None = None
    ready: Any = None
    batch: Batch = None
    error: BaseException | None = None

    @property
    def submitted(self) -> bool:
        return self.ready is not None or self.error is not None


@dataclasses.dataclass
class _Copying:
    """Host memory that side reads until the event."""

    host: HostBatch
    done: Any = None


class StreamQueue:
    """Copies batches to a device while it computes.

    Args:
        feed: Where batches come from; their memory should be pinned.
        streams: The device.
        depth: Batches on the device ahead of the one in use; 0 copies each batch when it is asked for.
        transform: Run on the side stream after the copy.
        verifier: Watches the first batches.

    Attributes:
        depth: As given. It can be set at any time: what is on its way is handed out all the same.
    """

    def __init__(
        self,
        feed: Feed,
        streams: Streams,
        depth: int,
        transform: Transform | None,
        verifier: CopyVerifier | None = None,
    ) -> None:
        self._feed = feed
        self._streams = streams
        self.depth = depth
        self._transform = transform
        self._verifier = verifier
        self._clock = DeviceClock(streams)
        self._tickets: collections.deque[_Ticket] = collections.deque()
        self._copying: collections.deque[_Copying] = collections.deque()
        self.copied = 0

    @property
    def ready(self) -> int:
        return sum(ticket.ready is not None and ticket.error is None for ticket in self._tickets)

    @property
    def waited(self) -> DeviceWait:
        return self._clock.waited

    def take(self, key: BatchIndex) -> Batch:
        self._clock.asked()
        if self._verifier is not None:
            self._verifier.released(key)
        if self._tickets and self._tickets[0].key != key:
            self._forget()
        if not self._tickets:
            self._tickets.append(self._reserved(key))
        ticket = self._tickets[0]  # it stays there for as long as side may write to its memory
        if not ticket.submitted:
            self._reclaim(block=True)  # else the feed could wait for memory that only we can free
            try:
                self._submit(ticket, self._feed.get(key))
            except Exception:
                self._let_go(ticket)
                self._tickets.popleft()
                raise
        if ticket.error is not None:
            self._let_go(ticket)
            self._tickets.popleft()
            error, ticket.error = ticket.error, None
            try:
                raise error
            finally:
                del error, ticket  # as in `InlineQueue.take`
        batch = self._handed_out(ticket)
        self._tickets.popleft()
        return batch

    def top_up(self, key: BatchIndex) -> None:
        if self._streams.capturing:
            return  # a copy of ours would become part of the user's graph, or break it; the next hook tries again
        self._reclaim(block=False)
        if self._tickets and self._tickets[0].key != key:
            self._forget()
        while len(self._tickets) < self.depth:
            last = self._tickets[-1].key if self._tickets else None
            self._tickets.append(self._reserved(self._feed.following(last) if last else key))
        for ticket in self._tickets:
            if ticket.submitted:
                continue
            self._feed.prefetch(ticket.key)
            host = self._feed.poll(ticket.key)
            if host is None:
                return
            self._submit(ticket, host)
            if isinstance(ticket.error, StopIteration):
                while self._tickets[-1] is not ticket:
                    self._tickets.pop()  # nothing comes after the end that would need the memory
                return
        if self._tickets:
            self._feed.prefetch(self._feed.following(self._tickets[-1].key))

    def read_ahead(self, key: BatchIndex) -> None:
        if self._tickets and self._tickets[0].key == key:
            return  # what comes behind is being read
        self._forget()
        if self.depth:
            self._feed.prefetch(key)

    def close(self) -> None:
        try:
            # For all of side, and not for what has an event: an interrupt may have come before that was recorded.
            self._streams.happened(self._streams.record(self._streams.side), block=True)
            self._tickets.clear()
            while self._copying:
                self._copying.popleft().host.release()
            if self._verifier is not None:
                self._verifier.settle()
        except RuntimeError as error:  # a device in trouble: the rest is to be closed all the same
            log.warning("copies to the device could not be waited for: %s", error)

    def _reserved(self, key: BatchIndex) -> _Ticket:
        """A ticket; with destinations, if the feed can say before the batch is there what it will take."""
        ticket, room = _Ticket(key), self._feed.room(key)
        if room is not None:
            self._reserve(ticket, room)
        return ticket

    def _reserve(self, ticket: _Ticket, room: DeviceBuffers) -> None:
        with torch.inference_mode(False):
            ticket.raw = {name: self._streams.empty(shape, dtype) for name, (shape, dtype) in room.large.items()}
            ticket.block = None if room.block is None else self._streams.empty((room.block,), torch.uint8)
        ticket.room, ticket.allocated = room, self._streams.record(self._streams.compute())

    def _submit(self, ticket: _Ticket, host: HostBatch) -> None:
        if host.error is not None:
            ticket.error = host.error
            ticket.raw, ticket.block = {}, None  # nothing will be copied there
            return
        ticket.unpacked = host.unpacked
        try:
            self._copy(ticket, host)
            if self._transform is not None:
                self._wait_for_compute()
                with torch.inference_mode(False), self._streams.on_side():
                    ticket.batch = self._transformed(self._transform, ticket)
        except Exception as error:  # noqa: BLE001  # it is raised when it is this batch's turn
            ticket.error = error
        ticket.ready = self._streams.record(self._streams.side)

    def _transformed(self, transform: Transform, ticket: _Ticket) -> Batch:
        raw = self._unpacked(ticket)
        if self._verifier is not None:
            self._verifier.arrived(ticket.key, raw)
        batch = transformed(transform, raw, ticket.key)
        if self._verifier is not None:
            self._verifier.made(ticket.key, batch)
        return batch

    def _copy(self, ticket: _Ticket, host: HostBatch) -> None:
        streams, room = self._streams, host.room
        # With the batch itself: its memory lives for as long as side may read it.
        copying = _Copying(host)
        self._copying.append(copying)
        try:
            if self._verifier is not None:
                with torch.inference_mode(False):  # copy verification skips tensors of that mode
                    lying = host.unpacked(Arrived(host.large, host.block, host.own), _as_it_lies)
                self._verifier.read(ticket.key, lying)
            if ticket.room != room:
                self._reserve(ticket, room)
            streams.wait(streams.side, ticket.allocated)
            with torch.inference_mode(False), streams.on_side():
                for name, destination in ticket.raw.items():
                    streams.copy(destination, host.large[name])
                if ticket.block is not None:
                    assert host.block is not None
                    streams.copy(ticket.block, host.block)
            if host.own:
                self._wait_for_compute()
                with torch.inference_mode(False), streams.on_side():
                    ticket.own = {name: streams.moved(value) for name, value in host.own.items()}
        finally:
            copying.done = streams.record(streams.side)

    def _wait_for_compute(self) -> None:
        """Side goes on when all that compute has been given until now is done: it takes memory of its own pool."""
        self._streams.wait(self._streams.side, self._streams.record(self._streams.compute()))

    def _handed_out(self, ticket: _Ticket) -> Batch:
        self._streams.wait(self._streams.compute(), ticket.ready)
        self._clock.came(first=ticket.key.step == 0)
        with torch.inference_mode(False):
            batch = self._unpacked(ticket) if self._transform is None else ticket.batch
        if self._verifier is not None:
            if self._transform is None:
                self._verifier.arrived(ticket.key, batch)
            self._verifier.handed_over(ticket.key, batch)
        return batch

    def _unpacked(self, ticket: _Ticket) -> Batch:
        """The batch as the user sees it, on the current stream."""
        assert ticket.unpacked is not None
        return ticket.unpacked(Arrived(ticket.raw, ticket.block, ticket.own), self._cloned)

    def _cloned(self, tensor: torch.Tensor) -> torch.Tensor:
        clone = self._streams.empty(tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            self._streams.copy(clone, tensor)
        return clone

    def _reclaim(self, *, block: bool) -> None:
        while self._copying and self._streams.happened(self._copying[0].done, block=block):
            self._copying.popleft().host.release()

    def _forget(self) -> None:
        for ticket in self._tickets:
            self._let_go(ticket)
        self._tickets.clear()

    def _let_go(self, ticket: _Ticket) -> None:
        """Before a ticket that was never handed over dies.

        Its memory goes back to compute's pool, while the copy may still be writing to it.
        """
        if ticket.ready is not None:
            self._streams.wait(self._streams.compute(), ticket.ready)


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
