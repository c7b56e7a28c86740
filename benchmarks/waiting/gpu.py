"""Device prefetch on a GPU: are the values right, and does the GPU wait? All hazards and all figures.

    python benchmarks/waiting/gpu.py [--quick] [--json FILE] [part ...]

* hazards: forces each hazard with its guard and without. Values must be right with it and wrong without it.
* copies: GB/s of copies from pinned memory while steps run, and of batches delivered to a loop that does nothing else.
  The limit is plain copies of the same size.
* waiting: the share of the GPU's time in the Trainer in which no step ran, by the GPU's clock, less that of the same
  steps on a batch that never moves. Loading takes 8 ms, a step 20.
* submit: how long the program takes to start the next copy while both streams are busy.
* memory: bytes that torch's allocator holds after each of five epochs.
* beside: the share of the copies' time in which kernels ran, by the profiler, and the memory that they copied from.
* program: an epoch in which any wait of the program for the GPU is an error.
* verified: an epoch in which the checksums of each batch are compared, on its way and after its step.

Rounds are interleaved; figures are medians. It takes about five minutes on one GPU, and needs only torch, Lightning,
h5py and numpy. If a part fails, the program prints why and runs the others.
"""

from __future__ import annotations

import functools
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytorch_lightning as pl
import torch

from lit_async_data import DevicePrefetcher

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts

from waiting.on_device import measures
from waiting.on_device.contenders import MIB, SAMPLE, contenders, in_memory, source
from waiting.on_device.copy_verifier import TransferError, verified_copies
from waiting.on_device.rig import verdicts

LOAD_S, STEP_S = 0.008, 0.020
# MiB of a batch: in `copies`, and in the other parts.
COPIED, BATCH = 64, 32
EPOCHS = 5


class Run(BaseRun):
    """How long to measure."""

    @property
    def steps(self) -> int:
        return measures.SETTLE + (15 if self.quick else 80)


@functools.cache
def kernels(seconds: float) -> measures.Kernels:
    return measures.Kernels(seconds)


# -- parts -------------------------------------------------------------------------------------------------------------


def hazards(run: Run) -> Figures:
    print(f"\n{'hazard':<42} wrong, with its guard  without it")
    rows = []
    for row in verdicts(run.quick):
        rows.append(row)
        print(f"{row['hazard']:<42} {row['wrong']:>9} of {row['turns']} {row['mutant_wrong']:>18} of {row['turns']}")
    return rows


def copies(run: Run) -> Figures:
    chosen = contenders(COPIED, run.steps, 0.0)
    # A step longer than a copy, so that each copy runs beside one.
    step = kernels(2 * COPIED * SAMPLE / 1e9 / measures.pinned_rate(COPIED * SAMPLE))
    limits: list[float] = []
    results: dict[str, list[tuple[float | None, float]]] = {}
    for _ in range(run.rounds):
        limits.append(measures.pinned_rate(COPIED * SAMPLE))
        for contender in chosen:
            if contender.depth is None:
                rate = measures.copy_rate(contender, step) if contender.ours else None
                results.setdefault(contender.name, []).append((rate, measures.delivered_rate(contender)))
    limit = statistics.median(limits)
    print(f"\nbatches of {COPIED} MiB; plain copies from pinned memory {limit:.1f} GB/s")
    print(f"{'':<34} copies, GB/s  of the limit  delivered, GB/s  of the limit")
    rows = []
    for name, turns in results.items():
        rates = [rate for rate, _ in turns if rate is not None]
        copied, delivered = statistics.median(rates) if rates else None, statistics.median(rate for _, rate in turns)
        row = {"contender": name, "limit_gb_s": limit, "copies_gb_s": copied, "delivered_gb_s": delivered}
        rows.append(row | {"copies_of_limit": copied and copied / limit, "delivered_of_limit": delivered / limit})
        mine = f"{copied:>12.1f}  {copied / limit:>12.2f}" if copied else f"{'–':>12}  {'–':>12}"
        print(f"{name:<34} {mine}  {delivered:>15.1f}  {delivered / limit:>12.2f}")
    return rows


def waiting(run: Run) -> Figures:
    still, step = in_memory(BATCH, run.steps), kernels(STEP_S)
    chosen = [still, *contenders(BATCH, run.steps, LOAD_S)]
    results: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in chosen}
    for _ in range(run.rounds):
        for contender in chosen:
            results[contender.name].append(measures.stepped(contender, step))
    print(f"\nbatches of {BATCH} MiB, loading {1000 * LOAD_S:.0f} ms; milliseconds per step, by the GPU's clock")
    print(f"{'':<34}    step  no step ran  waiting for data")
    rows = []
    for contender in chosen:
        row = {
            key: statistics.median(turn[key] for turn in results[contender.name]) for key in results[contender.name][0]
        }
        unavoidable = statistics.median(turn["idle_s"] for turn in results[still.name])
        share = max(row["idle_s"] - unavoidable, 0) / row["step_s"]
        rows.append({"contender": contender.name, "ours": contender.ours, **row, "waiting": share})
        print(f"{contender.name:<34} {1000 * row['step_s']:>7.2f} {1000 * row['idle_s']:>12.3f} {share:>17.2%}")
    return rows


def submit(run: Run) -> Figures:
    seconds = measures.submit_seconds(10 if run.quick else 50)
    row = {"median_ms": 1000 * statistics.median(seconds), "worst_ms": 1000 * max(seconds)}
    print(f"\nstarting a copy while both streams are busy: {row['median_ms']:.3f} ms, at worst {row['worst_ms']:.3f}")
    return [row]


def memory(run: Run) -> Figures:
    kinds = {"one side stream": False, "a side stream for each epoch": True}
    rows = []
    print(f"\nMiB that torch's allocator holds after each of {EPOCHS} epochs")
    for name, new_streams in kinds.items():
        held = [nbytes / MIB for nbytes in measures.reserved(EPOCHS, new_streams=new_streams)]
        rows.append({"kind": name, "mib": held, "grown_mib": held[-1] - held[0]})
        print(f"{name:<34} {' '.join(f'{mib:.0f}' for mib in held)}")
    return rows


def beside_them(run: Run) -> Figures:
    rows = []
    print(f"\n{'':<34} copies beside kernels")
    for contender in contenders(BATCH, measures.SETTLE + 15, 0.0):
        events = measures.beside_kernels(contender, kernels(STEP_S))
        share, kinds = measures.beside(events), sorted({event["name"] for event in measures.copies(events)})
        rows.append({"contender": contender.name, "ours": contender.ours, "beside": share, "kinds": kinds})
        print(f"{contender.name:<34} {share:>7.1%}  {', '.join(kinds)}")
    return rows


def program(run: Run) -> Figures:
    message = ""
    with source(BATCH, run.steps, 0.0) as loader:
        trainer = pl.Trainer(callbacks=[measures.NoSynchronising(), DevicePrefetcher()], **measures.QUIET)
        try:
            trainer.fit(measures.TimedSteps(kernels(STEP_S)), loader)
        except RuntimeError as error:
            message = str(error)
    print(f"\nan epoch in which waiting for the GPU is an error: {message or 'no error'}")
    return [{"synchronised": int(bool(message)), "error": message}]


def verified(run: Run) -> Figures:
    message = ""
    try:
        with verified_copies(run.steps), source(BATCH, run.steps, 0.0) as loader:
            trainer = pl.Trainer(callbacks=[DevicePrefetcher()], **measures.QUIET)
            trainer.fit(measures.TimedSteps(kernels(STEP_S)), loader)
    except TransferError as error:
        message = str(error)
    print(f"\n{run.steps} batches of which each copy is verified: {message or 'no error'}")
    return [{"wrong": int(bool(message)), "error": message}]


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
            yield Goal(f"{row['contender']}, copies, of the pinned bandwidth", row["copies_of_limit"], 0.9, 0.9)
    for row in figures.get("waiting", []):
        if row["ours"]:
            yield Goal(f"{row['contender']}, share of time the GPU waited", row["waiting"], 0.01, 0.01, at_most=True)
    for row in figures.get("submit", []):
        yield Goal("milliseconds to start a copy", row["median_ms"], 1, 1, at_most=True)
    for row in figures.get("memory", [])[:1]:
        yield Goal("MiB that the allocator has grown by", row["grown_mib"], 0, 0, at_most=True)
    for row in figures.get("beside", []):
        if row["ours"]:
            yield Goal(f"{row['contender']}, copies beside kernels", row["beside"], 0.9, 0.9)
    for row in figures.get("program", []):
        yield Goal("the program waited for the GPU", row["synchronised"], 0, 0, at_most=True)
    for row in figures.get("verified", []):
        yield Goal("a batch that did not arrive as it was read", row["wrong"], 0, 0, at_most=True)


# -- all of it ---------------------------------------------------------------------------------------------------------


def unless_it_fails(part: Callable[[Run], Figures], run: Run) -> Figures:
    """The figures of a part, or none if it fails: the other parts still run."""
    try:
        return part(run)
    except Exception:  # noqa: BLE001  # any failure of a part
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
        "verified": verified,
    }.items()
}


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    if not torch.cuda.is_available():
        parser.parse_args()  # --help works without a GPU
        raise SystemExit("benchmarks/waiting/gpu.py: torch sees no CUDA device here; run it on a machine with one")
    properties = torch.cuda.get_device_properties(0)
    gpu = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    more = (f"CUDA {torch.version.cuda or '–'}", f"GPU {gpu}")
    run_parts(parser, PARTS, goals, Run, ("torch", "pytorch-lightning"), more=more)


if __name__ == "__main__":
    main()
