"""Reads every sample of a source, and lists those that cannot be read."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lit_async_data.engine.pipeline.bad_samples import is_of_a_sample
from lit_async_data.errors import AsyncDataError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.derived import layout_of
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.local_files.bad_lists import COLUMNS
from lit_async_data.system import usable_cores

# Bytes of samples that a thread reads at a time, or one chunk; blocks per thread until Ctrl-C is heard; decoded chunks.
BLOCK_BYTES, AHEAD, CHUNKS = 4 * 2**20, 4, 2


def unreadable(source: Source, progress: Callable[[str, int, int], object]) -> dict[int, AsyncDataError]:
    """The errors of all samples that cannot be read, by their numbers. An error that is no sample's fault is raised.

    Samples are read in storage order, in blocks. A block that fails is halved, down to single samples.
    """
    layout, sample_bytes, each = layout_of(source), source.spec.nbytes, AHEAD * usable_cores()
    order = np.arange(len(source)) if layout.order is None else layout.order
    most = -(-max(BLOCK_BYTES // max(sample_bytes, 1), 1) // layout.rows) * layout.rows
    blocks = (order[first : first + most] for first in range(0, len(order), most))
    bad, done, release = dict[int, AsyncDataError](), 0, source.reserve(CHUNKS, 0, 0)
    with contextlib.closing(source), ThreadPoolExecutor(usable_cores(), "lit_async_data check") as pool:
        while some := list(itertools.islice(blocks, each)):
            progress("reading", sample_bytes * done, sample_bytes * len(order))
            for found in pool.map(functools.partial(_errors, source), some):
                bad |= found
            done += sum(map(len, some))
    release()
    if len(bad) == len(order):
        raise SourceError(f"{source.name}: no sample can be read; is the disk there, and is root right? {bad[0]}")
    return dict(sorted(bad.items()))


def _errors(source: Source, samples: Indices) -> dict[int, AsyncDataError]:
    try:
        read(source, samples)
    except AsyncDataError as error:
        if not is_of_a_sample(error):
            raise
        half = len(samples) // 2
        return _errors(source, samples[:half]) | _errors(source, samples[half:]) if half else {int(samples[0]): error}
    return {}


def write_list(path: str, lines: Sequence[Mapping[str, object]]) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
