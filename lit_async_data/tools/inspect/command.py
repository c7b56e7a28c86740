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
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence

from lit_async_data.errors import ConfigError
from lit_async_data.sources.table.reading import is_table
from lit_async_data.tools.call import NAMES, Call, add_source_arguments, given_source, source_of
from lit_async_data.tools.check_all import check_all
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import Report, Suggestion, text_of
from lit_async_data.tools.inspect.tables import labelled, sized_images, table_report
from lit_async_data.tools.terminal import as_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "HDF5 files (also NetCDF, AnnData, MATLAB v7.3), a table (CSV, Parquet, JSON lines), or a folder of classes"
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{kinds}; or a pattern")
    parser.add_argument("--json", action="store_true", help="print values for programs; docs/tools/inspect.md has them")
    parser.add_argument("--check-all", action="store_true", help="read every sample, and list the bad ones")
    parser.add_argument("--bad-list", default="bad_samples.csv", metavar="PATH", help="the list (bad_samples.csv)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.check_all:
        return check_all(given_call(arguments.files, arguments), arguments.bad_list)
    if option := next((name.replace("_", "-") for name in NAMES if getattr(arguments, name) is not None), ""):
        raise ConfigError(f"describes what --check-all reads; add --check-all, or leave --{option} out", option)
    report = report_on(arguments.files)
    sys.stdout.write(as_json(report.as_dict(), str) if arguments.json else text_of(report))
    return 0


def given_call(paths: Sequence[str], arguments: argparse.Namespace) -> Call:
    """The source that the arguments describe; without ``--fields``, that which ``inspect`` suggests."""
    call = given_source(paths, arguments)
    if call.fields:
        return call
    found = report_on(paths).suggestions
    if not found:
        raise ConfigError(
            f"nothing in {paths[0]} looks like samples; python -m lit_async_data inspect "
            f"{shlex.quote(paths[0])} says why; name them, as in --fields x=NAME y=NAME",
            "fields",
        )
    return dataclasses.replace(found[0].call, options={**found[0].call.options, **call.options})


def report_on(given: Sequence[str]) -> Report:
    """The report on files, given by paths and patterns; or on a folder."""
    paths = [os.path.expanduser(each) for each in given]
    source, tables = source_of(paths), [path for path in paths if is_table(path)]
    if source == "ManifestSource":
        return table_report(paths[0])
    if source == "HDF5Source":
        report = hdf5_report([path for path in paths if path not in tables])
        labelled(report, tables)
        return report
    report, folders = Report("folder", paths), Suggestion("a folder for each class", Call(source, paths[0]))
    report.suggest([folders, sized_images(folders)])
    if not report.suggestions:
        raise ConfigError(report.notes[0])
    return report
