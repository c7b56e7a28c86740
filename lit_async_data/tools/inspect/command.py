"""Shows what HDF5 files, tables and folders hold, how each dataset is read, and the lines that read them.

  python -m lit_async_data inspect scans/*.h5
  python -m lit_async_data inspect birds.csv --json
  python -m lit_async_data inspect birds.csv --check-all

Several files are parts of one dataset: the first is described. --check-all reads every sample, lists those that cannot
be read, and ends with exit status 1 if there are any. The options from --fields on describe the source that it reads;
without --fields, it is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from lit_async_data.errors import ConfigError, counted
from lit_async_data.sources.local_files.bad_lists import bad_sample
from lit_async_data.tools.call import Call
from lit_async_data.tools.given_source import NAMES, add_source_arguments, given_source, source_of
from lit_async_data.tools.inspect.check_all import unreadable, write_list
from lit_async_data.tools.inspect.contents import Dataset
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import ColumnReport, Report, Suggestion
from lit_async_data.tools.inspect.tables import sized_images, table_report
from lit_async_data.tools.terminal import ProgressLine, indented, section, shortened, sized, table


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
    write_list(path, bad)
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
    source = source_of(paths)
    if source == "HDF5Source":
        return hdf5_report(paths)
    return table_report(paths[0]) if source == "ManifestSource" else _folder_report(paths[0])


def _folder_report(path: str) -> Report:
    report = Report("folder", [path])
    folders = Suggestion("a folder for each class", Call("ManifestSource.from_folder", path))
    report.suggest([folders, sized_images(folders)])
    if not report.suggestions:
        raise ConfigError(report.notes[0])
    return report


# -- for people --------------------------------------------------------------------------------------------------------


def text_of(report: Report) -> str:
    lines = [_title(report)]
    columns = [["column", "type", "values", "missing", "field", "for example"]]
    for each in report.columns:
        counts = ["" if not n else f"{n:,}" for n in (each.distinct, each.missing)]
        columns.append([each.name, each.type, *counts, each.kind or "none", ", ".join(each.examples)])
    datasets = [["dataset", "shape", "type", "stored", "read"]]
    datasets += [[node.name, _shape(node), node.type, _storage(node), node.how] for node in report.datasets]
    lines += indented([*table(columns), *table(datasets)])
    lines += section("Why not a field", _reasons(report.columns))
    lines += section("Why not read", _reasons([each for each in report.datasets if each.reading is None]))
    lines += section("Why not faster", _reasons([each for each in report.datasets if each.reading]))
    lines += section("Notes", report.notes)
    for suggestion in report.suggestions:
        lines += _suggestion(suggestion)
    return "\n".join([*lines, ""])


def _title(report: Report) -> str:
    size = [] if report.bytes is None else [sized(report.bytes)]
    number = [counted(report.rows, "row")] if report.rows is not None else []
    number += [counted(len(report.datasets), "dataset")] if report.datasets else []
    groups = [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    more = f" and {counted(len(report.files) - 1, 'other file')}" if len(report.files) > 1 else ""
    return f"{report.files[0]}{more}   {' · '.join([report.kind.replace('hdf5', 'HDF5'), *size, *number, *groups])}"


def _shape(dataset: Dataset) -> str:
    if dataset.rows is None:
        return "one value" if dataset.bytes else ""
    least, most = dataset.rows
    first = f"{least:,}" if least == most else f"{least:,}–{most:,}"
    return "×".join([first, *map(str, dataset.shape[1:])])


def _storage(dataset: Dataset) -> str:
    size, stored = sized(dataset.bytes), dataset.stored_bytes
    if dataset.filters and stored and dataset.bytes > 1.05 * stored:
        size = f"{sized(stored)} of {size}"
    chunks = [f"chunks of {'×'.join(map(str, dataset.chunks))}"] if dataset.chunks else []
    return ", ".join([size, *dataset.filters, *chunks]) if dataset.bytes else ""


def _reasons(rows: Sequence[Dataset | ColumnReport]) -> list[str]:
    """The reasons of datasets or columns; those that share one are named together."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            names.setdefault(row.why, []).append(row.name)
    return [f"{', '.join(shortened(alike))}: {why}" for why, alike in names.items()]


def _suggestion(suggestion: Suggestion) -> Iterator[str]:
    batch = ", ".join(
        f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})"
        for key, each in suggestion.batch.items()
    )
    yield from ("", f"── {suggestion.title[:1].upper()}{suggestion.title[1:]} ──")
    yield f"  {suggestion.samples:,} samples · {batch} · {suggestion.reading}"
    yield from indented(suggestion.call.python().splitlines())
    yield from indented([suggestion.call.command()])
    yield from ("", *(f" · {note}" for note in suggestion.notes))
