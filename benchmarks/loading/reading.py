"""Rows as numpy arrays, by `open_reader` and by h5py.

    python benchmarks/loading/reading.py [--quick] [--json FILE] [--folder DIR] [rows ...]

Each layout of `benchmarks/files/layouts.py`, and some with other filters: all rows in order, and requests of 256 random
rows. h5py reads blocks of consecutive rows, and random rows both by its fancy selection of sorted rows and one by one.
All files are in the page cache. MB/s of values, medians over rounds in which each contender runs once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.reading import FileReader, open_reader

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.layouts import FULL, Layout, write_layout
from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

Array = npt.NDArray[Any]
RANDOM_ROWS, SEQUENTIAL_BYTES = 256, 2**25
OTHERS = (
    Layout("C lzf", (3, 64, 64), "u1", 20_480, chunk=64, packed=True, codec="lzf"),
    Layout("C raw", (3, 64, 64), "u1", 20_480, chunk=64),
)
# h5py registers this filter by its number.
BLOSC: Any = 32001


def ours(reader: FileReader, out: Array, rows: Any) -> None:
    reader.read("data", rows, out)


def h5py_block(data: h5py.Dataset, out: Array, rows: slice) -> None:
    data.read_direct(out, rows)


def h5py_sorted(data: h5py.Dataset, out: Array, rows: Array) -> None:
    wanted, places = np.unique(rows, return_inverse=True)
    out[...] = data[wanted][places]


def h5py_rows(data: h5py.Dataset, out: Array, rows: Array) -> None:
    for place, row in enumerate(rows.tolist()):
        out[place] = data[row]


def rate(read: Callable[[Any], None], requests: Sequence[Any], nbytes: int, seconds: float) -> float:
    """MB/s, over requests of this many bytes each."""
    started, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not done:
        read(requests[done % len(requests)])
        done += 1
    return nbytes * done / passed / 1e6


def of_layout(layout: Layout, run: BaseRun) -> dict[str, Any]:
    path = write_layout(layout, run.folder, layout.name)
    rng = np.random.default_rng(0)
    block = min(SEQUENTIAL_BYTES // layout.sample_bytes, layout.rows)
    in_order = [slice(first, first + block) for first in range(0, layout.rows - block + 1, block)]
    at_random = [rng.integers(0, layout.rows, RANDOM_ROWS) for _ in range(64)]
    rates: dict[str, list[float]] = {}
    with h5py.File(path) as file, open_reader(path, threads=1) as one, open_reader(path, threads=2) as two:
        for kind, requests, size in (("in order", in_order, block), ("random", at_random, RANDOM_ROWS)):
            out = np.empty((size, *layout.shape), layout.dtype)
            others: dict[str, Callable[..., None]] = {"h5py": h5py_block}
            if kind == "random":
                others = {"h5py sorted": h5py_sorted, "h5py rows": h5py_rows}
            contenders: list[Any] = [("1 thread", ours, one), ("2 threads", ours, two)]
            contenders += [(name, read, file["data"]) for name, read in others.items()]
            for _ in range(1 if run.quick else 5):
                for name, read, of in contenders:
                    speed = rate(functools.partial(read, of, out), requests, out.nbytes, 0.05 if run.quick else 0.5)
                    rates.setdefault(f"{kind}, {name}", []).append(speed)
    os.unlink(path)
    row = {"layout": str(layout), **{name: statistics.median(speeds) for name, speeds in rates.items()}}
    print(f"{layout!s:<52}" + "".join(f"{value:>10,.0f}" for value in list(row.values())[1:]), flush=True)
    return row


def of_rows(run: BaseRun) -> Figures:
    print("\nMB/s in order: 1 thread, 2, h5py; at random: 1 thread, 2, h5py sorted, h5py row by row")
    layouts = [*FULL, *OTHERS]
    if importlib.util.find_spec("hdf5plugin") and importlib.util.find_spec("imagecodecs"):
        importlib.import_module("hdf5plugin")  # registers the filter for h5py
        layouts.append(dataclasses.replace(OTHERS[0], name="C blosc", codec=BLOSC))
    part = 16 if run.quick else 4
    return [of_layout(dataclasses.replace(each, rows=max(each.rows // part, 1024)), run) for each in layouts]


def goals(figures: Mapping[str, Figures]) -> Sequence[Goal]:
    rows = [row for part in figures.values() for row in part]
    best = [max(row["random, h5py sorted"], row["random, h5py rows"]) for row in rows]
    return [
        Goal(f"{row['layout']}: random / the best of h5py", row["random, 2 threads"] / other, 1, 2)
        for row, other in zip(rows, best, strict=True)
    ]


PARTS = {"rows": of_rows}

if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, BaseRun, ("h5py", "numpy"))
