"""Contenders that read an HDF5 file in random batches: this package, handwritten code, and other libraries.

Each `Contender` hands out batches of two torch tensors without end, and runs only while it is open. The others hold
labels in memory, and samplers of DataLoaders never end, so that no contender pays for the start of an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from files.layouts import Layout
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, default_collate

from lit_async_data import AsyncLoader, HDF5Source, Source

Batch = tuple[torch.Tensor, torch.Tensor]
Array = npt.NDArray[Any]
OURS = "AsyncLoader"
ROWS, SORTED = "DataLoader, h5py rows", "DataLoader, h5py sorted"
# Samples of a practically endless sampler.
MANY_SAMPLES = 2**40


@dataclasses.dataclass(frozen=True)
class Contender:
    """A loader with its settings.

    Attributes:
        family: Its name without the number of workers.
        workers: Threads or processes besides the loop.
        opened: Starts it; leaving the context stops its workers.
        ready: Batches that it may have ready before the loop asks.
        period: Batches that it makes at a time. A measurement counts a multiple of them, so that it can begin at any.
    """

    family: str
    workers: int
    opened: Callable[[], AbstractContextManager[Iterator[Batch]]]
    ready: int = 0
    period: int = 1

    @property
    def name(self) -> str:
        return f"{self.family}, {self.workers} worker{'s' if self.workers != 1 else ''}"

    @property
    def ours(self) -> bool:
        return self.family.startswith(OURS)


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(layout: Layout, source: HDF5Source, workers: int, shuffle: str = "global", **more: Any) -> Contender:
    """An `AsyncLoader`, with threads unless ``worker_kind`` says otherwise."""
    wide = more.get("shuffle_chunks", 0)
    family = f"{OURS}, {f'chunks, {wide} at a time' if wide else shuffle}"
    family += ", decoded chunks kept" if more.get("cache_bytes") else ""
    options = {"batch_size": layout.batch, "shuffle": shuffle, "worker_kind": "thread", **more}
    contender = asynchronous(family, source, workers=workers, **options)
    if not wide:
        return contender
    together = max(wide * (layout.chunk or 1) // layout.batch, 1)
    return dataclasses.replace(contender, ready=contender.ready + 2 * together, period=together)


def asynchronous(family: str, source: Source, transform: Callable[..., Any] | None = None, **options: Any) -> Contender:
    """An `AsyncLoader` that is measured in multiples of the batches that all its workers make at a time."""
    with AsyncLoader(source, options, sample_transform=transform) as loader:
        footprint = loader.footprint

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with AsyncLoader(source, options, sample_transform=transform) as loader:
            yield endless_epochs(loader)

    together, threads = footprint.layout.batches, footprint.workers.threads
    label = f"{family}, auto" if options.get("workers", "auto") == "auto" else family
    return Contender(label, threads, opened, footprint.budget.slots * together, together * max(threads, 1))


def endless_epochs(loader: Any) -> Iterator[Batch]:
    while True:
        yield from loader


# -- handwritten -------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """One h5py row per sample, the file opened once in each worker."""

    def __init__(self, path: str) -> None:
        self.path, self.data = path, None
        with h5py.File(path) as file:
            self.labels = file["labels"][...]

    def opened(self) -> h5py.Dataset:
        if self.data is None:
            self.data = h5py.File(self.path, "r")["data"]
        return self.data

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.opened()[row]), int(self.labels[row])

    def batch(self, rows: Array) -> Batch:
        """A batch, read row by row, for libraries that read whole batches."""
        data = self.opened()
        out = np.empty((len(rows), *data.shape[1:]), data.dtype)
        for place, row in enumerate(rows.tolist()):
            out[place] = data[row]
        return torch.from_numpy(out), torch.from_numpy(self.labels[rows])


class SortedRows(Rows):
    """A whole batch by h5py's fancy selection, which takes each row once and in order."""

    def __getitems__(self, rows: list[int]) -> Batch:
        wanted, places = np.unique(rows, return_inverse=True)  # a batch between two epochs may have a row twice
        return torch.from_numpy(self.opened()[wanted][places]), torch.from_numpy(self.labels[rows])


class MemoryMapped(Dataset[Any]):
    """Whole batches taken from a memory map of the file: raw data only."""

    def __init__(self, path: str) -> None:
        with h5py.File(path) as file:
            data = file["data"]
            self.labels, dtype, self.chunk = file["labels"][...], data.dtype, (data.chunks or data.shape)[0]
            places = [(0, data.id.get_offset())]
            if data.chunks is not None:
                places.clear()
                data.id.chunk_iter(lambda info: places.append((info.chunk_offset[0], info.byte_offset)))
            sample = data.shape[1:]
        offsets = np.array([offset for _, offset in sorted(places)])
        row, first = math.prod(sample) * dtype.itemsize, int(offsets.min())
        # Chunks do not lie whole rows apart: the table begins a row at every place where one of them could.
        step = math.gcd(row, *(offsets - first).tolist())
        self.begins, self.steps = (offsets - first) // step, row // step
        rows = int(self.begins.max()) + (self.chunk - 1) * self.steps + 1
        count = ((rows - 1) * step + row) // dtype.itemsize
        mapped = np.asarray(np.memmap(path, dtype, "r", first, (count,)))
        within = mapped[: row // dtype.itemsize].reshape(sample).strides
        self.table = np.lib.stride_tricks.as_strided(mapped, (rows, *sample), (step, *within), writeable=False)

    def __getitem__(self, rows: Array) -> Batch:
        labels = torch.from_numpy(self.labels[rows])
        if len(self.begins) == 1:
            return torch.from_numpy(self.table.take(rows, axis=0)), labels
        where = self.begins[rows // self.chunk] + rows % self.chunk * self.steps
        return torch.from_numpy(self.table[where]), labels  # take would copy a table whose rows overlap


class ChunkMixed(IterableDataset[Any]):
    """Chunks in random order, of which some are read whole at a time and their rows mixed."""

    def __init__(self, path: str, layout: Layout, wide: int) -> None:
        self.rows, self.layout, self.wide = Rows(path), layout, wide

    def __iter__(self) -> Iterator[Batch]:
        data, labels, chunk = self.rows.opened(), self.rows.labels, self.layout.chunk or 1
        rng = np.random.default_rng(torch.initial_seed())  # differs from worker to worker
        while True:
            chunks = rng.permutation(len(labels) // chunk)
            for begin in range(0, len(chunks), self.wide):
                firsts = chunks[begin : begin + self.wide] * chunk
                pool = np.concatenate([data[first : first + chunk] for first in firsts.tolist()])
                ids = (firsts[:, None] + np.arange(chunk)).ravel()
                for rows in np.array_split(rng.permutation(len(ids)), max(len(ids) // self.layout.batch, 1)):
                    yield torch.from_numpy(pool[rows]), torch.from_numpy(labels[ids[rows]])


class EndlessBatches(Sampler[Array]):
    """Random batches of row numbers without end."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[Array]:
        rng = np.random.default_rng()
        while True:
            order = rng.permutation(self.rows)
            yield from (order[begin : begin + self.batch] for begin in range(0, self.rows, self.batch))


@contextlib.contextmanager
def open_dataloader(dataset: Any, **options: Any) -> Iterator[Iterator[Batch]]:
    """A DataLoader whose workers end with the context."""
    batches = iter(DataLoader(dataset, **options))
    try:
        yield batches
    finally:
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


@contextlib.contextmanager
def repeated_dataloader(dataset: Any, workers: int, **options: Any) -> Iterator[Iterator[Batch]]:
    """A DataLoader of finite passes, repeated without end."""
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0, **options)
    try:
        yield endless_epochs(loader)
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def identity(batch: Any) -> Any:
    """Collates nothing: the dataset returns whole batches."""
    return batch


def by_dataloader(family: str, dataset: Any, workers: int, batch: int | None, **more: Any) -> Contender:
    """A DataLoader that shuffles without end, unless it has a sampler."""
    options = {"batch_size": batch, "num_workers": workers} | more
    if "sampler" not in more:
        options["sampler"] = RandomSampler(dataset, num_samples=MANY_SAMPLES)
    opened = functools.partial(open_dataloader, dataset, **options)
    return Contender(family, workers, opened, 2 * workers, max(workers, 1))


def dataloaders(layout: Layout, path: str, workers: int) -> list[Contender]:
    """DataLoaders over h5py, and over a memory map if the data is stored raw."""
    contenders = [
        by_dataloader(ROWS, Rows(path), workers, layout.batch),
        by_dataloader(SORTED, SortedRows(path), workers, layout.batch, collate_fn=identity),
    ]
    if not layout.packed:
        mapped = MemoryMapped(path)
        sampler = EndlessBatches(len(mapped.labels), layout.batch)
        contenders.append(by_dataloader("DataLoader, memory map", mapped, workers, None, sampler=sampler))
    return contenders


def chunk_mixed(layout: Layout, path: str, workers: int, wide: int) -> Contender:
    """A DataLoader over whole chunks whose rows it mixes."""
    dataset = ChunkMixed(path, layout, wide)
    opened = functools.partial(open_dataloader, dataset, batch_size=None, num_workers=workers)
    group = max(wide * (layout.chunk or 1) // layout.batch, 1)
    return Contender(
        f"DataLoader, mixed chunks, {wide} at a time", workers, opened, 2 * workers, group * max(workers, 1)
    )


# -- other libraries ---------------------------------------------------------------------------------------------------


def by_spdl(family: str, length: int, batch_size: int, batch: Callable[[Array], Batch]) -> Contender:
    """SPDL: batches made in two threads."""
    pipeline = importlib.import_module("spdl.pipeline")

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        builder = pipeline.PipelineBuilder().add_source(EndlessBatches(length, batch_size))
        built = builder.pipe(batch, concurrency=2).add_sink(2).build(num_threads=2)
        with built.auto_stop():
            yield iter(built)

    return Contender(family, 2, opened, 6, 2)


def torchdata_nodes(layout: Layout, path: str, method: str) -> Contender:
    """torchdata.nodes: batches read in two threads or processes."""
    nodes = importlib.import_module("torchdata.nodes")

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        read = Rows(path)  # opened where it reads
        source = nodes.SamplerWrapper(EndlessBatches(len(read), layout.batch))
        mapper = nodes.ParallelMapper(source, read.batch, num_workers=2, method=method)
        batches = iter(nodes.Loader(mapper))
        try:
            yield batches
        finally:
            threading.excepthook = lambda _: None  # its threads report that its processes are gone
            mapper._it._it._shutdown()
            threading.excepthook = threading.__excepthook__
            # Otherwise a fork of this process would collect it, and report an error.
            mapper._it._it._workers.clear()

    kind = {"thread": "threads", "process": "processes"}[method]
    return Contender(f"torchdata.nodes ({kind}), h5py rows", 2, opened, 4, 2)


class Records:
    """Samples by number as arrays, for Grain."""

    def __init__(self, path: str) -> None:
        self.rows = Rows(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Array, Array]:
        return self.rows.opened()[row], self.rows.labels[row]


def grain(layout: Layout, path: str) -> Contender:
    """Grain: rows read in two threads, and stacked."""
    library = importlib.import_module("grain")
    records = Records(path)
    records.rows.opened()

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        order = library.MapDataset.source(records).shuffle(seed=0).repeat()
        read = library.ReadOptions(num_threads=2, prefetch_buffer_size=2 * layout.batch)
        batches = iter(order.to_iter_dataset(read).batch(layout.batch))
        try:
            yield ((torch.from_numpy(data), torch.from_numpy(labels)) for data, labels in batches)
        finally:
            batches.close()

    return Contender("Grain, h5py rows", 2, opened, 2, 1)


class ScDatasetRows:
    """Rows in order for scDataset; consecutive rows are read as one slice."""

    def __init__(self, path: str) -> None:
        self.rows = Rows(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Array) -> Any:
        data = self.rows.opened()
        out = np.empty((len(rows), *data.shape[1:]), data.dtype)
        edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(edges):
            out[begin:end] = data[int(rows[begin]) : int(rows[begin]) + end - begin]
        return out, self.rows.labels[rows]


def select_rows(fetched: Any, rows: Array) -> Batch:
    return torch.from_numpy(fetched[0][rows]), torch.from_numpy(fetched[1][rows])


def scdataset(layout: Layout, path: str, workers: int, wide: int = 0) -> Contender:
    """scDataset: random blocks, ``wide`` chunks of them in each fetch; 0: blocks of one row, a global shuffle."""
    library = importlib.import_module("scdataset")
    block = (layout.chunk or 1) if wide else 1
    factor = max(wide * block // layout.batch, 1) if wide else 4

    def opened() -> AbstractContextManager[Iterator[Batch]]:
        strategy = library.BlockShuffling(block_size=block)
        dataset = library.scDataset(
            ScDatasetRows(path), strategy, batch_size=layout.batch, fetch_factor=factor, batch_callback=select_rows
        )
        # As its documentation advises.
        return repeated_dataloader(dataset, workers, **({"prefetch_factor": factor + 1} if workers else {}))

    label = f"chunks, {wide} at a time" if wide else "global"
    return Contender(f"scDataset, {label}", workers, opened, (factor + 1) * workers, factor * max(workers, 1))


def h5torch(layout: Layout, path: str) -> Contender:
    """h5torch: its own Dataset over the file, which it opens when it is built, so without workers."""
    library = importlib.import_module("h5torch")
    dataset = library.Dataset(path)

    sampler = RandomSampler(dataset, num_samples=MANY_SAMPLES)
    options = {"batch_size": layout.batch, "sampler": sampler, "collate_fn": as_pair}
    return Contender("h5torch", 0, functools.partial(open_dataloader, dataset, **options))


def as_pair(samples: list[dict[str, Any]]) -> Batch:
    batch = default_collate(samples)
    return batch["central"], batch["0/labels"]


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def other_libraries(layout: Layout, path: str) -> list[Contender]:
    """The contenders of the other libraries that are installed."""
    contenders = []
    if is_installed("spdl", "spdl.pipeline"):
        read = Rows(path)
        read.opened()
        contenders.append(by_spdl("SPDL, h5py rows", len(read), layout.batch, read.batch))
    if is_installed("torchdata"):
        contenders += [torchdata_nodes(layout, path, method) for method in ("thread", "process")]
    if is_installed("grain"):
        contenders.append(grain(layout, path))
    if is_installed("scdataset"):
        widths = (0, 16, 64) if layout.packed and (layout.chunk or 1) > 1 else (0,)
        contenders += [scdataset(layout, path, workers, wide) for wide in widths for workers in (0, 2)]
    if is_installed("h5torch"):
        contenders.append(h5torch(layout, path))
    return contenders
