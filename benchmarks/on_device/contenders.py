"""Ways to get batches onto a GPU: this project's, Lightning's own, and one that people write by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import lit_async_data as lad
from lit_async_data import AsyncLoader, DevicePrefetcher
from lit_async_data.testing import ArraySource

MIB = 2**20
# Bytes of a sample: a batch of so many samples takes as many MiB.
SAMPLE = MIB
Batch = dict[str, torch.Tensor]


class Slow(ArraySource):
    """Samples that take a given time for each batch, and no work: what is measured is the way from there on."""

    def __init__(self, length: int, seconds: float = 0.0) -> None:
        super().__init__({"x": np.broadcast_to(np.uint8(0), (length, SAMPLE)), "y": np.arange(length)})
        self._seconds = seconds

    def read_into(self, samples: Any, out: Any) -> None:
        time.sleep(self._seconds)


class SlowBatches(Dataset[Any]):
    """The same for a DataLoader: whole batches, as a collate function would return them."""

    def __init__(self, steps: int, batch: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self._made = {"x": torch.zeros(batch, SAMPLE, dtype=torch.uint8), "y": torch.arange(batch)}

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, number: int) -> Batch:
        time.sleep(self._seconds)
        return self._made


class Still(Dataset[Any]):
    """Batches that are where they are wanted already."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        return self._batches[number]


class SideStream:
    """What people write: the next batch is copied on a stream of its own while the step runs.

    Each of the two streams waits for the other, and the allocator is told of the second one; many that are in use lack
    one or the other.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
        held = None
        for batch in self._loader:
            with torch.cuda.stream(stream):
                coming = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
            if held is not None:
                yield held
            compute = torch.cuda.current_stream()
            compute.wait_stream(stream)
            for tensor in coming.values():
                tensor.record_stream(compute)
            held = coming
        if held is not None:
            yield held


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to get batches onto the GPU.

    Attributes:
        name: In words.
        opened: Starts it; batches come from what it gives.
        depth: Of the callback; None where there is none.
        ours: Whether it is this project's, with nothing switched off.
    """

    name: str
    opened: Callable[[], contextlib.AbstractContextManager[Any]]
    depth: int | None = None
    ours: bool = False

    def callbacks(self) -> list[Any]:
        return [] if self.depth is None else [DevicePrefetcher(device_depth=self.depth)]


def source(batch: int, steps: int, seconds: float, **options: Any) -> AsyncLoader:
    chosen = {"batch_size": batch, "workers": 1, "shuffle": False}
    return AsyncLoader(Slow(batch * steps, seconds), chosen, device="cuda", **options)


def plain(batch: int, steps: int, seconds: float) -> DataLoader[Any]:
    dataset = SlowBatches(steps, batch, seconds)
    return DataLoader(dataset, batch_size=None, num_workers=1, pin_memory=True)


def ways(batch: int, steps: int, seconds: float) -> list[Way]:
    """All of them.

    Args:
        batch: MiB of a batch.
        steps: Batches of an epoch.
        seconds: That it takes to load one.
    """
    ours = functools.partial(source, batch, steps, seconds)
    theirs = functools.partial(plain, batch, steps, seconds)
    return [
        Way("AsyncLoader, callback", ours, 2, ours=True),
        Way("AsyncLoader", ours, ours=True),
        Way("AsyncLoader, callback, depth 0", ours, 0),
        Way("DataLoader, prefetched", lambda: lad.prefetched(theirs(), device="cuda"), ours=True),
        Way("DataLoader, callback", lambda: contextlib.nullcontext(theirs()), 2, ours=True),
        Way("DataLoader, pinned", lambda: contextlib.nullcontext(theirs())),
        Way("DataLoader, by hand on a stream", lambda: contextlib.nullcontext(SideStream(theirs()))),
    ]


def in_memory(batch: int, steps: int) -> Way:
    """Batches that are on the GPU already."""
    made = {"x": torch.zeros(batch, SAMPLE, dtype=torch.uint8, device="cuda")}
    # A DataLoader, since the Trainer takes a list for several loaders.
    loader = DataLoader(Still([made] * steps), batch_size=None)
    return Way("in the GPU's memory", lambda: contextlib.nullcontext(loader))
