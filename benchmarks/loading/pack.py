"""Loading before and after `pack`.

    python benchmarks/loading/pack.py [--quick] [--json FILE] [--folder DIR] [hdf5 | tables ...]

* hdf5: the layouts of `benchmarks/loading/hdf5.py`, and a recording in chunks across time.
* tables: PNG and JPEG files that a table names.

Samples per second of an `AsyncLoader` in random order (``shuffle="global"``); of the input also as ``auto`` reads it.
All files are in the page cache. Medians over rounds, in which every contender runs once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions, ManifestSource, Source
from lit_async_data.tools.pack import pack, packed_source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import layouts, tables
from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

SIDE = 224


class Run(BaseRun):
    """How long to measure, and where the files are."""

    @property
    def seconds(self) -> float:
        return 0.1 if self.quick else 0.6


def rate(source: Source, shuffle: Literal["auto", "global"], batch: int, run: Run) -> float:
    """Samples per second."""
    options = LoaderOptions(batch_size=batch, shuffle=shuffle, worker_kind="thread")
    with AsyncLoader(source, options) as loader:
        batches = endless(loader)
        for _ in range(options.queue_depth + 2):
            next(batches)
        samples, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < run.seconds:
            samples += next(batches)
    source.close()
    return samples / passed


def endless(loader: AsyncLoader) -> Iterator[int]:
    """The number of samples in each batch, epoch after epoch."""
    while True:
        for batch in loader:
            yield len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def medians(contenders: Mapping[str, Callable[[], float]], run: Run) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(run.rounds):
        for name, measure in contenders.items():
            rates[name].append(measure())
    return {name: statistics.median(each) for name, each in rates.items()}


def before_and_after(name: str, open_source: Callable[[], Source], nbytes: int, batch: int, run: Run) -> dict[str, Any]:
    """The row of one input, packed by default."""
    path = os.path.join(run.folder, f"{name.partition(':')[0].replace(' ', '_')}.packed.h5")
    packed = pack(open_source(), path)
    plan, packing, after = packed.plan, packed.decoded / 1e6 / packed.seconds, packed.nbytes
    found = medians(
        {
            "before, auto": lambda: rate(open_source(), "auto", batch, run),
            "before, global": lambda: rate(open_source(), "global", batch, run),
            "after, global": lambda: rate(packed_source(path, plan), "global", batch, run),
        },
        run,
    )
    os.unlink(path)
    stored = "one per chunk" if plan.fields[0].chunk == 1 else "contiguous"
    row = {"input": name, **found, "MB before": nbytes / 1e6, "MB after": after / 1e6, "packing": packing}
    print(
        f"{name:<52} {found['before, auto']:>10,.0f} {found['before, global']:>10,.0f} {found['after, global']:>10,.0f}"
        f" {nbytes / 1e6:>9,.1f} {after / 1e6:>9,.1f}  {packing:>6,.0f}  {stored}"
    )
    return row


def heading() -> None:
    print(f"\n{'samples/s':<52} {'auto':>10} {'random':>10} {'packed':>10} {'MB':>9} {'packed':>9}  {'MB/s':>6}")


def of_hdf5(run: Run) -> Figures:
    heading()
    rows = []
    for full in layouts.FULL:
        # A few hundred MB would take longer, and tell the same.
        layout = dataclasses.replace(full, rows=max(full.rows // (16 if run.quick else 4), 8 * full.batch))
        path = layouts.write_layout(layout, run.folder, layout.name)
        rows.append(
            before_and_after(str(layout), functools.partial(HDF5Source, path), os.path.getsize(path), layout.batch, run)
        )
        os.unlink(path)
    path = recording(run)
    rows.append(
        before_and_after(
            "float32 rows of 64, gzip, chunks across time",
            functools.partial(HDF5Source, path, ["data"]),
            os.path.getsize(path),
            256,
            run,
        )
    )
    return rows


def recording(run: Run) -> str:
    """A recording whose chunks hold one channel over all time."""
    path, steps = os.path.join(run.folder, "recording.h5"), 20_000 if run.quick else 200_000
    walk = np.cumsum(np.random.default_rng(0).integers(-3, 4, (steps, 64)), 0, np.int32).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=walk, chunks=(steps, 1), compression="gzip", shuffle=True)
    return path


def of_tables(run: Run) -> Figures:
    heading()
    count = 256 if run.quick else 2_000
    rows = []
    small, large = tables.pngs(run.folder, 2 * count, tables.SMALL), tables.photographs(run.folder, count)
    to_side: dict[str, Any] = {"image_size": SIDE, "resize": "crop"}
    inputs: list[tuple[str, tables.Files, dict[str, Any]]] = [
        (f"PNG {tables.SMALL}×{tables.SMALL}", small, {}),
        (f"JPEG 256² to 500², to {SIDE}²", large, to_side),
    ]
    for name, files, options in inputs:
        made = functools.partial(ManifestSource, files.table, ("path", "label"), **options)
        rows.append(before_and_after(name, made, files.nbytes, 64, run))
    return rows


def goals(figures: Mapping[str, Figures]) -> Sequence[Goal]:
    rows = [row for part in ("hdf5", "tables") for row in figures.get(part, ())]
    return [
        Goal(
            f"{row['input']}: packed / as shuffle=auto reads the input",
            row["after, global"] / row["before, auto"],
            0.9,
            1,
        )
        for row in rows
    ]


PARTS = {"hdf5": of_hdf5, "tables": of_tables}

if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("h5py", "numpy"))
