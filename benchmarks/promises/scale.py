"""What grows with the number of samples, chunks and ranks; ranks and data are simulated where they need no disk.

    python benchmarks/promises/scale.py [--quick] [--json FILE] [--folder DIR] [plan | dealt | ...]

* plan: CPU time of a batch's order, and its memory, for 10³ to 10¹² samples and 1 to 4096 ranks.
* dealt: one epoch of 4096 ranks, batch by batch: every sample once, or all but those that ``drop_last`` drops.
* decoding: how many ranks decode each chunk, by the number of ranks.
* checkpoint: the size of a loader's state, and what saving and loading it takes.
* chunks: opening a file of 10 million chunks, with its index kept and not.
* rows: opening tables of 50 million rows, as in manifest.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import AsyncLoader
from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun
from lit_async_data.order.plan import BLOCK, BatchIndex, EpochPlan, Schedule
from lit_async_data.order.weights import Weights
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.sources.local_files.opening import RECENT_NS
from lit_async_data.testing.arrays import ArraySource

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.many_chunks import open_chunks, write_chunks
from loading import manifest
from measuring.memory import in_fresh_process
from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

KIB = 2**10
# Samples of a chunk, and chunks of a group.
ROWS, WIDTH = 64, 64
# The most of a figure by its least is flat up to this; a permutation walks up to twice as far above a power of two.
FLAT, OPENED_S = 3.0, 0.3


class Run(BaseRun):
    """How much to measure."""

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 5


# -- plan --------------------------------------------------------------------------------------------------------------

BATCH, SEED = 64, 0
SHUFFLES = ("global", "chunk", "weights")
# Weights take 8 bytes per sample.
MOST_WEIGHTS = 10**8


@functools.cache
def weights_of(length: int) -> Weights:
    return Weights(np.random.default_rng(SEED).random(length))


def schedule(shuffle: str, length: int, world_size: int) -> Schedule:
    """The order of one of the ranks."""
    given: dict[str, Any] = {"shuffle": shuffle}
    if shuffle == "chunk":
        given |= {"runs": (ChunkRun(length, ROWS),), "shuffle_chunks": WIDTH}
    elif shuffle == "weights":
        given = {"shuffle": "global", "weights": weights_of(length)}
    given |= {"length": length, "batch_size": BATCH, "seed": SEED, "rank": world_size // 2, "world_size": world_size}
    return Schedule(functools.partial(EpochPlan, **given), shuffled=True)


def batches(order: Schedule, count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Batches in a row, the first at nine tenths of an epoch."""
    key = BatchIndex(3, order.steps * 9 // 10)
    for _ in range(count):
        yield order.plan(key.epoch).batch(key.step)
        key = order.following(key)


def cost(shuffle: str, length: int, world_size: int, most: int) -> tuple[float, float]:
    """CPU milliseconds to the first batch, and CPU microseconds per batch after it: short epochs, or a part of one."""
    started = time.thread_time()
    order = schedule(shuffle, length, world_size)
    count = min(most, 8 * order.steps)
    taken = batches(order, count + 1)
    next(taken)
    first = time.thread_time()
    for _ in taken:
        pass
    return 1e3 * (first - started), 1e6 * (time.thread_time() - first) / count


def peak_kib(shuffle: str, length: int, world_size: int) -> float:
    """The most memory that plan and batches take at a time, without the weights."""
    if shuffle == "weights":
        weights_of(length)
    tracemalloc.start()
    try:
        order = schedule(shuffle, length, world_size)
        for _ in batches(order, min(2 * BLOCK // BATCH, 2 * order.steps)):
            pass
        return tracemalloc.get_traced_memory()[1] / KIB
    finally:
        tracemalloc.stop()


def plan(run: Run) -> Figures:
    lengths = [10**power for power in ((3, 6, 12) if run.quick else range(3, 13))]
    worlds = [1, 64, 4096] if run.quick else [1, 8, 64, 512, 4096]
    most = (1 if run.quick else 8) * BLOCK // BATCH
    cases = [
        case
        for case in itertools.product(SHUFFLES, lengths, worlds)
        if case[2] <= case[1] and (case[0] != "weights" or case[1] <= (10**6 if run.quick else MOST_WEIGHTS))
    ]
    turns: dict[tuple[str, int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(run.rounds):
        for case in cases:
            turns[case].append(cost(*case, most))
    rows: Figures = []
    for case in cases:
        first, per_batch = (statistics.median(figure) for figure in zip(*turns[case], strict=True))
        shuffle, length, world_size = case
        row = {"shuffle": shuffle, "samples": length, "ranks": world_size, "first_ms": first, "us": per_batch}
        rows.append(row | {"kib": peak_kib(*case)})
    weights_of.cache_clear()
    print(f"\nThe order, batches of {BATCH} in a row, at each number of ranks: CPU microseconds per batch")
    print(f"{'':<9} {'samples':>17} {''.join(f'{world:>9}' for world in worlds)}   first, ms, at most   KiB, at most")
    for shuffle, length in dict.fromkeys(case[:2] for case in cases):
        of = {row["ranks"]: row for row in rows if (row["shuffle"], row["samples"]) == (shuffle, length)}
        cells = "".join(f"{of[world]['us']:>9.2f}" if world in of else f"{'–':>9}" for world in worlds)
        first, kib = (max(row[key] for row in of.values()) for key in ("first_ms", "kib"))
        print(f"{shuffle:<9} {length:>17,} {cells} {first:>20.2f} {kib:>14,.0f}")
    return rows


# -- dealt -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dealing:
    """An epoch, its ranks, and what becomes of it."""

    length: int
    batch_size: int
    world_size: int
    shuffle: str
    drop_last: bool

    def runs(self) -> tuple[ChunkRun, ...]:
        """Files of unequal lengths and chunks."""
        ends = [int(self.length * share) for share in (0.11, 0.16, 0.4, 0.77, 1)]
        sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return tuple(ChunkRun(size, rows) for size, rows in zip(sizes, (64, 7, 64, 100, 64), strict=True))

    def plan(self, rank: int) -> EpochPlan:
        given: dict[str, Any] = dataclasses.asdict(self) | {"rank": rank, "seed": SEED, "epoch": 1}
        return EpochPlan(**given, runs=self.runs() if self.shuffle == "chunk" else ())

    @property
    def dropped(self) -> int:
        """Samples that no rank may have."""
        return self.length % (self.batch_size * self.world_size) if self.drop_last else 0


def faults(dealing: Dealing) -> int:
    """Samples that came twice or never, or though they are dropped; and ranks with other or empty batches."""
    taken: list[npt.NDArray[np.int64]] = []
    wrong, steps = 0, len(dealing.plan(0))
    for rank in range(dealing.world_size):
        plan = dealing.plan(rank)
        found = [plan.batch(step) for step in range(len(plan))]
        wrong += len(found) != steps or not all(0 < len(samples) <= plan.capacity for samples in found)
        taken += found
    times = np.bincount(np.concatenate(taken), minlength=dealing.length)
    wanted = np.ones(dealing.length, np.int64)
    first = dealing.length - dealing.dropped
    wanted[dealing.plan(0).samples(np.arange(first, dealing.length))] = 0
    return wrong + int(np.count_nonzero(times != wanted))


def dealt(run: Run) -> Figures:
    world = 32 if run.quick else 4096
    step = 16 * world
    # A whole number of steps; a short last step; one too short for all ranks, also at a batch of 1; hardly a step.
    sizes = [
        (15 * step, 16),
        (15 * step + step // 4 + 3, 16),
        (15 * step + 100, 16),
        (10 * world + 5, 1),
        (world + 1, 4),
    ]
    rows: Figures = []
    print(f"\nAn epoch of {world} ranks: samples that came twice, never or though they are dropped")
    print(f"{'samples':>10}  batch  {'shuffle':<7}  drop_last  dropped  wrong  seconds")
    for (length, batch), shuffle, drop in itertools.product(sizes, ("none", "global", "chunk"), (False, True)):
        if drop and length < batch * world:
            continue  # refused, as there would be no step
        dealing = Dealing(length, batch, world, shuffle, drop)
        started = time.perf_counter()
        wrong = faults(dealing)
        rows.append(dataclasses.asdict(dealing) | {"dropped": dealing.dropped, "wrong": wrong})
        print(
            f"{length:>10,}  {batch:>5}  {shuffle:<7}  {drop!s:<9}  {dealing.dropped:>7,}  {wrong:>5} "
            f"{time.perf_counter() - started:>8.1f}"
        )
    return rows


# -- decoding ----------------------------------------------------------------------------------------------------------


def decodings(order: ChunkOrder, world_size: int) -> float:
    """How often each chunk is decoded: the ranks that have a sample of it, counted."""
    positions = np.arange(order.length)
    chunks, _ = order.dealt(positions)
    return np.unique(chunks * world_size + positions % world_size).size / order.chunks


def decoding(run: Run) -> Figures:
    """For groups of 64 chunks, and for the next width from 64 on that the number of ranks divides."""
    rows: Figures = []
    for world in range(1, 9 if run.quick else 129):
        row: dict[str, Any] = {"ranks": world}
        for name, width in (("default", WIDTH), ("multiple", math.ceil(WIDTH / world) * world)):
            order = ChunkOrder((ChunkRun(4 * width * ROWS, ROWS),), width, SEED)
            row[name] = {"width": width, "decoded": decodings(order, world), "said": order.ranks_per_chunk(world)}
        rows.append(row)
    print(f"\nHow often each chunk of {ROWS} samples is decoded, counted over all ranks")
    print(f"ranks  shuffle_chunks={WIDTH}  the next multiple of the ranks")
    shown = [row for row in rows if row["ranks"] in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 72, 96, 128)]
    for row in shown:
        multiple = row["multiple"]
        print(f"{row['ranks']:>5}  {row['default']['decoded']:>17.0f}  {multiple['decoded']:.0f} ({multiple['width']})")
    return rows


# -- checkpoint --------------------------------------------------------------------------------------------------------


def resumed(shuffle: str, length: int, world_size: int) -> dict[str, float]:
    """The state of a loader at nine tenths of an epoch: bytes as JSON, and milliseconds to save and to load it."""
    values = np.broadcast_to(np.uint8(0), (length,))  # takes one byte
    layout = StorageLayout((ChunkRun(length, ROWS),), compressed=True, reading="decoded")
    source = ArraySource({"x": values}, parts={"x": length}, chunks=layout)
    options = {"batch_size": BATCH, "shuffle": shuffle, "workers": 1, "worker_kind": "thread"}
    with AsyncLoader(source, options, rank=world_size // 2, world_size=world_size) as loader:
        place = loader.state_dict() | {"epoch": 3, "position": length * 9 // 10, "history": [[0, world_size, BATCH]]}
        started = time.perf_counter()
        loader.load_state_dict(place)
        loaded = time.perf_counter()
        state = loader.state_dict()
        saved = time.perf_counter()
    assert state["position"] == place["position"]
    return {"bytes": len(json.dumps(state)), "load_ms": 1e3 * (loaded - started), "save_ms": 1e3 * (saved - loaded)}


def checkpoint(run: Run) -> Figures:
    worlds = (1, 4096)
    cases = itertools.product(("global", "chunk"), (10**6, 10**9, 10**12), worlds)
    turns: dict[tuple[str, int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(run.rounds):
        for case, found in turns.items():
            found.append(resumed(*case))
    print("\nThe state of a loader at nine tenths of an epoch")
    print("shuffle            samples  ranks  bytes as JSON  save, ms  load, ms")
    rows: Figures = []
    for (shuffle, length, world), found in turns.items():
        row = {key: statistics.median(each[key] for each in found) for key in found[0]}
        rows.append({"shuffle": shuffle, "samples": length, "ranks": world} | row)
        print(f"{shuffle:<7} {length:>18,} {world:>6} {row['bytes']:>14} {row['save_ms']:>9.3f} {row['load_ms']:>9.3f}")
    return rows


# -- chunks, rows ------------------------------------------------------------------------------------------------------


def chunks(run: Run) -> Figures:
    number = 50_000 if run.quick else 10_000_000
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        path, little = write_chunks(folder, number), write_chunks(folder, 100)
        time.sleep(RECENT_NS / 1e9)  # a file written just now gets no saved index
        built = in_fresh_process(open_chunks, path, little, folder)  # and keeps the index
        kept = [in_fresh_process(open_chunks, path, little, folder) for _ in range(run.rounds)]
    found = {"kept": {key: statistics.median(each[key] for each in kept) for key in built}, "built": built}
    rows = [{"chunks": number, "index": name} | figures for name, figures in found.items()]
    print(f"\nOpening {number:,} chunks in a fresh process: seconds, MiB of private memory")
    for row in rows:
        print(
            f"index {row['index']:<6} source {row['built_s']:>7.3f}  first batch {row['first_batch_s']:>7.3f}  "
            f"memory {row['own_mib']:>7.1f}"
        )
    return rows


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    rows = figures.get("plan", [])
    # Weights take 8 bytes per sample, and a search in many of them misses the processor's cache.
    for shuffle in dict.fromkeys(row["shuffle"] for row in rows if row["shuffle"] != "weights"):
        # Where a rank has fewer positions, epochs are so short that their beginnings count.
        whole = [row for row in rows if row["shuffle"] == shuffle and row["samples"] >= 4 * row["ranks"] * BLOCK]
        for measure, label in (("us", "per batch"), ("kib", "memory")):
            values = [row[measure] for row in whole]
            yield Goal(f"Order, {shuffle}, {label}, most by least", max(values) / min(values), FLAT, FLAT, at_most=True)
    if "dealt" in figures:
        wrong = sum(row["wrong"] for row in figures["dealt"])
        yield Goal("Samples and ranks dealt wrongly", wrong, 0, 0, at_most=True)
    if "decoding" in figures:
        each = [row[name] for row in figures["decoding"] for name in ("default", "multiple")]
        differing = max(abs(one["decoded"] - one["said"]) for one in each)
        yield Goal("Decodings per chunk, counted against said", differing, 0, 0, at_most=True)
        most = max(row["multiple"]["decoded"] for row in figures["decoding"])
        yield Goal("Decodings per chunk, where the ranks divide shuffle_chunks", most, 1, 1, at_most=True)
    if "checkpoint" in figures:
        sizes = [row["bytes"] for row in figures["checkpoint"]]
        yield Goal("Bytes of a state, most by least", max(sizes) / min(sizes), FLAT, FLAT, at_most=True)
    for row in figures.get("chunks", []):
        if row["index"] == "kept":
            label = f"Seconds to the first batch of {row['chunks']:,} chunks, index kept"
            yield Goal(label, row["first_batch_s"], OPENED_S, OPENED_S, at_most=True)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any], Figures]] = {
    "plan": plan,
    "dealt": dealt,
    "decoding": decoding,
    "checkpoint": checkpoint,
    "chunks": chunks,
    "rows": manifest.rows,
}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("numpy", "h5py"))
