"""Shows how far a pack is: a bar on a terminal, otherwise a line now and then, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from lit_async_data.tools.terminal import sized

# Seconds between two lines, and between two pictures of the bar.
LINE_S, PICTURE_S = 10.0, 0.1


class Progress(Protocol):
    """Shows how far a pack is. One thread at a time."""

    def print_line(self, text: str) -> None:
        """Print a line."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin a step of ``total`` bytes of samples, of which some are done."""

    def advance(self, nbytes: int) -> None:
        """Some more bytes are done."""

    def end(self) -> None:
        """The step is over, or failed. May be called twice."""


class Silent:
    """Shows nothing."""

    def print_line(self, text: str) -> None: ...

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def end(self) -> None: ...


class Lines:
    """A line now and then, for logs.

    Args:
        stream: Where to.
        clock: Seconds.

    Example:
        >>> import itertools
        >>> lines = Lines(sys.stdout, clock=itertools.count(0, 20).__next__)
        >>> lines.begin("packing", 4_000_000_000); lines.advance(1_000_000_000); lines.advance(1_000_000_000)
        packing: 25 % of 4.0 GB, 50.0 MB/s, 1:00 left
        packing: 50 % of 4.0 GB, 50.0 MB/s, 0:40 left
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    def print_line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._begun_at, self._done = what, total, done, done
        self._started = self._printed = self._clock()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = self._clock()
        if now - self._printed < LINE_S:
            return
        self._printed = now
        rate = (self._done - self._begun_at) / (now - self._started)
        left = duration((self._total - self._done) / rate)
        percent = 100 * self._done // max(self._total, 1)
        self.print_line(f"{self._what}: {percent} % of {sized(self._total)}, {sized(rate)}/s, {left} left")

    def end(self) -> None: ...


class Bar:
    """A bar with rate and time left.

    Args:
        console: A console of rich.
    """

    def __init__(self, console: Any) -> None:
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._shown = 0.0

    def print_line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        from rich import progress

        bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:<9}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("left"),
            console=self._console,
            transient=True,
            auto_refresh=False,  # no thread
        )
        self._bar, self._task = bar, bar.add_task(what, total=total, completed=done)
        bar.start()

    def advance(self, nbytes: int) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)
            if now - self._shown >= PICTURE_S:
                self._shown = now
                self._bar.refresh()

    def end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def chosen(stream: TextIO = sys.stderr) -> Progress:
    """A bar if the stream is a terminal and rich is installed, otherwise lines."""
    try:
        from rich.console import Console
    except ImportError:
        if stream.isatty():
            print("for a progress bar: pip install 'lit-async-data[tools]'", file=stream)
        return Lines(stream)
    console = Console(file=stream)
    return Bar(console) if console.is_terminal else Lines(stream)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3725)
        ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
