"""Windows of frames and patches of volumes, compared with other loaders of the same files; a mixture with its parts.

    python benchmarks/loading/shapes.py [--quick] [--json FILE] [--folder DIR] [windows | patches | mixture]

* windows: episodes of 224×224×3 frames, each a chunk, compressed by gzip and raw: 4 frames at step 5, and 2 frames with
  16 actions, padded at the ends of episodes. DataLoaders read them by h5py, or from LanceDB if it is installed
  (``pip install pylance lancedb``); the loop reads one byte of each page of a batch. Samples per second, and CPU of
  all processes. Before that the program compares values.
* patches: 64³ of eight volumes of 160×256×256 int16 and their masks, compressed by gzip in chunks of 32³ and of 64³, 8
  patches of each volume in an epoch, those of 4 volumes mixed. TorchIO's queue and MONAI's crops read the same files,
  if they are installed (``pip install torchio monai``); a batch of MONAI has the patches of one volume. Each loader
  has a fresh process in each round. MiB: what it and its workers have at most beyond imports (PSS).
* mixture: 0.5, 0.25 and 0.25 of three HDF5 files in batches of 64, against a loader of each file alone with batches of
  32, 16 and 16, which together have the same samples. Once compressed by gzip, and once raw.

All take turns, round by round; medians. The mixture has no workers: the loop reads, so that its CPU is all there is.
Calls are those of Python functions of the package, which each take the GIL.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import lit_async_data
from lit_async_data import AsyncLoader, HDF5Source, MixtureSource

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.tables import ENLARGED, sample_photographs
from measuring.program import BaseRun, Figures, Goal, argument_parser, medians, run_parts
from measuring.rates import TimedRun, in_turns
from PIL import Image
from readers import patches as patch_readers
from readers import shapes as readers
from readers.hdf5 import OURS

PACKAGE = str(Path(lit_async_data.__file__).parent)
BATCH, SHARES = 64, {"first": 0.5, "second": 0.25, "third": 0.25}
ROWS = {"first": 20_000, "second": 3_000, "third": 7_000}
OPTIONS = {"shuffle": "chunk", "shuffle_chunks": 16, "workers": 0, "worker_kind": "auto", "seed": 0}
MOST = 1.05  # times the parts
SIDE, EPISODES, STEPS, NUMBERS = 224, 12, 250, 14
TIMES = 5  # samples per second, times a DataLoader of as many processes
VOLUMES, VOLUME = 8, (160, 256, 256)
FASTER, OF_MEMORY = 1.5, 0.5


# -- windows -----------------------------------------------------------------------------------------------------------


def write_episodes(path: str, episodes: int, compression: str | None) -> None:
    """Cameras that move over photographs, a frame per chunk, and actions of a robot."""
    pictures = [np.asarray(Image.fromarray(each).resize(ENLARGED)) for each in sample_photographs()]
    shape, moves = (episodes * STEPS, SIDE, SIDE, 3), tuple(zip(reversed(ENLARGED), (25, 40), strict=True))
    with h5py.File(path, "w") as file:
        images = file.create_dataset("image", shape, "u1", chunks=(1, *shape[1:]), compression=compression)
        for number in range(len(images)):
            episode, step = divmod(number, STEPS)
            top, left = (int((1 + np.sin(episode + step / slow)) / 2 * (size - SIDE)) for size, slow in moves)
            images[number] = pictures[episode % len(pictures)][top : top + SIDE, left : left + SIDE]
        file["action"] = np.random.default_rng(0).normal(size=(len(images), NUMBERS)).astype("f4")
        file["episode_index"] = np.repeat(np.arange(episodes), STEPS)


def windows(run: BaseRun) -> Figures:
    timed, rows = TimedRun(run.quick, run.folder, 2.0), Figures()
    for compression in ("gzip", None):
        path = f"{run.folder}/episodes_{compression}.h5"
        write_episodes(path, 2 if run.quick else EPISODES, compression)
        for shape in readers.SHAPES:
            source, expected = readers.episodes_source(path, shape), readers.Episodes(path, shape)
            for sample in (0, 7, STEPS - 1, STEPS):
                for mine, theirs in zip(source[sample], expected[sample], strict=True):
                    np.testing.assert_array_equal(mine, theirs)
            chosen = readers.windows(path, shape, source, run.folder)
            rates = in_turns(timed, chosen, touch=True)
            source.close()
            stored = compression or "raw"
            print(f"\n{shape.name}, {stored}, batch {readers.BATCH}\n{'':<34} samples/s  CPU, µs/sample")
            for contender in chosen:
                rate = rates[contender.name]
                row = {"stored": stored, "shape": shape.name, "family": contender.family, "workers": contender.workers}
                rows.append(row | {"per_s": rate.samples_per_s, "cpu_us": 1e6 / rate.samples_per_cpu_s})
                print(f"{contender.name:<34} {rate.samples_per_s:>9,.0f} {rows[-1]['cpu_us']:>15,.0f}")
    return rows


# -- patches -----------------------------------------------------------------------------------------------------------


def write_volumes(folder: str, count: int, shape: tuple[int, ...], chunk: int) -> list[str]:
    """Scans: air around a body with noise and an organ, which the mask shows."""
    rng, paths = np.random.default_rng(0), []
    radius = np.sqrt(sum(axis**2 for axis in np.ogrid[tuple(slice(-1, 1, size * 1j) for size in shape)]))
    for number in range(count):
        paths.append(f"{folder}/volume_{number}_{chunk}.h5")
        noise = rng.integers(-30, 30, shape, np.int16)
        scan = np.where(radius < 0.9, noise + 40 * (radius < 0.4), -1000).astype(np.int16)
        with h5py.File(paths[-1], "w") as file:
            options = {"chunks": (chunk,) * 3, "compression": "gzip"}
            file.create_dataset("ct", data=scan, **options)
            file.create_dataset("mask", data=(radius < 0.4).astype(np.uint8), **options)
    return paths


def check_patches(paths: list[str]) -> None:
    with contextlib.closing(patch_readers.volumes_source(paths)) as source:
        for number in range(0, len(source), 3):
            sample: Any = source[number]
            at = tuple(slice(begin, begin + patch_readers.SIDE) for begin in np.asarray(sample["ct_origin"]).tolist())
            with h5py.File(paths[number // patch_readers.PER_VOLUME]) as file:
                for name in patch_readers.FIELDS:
                    np.testing.assert_array_equal(sample[name], file[name][at])


def patches(run: BaseRun) -> Figures:
    rows, epochs = Figures(), 1 if run.quick else 3
    for missing in {"TorchIO", "MONAI"} - patch_readers.LOADERS.keys():
        print(f"left out: {missing}: not installed")
    for chunk in (32, 64):
        paths = write_volumes(run.folder, 2 if run.quick else VOLUMES, (80, 96, 96) if run.quick else VOLUME, chunk)
        check_patches(paths)
        chosen = [(family, workers) for family in patch_readers.LOADERS for workers in (0, 2)] + [(OURS, "auto")]
        turns: dict[Any, list[dict[str, float]]] = {each: [] for each in chosen}
        for _ in range(run.rounds):
            for each in chosen:
                turns[each].append(patch_readers.in_fresh_process(each[0], paths, each[1], epochs))
        print(f"\nPatches of 64³, chunks of {chunk}³\n{'':<26} patches/s  CPU, ms/patch      MiB")
        for (family, workers), found in turns.items():
            row = medians(found)
            rows.append({"chunk": chunk, "family": family, "workers": workers, **row})
            name = f"{family}, {workers} workers"
            print(f"{name:<26} {row['per_s']:>9,.1f} {row['cpu_ms']:>14.1f} {row['mib']:>8,.0f}")
    return rows


# -- mixture -----------------------------------------------------------------------------------------------------------


def write(folder: str, compression: str | None) -> dict[str, HDF5Source]:
    sources, rng = dict[str, HDF5Source](), np.random.default_rng(0)
    for name, rows in ROWS.items():
        path = f"{folder}/{name}_{compression}.h5"
        with h5py.File(path, "w") as file:
            data = rng.integers(0, 9, (rows, 32, 32), np.uint8)
            file.create_dataset("x", data=data, chunks=(64, 32, 32), compression=compression)
            file["y"] = np.arange(rows)
        sources[name] = HDF5Source(path, {"x": "x", "y": "y"})
    return sources


def endless(loader: AsyncLoader) -> Iterator[Any]:
    while True:
        yield from loader


def cpu_of(step: Callable[[], object], steps: int) -> float:
    """Microseconds of CPU per sample, all threads together."""
    started = time.process_time()
    for _ in range(steps):
        step()
    return 1e6 * (time.process_time() - started) / (steps * BATCH)


def calls_of(step: Callable[[], object], steps: int) -> float:
    """Calls of functions of the package per batch, in this thread."""
    calls = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return calls / steps


def mixture(run: BaseRun) -> Figures:
    steps, rounds, rows = (20, 2, Figures()) if run.quick else (400, 9, Figures())
    print(f"{'':<28} {'CPU, µs/sample':>15} {'calls/batch':>12}")
    for compression in ("gzip", None):
        sources = write(run.folder, compression)
        mixed = MixtureSource({name: (source, SHARES[name]) for name, source in sources.items()}, epoch="first")
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(AsyncLoader(mixed, {"batch_size": BATCH, **OPTIONS}))
            parts = [
                stack.enter_context(AsyncLoader(source, {"batch_size": int(SHARES[name] * BATCH), **OPTIONS}))
                for name, source in sources.items()
            ]
            whole, each = endless(loader), [endless(part) for part in parts]
            contenders = {"mixture": lambda whole=whole: next(whole), "its parts": lambda each=each: [*map(next, each)]}
            found: dict[str, list[float]] = {name: [] for name in contenders}
            for number in range(rounds + 1):
                for name, step in contenders.items():
                    cpu = cpu_of(step, steps)
                    found[name] += [cpu] if number else []  # the first round warms up
            for name, step in contenders.items():
                row = {"stored": compression or "raw", "contender": name, "cpu_us": statistics.median(found[name])}
                rows.append(row | {"calls": calls_of(step, steps)})
                print(f"{row['stored']:<6} {name:<21} {row['cpu_us']:>15.2f} {rows[-1]['calls']:>12.0f}")
        mixed.close()
    return rows


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for mine in (row for row in figures.get("windows", []) if row["family"] == OURS):
        alike = {key: mine[key] for key in ("stored", "shape", "workers")}
        for theirs in (row for row in figures["windows"] if row | alike == row and not row["family"].startswith(OURS)):
            label = f"{mine['shape']}, {mine['stored']}, {mine['workers']} workers, samples/s times {theirs['family']}"
            least = TIMES if theirs["family"] == readers.DATALOADER else 1
            yield Goal(label, mine["per_s"] / theirs["per_s"], least, least)
    for mine in (row for row in figures.get("patches", []) if row["family"] == OURS and row["workers"] != "auto"):
        alike = {key: mine[key] for key in ("chunk", "workers")}
        for theirs in (row for row in figures["patches"] if row | alike == row and row["family"] != OURS):
            label = f"Patches, chunks of {mine['chunk']}³, {mine['workers']} workers"
            yield Goal(f"{label}, times {theirs['family']}", mine["per_s"] / theirs["per_s"], FASTER, FASTER)
            of = mine["mib"] / theirs["mib"]
            yield Goal(f"{label}, MiB, of {theirs['family']}", of, OF_MEMORY, OF_MEMORY, at_most=True)
    rows = figures.get("mixture", [])
    for mixed, parts in zip(rows[::2], rows[1::2], strict=True):
        for name, what in (("cpu_us", "CPU"), ("calls", "calls")):
            yield Goal(
                f"{what} of a mixture, {mixed['stored']}, times its parts", mixed[name] / parts[name], MOST, MOST, True
            )


PARTS = {"windows": windows, "patches": patches, "mixture": mixture}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, BaseRun, ("torch", "h5py"))
