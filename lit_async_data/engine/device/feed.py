"""`Feed`: where a device queue gets its batches; and `HostBatch`, a batch in host memory that is ready to be copied.

A queue knows which stream waits for which, and nothing about where batches come from: slots that a `Pipeline` fills, or
whatever somebody else's loader yields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from lit_async_data.batch.tree import flatten, rebuilt
from lit_async_data.engine.stats import LoaderStats
from lit_async_data.order.plan import BatchIndex

Batch = Any
# Copies a tensor, on the current stream.
Clone = Callable[[torch.Tensor], torch.Tensor]


# Names of the first parameter of methods ``to`` that convert to something other than a device: units (pint, astropy,
# unyt), time zones, currencies.
OTHER_TARGETS = ("unit", "other", "tz", "timezone", "currency")


class DeviceBuffers(NamedTuple):
    """The device memory that a batch takes."""

    large: dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each tensor that is copied by itself, by name
    block: int | None  # bytes of the block in which small tensors travel together; None if there are none


class Arrived(NamedTuple):
    """The parts of a batch on the device."""

    large: Mapping[str, torch.Tensor]  # that were copied by themselves
    block: torch.Tensor | None  # of small tensors, uint8; None if there are none
    moved: Mapping[str, Any]  # objects that moved themselves with their own ``to(device)``


@dataclasses.dataclass
class HostBatch:
    """A batch in host memory, or the error that came instead."""

    large: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # to be copied by themselves, by name
    block: torch.Tensor | None = None  # small tensors in one piece of memory, uint8
    # Objects to be moved by their own ``to(device)``, by name.
    movable: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Assembles the batch from its parts on the device, on the current stream.
    unpack: Callable[[Arrived, Clone], Batch] = lambda *_: None
    # Called once, when the copies have completed: nobody reads the host memory any more.
    release: Callable[[], None] = lambda: None
    error: BaseException | None = None  # raised in place of the batch
    nbytes: int = 0  # of its tensors
    known: DeviceBuffers | None = None  # the device memory that it takes, where that is known already

    @property
    def buffers(self) -> DeviceBuffers:
        if self.known is not None:
            return self.known
        large = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.large.items()}
        return DeviceBuffers(large, None if self.block is None else self.block.numel())


class Feed(Protocol):
    """Yields batches in order. All calls come from the consumer's thread."""

    def following(self, key: BatchIndex) -> BatchIndex: ...

    def prefetch(self, key: BatchIndex) -> None:
        """Have the batches from ``key`` on read ahead. Never blocks on storage."""

    @property
    def ready(self) -> int:
        """Batches that have been read and wait on the host."""
        ...

    @property
    def depth(self) -> int: ...

    def stats(self) -> LoaderStats:
        """What has been read so far: ``read``, ``copied``, ``workers`` and ``slots``."""
        ...

    def check(self) -> None:
        """Raise the error that prevents the next batch: the feed is closed, or belongs to another process."""

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that built the feed: its threads do not exist here."""
        ...

    def rest(self, *, wait: bool) -> None:
        """End the pass; ``wait`` for a read that does not return, however long it takes, or a few seconds at most."""

    def close(self, *, wait: bool = False) -> None:
        """End the threads and give all memory back. Idempotent, also after an interrupt. See `rest`."""


class LendingFeed(Feed, Protocol):
    """Hands out batches in host memory."""

    def lend(self, key: BatchIndex) -> Batch:
        """A batch in host memory, waiting for it. Raises the error that came instead of it."""


class CopyingFeed(Feed, Protocol):
    """Hands out batches that are to be copied; whoever takes one releases it."""

    def buffers(self, key: BatchIndex) -> DeviceBuffers | None:
        """The device memory that a batch will take; None if that is unknown before the batch has been read."""

    def poll(self, key: BatchIndex) -> HostBatch | None:
        """A batch if it has been read, else None."""

    def get(self, key: BatchIndex) -> HostBatch: ...

    @property
    def has_room(self) -> bool:
        """Whether `get` can succeed before any batch is released."""
        ...


def moves(value: Any) -> bool:
    """Whether a value goes to the device: a tensor, or an object whose method ``to`` takes a device."""
    kind: Any = type(value)
    return isinstance(value, torch.Tensor) or _takes_device(kind)


@functools.lru_cache(maxsize=256)
def _takes_device(kind: type) -> bool:
    to = getattr(kind, "to", None)
    if not callable(to):
        return False
    try:
        names = list(inspect.signature(to).parameters)
    except (TypeError, ValueError):  # some methods written in C have no signature
        return True
    first = names[1] if len(names) > 1 else ""
    return "device" in names or not first.startswith(OTHER_TARGETS)


def moved(device: torch.device, then: Callable[[Any], Any] | None, batch: Any) -> Any:
    """Copies a batch to a device on the current stream, and waits for it."""
    leaves, skeleton = flatten(batch, moves)
    batch = rebuilt(skeleton, {place: leaf.to(device) for place, leaf in leaves.items()})
    return batch if then is None else then(batch)
