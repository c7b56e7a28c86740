"""Reading HDF5, measured against what memory and codecs allow and against other ways to read the same file.

    python benchmarks/hdf5.py [--quick] [--json FILE] [--plot FILE] [--folder DIR] [warm | cold | coupled | ...]

In each turn one way is started, what it has ready is thrown away, its batches are counted for a while, and it is ended:
nothing else runs meanwhile. Turns alternate, and figures are medians over the rounds. Other libraries take part if they
are installed (benchmarks/requirements-peers.txt). Goals are for two cores; on a larger machine run it by
`taskset --cpu-list 0,1`. The part `larger` bounds the page cache by itself, unless a control group does, as in
`systemd-run --scope -p MemoryMax=512M python benchmarks/hdf5.py larger`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import held
import layouts
import pagecache
import peers
import torch
from chart import plotted
from goals import goals
from layouts import Layout
from peers import Way
from program import arguments, ran

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.sources.file_times import RECENT_NS

MIB = 2**20
# A control group that holds more would need a file that takes too long to write.
MOST_GROUP = 2**30
Figures = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """How long to measure, and the files, each made when it is first asked for.

    Attributes:
        seconds: Of one turn.
        settle: Seconds before it, which are not counted.
        patience: Seconds after which slow ways are not waited for, neither to settle nor to end a period.
    """

    quick: bool
    folder: str
    made: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def seconds(self) -> float:
        return 0.06 if self.quick else 0.5

    @property
    def settle(self) -> float:
        return 0.03 if self.quick else 0.2

    @property
    def patience(self) -> float:
        return 0.15 if self.quick else 8.0

    @property
    def workers(self) -> tuple[int, ...]:
        return (0, 2) if self.quick else (0, 1, 2)

    @property
    def layouts(self) -> dict[str, Layout]:
        return {layout.name: layout for layout in (layouts.QUICK if self.quick else layouts.FULL)}

    def path(self, layout: Layout, name: str = "") -> str:
        """The file of a layout, or another of that layout with a name of its own."""
        name = name or layout.name
        if name not in self.made:
            self.made[name] = layouts.written(layout, self.folder, name)
        return self.made[name]


def turn(way: Way, run: Run) -> float:
    """Samples per second of one way."""
    with way.opened() as batches:
        count(batches, way.ready + 1, run.settle, 1, run.patience)
        samples, seconds = count(batches, 1, run.seconds, way.period, run.patience)
    return samples / seconds


def count(
    batches: Iterator[peers.Batch], least: int, seconds: float, period: int, patience: float
) -> tuple[int, float]:
    """Take batches: some at least, for some seconds at least, and a multiple of the period."""
    samples = taken = 0
    started = time.perf_counter()
    while True:
        data, labels = next(batches)
        assert isinstance(data, torch.Tensor) and len(data) == len(labels)  # noqa: PT018
        samples += len(labels)
        taken += 1
        passed = time.perf_counter() - started
        if (passed >= seconds and taken >= least and taken % period == 0) or passed > max(seconds, patience):
            return samples, passed


# -- warm --------------------------------------------------------------------------------------------------------------


def ways_of(run: Run, layout: Layout, source: HDF5Source) -> list[Way]:
    path = run.path(layout)
    found = [peers.ours(layout, source, workers) for workers in run.workers]
    hand = [way for workers in run.workers for way in peers.by_hand(layout, path, workers)]
    if layout.name == "C":
        for wide in (16, 64):
            found += [peers.ours(layout, source, w, "chunk", shuffle_chunks=wide) for w in run.workers]
            hand += [peers.chunk_mixed(layout, path, workers, wide) for workers in run.workers]
        whole = 2 * layout.rows * layout.sample_bytes
        found.append(peers.ours(layout, source, 1, "global", cache_bytes=whole))
    return [way for way in found if way is not None] + hand + peers.libraries(layout, path)


def warm(run: Run) -> Figures:
    rows = []
    for layout in run.layouts.values():
        source = HDF5Source(run.path(layout))
        with AsyncLoader(source, {"batch_size": layout.batch, "shuffle": False, "workers": 1}) as loader:
            slot_bytes = loader.footprint.budget.slot_bytes
            for _ in loader:  # every page of the file is in memory, and mapped
                pass
        limit = layouts.limit(layout, run.path(layout), slot_bytes)
        ways = ways_of(run, layout, source)
        rates: dict[str, list[float]] = {way.name: [] for way in ways}
        limits = []
        for _ in range(run.rounds):
            limits.append(limit(run.seconds))
            for way in ways:
                rates[way.name].append(turn(way, run))
        source.close()
        found = compared(layout, ways, rates, statistics.median(limits))
        show(layout, found, layouts.compression(run.path(layout)))
        rows += found
    return rows


def compared(layout: Layout, ways: list[Way], rates: dict[str, list[float]], limit: float) -> Figures:
    found = {way.name: statistics.median(rates[way.name]) for way in ways}
    dataloader = max(found[way.name] for way in ways if way.family in (peers.ROWS, peers.GETITEMS))
    other = max(found[way.name] for way in ways if not way.ours)
    common = {"layout": layout.name, "stored": str(layout), "limit": limit}
    return [
        common
        | {"way": way.name, "family": way.family, "workers": way.workers, "ours": way.ours, "samples_per_s": rate}
        | {"of_limit": rate / limit, "times_dataloader": rate / dataloader, "times_other": rate / other}
        for way, rate in ((way, found[way.name]) for way in ways)
    ]


def show(layout: Layout, rows: Figures, compression: float) -> None:
    packed = f" ({compression:.1f} : 1)" if layout.packed else ""
    print(f"\n{layout}{packed}, batch {layout.batch}, warm page cache; ", end="")
    print(f"limit on one thread {rows[0]['limit']:,.0f} samples/s")
    print(f"{'':<50}  samples/s  of limit  × best DataLoader  × best other")
    for row in rows:
        print(
            f"{row['way']:<50} {row['samples_per_s']:>10,.0f}  {row['of_limit']:>8.3f}  "
            f"{row['times_dataloader']:>17.2f}  {row['times_other']:>12.2f}"
        )


# -- cold --------------------------------------------------------------------------------------------------------------


def cold(run: Run) -> Figures:
    """The first fifth of an epoch of layout A, from a file of which nothing is in memory."""
    layout = run.layouts["A"]
    if not run.quick:
        layout = dataclasses.replace(layout, rows=4 * layout.rows)
    path, samples = run.path(layout, "cold"), layout.rows // 5
    ways: dict[str, Callable[[], Way]] = {}
    for workers in run.workers:
        ways[f"AsyncLoader, {workers} workers"] = functools.partial(fresh, layout, path, workers)
        for number, family in ((0, peers.ROWS), (2, "DataLoader, memory map")):
            ways[f"{family}, {workers} workers"] = functools.partial(nth_by_hand, layout, path, workers, number)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    read: dict[str, list[float]] = {name: [] for name in ways}
    disk, dropped = [], True
    for _ in range(run.rounds):
        disk.append(pagecache.sequential(path))
        for name, way in ways.items():
            gc.collect()  # a map that is left over would keep its pages
            dropped &= pagecache.dropped(path)
            rates[name].append(from_cold(way(), samples))
            read[name].append(pagecache.cached(path) / (samples * layout.sample_bytes))
    bytes_per_s = statistics.median(disk)
    print(
        f"\n{layout}, {samples} samples of {layout.rows}, cold page cache; disk in order {bytes_per_s / 1e6:,.0f} MB/s,"
    )
    print(f"which reads {pagecache.read_ahead(path)} around a page that is missing")
    if not dropped:
        print("the page cache could not be dropped here: these are not the figures of a cold one")
    rows = []
    for name, rate in rates.items():
        median, times = statistics.median(rate), statistics.median(read[name])
        of_disk = median * layout.sample_bytes / bytes_per_s
        row = {"way": name, "samples_per_s": median, "of_disk": of_disk, "bytes_read_per_byte": times}
        rows.append(row | {"dropped": dropped})
        print(
            f"{name:<50} {median:>10,.0f} samples/s  {of_disk:>6.2f} of the disk's rate  {times:>6.2f} bytes per byte"
        )
    return rows


def fresh(layout: Layout, path: str, workers: int) -> Way:
    """Our way with a source of its own: a map that outlives its turn would keep pages in memory."""
    way = peers.ours(layout, HDF5Source(path), workers)
    assert way is not None
    return way


def nth_by_hand(layout: Layout, path: str, workers: int, number: int) -> Way:
    return peers.by_hand(layout, path, workers)[number]


def from_cold(way: Way, samples: int) -> float:
    """Samples per second from the very start: nothing can be ready."""
    done = 0
    with way.opened() as batches:
        started = time.perf_counter()
        while done < samples:
            done += len(next(batches)[1])
        return done / (time.perf_counter() - started)


# -- coupled -----------------------------------------------------------------------------------------------------------


class Training:
    """A three-layer perceptron, one batch per step."""

    def __init__(self, layout: Layout) -> None:
        inputs = layout.sample_bytes // (1 if layout.dtype == "u1" else 4)
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.model = torch.nn.Sequential(linear(inputs, 256), relu(), linear(256, 256), relu(), linear(256, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self, batch: peers.Batch) -> None:
        data, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(data.flatten(1).float()), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def rate(self, batches: Iterator[peers.Batch], warm_up: int, seconds: float) -> float:
        """Steps per second, after some steps that are not counted."""
        self.steps(batches, warm_up, seconds / 5)
        return self.steps(batches, 1, seconds)

    def steps(self, batches: Iterator[peers.Batch], least: int, seconds: float) -> float:
        """Take some steps at least, for some seconds at least; how many there were per second."""
        steps, started = 0, time.perf_counter()
        while steps < least or time.perf_counter() - started < seconds:
            self.step(next(batches))
            steps += 1
        return steps / (time.perf_counter() - started)


def in_memory(batches: list[peers.Batch]) -> Iterator[peers.Batch]:
    while True:
        yield from batches


def coupled(run: Run) -> Figures:
    rounds, seconds = (2, 0.3) if run.quick else (7, 1.5)
    rows = []
    print("\nA training loop with AsyncLoader, workers=1, against the same loop with its batches in memory")
    for layout in (run.layouts["A"], run.layouts["D"]):
        training = Training(layout)
        source = HDF5Source(run.path(layout))
        ours = peers.ours(layout, source, 1)
        assert ours is not None
        ways = {"ours": ours, "dataloader": nth_by_hand(layout, run.path(layout), 2, 0)}
        with ours.opened() as batches:
            kept = [next(batches) for _ in range(20)]
        ratios: dict[str, list[float]] = {name: [] for name in ways}
        memory = []
        for _ in range(rounds):
            memory.append(training.rate(in_memory(kept), 5, seconds))
            for name, way in ways.items():
                with way.opened() as batches:
                    # What was read ahead while this loop had not begun is used up before the clock starts.
                    ratios[name].append(training.rate(batches, way.ready + 5, seconds) / memory[-1])
        source.close()
        row = {"layout": layout.name, "steps_per_s": statistics.median(memory)}
        row |= {name: statistics.median(ratio) for name, ratio in ratios.items()}
        rows.append(row)
        print(
            f"{layout.name}: {row['steps_per_s']:,.0f} steps/s in memory; AsyncLoader keeps {row['ours']:.1%}, "
            f"DataLoader over h5py rows with 2 workers {row['dataloader']:.1%}"
        )
    return rows


# -- opening -----------------------------------------------------------------------------------------------------------


def opening(run: Run) -> Figures:
    """From the path of a file of many chunks to the first batch."""
    layout = run.layouts["B"]
    path = run.path(layout)

    def first(index_cache: str | bool) -> float:
        started = time.perf_counter()
        source = HDF5Source(path, index_cache=index_cache)
        with AsyncLoader(source, {"batch_size": 256, "shuffle": "global", "workers": 1}) as loader:
            loader.next()
            return time.perf_counter() - started

    time.sleep(RECENT_NS / 1e9)  # the index of a file that was written just now is not kept
    first("auto")
    turns = [(first("auto"), first(index_cache=False)) for _ in range(5 * run.rounds)]
    kept, built = map(statistics.median, zip(*turns, strict=True))
    row = {"chunks": layout.rows, "seconds": built, "kept_seconds": kept}
    print(
        f"\nOpening and the first batch on B, {row['chunks']:,} chunks: {1000 * built:.1f} ms, "
        f"and {1000 * kept:.1f} ms where the index is kept"
    )
    return [row]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(run: Run) -> Figures:
    """Resident memory against what the loader said it would hold."""
    rows = []
    print("\nResident memory of the process's own, MiB")
    for name, shuffle in (("A", "global"), ("B", "global"), ("C", "auto"), ("D", "global")):
        layout = run.layouts[name]
        options = {"batch_size": layout.batch, "shuffle": shuffle, "workers": 2}
        found = held.apart(held.grown, run.path(layout), options, *((40, 1.0) if run.quick else (400, 10.0)))
        row = {"layout": layout.name, **found}
        rows.append(row)
        print(f"{layout.name}, {shuffle}: grew by {row['grown_mib']:.1f}, budget {row['budget_mib']:.1f}")
    return rows


def larger(run: Run) -> Figures:
    """A file several times larger than the memory that there is for it."""
    limit = pagecache.memory_limit()
    grouped = limit is not None and limit <= MOST_GROUP
    size = 4 * limit if grouped and limit else (160 if run.quick else 1600) * MIB
    layout = run.layouts["A"]
    layout = dataclasses.replace(layout, rows=size // layout.sample_bytes)
    path = run.path(layout, "larger")
    most = None if grouped else size // 8
    disk = [pagecache.sequential(path)]
    dropped = pagecache.dropped(path)
    found = held.apart(held.larger, path, most, 3.0 if run.quick else 20.0)
    disk.append(pagecache.sequential(path))
    rate, bytes_per_s = found["samples_per_s"], statistics.mean(disk)
    anonymous = [point["RssAnon"] for point in found["over_time"]]
    quarter = max(len(anonymous) // 4, 1)
    said = "a control group" if grouped else "dropping its pages from the page cache while it is read"
    if not dropped:
        said += ", which did not work here"
    row = found | {
        "way": said,
        "file_mib": size / MIB,
        "bound_mib": (limit or 0) / MIB if most is None else most / MIB,
        "of_disk": rate * layout.sample_bytes / bytes_per_s,
        "first_mib": statistics.median(anonymous[:quarter]),
        "last_mib": statistics.median(anonymous[-quarter:]),
        "cached_mib": statistics.median(point["cached_mib"] for point in found["over_time"]),
    }
    print(
        f"\nA file of {row['file_mib']:,.0f} MiB in {row['bound_mib']:,.0f} MiB, bounded by {said}; a small model is "
        f"trained\n{rate:,.0f} samples/s, {row['of_disk']:.2f} of the disk's rate in order "
        f"({bytes_per_s / 1e6:,.0f} MB/s); {found['samples'] / layout.rows:.1f} epochs\n"
        f"memory of the process's own: {row['first_mib']:.1f} MiB in the first quarter, {row['last_mib']:.1f} in the "
        f"last; of the file {row['cached_mib']:,.0f} MiB in memory (median)"
    )
    return [row]


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]] = {
    "warm": warm,
    "cold": cold,
    "coupled": coupled,
    "opening": opening,
    "memory": memory,
    "larger": larger,
}


def main() -> None:
    parser = arguments(__doc__, PARTS)
    parser.add_argument("--plot", metavar="FILE", help="draw the warm ones there (needs matplotlib)")
    libraries = {"torch": torch.__version__, "h5py": h5py.__version__}
    given, machine, figures = ran(parser, PARTS, goals, Run, libraries)
    if given.plot and "warm" in figures:
        try:
            plotted(figures["warm"], machine, given.plot)
        except ImportError as error:
            print(f"no plot: {error}")


if __name__ == "__main__":
    main()
