"""`StreamQueue`: batches on their way to a device, on a stream of their own, while it computes.

On a device with streams a batch travels like this; *compute*
is the stream the training step runs on, *side* is ours:

1. Destinations are allocated on compute, and an event is recorded there: ``allocated``.
2. Side waits for ``allocated``: memory that the allocator gives out again may still be read by kernels of an earlier
   step, which were enqueued before. (Without this wait: write after read.)
3. Side copies from the pinned slot; an event: ``copied``. The slot is free when that event has happened.
4. A device transform runs on side, after a wait for an event recorded on compute at that moment: what it allocates
   comes from memory of side, which compute may still be reading.
5. Side records ``ready``. At hand-over compute waits for it (without this wait: read before write), and only then the
   raw tensors may die, since side still reads them.

No call to the device is made in a reader thread, and none of these waits stops the host.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any

import numpy as np
import torch

from lit_async_data.canary import Canary
from lit_async_data.device import Batch, Transform, transformed
from lit_async_data.device_clock import DeviceClock
from lit_async_data.job import Filled
from lit_async_data.pipeline import Pipeline
from lit_async_data.plan import Key
from lit_async_data.spec import BatchLayout
from lit_async_data.stats import DeviceWait
from lit_async_data.streams import Streams

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Ticket:
    """One batch on its way: reserved (destinations exist), then submitted (``ready`` is recorded)."""

    key: Key
    count: int
    raw: dict[str, torch.Tensor]
    block: torch.Tensor | None
    allocated: Any
    ready: Any = None
    batch: Batch = None
    error: Exception | None = None

    @property
    def submitted(self) -> bool:
        return self.ready is not None or self.error is not None


class StreamQueue:
    """Copies batches to a device while it computes.

    Args:
        pipeline: Where filled slots come from; their memory is pinned.
        streams: The device.
        depth: Batches on the device ahead of the one in use; 0 copies each batch when it is asked for.
        transform: Run on the side stream after the copy.
        canary: Watches the first batches.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        streams: Streams,
        depth: int,
        transform: Transform | None,
        canary: Canary | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._layout: BatchLayout = pipeline.layout
        self._streams = streams
        self._depth = depth
        self._transform = transform
        self._canary = canary
        self._clock = DeviceClock(streams)
        self._tickets: collections.deque[_Ticket] = collections.deque()
        self._copying: collections.deque[tuple[int, Any]] = collections.deque()
        self.copied = 0

    @property
    def ready(self) -> int:
        return sum(ticket.ready is not None and ticket.error is None for ticket in self._tickets)

    @property
    def waited(self) -> DeviceWait:
        return self._clock.waited

    def take(self, key: Key) -> Batch:
        self._clock.asked()
        if self._canary is not None:
            self._canary.released(key)
        if self._tickets and self._tickets[0].key != key:
            self._forget()
        ticket = self._tickets.popleft() if self._tickets else self._reserved(key)
        if not ticket.submitted:
            self._reclaim(block=True)  # else the pipeline could wait for a slot that only we can free
            self._submit(ticket, self._pipeline.get(key))
        if ticket.error is not None:
            self._let_go(ticket)
            try:
                raise ticket.error
            finally:
                del ticket  # as in `InlineQueue.take`
        return self._handed_out(ticket)

    def top_up(self, key: Key) -> None:
        self._reclaim(block=False)
        if self._tickets and self._tickets[0].key != key:
            self._forget()
        while len(self._tickets) < self._depth:
            last = self._tickets[-1].key if self._tickets else None
            self._tickets.append(self._reserved(self._pipeline.schedule.following(last) if last else key))
        for ticket in self._tickets:
            if ticket.submitted:
                continue
            self._pipeline.prefetch(ticket.key)
            filled = self._pipeline.poll(ticket.key)
            if filled is None:
                return
            self._submit(ticket, filled)
        if self._tickets:
            self._pipeline.prefetch(self._pipeline.schedule.following(self._tickets[-1].key))

    def read_ahead(self, key: Key) -> None:
        if self._tickets and self._tickets[0].key == key:
            return  # what comes behind is being read
        self._forget()
        if self._depth:
            self._pipeline.prefetch(key)

    def close(self) -> None:
        try:
            self._forget()
            self._reclaim(block=True)
            if self._canary is not None:
                self._canary.settle()
        except RuntimeError as error:  # a device in trouble: the rest is to be closed all the same
            log.warning("copies to the device could not be waited for: %s", error)

    def _reserved(self, key: Key) -> _Ticket:
        layout, count = self._layout, self._pipeline.schedule.plan(key.epoch).count(key.step)
        with torch.inference_mode(False):
            raw = {
                name: self._streams.empty((count, *layout.spec[name].stored_shape), _type(layout, name))
                for name in layout.large
            }
            small = layout.nbytes - layout.small_start
            block = self._streams.empty((small,), torch.uint8) if layout.small else None
        return _Ticket(key, count, raw, block, allocated=self._streams.record(self._streams.compute()))

    def _submit(self, ticket: _Ticket, filled: Filled) -> None:
        (batch,) = filled.batches  # one to a slot: the small fields of a batch travel in one block
        if batch.error is not None:
            ticket.error = batch.error
            return
        try:
            self._copy(ticket, filled.slot)
            if self._transform is not None:
                self._streams.wait(self._streams.side, self._streams.record(self._streams.compute()))
                with torch.inference_mode(False), self._streams.on_side():
                    ticket.batch = self._transformed(self._transform, ticket)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is raised when it is this batch's turn
            ticket.error = error
        finally:
            ticket.ready = self._streams.record(self._streams.side)

    def _transformed(self, transform: Transform, ticket: _Ticket) -> Batch:
        raw = self._unpacked(ticket)
        if self._canary is not None:
            self._canary.arrived(ticket.key, raw)
        batch = transformed(transform, raw, ticket.key)
        if self._canary is not None:
            self._canary.made(ticket.key, batch)
        return batch

    def _copy(self, ticket: _Ticket, slot: int) -> None:
        streams, layout = self._streams, self._layout
        self._pipeline.ring.copy(slot)
        memory = torch.from_numpy(self._pipeline.ring.memory(slot))
        streams.wait(streams.side, ticket.allocated)
        if self._canary is not None:
            read = {name: _field(layout, name, memory, ticket.count) for name in layout.spec.fields}
            self._canary.read(ticket.key, layout.spec.packed(read))
        try:
            with torch.inference_mode(False), streams.on_side():
                for name, destination in ticket.raw.items():
                    streams.copy(destination, _field(layout, name, memory, ticket.count))
                if ticket.block is not None:
                    streams.copy(ticket.block, memory[layout.small_start : layout.nbytes])
        finally:
            self._copying.append((slot, streams.record(streams.side)))

    def _handed_out(self, ticket: _Ticket) -> Batch:
        self._streams.wait(self._streams.compute(), ticket.ready)
        self._clock.came(first=ticket.key.step == 0)
        with torch.inference_mode(False):
            batch = self._unpacked(ticket) if self._transform is None else ticket.batch
        if self._canary is not None:
            if self._transform is None:
                self._canary.arrived(ticket.key, batch)
            self._canary.handed_over(ticket.key, batch)
        return batch

    def _unpacked(self, ticket: _Ticket) -> Batch:
        """The fields as the user sees them; the small ones copied out of their block on the current stream."""
        layout, tensors = self._layout, {}
        for name, field in layout.spec.fields.items():
            if name in ticket.raw:
                stored = ticket.raw[name]
            else:
                assert ticket.block is not None
                view = _field(layout, name, ticket.block, ticket.count, start=layout.small_start)
                stored = self._streams.empty(tuple(view.shape), view.dtype)
                self._streams.copy(stored, view)
            tensors[name] = field.delivered(stored)
        return layout.spec.packed(tensors)

    def _reclaim(self, *, block: bool) -> None:
        while self._copying and self._streams.happened(self._copying[0][1], block=block):
            self._pipeline.ring.copied(self._copying.popleft()[0])

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


def _type(layout: BatchLayout, name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, layout.spec[name].dtype)).dtype


def _field(layout: BatchLayout, name: str, memory: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """One field as a view of bytes, on whichever device they lie; as `BatchLayout.views` does with numpy."""
    field, offset = layout.spec[name], layout.offsets[name] - start
    raw = memory[offset : offset + count * field.nbytes]
    return raw.view(_type(layout, name)).reshape((count, *field.stored_shape))
