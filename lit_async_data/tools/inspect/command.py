"""Shows what HDF5 files, tables and folders hold, how each dataset is read, and the lines that read them.

  python -m lit_async_data inspect scans/*.h5
  python -m lit_async_data inspect scans/*.h5 patients.csv
  python -m lit_async_data inspect birds.csv --json
  python -m lit_async_data inspect birds.csv --check-all

Several files are parts of one dataset: the first is described. --check-all reads every sample, lists those that cannot
be read, and ends with exit status 1 if there are any. The options from --fields on describe the source that it reads;
without --fields, it is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence

import numpy as np

from lit_async_data.engine.pipeline.bad_samples import is_of_a_sample
from lit_async_data.errors import AsyncDataError, ConfigError, SourceError, counted
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.derived import layout_of
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.local_files.bad_lists import COLUMNS, bad_sample
from lit_async_data.sources.table.reading import is_table
from lit_async_data.tools.call import NAMES, Call, add_source_arguments, given_source, source_of
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import Report, Suggestion, text_of
from lit_async_data.tools.inspect.tables import labelled, sized_images, table_report
from lit_async_data.tools.pack.packing import INPUT_CHUNKS, in_threads
from lit_async_data.tools.pack.plan import Piece
from lit_async_data.tools.terminal import ProgressLine, indented, section

# Bytes of samples that a thread reads at a time, or one chunk.
BLOCK_BYTES = 4 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "HDF5 files (also NetCDF, AnnData, MATLAB v7.3), a table (CSV, Parquet, JSON lines), or a folder of classes"
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{kinds}; or a pattern")
    parser.add_argument("--json", action="store_true", help="print values for programs; docs/tools/inspect.md has them")
    parser.add_argument("--check-all", action="store_true", help="read every sample, and list the bad ones")
    parser.add_argument("--bad-list", default="bad_samples.csv", metavar="PATH", help="the list (bad_samples.csv)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.check_all:
        return check_all(arguments)
    if option := next((name.replace("_", "-") for name in NAMES if getattr(arguments, name) is not None), ""):
        raise ConfigError(f"{option}: describes what --check-all reads; add --check-all, or leave --{option} out")
    report = report_on(arguments.files)
    as_json = json.dumps(report.as_dict(), ensure_ascii=False, indent=2, default=str) if arguments.json else ""
    sys.stdout.write(f"{as_json}\n" if arguments.json else text_of(report))
    return 0


def check_all(arguments: argparse.Namespace) -> int:
    """Read every sample, and list the bad ones; 1 if there are any."""
    call, progress, path = given_call(arguments.files, arguments), ProgressLine(sys.stderr), arguments.bad_list
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise ConfigError(f"bad-list: {path} is in no folder that you may write to; give another path")
    unchecked = {} if call.source == "HDF5Source" else {"check_files": "none"}
    source = dataclasses.replace(call, options={**call.options, **unchecked}).build()
    try:
        bad = [bad_sample(source, number, error) for number, error in unreadable(source, progress).items()]
    finally:
        progress.end()
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


def given_call(paths: Sequence[str], arguments: argparse.Namespace) -> Call:
    """The source that the arguments describe; without ``--fields``, that which ``inspect`` suggests."""
    call = given_source(paths, arguments)
    if call.fields:
        return call
    found = report_on(paths).suggestions
    if not found:
        raise ConfigError(
            f"fields: nothing in {paths[0]} looks like samples; python -m lit_async_data inspect "
            f"{shlex.quote(paths[0])} says why; name them, as in --fields x=NAME y=NAME"
        )
    return dataclasses.replace(found[0].call, options={**found[0].call.options, **call.options})


def report_on(given: Sequence[str]) -> Report:
    """The report on files, given by paths and patterns; or on a folder."""
    paths = [os.path.expanduser(each) for each in given]
    source, tables = source_of(paths), [path for path in paths if is_table(path)]
    if source == "HDF5Source":
        report = hdf5_report([path for path in paths if path not in tables])
        labelled(report, tables)
    elif source == "ManifestSource":
        report = table_report(paths[0])
    else:
        report, folders = Report("folder", paths), Suggestion("a folder for each class", Call(source, paths[0]))
        report.suggest([folders, sized_images(folders)])
        if not report.suggestions:
            raise ConfigError(report.notes[0])
    return report


# -- every sample ------------------------------------------------------------------------------------------------------


def unreadable(source: Source, progress: Callable[[str, int, int], object]) -> dict[int, AsyncDataError]:
    """The errors of all samples that cannot be read, by their numbers. An error that is no sample's fault is raised.

    Samples are read in storage order, in blocks. A block that fails is halved, down to single samples.
    """
    layout, bad, release = layout_of(source), dict[int, AsyncDataError](), source.reserve(INPUT_CHUNKS, 0, 0)
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
