"""`print_line`: prints a line, as Lightning prints its own, above a progress bar rather than into it."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from lit_async_data.lightning.trainer.compat import pl, rank_zero_info


def print_line(line: str) -> None:
    """Log a line on rank 0, as Lightning does, unless the logger ``lit_async_data`` has a level above INFO.

    On a terminal, a bar that is shown is drawn again below the line: bars of tqdm and of rich would otherwise have the
    line behind them, and rich would overwrite its end.

    Args:
        line: The line.
    """
    level = logging.getLogger("lit_async_data").level
    if level <= logging.INFO:  # NOTSET, which most programs leave it at, is below
        with contextlib.ExitStack() as stack:
            for handler in _handlers():
                if getattr(handler.stream, "isatty", bool)():
                    stack.enter_context(_above_bars(handler))
            rank_zero_info(line)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """The handlers that write Lightning's lines to a stream."""
    logger: logging.Logger | None = logging.getLogger(pl.__name__)
    while logger is not None:
        yield from (each for each in logger.handlers if isinstance(each, logging.StreamHandler))
        logger = logger.parent if logger.propagate else None


@contextlib.contextmanager
def _above_bars(handler: logging.StreamHandler[Any]) -> Iterator[None]:
    stream = handler.stream
    handler.setStream(_Above(stream))
    try:
        yield
    finally:
        handler.setStream(stream)


class _Above(io.TextIOBase):
    """Writes to a terminal above the bars that are on it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        for current in (sys.stderr, sys.stdout):
            # While it shows a bar, rich has objects of its own there, which print above it.
            if getattr(current, "rich_proxied_file", None) is stream:
                self._stream = current

    def write(self, text: str) -> int:
        with tqdm.external_write_mode(file=self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
