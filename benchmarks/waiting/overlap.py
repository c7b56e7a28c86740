"""Does T1 + T2 become max(T1, T2)? Loading, copying and training at the same time, through the Trainer.

    python benchmarks/waiting/overlap.py [--quick] [--json FILE] [waits | work | device ...]

* waits: loading and steps that sleep, in the proportions of the 2020 loader's table, at a thirtieth of its seconds.
* work: loading that inflates and steps that multiply, neither of which holds the GIL, for the same seconds on an idle
  core. The limit is the overlap of two unrelated threads.
* device: copies to a simulated device and steps on it. Its two streams are threads; copies and steps take a given time,
  and each step checks that it sees its own batch.

T1: loading (or copying) alone. T2: the same Trainer with data in memory. In sequence: each batch is read when the loop
asks for it. All are interleaved in one run; figures are medians, without the first batch of each run.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

import lit_async_data as lad
from lit_async_data import AsyncLoader, DatasetSource
from lit_async_data.testing import ArraySource

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import BaseRun, Figures, Goal, argument_parser, medians, run_parts
from measuring.trainer_steps import Contender, Steps, Work, fitted

from waiting.on_device.simulated_overlap import BEFORE, DEVICE, DEVICE_STEP_S, device_ways, on_device

# Seconds per sample of loading (T1) and training (T2) by batch size, measured in 2020 on Mask R-CNN with a loader that
# copies on a side stream (from its table: "T1+T2 sequential" less "T1 loading").
TABLE = {1: (0.6390, 0.7473), 2: (0.4363, 0.6710), 3: (0.4501, 0.6725), 4: (0.5326, 0.6792)}
SCALE = 1 / 30
# The goal: max(T1, T2) / asynchronous, for `work` relative to two unrelated threads.
WANTED = 0.98


class Run(BaseRun):
    """How long to measure."""

    @property
    def batches(self) -> list[int]:
        """Batch sizes."""
        return [1, 4] if self.quick else list(TABLE)

    def steps(self, batch: int) -> int:
        return max((12 if self.quick else 18) // batch, 6)


# -- work ---------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def together(first: Callable[[], None], second: Callable[[], None]) -> float:
    """Seconds that two unrelated threads take."""
    threads = [threading.Thread(target=work) for work in (first, second)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run)


def steadily(piece: Callable[[], Any]) -> Work:
    """Work that repeats a piece for a given time, as measured on an idle core."""
    pieces = 50

    def rate() -> float:
        return pieces / timed(lambda: [piece() for _ in range(pieces)])

    per_second = statistics.median(rate() for _ in range(9))

    def work(seconds: float) -> None:
        for _ in range(max(round(seconds * per_second), 1)):
            piece()

    return work


def inflating() -> Work:
    """Loading: inflates for a fifth of a millisecond at a time, without the GIL."""
    packed = zlib.compress(np.random.default_rng(0).integers(0, 16, 2**16, dtype=np.uint8).tobytes())
    return steadily(functools.partial(zlib.decompress, packed))


def multiplying() -> Work:
    """A step: multiplies matrices on one thread."""
    values, out = torch.ones(192, 192), torch.empty(192, 192)
    return steadily(functools.partial(torch.mm, values, values, out=out))


class Loading(Dataset[Any]):
    """A map-style dataset whose samples take a given time each."""

    def __init__(self, length: int, seconds: float, work: Work) -> None:
        self._length, self._seconds, self._work = length, seconds, work

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self._work(self._seconds)
        return {"x": torch.zeros(1)}


# -- waits, work: loading beside steps ---------------------------------------------------------------------------------


class SlowSource(ArraySource):
    """Each sample takes a given time to load."""

    def __init__(self, length: int, seconds: float, work: Work) -> None:
        super().__init__({"x": np.zeros((length, 1), np.float32)})
        self._seconds, self._work = seconds, work

    def read_into(self, samples: npt.NDArray[np.int64], out: Any) -> None:
        self._work(self._seconds * len(samples))
        super().read_into(samples, out)


def contenders(batch: int, steps: int, seconds: float, load: Work) -> list[Contender]:
    """The loaders and callbacks to compare."""
    options = {"batch_size": batch, "workers": 1, "worker_kind": "thread", "shuffle": False}
    own = functools.partial(DataLoader, Loading(batch * steps, seconds, load), batch, num_workers=1)

    def ours() -> AsyncLoader:
        return AsyncLoader(SlowSource(batch * steps, seconds, load), options)

    def dataset() -> AsyncLoader:
        return AsyncLoader(DatasetSource(Loading(batch * steps, seconds, load)), options)

    def wrapped() -> Any:
        return lad.prefetched(own(), device="cpu")

    return [
        Contender("AsyncLoader, callback", ours, 2),
        Contender("AsyncLoader", ours),
        Contender("DatasetSource, callback", dataset, 2),
        Contender("DataLoader, callback", lambda: contextlib.nullcontext(own()), 2),
        Contender("DataLoader, prefetched", wrapped),
        Contender("in sequence", ours, 0),
    ]


def in_memory(batch: int, steps: int) -> Contender:
    batches = [{"x": torch.zeros(batch, 1)} for _ in range(steps)]
    return Contender(
        "in memory",
        lambda: contextlib.nullcontext(
            DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list has what it needs
        ),
    )


def beside(batch: int, steps: int, load: Work, step: Work) -> dict[str, dict[str, float]]:
    """The figures of one run of each contender, by its name, in seconds per sample."""
    t1, t2 = (seconds * SCALE for seconds in TABLE[batch])

    def loads() -> None:
        for _ in range(steps):
            load(t1 * batch)

    def trains() -> None:
        for _ in range(steps):
            step(t2 * batch)

    loading, computing = timed(loads) / steps, timed(trains) / steps
    threads = max(loading, computing) / (together(loads, trains) / steps)
    plain, _ = fitted(Steps(t2, step), in_memory(batch, steps))
    results = {}
    for contender in contenders(batch, steps, t1, load):
        marks, _ = fitted(Steps(t2, step), contender)
        ratio = max(loading, plain.per_step) / marks.per_step
        results[contender.name] = {
            "loading": loading / batch,
            "training": plain.per_step / batch,
            "asynchronous": marks.per_step / batch,
            "left": (marks.between - plain.between) / batch,
            "ratio": ratio,
            "threads": threads,
            "of_threads": ratio / threads,
        }
    return results


def table(run: Run, kind: str, load: Work, step: Work) -> Figures:
    """Measure all batch sizes, and print the table."""
    turns: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(run.rounds):
        for batch in run.batches:
            for name, figures in beside(batch, run.steps(batch), load, step).items():
                turns.setdefault((batch, name), []).append(figures)
    rows: Figures = [{"batch": batch, "contender": name} | medians(runs) for (batch, name), runs in turns.items()]
    for row in rows:
        (sequence,) = (other for other in rows if (other["batch"], other["contender"]) == (row["batch"], "in sequence"))
        row["sequential"] = sequence["asynchronous"]
    rows = [row for row in rows if row["contender"] != "in sequence"]
    print(f"\n{kind}: seconds per sample; ratio = max(T1, T2) / asynchronous")
    print("batch  contender                  T1+T2 seq.  T1 loading  T2 training  asynchr.  left      ratio  threads")
    for row in rows:
        print(
            f"{row['batch']:>5}  {row['contender']:<25} {row['sequential']:>11.4f} {row['loading']:>11.4f} "
            f"{row['training']:>12.4f} {row['asynchronous']:>9.4f} {row['left']:>9.4f} {row['ratio']:>6.3f} "
            f"{row['threads']:>8.3f}"
        )
    return rows


def waits(run: Run) -> Figures:
    return table(run, "loading and steps that wait", time.sleep, time.sleep)


def work(run: Run) -> Figures:
    return table(run, "loading and steps that compute", inflating(), multiplying())


# -- device: copies beside steps ---------------------------------------------------------------------------------------


def device(run: Run) -> Figures:
    steps = 12 if run.quick else 24
    turns: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(run.rounds):
        for name, (load_s, copy_s) in DEVICE.items():
            for contender in device_ways(steps, load_s):
                turns.setdefault((name, contender.name), []).append(on_device(contender, load_s, copy_s, steps))
    rows: Figures = [
        {"what": name, "contender": contender} | medians(runs) for (name, contender), runs in turns.items()
    ]
    print(f"\na simulated device, steps of {1000 * DEVICE_STEP_S:.0f} ms: milliseconds per step")
    print(f"{'':<34} contender               T2 alone  asynchr.  device idle  logged   ratio")
    for row in rows:
        alone, asynchronous, idle, logged = (1000 * row[key] for key in ("training", "asynchronous", "idle", "logged"))
        print(
            f"{row['what']:<34} {row['contender']:<23} {alone:>8.2f} {asynchronous:>9.2f} {idle:>12.2f} {logged:>7.2f} "
            f"{row['ratio']:>7.3f}"
        )
    return rows


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """For each contender, the goal at its worst batch size."""
    measures = {
        "waits": ("ratio", "max(T1, T2) / asynchronous"),
        "work": ("of_threads", "of what two unrelated threads reach"),
        "device": ("ratio", "max(T1, T2) / asynchronous"),
    }
    for part, rows in figures.items():
        measure, label = measures[part]
        for contender in dict.fromkeys(row["contender"] for row in rows if row["contender"] != BEFORE):
            least = min(row[measure] for row in rows if row["contender"] == contender)
            yield Goal(f"{part}, {contender}, {label}", least, WANTED, WANTED)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]] = {"waits": waits, "work": work, "device": device}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a step uses one core, loading the other
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "pytorch-lightning"))
