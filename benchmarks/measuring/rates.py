"""Samples per second, and per CPU second of all processes, of contenders that take turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from readers.hdf5 import Contender

from measuring.process_tree import cpu_seconds
from measuring.program import BaseRun

PAGE = 4096


@dataclasses.dataclass(frozen=True)
class TimedRun(BaseRun):
    """How long to measure.

    Attributes:
        length: Seconds of one measurement, if it is not quick.
        settle: Seconds before it that are not counted.
        patience: Seconds after which a measurement ends, even if a slow contender has not settled or ended a period.
    """

    length: float = 0.5

    @property
    def seconds(self) -> float:
        return self.length / 5 if self.quick else self.length

    @property
    def settle(self) -> float:
        return 0.4 * self.seconds

    @property
    def patience(self) -> float:
        return 0.15 if self.quick else 8.0


@dataclasses.dataclass(frozen=True)
class Rate:
    """What a contender did in one round."""

    samples_per_s: float
    samples_per_cpu_s: float


def count(
    batches: Iterator[Any], least: int, seconds: float, period: int = 1, patience: float = 0.0, *, touch: bool = False
) -> tuple[int, float]:
    """Samples and seconds, for at least some batches and seconds, and for a multiple of the period.

    With ``touch``, one byte of each page is read, as a copy to a device would.
    """
    samples = taken = 0
    started = time.perf_counter()
    while True:
        data, labels, *_ = next(batches)
        assert len(data) == len(labels)
        if touch:
            data.flatten().view(torch.uint8)[::PAGE].sum()
        samples += len(labels)
        taken += 1
        passed = time.perf_counter() - started
        if (passed >= seconds and taken >= least and taken % period == 0) or passed > max(seconds, patience):
            return samples, passed


def measured(contender: Contender, run: TimedRun, *, touch: bool = False) -> Rate:
    """Start a contender, discard the batches that it has ready, and count for a while."""
    with contender.opened() as batches:
        count(batches, contender.ready + 1, run.settle, 1, run.patience, touch=touch)
        before = cpu_seconds()
        samples, seconds = count(batches, 1, run.seconds, contender.period, run.patience, touch=touch)
        return Rate(samples / seconds, samples / max(cpu_seconds() - before, 0.01))


def in_turns(
    run: TimedRun, chosen: Sequence[Contender], *, touch: bool = False, before: Callable[[], object] | None = None
) -> dict[str, Rate]:
    """The medians of each contender by name; ``before`` is called in each round."""
    turns: dict[str, list[Rate]] = {contender.name: [] for contender in chosen}
    for _ in range(run.rounds):
        if before is not None:
            before()
        for contender in chosen:
            turns[contender.name].append(measured(contender, run, touch=touch))
    return {
        name: Rate(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, rates), strict=True)))
        for name, rates in turns.items()
    }
