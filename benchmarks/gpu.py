"""Device prefetch on a GPU: is it right, and does the GPU wait? All hazards and all figures of it, in one call.

    python benchmarks/gpu.py [--quick] [--json FILE] [part ...]

* hazards: each forced, with its guard and without: the first must show no wrong value, the second must.
* copies: GB/s of the copies from pinned memory while steps run, and of whole batches to a loop that only takes them;
  the limit is plain copies of the same size.
* waiting: of the GPU's time in the Trainer, the share in which no step ran, by the GPU's own clock, less that of the
  same steps on a batch that never moves. Loading takes 8 ms, a step 20.
* submit: how long it takes the program to start the next copy while both streams are busy.
* memory: what torch's allocator holds after each of five epochs.
* beside: of the time of copies, the share in which kernels ran, as the profiler saw it, and what they copied from.
* program: an epoch in which whatever makes the program wait for the GPU is an error.

In turns, medians. Made for five minutes on one GPU, with nothing but torch, Lightning, h5py and numpy. A part
that fails says why and leaves the others to run.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import pytorch_lightning as pl
import torch
from measuring.program import Goal, arguments, ran
from on_device.contenders import MIB, SAMPLE, in_memory, source, ways
from on_device.measures import (
    QUIET,
    SETTLE,
    Kernels,
    NoSynchronising,
    TimedSteps,
    beside,
    beside_kernels,
    copy_rate,
    delivered_rate,
    pinned_rate,
    reserved,
    stepped,
    submit_seconds,
)
from on_device.measures import (
    copies as copies_of,
)
from on_device.rig import verdicts

from lit_async_data import DevicePrefetcher

Figures = list[dict[str, Any]]
LOAD_S, STEP_S = 0.008, 0.020
# MiB of a batch, where copies are measured and where waiting is.
COPIED, BATCH = 64, 32
EPOCHS = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """How long to measure."""

    quick: bool
    folder: str

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def steps(self) -> int:
        return SETTLE + (15 if self.quick else 80)


@functools.cache
def kernels(seconds: float) -> Kernels:
    return Kernels(seconds)


# -- parts -------------------------------------------------------------------------------------------------------------


def hazards(run: Run) -> Figures:
    print(f"\n{'hazard':<42} wrong, as it is  wrong, without its guard")
    rows = []
    for row in verdicts(run.quick):
        rows.append(row)
        print(f"{row['hazard']:<42} {row['wrong']:>9} of {row['turns']} {row['mutant_wrong']:>18} of {row['turns']}")
    return rows


def copies(run: Run) -> Figures:
    chosen = ways(COPIED, run.steps, 0.0)
    # A kernel that takes longer than a copy, so that each copy runs beside one.
    step = kernels(2 * COPIED * SAMPLE / 1e9 / pinned_rate(COPIED * SAMPLE))
    limits: list[float] = []
    found: dict[str, list[tuple[float | None, float]]] = {}
    for _ in range(run.rounds):
        limits.append(pinned_rate(COPIED * SAMPLE))
        for way in chosen:
            if way.depth is None:
                rate = copy_rate(way, step) if way.ours else None
                found.setdefault(way.name, []).append((rate, delivered_rate(way)))
    limit = statistics.median(limits)
    print(f"\nbatches of {COPIED} MiB; plain copies from pinned memory {limit:.1f} GB/s")
    print(f"{'':<34} copies, GB/s  of the limit  delivered, GB/s  of the limit")
    rows = []
    for name, turns in found.items():
        rates = [rate for rate, _ in turns if rate is not None]
        copied, delivered = statistics.median(rates) if rates else None, statistics.median(rate for _, rate in turns)
        row = {"way": name, "limit_gb_s": limit, "copies_gb_s": copied, "delivered_gb_s": delivered}
        rows.append(row | {"copies_of_limit": copied and copied / limit, "delivered_of_limit": delivered / limit})
        mine = f"{copied:>12.1f}  {copied / limit:>12.2f}" if copied else f"{'–':>12}  {'–':>12}"
        print(f"{name:<34} {mine}  {delivered:>15.1f}  {delivered / limit:>12.2f}")
    return rows


def waiting(run: Run) -> Figures:
    still, step = in_memory(BATCH, run.steps), kernels(STEP_S)
    chosen = [still, *ways(BATCH, run.steps, LOAD_S)]
    found: dict[str, list[dict[str, float]]] = {way.name: [] for way in chosen}
    for _ in range(run.rounds):
        for way in chosen:
            found[way.name].append(stepped(way, step))
    print(f"\nbatches of {BATCH} MiB, loading {1000 * LOAD_S:.0f} ms; milliseconds per step, by the GPU's clock")
    print(f"{'':<34}    step  no step ran  waiting for data")
    rows = []
    for way in chosen:
        row = {key: statistics.median(turn[key] for turn in found[way.name]) for key in found[way.name][0]}
        unavoidable = statistics.median(turn["idle_s"] for turn in found[still.name])
        share = max(row["idle_s"] - unavoidable, 0) / row["step_s"]
        rows.append({"way": way.name, "ours": way.ours, **row, "waiting": share})
        print(f"{way.name:<34} {1000 * row['step_s']:>7.2f} {1000 * row['idle_s']:>12.3f} {share:>17.2%}")
    return rows


def submit(run: Run) -> Figures:
    seconds = submit_seconds(10 if run.quick else 50)
    row = {"median_ms": 1000 * statistics.median(seconds), "worst_ms": 1000 * max(seconds)}
    print(f"\nstarting a copy while both streams are busy: {row['median_ms']:.3f} ms, at worst {row['worst_ms']:.3f}")
    return [row]


def memory(run: Run) -> Figures:
    kinds = {"one side stream": False, "a side stream for each epoch": True}
    rows = []
    print(f"\nMiB that torch's allocator holds after each of {EPOCHS} epochs")
    for name, new_streams in kinds.items():
        held = [nbytes / MIB for nbytes in reserved(EPOCHS, new_streams=new_streams)]
        rows.append({"kind": name, "mib": held, "grown_mib": held[-1] - held[0]})
        print(f"{name:<34} {' '.join(f'{mib:.0f}' for mib in held)}")
    return rows


def beside_them(run: Run) -> Figures:
    rows = []
    print(f"\n{'':<34} of the copies' time, beside kernels")
    for way in ways(BATCH, SETTLE + 15, 0.0):
        events = beside_kernels(way, kernels(STEP_S))
        share, kinds = beside(events), sorted({event["name"] for event in copies_of(events)})
        rows.append({"way": way.name, "ours": way.ours, "beside": share, "kinds": kinds})
        print(f"{way.name:<34} {share:>7.1%}  {', '.join(kinds)}")
    return rows


def program(run: Run) -> Figures:
    said = ""
    with source(BATCH, run.steps, 0.0) as loader:
        trainer = pl.Trainer(callbacks=[NoSynchronising(), DevicePrefetcher()], **QUIET)
        try:
            trainer.fit(TimedSteps(kernels(STEP_S)), loader)
        except RuntimeError as error:
            said = str(error)
    print(f"\nan epoch in which waiting for the GPU is an error: {said or 'there was none'}")
    return [{"synchronised": int(bool(said)), "error": said}]


# -- goals -------------------------------------------------------------------------------------------------------------


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for part in (part for part, rows in figures.items() if not rows):
        yield Goal(f"{part}: failed, see above", None, 1, 1)
    for row in figures.get("hazards", []):
        turns = row["turns"]
        yield Goal(f"{row['hazard']}, turns with wrong values", row["wrong"], 0, 0, at_most=True)
        yield Goal(f"{row['hazard']}, the same without its guard, of {turns}", row["mutant_wrong"], turns, turns)
    for row in figures.get("copies", []):
        if row["copies_of_limit"] is not None:
            yield Goal(f"{row['way']}, copies, of the pinned bandwidth", row["copies_of_limit"], 0.9, 0.9)
    for row in figures.get("waiting", []):
        if row["ours"]:
            yield Goal(f"{row['way']}, share of time the GPU waited", row["waiting"], 0.01, 0.01, at_most=True)
    for row in figures.get("submit", []):
        yield Goal("milliseconds to start a copy", row["median_ms"], 1, 1, at_most=True)
    for row in figures.get("memory", [])[:1]:
        yield Goal("MiB that the allocator has grown by", row["grown_mib"], 0, 0, at_most=True)
    for row in figures.get("beside", []):
        if row["ours"]:
            yield Goal(f"{row['way']}, copies beside kernels", row["beside"], 0.9, 0.9)
    for row in figures.get("program", []):
        yield Goal("the program waited for the GPU", row["synchronised"], 0, 0, at_most=True)


# -- all of it ---------------------------------------------------------------------------------------------------------


def unless_it_fails(part: Callable[[Run], Figures], run: Run) -> Figures:
    """A part's figures, or none: GPUs are rare, and what the other parts find is worth having."""
    try:
        return part(run)
    except Exception:  # noqa: BLE001  # whatever it is
        traceback.print_exc(file=sys.stdout)
        return []
    finally:
        torch.cuda.set_sync_debug_mode("default")


PARTS: dict[str, Callable[[Run], Figures]] = {
    name: functools.partial(unless_it_fails, part)
    for name, part in {
        "hazards": hazards,
        "copies": copies,
        "waiting": waiting,
        "submit": submit,
        "memory": memory,
        "beside": beside_them,
        "program": program,
    }.items()
}


def main() -> None:
    parser = arguments(__doc__, PARTS)
    if not torch.cuda.is_available():
        parser.parse_args()  # --help is for everybody
        raise SystemExit("benchmarks/gpu.py: torch sees no CUDA device here; run it on a machine with one")
    properties = torch.cuda.get_device_properties(0)
    gpu = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    versions = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "–",
        "Lightning": version("pytorch-lightning"),
    }
    ran(parser, PARTS, goals, Run, {**versions, "GPU": gpu})


if __name__ == "__main__":
    main()
