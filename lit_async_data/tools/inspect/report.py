"""`Report`: what ``inspect`` found. ``--json`` prints it; docs/tools/inspect.md says what each value is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lit_async_data.tools.inspect.contents import SHOWN, Dataset
from lit_async_data.tools.suggestion import Call

#: Raised if a key of the JSON changes its meaning or goes.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    """A column of a table."""

    name: str
    type: str
    kind: str | None
    distinct: int | None
    missing: int
    examples: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class SuggestionReport:
    """Lines that read the files. What they call is not part of the JSON."""

    title: str
    python: str
    command: str
    samples: dict[str, int]
    batch: dict[str, dict[str, Any]]
    reading: str
    notes: tuple[str, ...]
    calls: Mapping[str, Call] = dataclasses.field(repr=False)


@dataclasses.dataclass
class Report:
    """What ``inspect`` found."""

    kind: str
    files: list[dict[str, Any]]
    writer: str | None = None
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    datasets: list[Dataset] = dataclasses.field(default_factory=list)
    columns: list[ColumnReport] = dataclasses.field(default_factory=list)
    rows: int | None = None
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    suggestions: list[SuggestionReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """This report as values of JSON."""
        values = {"version": VERSION, **vars(self)}
        values["datasets"] = [{key: getattr(each, key) for key in SHOWN} for each in self.datasets]
        values["columns"] = [vars(each) for each in self.columns]
        values["suggestions"] = [
            {key: value for key, value in vars(each).items() if key != "calls"} for each in self.suggestions
        ]
        return values
