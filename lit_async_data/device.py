"""From slot to the tensors of a training step: `DeviceQueue`, and `InlineQueue`, which hands out the slots themselves.

On CPU and MPS nothing is copied: the user gets the slot on a lease. For devices with streams see `stream_queue`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lit_async_data.errors import AsyncDataError, TransformError
from lit_async_data.job import Filled
from lit_async_data.pipeline import Pipeline
from lit_async_data.plan import Key

log = logging.getLogger(__name__)

Batch = Any
Transform = Callable[[Batch], Batch]


class DeviceQueue(Protocol):
    """Hands out batches in order. All calls come from the consumer's thread."""

    def take(self, key: Key) -> Batch:
        """The batch of a key, on its device, waiting for it."""
        ...

    def top_up(self, key: Key) -> None:
        """Start whatever can be started for the batches from ``key`` on. Never blocks on storage or device."""
        ...

    #: Batches handed out as copies, because the user keeps every slot.
    copied: int

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
    """

    def __init__(self, pipeline: Pipeline, depth: int, transform: Transform | None) -> None:
        self._pipeline = pipeline
        self._depth = depth
        self._transform = transform
        self.copied = 0

    @property
    def ready(self) -> int:
        return 0

    def take(self, key: Key) -> Batch:
        filled = self._pipeline.get(key)
        if filled.error is not None:
            try:
                raise filled.error
            finally:
                del filled  # or error, traceback and this frame were a cycle, and kept a loader that is dropped
        batch = self._handed_out(filled)
        if self._transform is None:
            return batch
        return transformed(self._transform, batch, key)

    def top_up(self, key: Key) -> None:
        if self._depth:
            self._pipeline.prefetch(key)

    def close(self) -> None:
        pass

    def _handed_out(self, filled: Filled) -> Batch:
        ring, layout, count = self._pipeline.ring, self._pipeline.layout, len(filled.samples)
        if layout.large and not self._pipeline.must_copy(filled.place):
            views = layout.views(ring.lend(filled.place), count, filled.first)
            arrays = {key: view.copy() if key in layout.small else view for key, view in views.items()}
        else:
            views = layout.views(ring.memory(filled.place), count, filled.first)
            arrays = {key: view.copy() for key, view in views.items()}
            ring.drop(filled.place)
            if layout.large:
                self._say_once(len(ring))
        # Not an inference tensor, even where Lightning validates: it may outlive that.
        with torch.inference_mode(False):
            tensors = {key: torch.from_numpy(layout.spec[key].delivered(array)) for key, array in arrays.items()}
        return layout.spec.packed(tensors)

    def _say_once(self, slots: int) -> None:
        self.copied += 1
        if self.copied == 1:
            log.warning(
                "all %d slots hold batches that are still in use, and memory_budget allows no more: batches are handed "
                "out as copies from here on, which costs time; keep fewer batches or raise memory_budget",
                slots,
            )


def transformed(transform: Transform, batch: Batch, key: Key) -> Batch:
    """What the transform makes of a batch, without gradients.

    Raises:
        TransformError: It failed; an error of this package is passed on as it is.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return transform(batch)
    except AsyncDataError:
        raise
    except Exception as error:
        raise TransformError(
            f"device_transform failed on batch {key.step} of epoch {key.epoch}: {type(error).__name__}: {error}",
            stage="transform",
        ) from error
