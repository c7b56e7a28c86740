"""From slot to the tensors of a training step: `DeviceQueue`, and `InlineQueue`, which hands out the slots themselves.

On CPU and MPS nothing is copied: the user gets the slot on a lease. For devices with streams see `stream_queue`.
"""

from __future__ import annotations

import collections
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lit_async_data.batch.spec import Array
from lit_async_data.device.copy_verifier import CopyVerifier
from lit_async_data.device.transform import DeviceTransform
from lit_async_data.errors import AsyncDataError, TransformError
from lit_async_data.host.job import FilledSlot
from lit_async_data.host.pipeline import Pipeline
from lit_async_data.host.stats import DeviceWait
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)

Batch = Any
# Called with a batch, and with what is drawn for it where it takes that: see `DeviceTransform`.
Transform = Callable[..., Batch]


class DeviceQueue(Protocol):
    """Hands out batches in order. All calls come from the consumer's thread."""

    def take(self, key: BatchIndex) -> Batch:
        """The batch of a key, on its device, waiting for it."""
        ...

    def top_up(self, key: BatchIndex) -> None:
        """Start whatever can be started for the batches from ``key`` on. Never blocks on storage or device."""
        ...

    def read_ahead(self, key: BatchIndex) -> None:
        """Have the batches from ``key`` on read into host memory; copies nothing. Never blocks on storage."""
        ...

    #: Batches handed out as copies, because the user keeps every slot.
    copied: int

    @property
    def waited(self) -> DeviceWait | None:
        """How long the device waited for data; None where it has no streams to tell by."""
        ...

    @property
    def ready(self) -> int:
        """Batches on the device, or on their way there."""
        ...

    def close(self) -> None:
        """Wait for copies that are under way and let go of everything."""
        ...


class InlineQueue:
    """Hands out the slots themselves.

    Args:
        pipeline: Where filled slots come from.
        depth: 0 to read nothing ahead.
        transform: Applied to each batch as it is handed out.
        verifier: Watches the first batches.
    """

    waited = None

    def __init__(
        self, pipeline: Pipeline, depth: int, transform: Transform | None, verifier: CopyVerifier | None = None
    ) -> None:
        self._pipeline = pipeline
        self._depth = depth
        self._transform = transform
        self._verifier = verifier
        # Of the slot that is being handed out: batches to come, and errors in their places.
        self._opened: collections.deque[tuple[BatchIndex, Batch | Exception]] = collections.deque()
        self.copied = 0

    @property
    def ready(self) -> int:
        return len(self._opened)

    def take(self, key: BatchIndex) -> Batch:
        if self._verifier is not None:
            self._verifier.released(key)
        if not self._opened or self._opened[0][0] != key:
            self._opened.clear()
            self._opened.extend(self._batches(self._pipeline.get(key)))
        batch = self._opened.popleft()[1]
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # or error, traceback and this frame were a cycle, and kept a loader that is dropped
        if self._verifier is not None:
            self._verifier.arrived(key, batch)
        if self._transform is not None:
            batch = transformed(self._transform, batch, key)
        if self._verifier is not None:
            self._verifier.handed_over(key, batch)
        return batch

    def top_up(self, key: BatchIndex) -> None:
        if self._opened:
            if self._opened[0][0] == key:
                return  # what comes behind is being read
            self._opened.clear()
        if self._depth:
            self._pipeline.prefetch(key)

    def read_ahead(self, key: BatchIndex) -> None:
        self.top_up(key)

    def close(self) -> None:
        self._opened.clear()
        if self._verifier is not None:
            self._verifier.settle()

    def _batches(self, filled: FilledSlot) -> Iterator[tuple[BatchIndex, Batch | Exception]]:
        """All batches of a slot, as the user gets them; each holds the slot for as long as it lives."""
        spec = self._pipeline.layout.spec
        views, own = self._handed_out(filled) if filled.good else ({}, ())
        # Not inference tensors, even where Lightning validates: they may outlive that.
        with torch.inference_mode(False):
            for batch in filled.batches:
                if batch.error is not None:
                    yield batch.key, batch.error
                    continue
                end = batch.first + len(batch.samples)
                stored = {key: view[batch.first : end] for key, view in views.items()}
                if self._verifier is not None:
                    self._verifier.read(batch.key, spec.packed({key: torch.from_numpy(stored[key]) for key in stored}))
                tensors = {
                    key: torch.from_numpy(spec[key].delivered(array.copy() if key in own else array))
                    for key, array in stored.items()
                }
                yield batch.key, spec.packed(tensors)

    def _handed_out(self, filled: FilledSlot) -> tuple[dict[str, Array], tuple[str, ...]]:
        """The fields of a slot as arrays, and which of them each batch must copy: small ones, and, if need be, all."""
        ring, layout, last = self._pipeline.ring, self._pipeline.layout, filled.batches[-1]
        count = last.first + len(last.samples)
        if layout.large and not self._pipeline.must_copy():
            return layout.views(ring.lend(filled.slot), count), layout.small
        views = {key: view.copy() for key, view in layout.views(ring.memory(filled.slot), count).items()}
        ring.drop(filled.slot)
        if layout.large:
            self._say_once(len(ring))
        return views, layout.small if layout.batches > 1 else ()

    def _say_once(self, slots: int) -> None:
        self.copied += 1
        if self.copied == 1:
            log.warning(
                "all %d slots hold batches that are still in use, and memory_budget allows no more: batches are handed "
                "out as copies from here on, which costs time; keep fewer batches or raise memory_budget",
                slots,
            )


def transformed(transform: Transform, batch: Batch, key: BatchIndex) -> Batch:
    """What the transform makes of a batch, without gradients.

    Raises:
        TransformError: It failed, or returned something that is no batch; an error of this package is passed on as it
            is.
    """
    where = transform.where if isinstance(transform, DeviceTransform) else "device_transform"
    try:
        with torch.inference_mode(False), torch.no_grad():
            made = transform(batch, key) if isinstance(transform, DeviceTransform) else transform(batch)
    except AsyncDataError:
        raise
    except Exception as error:
        raise TransformError(
            f"{where}: failed on batch {key.step} of epoch {key.epoch}: {type(error).__name__}: {error}",
            stage="transform",
        ) from error
    if (made is None and batch is not None) or inspect.iscoroutine(made) or inspect.isgenerator(made):
        # Lightning skips a batch that is None without a word, and nothing would be trained.
        what = "None" if made is None else f"a {type(made).__name__}"
        raise TransformError(
            f"{where}: returned {what} for batch {key.step} of epoch {key.epoch}; return the batch to hand out",
            stage="transform",
        )
    return made
