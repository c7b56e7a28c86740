"""What reports are written of: tables, sections, and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

# Lines of a section that are shown; the others are counted.
MOST_SHOWN = 12


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, the first of them headings; whatever their width, so that every name can be copied."""
    if len(rows) < 2:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Lines under a title, after an empty line; nothing if there are none."""
    return ["", title, *(f" · {line}" for line in shortened(lines))] if lines else []


def shortened(lines: Sequence[str]) -> list[str]:
    """The first `MOST_SHOWN` lines, and how many more there are."""
    more = len(lines) - MOST_SHOWN
    return list(lines) if more <= 1 else [*lines[:MOST_SHOWN], f"and {more:,} more"]


def indented(lines: Sequence[str]) -> list[str]:
    """Lines to be copied, after an empty line; nothing if there are none."""
    return ["", *(f"  {line}" for line in lines)] if lines else []


def sized(nbytes: float) -> str:
    """Bytes for people.

    Example:
        >>> sized(512), sized(3_300_000)
        ('512 B', '3.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.5 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
