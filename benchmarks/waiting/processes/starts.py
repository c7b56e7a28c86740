"""How long the loop waits for the first batch, and from one epoch to the next."""

from __future__ import annotations

import compileall
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from loading.hdf5 import Run
from measuring.program import Figures
from readers.hdf5 import OURS

import lit_async_data
from lit_async_data import AsyncLoader, HDF5Source
from waiting import beside
from waiting.processes.contenders import Transformed, finite
from waiting.processes.transforms import cheap

Opened = Callable[[], AbstractContextManager[Any]]
BATCH, BATCHES, EPOCHS = 64, 16, 3
# Seconds that the loop computes for each batch, so that there is time to read ahead.
STEP_S = 0.02


def epochs(opened: Opened) -> tuple[float, list[float]]:
    """Seconds until the first batch, and from the end of the last step of each epoch to the first batch of the next."""
    gaps, first, ended = [], 0.0, time.perf_counter()
    with opened() as loader:
        for epoch in range(EPOCHS):
            for number, _ in enumerate(loader):
                passed = time.perf_counter() - ended
                if not number and epoch:
                    gaps.append(passed)
                elif not number:
                    first = passed
                time.sleep(STEP_S)
                ended = time.perf_counter()
    return first, gaps


def starts(run: Run) -> Figures:
    """Loaders of a small file with a transform, started anew in each round."""
    layout = dataclasses.replace(run.layouts["A"], rows=BATCH * BATCHES, batch=BATCH)
    path = run.path(layout, "starts")
    source, dataset = HDF5Source(path), Transformed(path, cheap)
    contenders: dict[str, Opened] = {}
    for kind, workers in (("process", 1), ("process", 2), ("auto", "auto"), ("thread", 1)):
        options = {"batch_size": BATCH, "shuffle": True, "workers": workers, "worker_kind": kind, "drop_last": True}
        label = "auto" if kind == "auto" else f"{kind}, {workers} worker{'s' if workers != 1 else ''}"
        contenders[f"{OURS}, {label}"] = functools.partial(AsyncLoader, source, options, sample_transform=cheap)
    for start in ("fork", "spawn"):
        for persistent in (False, True):
            label = f"DataLoader, {start}{', persistent' if persistent else ''}, 2 workers"
            contenders[label] = functools.partial(_entered, dataset, start, persistent)
    turns: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in contenders}
    for folder in (Path(lit_async_data.__file__).parent, Path(beside.__file__).parents[1]):  # as pip does on installing
        compileall.compile_dir(folder, quiet=2)
    with closing(source):
        for _ in range(run.rounds):
            for name, opened in contenders.items():
                turns[name].append(epochs(opened))
    print(f"\n{layout}, batch {BATCH}, {BATCHES} batches per epoch, steps of {1000 * STEP_S:.0f} ms")
    print(f"{'':<40}  first batch, ms  between epochs, ms  longest")
    rows = []
    for name, found in turns.items():
        gaps = [gap for _, each in found for gap in each]
        first, gap, longest = statistics.median(first for first, _ in found), statistics.median(gaps), max(gaps)
        rows.append({"contender": name, "first_s": first, "gap_s": gap, "longest_gap_s": longest})
        print(f"{name:<40} {1000 * first:>16,.0f} {1000 * gap:>19.2f} {1000 * longest:>8.2f}")
    return rows


def _entered(dataset: Any, start: str, persistent: bool) -> AbstractContextManager[Any]:
    return nullcontext(finite(dataset, BATCH, 2, start, persistent=persistent))
