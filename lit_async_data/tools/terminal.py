"""What reports are written of: tables, sections, and numbers for people; and the bar that shows progress."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

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
    each = ((key, field["dtype"], ", ".join(map(str, ["N", *field["shape"]]))) for key, field in batch.items())
    return ", ".join(f"{key} {dtype} ({shape})" for key, dtype, shape in each)


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Lines under a title, after an empty line; nothing if there are none."""
    return ["", title, *(f" · {line}" for line in shortened(lines))] if lines else []


def shortened(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_SHOWN
    return list(lines) if more <= 1 else [*lines[:MOST_SHOWN], f"and {more:,} more"]


def indented(lines: Sequence[str]) -> list[str]:
    """Lines to be copied, after an empty line; nothing if there are none."""
    return ["", *(f"  {line}" for line in lines)] if lines else []


@contextlib.contextmanager
def progress_bar(stream: TextIO) -> Iterator[Callable[[str, int, int], None]]:
    """Shows how many bytes of each step are done; in a log, every ten seconds."""
    every = 0.1 if stream.isatty() else 10.0
    bar: Any = None
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "mininterval": every, "delay": every}
    with contextlib.ExitStack() as shown:

        def show(step: str, done: int, total: int) -> None:
            nonlocal bar
            if bar is None or not done:
                shown.close()
                bar = shown.enter_context(tqdm(desc=step, total=total, file=stream, **options))
            bar.update(done - bar.n)

        yield show
