"""A mixture of three sources, compared with its parts: calls and CPU per sample.

    python benchmarks/loading/shapes.py [--quick] [--json FILE] [--folder DIR] [mixture]

* mixture: 0.5, 0.25 and 0.25 of three HDF5 files in batches of 64, against a loader of each file alone with batches of
  32, 16 and 16, which together have the same samples. Once compressed by gzip, and once raw.

No workers: the loop reads, so that its CPU is all there is. Both take turns, round by round; medians. Calls are those
of Python functions of the package, which each take the GIL.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import lit_async_data
from lit_async_data import AsyncLoader, HDF5Source, MixtureSource

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

PACKAGE = str(Path(lit_async_data.__file__).parent)
BATCH, SHARES = 64, {"first": 0.5, "second": 0.25, "third": 0.25}
ROWS = {"first": 20_000, "second": 3_000, "third": 7_000}
OPTIONS = {"shuffle": "chunk", "shuffle_chunks": 16, "workers": 0, "worker_kind": "auto", "seed": 0}
MOST = 1.05  # times the parts


def write(folder: str, compression: str | None) -> dict[str, HDF5Source]:
    sources, rng = dict[str, HDF5Source](), np.random.default_rng(0)
    for name, rows in ROWS.items():
        path = f"{folder}/{name}_{compression}.h5"
        with h5py.File(path, "w") as file:
            data = rng.integers(0, 9, (rows, 32, 32), np.uint8)
            file.create_dataset("x", data=data, chunks=(64, 32, 32), compression=compression)
            file["y"] = np.arange(rows)
        sources[name] = HDF5Source(path, {"x": "x", "y": "y"})
    return sources


def endless(loader: AsyncLoader) -> Iterator[Any]:
    while True:
        yield from loader


def cpu_of(step: Callable[[], object], steps: int) -> float:
    """Microseconds of CPU per sample, all threads together."""
    started = time.process_time()
    for _ in range(steps):
        step()
    return 1e6 * (time.process_time() - started) / (steps * BATCH)


def calls_of(step: Callable[[], object], steps: int) -> float:
    """Calls of functions of the package per batch, in this thread."""
    calls = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return calls / steps


def mixture(run: BaseRun) -> Figures:
    steps, rounds, rows = (20, 2, Figures()) if run.quick else (400, 9, Figures())
    print(f"{'':<28} {'CPU, µs/sample':>15} {'calls/batch':>12}")
    for compression in ("gzip", None):
        sources = write(run.folder, compression)
        mixed = MixtureSource({name: (source, SHARES[name]) for name, source in sources.items()}, epoch="first")
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(AsyncLoader(mixed, {"batch_size": BATCH, **OPTIONS}))
            parts = [
                stack.enter_context(AsyncLoader(source, {"batch_size": int(SHARES[name] * BATCH), **OPTIONS}))
                for name, source in sources.items()
            ]
            whole, each = endless(loader), [endless(part) for part in parts]
            contenders = {"mixture": lambda whole=whole: next(whole), "its parts": lambda each=each: [*map(next, each)]}
            found: dict[str, list[float]] = {name: [] for name in contenders}
            for number in range(rounds + 1):
                for name, step in contenders.items():
                    cpu = cpu_of(step, steps)
                    found[name] += [cpu] if number else []  # the first round warms up
            for name, step in contenders.items():
                row = {"stored": compression or "raw", "contender": name, "cpu_us": statistics.median(found[name])}
                rows.append(row | {"calls": calls_of(step, steps)})
                print(f"{row['stored']:<6} {name:<21} {row['cpu_us']:>15.2f} {rows[-1]['calls']:>12.0f}")
        mixed.close()
    return rows


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    rows = figures.get("mixture", [])
    for mixed, parts in zip(rows[::2], rows[1::2], strict=True):
        for name, what in (("cpu_us", "CPU"), ("calls", "calls")):
            yield Goal(
                f"{what} of a mixture, {mixed['stored']}, times its parts", mixed[name] / parts[name], MOST, MOST, True
            )


PARTS = {"mixture": mixture}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, BaseRun, ("torch", "h5py"))
