"""Reads every sample of a source, and lists those that cannot be read, as ``exclude`` takes them."""

from __future__ import annotations

import contextlib
import contextvars
import csv
import dataclasses
import os
import sys

import numpy as np

from lit_async_data.engine.pipeline.sample_reader import is_of_a_sample
from lit_async_data.errors import AsyncDataError, ConfigError, SourceError, counted
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.hdf5.readers.part_reader import LOOKS
from lit_async_data.sources.local_files import COLUMNS, bad_sample
from lit_async_data.tools.call import Call
from lit_async_data.tools.terminal import INPUT_CHUNKS, Piece, Progress, in_threads, indented, progress_bar, section

BLOCK_BYTES = 4 * 2**20  # of samples that a thread reads at a time, or one chunk


def check_all(call: Call, path: str) -> int:
    """Write the list of bad samples; returns 1 if there are any, else 0."""
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise ConfigError(f"{path} is in no folder that you may write to; give another path", "bad-list")
    unchecked = {} if call.source == "HDF5Source" else {"check_files": "none"}
    context = contextvars.copy_context()
    context.run(LOOKS.set, False)  # a sample without a value is listed
    source = context.run(dataclasses.replace(call, options={**call.options, **unchecked}).build)
    with progress_bar(sys.stderr) as progress:
        bad = [bad_sample(source, number, error) for number, error in unreadable(source, progress).items()]
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(bad)
    lines = [f"{len(bad):,} of {counted(len(source), 'sample')} of {source.name} cannot be read: {path}"]
    if bad:
        without = dataclasses.replace(call, options={**call.options, "exclude": path})
        lines += section("Why", list(dict.fromkeys(str(each["cause"]) for each in bad)))
        lines += ["", "Leave them out", *indented(without.python().splitlines()), *indented([without.command()])]
    sys.stdout.write("\n".join([*lines, ""]))
    return int(bool(bad))


def unreadable(source: Source, progress: Progress) -> dict[int, AsyncDataError]:
    """The error of each sample that cannot be read, by its number. Raises errors that are no sample's fault.

    Samples are read in storage order, in blocks. A block that fails is halved, down to single samples.
    """
    layout, bad, release = source.layout(), dict[int, AsyncDataError](), source.reserve(INPUT_CHUNKS, 0)
    order = np.arange(len(source)) if layout.order is None else layout.order
    most = -(-max(BLOCK_BYTES // max(source.spec.nbytes, 1), 1) // layout.rows) * layout.rows
    pieces = (Piece("", len(order), row, order[row : row + most]) for row in range(0, len(order), most))
    with contextlib.closing(source):
        for _, found in in_threads(lambda piece: _errors(source, piece.samples), pieces, "reading", source, progress):
            bad |= found
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
