"""What does measuring every stage cost, and does the verdict name the cause?

    python benchmarks/promises/verdict.py [--quick] [--json FILE] [--folder DIR] [overhead | causes]

`overhead`: seconds per batch with the measuring as it is, over those with the clock of the stages put out of action, in
blocks that alternate; the median of the ratios. Small batches, so that it costs as much as it can. Beside each figure
stands what the measuring of one slot costs by itself, over the seconds of a slot.

`causes`: each cause of waiting is built in on purpose: slow storage, slow decoding, a slow transform in the readers and
in the loop, a loop that reads for itself, a foreign loader, a slow step. Does the verdict name it?
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions, Source, prefetched
from lit_async_data.host.metrics.stages import StageMeter
from lit_async_data.sources.contract.stage_clock import CLOCK, StageClock, Work
from lit_async_data.testing import ArraySource
from lit_async_data.verdict.diagnosis import Bound, verdict
from lit_async_data.verdict.watch import Loader, Watch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import Figures, Goal, argument_parser, run_parts

# Modules that count what the stages take.
COUNTING = (
    "host.pipeline.thread_pipeline",
    "sources.hdf5.readers.slabs",
    "sources.hdf5.readers.chunk_cache",
    "hooks.transformation",
)
MOST_OVERHEAD = 0.01
SAMPLES, BATCH = 4096, 16
# The time of a step, and of what is slow beside it.
STEP_S, SLOW_S = 0.004, 0.007
NO_WORK = Work()


@dataclasses.dataclass(frozen=True)
class Run:
    quick: bool
    folder: str

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 25

    @property
    def steps(self) -> int:
        return 40 if self.quick else 200


# -- what measuring costs ----------------------------------------------------------------------------------------------


class NoClock(StageClock):
    """Counts nothing."""

    def waited(self, began_s: float) -> float:
        return 0.0

    def decoded(self, seconds: float, stored: int, nbytes: int) -> None: ...

    def transformed(self, seconds: float) -> None: ...

    def waited_for_others(self, seconds: float) -> None: ...

    def take(self) -> Work:
        return NO_WORK


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Put the clock of the stages out of action."""
    with contextlib.ExitStack() as stack:
        for name in COUNTING:
            module = importlib.import_module(f"lit_async_data.{name}")
            stack.enter_context(mock.patch.object(module, "CLOCK", NoClock()))
        yield


def seconds_per_batch(batches: Iterator[Any], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    return passed / count


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        # Not `yield from`, which would close the loader with this generator.
        for batch in loader:  # noqa: UP028
            yield batch


def own_cost(loader: AsyncLoader, batch_s: float) -> float:
    """What measuring a slot costs in a row of many, over the seconds of a slot."""
    began, times, meter = time.perf_counter(), 20_000, StageMeter()
    for _ in range(times):
        time.perf_counter()  # before the wait for a slot
        CLOCK.waited(began)
        meter.worked(CLOCK.take())
    return (time.perf_counter() - began) / times / (batch_s * loader.footprint.layout.batches)


def overhead(run: Run) -> Figures:
    """Seconds per batch with the clock, over those without."""
    contiguous, compressed = os.path.join(run.folder, "a.h5"), os.path.join(run.folder, "b.h5")
    rng = np.random.default_rng(0)
    values = (rng.integers(0, 16, (SAMPLES, 256)) * 3).astype("u1")
    with h5py.File(contiguous, "w") as file:
        file["data"], file["labels"] = values, np.arange(SAMPLES)
    with h5py.File(compressed, "w") as file:
        file.create_dataset("data", data=values, chunks=(64, 256), compression="gzip")
        file["labels"] = np.arange(SAMPLES)
    figures: Figures = []
    for name, path in (("contiguous", contiguous), ("gzip, 64 samples per chunk", compressed)):
        options = LoaderOptions(batch_size=BATCH, shuffle=True, worker_kind="thread", workers=1)
        with AsyncLoader(HDF5Source(path), options) as loader:
            batches, ratios, with_s = endless(loader), [], []
            block_s = 0.05 if run.quick else 0.3
            seconds_per_batch(batches, 2 * block_s)
            for turn in range(run.rounds):
                taken = {}
                for measured in (True, False) if turn % 2 else (False, True):
                    with contextlib.nullcontext() if measured else unmeasured():
                        seconds_per_batch(batches, block_s / 10)  # what was read in the turn before
                        taken[measured] = seconds_per_batch(batches, block_s)
                ratios.append(taken[True] / taken[False] - 1)
                with_s.append(taken[True])
            batch_s = statistics.median(with_s)
            row: dict[str, Any] = {
                "files": name,
                "batch_us": 1e6 * batch_s,
                "overhead": statistics.median(ratios),
                "own_cost": own_cost(loader, batch_s),
            }
        figures.append(row)
        print(
            f"{name:<30} {row['batch_us']:7.1f} µs per batch of {BATCH}: measuring takes {100 * row['overhead']:+.2f} %"
            f" of it; by itself {100 * row['own_cost']:.2f} %",
            flush=True,
        )
    return figures


# -- whether the verdict names the cause -------------------------------------------------------------------------------


def worked(seconds: float) -> None:
    """Keep a core busy, with the GIL."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SlowStorage(ArraySource):
    """Waits, as for a disk or a network."""

    def read_into(self, samples: npt.NDArray[np.int64], out: Mapping[str, npt.NDArray[Any]]) -> None:
        time.sleep(SLOW_S)
        super().read_into(samples, out)


class SlowTransform:
    """Python code that takes long."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        worked(SLOW_S)
        return batch


class SlowDataset(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset whose samples take long."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        worked(SLOW_S / BATCH)
        return torch.zeros(64)


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something slow, and what the verdict should say."""

    name: str
    bounds: tuple[Bound, ...]
    source: Callable[[Run], Source] | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    transforms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step_s: float = STEP_S

    def loader(self, run: Run) -> Loader:
        if self.source is None:
            foreign = torch.utils.data.DataLoader(SlowDataset(), BATCH, num_workers=1, persistent_workers=True)
            return prefetched(foreign, device="cpu")
        options = LoaderOptions.of({"batch_size": BATCH, "workers": 1, **self.options})
        return AsyncLoader(self.source(run), options, **self.transforms)


def arrays(run: Run) -> Source:
    return ArraySource({"x": np.zeros((SAMPLES, 64), "f4")})


def slow_storage(run: Run) -> Source:
    return SlowStorage({"x": np.zeros((SAMPLES, 64), "f4")})


def compressed(run: Run) -> Source:
    """A file of which a batch takes some milliseconds to decode."""
    path = os.path.join(run.folder, "slow.h5")
    if not os.path.exists(path):
        rng = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            shape = (SAMPLES // 8, 160, 1024)
            data = file.create_dataset("data", shape, "u1", chunks=(4, *shape[1:]), compression="gzip")
            for first in range(0, len(data), 64):
                data[first : first + 64] = rng.integers(0, 12, (64, *shape[1:])) * 7
            file["labels"] = np.arange(len(data))
    return HDF5Source(path)


CAUSES = (
    Cause("slow storage", (Bound.STORAGE, Bound.LOCK), slow_storage),
    Cause("slow decoding", (Bound.DECODING,), compressed, {"worker_kind": "process", "shuffle_chunks": 8}),
    Cause("slow transform", (Bound.TRANSFORM,), arrays, {}, {"batch_transform": SlowTransform()}),
    Cause("slow, in the loop", (Bound.IN_LOOP,), arrays, {}, {"device_transform": SlowTransform()}),
    Cause("the loop reads", (Bound.CALLER,), slow_storage, {"workers": 0}),
    Cause("a foreign loader", (Bound.FOREIGN,), None),
    Cause("slow step", (Bound.LOOP, Bound.HANDOVER), arrays, step_s=5 * STEP_S),
)


def causes(run: Run) -> Figures:
    """Each cause, and its verdict."""
    figures: Figures = []
    for cause in CAUSES:
        with cause.loader(run) as loader:
            batches = endless(loader)
            for _ in range(run.steps // 5):
                next(batches)
            watch = Watch([loader])
            for _ in range(run.steps):
                next(batches)
                time.sleep(cause.step_s)
            facts = watch.facts()
        found = verdict(facts)
        said = found.sentence("the loop", f"{facts.total_s:.1f} s")
        figures.append({"cause": cause.name, "named": found.bound in cause.bounds, "said": said})
        print(f"{cause.name:<22} {said}", flush=True)
    return figures


PARTS = {"overhead": overhead, "causes": causes}


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for row in figures.get("overhead", []):
        yield Goal(f"{row['files']}: share of a batch", row["overhead"], MOST_OVERHEAD, MOST_OVERHEAD, at_most=True)
    for row in figures.get("causes", []):
        yield Goal(f"{row['cause']}: named", float(row["named"]), 1, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(
        argument_parser(__doc__, PARTS), PARTS, goals, Run, {"torch": torch.__version__, "h5py": h5py.__version__}
    )
