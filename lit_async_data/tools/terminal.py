"""The terminal: rich's console, wide enough that a pipe gets every name whole."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

from lit_async_data.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

# Columns of output that is not a terminal: enough for any line.
PIPE_COLUMNS = 10_000


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
    out: IO[str] = sys.stdout if file is None else file
    width = None if out.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(file=out, width=width, markup=False, highlight=False, emoji=False)


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
