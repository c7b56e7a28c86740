"""How long the Trainer stands still between epochs, and between training and validation.

    python benchmarks/waiting/epochs.py [--quick] [--json FILE] [--folder DIR] [epochs | validation ...]

* epochs: from the last step of an epoch to the first of the next, without validation.
* validation: validation in the middle and at the end of each epoch: from training to it, and from it back to training,
  in the same epoch and in the next.

Samples are uint8 3×64×64, gzip, one per chunk (file B of hdf5.py); steps sleep. The limit is the same Trainer over a
list of batches; the other contenders are DataLoaders over h5py whose workers persist. All take turns; figures are
medians over all gaps but those to the first training step. A gap lies between the end of one step and the begin of the
next, and is all that happens there: Lightning's hooks, the callback, and `next`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lit_async_data import AsyncDataModule, DevicePrefetcher, HDF5Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.layouts import FULL, write_layout
from measuring.program import BaseRun, Figures, Goal, argument_parser, run_parts
from measuring.trainer_steps import QUIET
from readers.hdf5 import Rows

BATCH, STEP_S, VALIDATION_STEP_S = 64, 0.02, 0.01
# Milliseconds beyond the Trainer's own.
MOST_MS = 5.0
LIST, OURS = "a list of batches", "AsyncDataModule"
TRAINING, VALIDATION = "training", "validation"


class Run(BaseRun):
    """How long to measure."""

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 5

    @property
    def epochs(self) -> int:
        return 2 if self.quick else 6

    @property
    def batches(self) -> int:
        """Batches of a training epoch; validation has half as many."""
        return 4 if self.quick else 12

    @functools.cached_property
    def path(self) -> str:
        (layout,) = (layout for layout in FULL if layout.name == "B")
        return write_layout(dataclasses.replace(layout, rows=BATCH * self.batches), self.folder, "B")


# -- steps -------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """When a step began and ended."""

    stage: str
    epoch: int
    begin: float
    end: float


class Steps(pl.LightningModule):
    """Steps that sleep, and record when."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps: list[Step] = []

    def _sleep(self, stage: str, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.steps.append(Step(stage, self.current_epoch, begin, time.perf_counter()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self._sleep(TRAINING, STEP_S)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._sleep(VALIDATION, VALIDATION_STEP_S)

    def configure_optimizers(self) -> None:
        return None


def gaps(steps: list[Step]) -> Iterator[tuple[str, float]]:
    """What changed between two steps, and the seconds between them; from the first training step on."""
    first = next(number for number, step in enumerate(steps) if step.stage == TRAINING)  # after the sanity check
    for one, other in zip(steps[first:], steps[first + 1 :], strict=False):
        when = "the next epoch" if one.epoch != other.epoch else "the same epoch"
        if one.stage != other.stage:
            back = f", {when}" if other.stage == TRAINING else ""
            yield f"{one.stage} to {other.stage}{back}", other.begin - one.end
        elif one.stage == TRAINING and one.epoch != other.epoch:
            yield "epoch to epoch", other.begin - one.end


# -- contenders --------------------------------------------------------------------------------------------------------

Fit = Callable[[pl.Trainer, pl.LightningModule], None]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to give batches to a Trainer."""

    name: str
    fit: Fit
    callbacks: Callable[[], list[Any]] = list


def contenders(run: Run, *, validated: bool) -> list[Contender]:
    """The limit, this package with a reader thread and a reader process, and DataLoaders."""

    def with_list(trainer: pl.Trainer, model: pl.LightningModule) -> None:
        data = DataLoader(Rows(run.path), BATCH)
        batches = list(data)
        trainer.fit(model, Batches(batches), Batches(batches[: run.batches // 2]) if validated else None)

    def with_module(kind: str, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        half = BATCH * (run.batches // 2)
        with contextlib.closing(HDF5Source(run.path)) as train:
            val = HDF5Source(run.path, rows=range(half)) if validated else None
            options = {"batch_size": BATCH, "shuffle": True, "workers": 1, "worker_kind": kind}
            trainer.fit(model, datamodule=AsyncDataModule(train=train, val=val, loader=options))
            if val is not None:
                val.close()

    def with_dataloader(workers: int, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
        rows = Rows(run.path)
        half = torch.utils.data.Subset(rows, range(BATCH * (run.batches // 2)))
        train = DataLoader(rows, BATCH, shuffle=True, **options)
        trainer.fit(model, train, DataLoader(half, BATCH, **options) if validated else None)

    ours = [
        Contender(f"{OURS}, reader {kind}", functools.partial(with_module, kind), lambda: [DevicePrefetcher()])
        for kind in ("thread", "process")
    ]
    theirs = [
        Contender(
            f"DataLoader, {workers} persistent worker{'s' if workers > 1 else ''}",
            functools.partial(with_dataloader, workers),
        )
        for workers in (1, 2)
    ]
    return [Contender(LIST, with_list), *ours, *theirs]


class Batches:
    """A list of batches that Lightning takes for one loader rather than for many."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


# -- parts -------------------------------------------------------------------------------------------------------------


def measured(run: Run, *, validated: bool) -> Figures:
    """All contenders in turns, and the table."""
    options: dict[str, Any] = {"val_check_interval": 0.5} if validated else {}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(run.rounds):
        for contender in contenders(run, validated=validated):
            model = Steps()
            settings = QUIET | {"max_epochs": run.epochs} | options
            contender.fit(pl.Trainer(callbacks=contender.callbacks(), **settings), model)
            for kind, seconds in gaps(model.steps):
                found.setdefault((kind, contender.name), []).append(1000 * seconds)
    rows: Figures = []
    for kind, name in sorted(found, key=lambda each: each[0]):
        middle, own = statistics.median(found[kind, name]), statistics.median(found[kind, LIST])
        row = {"gap": kind, "contender": name, "count": len(found[kind, name])}
        rows.append(row | {"ms": middle, "beyond_ms": middle - own, "longest_ms": max(found[kind, name])})
    print(f"\n{run.epochs} epochs of {run.batches} steps of {1000 * STEP_S:.0f} ms, {run.rounds} rounds: milliseconds")
    print(f"{'gap':<40} {'contender':<34} median  beyond the list  longest")
    for row in rows:
        print(
            f"{row['gap']:<40} {row['contender']:<34} {row['ms']:>6.2f} {row['beyond_ms']:>16.2f} "
            f"{row['longest_ms']:>8.2f}"
        )
    return rows


def epochs(run: Run) -> Figures:
    return measured(run, validated=False)


def validation(run: Run) -> Figures:
    return measured(run, validated=True)


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    for row in (row for rows in figures.values() for row in rows):
        if row["contender"].startswith(OURS):
            label = f"{row['gap']}, {row['contender']}, ms beyond the list"
            yield Goal(label, row["beyond_ms"], MOST_MS, MOST_MS, at_most=True)


PARTS: dict[str, Callable[[Run], Figures]] = {"epochs": epochs, "validation": validation}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, Run, ("torch", "h5py", "pytorch-lightning"))
