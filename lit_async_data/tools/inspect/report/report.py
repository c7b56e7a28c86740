"""`Report`: what ``inspect`` found, as plain values; ``--json`` prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lit_async_data.tools.inspect.report.suggestion import Call

#: Raised if a key of the JSON changes its meaning or goes.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class DatasetReport:
    """A dataset, or a group that stands for one.

    Attributes:
        name: Its name; in groups of equal structure, the pattern of the groups comes first.
        type: Element type.
        shape: As stored, in the first file and group; None if it holds no array.
        groups: Number of groups of equal structure that have it.
        rows: Least and most rows over these groups.
        chunks: Shape of a chunk; None if it is not chunked.
        filters: In the order in which they were applied.
        bytes: Of the values of the first file and group.
        stored_bytes: What they take there; None if unknown.
        attributes: Its attributes.
        reading: ``copied``, ``decoded``, ``locked``, as in `StorageLayout`; None if it cannot be read.
        how: How it is read, in words.
        why: Why not faster, or why not at all, and what to do; None if there is nothing to say.
    """

    name: str
    type: str
    shape: tuple[int, ...] | None
    groups: int
    rows: tuple[int, int] | None
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    bytes: int
    stored_bytes: int | None
    attributes: dict[str, Any]
    reading: str | None
    how: str
    why: str | None


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    """A column of a table.

    Attributes:
        name: Its name.
        type: Type of its values.
        kind: What a field takes it for: ``image``, ``npy``, ``hdf5``, ``class`` or ``number``; None if for none.
        distinct: Number of different values.
        missing: Number of rows without a value.
        examples: The first different values.
        why: Why it cannot be a field, and what to do; None if it can.
    """

    name: str
    type: str
    kind: str | None
    distinct: int | None
    missing: int
    examples: tuple[str, ...]
    why: str | None


@dataclasses.dataclass(frozen=True)
class SuggestionReport:
    """Lines that read the files. The source that they describe was built; no sample was read.

    Attributes:
        title: What a sample is.
        python: The sources, as Python.
        command: The command line of ``train.py``.
        samples: Number of samples of each source: by stage, or of ``all``.
        batch: Element type, and shape without N, by batch key.
        reading: How the slowest field is read, as in `StorageLayout`.
        notes: What to know before using it.
        calls: What builds the sources, by stage; not part of the JSON.
    """

    title: str
    python: str
    command: str
    samples: dict[str, int]
    batch: dict[str, dict[str, Any]]
    reading: str
    notes: tuple[str, ...]
    calls: Mapping[str, Call] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``inspect`` found.

    Attributes:
        kind: ``hdf5`` or ``table``.
        files: Path and bytes of each file.
        writer: What wrote the files, if known: ``NetCDF``, ``AnnData``, ``MATLAB v7.3``, ``PyTables``.
        attributes: Attributes of the file.
        groups: Patterns of groups of equal structure: name and number.
        datasets: Of HDF5 files; those of the first file.
        columns: Of tables.
        rows: Of tables; of the first rows only if the file is large.
        differences: What other files have that the first has not, and the reverse, by path.
        unreadable: Why a file cannot be read, by path.
        suggestions: Lines that read the files.
        notes: What was left out, and what would help.
    """

    kind: str
    files: list[dict[str, Any]]
    writer: str | None = None
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    datasets: list[DatasetReport] = dataclasses.field(default_factory=list)
    columns: list[ColumnReport] = dataclasses.field(default_factory=list)
    rows: int | None = None
    differences: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    suggestions: list[SuggestionReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """This report as values of JSON."""
        values = {"version": VERSION, **dataclasses.asdict(self)}
        for suggestion in values["suggestions"]:
            del suggestion["calls"]
        return values
