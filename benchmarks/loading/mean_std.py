"""Mean and standard deviation of a whole source, compared with a loop over an AsyncLoader that only counts samples.

    python benchmarks/loading/mean_std.py [--quick] [--json FILE] [--folder DIR] [plain | gzip | jpeg]

* plain, gzip: float32 images of 3×128×128 in one HDF5 file, per channel.
* jpeg: a table of photographs of 384×512 pixels, stretched to 224×224.

Rounds are interleaved; figures are medians. Files are in the page cache. Both loops read in storage order.
"""

from __future__ import annotations

import csv
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource, Source
from lit_async_data import statistics as counted

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import Figures, Goal, argument_parser, run_parts

from loading.hdf5 import Run

SHAPE, CHUNK = (3, 128, 128), 10
LEAST = 0.9


def of_hdf5(run: Run, **filters: Any) -> Source:
    path, samples = f"{run.folder}/{'gzip' if filters else 'plain'}.h5", 200 if run.quick else 1500 if filters else 6000
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_dataset(
            "x", (samples, *SHAPE), np.float32, chunks=(CHUNK, *SHAPE) if filters else None, **filters
        )
        for first in range(0, samples, CHUNK):
            data[first : first + CHUNK] = generator.normal(280, 5, (CHUNK, *SHAPE)).round(1)
    return HDF5Source(path, {"x": "x"})


def of_jpegs(run: Run) -> Source:
    generator, files = np.random.default_rng(0), 40 if run.quick else 1500
    noise = generator.integers(0, 256, (files, 12, 16, 3), np.uint8)
    with open(f"{run.folder}/photos.csv", "w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["path"])
        for number, each in enumerate(noise):
            Image.fromarray(each).resize((512, 384)).save(f"{run.folder}/{number}.jpg")
            rows.writerow([f"{number}.jpg"])
    return ManifestSource(f"{run.folder}/photos.csv", {"x": "path"}, image_size=224)


def count(source: Source) -> int:
    """A loop in order, with batches and workers as `statistics` has them."""
    size = max(8 * 2**20 // source.spec.nbytes, 1)
    options: dict[str, Any] = {"batch_size": size, "shuffle": "none", "worker_kind": "thread"}
    if source.chunks.reading == "decoded":
        options["workers"] = min(len(os.sched_getaffinity(0)), 8)
    with AsyncLoader(source, options) as loader:
        return sum(len(batch["x"]) for batch in loader)


def measured(make: Callable[[Run], Source], run: Run) -> Figures:
    source = make(run)
    contenders: dict[str, Callable[[Source], object]] = {"counts samples": count, "statistics": counted}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 if run.quick else 7):
        for name, contender in contenders.items():
            started = time.perf_counter()
            contender(source)
            seconds[name].append(time.perf_counter() - started)
    source.close()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    share = medians["counts samples"] / medians["statistics"]
    rates = {name: len(source) / each for name, each in medians.items()}
    print(f"\n{source}")
    for name, rate in rates.items():
        print(f"{name:<16} {rate:>10,.0f} samples/s {rate * source.spec.nbytes / 1e9:>7.2f} GB/s")
    return [{"share": share, **rates}]


def goals(figures: Any) -> Iterator[Goal]:
    for name, rows in figures.items():
        yield Goal(f"{name}: rate of statistics, of that of counting", rows[0]["share"], LEAST, LEAST)


if __name__ == "__main__":
    makers: dict[str, Callable[[Run], Source]] = {
        "plain": of_hdf5,
        "gzip": functools.partial(of_hdf5, compression="gzip"),
        "jpeg": of_jpegs,
    }
    parts = {name: functools.partial(measured, make) for name, make in makers.items()}
    run_parts(argument_parser(__doc__, parts), parts, goals, Run, ("torch", "h5py"))
