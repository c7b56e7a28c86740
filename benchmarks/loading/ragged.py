"""Samples of variable length in HDF5, batched by length, by this package and by a DataLoader with a bucket sampler.

    python benchmarks/loading/ragged.py [--quick] [--json FILE] [--folder DIR] [speed | padding]

* speed: tokens of log-normal lengths, one axis of int32 and the offsets of the samples; at most 8 192 in a batch.
* padding: which share of all elements is padding, in buckets and in batches of any samples; and 3 ranks' batches.

Both use the same bounds. Rounds, medians and machine as in hdf5.py; the loop only counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.order.buckets import Buckets

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import Figures, Goal, argument_parser, run_parts

from loading.hdf5 import Run

BATCH, ELEMENTS = 512, 8192
# The goal, relative to the best DataLoader.
TIMES = 5
Batches = Callable[[], contextlib.AbstractContextManager[Iterator[dict[str, torch.Tensor]]]]


def written(run: Run) -> str:
    """The path of a file of sequences, which is written once."""
    path = f"{run.folder}/tokens.h5"
    if os.path.exists(path):
        return path
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(3.5, 0.8, 20_000 if run.quick else 1_000_000).astype(np.int64).clip(1, 2048)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    with h5py.File(path, "w") as file:
        file["tokens/values"] = generator.integers(1, 50_000, edges[-1], np.int32)
        file["tokens/offsets"] = edges
    return path


def loader_of(path: str, workers: int, rank: int = 0, ranks: int = 1) -> AsyncLoader:
    options = {"batch_size": BATCH, "shuffle": True, "batch_by": "x", "batch_elements": ELEMENTS, "workers": workers}
    return AsyncLoader(
        HDF5Source(path, {"x": "tokens"}), options | {"worker_kind": "thread"}, rank=rank, world_size=ranks
    )


@contextlib.contextmanager
def ours(path: str, workers: int) -> Iterator[Iterator[dict[str, torch.Tensor]]]:
    with loader_of(path, workers) as loader:
        yield (batch for _ in itertools.count() for batch in loader)


class Sequences(Dataset[Any]):
    """Padded batches: the sampler gives the samples of a whole batch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.values: h5py.Dataset | None = None
        with h5py.File(path) as file:
            self.edges = file["tokens/offsets"][...]

    def __getitem__(self, samples: list[int]) -> dict[str, torch.Tensor]:
        if self.values is None:
            self.values = h5py.File(self.path)["tokens/values"]
        rows = [torch.from_numpy(self.values[self.edges[n] : self.edges[n + 1]]) for n in samples]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"x": padded, "x_length": torch.tensor([len(row) for row in rows])}


def buckets(bounds: list[int], lengths: Any) -> Iterator[list[int]]:
    """Batches of like length, without end, as people write it."""
    for epoch in itertools.count():
        generator, batches = np.random.default_rng(epoch), []
        order = generator.permutation(len(lengths))
        which = np.searchsorted(bounds, lengths[order])
        for number, bound in enumerate(bounds):
            own, size = order[which == number], min(BATCH, ELEMENTS // bound)
            batches += [own[first : first + size].tolist() for first in range(0, len(own), size)]
        generator.shuffle(batches)
        yield from batches


@contextlib.contextmanager
def by_hand(path: str, workers: int) -> Iterator[Iterator[dict[str, torch.Tensor]]]:
    data = Sequences(path)
    bounds = Buckets.of(np.diff(data.edges), BATCH, ELEMENTS).bounds.tolist()
    loader = DataLoader(data, sampler=buckets(bounds, np.diff(data.edges)), batch_size=None, num_workers=workers)
    yield iter(loader)


def speed(run: Run) -> Figures:
    path = written(run)
    contenders: dict[str, Batches] = {}
    for workers in run.workers:
        contenders[f"AsyncLoader, {workers} workers"] = functools.partial(ours, path, workers)
        contenders[f"DataLoader, {workers} workers"] = functools.partial(by_hand, path, workers)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(run.rounds):
        for name, opened in contenders.items():
            with opened() as batches:
                per_second(batches, run.settle)
                rates[name].append(per_second(batches, run.seconds))
    medians = {name: [statistics.median(each) for each in zip(*found, strict=True)] for name, found in rates.items()}
    best = max(rate[0] for name, rate in medians.items() if name.startswith("DataLoader"))
    print(f"\n{'':<28} samples/s  elements/s  × best DataLoader")
    rows = []
    for name, (samples, elements) in medians.items():
        print(f"{name:<28} {samples:>9,.0f} {elements:>11,.0f} {samples / best:>17.2f}")
        rows.append({"contender": name, "samples_per_s": samples, "elements_per_s": elements, "times": samples / best})
    return rows


def per_second(batches: Iterator[dict[str, torch.Tensor]], seconds: float) -> tuple[float, float]:
    """Samples and useful elements per second, over at least 20 batches."""
    samples, elements, started = 0, 0, time.perf_counter()
    for taken in itertools.count(1):
        batch = next(batches)
        samples, elements = samples + len(batch["x"]), elements + int(batch["x_length"].sum())
        if (passed := time.perf_counter() - started) > seconds and taken >= 20:
            return samples / passed, elements / passed
    raise AssertionError


def padding(run: Run) -> Figures:
    path, found = written(run), set()
    for rank in range(3):
        loader = loader_of(path, 0, rank, 3)
        found.add(len(loader))
    plan = loader.order
    assert plan.buckets is not None
    padded, any_samples = plan.buckets.padding(BATCH)
    samples = sum(plan.batch(step).size for step in range(len(plan)))
    print(f"\npadding: {padded:.1%} in buckets, {any_samples:.1%} in batches of any samples")
    print(f"3 ranks have {sorted(found)} batches; the last rank has {samples:,} samples")
    return [{"padding": padded, "any": any_samples, "counts": sorted(found)}]


def goals(figures: Any) -> Iterator[Goal]:
    if rows := figures.get("speed"):
        best = max(row["times"] for row in rows if row["contender"].startswith("AsyncLoader"))
        yield Goal("samples/s, × the best DataLoader with a bucket sampler", best, TIMES, TIMES)
    if rows := figures.get("padding"):
        yield Goal("different numbers of batches on 3 ranks", len(rows[0]["counts"]), 1, 1, at_most=True)


if __name__ == "__main__":
    parts = {"speed": speed, "padding": padding}
    run_parts(argument_parser(__doc__, parts), parts, goals, Run, ("torch", "h5py"))
