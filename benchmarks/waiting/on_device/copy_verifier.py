"""`CopyVerifier`: proves that the first batches reach the training step, and stay there, as they were read.

It takes three checksums of each field of these batches:

1. in host memory, just before the copy is enqueued;
2. on the device, at hand-over: a kernel on compute, enqueued after compute has been told to wait for the batch;
3. again on the device, at release, which is when the next batch is asked for: a kernel enqueued behind the step.

A device transform makes other values from the copy. Then side computes two checksums more: of the copy, before the
transform, which must be equal to 1.; and of the result, to which 2. and 3. must be equal.

They are compared when the last of these batches is released, and with the first batch of an epoch: to compare earlier
would make the host wait for the device, and hide the very races that are to be found. Each batch is held until its
release. Then the last kernel that was enqueued reads the whole batch, and its memory is free: a copy into it that does
not wait for that kernel changes the checksum. A fault that needs the step to drop its batch early is not found.

`verified_copies` has all loaders that start within it verified.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import Tensor

from lit_async_data.batch.tree import leaves_in
from lit_async_data.engine.device.feeds import Arrived, Batch, Clone, Feed, HostBatch
from lit_async_data.engine.device.queues import InlineQueue, StreamQueue, Transform
from lit_async_data.engine.device.streams import Streams
from lit_async_data.engine.loader import base_loader
from lit_async_data.order.plan import BatchIndex
from waiting.on_device.checksums import checksum

log = logging.getLogger(__name__)

Sums = dict[str, Tensor]
# What is wrong where sums differ.
ARRIVED = "did not arrive as it was read (found at hand-over)"
CHANGED = "changed while the step had it, and not by torch (found at release)"


class TransferError(Exception):
    """A batch on the device differs from the one read."""


@contextlib.contextmanager
def verified_copies(batches: int) -> Iterator[list[CopyVerifier]]:
    """The first batches of each loader that starts inside are verified; yields the verifiers, one for each start."""
    verifiers = list[CopyVerifier]()

    def wrapped(made: Callable[..., Any]) -> Callable[..., InlineQueue]:
        def build(feed: Feed, *between: Any) -> InlineQueue:
            *given, transform = between
            verifiers.append(verifier := CopyVerifier(batches, given[0] if made is StreamQueue else None))
            return verifier.queue(made(verifier.feed(feed), *given, transform and verifier.transform(transform)))

        return build

    with (
        mock.patch.object(base_loader, "InlineQueue", wrapped(InlineQueue)),
        mock.patch.object(base_loader, "StreamQueue", wrapped(StreamQueue)),
    ):
        yield verifiers


class CopyVerifier:
    """Verifies the first ``batches`` of a loader. For one thread, that of the queue.

    ``streams`` is None where the device has none, and batches are handed out in host memory.
    """

    def __init__(self, batches: int, streams: Streams | None = None) -> None:
        self.left, self.streams = batches, streams
        # The sums of each batch on its way: as it was "read", as it "arrived", and as the transform has "made" it.
        self._coming: dict[BatchIndex, dict[str, Sums]] = {}
        # The batch that the user has, its sums, and torch's counts of changes at hand-over.
        self._held: tuple[BatchIndex, dict[str, Tensor], Sums, dict[str, int]] | None = None
        # Sums that must be equal: what is wrong otherwise, those that are wanted, and those that were found.
        self._compared: list[tuple[BatchIndex, str, Sums, Sums]] = []

    def feed(self, feed: Feed) -> Feed:
        return cast(Feed, _VerifiedFeed(feed, self))

    def transform(self, transform: Transform) -> Transform:
        def verified(batch: Batch, key: BatchIndex) -> Batch:
            made = transform(batch, key)
            self.seen("made", key, made)
            return made

        return verified

    def queue(self, queue: InlineQueue) -> InlineQueue:
        return cast(InlineQueue, _VerifiedQueue(queue, self))

    def read(self, key: BatchIndex, batch: Any) -> None:
        """A nested batch of tensors lies in host memory, and nobody has touched it yet."""
        if self.left:
            self._coming[key] = {"read": {name: checksum(tensor) for name, tensor in _tensors(batch).items()}}

    def seen(self, what: Literal["arrived", "made"], key: BatchIndex, batch: Any) -> None:
        """The copy of a batch, or what the transform made of it, lies in its destination on the current stream."""
        if key in self._coming:
            self._coming[key][what] = self._sums(_tensors(batch))

    def handed_over(self, key: BatchIndex, batch: Any) -> None:
        """The user has the batch; compute has been told to wait for it."""
        coming = self._coming.pop(key, None)
        if coming is None:
            return
        self.left -= 1
        if not self.left:
            self._coming.clear()  # more were on their way
        fields = _tensors(batch)
        sums, made = self._sums(fields), coming.get("made")
        if "arrived" in coming:
            self._compared.append((key, ARRIVED, coming["read"], coming["arrived"]))
        if made is not None:
            self._compared.append((key, ARRIVED, made, sums))
        self._held = key, fields, made or sums, {name: _version(tensor) for name, tensor in fields.items()}

    def released(self, upcoming: BatchIndex) -> None:
        self._release()
        if not self.left or upcoming.step == 0:
            self.settle()

    def settle(self) -> None:
        """Compare all checksums; the host waits for the device, if there are any."""
        self._release()
        if self._compared and self.streams is not None:
            self.streams.happened(self.streams.record(self.streams.compute()), block=True)
        compared, self._compared = self._compared, []  # the first error is enough, and it is raised once
        for key, fault, wanted, found in compared:
            if wrong := [name for name, total in found.items() if int(total) != int(wanted[name])]:
                raise TransferError(f"batch {key.step} of epoch {key.epoch}: {', '.join(wrong)} {fault}")

    def _release(self) -> None:
        if self._held is not None:
            (key, fields, sums, versions), self._held = self._held, None
            untouched = {name: tensor for name, tensor in fields.items() if _version(tensor) == versions[name]}
            self._compared.append((key, CHANGED, sums, self._sums(untouched)))

    def _sums(self, fields: Mapping[str, Tensor]) -> Sums:
        enqueued = getattr(self.streams, "checksum", checksum)  # a simulated device enqueues a kernel of its own
        return {name: enqueued(tensor) for name, tensor in fields.items()}


class _VerifiedFeed:
    def __init__(self, feed: Any, verifier: CopyVerifier) -> None:
        self._feed, self._verifier = feed, verifier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def lend(self, key: BatchIndex) -> Batch:
        batch = self._feed.lend(key)
        self._verifier.read(key, batch)
        self._verifier.seen("arrived", key, batch)
        return batch

    def poll(self, key: BatchIndex) -> HostBatch | None:
        host = self._feed.poll(key)
        return None if host is None else self._watched(key, host)

    def get(self, key: BatchIndex) -> HostBatch:
        return self._watched(key, self._feed.get(key))

    def _watched(self, key: BatchIndex, host: HostBatch) -> HostBatch:
        if host.error is not None:
            return host
        unpack, verifier = host.unpack, self._verifier
        with torch.inference_mode(False):  # inference tensors are not verified
            verifier.read(key, unpack(Arrived(host.large, host.block, host.movable), lambda tensor: tensor))

        def watched(arrived: Arrived, clone: Clone) -> Batch:
            batch = unpack(arrived, clone)
            verifier.seen("arrived", key, batch)
            return batch

        host.unpack = watched
        return host


class _VerifiedQueue:
    def __init__(self, queue: InlineQueue, verifier: CopyVerifier) -> None:
        self.queue, self.verifier = queue, verifier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    @property
    def depth(self) -> int:
        return self.queue.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self.queue.depth = depth

    def take(self, key: BatchIndex) -> Batch:
        self.verifier.released(key)
        batch = self.queue.take(key)
        self.verifier.handed_over(key, batch)
        return batch

    def close(self) -> None:
        self.queue.close()
        streams = self.verifier.streams
        if streams is not None and streams.capturing:
            return  # the kernels that sum would become part of the user's graph
        try:
            self.verifier.settle()
        except RuntimeError as error:  # the device is in trouble; the rest must be closed all the same
            log.warning("verifying copies failed: %s", error)


def _version(tensor: Tensor) -> int:
    return tensor._version  # torch's count of changes has no other name


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a nested batch, by path."""
    return leaves_in(batch, _is_plain)


def _is_plain(value: Any) -> bool:
    """Inference tensors do not count changes; sparse, nested and quantized ones have no plain bytes."""
    if not isinstance(value, Tensor) or value.is_inference():
        return False
    return value.layout == torch.strided and not (value.is_nested or value.is_quantized)
