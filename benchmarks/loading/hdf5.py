"""Reading HDF5, compared with the limit of memory and codecs, and with other loaders of the same file.

    python benchmarks/loading/hdf5.py [--quick] [--json FILE] [--folder DIR] [warm | cold | ...]

Each round runs every contender once, alone: starts it, discards the batches it has ready, counts batches for a while,
and stops it. Figures are medians over the rounds. Other libraries take part if they are installed
(benchmarks/readers/requirements.txt). Goals are for two cores; on a larger machine prefix the command with
`taskset --cpu-list 0,1`. The part `larger` bounds the page cache, unless a control group does, as in
`systemd-run --scope -p MemoryMax=512M python benchmarks/loading/hdf5.py larger`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lit_async_data import AsyncLoader, HDF5Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import layouts
from files.layouts import Layout
from measuring import memory as processes
from measuring import page_cache
from measuring.hdf5_goals import goals
from measuring.program import Figures, argument_parser, run_parts
from measuring.rates import Rate, TimedRun, in_turns
from readers import hdf5 as readers
from readers.hdf5 import Contender

MIB = 2**20
# With a larger limit of the control group, the file would take too long to write.
MOST_GROUP = 2**30


@dataclasses.dataclass(frozen=True)
class Run(TimedRun):
    """The files, each written when it is first needed."""

    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workers(self) -> tuple[int, ...]:
        return (0, 2) if self.quick else (0, 1, 2)

    @property
    def layouts(self) -> dict[str, Layout]:
        return {layout.name: layout for layout in (layouts.QUICK if self.quick else layouts.FULL)}

    def path(self, layout: Layout, name: str = "") -> str:
        """The path of a file of this layout; a name makes a second one."""
        name = name or layout.name
        if name not in self.paths:
            self.paths[name] = layouts.write_layout(layout, self.folder, name)
        return self.paths[name]


# -- warm --------------------------------------------------------------------------------------------------------------


def contenders_of(run: Run, layout: Layout, source: HDF5Source) -> list[Contender]:
    path = run.path(layout)
    ours = [readers.ours(layout, source, workers) for workers in run.workers]
    hand = [contender for workers in run.workers for contender in readers.dataloaders(layout, path, workers)]
    if layout.name == "C":
        for wide in (16, 64):
            ours += [readers.ours(layout, source, w, "chunk", shuffle_chunks=wide) for w in run.workers]
            hand += [readers.chunk_mixed(layout, path, workers, wide) for workers in run.workers]
        whole = 2 * layout.rows * layout.sample_bytes
        ours.append(readers.ours(layout, source, 1, "global", cache_bytes=whole))
    return ours + hand + readers.other_libraries(layout, path)


def warm(run: Run) -> Figures:
    return [row for layout in run.layouts.values() for row in of_layout(run, layout)]


def of_layout(run: Run, layout: Layout) -> Figures:
    source, limits = HDF5Source(run.path(layout)), list[float]()
    with AsyncLoader(source, {"batch_size": layout.batch, "shuffle": False, "workers": 1}) as loader:
        slot_bytes = loader.footprint.budget.slot_bytes
        for _ in loader:  # reads every page of the file, and maps it
            pass
    limit = layouts.limit_of(layout, run.path(layout), slot_bytes)
    contenders = contenders_of(run, layout, source)
    rates = in_turns(run, contenders, before=lambda: limits.append(limit(run.seconds)))
    source.close()
    rows = compare(layout, contenders, rates, statistics.median(limits))
    show(layout, rows, layouts.compression(run.path(layout)))
    return rows


def compare(layout: Layout, contenders: list[Contender], rates: dict[str, Rate], limit: float) -> Figures:
    medians = {name: rate.samples_per_s for name, rate in rates.items()}
    dataloader = max(
        medians[contender.name] for contender in contenders if contender.family in (readers.ROWS, readers.SORTED)
    )
    other = max(medians[contender.name] for contender in contenders if not contender.ours)
    common = {"layout": layout.name, "stored": str(layout), "limit": limit}
    return [
        common
        | {name: getattr(contender, name) for name in ("family", "workers", "ours")}
        | {"contender": contender.name, "samples_per_s": rate}
        | {"of_limit": rate / limit, "times_dataloader": rate / dataloader, "times_other": rate / other}
        for contender, rate in ((contender, medians[contender.name]) for contender in contenders)
    ]


def show(layout: Layout, rows: Figures, compression: float) -> None:
    packed = f" ({compression:.1f} : 1)" if layout.packed else ""
    print(f"\n{layout}{packed}, batch {layout.batch}, warm page cache; ", end="")
    print(f"limit on one thread {rows[0]['limit']:,.0f} samples/s")
    print(f"{'':<50}  samples/s  of limit  × best DataLoader  × best other")
    for row in rows:
        print(
            f"{row['contender']:<50} {row['samples_per_s']:>10,.0f}  {row['of_limit']:>8.3f}  "
            f"{row['times_dataloader']:>17.2f}  {row['times_other']:>12.2f}"
        )


# -- cold --------------------------------------------------------------------------------------------------------------


def cold(run: Run) -> Figures:
    """The first fifth of an epoch of layout A, from a file that is not in the page cache."""
    layout = run.layouts["A"]
    if not run.quick:
        layout = dataclasses.replace(layout, rows=4 * layout.rows)
    path, samples = run.path(layout, "cold"), layout.rows // 5
    contenders: dict[str, Callable[[], Contender]] = {}
    for workers in run.workers:
        contenders[f"AsyncLoader, {workers} workers"] = functools.partial(fresh, layout, path, workers)
        for number, family in ((0, readers.ROWS), (2, "DataLoader, memory map")):
            contenders[f"{family}, {workers} workers"] = functools.partial(
                nth_dataloader, layout, path, workers, number
            )
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    read: dict[str, list[float]] = {name: [] for name in contenders}
    disk, dropped = [], True
    for _ in range(run.rounds):
        disk.append(page_cache.sequential_rate(path))
        for name, contender in contenders.items():
            gc.collect()  # a memory map that is still open would keep its pages
            dropped &= page_cache.drop_file(path)
            rates[name].append(rate_from_cold(contender(), samples))
            read[name].append(page_cache.cached_bytes(path) / (samples * layout.sample_bytes))
    bytes_per_s = statistics.median(disk)
    print(
        f"\n{layout}, {samples} samples of {layout.rows}, cold page cache; disk in order {bytes_per_s / 1e6:,.0f} MB/s,"
    )
    print(f"read-ahead {page_cache.read_ahead(path)}")
    if not dropped:
        print("the page cache could not be dropped here: these figures are not of a cold cache")
    rows = []
    for name, rate in rates.items():
        median, times = statistics.median(rate), statistics.median(read[name])
        of_disk = median * layout.sample_bytes / bytes_per_s
        row = {"contender": name, "samples_per_s": median, "of_disk": of_disk, "bytes_read_per_byte": times}
        rows.append(row | {"dropped": dropped})
        print(
            f"{name:<50} {median:>10,.0f} samples/s  {of_disk:>6.2f} of the disk's rate  {times:>6.2f} bytes per byte"
        )
    return rows


def fresh(layout: Layout, path: str, workers: int) -> Contender:
    """AsyncLoader with a new source: a memory map from an earlier round would keep pages in memory."""
    return readers.ours(layout, HDF5Source(path), workers)


def nth_dataloader(layout: Layout, path: str, workers: int, number: int) -> Contender:
    return readers.dataloaders(layout, path, workers)[number]


def rate_from_cold(contender: Contender, samples: int) -> float:
    """Samples per second from the start, with no batch ready."""
    done = 0
    with contender.opened() as batches:
        started = time.perf_counter()
        while done < samples:
            done += len(next(batches)[1])
        return done / (time.perf_counter() - started)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(run: Run) -> Figures:
    """Growth of resident memory, compared with the loader's budget."""
    rows = []
    print("\nPrivate resident memory, MiB")
    for name, shuffle in (("A", "global"), ("B", "global"), ("C", "auto"), ("D", "global")):
        layout = run.layouts[name]
        options = {"batch_size": layout.batch, "shuffle": shuffle, "workers": 2, "worker_kind": "thread"}
        growth = processes.in_fresh_process(
            processes.memory_growth, run.path(layout), options, *((40, 1.0) if run.quick else (400, 10.0))
        )
        row = {"layout": layout.name, **growth}
        rows.append(row)
        print(f"{layout.name}, {shuffle}: grew by {row['grown_mib']:.1f}, budget {row['budget_mib']:.1f}")
    return rows


def larger(run: Run) -> Figures:
    """A file several times as large as the page cache it may use."""
    limit = page_cache.memory_limit()
    grouped = limit is not None and limit <= MOST_GROUP
    size = 4 * limit if grouped and limit else (160 if run.quick else 1600) * MIB
    layout = run.layouts["A"]
    layout = dataclasses.replace(layout, rows=size // layout.sample_bytes)
    path = run.path(layout, "larger")
    most = None if grouped else size // 8
    disk = [page_cache.sequential_rate(path)]
    dropped = page_cache.drop_file(path)
    result = processes.in_fresh_process(processes.train_on_large_file, path, most, 3.0 if run.quick else 20.0)
    disk.append(page_cache.sequential_rate(path))
    rate, bytes_per_s = result["samples_per_s"], statistics.mean(disk)
    anonymous = [point["RssAnon"] for point in result["over_time"]]
    quarter = max(len(anonymous) // 4, 1)
    bounded_by = "a control group" if grouped else "a thread that drops its pages while it is read"
    if not dropped:
        bounded_by += ", which did not work here"
    row = result | {
        "contender": bounded_by,
        "file_mib": size / MIB,
        "bound_mib": (limit or 0) / MIB if most is None else most / MIB,
        "of_disk": rate * layout.sample_bytes / bytes_per_s,
        "first_mib": statistics.median(anonymous[:quarter]),
        "last_mib": statistics.median(anonymous[-quarter:]),
        "cached_mib": statistics.median(point["cached_mib"] for point in result["over_time"]),
    }
    print(
        f"\nA file of {row['file_mib']:,.0f} MiB in {row['bound_mib']:,.0f} MiB, bounded by {bounded_by}, while a "
        f"small model trains\n{rate:,.0f} samples/s, {row['of_disk']:.2f} of the disk's sequential rate "
        f"({bytes_per_s / 1e6:,.0f} MB/s); {result['samples'] / layout.rows:.1f} epochs\n"
        f"private memory: {row['first_mib']:.1f} MiB in the first quarter, {row['last_mib']:.1f} in the "
        f"last; {row['cached_mib']:,.0f} MiB of the file in memory (median)"
    )
    return [row]


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]] = {
    "warm": warm,
    "cold": cold,
    "memory": memory,
    "larger": larger,
}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py"))
