"""One group per sample: what opening such a file costs, and how fast its samples are read.

    python benchmarks/loading/groups.py [--quick] [--json FILE] [--folder DIR] [earliest | latest ...]

A million groups, each with a dataset of 8×8 bytes and an attribute, written with libver="earliest" or "latest". The
first opening lists the groups, the second finds the list in ``cache_dir``. Random batches of 256, by an `AsyncLoader`
with one thread, and by a loop over h5py that opens each dataset by its name. Files are in the page cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lit_async_data import AsyncLoader, Field, HDF5Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

BATCH = 256


class Run(BaseRun):
    """How many groups, and where the files are."""

    @property
    def groups(self) -> int:
        return 2_000 if self.quick else 1_000_000

    @property
    def seconds(self) -> float:
        return 0.2 if self.quick else 3.0


def write(path: str, groups: int, version: Any) -> None:
    with h5py.File(path, "w", libver=version) as file:
        image, number = h5py.h5s.create_simple((8, 8)), h5py.h5s.create(h5py.h5s.SCALAR)
        byte, whole = h5py.h5t.NATIVE_UINT8, h5py.h5t.NATIVE_INT64
        for sample in range(groups):
            group = h5py.h5g.create(file.id, b"sample_%d" % sample)
            dataset = h5py.h5d.create(group, b"image", byte, image)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.full((8, 8), sample % 250, np.uint8))
            h5py.h5a.create(group, b"label", whole, number).write(np.array(sample % 10))


def opened(path: str, folder: str) -> tuple[HDF5Source, float]:
    """The source, and the microseconds per group that opening it took."""
    began, fields = time.perf_counter(), dict[str, Any](x="image", y=Field(attr="label"))
    source = HDF5Source(path, fields, group="*", sample="group", cache_dir=os.path.join(folder, "kept"))
    return source, (time.perf_counter() - began) / len(source) * 1e6


def of_h5py(path: str, run: Run) -> float:
    """Samples per second, one after the other in random order."""
    rng, done, out = np.random.default_rng(0), 0, np.empty((BATCH, 8, 8), np.uint8)
    with h5py.File(path) as file:
        began = time.perf_counter()
        while time.perf_counter() - began < run.seconds:
            for place, sample in enumerate(rng.integers(0, run.groups, BATCH).tolist()):
                group: Any = file[f"sample_{sample}"]
                out[place], _ = group["image"][...], group.attrs["label"]
            done += BATCH
        return done / (time.perf_counter() - began)


def ours(source: HDF5Source, run: Run) -> float:
    with AsyncLoader(source, {"batch_size": BATCH, "shuffle": True, "workers": 1, "worker_kind": "thread"}) as loader:
        batches, done = (batch for _ in iter(int, 1) for batch in loader), 0
        for _ in range(8):
            next(batches)
        began = time.perf_counter()
        while time.perf_counter() - began < run.seconds:
            done += len(next(batches)["x"])
        return done / (time.perf_counter() - began)


def of_version(run: Run, version: Any) -> Figures:
    path = os.path.join(run.folder, f"{version}.h5")
    write(path, run.groups, version)
    time.sleep(2.1)  # no list of a file that has just been written is kept
    (_, first), (source, second) = opened(path, run.folder), opened(path, run.folder)
    row = {"groups": run.groups, "first": first, "second": second, "bytes": os.path.getsize(path) / run.groups}
    row |= {"samples/s": ours(source, run), "h5py samples/s": of_h5py(path, run)}
    os.unlink(path)
    print(f"{version}: " + ", ".join(f"{name} {value:,.3g}" for name, value in row.items()))
    return [row]


def goals(figures: Mapping[str, Figures]) -> Sequence[Goal]:
    rows = [(version, row) for version, of_it in figures.items() for row in of_it]
    return [
        Goal(f"{version}: second / first opening", row["second"] / row["first"], 0.2, 0.1, True)
        for version, row in rows
    ] + [
        Goal(f"{version}: samples/s / h5py's", row["samples/s"] / row["h5py samples/s"], 5, 20) for version, row in rows
    ]


PARTS = {"earliest": lambda run: of_version(run, "earliest"), "latest": lambda run: of_version(run, "latest")}

if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("h5py", "numpy"))
