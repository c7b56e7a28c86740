"""`Packer`: makes a batch of any form ready to be copied to a device.

It packs pageable tensors into one pinned block: large ones, which are copied by themselves, and small ones side by
side, which travel together. Pinned tensors are copied from their own memory. Other objects with ``to`` (a subclass of
Tensor, a sparse tensor, one that requires a gradient) move themselves in their batch's turn. All other objects are
handed on unchanged. On the device a tensor has the strides that ``tensor.to(device)`` would give it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lit_async_data.batch.spec import ALIGNMENT, SMALL_BYTES, Bytes
from lit_async_data.batch.tree import flatten, rebuilt
from lit_async_data.engine.device.feeds import Arrived, Batch, Clone, HostBatch, moves
from lit_async_data.engine.resources.memory import pinned_bytes, readable

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Unpacked(HostBatch):
    """A batch that the consumer's thread must pack, since that calls the device."""

    batch: Batch = None


class Packer:
    """Packs the batches of one loader."""

    def __init__(
        self, staging: PinnedBufferPool, is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
    ) -> None:
        self._staging = staging
        self._is_pinned = is_pinned
        # The places of pinned tensors in the first batch. A later tensor there may be pageable: its copy is slower.
        self._pinned: frozenset[str] | None = None

    @property
    def has_room(self) -> bool:
        return self._staging.has_room

    def __call__(self, batch: Batch, *, here: bool) -> HostBatch:
        """Pack a batch. ``here``: in the consumer's thread, which may call the device; else it may stay `Unpacked`."""
        leaves, skeleton = flatten(batch, moves)
        with torch.inference_mode(False):  # blocks that are written in inference mode could not be reused
            tensors = {place: dense(leaf) for place, leaf in leaves.items() if is_plain(leaf)}
            if self._pinned is None and tensors:
                if not here:
                    return Unpacked(batch=batch)
                self._pinned = frozenset(place for place in tensors if self._is_pinned(tensors[place]))
            pinned = {place: flat(tensor) for place, tensor in tensors.items() if place in (self._pinned or ())}
            forms = {at: TensorForm(each.shape, each.stride(), each.dtype, each.nbytes) for at, each in tensors.items()}
            layout = PackedLayout.of({place: form.nbytes for place, form in forms.items() if place not in pinned})
            host = HostBatch(
                pinned,
                movable={place: leaf for place, leaf in leaves.items() if place not in tensors},
                unpack=functools.partial(_unpacked, skeleton, forms, layout),
                nbytes=sum(form.nbytes for form in forms.values()),
            )
            if layout.end:
                block = self._staging.claim(layout.end, allocate=here)
                if block is None:
                    assert not here
                    return Unpacked(batch=batch)
                self._pack(host, tensors, forms, layout, block)
        host.known = host.buffers  # computed here, beside training
        return host

    def _pack(
        self,
        host: HostBatch,
        tensors: Mapping[str, torch.Tensor],
        forms: Mapping[str, TensorForm],
        layout: PackedLayout,
        block: Bytes,
    ) -> None:
        staging = self._staging
        try:
            memory, large = torch.from_numpy(block), dict(host.large)
            for place, offset in layout.offsets.items():
                end = offset + forms[place].nbytes
                # With numpy, in this thread alone: torch would use several threads, beside training.
                block[offset:end] = raw_bytes(tensors[place])
                if offset < layout.small_start:
                    large[place] = memory[offset:end].view(forms[place].dtype)
        except BaseException:
            staging.give_back(block)  # nobody else will
            raise
        host.large, host.release = large, functools.partial(staging.give_back, block)
        if layout.small_start < layout.end:
            host.block = memory[layout.small_start : layout.end]


class PackedLayout(NamedTuple):
    """The places of tensors in a block, in bytes, aligned: large ones first, then small ones."""

    offsets: dict[str, int]
    small_start: int
    end: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> PackedLayout:
        offsets: dict[str, int] = {}
        end, small_start = 0, None
        for place, size in sorted(sizes.items(), key=lambda item: item[1] <= SMALL_BYTES):
            if size <= SMALL_BYTES and small_start is None:
                small_start = end
            offsets[place] = end
            # At least one unit, so that a batch of empty tensors has a block, too.
            end += max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        return PackedLayout(offsets, end if small_start is None else small_start, end)


def _unpacked(
    skeleton: Any, forms: Mapping[str, TensorForm], layout: PackedLayout, arrived: Arrived, clone: Clone
) -> Batch:
    leaves, large, block = dict(arrived.moved), arrived.large, arrived.block
    for place, (shape, stride, dtype, nbytes) in forms.items():
        if place in large:
            values = large[place]
        else:
            assert block is not None
            first = layout.offsets[place] - layout.small_start
            values = clone(block[first : first + nbytes])
        leaves[place] = values.view(dtype).as_strided(shape, stride)
    return rebuilt(skeleton, leaves)


def is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_nested)
    )


class TensorForm(NamedTuple):
    """How a flat row of values becomes a tensor without gaps and overlaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: torch.dtype
    nbytes: int


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy without gaps and overlaps, with the strides that ``tensor.to(device)`` gives it."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_contiguous() or plain.stride() == torch.empty_like(plain, device="meta").stride():
        return plain
    return plain.clone()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    return flat(tensor).view(torch.uint8).numpy()


class PinnedBufferPool:
    """At most ``most`` blocks of pinned memory, which can be set at any time. Thread-safe."""

    def __init__(self, allocate: Callable[[int], Bytes], most: int) -> None:
        self._allocate = allocate
        self.most = most
        # Reentrant: garbage collection can end a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self._free: list[Bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        with self._lock:
            return bool(self._free) or self._count < self.most

    def claim(self, nbytes: int, *, allocate: bool) -> Bytes | None:
        """A free block of at least this size, or None. ``allocate``: on the consumer's thread, which may.

        The first such call allocates all blocks; if the free ones are too small, it replaces them all.
        """
        with self._lock:
            fitting = [number for number, block in enumerate(self._free) if len(block) >= nbytes]
            if fitting:  # the block that came back last may still be in the processor's cache
                return self._free.pop(fitting[-1])
            if not allocate or not (self._free or self._count < self.most):
                return None
            self._count -= len(self._free)
            self._free.clear()
            size = max(pinned_bytes(nbytes), ALIGNMENT)
            log.info("%d pinned blocks of %s for batches to be packed into", self.most - self._count, readable(size))
            while self._count < self.most or not self._free:  # fewer may be allowed than are in use
                self._free.append(self._allocate(size))
                self._count += 1
            return self._free.pop()

    def give_back(self, block: Bytes) -> None:
        with self._lock:
            if self._count > self.most:
                self._count -= 1
            else:
                self._free.append(block)
