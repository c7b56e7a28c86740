"""The program around the parts of a benchmark: arguments, goals, printed table, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Figures = list[dict[str, Any]]
# Measures one thing; its argument is the benchmark's `Run`.
Part = Callable[[Any], Figures]


@dataclasses.dataclass(frozen=True)
class BaseRun:
    """Whether to measure briefly, and the folder for data. Each benchmark adds how much it measures."""

    quick: bool
    folder: str

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure, the least that it must reach, and its goal."""

    label: str
    value: float | None  # None if it was not measured
    least: float
    goal: float
    at_most: bool = False  # less is better

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        sign = -1 if self.at_most else 1
        if sign * self.value >= sign * self.goal:
            return "met"
        return "least met" if sign * self.value >= sign * self.least else "not met"

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.3g}"
        sign = "≤" if self.at_most else "≥"
        aim = f" ({self.goal:g})" if self.goal != self.least else ""
        return f"{self.verdict:<12}  {self.label}: {value}, goal {sign} {self.least:g}{aim}"


def medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each key over the rounds."""
    return {key: statistics.median(each[key] for each in figures) for key in figures[0]}


def argument_parser(doc: str | None, parts: Mapping[str, Part]) -> argparse.ArgumentParser:
    """The arguments of every benchmark; ``doc`` is its docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(parts)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{names}; default: all")
    parser.add_argument("--quick", action="store_true", help="run briefly, to see that it works")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--folder", metavar="DIR", help="where to write the data: on the disk to measure")
    return parser


def run_parts(
    parser: argparse.ArgumentParser,
    parts: Mapping[str, Part],
    goals: Callable[[Mapping[str, Figures]], Iterable[Goal]],
    make_run: Callable[[bool, str], Any],
    libraries: Iterable[str],
    *,
    more: Iterable[str] = (),
) -> None:
    """Run the chosen parts, print the goals, and write the figures.

    Args:
        parser: From `argument_parser`.
        parts: By name.
        goals: Makes the goals from the figures by part.
        make_run: Makes the argument of each part, from ``--quick`` and a folder for data.
        libraries: Distributions whose versions describe the machine, beside ``more``.
    """
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in parts]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(parts)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in libraries), *more]
    machine = ", ".join([f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}", *versions])
    print(f"{machine}; load average before {os.getloadavg()[0]:.1f}")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = make_run(args.quick, folder)
        figures = {name: part(run) for name, part in parts.items() if name in (args.parts or parts)}
    reached = list(goals(figures))
    print(f"\nGoals{' (meaningless with --quick)' if args.quick else ''}")
    for goal in reached:
        print(goal)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    if args.json:
        verdicts = [dataclasses.asdict(goal) | {"verdict": goal.verdict} for goal in reached]
        report = {"machine": machine, "quick": args.quick, **figures, "goals": verdicts}
        Path(args.json).write_text(json.dumps(report, indent=1))
