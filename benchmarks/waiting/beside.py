"""How many steps a training loop keeps while batches are loaded beside it.

    python benchmarks/waiting/beside.py [--quick] [--json FILE] [--folder DIR]
        [hdf5 | files | counting | device]

Each round runs the same loop beside each loader, with its batches in memory before and after. A figure is the median
over the rounds of steps per second over those with batches in memory. Two loops: 6000 small tensor operations per step,
as the host of a GPU launches kernels, and a small convolution net. torch uses one thread, so that a core is free for
loading. A step is repeated until it takes longer than one core needs to read a batch: else the loop would wait, whoever
reads. What is lost is waiting for batches, time in which the loop had to hand over the GIL, and what the core that
reads takes of caches and memory. The last row shows the latter alone: a process that has nothing to do with the loop
reads as many batches. The part `counting` has a loop that only counts batches. The part `device` has the first loop
with batches that go to a device whose operations take no time, each in a slot of its own or several in one: what is
lost is the work of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lit_async_data import AsyncLoader, HDF5Source, Source
from lit_async_data.engine import resources
from lit_async_data.sources.images.formats import ImageShape

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import tables
from files.tables import Reading
from loading.hdf5 import Run
from measuring.program import Figures, Goal, argument_parser, run_parts
from readers import hdf5 as readers
from readers import tables as table_readers
from readers.hdf5 import Batch, Contender

from waiting.on_device.idle_device import IdleDevice
from waiting.on_device.simulated import replaced_streams
from waiting.processes.counting import counting
from waiting.processes.unrelated import unrelated

Step = Callable[[Batch], None]
BATCH, OPERATIONS, MEMORY_BATCHES = 64, 6000, 24
# A step takes at least this many times as long as reading a batch, and a measurement at least this many steps.
LEAST_STEP, LEAST_STEPS, ROUNDS = 1.3, 40, 5
# The loops use at most this many values of each sample.
MOST_VALUES = 3 * 64 * 64
LEAST = 0.97
# Of the limit on one thread, by two workers: samples that a loop counts where decoding takes the time.
OF_LIMIT = 1.5
KINDS = ("thread", "process")
# Layouts of small samples: one that is copied, one that is decoded, and one of very short steps.
ON_DEVICE = ("A", "B", "D")
AUTO = ", auto"


def in_memory(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def launches() -> Step:
    """Many small operations, which hold the GIL between them.

    They are in place, since the results of a GPU's operations take no memory of its host. With a new tensor for each,
    pieces of the C library's heap pile up, and it merges them for 5 to 70 ms now and then, with or without a loader.
    """
    small, ones, zeros = torch.randn(64), torch.ones(64), torch.zeros(64)

    def step(batch: Batch) -> None:
        for _ in range(OPERATIONS // 2):
            small.mul_(ones).add_(zeros)

    return step


def convolutions() -> Step:
    """Forward, backward and optimizer of a small convolution net."""
    layers = (torch.nn.Conv2d(1, 8, 3, 2, 1), torch.nn.Conv2d(8, 16, 3, 2, 1))
    model = torch.nn.Sequential(
        layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
    )
    optimizer: Any = None

    def step(batch: Batch) -> None:
        nonlocal optimizer
        values = batch[0].flatten(1)[:, :MOST_VALUES].float()
        images = values[:, : values.shape[1] // 16 * 16].reshape(len(values), 1, 16, -1)
        loss = torch.nn.functional.cross_entropy(model(images), batch[1].long().flatten()[: len(values)] % 10)
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


LOOPS = {"launches": launches, "convolutions": convolutions}


def keep_heap() -> None:
    """Have the GNU C library keep memory that was freed.

    Else it gives the top of its heap back to the system at some times and not at others, and the same step of
    convolutions takes 12 or 22 ms, with or without a loader.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**25)


def repeated(step: Step, times: int) -> Step:
    """A step that is made several times with the same batch."""

    def steps(batch: Batch) -> None:
        for _ in range(times):
            step(batch)

    return steps


def rate(step: Step, batches: Iterator[Batch], seconds: float) -> tuple[float, float]:
    """Steps per second, and the share of the time spent in ``next``; a few steps are not counted."""
    waited, steps = 0.0, 0
    for _ in range(8):
        step(next(batches))
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        step(batch)
        steps += 1
    return steps / passed, waited / passed


def options_of(kind: str) -> dict[str, Any]:
    return {"batch_size": BATCH, "shuffle": True, "drop_last": True, "worker_kind": kind}


def ours(source: Source, kind: str) -> Contender:
    """An `AsyncLoader`."""
    chosen = AsyncLoader(source, options_of("auto")).footprint.workers.kind == kind
    family = f"{readers.OURS}, {kind}{AUTO * chosen}"
    return dataclasses.replace(readers.asynchronous(family, source, **options_of(kind)), family=family)


def held(source: Source) -> tuple[list[Any], float]:
    """Some batches in memory, and the seconds in which one core reads one."""
    with AsyncLoader(source, {**options_of("thread"), "workers": 0}) as loader:
        batches = readers.endless_epochs(loader)
        kept = [tuple(tensor.clone() for tensor in next(batches)) for _ in range(MEMORY_BATCHES)]
        # The first time, files may still come from the disk.
        took = []
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(MEMORY_BATCHES):
                next(batches)
            took.append(time.perf_counter() - started)
        return kept, min(took) / MEMORY_BATCHES


def control(source: Source, batches: list[Any], period_s: float) -> Contender:
    """Batches in memory, beside a process that reads a batch in each period."""

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with unrelated(source, options_of("thread"), period_s):
            yield in_memory(batches)

    return Contender("an unrelated process that reads as much", 1, opened)


def lengthened(step: Step, batches: list[Any], reading_s: float, run: Run) -> tuple[Step, int, float]:
    """A step that takes longer than reading a batch: the step, how often it repeats the one given, and its seconds."""
    alone, _ = rate(step, in_memory(batches), run.seconds)
    times = math.ceil(LEAST_STEP * reading_s * alone)
    return repeated(step, times), times, times / alone


def in_turns(
    run: Run, step: Step, period_s: float, batches: list[Any], contenders: list[Contender]
) -> dict[str, tuple[float, float]]:
    """Of the steps with batches in memory, how many are left beside each contender; and the share spent waiting."""
    seconds = max(run.seconds, LEAST_STEPS * period_s)
    kept: dict[str, list[tuple[float, float]]] = {each.name: [] for each in contenders}
    for _ in range(1 if run.quick else ROUNDS):
        before, _ = rate(step, in_memory(batches), seconds)
        for contender in contenders:
            with contender.opened() as opened:
                steps, waited = rate(step, opened, seconds)
            # The loop alone before and after each contender: others use the machine too.
            after, _ = rate(step, in_memory(batches), seconds)
            kept[contender.name].append((2 * steps / (before + after), waited))
            before = after
    return {
        name: (statistics.median(steps for steps, _ in found), statistics.median(waited for _, waited in found))
        for name, found in kept.items()
    }


def compare(run: Run, name: str, source: Source, others: list[Contender]) -> Figures:
    """Steps beside each contender, for both loops; prints the table."""
    batches, reading_s = held(source)
    rows = []
    for loop, make in LOOPS.items():
        step, times, period_s = lengthened(make(), batches, reading_s, run)
        contenders = [ours(source, kind) for kind in KINDS] + others + [control(source, batches, period_s)]
        kept = in_turns(run, step, period_s, batches, contenders)
        title = f"{name}, {loop}" + (f", {times} times for each batch" if times > 1 else "")
        print(f"\n{title}\n{'':50}    of the steps      waiting")
        for contender in contenders:
            share, wait = kept[contender.name]
            row = {"data": name, "loop": loop, "times": times, "contender": contender.name}
            row |= {"steps": share, "waiting": wait}
            print(f"{contender.name:50}  {share:14.3f}  {wait:10.3f}")
            rows.append(row)
    return rows


def hdf5(run: Run) -> Figures:
    rows = []
    for layout in run.layouts.values():
        small = dataclasses.replace(layout, batch=BATCH)
        path = run.path(layout)
        others = [
            contender
            for workers in (1, 2)
            for contender in readers.dataloaders(small, path, workers)
            if contender.family == readers.ROWS
        ]
        others += [each for each in readers.other_libraries(small, path) if each.family.startswith("SPDL")]
        source = HDF5Source(path)
        rows += compare(run, str(layout), source, others)
        source.close()
    return rows


def files(run: Run) -> Figures:
    count = 300 if run.quick else 2000
    readings = [
        Reading(
            "JPEG random crop to 224²",
            tables.photographs(run.folder, count),
            ImageShape(image_size=224, resize="random_crop"),
        ),
        Reading("PNG 64×64", tables.pngs(run.folder, count, tables.SMALL), ImageShape()),
        Reading(".npy float32 3×64×64", tables.arrays(run.folder, count), None),
    ]
    rows = []
    for reading in readings:
        chosen = (table_readers.PLAIN, table_readers.SHARED)
        others = [each for each in table_readers.others(reading, (1, 2))[0] if each.family in chosen]
        source = reading.source()
        rows += compare(run, reading.name, source, others)
        source.close()
    return rows


def device(run: Run) -> Figures:
    rows: Figures = []
    print(f"\n{'Launches, batches on their way to a device':<84}  of the steps  waiting")
    for layout in run.layouts.values():
        if layout.name not in ON_DEVICE:
            continue
        source = HDF5Source(run.path(layout))
        batches, reading_s = held(source)
        step, _, period_s = lengthened(launches(), batches, reading_s, run)
        contenders = [sent(source, kind, alone=alone) for kind, alone in itertools.product(KINDS, (True, False))]
        kept = in_turns(run, step, period_s, batches, contenders)
        source.close()
        for name, (share, waiting) in kept.items():
            print(f"{f'{layout}, {name}':<84}  {share:12.3f}  {waiting:7.3f}")
            rows.append(
                {"data": layout.name, "loop": "launches", "contender": name, "steps": share, "waiting": waiting}
            )
    return rows


def sent(source: Source, kind: str, *, alone: bool) -> Contender:
    """An `AsyncLoader` whose batches go to a device, as with the callback; each in a slot of its own if ``alone``."""

    @contextlib.contextmanager
    def opened() -> Iterator[Iterator[Batch]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced_streams(lambda _: IdleDevice(), simulated=True))
            if alone:
                stack.enter_context(mock.patch.object(resources, "coalesced_batches", return_value=1))
            loader = stack.enter_context(AsyncLoader(source, options_of(kind)))
            loader._wiring.externally_driven = True
            yield driven(loader)

    alike = ours(source, kind)
    name = f"{kind}, one batch in a slot" if alone else f"{alike.family}, several in a slot"
    return Contender(name, alike.workers, opened)


def driven(loader: AsyncLoader) -> Iterator[Batch]:
    """Its batches, epoch after epoch; the next copy starts as the callback starts it."""
    while True:
        for batch in loader:
            loader._prefetch()
            yield batch


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for row in [row for rows in figures.values() for row in rows]:
        label = f"{row['data']}, {row.get('loop')}, {row.get('contender')}"
        if AUTO in label:
            yield Goal(f"{label}, of the steps", row["steps"], LEAST, LEAST)
    for row in figures.get("counting", []):
        label = f"{row['stored']}, counting, {row['workers']} workers, a process"
        if row["auto"] == "process":
            yield Goal(f"{label}, of threads", row["of_threads"], 1.0, 1.0)
        if row["data"] in ("B", "C") and row["workers"] == 2:
            yield Goal(f"{label}, of the limit on one thread", row["process"] / row["limit"], OF_LIMIT, OF_LIMIT)


PARTS = {"hdf5": hdf5, "files": files, "counting": counting, "device": device}


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py"))
