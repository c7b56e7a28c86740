"""What people have besides one file of samples, read by this project and by a DataLoader over h5py.

    python benchmarks/people.py [--quick] [--json FILE] [--folder DIR] [windows | files | cells | balance ...]

* windows: float32 rows of 32 channels, 512 of them per sample, one row or 512 from one sample to the next.
* files: 200 files of 5 000 images.
* cells: the sparse rows of an h5ad file, delivered dense.
* balance: each class as often as any other, against each sample once.

Turns, medians and machine as in hdf5.py: all files are in the page cache, and batches are only counted. Before that,
the values of a few batches are compared with what h5py reads. The files take up to 3.1 GB (2.9 GiB) at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import h5py
import torch
from files import recordings as files_of
from files.recordings import CONTIGUOUS, GZIP, RECORDING
from hdf5 import MIB, Run, turn
from measuring.program import Goal, arguments, ran
from readers import recordings as ways
from readers.hdf5 import OURS, Way
from readers.recordings import BY_HAND, Reading

from lit_async_data import HDF5Source

WINDOW = 512
# Decoded chunks that either keeps, in bytes: all of the recording.
KEPT = 64 * MIB
KEEPS = "64 MiB kept"
AUTO = f"{OURS}, auto"
# Open files that a shell usually allows.
HANDLES = 1024
# Batches until all of the recording has been decoded.
WARM_UP = 12
# The same for what libhdf5 keeps of each of many files, 8 MiB since 2.0.
CACHES = 48
# Times the best DataLoader over h5py.
TIMES = 5
Figures = list[dict[str, Any]]


def compared(run: Run, reading: Reading, chosen: Sequence[Way], *, touched: bool = True) -> Figures:
    """Check a reading's values, measure ways in turns, and show them.

    Args:
        run: How long.
        reading: What is read.
        chosen: By what.
        touched: Read all of it once before, so that every page is mapped.
    """
    rates: dict[str, list[float]] = {way.name: [] for way in chosen}
    ways.check(reading, 1 if run.quick else 3)
    if touched:
        ways.touch(reading)
    for _ in range(run.rounds):
        for way in chosen:
            rates[way.name].append(turn(way, run))
    found = {name: statistics.median(rate) for name, rate in rates.items()}
    plain, best = (max(found[way.name] for way in chosen if hand(way)) for hand in (is_plain, is_by_hand))
    print(f"\n{reading.name}, {len(reading.source):,} samples, batch {reading.batch}")
    print(f"{'':<50}  samples/s   MiB/s  × best DataLoader")
    rows = []
    for way in chosen:
        rate = found[way.name]
        mib = rate * reading.sample_bytes / MIB
        row = {"reading": reading.name, "way": way.name, "family": way.family, "workers": way.workers}
        row |= {"ours": way.ours, "samples_per_s": rate, "mib_per_s": mib}
        rows.append(row | {"times_plain": rate / plain, "times_dataloader": rate / best})
        print(f"{way.name:<50} {rate:>10,.0f} {mib:>7,.0f}  {rate / best:>17.2f}")
    return rows


def is_by_hand(way: Way) -> bool:
    return way.family.startswith(BY_HAND)


def is_plain(way: Way) -> bool:
    """A DataLoader with nothing chosen."""
    return way.family == BY_HAND


def both(run: Run, reading: Reading, warm_up: int = 0) -> list[Way]:
    """Ours and a DataLoader, which needs so many batches in each process until its caches are full."""
    found = [ways.ours(reading, workers) for workers in run.workers]
    return found + [ways.by_hand(reading, workers, warm_up=warm_up) for workers in run.workers]


# -- parts -------------------------------------------------------------------------------------------------------------


def windows(run: Run) -> Figures:
    rows = []
    for stored in RECORDING:
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            path = files_of.recording(folder, stored, 40_000 if run.quick else 400_000)
            for stride in (1, WINDOW):
                reading = ways.windows(f"windows, stride {stride}, {stored}", path, WINDOW, stride)
                chosen = both(run, reading)
                if stored == GZIP:
                    chosen += decoded_often(run, reading, path, stride)
                else:
                    chosen.append(ways.in_memory(reading, path))
                # Windows of any stride touch all pages of a file this small at once.
                rows += compared(run, reading, chosen, touched=False)
                reading.close()
    return rows


def decoded_often(run: Run, reading: Reading, path: str, stride: int) -> list[Way]:
    """Where chunks are compressed: orders that decode them many times over, and what is done about it."""
    kept = {"shuffle": "global", "cache_bytes": KEPT}
    cached = functools.partial(ways.Windows, path, WINDOW, stride, rdcc_nbytes=KEPT)
    found = [ways.ours(reading, run.workers[-1], "global", shuffle="global")]
    found += [ways.ours(reading, workers, f"global, {KEEPS}", WARM_UP, **kept) for workers in run.workers]
    said = "64 MiB chunk cache"
    found += [ways.by_hand(reading, workers, said, WARM_UP, dataset=cached()) for workers in run.workers]
    return found


def files(run: Run) -> Figures:
    size = (20, 300, 32) if run.quick else (200, 5_000, 256)
    rows = []
    for stored in (CONTIGUOUS, GZIP):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            pattern = files_of.images(folder, stored, *size)
            reading = ways.rows(f"{size[0]} files, {stored}", pattern)
            with at_most(HANDLES):
                limited = dataclasses.replace(reading, source=HDF5Source(pattern))
            said = f"auto, {HANDLES} handles"
            chosen = both(run, reading, CACHES if stored == GZIP else 0)
            chosen += [ways.ours(limited, workers, said) for workers in run.workers]
            rows += compared(run, reading, chosen)
            reading.close()
            limited.close()
    return rows


@contextlib.contextmanager
def at_most(handles: int) -> Iterator[None]:
    """So many files may be open, as far as a source can tell when it is built."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(handles, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def cells(run: Run) -> Figures:
    rows = []
    for stored in (CONTIGUOUS, GZIP):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            path = files_of.cells(folder, stored, 2_000 if run.quick else 20_000)
            reading = ways.cells(f"sparse rows, {stored}", path)
            rows += compared(run, reading, both(run, reading))
            reading.close()
    return rows


def balance(run: Run) -> Figures:
    size = (1, 6_000, 32) if run.quick else (1, 100_000, 256)
    rows = []
    for stored in (CONTIGUOUS, GZIP):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            reading = ways.rows(f"balance, {stored}", files_of.images(folder, stored, *size))
            ways.check(reading, 1, balance="labels")
            chosen = [ways.ours(reading, workers, "balance", balance="labels") for workers in run.workers]
            chosen += [ways.weighted(reading, workers) for workers in run.workers]
            rows += with_cost(compared(run, reading, both(run, reading) + chosen))
            reading.close()
    return rows


def with_cost(rows: Figures) -> Figures:
    """Add to each row what its way reaches of a plain shuffle with as many workers."""
    plain = {(row["ours"], row["workers"]): row for row in rows if row["family"] in (AUTO, BY_HAND)}
    print("of a plain shuffle with as many workers:")
    for row in rows:
        row["of_plain"] = row["samples_per_s"] / plain[row["ours"], row["workers"]]["samples_per_s"]
        if row["family"] not in (AUTO, BY_HAND):
            print(f"{row['way']:<50} {row['of_plain']:.2f}")
    return rows


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """Where files are read: with nothing chosen on either side, and by the best of either side."""
    said = f"times the best {BY_HAND}"
    for row_of in ("windows", "files"):
        rows = figures.get(row_of, [])
        for name in dict.fromkeys(row["reading"] for row in rows):
            mine = [row for row in rows if row["reading"] == name and row["ours"]]
            auto = max(row["times_plain"] for row in mine if row["family"] == AUTO)
            yield Goal(f"{name}, {said}", auto, TIMES, TIMES)
            if any(KEEPS in row["family"] for row in mine):
                best = max(row["times_dataloader"] for row in mine)
                yield Goal(f"{name}, {said}, 64 MiB of decoded chunks kept by either", best, TIMES, TIMES)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]] = {"windows": windows, "files": files, "cells": cells, "balance": balance}


def main() -> None:
    ran(arguments(__doc__, PARTS), PARTS, goals, Run, {"torch": torch.__version__, "h5py": h5py.__version__})


if __name__ == "__main__":
    main()
