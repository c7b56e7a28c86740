"""What a terminal shows: lines above the progress bar, and in it how full the queues are."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from lit_async_data.lightning.compat import Replacement, pl, rank_zero_only
from lit_async_data.lightning.loops import driven_loaders

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # shown though the root logger has no level or a higher one, as Lightning's lines are

# The key of the gauge in the progress bar: `data=host 4/4 device 2/2`.
NAME = "data"


def quiet(level: int = logging.INFO) -> bool:
    """Whether the logger ``lit_async_data`` has a higher level. NOTSET, where most programs leave it, is below all."""
    return logging.getLogger("lit_async_data").level > level


@rank_zero_only
def print_line(line: str, level: int = logging.INFO) -> None:
    """Log a line on rank 0 by this package's logger alone, unless it is empty or `quiet` holds.

    Where a program has set up no logging, it goes to stderr, as Lightning's lines do. On a terminal, a bar that is
    shown is drawn again below the line: bars of tqdm and of rich would otherwise have the line behind them, and rich
    would overwrite its end.
    """
    if line and not quiet(level):
        with contextlib.ExitStack() as stack:
            if not log.hasHandlers():
                log.addHandler(handler := logging.StreamHandler())
                stack.callback(log.removeHandler, handler)  # the program may set up logging later
            for handler in _handlers():
                if getattr(handler.stream, "isatty", bool)():
                    stack.enter_context(tqdm.external_write_mode(file=handler.stream))
                    stack.enter_context(_by_rich(handler))
            log.log(level, "%s", line)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    logger: logging.Logger | None = log
    while logger is not None:
        yield from (each for each in logger.handlers if isinstance(each, logging.StreamHandler))
        logger = logger.parent if logger.propagate else None


@contextlib.contextmanager
def _by_rich(handler: logging.StreamHandler[Any]) -> Iterator[None]:
    """Write to what rich has put in the place of a terminal while it shows a bar, which prints above it."""
    stream = handler.stream
    for current in (sys.stderr, sys.stdout):
        if getattr(current, "rich_proxied_file", None) is stream:
            handler.setStream(current)
    try:
        yield
    finally:
        handler.setStream(stream)


class QueueGauge:
    """Shows in Lightning's progress bar, of whatever class, how full the queues of training are. No logger sees it."""

    def __init__(self) -> None:
        self._replacement: Replacement | None = None

    def attach(self, trainer: pl.Trainer) -> None:
        """Add to the ``get_metrics`` of the Trainer's progress bar, if it has one."""
        self.detach()
        if trainer.progress_bar_callback is not None:
            self._replacement = Replacement(trainer.progress_bar_callback, "get_metrics", _with_fill)

    def detach(self) -> None:
        """Restore the bar; see `Replacement.undo`."""
        if self._replacement is not None:
            self._replacement.undo()
        self._replacement = None


def _with_fill(get_metrics: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    metrics: dict[str, Any] = get_metrics(trainer, pl_module)
    loaders = driven_loaders(trainer.train_dataloader) if trainer.state.fn == "fit" else []
    return metrics | {NAME: ", ".join(str(loader.fill) for loader in loaders)} if loaders else metrics
