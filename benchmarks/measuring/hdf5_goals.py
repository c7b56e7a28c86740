"""The goals of the HDF5 benchmark, for two cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from measuring.program import Goal

Rows = list[dict[str, Any]]

GLOBAL, SIXTEEN, SIXTY_FOUR = (
    "AsyncLoader, global",
    "AsyncLoader, chunks, 16 at a time",
    "AsyncLoader, chunks, 64 at a time",
)
MEASURES = {
    "of_limit": "of the limit on one thread",
    "times_dataloader": "times the best DataLoader over h5py",
    "times_other": "times the best other loader",
}
# By layout and shuffle, for each of MEASURES: the least value, and the goal.
WARM: dict[tuple[str, str], tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    ("A", GLOBAL): ((0.5, 0.6), (10, 14), (1.7, 2)),
    ("B", GLOBAL): ((1.5, 1.5), (3.5, 4), (3.5, 3.5)),
    ("C", SIXTEEN): ((1.25, 1.4), (100, 100), (4, 5)),
    ("C", SIXTY_FOUR): ((0.9, 1.0), (100, 100), (4, 5)),
    ("D", GLOBAL): ((0.2, 0.3), (100, 200), (1.2, 2)),
    ("D chunked", GLOBAL): ((0.2, 0.3), (100, 200), (1.2, 2)),
    ("F", GLOBAL): ((0.9, 0.9), (2, 2), (1.3, 1.3)),
    ("G", GLOBAL): ((1.2, 1.2), (3, 3), (3, 3)),
}


def goals(figures: Mapping[str, Rows]) -> list[Goal]:
    """The goals of the parts that have figures."""
    parts = {"warm": warm, "cold": cold, "memory": memory, "larger": larger}
    return [goal for name, part in parts.items() if name in figures for goal in part(figures[name])]


def best(rows: Rows, measure: str, name: str, prefix: str) -> float | None:
    """The highest figure of the rows whose column ``name`` begins with a prefix."""
    return max((row[measure] for row in rows if row[name].startswith(prefix)), default=None)


def warm(rows: Rows) -> Iterator[Goal]:
    for (layout, family), wanted in WARM.items():
        mine = [row for row in rows if row["layout"] == layout and row["family"] == family]
        for (measure, label), (least, goal) in zip(MEASURES.items(), wanted, strict=True):
            value = max((row[measure] for row in mine), default=None)
            yield Goal(f"{layout}, {family}, {label}", value, least, goal)


def cold(rows: Rows) -> Iterator[Goal]:
    ours, rate = best(rows, "of_disk", "contender", "AsyncLoader"), "samples_per_s"
    fastest, h5py = best(rows, rate, "contender", "AsyncLoader"), best(rows, rate, "contender", "DataLoader, h5py rows")
    assert fastest is not None
    assert h5py is not None
    note = "" if rows[0]["dropped"] else " (the page cache was not dropped)"
    yield Goal(f"A, cold{note}, times the best DataLoader over h5py rows", fastest / h5py, 4, 4)
    yield Goal(f"A, cold{note}, of the disk's sequential rate", ours, 0.9, 0.9)


def memory(rows: Rows) -> Iterator[Goal]:
    for row in rows:
        label = f"{row['layout']}, MiB of resident memory beyond the budget of {row['budget_mib']:.1f}"
        yield Goal(label, row["grown_mib"] - row["budget_mib"], 8, 8, at_most=True)


def larger(rows: Rows) -> Iterator[Goal]:
    for row in rows:
        times = row["file_mib"] / row["bound_mib"]
        yield Goal(
            f"File {times:.0f} times as large as its page cache, of the disk's rate",
            row["of_disk"],
            0.9,
            0.9,
        )
        label = "The same, memory in the last quarter of the time over the first"
        yield Goal(label, row["last_mib"] / row["first_mib"], 1.05, 1.05, at_most=True)
