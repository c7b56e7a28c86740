"""The terminal: rich's console, wide enough that a pipe gets every name whole; and what reports are drawn of."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from lit_async_data.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Columns of output that is not a terminal: enough for any line.
PIPE_COLUMNS = 10_000
# Lines of a section that are shown; the others are counted.
MOST_SHOWN = 12


def console(file: IO[str] | None = None) -> Console:
    """A console without markup, so that brackets in names are only brackets.

    Args:
        file: Where to write; None for stdout.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError(
            "rich, which draws tables, is missing: pip install 'lit-async-data[tools]', or add --json"
        ) from None

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the command line ends well; rich would exit with 1

    out: IO[str] = sys.stdout if file is None else file
    width = None if out.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Piped(file=out, width=width, markup=False, highlight=False, emoji=False)


def sized(nbytes: float) -> str:
    """Bytes for people: ``sized(3_300_000)`` is ``'3.3 MB'``.

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
    """A number of things: ``'1 row'``, ``'2,000 rows'``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(lines: Sequence[str], what: str) -> list[str]:
    """The first `MOST_SHOWN` lines, and how many more there are."""
    more = len(lines) - MOST_SHOWN
    return list(lines) if more <= 1 else [*lines[:MOST_SHOWN], f"and {more:,} more {what}".rstrip()]


def table(*headers: str) -> Table:
    """An empty table; its first column is bold."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
    for place, header in enumerate(headers):
        drawn.add_column(
            header, overflow="fold", ratio=None, no_wrap=False, min_width=4, style="bold" if place == 0 else ""
        )
    return drawn


def section(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print lines under a title; nothing if there are none. What comes before a colon is a name."""
    from rich.text import Text

    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    texts = []
    for line in lines:
        name, colon, rest = line.partition(": ")
        texts.append(Text.assemble((name, "cyan"), colon, rest) if colon and len(name) < 80 else Text(line))
    console.print(items(texts))


def items(texts: Sequence[Text]) -> Table:
    """One below the other; lines that go on are indented."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=2, justify="right")
    grid.add_column(overflow="fold")
    for text in texts:
        grid.add_row("·", text)
    return grid
