"""`CopyVerifier`: proves that the first batches reach the training step, and stay there, as they were read.

The verifier takes three checksums of each field of these batches:

1. in host memory, just before the copy is enqueued;
2. on the device, at hand-over: a kernel on compute, enqueued after compute has been told to wait for the batch;
3. again on the device, at release, which is when the next batch is asked for: a kernel enqueued behind the step.

A device transform makes other values from the copy. Then side computes two checksums more: of the copy, before the
transform, which must be equal to 1.; and of the result, to which 2. and 3. must be equal.

The verifier compares when the last of these batches is released, and with the first batch of an epoch. To compare
earlier would make the host wait for the device, and hide the very races that the verifier is to find. It holds each
batch until its release. Then the last kernel that was enqueued reads the whole batch, and its memory is free: a copy
into it that does not wait for that kernel changes the checksum. The verifier does not find a fault that needs the step
to drop its batch early, since it holds the batch itself.

`CopyVerifier.feed`, `CopyVerifier.transform` and `CopyVerifier.queue` wrap the parts of a batch's way, so that a loader
without verification pays nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lit_async_data.device.checksum import checksum
from lit_async_data.device.feed import Arrived, Batch, Clone, Feed, HostBatch
from lit_async_data.device.inline_queue import DeviceQueue
from lit_async_data.device.streams import Streams
from lit_async_data.device.transform import Transform
from lit_async_data.errors import TransferError
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)

Sums = dict[str, Tensor]
When = Literal["hand-over", "release"]
# What the message says about it.
_FOUND: dict[When, str] = {
    "hand-over": "did not arrive as it was read",
    "release": "changed while the step had it, and not by torch",
}


class _Compared(NamedTuple):
    """Sums that must be the same."""

    key: BatchIndex
    when: When
    wanted: Sums
    found: Sums


@dataclasses.dataclass
class _Coming:
    """The checksums of a batch on its way: in host memory, as it arrived, and after the transform."""

    read: Sums
    arrived: Sums | None = None
    made: Sums | None = None


@dataclasses.dataclass
class _Held:
    """A batch that the user has; ``versions`` are torch's counts of changes at hand-over."""

    key: BatchIndex
    fields: dict[str, Tensor]
    versions: dict[str, int]
    sums: Sums


class CopyVerifier:
    """Verifies the first batches of a loader. For one thread, that of the queue.

    Args:
        batches: How many.
        streams: The device; None where it has no streams, and batches are handed out in host memory.
    """

    def __init__(self, batches: int, streams: Streams | None = None) -> None:
        self._left = batches
        self._streams = streams
        self._coming: dict[BatchIndex, _Coming] = {}
        self._held: _Held | None = None
        self._compared: list[_Compared] = []

    @property
    def left(self) -> int:
        """Batches that are still to be verified."""
        return self._left

    def feed(self, feed: Feed) -> Feed:
        """The same batches; this verifier sees each in host memory, and when it arrives."""
        return cast(Feed, _VerifiedFeed(feed, self))

    def transform(self, transform: Transform) -> Transform:
        """The same transform; this verifier sees each result."""

        def verified(batch: Batch, key: BatchIndex) -> Batch:
            made = transform(batch, key)
            self.made(key, made)
            return made

        return verified

    def queue(self, queue: DeviceQueue) -> DeviceQueue:
        """The same queue; this verifier sees what is handed over and released."""
        return cast(DeviceQueue, _VerifiedQueue(queue, self))

    # -- called by these wrappers ------------------------------------------------------------------------------------

    def read(self, key: BatchIndex, fields: Any) -> None:
        """A batch lies in host memory, and nobody has touched it yet.

        Args:
            key: Its index.
            fields: A nested batch of tensors, as in the other methods.
        """
        if self._left:
            self._coming[key] = _Coming({name: checksum(tensor) for name, tensor in _tensors(fields)})

    def arrived(self, key: BatchIndex, fields: Any) -> None:
        """The copy of a batch lies in its destination, in the order of the current stream."""
        if key in self._coming:
            self._coming[key].arrived = self._sums(dict(_tensors(fields)))

    def made(self, key: BatchIndex, batch: Any) -> None:
        """The transform has returned this for it, on the current stream."""
        if key in self._coming:
            self._coming[key].made = self._sums(dict(_tensors(batch)))

    def handed_over(self, key: BatchIndex, batch: Any) -> None:
        """The user has the batch; compute has been told to wait for it."""
        coming = self._coming.pop(key, None)
        if coming is None:
            return
        self._left -= 1
        if not self._left:
            self._coming.clear()  # more were on their way
        fields = dict(_tensors(batch))
        sums = self._sums(fields)
        if coming.arrived is not None:
            self._compared.append(_Compared(key, "hand-over", coming.read, coming.arrived))
        if coming.made is not None:
            self._compared.append(_Compared(key, "hand-over", coming.made, sums))
        versions = {name: tensor._version for name, tensor in fields.items()}  # noqa: SLF001  # it has no other name
        self._held = _Held(key, fields, versions, coming.made or sums)

    def released(self, upcoming: BatchIndex) -> None:
        """The user asks for the next batch.

        Args:
            upcoming: Its index.

        Raises:
            TransferError: See `settle`, if it is time to compare.
        """
        self._release()
        if not self._left or upcoming.step == 0:
            self.settle()

    def settle(self) -> None:
        """Compare all checksums; the host waits for the device, if there are any.

        Raises:
            TransferError: A batch is not what was read; names its fields, step and epoch.
        """
        self._release()
        if self._compared and self._streams is not None:
            self._streams.happened(self._streams.record(self._streams.compute()), block=True)
        compared, self._compared = self._compared, []  # the first error is enough, and it is raised once
        for key, when, wanted, found in compared:
            wrong = [name for name, total in found.items() if int(total) != int(wanted[name])]
            if wrong:
                raise _error(key, when, wrong)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        untouched = {
            name: tensor
            for name, tensor in held.fields.items()
            if tensor._version == held.versions[name]  # noqa: SLF001
        }
        self._compared.append(_Compared(held.key, "release", held.sums, self._sums(untouched)))

    def _sums(self, fields: Mapping[str, Tensor]) -> Sums:
        enqueued = checksum if self._streams is None else self._streams.checksum
        return {name: enqueued(tensor) for name, tensor in fields.items()}


class _Wrapper:
    """Hands every attribute of what it wraps on, but for its own."""

    def __init__(self, wrapped: Any, verifier: CopyVerifier) -> None:
        self.wrapped = wrapped
        self.verifier = verifier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class _VerifiedFeed(_Wrapper):
    def lend(self, key: BatchIndex) -> Batch:
        batch = self.wrapped.lend(key)
        self.verifier.read(key, batch)
        self.verifier.arrived(key, batch)
        return batch

    def poll(self, key: BatchIndex) -> HostBatch | None:
        host = self.wrapped.poll(key)
        return None if host is None else self._watched(key, host)

    def get(self, key: BatchIndex) -> HostBatch:
        return self._watched(key, self.wrapped.get(key))

    def _watched(self, key: BatchIndex, host: HostBatch) -> HostBatch:
        if host.error is not None:
            return host
        unpack, verifier = host.unpack, self.verifier
        with torch.inference_mode(False):  # inference tensors are not verified
            verifier.read(key, unpack(Arrived(host.large, host.block, host.movable), _uncloned))

        def watched(arrived: Arrived, clone: Clone) -> Batch:
            batch = unpack(arrived, clone)
            verifier.arrived(key, batch)
            return batch

        host.unpack = watched
        return host


class _VerifiedQueue(_Wrapper):
    @property
    def depth(self) -> int:
        return int(self.wrapped.depth)

    @depth.setter
    def depth(self, depth: int) -> None:
        self.wrapped.depth = depth

    def take(self, key: BatchIndex) -> Batch:
        self.verifier.released(key)
        batch = self.wrapped.take(key)
        self.verifier.handed_over(key, batch)
        return batch

    def close(self) -> None:
        self.wrapped.close()
        try:
            self.verifier.settle()
        except RuntimeError as error:  # the device is in trouble; the rest must be closed all the same
            log.warning("verifying copies failed: %s", error)


def _uncloned(tensor: Tensor) -> Tensor:
    return tensor


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested batch, with their paths in it: ``x``, ``0``, ``1.boxes``."""
    if isinstance(batch, Tensor):
        # Inference tensors do not count changes; sparse, nested and quantized ones have no plain bytes.
        plain = batch.layout == torch.strided and not (batch.is_nested or batch.is_quantized)
        if plain and not batch.is_inference():
            yield name or "the batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            yield from _tensors(value, f"{name}.{place}" if name else str(place))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from _tensors({each.name: getattr(batch, each.name, None) for each in dataclasses.fields(batch)}, name)


def _error(key: BatchIndex, when: When, fields: list[str]) -> TransferError:
    return TransferError(
        f"verify_copies: {', '.join(fields)} of batch {key.step} of epoch {key.epoch} {_FOUND[when]} "
        f"(found at {when}). "
        "Unless your code writes to batches where torch does not see it, as through numpy, that is a fault of this "
        "package or of a driver: please report it with this line; device_depth=0 avoids copies ahead meanwhile",
        stage="copy",
    )
