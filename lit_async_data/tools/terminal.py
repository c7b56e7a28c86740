"""What reports are written of: tables, sections, and numbers for people; and the line that shows progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, TextIO

from lit_async_data.engine.resources.memory import readable

# Lines of a section that are shown; the others are counted.
MOST_SHOWN = 12


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, the first of them headings; whatever their width, so that every name can be copied."""
    if len(rows) < 2:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def as_json(values: Mapping[str, Any], default: Callable[[Any], object]) -> str:
    return json.dumps(values, ensure_ascii=False, indent=2, default=default) + "\n"


def shapes(batch: Mapping[str, Mapping[str, Any]]) -> str:
    """The fields of a batch of N samples, each with its type and shape."""
    each = ((key, field["dtype"], ", ".join(map(str, ["N", *field["shape"]]))) for key, field in batch.items())
    return ", ".join(f"{key} {dtype} ({shape})" for key, dtype, shape in each)


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


class ProgressLine:
    """One line on a terminal, which changes; otherwise a line every ten seconds, for logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._step = stream, clock, ""
        self._before, self._behind, self._every = ("\r\x1b[K", "", 0.1) if stream.isatty() else ("", "\n", 10.0)

    def __call__(self, step: str, done: int, total: int) -> None:
        now = self._clock()
        if step != self._step:
            self._step, self._started, self._told = step, now, now
        if done and now - self._told >= self._every:
            self._told, rate = now, done / (now - self._started)
            share, left = 100 * done // total, timedelta(seconds=round((total - done) / rate))
            said = f"{step}: {share} % of {readable(total)}, {readable(rate)}/s, {left} left"
            self._stream.write(f"{self._before}{said}{self._behind}")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.write(self._before)
