"""HDF5 data in other forms than one file of samples, read by this package and by a DataLoader over h5py.

    python benchmarks/loading/people.py [--quick] [--json FILE] [--folder DIR] [windows | files | cells | balance ...]

* windows: float32 rows of 32 channels, 512 of them per sample, one row or 512 from one sample to the next.
* files: 200 files of 5 000 images.
* cells: the sparse rows of an h5ad file, delivered dense.
* balance: draws each class equally often, compared with a plain shuffle.

Rounds, medians and machine as in hdf5.py. All files are in the page cache, and the loop only counts batches. Before
that the program compares the values of a few batches with those of h5py. The files take up to 3.1 GB at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lit_async_data import Balanced, HDF5Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import recordings as writers
from files.recordings import CONTIGUOUS, GZIP, RECORDING
from measuring.program import Figures, Goal, argument_parser, run_parts
from readers import recordings as readers
from readers.hdf5 import OURS, Contender
from readers.recordings import BY_HAND, Reading

from loading.hdf5 import MIB, Run, medians

WINDOW = 512
# Bytes of decoded chunks that either loader keeps: all of the recording.
KEPT = 64 * MIB
KEEPS = "64 MiB kept"
AUTO = f"{OURS}, auto"
# The usual limit of open files in a shell.
HANDLES = 1024
# After this many batches all of the recording has been decoded.
WARM_UP = 12
# After this many batches the chunk caches of libhdf5, 8 MiB per file since 2.0, are full.
CACHES = 48
# The goal, relative to the best DataLoader over h5py.
TIMES = 5


def compare(run: Run, reading: Reading, chosen: Sequence[Contender], *, touched: bool = True) -> Figures:
    """Check the values of a data set, measure its contenders, and print the table.

    Args:
        run: How long to measure.
        reading: The data set.
        chosen: The contenders.
        touched: Read all data once before, so that every page is mapped.
    """
    readers.check(reading, 1 if run.quick else 3)
    if touched:
        readers.touch(reading)
    rates = medians(chosen, run)
    plain, best = (
        max(rates[contender.name] for contender in chosen if hand(contender)) for hand in (is_plain, is_by_hand)
    )
    print(f"\n{reading.name}, {len(reading.source):,} samples, batch {reading.batch}")
    print(f"{'':<50}  samples/s   MiB/s  × best DataLoader")
    rows = []
    for contender in chosen:
        rate = rates[contender.name]
        mib = rate * reading.sample_bytes / MIB
        row = {
            "reading": reading.name,
            "contender": contender.name,
            "family": contender.family,
            "workers": contender.workers,
        }
        row |= {"ours": contender.ours, "samples_per_s": rate, "mib_per_s": mib}
        rows.append(row | {"times_plain": rate / plain, "times_dataloader": rate / best})
        print(f"{contender.name:<50} {rate:>10,.0f} {mib:>7,.0f}  {rate / best:>17.2f}")
    return rows


def is_by_hand(contender: Contender) -> bool:
    return contender.family.startswith(BY_HAND)


def is_plain(contender: Contender) -> bool:
    """A DataLoader with default options."""
    return contender.family == BY_HAND


def both(run: Run, reading: Reading, warm_up: int = 0) -> list[Contender]:
    """AsyncLoader and a DataLoader, with the batches that each process of the latter needs to fill its caches."""
    ours = [readers.ours(reading, workers) for workers in run.workers]
    return ours + [readers.by_hand(reading, workers, warm_up=warm_up) for workers in run.workers]


# -- parts -------------------------------------------------------------------------------------------------------------


def windows(run: Run) -> Figures:
    rows = []
    for stored in RECORDING:
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            path = writers.recording(folder, stored, 40_000 if run.quick else 400_000)
            for stride in (1, WINDOW):
                reading = readers.windows(f"windows, stride {stride}, {stored}", path, WINDOW, stride)
                chosen = both(run, reading)
                if stored == GZIP:
                    chosen += repeated_decoding(run, reading, path, stride)
                else:
                    chosen.append(readers.in_memory(reading, path))
                # The first windows already touch all pages of this small file.
                rows += compare(run, reading, chosen, touched=False)
                reading.close()
    return rows


def repeated_decoding(run: Run, reading: Reading, path: str, stride: int) -> list[Contender]:
    """For compressed chunks: a global shuffle, which decodes chunks repeatedly, with and without a cache."""
    kept = {"shuffle": "global", "cache_bytes": KEPT}
    cached = functools.partial(readers.Windows, path, WINDOW, stride, rdcc_nbytes=KEPT)
    contenders = [readers.ours(reading, run.workers[-1], "global", shuffle="global")]
    contenders += [readers.ours(reading, workers, f"global, {KEEPS}", WARM_UP, **kept) for workers in run.workers]
    label = "64 MiB chunk cache"
    contenders += [readers.by_hand(reading, workers, label, WARM_UP, dataset=cached()) for workers in run.workers]
    return contenders


def files(run: Run) -> Figures:
    size = (20, 300, 32) if run.quick else (200, 5_000, 256)
    rows = []
    for stored in (CONTIGUOUS, GZIP):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            pattern = writers.images(folder, stored, *size)
            reading = readers.rows(f"{size[0]} files, {stored}", pattern)
            with open_file_limit(HANDLES):
                limited = dataclasses.replace(reading, source=HDF5Source(pattern))
            label = f"auto, {HANDLES} handles"
            chosen = both(run, reading, CACHES if stored == GZIP else 0)
            chosen += [readers.ours(limited, workers, label) for workers in run.workers]
            rows += compare(run, reading, chosen)
            reading.close()
            limited.close()
    return rows


@contextlib.contextmanager
def open_file_limit(handles: int) -> Iterator[None]:
    """Lower the limit of open files, which a source reads when it is built."""
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
            path = writers.cells(folder, stored, 2_000 if run.quick else 20_000)
            reading = readers.cells(f"sparse rows, {stored}", path)
            rows += compare(run, reading, both(run, reading))
            reading.close()
    return rows


def balance(run: Run) -> Figures:
    size = (1, 6_000, 32) if run.quick else (1, 100_000, 256)
    rows = []
    for stored in (CONTIGUOUS, GZIP):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            reading = readers.rows(f"balance, {stored}", writers.images(folder, stored, *size))
            readers.check(reading, 1, weights=Balanced("labels"))
            chosen = [readers.ours(reading, workers, "balance", weights=Balanced("labels")) for workers in run.workers]
            chosen += [readers.weighted(reading, workers) for workers in run.workers]
            rows += with_cost(compare(run, reading, both(run, reading) + chosen))
            reading.close()
    return rows


def with_cost(rows: Figures) -> Figures:
    """Add to each row its rate relative to a plain shuffle with as many workers."""
    plain = {(row["ours"], row["workers"]): row for row in rows if row["family"] in (AUTO, BY_HAND)}
    print("relative to a plain shuffle with as many workers:")
    for row in rows:
        row["of_plain"] = row["samples_per_s"] / plain[row["ours"], row["workers"]]["samples_per_s"]
        if row["family"] not in (AUTO, BY_HAND):
            print(f"{row['contender']:<50} {row['of_plain']:.2f}")
    return rows


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """AsyncLoader with default options against a default DataLoader, and the best of either."""
    label = f"times the best {BY_HAND}"
    for row_of in ("windows", "files"):
        rows = figures.get(row_of, [])
        for name in dict.fromkeys(row["reading"] for row in rows):
            mine = [row for row in rows if row["reading"] == name and row["ours"]]
            auto = max(row["times_plain"] for row in mine if row["family"] == AUTO)
            yield Goal(f"{name}, {label}", auto, TIMES, TIMES)
            if any(KEEPS in row["family"] for row in mine):
                best = max(row["times_dataloader"] for row in mine)
                yield Goal(f"{name}, {label}, 64 MiB of decoded chunks kept by either", best, TIMES, TIMES)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]] = {"windows": windows, "files": files, "cells": cells, "balance": balance}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py"))
