"""`Packer`: makes a batch of any form ready to be copied to a device.

Pageable tensors are packed into one pinned block: large ones each aligned, to be copied each by itself, small ones side
by side, to travel together. Tensors that came pinned are copied from where they are. Whatever else knows how to move
itself (a tensor of a class of its own, a sparse one, one that requires a gradient, any object with ``to``) does so when
its turn comes. The rest is handed on as it is; so is an object whose ``to`` takes a unit or a time zone.

On the device a tensor has the strides that ``tensor.to(device)`` would give it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from lit_async_data.batch.spec import ALIGNMENT, SMALL_BYTES, Bytes
from lit_async_data.batch.tensor_layout import TensorLayout, dense, flat, raw_bytes
from lit_async_data.batch.tree import flatten, rebuilt
from lit_async_data.device.feed import Arrived, Batch, Clone, HostBatch
from lit_async_data.prefetch.pinned_buffers import PinnedBufferPool

T = TypeVar("T")
# How the first argument of a method ``to`` is called where that converts an object to something else than a device:
# the units of pint, astropy and unyt, time zones, currencies.
OTHER_TARGETS = ("unit", "other", "tz", "timezone", "currency")
# Has the consumer's thread do something, again and again until it gives anything but None, and returns that.
Ask = Callable[[Callable[[], T | None]], T]


class Packer:
    """Packs the batches of one loader. Makes no call to the device itself, but asks for what must be.

    Args:
        staging: The blocks.
        is_pinned: Whether a tensor is; asked of those of the first batch, on the consumer's thread.
    """

    def __init__(
        self, staging: PinnedBufferPool, is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
    ) -> None:
        self._staging = staging
        self._is_pinned = is_pinned
        # Places in the batch at which tensors come pinned. Should that be wrong about a tensor of a later batch, it is
        # copied from pageable memory, which is slower, and as right.
        self._pinned: frozenset[str] | None = None

    def __call__(self, batch: Batch, ask: Ask[Any]) -> HostBatch:
        """Make a batch ready.

        Args:
            batch: Anything.
            ask: For what only the consumer's thread may do.

        Returns:
            What is to be copied; to be released when it has been.
        """
        leaves, skeleton = flatten(batch, moves)
        with torch.inference_mode(False):  # blocks are written to in whatever mode the next batch is read
            tensors = {place: dense(leaf) for place, leaf in leaves.items() if is_plain(leaf)}
            if self._pinned is None and tensors:
                self._pinned = ask(lambda: frozenset(place for place in tensors if self._is_pinned(tensors[place])))
            pinned = {place: flat(tensor) for place, tensor in tensors.items() if place in (self._pinned or ())}
            content = _Content(
                skeleton,
                forms := {place: TensorLayout.of(tensor) for place, tensor in tensors.items()},
                PackedLayout.of({place: form.nbytes for place, form in forms.items() if place not in pinned}),
            )
            host = HostBatch(
                pinned,
                movable={place: leaf for place, leaf in leaves.items() if place not in tensors},
                unpack=content.unpack,
                nbytes=sum(form.nbytes for form in forms.values()),
            )
            if content.layout.end:
                self._pack(host, tensors, content, ask)
        return host

    def _pack(self, host: HostBatch, tensors: Mapping[str, torch.Tensor], content: _Content, ask: Ask[Bytes]) -> None:
        """Copy what is pageable into a block."""
        layout, staging = content.layout, self._staging
        block = staging.claim(layout.end)
        if block is None:
            block = ask(lambda: staging.provide(layout.end))
        try:
            self._fill(block, host, tensors, content)
        except BaseException:
            staging.give_back(block)  # nobody else will
            raise
        host.release = functools.partial(staging.give_back, block)

    @staticmethod
    def _fill(block: Bytes, host: HostBatch, tensors: Mapping[str, torch.Tensor], content: _Content) -> None:
        layout = content.layout
        memory = torch.from_numpy(block)
        host.large = dict(host.large)
        for place, offset in layout.offsets.items():
            end = offset + content.forms[place].nbytes
            # By numpy, in this thread alone: torch would share the work among threads of its own, beside training.
            block[offset:end] = raw_bytes(tensors[place])
            if place not in layout.small:
                host.large[place] = memory[offset:end].view(content.forms[place].dtype)
        if layout.small:
            host.block = memory[layout.small_start : layout.end]


class PackedLayout(NamedTuple):
    """Where tensors lie in a block, each aligned: large ones first, then small ones.

    Attributes:
        offsets: In bytes, by place in the batch.
        small: Which are small.
        small_start: Where those begin.
        end: Bytes in all; 0 if there are no tensors.
    """

    offsets: dict[str, int]
    small: frozenset[str]
    small_start: int
    end: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> PackedLayout:
        """A layout for tensors of so many bytes.

        Example:
            >>> layout = PackedLayout.of({"y": 8, "x": 100_000})
            >>> layout.offsets, layout.small_start, layout.end
            ({'x': 0, 'y': 100352}, 100352, 100864)
        """
        small = [place for place, size in sizes.items() if size <= SMALL_BYTES]
        offsets: dict[str, int] = {}
        small_start = _laid((place for place in sizes if sizes[place] > SMALL_BYTES), sizes, offsets, 0)
        return PackedLayout(offsets, frozenset(small), small_start, _laid(small, sizes, offsets, small_start))


def _laid(places: Iterable[str], sizes: Mapping[str, int], offsets: dict[str, int], end: int) -> int:
    for place in places:
        offsets[place] = end
        # At least one unit, so that a batch of empty tensors has a block to be made of.
        end += max(-(-sizes[place] // ALIGNMENT), 1) * ALIGNMENT
    return end


@dataclasses.dataclass(frozen=True)
class _Content:
    """How a batch is put together again; holds no tensor of it.

    Attributes:
        skeleton: The batch without its leaves.
        forms: Of its tensors, by place.
        layout: Where those lie that were packed.
    """

    skeleton: Any
    forms: dict[str, TensorLayout]
    layout: PackedLayout

    def unpack(self, arrived: Arrived, clone: Clone) -> Batch:
        leaves = dict(arrived.moved)
        for place, form in self.forms.items():
            if place in arrived.large:
                values = arrived.large[place]
            else:
                assert arrived.block is not None
                offset = self.layout.offsets[place] - self.layout.small_start
                values = clone(arrived.block[offset : offset + form.nbytes])
            leaves[place] = form(values)
        return rebuilt(self.skeleton, leaves)


def moves(value: Any) -> bool:
    """Whether something in a batch goes to the device: a tensor, or an object whose method ``to`` takes a device."""
    kind: Any = type(value)
    return isinstance(value, torch.Tensor) or _takes_device(kind)


@functools.lru_cache(maxsize=256)
def _takes_device(kind: type) -> bool:
    to = getattr(kind, "to", None)
    if not callable(to):
        return False
    try:
        names = list(inspect.signature(to).parameters)
    except (TypeError, ValueError):  # of methods that are not written in Python, not all have a signature
        return True
    first = names[1] if len(names) > 1 else ""
    return "device" in names or not first.startswith(OTHER_TARGETS)


def is_plain(value: Any) -> bool:
    """Whether something is a tensor that is no more than values in host memory."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_nested)
    )
