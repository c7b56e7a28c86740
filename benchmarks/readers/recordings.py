"""Contenders for recordings, many files and sparse rows: this package, and a DataLoader over a careful Dataset.

Datasets hold labels and row offsets in memory. Each worker opens a file when it first reads it. Samplers never end, so
that no contender pays for the start of an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from files.recordings import GENES
from torch.utils.data import Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lit_async_data import AsyncLoader, Field, HDF5Source
from readers.hdf5 import OURS, Batch, Contender, endless_epochs, open_dataloader

Array = npt.NDArray[Any]
Sample = tuple[torch.Tensor, int]
BY_HAND = "DataLoader, h5py"
# Epochs of at most this many batches are counted whole: the short last batch starts decoding again.
SHORT = 32


class Opened(Dataset[Sample]):
    """HDF5 datasets of files that stay open, separately in each worker.

    Args:
        paths: The files.
        names: Datasets to read in each file.
        options: Options of ``h5py.File``.
    """

    def __init__(self, paths: list[str], names: list[str], **options: Any) -> None:
        self.paths, self.names, self.options = paths, names, options
        self.labels = np.empty(0, np.int64)
        self.files: dict[int, h5py.File] = {}
        self.datasets: dict[int, list[h5py.Dataset]] = {}

    def opened(self, number: int = 0) -> list[h5py.Dataset]:
        """The datasets of a file."""
        if number not in self.datasets:
            file = self.files[number] = h5py.File(self.paths[number], "r", **self.options)
            self.datasets[number] = [file[name] for name in self.names]
        return self.datasets[number]

    def close(self) -> None:
        self.datasets.clear()
        while self.files:
            self.files.popitem()[1].close()

    def __len__(self) -> int:
        return len(self.labels)


class Windows(Opened):
    """Each sample is a window of rows."""

    def __init__(self, path: str, window: int, stride: int, **options: Any) -> None:
        super().__init__([path], ["data"], **options)
        with h5py.File(path) as file:
            self.firsts = np.arange(0, len(file["data"]) - window + 1, stride)
            self.labels = file["labels"][...][self.firsts]
        self.window = window

    def __getitem__(self, number: int) -> Sample:
        first = int(self.firsts[number])
        (data,) = self.opened()
        return torch.from_numpy(data[first : first + self.window]), int(self.labels[number])


class Rows(Opened):
    """Each sample is a row of one of several files."""

    def __init__(self, pattern: str) -> None:
        super().__init__(sorted(glob.glob(pattern)), ["data"])
        labels = []
        for path in self.paths:
            with h5py.File(path) as file:
                labels.append(file["labels"][...])
        self.labels = np.concatenate(labels)
        self.starts = np.cumsum([0, *map(len, labels)])

    def __getitem__(self, number: int) -> Sample:
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
        (data,) = self.opened(which)
        return torch.from_numpy(data[number - int(self.starts[which])]), int(self.labels[number])


class Cells(Opened):
    """Each sample is a sparse row, made dense."""

    def __init__(self, path: str) -> None:
        super().__init__([path], ["X/data", "X/indices"])
        with h5py.File(path) as file:
            self.indptr, self.labels = file["X/indptr"][...].tolist(), file["y"][...]

    def __getitem__(self, number: int) -> Sample:
        data, indices = self.opened()
        begin, end = self.indptr[number], self.indptr[number + 1]
        dense = np.zeros(GENES, np.float32)
        dense[indices[begin:end]] = data[begin:end]
        return torch.from_numpy(dense), int(self.labels[number])


@dataclasses.dataclass(frozen=True)
class Reading:
    """A data set for both contenders.

    Attributes:
        source: For an `AsyncLoader`.
        dataset: For a DataLoader: the same samples by the same numbers.
        batch: Samples per batch.
    """

    name: str
    source: HDF5Source
    dataset: Opened
    batch: int

    @property
    def sample_bytes(self) -> int:
        return sum(field.nbytes for field in self.source.spec.fields.values())

    def close(self) -> None:
        self.source.close()
        self.dataset.close()


def windows(name: str, path: str, window: int, stride: int) -> Reading:
    fields = (Field("data", window=(0, window)), "labels")
    return Reading(name, HDF5Source(path, fields, stride=stride), Windows(path, window, stride), 64)


def rows(name: str, pattern: str) -> Reading:
    return Reading(name, HDF5Source(pattern), Rows(pattern), 256)


def cells(name: str, path: str) -> Reading:
    return Reading(name, HDF5Source(path, ("X", "y")), Cells(path), 64)


# -- contenders --------------------------------------------------------------------------------------------------------


class Endless(Sampler[int]):
    """Repeats a sampler without end."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.sampler


def ours(reading: Reading, workers: int, label: str = "auto", warm_up: int = 0, **options: Any) -> Contender:
    """An `AsyncLoader`.

    Args:
        reading: The data set.
        workers: Threads.
        label: The options in words.
        warm_up: Batches that are not counted.
        options: More options of the loader.
    """
    options = {"batch_size": reading.batch, "shuffle": True, "workers": workers, "worker_kind": "thread", **options}
    with AsyncLoader(reading.source, options) as loader:
        together, steps = loader.footprint.layout.batches, len(loader)
        ready = loader.footprint.budget.slots * together

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with AsyncLoader(reading.source, options) as loader:
            yield endless_epochs(loader)

    return Contender(f"{OURS}, {label}", workers, opened, ready + warm_up, steps if steps <= SHORT else together)


def by_hand(
    reading: Reading, workers: int, label: str = "", warm_up: int = 0, *, dataset: Opened | None = None
) -> Contender:
    """A DataLoader that shuffles.

    Args:
        reading: The data set.
        workers: Processes.
        label: The options in words.
        warm_up: Batches that are not counted, per process.
        dataset: Replaces the dataset of ``reading``.
    """
    read = reading.dataset if dataset is None else dataset
    return drawn(reading.batch, read, RandomSampler(read), workers, label, warm_up=warm_up)


def weighted(reading: Reading, workers: int) -> Contender:
    """A DataLoader that draws each class equally often."""
    labels = reading.dataset.labels
    weights = (1 / np.bincount(labels))[labels]
    sampler = WeightedRandomSampler(weights.tolist(), len(labels))
    return drawn(reading.batch, reading.dataset, sampler, workers, "WeightedRandomSampler")


def drawn(batch: int, read: Opened, sampler: Sampler[int], workers: int, label: str, *, warm_up: int = 0) -> Contender:
    options = {"batch_size": batch, "sampler": Endless(sampler), "num_workers": workers}

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with contextlib.closing(read), open_dataloader(read, **options) as batches:
            yield batches

    each = max(workers, 1)
    return Contender(f"{BY_HAND}{label and ', '}{label}", workers, opened, 2 * workers + warm_up * each, each)


def in_memory(reading: Reading, path: str) -> Contender:
    """One thread that copies windows of an array in memory into buffers that it reuses."""
    dataset = reading.dataset
    assert isinstance(dataset, Windows)

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with h5py.File(path) as file:
            yield copied(file["data"][...], dataset, reading.batch)

    return Contender("One copy on one thread, from memory", 0, opened)


def copied(data: Array, dataset: Windows, batch: int) -> Iterator[Batch]:
    # As many buffers as a loader has slots.
    slots = [np.empty((batch, dataset.window, data.shape[1]), data.dtype) for _ in range(5)]
    rng = np.random.default_rng(0)
    for out in itertools.cycle(slots):
        numbers = rng.integers(0, len(dataset), batch)
        for place, first in enumerate(dataset.firsts[numbers].tolist()):
            out[place] = data[first : first + dataset.window]
        yield torch.from_numpy(out), torch.from_numpy(dataset.labels[numbers])


# -- values ------------------------------------------------------------------------------------------------------------


def check(reading: Reading, batches: int, **options: Any) -> None:
    """Compare a few batches with what h5py reads.

    Raises:
        ValueError: A sample differs.
    """
    options = {"batch_size": reading.batch, "shuffle": True, "workers": 2, "return_indices": True, **options}
    with contextlib.closing(reading.dataset), AsyncLoader(reading.source, options) as loader:
        for _ in range(batches):
            data, labels, ids = loader.next()
            for value, label, number in zip(data, labels.tolist(), ids.tolist(), strict=True):
                wanted = reading.dataset[number]
                if label != wanted[1] or value.dtype != wanted[0].dtype or not torch.equal(value, wanted[0]):
                    raise ValueError(f"{reading.name}: sample {number} differs from what h5py reads; options {options}")


def touch(reading: Reading) -> None:
    """Read all samples once."""
    options = {"batch_size": reading.batch, "shuffle": False, "workers": 2}
    with AsyncLoader(reading.source, options) as loader:
        for _ in loader:
            pass
