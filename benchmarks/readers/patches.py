"""Loaders of random patches of volumes: this package, TorchIO's queue, and MONAI's crops. One value is one epoch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import h5py
import numpy as np
import torch
from measuring.process_tree import cpu_seconds, descendants, memory_mib

from lit_async_data import AsyncLoader, Field, HDF5Source
from readers.hdf5 import OURS, is_installed

SIDE, BATCH, PER_VOLUME, IN_USE = 64, 8, 8, 4  # IN_USE: volumes whose patches are mixed
FIELDS = ("ct", "mask")


def volumes_source(paths: list[str]) -> HDF5Source:
    fields = {name: Field(name, patch=(SIDE, SIDE, SIDE)) for name in FIELDS}
    return HDF5Source(paths, fields, patches_per_volume=PER_VOLUME)


def samples_of(loader: Any, data: Callable[[Any], torch.Tensor]) -> int:
    """The samples of an epoch; reads one byte of each page."""
    samples = 0
    for batch in loader:
        tensor = data(batch)
        tensor.flatten().view(torch.uint8)[::4096].sum()
        samples += len(tensor)
    return samples


@contextlib.contextmanager
def ours(paths: list[str], workers: int | str) -> Iterator[Callable[[], int]]:
    options = {"batch_size": BATCH, "shuffle": True, "shuffle_chunks": IN_USE, "workers": workers}
    options |= {} if workers == "auto" else {"worker_kind": "thread"}
    with contextlib.closing(volumes_source(paths)) as source, AsyncLoader(source, options) as loader:
        yield functools.partial(samples_of, loader, lambda batch: batch["ct"])


@contextlib.contextmanager
def by_torchio(paths: list[str], workers: int) -> Iterator[Callable[[], int]]:
    """A queue of as many patches as the volumes in use have."""
    library = importlib.import_module("torchio")
    kinds = {"ct": library.ScalarImage, "mask": library.LabelMap}
    subjects = [
        library.Subject({name: kind(path, reader=functools.partial(with_affine, name)) for name, kind in kinds.items()})
        for path in paths
    ]
    dataset, sampler = library.SubjectsDataset(subjects), library.UniformSampler(SIDE)
    queue = library.Queue(dataset, IN_USE * PER_VOLUME, PER_VOLUME, sampler, num_workers=workers)
    loader = library.SubjectsLoader(queue, batch_size=BATCH)
    yield functools.partial(samples_of, loader, lambda batch: batch["ct"]["data"])


def with_affine(name: str, path: str) -> tuple[torch.Tensor, Any]:
    return torch.from_numpy(whole(path, name)), np.eye(4)


def whole(path: str, name: str) -> Any:
    with h5py.File(path) as file:
        return file[name][...][None]


@contextlib.contextmanager
def by_monai(paths: list[str], workers: int) -> Iterator[Callable[[], int]]:
    """The patches of a volume are a batch."""
    data, transforms = (importlib.import_module(f"monai.{name}") for name in ("data", "transforms"))
    crop = transforms.RandSpatialCropSamplesd(FIELDS, (SIDE, SIDE, SIDE), PER_VOLUME, random_size=False)
    dataset = data.Dataset(paths, transforms.Compose([both, crop]))
    loader = data.DataLoader(dataset, batch_size=1, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    yield functools.partial(samples_of, loader, lambda batch: batch["ct"].as_tensor())


def both(path: str) -> dict[str, Any]:
    return {name: whole(path, name) for name in FIELDS}


LOADERS: dict[str, tuple[str, Any]] = {
    OURS: ("lit_async_data", ours),
    "TorchIO": ("torchio", by_torchio),
    "MONAI": ("monai.data", by_monai),
}
LOADERS = {family: loader for family, loader in LOADERS.items() if is_installed(loader[0].partition(".")[0])}


def epochs_of(family: str, paths: list[str], workers: int | str, epochs: int) -> dict[str, float]:
    """Patches per second and CPU of each, after an epoch that is not counted; MiB before the first."""
    module, opened = LOADERS[family]
    importlib.import_module(module)
    multiprocessing.set_start_method("fork", force=True)  # Linux's own; a spawned process would spawn the workers
    before = memory_mib([os.getpid()])
    with opened(paths, workers) as epoch:
        epoch()
        cpu, started = cpu_seconds(), time.perf_counter()
        samples = sum(epoch() for _ in range(epochs))
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    return {"per_s": samples / seconds, "cpu_ms": 1000 * cpu / samples, "before_mib": before}


def in_fresh_process(family: str, paths: list[str], workers: int | str, epochs: int) -> dict[str, float]:
    """The figures of `epochs_of`, and the most MiB that its process and all below it had more than after imports."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future, most = pool.submit(epochs_of, family, paths, workers, epochs), 0.0
        (pid,) = pool._processes
        while not future.done():
            most = max(most, memory_mib([pid, *descendants(pid)]))
            time.sleep(0.05)
        figures = future.result()
    return figures | {"mib": most - figures["before_mib"]}
