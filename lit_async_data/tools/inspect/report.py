"""`Report`: what ``inspect`` found, as ``--json`` prints it and docs/tools/inspect.md describes it; and for people."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data.engine.resources.memory import readable
from lit_async_data.errors import AsyncDataError, SourceError, counted
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import HOW_READ
from lit_async_data.sources.hdf5.schema.inspect import FIRST_SAMPLES
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect.contents import SHOWN, Dataset
from lit_async_data.tools.terminal import indented, section, shortened, table

# Raised if a key of the JSON changes its meaning or goes.
VERSION = 3
# Labels of more samples are not read; whole numbers from 1 to less than this many are taken for classes.
MOST_LABELS, MOST_CLASSES = 2_000_000, 1000


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    name: str
    type: str
    kind: str | None
    distinct: int | None
    missing: int
    examples: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What a sample may be, and the call that builds the source; once that has worked, what it builds."""

    title: str
    call: Call
    notes: tuple[str, ...] = ()
    samples: int = 0
    batch: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    reading: str = ""


@dataclasses.dataclass
class Report:
    kind: str
    files: list[str]
    bytes: int | None = None
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    datasets: list[Dataset] = dataclasses.field(default_factory=list)
    columns: list[ColumnReport] = dataclasses.field(default_factory=list)
    rows: int | None = None
    suggestions: list[Suggestion] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def suggest(self, candidates: Sequence[Suggestion]) -> None:
        """Add the first whose source can be built, and a sample read; else a note why the likeliest cannot."""
        errors, bad = [], 0
        for tried, each in itertools.product((1, FIRST_SAMPLES), candidates):
            try:
                with contextlib.closing(each.call.build()) as source:
                    for bad in range(min(len(source), tried)):
                        with contextlib.suppress(AsyncDataError):
                            source[bad]
                            break
                    else:
                        source[0]  # says what is wrong
                    shapes = {key: {"dtype": str(it.dtype), "shape": it.shape} for key, it in source.spec.items()}
                    notes = (*each.notes, *(note for note, holds in _notes(source).items() if holds))
                    notes += (f"the first that can be read is sample {bad}: --check-all lists the bad ones",)[:bad]
                    built: dict[str, Any] = {"samples": len(source), "batch": shapes, "notes": notes}
                    self.suggestions.append(dataclasses.replace(each, reading=source.chunks.reading, **built))
            except AsyncDataError as error:
                errors.append(f"{each.call.python().splitlines()[-1]} does not fit: {' '.join(str(error).split())}")
            else:
                return
        self.notes += errors[:1]

    def as_dict(self) -> dict[str, Any]:
        values = {"version": VERSION, **vars(self)}
        values["datasets"] = [{key: getattr(each, key) for key in SHOWN} for each in self.datasets]
        values["columns"] = [vars(each) for each in self.columns]
        values["suggestions"] = [
            {name: value for name, value in vars(each).items() if name != "call"}
            | {"python": each.call.python(), "command": each.call.command()}
            for each in self.suggestions
        ]
        return values


def by_groups(names: Sequence[str]) -> list[str]:
    """The note on the first of the names of what keeps samples together."""
    call = 'split(source, {{"train": 0.8, "val": 0.2}}, groups="{0}") keeps each {0} in one stage'
    return [call.format(name) for name in names[:1]]


def _notes(source: Source) -> dict[str, object]:
    """What to know of the labels, and of the types."""
    x, y = source.spec.get("x"), source.spec.get("y")
    single, classes = y is not None and not y.shape, y.classes if y is not None else ()
    labels = np.full(1, 0.5)
    if single and not classes and len(source) <= MOST_LABELS:
        with contextlib.suppress(SourceError):  # samples may lack them
            labels = source.column("y")
    whole = (labels % 1 == 0).all()
    low, high = (int(labels.min()), int(labels.max())) if whole else (0, 0)
    wide = " and ".join(key for key, each in source.spec.items() if each.dtype == np.float64)
    images = x is not None and len(x.shape) in (2, 3) and single and y is not None and y.dtype.kind in "iu"
    return {
        f"y has {len(classes)} classes: {', '.join(classes[:4])}{', …' * (len(classes) > 4)}": single and classes,
        f"y is from {low:,} to {high:,}": whole,
        "torch's losses count classes from 0: subtract in a transform": whole and 0 < low <= high < MOST_CLASSES,
        f'{wide}: float64, as stored; dtype="float32" of a field, or "int64" for classes, is what networks take': wide,
        f'x is {x and x.dtype}, as stored: on a GPU, device_transform=ToFloat("x") makes float32 from 0 to 1; on a '
        "CPU, where the loop would wait for it, divide in a batch_transform": (
            x is not None and x.dtype.kind == "u" and len(x.shape) > 1
        ),
        "the network of train.py takes images and class numbers: add model._target_=package.YourModule": not images,
    }


# -- for people --------------------------------------------------------------------------------------------------------


def text_of(report: Report) -> str:
    columns = [["column", "type", "values", "missing", "field", "for example"]]
    for column in report.columns:
        counts = ["" if not n else f"{n:,}" for n in (column.distinct, column.missing)]
        columns.append([column.name, column.type, *counts, column.kind or "none", ", ".join(column.examples)])
    datasets, names = [["dataset", "shape", "type", "stored", "how"]], dict[str, list[str]]()
    for node in report.datasets:
        rows = ["–".join(f"{n:,}" for n in dict.fromkeys(node.rows))] if node.rows else []
        shape = "×".join([*rows, *map(str, node.shape[1:])]) or "one value" * bool(node.bytes)
        chunks = [f"chunks of {'×'.join(map(str, node.chunks))}"] if node.chunks else []
        stored = [readable(node.stored_bytes or node.bytes), *node.filters, *chunks] if node.bytes else []
        how = HOW_READ[node.reading] if node.reading else "not read"
        datasets.append([node.name, shape, node.type, ", ".join(stored), how])
    described: list[ColumnReport | Dataset] = [*report.columns, *report.datasets]
    for each in described:
        names.setdefault(each.why, []).append(each.name)
    whys = [f"{', '.join(shortened(alike))}: {why}" for why, alike in names.items() if why]
    title = [report.kind, *([] if report.bytes is None else [readable(report.bytes)])]
    numbers = {"row": report.rows, "dataset": len(report.datasets), "other file": len(report.files) - 1}
    title += [counted(number, what) for what, number in numbers.items() if number]
    title += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    lines = [f"{report.files[0]}   {' · '.join(title)}", *indented([*table(columns), *table(datasets)])]
    lines += [*section("Why not faster, or not at all", whys), *section("Notes", report.notes)]
    for suggestion in report.suggestions:
        batch = ", ".join(
            f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})"
            for key, each in suggestion.batch.items()
        )
        lines += ["", f"── {suggestion.title[:1].upper()}{suggestion.title[1:]} ──"]
        lines += [f"  {suggestion.samples:,} samples · {batch} · {suggestion.reading}"]
        lines += indented(suggestion.call.python().splitlines())
        lines += [*indented([suggestion.call.command()]), "", *(f" · {note}" for note in suggestion.notes)]
    return "\n".join([*lines, ""])
