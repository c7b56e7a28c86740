"""Tables, sections and JSON of reports; work in threads with a progress bar."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TextIO, TypeVar

from tqdm import tqdm

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.system import usable_cores

MOST_SHOWN = 12
INPUT_CHUNKS, AHEAD = 2, 2  # decoded chunks of the input that stay in memory, and pieces per thread at a time
Progress = Callable[[str, int, int], object]
_T = TypeVar("_T")


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
def progress_bar(stream: TextIO) -> Iterator[Progress]:
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


class Piece(NamedTuple):  # samples that one thread works on
    group: str  # of their datasets; empty for the root
    rows: int  # of these datasets
    row: int  # of the first sample
    samples: Indices


def in_threads(
    work: Callable[[Piece], _T], pieces: Iterable[Piece], step: str, source: Source, progress: Progress
) -> Generator[tuple[Piece, _T], None, None]:
    """Do the work on all pieces in one thread per core; yields each piece with its result, in order."""
    threads, sample_bytes, done = usable_cores(), source.spec.nbytes, 0
    total = sample_bytes * len(source)
    progress(step, 0, total)
    waiting: collections.deque[tuple[Piece, Future[_T]] | None] = collections.deque()
    with contextlib.ExitStack() as held:
        held.callback(source.reserve(INPUT_CHUNKS, 0))
        pool = held.enter_context(ThreadPoolExecutor(threads, f"lit_async_data {step}"))
        for piece in itertools.chain(pieces, itertools.repeat(None, AHEAD * threads)):
            waiting.append((piece, pool.submit(work, piece)) if piece is not None else None)
            if len(waiting) > AHEAD * threads and (first := waiting.popleft()):
                yield first[0], first[1].result()
                done += sample_bytes * len(first[0].samples)
                progress(step, done, total)
