"""A benchmark of several parts as a program: its arguments, and what it prints and writes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Figures = list[dict[str, Any]]
# Measures; gets what the benchmark makes of the folder.
Part = Callable[[Any], Figures]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure and what it should be.

    Attributes:
        found: None where it was not measured.
        least: What it must be.
        goal: What it should be.
        at_most: Less is better.
    """

    said: str
    found: float | None
    least: float
    goal: float
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        sign = -1 if self.at_most else 1
        if sign * self.found >= sign * self.goal:
            return "met"
        return "least met" if sign * self.found >= sign * self.least else "not met"

    def __str__(self) -> str:
        found = "–" if self.found is None else f"{self.found:.3g}"
        sign = "≤" if self.at_most else "≥"
        aim = f" ({self.goal:g})" if self.goal != self.least else ""
        return f"{self.verdict:<12}  {self.said}: {found}, wanted {sign} {self.least:g}{aim}"


def arguments(doc: str | None, parts: Mapping[str, Part]) -> argparse.ArgumentParser:
    """The arguments that all of them have.

    Args:
        doc: What the program says of itself.
        parts: By name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(parts)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{names}; all of them unless named")
    parser.add_argument("--quick", action="store_true", help="under a minute, to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--folder", metavar="DIR", help="where the files are made: on the disk that is to be measured")
    return parser


def ran(
    parser: argparse.ArgumentParser,
    parts: Mapping[str, Part],
    goals: Callable[[Mapping[str, Figures]], Iterable[Goal]],
    made: Callable[[bool, str], Any],
    libraries: Mapping[str, str],
) -> tuple[argparse.Namespace, str, Mapping[str, Figures]]:
    """Run the parts that are wanted, print the goals, and write all of it.

    Args:
        parser: As from `arguments`.
        parts: By name.
        goals: What is to be reached, of the parts that were run.
        made: What parts get: from whether it shall be quick, and a folder for files.
        libraries: Versions to name.

    Returns:
        The arguments, the machine in words, and the figures by part.
    """
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in parts]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(parts)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    versions = ", ".join(
        f"{name} {version}" for name, version in {"Python": platform.python_version(), **libraries}.items()
    )
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {versions}"
    print(f"{machine}; load average before {os.getloadavg()[0]:.1f}")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        run = made(given.quick, folder)
        figures = {name: part(run) for name, part in parts.items() if name in (given.parts or parts)}
    reached = list(goals(figures))
    print(f"\nGoals{', of which --quick says nothing' if given.quick else ''}")
    for goal in reached:
        print(goal)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    if given.json:
        verdicts = [dataclasses.asdict(goal) | {"verdict": goal.verdict} for goal in reached]
        said = {"machine": machine, "quick": given.quick, **figures, "goals": verdicts}
        Path(given.json).write_text(json.dumps(said, indent=1))
    return given, machine, figures
