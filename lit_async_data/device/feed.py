"""`Feed`: where `StreamQueue` gets its batches; and `HostBatch`, one that is ready to be copied to a device.

The queue knows what must wait for what, and nothing of where batches come from: slots that a pipeline fills, or
whatever somebody else's loader makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from lit_async_data.device.inline_queue import Batch
from lit_async_data.order.plan import BatchIndex

# A tensor with the same values in memory of its own, made on the current stream.
Cloned = Callable[[torch.Tensor], torch.Tensor]


class DeviceBuffers(NamedTuple):
    """What a batch takes on the device.

    Attributes:
        large: Shape and element type of each tensor that has a copy of its own, by name.
        block: Bytes of the block in which small tensors travel together; None if there are none.
    """

    large: dict[str, tuple[tuple[int, ...], torch.dtype]]
    block: int | None


class Arrived(NamedTuple):
    """What a batch is put together from, on the device.

    Attributes:
        large: The tensors that had a copy of their own.
        block: The block of small ones, uint8; None if there are none.
        own: What objects that move themselves have become.
    """

    large: Mapping[str, torch.Tensor]
    block: torch.Tensor | None
    own: Mapping[str, Any]


def _nothing() -> None:
    pass


def _none(arrived: Arrived, cloned: Cloned) -> Batch:  # noqa: ARG001
    return None


@dataclasses.dataclass
class HostBatch:
    """A batch in host memory, or the error that came instead.

    Attributes:
        large: Tensors that are copied each by itself, by name.
        block: Small ones, in one piece of memory, uint8.
        own: Objects that are moved by their own ``to(device)``, by name.
        unpacked: Makes the batch of what arrived, on the current stream.
        release: Called once, when the copies have happened: nobody reads the host memory any more.
        error: What is to be raised in its place.
        nbytes: Bytes of its tensors.
    """

    large: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    block: torch.Tensor | None = None
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unpacked: Callable[[Arrived, Cloned], Batch] = _none
    release: Callable[[], None] = _nothing
    error: BaseException | None = None
    nbytes: int = 0

    @property
    def room(self) -> DeviceBuffers:
        """What it takes on the device."""
        large = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.large.items()}
        return DeviceBuffers(large, None if self.block is None else self.block.numel())


class Feed(Protocol):
    """Gives batches in order. All calls come from the consumer's thread."""

    def room(self, key: BatchIndex) -> DeviceBuffers | None:
        """What the batch of a key will take on the device, if that can be told or guessed before it is there."""
        ...

    def following(self, key: BatchIndex) -> BatchIndex:
        """The key that comes after a key."""
        ...

    def prefetch(self, key: BatchIndex) -> None:
        """See to it that the batches from ``key`` on are being read. Never blocks on storage."""
        ...

    def poll(self, key: BatchIndex) -> HostBatch | None:
        """The batch of a key if it is there; it is then the caller's, who releases it."""
        ...

    def get(self, key: BatchIndex) -> HostBatch:
        """The batch of a key, waiting for it; as `poll`."""
        ...
