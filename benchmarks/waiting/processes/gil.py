"""What loaders take of the training loop's GIL: of its steps, and per batch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from files import tables
from files.tables import Reading
from loading.hdf5 import Run
from measuring.program import Figures
from readers.hdf5 import Batch, by_dataloader, endless_epochs

from lit_async_data import AsyncLoader, HDF5Source, Source
from lit_async_data.sources.images.image_shape import ImageShape
from waiting import beside
from waiting.processes import contenders as loaders
from waiting.processes.contenders import Transformed
from waiting.processes.process_tree import cpu_seconds, descendants
from waiting.processes.transforms import summed

KINDS = ("thread", "process")
# The counting loop goes on for this many times as long as a batch takes to load, and for some seconds at least.
STEPS, LEAST_STEP_S = 2.0, 0.004
COUNTED = 20_000
# Unlike os.pread it does not release the GIL, for which the loop would then have to wait between two clocks.
_libc = ctypes.PyDLL(None)


# -- steps kept --------------------------------------------------------------------------------------------------------


def loop(run: Run) -> Figures:
    """A loop that launches many kernels, beside a transform in pure Python."""
    layout = dataclasses.replace(run.layouts["A"], batch=beside.BATCH)
    path = run.path(layout)
    step = beside.launches()
    with contextlib.closing(HDF5Source(path)) as source:
        chosen = [loaders.ours(source, layout.batch, summed, 1, kind) for kind in (*KINDS, "auto")]
        chosen.append(by_dataloader("DataLoader", Transformed(path, summed), 1, layout.batch))
        with chosen[0].opened() as opened:
            batches = [tuple(t.clone() for t in next(opened)) for _ in range(beside.MEMORY_BATCHES)]
        kept: dict[str, list[float]] = {each.name: [] for each in chosen}
        waits: dict[str, list[float]] = {each.name: [] for each in chosen}
        seconds = 2 * run.seconds
        for _ in range(run.rounds + (0 if run.quick else 4)):
            for contender in chosen:
                # The loop alone before and after each contender: others use the machine too.
                alone = [beside.rate(step, beside.in_memory(batches), seconds)[0]]  # type: ignore[arg-type]
                with contender.opened() as opened:
                    steps, waited = beside.rate(step, opened, seconds)
                alone.append(beside.rate(step, beside.in_memory(batches), seconds)[0])  # type: ignore[arg-type]
                kept[contender.name].append(steps / statistics.fmean(alone))
                waits[contender.name].append(waited)
    print(f"\n{layout}, batch {layout.batch}, a transform in pure Python, launches\n{'':40}  of the steps  waiting")
    rows = []
    for contender in chosen:
        share, wait = (statistics.median(values[contender.name]) for values in (kept, waits))
        print(f"{contender.name:<40} {share:>13.3f} {wait:>8.3f}")
        rows.append({"contender": contender.name, "ours": contender.ours, "steps": share, "waiting": wait})
    return rows


# -- the GIL per batch -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Taken:
    """What one batch takes of a loop in pure Python.

    Attributes:
        next_s: CPU seconds of the loop inside ``next``.
        wait_s: Other seconds inside ``next``: a thread that hardly gets the GIL is late.
        gil_s: Seconds in which counting had to wait for the GIL.
        lost_s: Seconds by which counting took longer than alone: also where another program had the core.
        loading_s: CPU seconds of the reader process; 0 without one.
        step_s: Seconds of counting between two batches.
    """

    next_s: float
    wait_s: float
    gil_s: float
    lost_s: float
    loading_s: float
    step_s: float


def counting(count: int) -> tuple[float, float]:
    """Seconds that a loop in pure Python takes, and for how many of them it was blocked, as by the GIL.

    The rest it had a core, or waited for one.
    """
    delayed, computed, started = _run_delay(), time.thread_time(), time.perf_counter()
    for _ in range(count):
        pass
    passed = time.perf_counter() - started
    return passed, passed - (time.thread_time() - computed) - (_run_delay() - delayed)


@functools.cache
def _schedstat() -> int:
    """A descriptor of what the system knows of the thread that calls this first: the loop."""
    return os.open("/proc/thread-self/schedstat", os.O_RDONLY)


def _run_delay() -> float:
    """Seconds in which this thread could run and waited for a core."""
    text = ctypes.create_string_buffer(100)
    _libc.pread(_schedstat(), text, 100, 0)
    return int(text.value.split()[1]) / 1e9


def taken(source: Source, batch: int, kind: str, seconds: float) -> Taken:
    """Measure for some seconds, in turns with the same loop alone."""
    options = {"batch_size": batch, "shuffle": True, "drop_last": True, "workers": 1, "worker_kind": kind}
    with AsyncLoader(source, options) as loader:
        slots = loader.footprint.budget.slots * loader.footprint.layout.batches
        batches = endless_epochs(loader)
        loading = _seconds_per_batch(batches, slots, seconds / 4)
        per_count = min(counting(COUNTED)[0] for _ in range(5)) / COUNTED
        step = max(STEPS * loading, LEAST_STEP_S)
        number, count = max(int(seconds / step), slots + 2), int(step / per_count)
        # With all slots full the loader does nothing.
        time.sleep(slots * loading + 0.02)
        alone = [counting(count)[0] for _ in range(max(number // 4, 2))]
        for _ in range(slots):
            _next(batches)
        inside = late = blocked = beside_it = 0.0
        readers = descendants()
        spent = cpu_seconds(readers)
        for _ in range(number):
            computed, other = _next(batches)
            inside, late = inside + computed, late + other
            passed, waited = counting(count)
            beside_it, blocked = beside_it + passed, blocked + waited
        spent = cpu_seconds(readers) - spent
        time.sleep(slots * loading + 0.02)
        alone += [counting(count)[0] for _ in range(max(number // 4, 2))]
    lost = beside_it / number - statistics.fmean(alone)
    return Taken(inside / number, late / number, max(blocked, 0.0) / number, lost, spent / number, beside_it / number)


def _next(batches: Iterator[Batch]) -> tuple[float, float]:
    """CPU seconds of this thread for one batch, and other seconds."""
    computed, started = time.thread_time(), time.perf_counter()
    next(batches)
    passed, computed = time.perf_counter() - started, time.thread_time() - computed
    return computed, max(passed - computed, 0.0)


def _seconds_per_batch(batches: Iterator[Batch], ready: int, seconds: float) -> float:
    for _ in range(ready + 1):
        next(batches)
    number, started = 0, time.perf_counter()
    while number < ready or time.perf_counter() - started < seconds:
        next(batches)
        number += 1
    return (time.perf_counter() - started) / number


def per_batch(run: Run) -> Figures:
    """What each layout takes, by a thread and by a reader process."""
    rows: Figures = []
    print(f"\n{'Microseconds per batch':<44}  CPU inside next  waiting there  for the GIL  counting lost  of a step of")
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        photographs = tables.photographs(folder, 256 if run.quick else 1_000)
        names = [run.layouts[name] for name in ("A", "B", "C", "G")]
        sources: dict[str, tuple[Any, int]] = {str(each): (HDF5Source(run.path(each)), each.batch) for each in names}
        reading = Reading("JPEG stretched to 224²", photographs, ImageShape(image_size=224))
        sources[reading.name] = reading.source(), tables.BATCH
        for name, (source, batch) in sources.items():
            turns: dict[str, list[Taken]] = {kind: [] for kind in KINDS}
            for _ in range(run.rounds):
                for kind in KINDS:
                    turns[kind].append(taken(source, batch, kind, 0.3 if run.quick else 3.0))
            source.close()
            for kind, found in turns.items():
                columns = zip(*map(dataclasses.astuple, found), strict=True)
                inside, late, blocked, lost, loading, step = (1e6 * statistics.median(column) for column in columns)
                row = {
                    "data": name,
                    "batch": batch,
                    "kind": kind,
                    "next_us": inside,
                    "gil_us": blocked,
                    "wait_us": late,
                }
                rows.append(row | {"lost_us": lost, "loading_us": loading, "step_us": step})
                print(
                    f"{label_of(row):<44} {inside:>16.0f} {late:>14.0f} {blocked:>12.0f} {lost:>14.0f} {step:>13,.0f}"
                )
    return rows


def label_of(row: dict[str, Any]) -> str:
    return f"{row['data'].partition(':')[0]}, batch {row['batch']}, {row['kind']}"
