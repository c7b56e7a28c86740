"""Is a sample lost or repeated by a resume, and how long does one take?

    python benchmarks/promises/resume.py [--quick] [--json FILE] [--folder DIR] [random | others | first ...]

* random: 500 epochs of HDF5 files, each stopped at one to three random places, and continued with random ranks, batch
  sizes, workers and queue depths; each step is compared with the uninterrupted epoch.
* others: epochs stopped once, by this package, torchdata's StatefulDataLoader and MosaicML Streaming, where installed.
* first: time to the first batch, from the start of an epoch and from nine tenths of it, of 10⁶ and 10⁸ samples.

Ranks are simulated: their loaders take turns in one process. A state crosses JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.sources.contract.source import Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.numbered import Computed, write_bytes, write_numbers
from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts
from readers.resumable import OURS, Faults, Leg, Ranks, RefusedError, compared, first_of_stateful, installed

SEED = 0


class Run(BaseRun):
    """How much to measure."""

    @property
    def cases(self) -> int:
        return 20 if self.quick else 500

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 9


# -- random ------------------------------------------------------------------------------------------------------------

LENGTHS = (211, 600, 1009)
ORDERS = ("none", "global", "chunk", "global, weights", "chunk, weights")
MOST_RANKS, MOST_BATCH, MOST_DEPTH = 4, 32, 6
# Legs whose loaders have reader processes, which take most of their time.
PROCESSES = 0.03


def random_leg(draw: random.Random, most_ranks: int) -> Leg:
    ranks, batch = draw.randint(1, most_ranks), draw.randint(1, MOST_BATCH)
    if draw.random() < PROCESSES:
        return Leg(min(ranks, 2), batch, workers=1, depth=draw.randint(1, MOST_DEPTH), kind="process")
    return Leg(ranks, batch, workers=draw.randint(0, 2), depth=draw.randint(1, MOST_DEPTH))


def random_options(draw: random.Random, order: str, length: int) -> dict[str, Any]:
    shuffle, _, weighted = order.partition(", ")
    options = {"shuffle": shuffle, "shuffle_chunks": draw.randint(1, 9), "seed": draw.randrange(2**32)}
    if weighted:
        weights = np.random.default_rng(draw.randrange(2**32)).random(length)
        options |= {"weights": weights, "epoch_size": draw.choice([length, length - 77, length + 77])}
    return options


def uninterrupted(source: Source, epoch: int, options: Mapping[str, Any]) -> list[int]:
    with AsyncLoader(source, {**options, "batch_size": 64, "workers": 0}) as loader:
        loader.set_epoch(epoch)
        return [int(number) for (numbers,) in loader for number in numbers]


def continued(source: Source, order: str, draw: random.Random) -> tuple[list[Leg], list[int], Faults]:
    """Stop an epoch at random places, and compare it with the uninterrupted one, and the next one with its own.

    Returns the legs, how many samples remained behind each, and the faults.
    """
    options = random_options(draw, order, len(source))
    epoch, drop_last, stops = draw.randrange(5), draw.random() < 0.3, draw.randint(1, 3)
    wanted, after = (uninterrupted(source, number, options) for number in (epoch, epoch + 1))
    options["drop_last"] = drop_last
    found: list[list[int]] = []
    legs: list[Leg] = []
    rests: list[int] = []
    state, rest = None, len(wanted)
    for number in range(stops + 1):
        last = number == stops
        leg = random_leg(draw, min(MOST_RANKS, rest) if rest else MOST_RANKS)
        legs.append(leg)
        with contextlib.closing(Ranks(source, leg, state, options)) as ranks:
            if state is None and epoch and draw.random() < 0.3:  # reach the epoch through the one before
                ranks.set_epoch(epoch - 1)
                list(ranks.steps())
            else:
                ranks.set_epoch(epoch)
            steps = -(-rest // leg.step)
            found += itertools.islice(ranks.steps(), None if last else draw.randint(1, max(steps, 1)))
            state = ranks.state()
            done = sum(map(len, found))
            rest = len(wanted) - done
            if drop_last and rest < leg.step:  # what does not fill a step is dropped, and the epoch is over
                wanted, rest = wanted[:done], 0
            rests.append(rest)
            if last:
                following = next(ranks.steps())
    here, beyond = compared(found, wanted), compared([following], after[: len(following)])
    return legs, rests, Faults(*map(sum, zip(here, beyond, strict=True)))


def random_resumes(run: Run) -> Figures:
    sources = [
        (stored, HDF5Source(write_numbers(run.folder, stored, length), ("y",)))
        for stored in ("contiguous", "gzip")
        for length in LENGTHS
    ]
    draw = random.Random(SEED)
    rows: Figures = []
    for number in range(run.cases):
        order, (stored, source) = ORDERS[number % len(ORDERS)], draw.choice(sources)
        legs, rests, faults = continued(source, order, draw)
        row = {"case": number, "file": stored, "samples": len(source), "order": order, "rests": rests}
        rows.append(row | {"legs": [leg._asdict() for leg in legs]} | faults._asdict())
        if any(faults):
            print(f"wrong: {rows[-1]}")
    for _, source in sources:
        source.close()
    print(
        "\nEpochs stopped and continued with other ranks, batch sizes, workers and depths, against uninterrupted ones"
    )
    print(f"{'order':<16} epochs  resumes within  with processes  lost  repeated  steps out of order")
    for order in ORDERS:
        of = [row for row in rows if row["order"] == order]
        processes = sum(any(leg["kind"] == "process" for leg in row["legs"]) for row in of)
        lost, repeated, disordered = (sum(row[key] for row in of) for key in Faults._fields)
        within = sum(rest > 0 for row in of for rest in row["rests"])
        print(
            f"{order:<16} {len(of):>6} {within:>15} {processes:>15} {lost:>5} {repeated:>9} {disordered:>19}",
        )
    return rows


# -- others ------------------------------------------------------------------------------------------------------------

# Divided by all numbers of ranks, so that none pads an uninterrupted epoch.
OTHERS_LENGTH = 2400
CHANGES = ("nothing", "workers", "batch size", "ranks", "all three")


def change(draw: random.Random, what: str) -> tuple[Leg, int, Leg]:
    """Ranks, the steps they take, and other ranks."""
    first = Leg(draw.randint(1, MOST_RANKS), draw.randint(2, MOST_BATCH), workers=draw.randint(0, 1))
    others = [ranks for ranks in range(1, MOST_RANKS + 1) if ranks != first.ranks]
    second = first
    if what in ("workers", "all three"):
        second = second._replace(workers=1 - first.workers)
    if what in ("batch size", "all three"):
        second = second._replace(batch_size=draw.choice([b for b in range(2, MOST_BATCH + 1) if b != first.batch_size]))
    if what in ("ranks", "all three"):
        second = second._replace(ranks=draw.choice(others))
    return first, draw.randint(1, OTHERS_LENGTH // first.step - 1), second


def others(run: Run) -> Figures:
    draw = random.Random(SEED)
    cases = [
        (what, *change(draw, what)) for what in CHANGES for _ in range(1 if run.quick else run.cases // len(CHANGES))
    ]
    rows: Figures = []
    for name, contender in installed(run.folder, OTHERS_LENGTH):
        for what, first, steps, second in cases:
            row = {"contender": name, "changed": what, "first": first._asdict(), "steps": steps}
            try:
                found = contender.stopped(first, steps, second)
            except RefusedError as error:
                rows.append(row | {"then": second._asdict(), "refused": str(error)})
                continue
            faults = compared(found, contender.uninterrupted(first.ranks))
            rows.append(row | {"then": second._asdict(), "refused": ""} | faults._asdict())
    print(f"\nEpochs of {OTHERS_LENGTH} samples, globally shuffled, stopped once")
    print(f"{'contender':<32} {'what changed':<12} cases  refused  samples: lost  repeated  cases out of order")
    for name, what in itertools.product(dict.fromkeys(row["contender"] for row in rows), CHANGES):
        of = [row for row in rows if (row["contender"], row["changed"]) == (name, what)]
        done = [row for row in of if not row["refused"]]
        print(
            f"{name:<32} {what:<12} {len(of):>5} {len(of) - len(done):>8} {sum(row['lost'] for row in done):>14} "
            f"{sum(row['repeated'] for row in done):>9} {sum(row['disordered'] > 0 for row in done):>19}"
        )
    return rows


# -- first -------------------------------------------------------------------------------------------------------------

BATCH = 256
FIRST_LENGTHS = (10**6, 10**8)
# Beyond this a permutation that is a list of Python's numbers takes too long, and gigabytes.
MOST_STATEFUL = 10**7
# A resume by a fresh start, and 10⁸ samples by 10⁶.
MOST_RATIO = 2.0


def first_batch(source: Source, shuffle: str, place: int) -> float:
    """Milliseconds to the first batch of a new loader from a place on; the samples have to be the right ones."""
    options = {"batch_size": BATCH, "shuffle": shuffle, "workers": 1, "worker_kind": "thread", "return_indices": True}
    with AsyncLoader(source, options) as saving:
        state = saving.state_dict() | {"epoch": 3, "position": place, "history": [[0, 1, BATCH]] if place else []}
        wanted = saving._machinery.wiring.schedule.plan(3).samples(np.arange(place, place + BATCH))
    state = json.loads(json.dumps(state))
    started = time.perf_counter()
    with AsyncLoader(source, options) as loader:
        loader.load_state_dict(state)
        values, numbers = loader.next()
        seconds = time.perf_counter() - started
    assert (numbers.numpy() == wanted).all()
    assert ((values.numpy() - wanted) % 256 == 0).all()  # files hold the low byte
    return 1e3 * seconds


def first(run: Run) -> Figures:
    lengths = (10**4, 10**6) if run.quick else FIRST_LENGTHS
    with contextlib.ExitStack() as stack:
        sources: dict[tuple[str, int], Source] = {}
        for length in lengths:
            path = write_bytes(run.folder, length)
            sources["computed", length] = Computed(length)
            sources["HDF5, contiguous", length] = stack.enter_context(contextlib.closing(HDF5Source(path, ("y",))))
        cases = [
            (kind, shuffle, length)
            for kind, length in sources
            for shuffle in ("none", "global", "chunk")
            if shuffle != "chunk" or kind == "computed"
        ]
        turns: dict[tuple[str, str, int], list[tuple[float, float]]] = {case: [] for case in cases}
        for number, (kind, shuffle, length) in itertools.product(range(run.rounds + 1), cases):
            source, place = sources[kind, length], length * 9 // 10 // BATCH * BATCH
            found = first_batch(source, shuffle, 0), first_batch(source, shuffle, place)
            if number:  # the first round imports, and opens files
                turns[kind, shuffle, length].append(found)
    rows: Figures = []
    for (kind, shuffle, length), figures in turns.items():
        fresh, resumed = (statistics.median(figure) for figure in zip(*figures, strict=True))
        rows.append(first_row(f"{OURS}, {kind}", shuffle, length, fresh, resumed))
    try:
        for length in (10**4,) if run.quick else (10**6, MOST_STATEFUL):
            fresh, resumed = (1e3 * seconds for seconds in first_of_stateful(length, BATCH, 0))
            rows.append(first_row("StatefulDataLoader, 0 workers", "global", length, fresh, resumed))
    except ImportError as error:
        print(f"\nStatefulDataLoader takes no part: {error}")
    print(f"\nMilliseconds to the first batch of {BATCH}")
    print(f"{'contender':<32} {'shuffle':<8} {'samples':>12}  of the epoch  after a resume at nine tenths")
    for row in rows:
        print(
            f"{row['contender']:<32} {row['shuffle']:<8} {row['samples']:>12,} {row['fresh_ms']:>13.2f} "
            f"{row['resumed_ms']:>30.2f}"
        )
    return rows


def first_row(contender: str, shuffle: str, length: int, fresh: float, resumed: float) -> dict[str, Any]:
    row = {"contender": contender, "shuffle": shuffle, "samples": length}
    return row | {"fresh_ms": fresh, "resumed_ms": resumed}


# -- all of it ---------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for part, label in (("random", "Random resumes"), ("others", f"{OURS}, stopped once")):
        of = [row for row in figures.get(part, []) if row.get("contender", OURS) == OURS]
        if of:
            wrong = sum(row.get("refused", "") != "" or any(row[key] for key in Faults._fields) for row in of)
            yield Goal(f"{label}, of {len(of)} epochs those with a fault", wrong, 0, 0, at_most=True)
    ours = [row for row in figures.get("first", []) if row["contender"].startswith(OURS)]
    for row in ours:
        if row["samples"] == max(each["samples"] for each in ours):
            what = f"{row['contender']}, {row['shuffle']}, {row['samples']:,}"
            ratio = row["resumed_ms"] / row["fresh_ms"]
            yield Goal(f"{what}: resumed by fresh", ratio, MOST_RATIO, MOST_RATIO, at_most=True)
            same = (row["contender"], row["shuffle"])
            little = min((each for each in ours if (each["contender"], each["shuffle"]) == same), key=SAMPLES)
            ratio = row["resumed_ms"] / little["resumed_ms"]
            yield Goal(f"{what}, by {little['samples']:,}", ratio, MOST_RATIO, MOST_RATIO, at_most=True)


SAMPLES = operator.itemgetter("samples")
PARTS: dict[str, Callable[[Run], Figures]] = {"random": random_resumes, "others": others, "first": first}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py"))
