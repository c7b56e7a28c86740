"""HDF5 files behind a web server, compared with the line, with the same files on the disk, and with other readers.

    python benchmarks/loading/cloud.py [--quick] [--json FILE] [--folder DIR] [line | images | cached | ...]

* opening: 100 000 chunks of the old format, and what else is opened: requests, MiB, seconds.
* line: raw and compressed samples at 5 to 100 ms and 250 Mbit/s, and at 30 ms and 1 Gbit/s.
* images: JPEGs at 30 ms and 1 Gbit/s, against the same file on the disk.
* cached: the second epoch with a cache folder, against the file on the disk.
* loop: CPU time of a training loop's process beside a reader process, for a remote and for a local file.
* peers: h5py over fsspec's HTTP files, by rows and in our order; Lance, if pylance is installed, by rows and by blocks.

The server runs in a process of its own, on the same cores: a latency in milliseconds delays each answer, and all share
one line. Each contender of a round has a new source, which holds nothing; contenders take turns, and figures are
medians over the rounds. Chunks are shuffled as `shuffle="auto"` does. Before that the program compares values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data import AsyncLoader, Field, HDF5Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.tables import write_images
from measuring.program import BaseRun, Figures, Goal, argument_parser, medians, run_parts
from measuring.range_server import RangeServer
from measuring.rates import count
from readers.hdf5 import endless_epochs, is_installed

MIB = 2**20
SIDE = 224
LINES = ((5, 250), (30, 250), (100, 250), (30, 1000))  # milliseconds, Mbit/s
FAST = LINES[-1]
BLOCK = 64  # samples that peers read at a time, and samples per chunk
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Run(BaseRun):
    server: RangeServer
    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return 0.3 if self.quick else 2.0

    @property
    def settle(self) -> float:
        return 0.1 if self.quick else 0.7

    def stored(self, name: str) -> Stored:
        if name not in self.paths:
            self.paths[name] = os.path.join(self.folder, f"{name}.h5")
            # More than comes whole when it is opened; a line of 1 Gbit/s needs 3 s.
            WRITERS[name](self.paths[name], (80 if self.quick else 400) * MIB)
        return Stored(self, name, self.paths[name])


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file on the disk, which the server has too."""

    run: Run
    name: str
    path: str

    @property
    def url(self) -> str:
        return f"{self.run.server.url}/{os.path.basename(self.path)}"

    @property
    def fields(self) -> tuple[Any, str]:
        return Field("data", decode="image", image_size=SIDE) if self.name == "jpeg" else "data", "labels"

    @functools.cached_property
    def sample_bytes(self) -> float:
        with h5py.File(self.path) as file:
            return os.path.getsize(self.path) / len(file["labels"])

    def batches(self, path: str, *, cache: str | None = None, **options: Any) -> contextlib.AbstractContextManager[Any]:
        """The batches of a new source, without end."""
        return contextlib.contextmanager(self._batches)(path, cache, options)

    def _batches(self, path: str, cache: str | None, options: dict[str, Any]) -> Iterator[Iterator[Any]]:
        source = HDF5Source(path, self.fields, cache=cache)
        options = {"batch_size": 256 if self.name != "jpeg" else 64, "workers": 2, "worker_kind": "thread"} | options
        with contextlib.closing(source), AsyncLoader(source, {"shuffle": "chunk", **options}) as loader:
            yield endless_epochs(loader)


# -- files -------------------------------------------------------------------------------------------------------------


def write_raw(path: str, nbytes: int) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (1024, 3, 32, 32), np.uint8)
    repeats = nbytes // pictures.nbytes
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (repeats * len(pictures), *pictures.shape[1:]), "u1")
        for number in range(repeats):
            data[number * len(pictures) : (number + 1) * len(pictures)] = pictures
        file["labels"] = np.arange(len(data))


def write_gzip(path: str, nbytes: int) -> None:
    """Pictures of which a quarter is no black ground."""
    pictures = np.zeros((16 * BLOCK, 3, 64, 64), np.uint8)
    pictures[:, :, 24:40] = np.random.default_rng(0).integers(0, 256, (16 * BLOCK, 3, 16, 64), np.uint8)
    chunks = [zlib.compress(pictures[at : at + BLOCK].tobytes(), 4) for at in range(0, len(pictures), BLOCK)]
    write_chunks(path, chunks, nbytes, (BLOCK, 3, 64, 64), compression="gzip")


def write_small(path: str, _: int) -> None:
    """100 000 chunks of the old format, whose B-tree has one node for 56 of them."""
    write_chunks(path, [bytes(3100)], 100_000 * 3100, (1, 3100), libver="earliest")


def write_chunks(
    path: str, chunks: Sequence[bytes], nbytes: int, shape: tuple[int, ...], libver: str = "v110", **options: Any
) -> None:
    """Repeat stored chunks until they have ``nbytes``."""
    count = nbytes // len(chunks[0])
    with h5py.File(path, "w", libver=(libver, "v110")) as file:
        data = file.create_dataset("data", (count * shape[0], *shape[1:]), "u1", chunks=shape, **options)
        for number in range(count):
            data.id.write_direct_chunk((number * shape[0], *[0] * (len(shape) - 1)), chunks[number % len(chunks)])
        file["labels"] = np.arange(count * shape[0])


def write_jpeg(path: str, nbytes: int) -> None:
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        images = [
            np.frombuffer(Path(each).read_bytes(), np.uint8)
            for each in write_images(folder, "jpg", 256, (SIDE, SIDE)).paths
        ]
    count = nbytes * len(images) // sum(map(len, images))
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (count,), h5py.vlen_dtype(np.uint8))
        for number in range(count):
            data[number] = images[number % len(images)]
        file["labels"] = np.arange(count)


WRITERS = {"raw": write_raw, "gzip": write_gzip, "small": write_small, "jpeg": write_jpeg}


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contender in one round.

    Attributes:
        first: Seconds until the first batch, from the start of the loader.
        full: Share of the line that was used.
        cpu: CPU seconds of this process per sample.
    """

    first: float
    samples_per_s: float
    full: float
    cpu: float
    requests: int


def measured(opened: contextlib.AbstractContextManager[Iterator[Any]], run: Run) -> Measured:
    """Measure once a while has passed."""
    with opened as batches:
        began = time.perf_counter()
        next(batches)
        first = time.perf_counter() - began
        count(batches, 1, run.settle)
        before, cpu = run.server.counts, time.process_time()
        samples, seconds = count(batches, 1, run.seconds)
        cpu, sent = time.process_time() - cpu, run.server.counts - before
    line = run.server.bytes_per_s * seconds
    return Measured(first, samples / seconds, sent.nbytes / line if line else 0.0, cpu / samples, sent.requests)


Opened = Callable[[], contextlib.AbstractContextManager[Iterator[Any]]]


def in_turns(contenders: dict[str, Opened], run: Run) -> dict[str, dict[str, float]]:
    """The medians of each contender's figures."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(run.rounds):
        for name, opened in contenders.items():
            found[name].append(dataclasses.asdict(measured(opened(), run)))
    return {name: medians(rounds) for name, rounds in found.items()}


def show(rows: Figures, title: str) -> Figures:
    print(f"\n{title}\n{'':<44} samples/s  of the line  first batch  CPU, µs a sample  requests")
    for row in rows:
        print(
            f"{row['contender']:<44} {row['samples_per_s']:>9,.0f}  {row['full']:>11.2f}  {row['first']:>9.2f} s  "
            f"{row['cpu'] * 1e6:>16.1f}  {row['requests']:>8,.0f}"
        )
    return rows


# -- parts -------------------------------------------------------------------------------------------------------------


def opening(run: Run) -> Figures:
    run.server.set(*FAST)
    print("\nOpened, 30 ms and 1 Gbit/s: requests, MiB, seconds")
    rows = []
    for name in ("small", "raw", "gzip"):
        stored, took = run.stored(name), []
        for _ in range(run.rounds):
            before, began = run.server.counts, time.perf_counter()
            HDF5Source(stored.url, stored.fields).close()
            took.append(time.perf_counter() - began)
        sent = run.server.counts - before
        row = {"file": name, "requests": sent.requests, "mib": sent.nbytes / MIB, "seconds": statistics.median(took)}
        print(f"{name:<8} {sent.requests:>6,}  {row['mib']:>6.1f}  {row['seconds']:.2f}")
        rows.append(row)
    return rows


def line(run: Run) -> Figures:
    rows: Figures = []
    for milliseconds, mbit in LINES if not run.quick else (FAST,):
        run.server.set(milliseconds, mbit)
        for name in ("raw", "gzip"):
            stored = run.stored(name)
            (found,) = in_turns({name: functools.partial(stored.batches, stored.url)}, run).values()
            limit = run.server.bytes_per_s / stored.sample_bytes
            # The first samples were read ahead; and of the bytes, each is sent once in an epoch.
            times = max(limit / found["samples_per_s"], 1 / max(found["full"], 1e-9))
            row = {"ms": milliseconds, "mbit": mbit, "times_line": times, "limit": limit}
            title = f"{name}, {milliseconds} ms, {mbit} Mbit/s: the line allows {limit:,.0f} samples/s"
            rows += show([{"contender": name, **found, **row}], title)
    return rows


def images(run: Run) -> Figures:
    run.server.set(*FAST)
    stored = run.stored("jpeg")
    found = in_turns({name: functools.partial(stored.batches, path, workers=1) for name, path in both(stored)}, run)
    return show([{"contender": name, **each} for name, each in found.items()], "JPEG, 30 ms, 1 Gbit/s, 1 worker")


def both(stored: Stored) -> tuple[tuple[str, str], ...]:
    return ("local", stored.path), ("remote", stored.url)


def waited(batch: Any) -> Any:
    time.sleep(0.02)
    return batch


@contextlib.contextmanager
def paced(stored: Stored, path: str, **options: Any) -> Iterator[Iterator[Any]]:
    """Batches between which the loop waits, as if its steps ran elsewhere."""
    with stored.batches(path, **options) as batches:
        yield map(waited, batches)


def cached(run: Run) -> Figures:
    run.server.set(*FAST)
    rows: Figures = []
    for name in ("gzip", "raw"):
        stored = run.stored(name)
        with tempfile.TemporaryDirectory(dir=run.folder) as cache:
            source = HDF5Source(stored.url, stored.fields, cache=cache)
            with AsyncLoader(source, {"batch_size": 256, "shuffle": "chunk"}) as loader:
                for _ in loader:
                    pass
            source.close()
            contenders: dict[str, Opened] = {
                "local": functools.partial(stored.batches, stored.path),
                "second epoch": functools.partial(stored.batches, stored.url, cache=cache),
            }
            found = in_turns(contenders, run)
        rows += show([{"contender": f"{name}, {kind}", **each} for kind, each in found.items()], f"{name}, cached")
    return rows


def loop(run: Run) -> Figures:
    run.server.set(*FAST)
    stored = run.stored("gzip")
    options = {"workers": 1, "worker_kind": "process"}
    found = in_turns({name: functools.partial(paced, stored, path, **options) for name, path in both(stored)}, run)
    return show([{"contender": name, **each} for name, each in found.items()], "The loop's process beside a reader")


# -- peers -------------------------------------------------------------------------------------------------------------


def in_turns_of_peers(run: Run, name: str) -> Figures:
    stored = run.stored(name)
    contenders: dict[str, Opened] = {"AsyncLoader": functools.partial(stored.batches, stored.url)}
    for kind, rows in (("rows", 1), ("our order", BLOCK)):
        contenders[f"h5py, fsspec, {kind}"] = functools.partial(by_fsspec, stored, rows)
    if name == "raw" and is_installed("lance"):
        for kind, rows in (("rows", 1), ("blocks", BLOCK)):
            contenders[f"Lance, {kind}"] = functools.partial(by_lance, stored, rows)
    found = in_turns(contenders, run)
    return show([{"contender": who, "file": name, **each} for who, each in found.items()], f"{name}, 30 ms, 1 Gbit/s")


def peers(run: Run) -> Figures:
    run.server.set(*FAST)
    return [row for name in ("raw", "gzip") for row in in_turns_of_peers(run, name)]


@contextlib.contextmanager
def by_fsspec(stored: Stored, rows: int) -> Iterator[Iterator[Any]]:
    """h5py over fsspec's file of a web server, rows or blocks of them in random order."""
    opened = importlib.import_module("fsspec").open(stored.url, cache_type="blockcache", block_size=MIB)
    with opened as remote, h5py.File(remote, rdcc_nbytes=64 * MIB) as file:
        data, rng = file["data"], np.random.default_rng()

        def batches() -> Iterator[Any]:
            while True:
                at = int(rng.integers(len(data) // rows)) * rows
                yield data[at : at + rows], range(rows)

        yield batches()


@contextlib.contextmanager
def by_lance(stored: Stored, rows: int) -> Iterator[Iterator[Any]]:
    """Lance over the same line: 256 samples a batch, in rows or blocks at random, by four threads."""
    import pyarrow as pa

    lance, path = importlib.import_module("lance"), stored.path.removesuffix(".h5") + ".lance"
    if not os.path.exists(path):
        with h5py.File(stored.path) as file:
            values = file["data"][...].reshape(len(file["labels"]), -1)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        lance.write_dataset(pa.table({"data": column}), path)
    options = {"aws_endpoint": stored.run.server.url, "allow_http": "true", "aws_skip_signature": "true"}
    options |= {"aws_virtual_hosted_style_request": "false", "aws_region": "us-east-1"}
    dataset = lance.dataset(f"s3://{os.path.basename(path)}", storage_options=options)
    total, rng = dataset.count_rows(), np.random.default_rng()
    batch = 256 if rows == 1 else 16 * rows

    def taken(_: int) -> int:
        firsts = rng.integers(total // rows, size=batch // rows)
        ids = (firsts[:, None] * rows + np.arange(rows)).ravel()
        return len(dataset.take(ids, columns=["data"]))

    def batches(pool: ThreadPoolExecutor) -> Iterator[Any]:
        while True:
            samples = range(sum(pool.map(taken, range(4))))
            yield samples, samples

    with ThreadPoolExecutor(4) as pool:
        yield batches(pool)


# -- all of it ---------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for row in figures.get("opening", ()):
        if row["file"] == "small":
            yield Goal("Opening 100 000 chunks of the old format, seconds", row["seconds"], 1.5, 1.5, at_most=True)
            yield Goal("The same, MiB", row["mib"], 8, 8, at_most=True)
    for row in figures.get("line", ()):
        label = f"{row['contender']}, {row['ms']} ms, {row['mbit']} Mbit/s"
        if row["mbit"] == FAST[1]:
            most = {"raw": 1.1, "gzip": 1.3}[row["contender"]]
            yield Goal(f"{label}, times the line's time", row["times_line"], most, most, at_most=True)
        else:
            yield Goal(f"{label}, share of the line", row["full"], 0.9, 0.9)
        yield Goal(f"{label}, seconds until the first batch", row["first"], 1, 1, at_most=True)
    yield from of_local(figures)
    for name in ("raw", "gzip"):
        rates = {row["contender"]: row["samples_per_s"] for row in figures.get("peers", ()) if row["file"] == name}
        least = {"h5py, fsspec, our order": 20, "h5py, fsspec, rows": 1000, "Lance, blocks": 1.2, "Lance, rows": 10}
        for peer, times in least.items():
            if peer in rates:
                yield Goal(f"{name}, times {peer}", rates["AsyncLoader"] / rates[peer], times, times)


def of_local(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """What is compared with a file on the disk."""
    by_name = {part: {row["contender"]: row for row in rows} for part, rows in figures.items() if part != "opening"}
    if of := by_name.get("images"):
        share = of["remote"]["samples_per_s"] / of["local"]["samples_per_s"]
        yield Goal("JPEG, of the rate of the same file on the disk", share, 0.9, 0.9)
    if of := by_name.get("cached"):
        for name in ("gzip", "raw"):
            second, local = of[f"{name}, second epoch"], of[f"{name}, local"]
            yield Goal(f"Second epoch of {name} with a cache, requests", second["requests"], 0, 0, at_most=True)
            if name == "gzip":
                label = "The same, CPU times that of the file on the disk"
                yield Goal(label, second["cpu"] / local["cpu"], 1.15, 1.15, at_most=True)
    if of := by_name.get("loop"):
        ratio = of["remote"]["cpu"] / of["local"]["cpu"]
        yield Goal("CPU of the loop's process a sample, times that of a local file", ratio, 1.2, 1.2, at_most=True)


PARTS: dict[str, Callable[[Run], Figures]] = {
    "opening": opening,
    "line": line,
    "images": images,
    "cached": cached,
    "loop": loop,
    "peers": peers,
}


def main() -> None:
    with contextlib.ExitStack() as stack:

        def make_run(quick: bool, folder: str) -> Run:
            return Run(quick, folder, stack.enter_context(RangeServer(folder)))

        run_parts(argument_parser(__doc__, PARTS), PARTS, goals, make_run, ("torch", "h5py", "obstore"))


if __name__ == "__main__":
    main()
