"""Contenders that read the files of a table: this package, DataLoaders, and other libraries.

All hand out uint8 of shape (N, 3, H, W) (``.npy`` as stored) and int64 labels. They hold labels and paths in memory,
and samplers never end, so that no contender pays for the start of an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from files.tables import BATCH, Files, Reading
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

from lit_async_data import AsyncLoader, ManifestSource
from lit_async_data.order.permutation import derived_keys
from lit_async_data.sources.images.formats import ImageShape
from readers.hdf5 import OURS, Batch, Contender, asynchronous, by_dataloader, by_spdl, is_installed

Array = npt.NDArray[Any]
Sample = tuple[Any, int]
SAME, PLAIN, FOLDERS = "DataLoader, same decoder", "DataLoader, Pillow and numpy", "DataLoader, torchvision"
SHARED, NATIVE = "SPDL, same decoder", "SPDL, its own decoder"


class SameDecoder(Dataset[Sample]):
    """The package's own reading and decoding, image by image."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.paths, self.labels = reading, reading.files.paths, reading.files.labels
        self.kind = reading.empty()
        self.random = reading.random

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Sample:
        out = np.empty_like(self.kind)
        # A DataLoader seeds this generator in each worker.
        key = random.getrandbits(64) if self.random else None
        self.reading.decode(Path(self.paths[number]).read_bytes(), out, key)
        return torch.from_numpy(out), int(self.labels[number])

    def batch(self, numbers: Array) -> Batch:
        """A whole batch."""
        return channels_first([self[number] for number in numbers.tolist()])


def channels_first(samples: list[Sample]) -> Batch:
    """Images in channels-last memory, permuted without a copy: fastest for this decoder."""
    images, labels = default_collate(samples)
    return images.permute(0, 3, 1, 2) if images.dtype == torch.uint8 else images, labels


class Plain(SameDecoder):
    """Handwritten decoding with Pillow and numpy."""

    def __getitem__(self, number: int) -> Sample:
        label = int(self.labels[number])
        if self.reading.shape is None:
            return torch.from_numpy(np.load(self.paths[number])), label
        opened = Image.open(self.paths[number]).convert("RGB")
        if self.reading.size is not None:
            box = drawn_box(*opened.size) if self.random else None
            opened = opened.resize(self.reading.size, Image.Resampling.BILINEAR, box)
        return torch.from_numpy(np.ascontiguousarray(np.asarray(opened).transpose(2, 0, 1))), label


def drawn_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A random part of an image: 0.08 to 1 of its area, ratio 3/4 to 4/3; all of it if ten draws fail."""
    for _ in range(10):
        area, ratio = (
            width * height * random.uniform(0.08, 1),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, upper = random.randint(0, width - wide), random.randint(0, height - tall)
            return left, upper, left + wide, upper + tall
    return 0, 0, width, height


# -- contenders --------------------------------------------------------------------------------------------------------


def ours(source: ManifestSource, workers: int | str) -> Contender:
    """An `AsyncLoader` with threads."""
    return asynchronous(OURS, source, batch_size=BATCH, shuffle=True, workers=workers, worker_kind="thread")


def spdl_batch(reading: Reading, numbers: Array) -> Batch:
    """A batch as SPDL's own decoder reads and resizes it."""
    library = importlib.import_module("spdl.io")
    tall, wide = reading.size or (None, None)
    paths = [reading.files.paths[number] for number in numbers.tolist()]
    images = library.to_torch(library.load_image_batch(paths, width=wide, height=tall))
    return images.permute(0, 3, 1, 2), torch.from_numpy(reading.files.labels[numbers])


def folders(reading: Reading) -> Any:
    """torchvision's ImageFolder, which decodes by Pillow too."""
    datasets, changes = (importlib.import_module(f"torchvision.{name}") for name in ("datasets", "transforms"))
    steps = [changes.PILToTensor()]
    if reading.size is not None:
        resize = changes.RandomResizedCrop if reading.random else changes.Resize
        steps = [resize(reading.size), *steps]
    return datasets.ImageFolder(reading.files.root, changes.Compose(steps))


def others(reading: Reading, workers: tuple[int, ...]) -> tuple[list[Contender], list[str]]:
    """The other contenders, and those left out, with the reason."""
    same, plain, left_out = SameDecoder(reading), Plain(reading), []
    contenders = [by_dataloader(SAME, same, each, BATCH, collate_fn=channels_first) for each in workers]
    contenders += [by_dataloader(PLAIN, plain, each, BATCH) for each in workers]
    if not is_installed("torchvision"):
        left_out.append(f"{FOLDERS}: not installed")
    elif reading.shape is not None:
        contenders += [by_dataloader(FOLDERS, folders(reading), each, BATCH) for each in workers]
    if not is_installed("spdl", "spdl.pipeline", "spdl.io"):
        left_out.append("SPDL: not installed")
        return contenders, left_out
    contenders.append(by_spdl(SHARED, len(same), BATCH, same.batch))
    if reading.shape is not None and not reading.random:
        batch = functools.partial(spdl_batch, reading)
        try:
            # One image first: for a batch the library says only that some failed.
            importlib.import_module("spdl.io").demux_image(reading.files.paths[0])
            batch(np.arange(2))
        except Exception as error:  # any error of a library without FFmpeg  # noqa: BLE001
            left_out.append(f"{NATIVE}: does not work here ({str(error).split('. ')[0]})")
        else:
            contenders.append(by_spdl(NATIVE, len(same), BATCH, batch))
    return contenders, left_out


# -- values ------------------------------------------------------------------------------------------------------------


def check(reading: Reading, source: ManifestSource, count: int) -> None:
    """Compare a few batches with those of the DataLoaders' datasets, and random crops with the decoder's.

    Raises:
        ValueError: A label differs; or a pixel, with the same decoder.
    """
    still = reading if not reading.random else dataclasses.replace(reading, shape=cropped(reading.shape))
    same, plain, labels = SameDecoder(still), Plain(reading), torch.from_numpy(reading.files.labels)
    options = {"batch_size": BATCH, "shuffle": True, "workers": 2, "augment": False, "return_indices": True}
    with AsyncLoader(source, options) as loader:
        for _ in range(count):
            images, batch_labels, ids = loader.next()
            by_same = same.batch(ids.numpy())
            if not (torch.equal(batch_labels, labels[ids]) and torch.equal(batch_labels, by_same[1])):
                raise ValueError(f"{reading.name}: labels of {ids.tolist()} are not those of the table")
            if images.dtype != by_same[0].dtype or not torch.equal(images, by_same[0]):
                raise ValueError(f"{reading.name}: images of {ids.tolist()} are not what the decoder makes")
            for number, mine in zip(ids[:8].tolist(), images[:8], strict=True):
                value, label = plain[number]
                if label != labels[number] or value.shape != mine.shape or value.dtype != mine.dtype:
                    raise ValueError(f"{reading.name}: {PLAIN} makes something else of {number}")
                # Decoded at full size and resized once: different pixels, but the same picture.
                if not reading.random and (value.float() - mine.float()).abs().mean() > 2:
                    raise ValueError(f"{reading.name}: {PLAIN} sees another picture in {number}")
    if reading.random:
        check_drawn(reading, source)
    if is_installed("torchvision") and reading.shape is not None:
        dataset = folders(reading)
        if [label for _, label in dataset.samples] != labels.tolist():
            raise ValueError(f"{reading.name}: {FOLDERS} has other labels")


def cropped(shape: Any) -> ImageShape:
    """The shape of random crops in evaluation."""
    evaluated: ImageShape = dataclasses.replace(shape, resize="crop")
    return evaluated


def check_drawn(reading: Reading, source: ManifestSource) -> None:
    """Compare random crops of the source with the decoder's, by the same keys."""
    samples = np.arange(8)
    keys = derived_keys(7, samples)
    mine = np.empty((8, *reading.empty().shape), np.uint8)
    source.read_random(samples, {"path": mine}, keys)
    for number, key in enumerate(keys.tolist()):
        out = reading.empty()
        reading.decode(Path(reading.files.paths[number]).read_bytes(), out, key)
        if not np.array_equal(out, mine[number]):
            raise ValueError(f"{reading.name}: the crop of {number} is not what its key says")


# -- the first batch ---------------------------------------------------------------------------------------------------


FROM_SCRATCH = """
import sys, time
from lit_async_data import AsyncLoader, ManifestSource
started = time.perf_counter()
source = ManifestSource(sys.argv[1], ("path", "label"), image_size=int(sys.argv[2]), resize="random_crop")
with AsyncLoader(source, {"batch_size": 64, "shuffle": True, "worker_kind": "thread"}) as loader:
    loader.next()
    print(1000 * (time.perf_counter() - started))
"""


def until(first: Callable[[], contextlib.AbstractContextManager[Any]]) -> float:
    """Milliseconds until the first batch. Closes the loader afterwards."""
    started = time.perf_counter()
    with first():
        return 1000 * (time.perf_counter() - started)


def first_batches(files: Files, side: int) -> dict[str, float]:
    """Milliseconds until the first batch of photographs, in a fresh process.

    From scratch: includes importing pyarrow and Pillow. From the loader: the table has been read. Spawned workers
    import torch and the other imports of the dataset.
    """
    reading = Reading("", files, ImageShape(image_size=side, resize="random_crop"))
    sources: list[ManifestSource] = []

    @contextlib.contextmanager
    def ours(workers: int | str) -> Iterator[Batch]:
        with AsyncLoader(
            sources[-1], {"batch_size": BATCH, "shuffle": True, "workers": workers, "worker_kind": "thread"}
        ) as loader:
            yield loader.next()

    def from_table() -> contextlib.AbstractContextManager[Batch]:
        sources.append(reading.source())
        return ours("auto")

    @contextlib.contextmanager
    def theirs(start: str) -> Iterator[Batch]:
        same = SameDecoder(reading)
        # As many batches as workers start before the first arrives. The loop takes all: a spawned worker that is ended
        # while it sends a batch may abort.
        options: dict[str, Any] = {"sampler": RandomSampler(same, num_samples=5 * BATCH), "num_workers": 2}
        batches = iter(DataLoader(same, BATCH, collate_fn=channels_first, multiprocessing_context=start, **options))
        yield next(batches)
        for _ in batches:
            pass

    command = [sys.executable, "-c", FROM_SCRATCH, files.table, str(side)]
    milliseconds = {f"{OURS}, from scratch": float(subprocess.run(command, capture_output=True, check=True).stdout)}
    milliseconds[f"{OURS}, from the table"] = until(from_table)
    for workers in ("auto", 1):
        milliseconds[f"{OURS}, from the loader, workers={workers}"] = until(functools.partial(ours, workers))
    for start in ("fork", "spawn"):
        milliseconds[f"DataLoader, same decoder, 2 workers by {start}"] = until(functools.partial(theirs, start))
    return milliseconds
