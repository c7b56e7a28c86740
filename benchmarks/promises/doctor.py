"""Is `doctor` right? Its predictions against whole epochs, with the options that it advises.

    python benchmarks/promises/doctor.py [--quick] [--json FILE] [--folder DIR] [hdf5 | tables ...]

* hdf5: the layouts of `benchmarks/loading/hdf5.py`.
* tables: PNG and JPEG files that a table names.

In every round, ``doctor`` runs in a process of its own, as a user starts it. Then a loop reads for some seconds with
the options that it advises: as fast as it can, from the page cache and from the disk; and at 0.8 of the rate that was
predicted, where it should not wait. Medians over rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions, ManifestSource, Source
from lit_async_data.tools.doctor.rates import samples_in

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import layouts, tables
from measuring import page_cache
from measuring.program import Figures, Goal, argument_parser, run_parts

SIDE = 224
# The share of the predicted rate at which a loop should not wait, and how many of its batches may be late.
FED, MOST_LATE = 0.8, 0.05
NEAR = 0.25
# The time limit for an epoch from the disk, as a multiple of the other measurements' time. Its rate rises as the page
# cache fills, so a shorter measurement would be too low.
WHOLE = 10
# Chunks of a compressed file whose chunks hold several samples. Before its first batch, the chunk shuffle decodes a
# group of 128 of them, which does not count.
CHUNKS = 1500
# The share of files that must have left the page cache.
DROPPED = 0.9


@dataclasses.dataclass(frozen=True)
class Run:
    """How long to measure, and where the files are."""

    quick: bool
    folder: str

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def seconds(self) -> float:
        return 0.2 if self.quick else 3.0


def predicted(paths: Sequence[str], arguments: Sequence[str], batch: int, run: Run) -> dict[str, Any]:
    """What ``doctor`` prints."""
    command = [sys.executable, "-m", "lit_async_data", "doctor", *paths, *arguments, "--json"]
    command += ["--batch-size", str(batch), *(["--seconds", "0.1"] if run.quick else [])]
    printed: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return printed


def rate(source: Source, options: LoaderOptions, seconds: float, epochs: float = float("inf")) -> float:
    """Samples per second of a loop that does nothing else, after the first batch."""
    with AsyncLoader(source, options) as loader:
        samples = -loader.options.batch_size
        for batch in batches(loader, epochs):
            if samples < 0:
                started = time.perf_counter()
            samples += samples_in(batch)
            passed = time.perf_counter() - started
            if passed >= seconds:
                break
    source.close()
    return samples / passed


def late(source: Source, options: LoaderOptions, samples_per_s: float, seconds: float) -> float:
    """The share of its batches that are not there when a loop wants them which takes them at a rate.

    As in training, a step begins with its batch: after one that came late, the loop does not hurry.
    """
    step_s = options.batch_size / samples_per_s
    with AsyncLoader(source, options) as loader:
        starved = 0
        for number, _ in enumerate(batches(loader)):
            now, waited = time.perf_counter(), loader.stats().read.starved
            if number == 0:  # while it came, nothing could be ready
                began, before = now, waited
            if number == 0 or waited > starved:
                due = now
            starved = waited
            if now - began >= seconds:
                break
            due += step_s  # not after each batch: sleeps are longer than they should be
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
    source.close()
    return (starved - before) / max(number, 1)


def batches(loader: AsyncLoader, epochs: float = float("inf")) -> Iterator[Any]:
    epoch = 0
    while epoch < epochs:
        yield from loader
        epoch += 1


@dataclasses.dataclass(frozen=True)
class Input:
    """Files, as ``doctor`` gets them and as a loop reads them.

    Attributes:
        files: All that are read, to drop them from the page cache.
    """

    name: str
    paths: Sequence[str]
    arguments: Sequence[str]
    opened: Callable[[], Source]
    files: Sequence[str]
    batch: int


def rows_of(inputs: Iterator[Input], run: Run) -> Figures:
    print(f"\n{'measured / predicted':<46} {'samples/s':>10} {'memory':>7} {'disk':>6} {'late':>6}  options")
    rows = []
    for each in inputs:
        found = [one_round(each, run) for _ in range(run.rounds)]
        row: dict[str, Any] = {"input": each.name}
        for key in ("predicted", "memory", "disk", "late"):
            known = [value for figures in found if (value := figures[key]) is not None]
            row[key] = statistics.median(known) if known else None
        row["options"] = [figures["options"] for figures in found]
        disk = "–" if row["disk"] is None else f"{row['disk']:.2f}"
        print(
            f"{each.name:<46} {row['predicted']:>10,.0f} {row['memory']:>7.2f} {disk:>6} {row['late']:>6.3f}  "
            f"{found[0]['options']}"
        )
        rows.append(row)
    return rows


def one_round(each: Input, run: Run) -> dict[str, Any]:
    report = predicted(each.paths, each.arguments, each.batch, run)
    options = LoaderOptions(batch_size=each.batch, **report["options"])
    warm, cold = report["warm"]["samples_per_s"], report["cold"]
    from_memory = rate(each.opened(), options, run.seconds)
    waits = late(each.opened(), options, FED * warm, run.seconds)
    on_disk = sum(page_cache.drop_file(path) for path in each.files) > DROPPED * len(each.files)
    from_disk = rate(each.opened(), options, WHOLE * run.seconds, epochs=1) if on_disk and cold else None
    return {
        "predicted": warm,
        "memory": from_memory / warm,
        "disk": from_disk and from_disk / cold["samples_per_s"],
        "late": waits,
        "options": report["options"],
    }


def of_hdf5(run: Run) -> Figures:
    def written() -> Iterator[Input]:
        for full in layouts.FULL:
            rows = max(full.rows // (16 if run.quick else 2), 8 * full.batch)
            if full.packed and full.chunk not in (None, 1) and not run.quick:
                rows = CHUNKS * full.chunk
            layout = dataclasses.replace(full, rows=rows)
            path = layouts.write_layout(layout, run.folder, layout.name)
            opened = functools.partial(HDF5Source, path, {"x": "data", "y": "labels"})
            yield Input(str(layout), [path], ["--fields", "x=data", "y=labels"], opened, [path], layout.batch)
            os.unlink(path)

    return rows_of(written(), run)


def of_tables(run: Run) -> Figures:
    count = 256 if run.quick else 3_000
    fields = {"x": "path", "y": "label"}
    typed = ["--fields", "x=path", "y=label"]
    small, large = tables.pngs(run.folder, 2 * count, tables.SMALL), tables.photographs(run.folder, count)

    def inputs() -> Iterator[Input]:
        opened = functools.partial(ManifestSource, small.table, fields)
        yield Input(f"PNG {tables.SMALL}×{tables.SMALL}", [small.table], typed, opened, small.paths, 64)
        opened = functools.partial(ManifestSource, large.table, fields, image_size=SIDE, resize="crop")
        size = ["--image-size", str(SIDE), "--resize", "crop"]
        yield Input(f"JPEG 256² to 500², to {SIDE}²", [large.table], [*typed, *size], opened, large.paths, 64)

    return rows_of(inputs(), run)


def goals(figures: Mapping[str, Figures]) -> Sequence[Goal]:
    rows = [row for part in figures.values() for row in part]
    reached = []
    for row in rows:
        for key in ("memory", "disk"):
            off = None if row[key] is None else abs(1 - row[key])
            reached.append(Goal(f"{row['input']}: error of the prediction, {key}", off, NEAR, NEAR, at_most=True))
        reached.append(
            Goal(f"{row['input']}: late batches at {FED} of it", row["late"], MOST_LATE, MOST_LATE, at_most=True)
        )
    return reached


PARTS = {"hdf5": of_hdf5, "tables": of_tables}

if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, {"h5py": h5py.__version__, "numpy": np.__version__})
