"""The loaders that call a transform for each sample: this package, DataLoaders, and SPDL's pool of processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from files.tables import Files
from PIL import Image
from readers.hdf5 import (
    OURS,
    Array,
    Batch,
    Contender,
    EndlessBatches,
    MemoryMapped,
    Rows,
    asynchronous,
    is_installed,
)
from torch.utils.data import Dataset, default_collate

from lit_async_data import Source
from waiting.processes.transforms import SIDE, Sample

Transform = Callable[..., Sample]
PILLOW, SIMPLEJPEG = "Pillow", "simplejpeg"


def ours(source: Source, batch: int, transform: Transform, workers: int | str, kind: str = "process") -> Contender:
    """An `AsyncLoader` with a transform."""
    options = {"batch_size": batch, "shuffle": True, "drop_last": True, "workers": workers, "worker_kind": kind}
    return asynchronous(f"{OURS}, {kind}", source, transform, **options)


# -- DataLoaders -------------------------------------------------------------------------------------------------------


class Transformed(Dataset[Any]):
    """Samples of a file, each through a transform.

    Args:
        path: An HDF5 file.
        transform: Called with each sample.
        mapped: Take samples from a memory map of the file rather than from h5py: raw data only.
    """

    def __init__(self, path: str, transform: Transform, *, mapped: bool = False) -> None:
        self.rows, self.transform = Rows(path), transform
        self.mapped = MemoryMapped(path) if mapped else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        data = self.rows.opened()[row] if self.mapped is None else self.mapped.table[row]
        sample = self.transform({"data": data, "labels": self.rows.labels[row]})
        return torch.from_numpy(sample["data"]), sample["labels"]


class Photographs(Dataset[Any]):
    """Decoded photographs, stretched to one size, each through a transform that draws.

    Args:
        files: JPEGs.
        transform: Called with each sample and a generator.
        decoder: `PILLOW` or `SIMPLEJPEG`, which leaves half the pixels out early if the image is large.
        still: Draw nothing.
    """

    def __init__(self, files: Files, transform: Transform, decoder: str, *, still: bool = False) -> None:
        self.files, self.transform, self.decoder, self.still = files, transform, decoder, still
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.files.paths)

    def decoded(self, number: int) -> Array:
        path = self.files.paths[number]
        if self.decoder == PILLOW:
            image = Image.open(path).convert("RGB")
        else:
            decode = importlib.import_module("simplejpeg").decode_jpeg
            image = Image.fromarray(decode(Path(path).read_bytes(), min_height=SIDE, min_width=SIDE))
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).transpose(2, 0, 1)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if self.rng is None and not self.still:
            self.rng = np.random.default_rng(torch.initial_seed())  # differs from worker to worker
        sample = self.transform({"path": self.decoded(number), "label": self.files.labels[number]}, self.rng)
        return torch.from_numpy(sample["path"]), sample["label"]

    def batch(self, numbers: Array) -> Batch:
        """A whole batch."""
        images, labels = default_collate([self[number] for number in numbers.tolist()])
        return images, labels


# -- SPDL --------------------------------------------------------------------------------------------------------------

_dataset: Any = None


def _use(dataset: Any) -> None:
    """Keep the data set in this process of the pool."""
    global _dataset  # noqa: PLW0603  # a pool calls functions only
    _dataset = dataset


def _batch(numbers: Array) -> Batch:
    batch: Batch = _dataset.batch(numbers)
    return batch


def spdl_pool(family: str, dataset: Photographs, batch: int, workers: int) -> Contender | None:
    """SPDL with a pool of processes that makes whole batches; None if it is not installed."""
    if not is_installed("spdl", "spdl.pipeline"):
        return None
    pipeline = importlib.import_module("spdl.pipeline")

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        # Forked as a DataLoader's workers are. Tensors travel through shared memory, as torch teaches pickle.
        context = torch.multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(workers, context, _use, (dataset,)) as pool:
            builder = pipeline.PipelineBuilder().add_source(EndlessBatches(len(dataset), batch))
            piped = builder.pipe(_batch, executor=pool, concurrency=workers).add_sink(2)
            built = piped.build(num_threads=workers)
            with built.auto_stop():
                yield iter(built)

    return Contender(family, workers, opened, 2 + 2 * workers, workers)
