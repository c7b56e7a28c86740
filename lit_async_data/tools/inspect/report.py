"""`Report`: what ``inspect`` found, as ``--json`` prints it and docs/tools/inspect.md describes it; and for people."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data.engine.resources.memory import readable
from lit_async_data.errors import AsyncDataError, FormatError, SourceError, counted
from lit_async_data.sources.contract.checks import FIRST_SAMPLES
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import HOW_READ
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect.contents import SHOWN, Dataset
from lit_async_data.tools.terminal import indented, section, shapes, shortened, table

# Raised if a key of the JSON changes its meaning or goes.
VERSION = 3
# Labels of more samples are not read; whole numbers from 1 to less than this many are taken for classes.
MOST_LABELS, MOST_CLASSES = 2_000_000, 1000
# Of as many samples and more, whole numbers that follow each other in any order number them; they are no labels.
LEAST_NUMBERED = 100


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
        errors = list[str]()
        for tried, each in itertools.product((1, FIRST_SAMPLES), candidates):
            try:
                self.suggestions.append(_verified(each, tried))
            except AsyncDataError as error:
                errors.append(f"{each.call.python().splitlines()[-1]} does not fit: {' '.join(str(error).split())}")
            else:
                return
        self.notes += errors[:1]

    def as_dict(self) -> dict[str, Any]:
        values = {"version": VERSION, **vars(self)}
        values["datasets"] = [{key: getattr(each, key) for key in SHOWN} for each in self.datasets]
        values["columns"] = [vars(each) for each in self.columns]
        values["suggestions"] = [vars(each) | each.call.lines() for each in self.suggestions]
        for each in values["suggestions"]:
            del each["call"]
        return values


def by_groups(names: Sequence[str]) -> list[str]:
    """The note on the first of the names of what keeps samples together."""
    call = 'split(source, {{"train": 0.8, "val": 0.2}}, groups="{0}") keeps each {0} in one stage'
    return [call.format(name) for name in names[:1]]


def _verified(each: Suggestion, tried: int) -> Suggestion:
    """The suggestion with what its source holds, once one of the first samples has been read."""
    first = 0
    with contextlib.closing(each.call.build()) as source:
        for first in range(min(len(source), tried)):
            with contextlib.suppress(AsyncDataError):
                source[first]
                break
        else:
            source[0]  # says what is wrong
        batch = {key: {"dtype": str(it.dtype), "shape": it.shape} for key, it in source.spec.items()}
        notes = [*each.notes, *_notes(source)]
        notes += [f"the first that can be read is sample {first}: --check-all lists the bad ones"] if first else []
        return Suggestion(each.title, each.call, tuple(notes), len(source), batch, source.chunks.reading)


def _notes(source: Source) -> list[str]:
    """What to know of the labels, and of the types."""
    x, y, labels, notes = source.spec.get("x"), source.spec.get("y"), np.full(1, 0.5), list[str]()
    if y is not None and not y.shape and y.classes:
        notes.append(f"y has {len(y.classes)} classes: {', '.join(y.classes[:4])}{', …' * (len(y.classes) > 4)}")
    elif y is not None and not y.shape and len(source) <= MOST_LABELS:
        with contextlib.suppress(SourceError):  # samples may lack them
            labels = source.column("y")
    if (labels % 1 == 0).all():
        low, high = int(labels.min()), int(labels.max())
        if len(labels) >= LEAST_NUMBERED and high - low == len(labels) - 1 and len(np.unique(labels)) == len(labels):
            raise FormatError(f"y numbers the samples from {low:,} to {high:,}")
        notes.append(f"y is from {low:,} to {high:,}")
        if 0 < low <= high < MOST_CLASSES:
            notes.append("torch's losses count classes from 0: subtract in a transform")
    if wide := " and ".join(key for key, each in source.spec.items() if each.dtype == np.float64):
        how = 'dtype="float32" of a field, or "int64" for classes'
        notes.append(f"{wide}: float64, as stored; {how}, is what networks take")
    if x is not None and x.dtype.kind == "u" and len(x.shape) > 1:
        on_gpu = 'on a GPU, device_transform=ToFloat("x") makes float32 from 0 to 1'
        on_cpu = "on a CPU, where the loop would wait for it, divide in a batch_transform"
        notes.append(f"x is {x.dtype}, as stored: {on_gpu}; {on_cpu}")
    if x is None or y is None or len(x.shape) not in (2, 3) or y.shape or y.dtype.kind not in "iu":
        notes.append("the network of train.py takes images and class numbers: add model._target_=package.YourModule")
    return notes


def text_of(report: Report) -> str:
    names = dict[str, list[str]]()
    columns = [["column", "type", "values", "missing", "field", "for example"]]
    for column in report.columns:
        counts = ["" if not n else f"{n:,}" for n in (column.distinct, column.missing)]
        columns.append([column.name, column.type, *counts, column.kind or "none", ", ".join(column.examples)])
        names.setdefault(column.why, []).append(column.name)
    datasets = [["dataset", "shape", "type", "stored", "how"]]
    for node in report.datasets:
        rows = ["–".join(f"{n:,}" for n in dict.fromkeys(node.rows))] if node.rows else []
        shape = "×".join([*rows, *map(str, node.shape[1:])]) or "one value" * bool(node.bytes)
        chunks = [f"chunks of {'×'.join(map(str, node.chunks))}"] if node.chunks else []
        stored = [readable(node.stored_bytes or node.bytes), *node.filters, *chunks] if node.bytes else []
        how = HOW_READ[node.reading] if node.reading else "not read"
        datasets.append([node.name, shape, node.type, ", ".join(stored), how])
        names.setdefault(node.why, []).append(node.name)
    whys = [f"{', '.join(shortened(alike))}: {why}" for why, alike in names.items() if why]
    title = [report.kind, *([] if report.bytes is None else [readable(report.bytes)])]
    numbers = {"row": report.rows, "dataset": len(report.datasets), "other file": len(report.files) - 1}
    title += [counted(number, what) for what, number in numbers.items() if number]
    title += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    lines = [f"{report.files[0]}   {' · '.join(title)}", *indented([*table(columns), *table(datasets)])]
    lines += [*section("Why not faster, or not at all", whys), *section("Notes", report.notes)]
    for suggestion in report.suggestions:
        lines += ["", f"── {suggestion.title[:1].upper()}{suggestion.title[1:]} ──"]
        lines += [f"  {suggestion.samples:,} samples · {shapes(suggestion.batch)} · {suggestion.reading}"]
        lines += [line for text in suggestion.call.lines().values() for line in indented(text.splitlines())]
        lines += ["", *(f" · {note}" for note in suggestion.notes)]
    return "\n".join([*lines, ""])
