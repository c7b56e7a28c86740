"""Reading the files of a table, compared with the limit of the decoders and with other loaders.

    python benchmarks/loading/manifest.py [--quick] [--json FILE] [--folder DIR] [photographs | small | rows ...]

* photographs: JPEGs of 256×256 to 500×500 pixels, stretched and randomly cropped to 224×224.
* small: PNGs of 64×64 and of 256×256 pixels, and ``.npy`` files of float32 3×64×64.
* first: the time to the first batch, in a fresh process.
* rows: tables of 50 million rows: seconds to open them, and memory, each in a fresh process.
* ahead: photographs that are not in the page cache, with and without reading ahead; also if each takes 5 ms to arrive.
* in-time: ``.npy`` files of 100 kB, 500 kB and 2 MB that take 5 ms each to arrive, batch 16, one worker: the share of
  files that were read ahead.

Rounds, medians and machine as in hdf5.py. Files are in the page cache except for `ahead`. The loop only counts batches,
per second and per second of CPU time of all processes. Before that the program compares labels and pixels.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from lit_async_data import AsyncLoader
from lit_async_data.sources.images.formats import ImageShape
from lit_async_data.sources.manifest import files as fetching
from lit_async_data.sources.manifest.files import fetched

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files import tables
from files.tables import BATCH, Reading
from measuring import memory, page_cache
from measuring.program import Figures, Goal, argument_parser, run_parts
from measuring.rates import in_turns
from readers import tables as readers
from readers.hdf5 import OURS

from loading.hdf5 import Run, rate_from_cold

SIDE = 224
STRETCHED, CROPPED = "JPEG stretched to 224²", "JPEG random crop to 224²"
# On several cores, the share of the first core that the training loop leaves to decoding.
SHARE = 0.7
CHEAPER = 1.2
FIRST_MS = 200


def cores() -> int:
    return len(os.sched_getaffinity(0))


# -- batches that are counted ------------------------------------------------------------------------------------------


def decode_limit(reading: Reading, files: list[bytes], seconds: float, threads: int = 1) -> float:
    """Images per second that threads decode from memory, each into its own array."""

    def decoded(_: int) -> float:
        out, done, started = reading.empty(), 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            reading.decode(files[done % len(files)], out, done if reading.random else None)
            done += 1
        return done / passed

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(decoded, range(threads)))


def compare(run: Run, reading: Reading) -> Figures:
    """Check the values of a data set, measure its contenders, and print the table."""
    source = reading.source()
    readers.check(reading, source, 1 if run.quick else 3)
    contenders, left_out = readers.others(reading, run.workers)
    contenders = [readers.ours(source, workers) for workers in (1, 2, "auto")] + contenders
    in_memory = [Path(path).read_bytes() for path in reading.files.paths]
    limits: list[tuple[float, float]] = []

    def limit() -> None:
        limits.append(
            (decode_limit(reading, in_memory, run.seconds), decode_limit(reading, in_memory, run.seconds, cores()))
        )

    rates = in_turns(run, contenders, before=limit)
    source.close()
    (most, all_cores), size = map(statistics.median, zip(*limits)), sum(map(len, in_memory)) / len(in_memory)
    print(f"\n{reading.name}, {len(in_memory):,} files of {size / 1024:.0f} KiB, batch {BATCH}; ", end="")
    print(f"decode limit on one thread {most:,.0f} images/s, on {cores()} {all_cores:,.0f}")
    print(f"{'':<40}  images/s  × limit  CPU ms/image  images/CPU s")
    rows = []
    for contender in contenders:
        rate, per_cpu = dataclasses.astuple(rates[contender.name])
        row = {
            "reading": reading.name,
            "contender": contender.name,
            "family": contender.family,
            "workers": contender.workers,
        }
        row |= {
            "ours": contender.ours,
            "limit": most,
            "limit_all_cores": all_cores,
            "images_per_s": rate,
            "images_per_cpu_s": per_cpu,
        }
        rows.append(row)
        print(f"{contender.name:<40} {rate:>9,.0f} {rate / most:>8.2f} {1000 / per_cpu:>13.3f} {per_cpu:>13,.0f}")
    for reason in left_out:
        print(f"left out: {reason}")
    return rows


def photographs(run: Run) -> Figures:
    run = Run(run.quick, run.folder, 1.5)  # a batch takes tenths of a second
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        files = tables.photographs(folder, 256 if run.quick else 3_000)
        readings = [
            Reading(STRETCHED, files, ImageShape(image_size=SIDE)),
            Reading(CROPPED, files, ImageShape(image_size=SIDE, resize="random_crop")),
        ]
        return [row for reading in readings for row in compare(run, reading)]


def small(run: Run) -> Figures:
    number = 512 if run.quick else 3_000
    rows: Figures = []
    for side in (64, 256):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            files = tables.pngs(folder, number * 64 // side, side)
            rows += compare(run, Reading(f"PNG {side}×{side}", files, ImageShape()))
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        return rows + compare(run, Reading(".npy float32 3×64×64", tables.arrays(folder, number), None))


# -- the first batch ---------------------------------------------------------------------------------------------------


def first(run: Run) -> Figures:
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        files = tables.photographs(folder, 256 if run.quick else 1_000)
        turns = [memory.in_fresh_process(readers.first_batches, files, SIDE) for _ in range(run.rounds)]
    rows = [{"contender": name, "ms": statistics.median(turn[name] for turn in turns)} for name in turns[0]]
    print(f"\nThe first batch of {BATCH} photographs, randomly cropped, milliseconds")
    for row in rows:
        print(f"{row['contender']:<50} {row['ms']:>8,.0f}")
    print(f"{multiprocessing.get_start_method()} is the default start method of a DataLoader here")
    return rows


# -- tables of many rows -----------------------------------------------------------------------------------------------


def rows(run: Run) -> Figures:
    number, results = 1_000_000 if run.quick else 50_000_000, []
    print(f"\nTables of {number:,} rows, columns id, path and label")
    print(f"{'':<26} seconds  order ms  bytes/row     private  at most")
    for kind in ("parquet", "csv"):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            path = tables.large_table(folder, kind, number)
            for name, with_id in (("no ids", False), ("ids", True)):
                row = {"table": kind, "contender": name, "rows": number}
                row |= memory.in_fresh_process(tables.open_table, path, number, with_id)
                results.append(row)
                print(
                    f"{kind + ', ' + name:<26} {row['seconds']:>7.2f} {row['order_ms']:>9.1f} "
                    f"{row['bytes_per_row']:>10.1f} {row['own_bytes_per_row']:>11.1f} {row['peak_bytes_per_row']:>8.1f}"
                )
    return results


# -- reading ahead -----------------------------------------------------------------------------------------------------


def ahead(run: Run) -> Figures:
    """Photographs with and without reading ahead, from the first batch on."""
    rates: dict[tuple[str, str], list[float]] = {}
    dropped = True
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        files = tables.photographs(folder, 256 if run.quick else 1_000)
        reading = Reading(CROPPED, files, ImageShape(image_size=SIDE, resize="random_crop"))
        source = reading.source()
        for _ in range(run.rounds):
            for place in ("page cache", "disk", "network"):
                for how in ("read ahead", "not ahead"):
                    if place == "disk":
                        gc.collect()
                        dropped &= all(list(map(page_cache.drop_file, files.paths)))  # each of them
                    far = mock.patch.object(fetching, "fetched", tables.FarFiles() if place == "network" else fetched)
                    keep = fetching.FilePrefetcher.reserve if how == "read ahead" else tables.reserve_nothing
                    with far, mock.patch.object(fetching.FilePrefetcher, "reserve", keep):
                        rate = rate_from_cold(readers.ours(source, 2), len(files.paths))
                    rates.setdefault((place, how), []).append(rate)
        source.close()
    print(f"\n{CROPPED}, {len(files.paths):,} files, AsyncLoader with 2 workers, from the first batch on, images/s")
    if not dropped:
        print("the page cache could not be dropped here: these figures are not of a cold cache")
    results = []
    for (place, how), measured in rates.items():
        results.append({"place": place, "how": how, "images_per_s": statistics.median(measured), "dropped": dropped})
        print(f"{place + ', ' + how:<30} {results[-1]['images_per_s']:>8,.0f}")
    return results


def in_time(run: Run) -> Figures:
    """Files of several sizes on a slow file system: the share read ahead."""
    number, results, turns = 320 if run.quick else 960, [], 3 if run.quick else run.rounds
    print("\n.npy files that take 5 ms each, batch 16, one worker, from the first batch on")
    print("     bytes   files/s   read ahead")
    for nbytes in (100_000, 500_000, 2_000_000):
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            source = tables.linked_files(folder, nbytes, number)
            rates, shares = [], []
            for _ in range(turns):
                ahead_of = tables.FarFiles()
                options = {"batch_size": 16, "workers": 1, "worker_kind": "thread", "shuffle": "global"}
                far = mock.patch.multiple(fetching, fetched=ahead_of, filled=lambda *_: False)
                with far, AsyncLoader(source, options) as loader:
                    started = time.perf_counter()
                    files = sum(len(batch["x"]) for batch in loader)
                    rates.append(files / (time.perf_counter() - started))
                shares.append(ahead_of.share)
            source.close()
        row = {"bytes": nbytes, "files_per_s": statistics.median(rates), "ahead": statistics.median(shares)}
        results.append(row)
        print(f"{nbytes:>10,} {row['files_per_s']:>9,.0f} {row['ahead']:>12.0%}")
    return results


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    counted = figures.get("photographs", []) + figures.get("small", [])
    for name in dict.fromkeys(row["reading"] for row in counted):
        of = [row for row in counted if row["reading"] == name]
        mine, theirs = ([row for row in of if row["ours"] == ours] for ours in (True, False))
        rate = max(row["images_per_s"] for row in mine) / mine[0]["limit"]
        wanted = cores() - 1 + SHARE
        yield Goal(f"{name}, times the decode limit on one thread", rate, wanted, wanted)
        most, best = (max(row["images_per_cpu_s"] for row in side) for side in (mine, theirs))
        yield Goal(f"{name}, images per CPU second, times the best other loader", most / best, CHEAPER, CHEAPER)
    for row in figures.get("first", []):
        if row["contender"].startswith(OURS):
            yield Goal(f"First batch, {row['contender']}, milliseconds", row["ms"], FIRST_MS, FIRST_MS, at_most=True)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Figures]]
PARTS = {"photographs": photographs, "small": small, "first": first, "rows": rows, "ahead": ahead, "in-time": in_time}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "pillow"))
