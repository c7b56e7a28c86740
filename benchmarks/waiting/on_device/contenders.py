"""Contenders that move batches to a GPU: this package, Lightning itself, and handwritten code."""

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
# Bytes of a sample: a batch of n samples takes n MiB.
SAMPLE = MIB
Batch = dict[str, torch.Tensor]


class SlowSource(ArraySource):
    """A batch takes a given time and no work to load, since only what follows is measured."""

    def __init__(self, length: int, seconds: float = 0.0) -> None:
        super().__init__({"x": np.broadcast_to(np.uint8(0), (length, SAMPLE)), "y": np.arange(length)})
        self._seconds = seconds

    def read_into(self, samples: Any, out: Any) -> None:
        time.sleep(self._seconds)


class SlowBatches(Dataset[Any]):
    """`SlowSource` for a DataLoader: whole batches, as a collate function would return them."""

    def __init__(self, steps: int, batch: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self._made = {"x": torch.zeros(batch, SAMPLE, dtype=torch.uint8), "y": torch.arange(batch)}

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, number: int) -> Batch:
        time.sleep(self._seconds)
        return self._made


class Resident(Dataset[Any]):
    """Batches that are on the device already."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        return self._batches[number]


class SideStream:
    """A handwritten prefetcher: copies the next batch on a second stream while the step runs.

    The streams wait for each other, and ``record_stream`` tells the allocator of the second stream; many prefetchers in
    use lack one of these.
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
class Contender:
    """A loader, with or without the callback, that moves batches to the GPU.

    Attributes:
        name: In words.
        opened: Starts it, and gives its batches.
        depth: The callback's ``device_depth``; None without a callback.
        ours: Whether this package prefetches.
    """

    name: str
    opened: Callable[[], contextlib.AbstractContextManager[Any]]
    depth: int | None = None
    ours: bool = False

    def callbacks(self) -> list[Any]:
        return [] if self.depth is None else [DevicePrefetcher(device_depth=self.depth)]


def source(batch: int, steps: int, seconds: float, **options: Any) -> AsyncLoader:
    chosen = {"batch_size": batch, "workers": 1, "worker_kind": "thread", "shuffle": False}
    return AsyncLoader(SlowSource(batch * steps, seconds), chosen, device="cuda", **options)


def plain(batch: int, steps: int, seconds: float) -> DataLoader[Any]:
    dataset = SlowBatches(steps, batch, seconds)
    return DataLoader(dataset, batch_size=None, num_workers=1, pin_memory=True)


def contenders(batch: int, steps: int, seconds: float) -> list[Contender]:
    """All contenders.

    Args:
        batch: MiB of a batch.
        steps: Batches of an epoch.
        seconds: Seconds to load a batch.
    """
    ours = functools.partial(source, batch, steps, seconds)
    theirs = functools.partial(plain, batch, steps, seconds)
    return [
        Contender("AsyncLoader, callback", ours, 2, ours=True),
        Contender("AsyncLoader", ours, ours=True),
        Contender("AsyncLoader, callback, depth 0", ours, 0),
        Contender("DataLoader, prefetched", lambda: lad.prefetched(theirs(), device="cuda"), ours=True),
        Contender("DataLoader, callback", lambda: contextlib.nullcontext(theirs()), 2, ours=True),
        Contender("DataLoader, pinned", lambda: contextlib.nullcontext(theirs())),
        Contender("DataLoader, handwritten side stream", lambda: contextlib.nullcontext(SideStream(theirs()))),
    ]


def in_memory(batch: int, steps: int) -> Contender:
    """A batch that stays on the GPU."""
    resident = {"x": torch.zeros(batch, SAMPLE, dtype=torch.uint8, device="cuda")}
    # A DataLoader, since the Trainer would take a list as several loaders.
    loader = DataLoader(Resident([resident] * steps), batch_size=None)
    return Contender("in the GPU's memory", lambda: contextlib.nullcontext(loader))
