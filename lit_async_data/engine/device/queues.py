"""Queues of batches: in host memory, or copied to a device ahead on a side stream; transforms on the device.

On CPU and MPS the user gets the batches in host memory themselves. For devices with streams see `StreamQueue`.

On a device with streams a batch travels in five steps. *Compute* is the stream of the training step, *side* the stream
of all queues of this process for the device:

1. The queue allocates destinations on compute and records the event ``allocated`` there.
2. Side waits for ``allocated``: the allocator may give out memory that kernels of an earlier step still read. (Without
   this wait: write after read.)
3. Side copies from pinned host memory and records an event. When that has happened, the host memory is free.
4. Side moves objects that move themselves, and runs the device transform. Both allocate from side's memory. The raw
   tensors that the transform reads are noted as used by side (``record_stream``): even if the queue drops them, or the
   transform drops them later, the allocator gives their memory to compute only after side has read them.
5. Side records ``ready``. At hand-over compute waits for it (without this wait: read before write). Tensors in side's
   memory are noted as used by compute. While a queue hands out objects that hide their memory, side waits for compute
   in step 4, for all queues.

No reader thread calls the device, and none of these waits stops the host.

An interrupt (Ctrl-C) can come between any two steps. So the queue holds all memory that side may read or write until
its use is noted, or `close` has waited for side. After an interrupt only `close` may be called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import inspect
import logging
import math
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.batch.tree import OPAQUE, SCALARS
from lit_async_data.engine.device.feeds import Arrived, Batch, Clone, DeviceBuffers, Feed, HostBatch
from lit_async_data.engine.device.streams import COPY, NOTHING, TIMED, DeviceClock, Streams, no_inference, profiled
from lit_async_data.engine.hooks import Function, Hook, first_called, is_module
from lit_async_data.engine.stats import Wait
from lit_async_data.errors import AsyncDataError, ConfigError, TransformError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.user_code import drawn, states

log = logging.getLogger(__name__)

# Transforms a batch on its device.
Transform = Callable[[Batch, BatchIndex], Batch]


class DeviceTransform:
    """Calls the user's function with each batch, without gradients, and with a random generator if it takes one.

    The first batch of evaluation shows whether a transform of all stages draws from global generators, which would make
    results vary.

    Args:
        function: As a `Hook`. An ``nn.Module`` is moved to the device, once. None to cast only.
        number: The seed of a batch's generator, by its key alone. None: a function that takes a generator gets None.
        cast: Called with the batch before the function.
    """

    def __init__(
        self,
        function: Function | None,
        device: torch.device,
        *,
        number: Callable[[BatchIndex], int] | None = None,
        cast: Callable[[Any], Any] | None = None,
    ) -> None:
        self._hook = hook = Hook((lambda batch: batch) if function is None else function, "device_transform")
        if is_module(hook.function):
            hook.function = hook.function.to(device)  # type: ignore[attr-defined]  # a module has it
        called = type(first_called(hook.function))
        self._unchecked = called.__name__ if called.__module__.startswith("torchvision.transforms.v2") else ""
        self._device = device
        self._number = number
        self._cast = cast

    def __call__(self, batch: Batch, key: BatchIndex) -> Batch:
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = self._transformed(batch, key)
        except AsyncDataError:
            raise
        except torch.OutOfMemoryError as error:  # unchanged: Lightning finds the largest batch size by it
            error.add_note(f"{self._hook.where}: no memory for batch {key.step} of epoch {key.epoch}")
            raise
        except Exception as error:
            what = f"failed on batch {key.step} of epoch {key.epoch}: {type(error).__name__}: {error}"
            raise TransformError(f"{self._hook.where}: {what}", stage="transform") from error
        if (made is None and batch is not None) or inspect.iscoroutine(made) or inspect.isgenerator(made):
            # Lightning skips a batch that is None without a word: nothing would be trained.
            what = "None" if made is None else f"a {type(made).__name__}"
            what = f"returned {what} for batch {key.step} of epoch {key.epoch}; return the batch to hand out"
            raise TransformError(f"{self._hook.where}: {what}", stage="transform")
        return made

    def _transformed(self, batch: Batch, key: BatchIndex) -> Batch:
        if self._cast is not None:
            batch = self._cast(batch)
        if self._unchecked:
            self._check_images(batch)
        hook, rng = self._hook, None
        if hook.draws and self._number is not None:
            rng = torch.Generator(self._device).manual_seed(self._number(key))
        if hook.seen is None or hook.seen:
            return hook(batch, rng)
        before = states(self._device)
        made = hook(batch, rng)
        hook.seen.append(key)
        if found := drawn(before, states(self._device)):
            log.warning(
                "device_transform drew random numbers from %s on an evaluation batch, so results change from run to "
                'run; give evaluation its own transform, as in device_transform={"train": …, "eval": None}, or take '
                "the random numbers from a parameter rng, which is None in evaluation",
                " and ".join(found),
            )
        return made

    def _check_images(self, batch: Any) -> None:
        """Refuse a transform of torchvision's v2, which takes only the first plain tensor, if others are images."""
        listed = enumerate(batch) if isinstance(batch, Sequence) else ()
        values = batch.items() if isinstance(batch, Mapping) else listed
        tensors = {key: value for key, value in values if isinstance(value, torch.Tensor)}
        first, images = [*tensors][:1], [key for key, value in tensors.items() if value.ndim > 2]
        if images not in ([], first) and all(type(value) is torch.Tensor for value in tensors.values()):
            what = f"{self._unchecked} of torchvision transforms the first tensor alone, {first[0]!r}; images are "
            ways = 'transform one field, {**batch, "x": transform(batch["x"])}, or tv_tensors (docs/data/transforms.md)'
            raise ConfigError(f"{what}{', '.join(map(repr, images))}; {ways}", self._hook.where)
        self._unchecked = ""


def widened(spec: BatchSpec) -> Callable[[Any], Any] | None:
    """Casts fields that travel to the device in a narrower type to the type of the batch; None without such fields."""
    fields = {key: field for key, field in spec.fields.items() if field.narrow is not None}
    types = {key: torch.from_numpy(np.empty(0, field.dtype)).dtype for key, field in fields.items()}
    if not types:
        return None

    def cast(batch: Any) -> Any:
        values = batch if spec.as_mapping else dict(zip(spec.fields, batch, strict=True))
        return spec.packed({key: value.to(types.get(key, value.dtype)) for key, value in values.items()})

    return cast


# Types of objects that refer to no memory of a device.
SKIPPED: tuple[type, ...] = (type, types.ModuleType, enum.Enum, torch.Size, torch.SymInt, torch.Generator, *OPAQUE)
SKIPPED += (torch.device, torch.dtype, torch.layout, torch.memory_format)
HARMLESS = frozenset({"datetime", "decimal", "fractions", "numpy", "pandas", "pathlib", "PIL", "pyarrow", "uuid"})
# The memory of sparse tensors, for which torch notes nothing as a whole.
ROWS, COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
PARTS: dict[torch.layout, tuple[str, ...]] = {torch.sparse_coo: ("_indices", "_values")}
PARTS |= {torch.sparse_csr: ROWS, torch.sparse_bsr: ROWS, torch.sparse_csc: COLUMNS, torch.sparse_bsc: COLUMNS}


def note_all(batch: Any, note: Callable[[Any], bool]) -> type | None:
    """Call ``note`` with each tensor in a batch, and each object that has a ``record_stream``.

    ``note`` returns whether it could note the object. Returns the type of an object that may refer to other memory, or
    None.
    """
    seen, todo, hidden = dict[int, Any](), [batch], None  # objects seen stay alive, so that no id is used again
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in SCALARS or id(value) in seen or isinstance(value, SKIPPED):
            continue
        seen[id(value)] = value
        if callable(getattr(value, "record_stream", None)) and note(value):
            # A subclass of Tensor may have attributes.
            todo += vars(value).values() if isinstance(value, torch.Tensor) and kind is not torch.Tensor else ()
        elif (inside := _inside(value)) is not None:
            todo += inside
        elif kind.__module__.partition(".")[0] not in HARMLESS:
            hidden = kind
    return hidden


def _inside(value: Any) -> Sequence[Any] | None:
    """The parts of a container, or of a tensor that torch does not note as a whole; None for other objects."""
    if isinstance(value, torch.Tensor):
        if flatten := getattr(value, "__tensor_flatten__", None):  # a subclass that wraps others
            return [getattr(value, name) for name in flatten()[0]]
        names = ("values",) if value.is_nested else PARTS.get(value.layout, ())
        return [getattr(value, name)() for name in names] or None
    if isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, Sequence | AbstractSet):
        inside = [*value]
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return None
    return [*inside, *getattr(value, "__dict__", {}).values()]


class InlineQueue:
    """Hands out batches in host memory, in order. Only the consumer's thread calls it."""

    waited: Wait | None = None  # how long the device waited for data; None if it has no streams
    ready = 0  # batches on the device, or on their way there
    transform_s = 0.0  # seconds of ``device_transform`` in the last `take`; 0 if a stream runs it

    def __init__(self, feed: Feed, depth: int, transform: Transform | None) -> None:
        self.feed = feed
        #: Batches copied ahead. It can be set at any time: batches on their way are handed out all the same.
        self.depth = depth
        self._transform = transform
        if transform is None:
            self.take = feed.lend  # type: ignore[assignment,method-assign]  # saves a call for each batch

    def take(self, key: BatchIndex) -> Batch:
        assert self._transform is not None
        batch = self.feed.lend(key)
        began = time.perf_counter()
        try:
            return self._transform(batch, key)
        finally:
            self.transform_s = time.perf_counter() - began

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:  # noqa: ARG002
        """Start to read the batches from ``key`` on, and with ``copy`` to copy them. Never blocks."""
        if self.depth:
            self.feed.prefetch(key)

    def close(self) -> None:
        """Wait for copies that are under way, and drop everything."""


# Queues that were closed while a graph was recorded: another queue waits for their copies later.
UNFINISHED: list[StreamQueue] = []
# Queues whose batches hide memory of side: any queue may get that memory when such a batch is dropped.
UNNOTED: weakref.WeakSet[StreamQueue] = weakref.WeakSet()


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
    host: HostBatch | None = None  # of a batch for which the device had no memory yet: `take` copies it
    ready: Any = None
    batch: Batch = None
    error: BaseException | None = None


class StreamQueue(InlineQueue):
    """Copies batches to a device while it computes."""

    def __init__(self, feed: Feed, streams: Streams, depth: int, transform: Transform | None) -> None:
        # Without that of the class above, which may replace `take`.
        self.feed, self.depth, self._transform, self.streams = feed, depth, transform, streams
        self._clock = DeviceClock(streams)
        self.tickets: collections.deque[Ticket] = collections.deque()  # batches on their way to the device, in order
        # Batches whose host memory side may still read, in the order of the copies.
        self.copying: collections.deque[HostBatch] = collections.deque()
        self._most = math.inf  # the most batches ahead for which the device has memory, as far as known
        self._told = False  # whether a warning has named objects that hide their memory

    @property
    def ready(self) -> int:  # type: ignore[override]
        count = 0  # a loop: a generator would be a call for each ticket
        for ticket in self.tickets:
            count += ticket.ready is not None and ticket.error is None
        return count

    @property
    def waited(self) -> Wait:  # type: ignore[override]
        return self._clock.waited

    def take(self, key: BatchIndex) -> Batch:
        self._clock.read(asked=True)
        if self.tickets and self.tickets[0].key != key:
            self._forget()
        if not self.tickets:
            self.tickets.append(self._reserved(key))
        ticket = self.tickets[0]  # it stays there while side may write to its memory
        if ticket.ready is None and ticket.error is None:
            self.reclaim(block=True)
            try:
                host, ticket.host = ticket.host or self.feed.get(key), None
                self._submit(ticket, host)
                if len(self.tickets) > 1 and self._begins_anew(ticket):
                    self._copy_less(0)  # the batches behind have reserved the memory that this one needs
                    host, ticket.host = ticket.host or host, None
                    self._submit(ticket, host)
            except Exception:
                self._drop_first(ticket)
                raise
        if ticket.error is not None:
            self._drop_first(ticket)
            error, ticket.error = ticket.error, None
            try:
                raise error
            finally:
                del error, ticket  # see `LentFeed.lend`
        batch = self._handed_out(ticket)
        if self.tickets:  # else another thread has closed the loader
            self.tickets.popleft()
        return batch

    def _drop_first(self, ticket: Ticket) -> None:
        self._let_go(ticket)
        if self.tickets:
            self.tickets.popleft()

    def prefetch(self, key: BatchIndex, *, copy: bool = True) -> None:
        if self.streams.capturing:
            return  # a copy would become part of the user's CUDA graph, or break it; the next hook tries again
        if self.tickets and self.tickets[0].key != key:
            self._forget()
        if not copy:
            if self.depth and not self.tickets:  # else the batches behind are being read
                self.feed.prefetch(key)
            return
        for _ in UNFINISHED[:]:
            UNFINISHED.pop(0).close()
        self.reclaim(block=False)
        try:
            while len(self.tickets) < min(self.depth, self._most):
                self.tickets.append(self._reserved(self.tickets[-1].following if self.tickets else key))
        except torch.OutOfMemoryError:
            self._copy_less(len(self.tickets))
        for ticket in self.tickets:
            if ticket.ready is None and ticket.error is None and not self._submitted_ahead(ticket):
                return
        if self.tickets or self.depth:
            self.feed.prefetch(self.tickets[-1].following if self.tickets else key)

    def _submitted_ahead(self, ticket: Ticket) -> bool:
        """Submit a batch if it has been read; returns whether the next ticket may follow."""
        host = self.feed.poll(ticket.key) if ticket.host is None else None
        if host is None:
            self.feed.prefetch(ticket.key if ticket.host is None else ticket.following)
            return False
        self._submit(ticket, host)
        if ticket.error is None:
            return True
        if self._begins_anew(ticket):
            self._copy_less(len(self.tickets) - 1)
            self.feed.prefetch(ticket.following)
        elif ticket.ready is None and isinstance(ticket.error, StopIteration):
            self._drop_after(ticket)  # no batch after the end needs the memory
        else:
            return True
        return False

    def _begins_anew(self, ticket: Ticket) -> bool:
        """Whether the device had no memory for a batch; prepares it to be submitted again, without the ones behind."""
        if ticket.ready is None or not isinstance(ticket.error, torch.OutOfMemoryError):
            return False
        self._drop_after(ticket)
        # The error would keep the memory that its traceback refers to.
        ticket.host, ticket.error, ticket.ready = self.copying.pop(), None, None
        return True

    def _drop_after(self, ticket: Ticket) -> None:
        while self.tickets[-1] is not ticket:
            self.tickets.pop()

    def _copy_less(self, batches: int) -> None:
        """Copy at most these ``batches`` ahead: the loop needs only one at a time."""
        if self._most == math.inf:
            log.warning("the device has no memory for more: batches are copied ahead as with device_depth=%d", batches)
        self._most = batches

    def close(self) -> None:
        if self.streams.capturing:  # a wait would break the user's CUDA graph
            UNFINISHED.append(self)
            return
        try:
            self._wait_for_compute()  # it may still read the last objects that hide their memory
            UNNOTED.discard(self)
            # Wait for all of side: an interrupt may have come before an event was recorded.
            self.streams.happened(self.streams.record(self.streams.side), block=True)
            self.copying.extend(ticket.host for ticket in self.tickets if ticket.host is not None)
            self.tickets.clear()
            with contextlib.suppress(IndexError):  # the loop may take the last one at the same time
                while self.copying:
                    self.copying.popleft().release()
        except RuntimeError as error:  # the device is in trouble; the rest must be closed all the same
            log.warning("waiting for copies to the device failed: %s", error)

    def _reserved(self, key: BatchIndex) -> Ticket:
        ticket, buffers = Ticket(key, self.feed.following(key)), self.feed.buffers(key)
        if buffers is not None:
            self._reserve(ticket, buffers)
        return ticket

    def _reserve(self, ticket: Ticket, buffers: DeviceBuffers) -> None:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING:
            ticket.raw = {}
            for name, (shape, dtype) in buffers.large.items():
                ticket.raw[name] = self.streams.empty(shape, dtype)
            ticket.block = None if buffers.block is None else self.streams.empty((buffers.block,), torch.uint8)
        ticket.buffers, ticket.allocated = buffers, self.streams.record(self.streams.compute())

    def _submit(self, ticket: Ticket, host: HostBatch) -> None:
        if host.error is not None:
            ticket.error, host.error = host.error, None  # frames in its traceback refer to ``host``
            ticket.raw, ticket.block = {}, None  # nothing will be copied there
            return
        ticket.unpack = host.unpack
        streams, clock = self.streams, self._clock
        self.copying.append(host)
        try:
            with torch.profiler.record_function(COPY) if profiled() else NOTHING:
                try:
                    if ticket.buffers != (buffers := host.known or host.buffers):
                        self._reserve(ticket, buffers)
                    streams.wait(streams.side, ticket.allocated)
                    clock.copies, clock.copied_bytes = clock.copies + 1, clock.copied_bytes + host.nbytes
                    began = streams.timed(streams.side) if clock.copies % TIMED == 2 else None
                    with streams.on_side():
                        for name, destination in ticket.raw.items():
                            streams.copy(destination, host.large[name])
                        if ticket.block is not None:
                            assert host.block is not None
                            streams.copy(ticket.block, host.block)
                    if began is not None:
                        clock.copied(began, host.nbytes)
                    if host.movable:
                        self._move(ticket, host.movable)
                finally:
                    host.done = streams.record(streams.side)
            if self._transform is not None:
                self._wait_for_compute()
                for tensor in (*ticket.raw.values(), ticket.block):
                    if tensor is not None:
                        streams.record_stream(tensor, streams.side)
                with no_inference(), streams.on_side():
                    batch = host.unpack(Arrived(ticket.raw, ticket.block, ticket.moved), self._cloned)
                    ticket.batch = self._transform(batch, ticket.key)
                    del batch
                ticket.raw, ticket.block, ticket.moved, ticket.unpack = {}, None, {}, None
        except Exception as error:  # noqa: BLE001  # raised when it is this batch's turn
            ticket.error = error
        ticket.ready = streams.record(streams.side)

    def _move(self, ticket: Ticket, movable: Mapping[str, Any]) -> None:
        self._wait_for_compute()
        # Always, since this also turns gradients on, which must not depend on the moment of the copy.
        with torch.inference_mode(False), self.streams.on_side():
            ticket.moved = {name: self.streams.moved(value) for name, value in movable.items()}

    def _wait_for_compute(self) -> None:
        """Wait before side allocates, if compute may still read memory that objects hide."""
        if UNNOTED:
            self.streams.wait(self.streams.side, self.streams.record(self.streams.compute()))

    def _handed_out(self, ticket: Ticket) -> Batch:
        compute = self.streams.compute()
        self.streams.wait(compute, ticket.ready)
        self._clock.came(first=ticket.key.step == 0)
        batch = of_side = ticket.batch
        if self._transform is None:
            assert ticket.unpack is not None
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING:
                batch = ticket.unpack(Arrived(ticket.raw, ticket.block, ticket.moved), self._cloned)
            of_side = ticket.moved
            if not ticket.moved:
                return batch
        hidden = note_all(of_side, lambda value: self.streams.record_stream(value, compute))
        if hidden is not None:
            UNNOTED.add(self)
            what = "no tensor is found in %s: transforms wait for steps, unless it has record_stream"
            log.log(logging.DEBUG if self._told else logging.WARNING, what, hidden.__name__)
            self._told = True
        return batch

    def _cloned(self, tensor: torch.Tensor) -> torch.Tensor:
        clone = self.streams.empty(tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            self.streams.copy(clone, tensor)
        return clone

    def reclaim(self, *, block: bool) -> None:
        """Release host memory after its copies; with ``block``, wait for copies while the feed has no room."""
        while self.copying and self.streams.happened(self.copying[0].done, block=block and not self.feed.has_room):
            self.copying.popleft().release()

    def _forget(self) -> None:
        for ticket in self.tickets:
            self._let_go(ticket)
        self.tickets.clear()

    def _let_go(self, ticket: Ticket) -> None:
        """Have compute wait before a ticket is dropped: a copy may still write to its memory, which compute gets."""
        if ticket.host is not None:  # its copies may be under way
            ticket.ready = ticket.host.done = self.streams.record(self.streams.side)
            self.copying.append(ticket.host)
        if ticket.ready is not None:
            self.streams.wait(self.streams.compute(), ticket.ready)
