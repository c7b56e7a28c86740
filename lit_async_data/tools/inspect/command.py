"""Shows what HDF5 files and tables hold, how each dataset is read, and the lines that read them.

  python -m lit_async_data inspect scans/*.h5
  python -m lit_async_data inspect birds.csv --json

Several files are parts of one dataset: the first is described, and what differs in the others is named.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.sources.local_files.patterns import files_matching, is_pattern
from lit_async_data.tools.inspect.report import Report
from lit_async_data.tools.overrides import override


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command to its parser."""
    kinds = "HDF5 files (also NetCDF, AnnData, MATLAB v7.3), or tables (CSV, Parquet, JSON lines); or a pattern"
    parser.add_argument("files", nargs="+", metavar="FILE", help=kinds)
    parser.add_argument("--json", action="store_true", help="print values for programs; docs/tools/inspect.md has them")


def run(arguments: argparse.Namespace) -> int:
    """Inspect files and print the report.

    Returns:
        0; 1 if some of the files cannot be read.

    Raises:
        AsyncDataError: None of them can, or rich is missing.
    """
    if arguments.json:
        report = report_on(arguments.files)
        sys.stdout.write(json.dumps(report.as_dict(), ensure_ascii=False, indent=2, default=str) + "\n")
    else:
        from lit_async_data.tools.inspect.text import print_report
        from lit_async_data.tools.terminal import console

        target = console()
        report = report_on(arguments.files)
        print_report(report, target)
    return int(bool(report.unreadable))


def report_on(given: Sequence[str]) -> Report:
    """The report on files, given by paths and patterns.

    Raises:
        AsyncDataError: There is no such file, or none can be read.
    """
    from lit_async_data.sources.manifest.table.reading import is_table

    paths = list(dict.fromkeys(path for each in given for path in _expanded(os.path.expanduser(each))))
    tables = [path for path in paths if is_table(path)]
    if tables and len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ConfigError(f"{tables[0]} is a table and {other} is none; inspect them one after the other")
    if tables:
        from lit_async_data.tools.inspect.tables import table_report

        return table_report(tables)
    from lit_async_data.tools.inspect.hdf5_files import hdf5_report

    return hdf5_report(paths)


def _expanded(path: str) -> list[str]:
    from lit_async_data.sources.manifest.fields.column import HDF5, IMAGES
    from lit_async_data.sources.manifest.table.reading import is_table

    if not os.path.isdir(path):
        return files_matching(path) if is_pattern(path) else [path]
    names = sorted(os.listdir(path))
    folders = [os.path.join(path, name) for name in names if os.path.isdir(os.path.join(path, name))]
    ends = [os.path.splitext(name)[1] for name in names]
    fitting = [end for end in ends if end.lower() in HDF5] or [end for end in ends if is_table(end)]
    advice = "it has no HDF5 files or tables; give files"
    if fitting:
        advice = f"inspect its files: '{os.path.join(path, '*' + fitting[0])}'"
    elif any(name.lower().endswith(IMAGES) for folder in folders[:1] for name in os.listdir(folder)):
        advice = (
            f"its images lie by class; ManifestSource.from_folder({path!r}, image_size=224) reads it, "
            f"doctor {shlex.quote(path)} --image-size 224 measures it, and python train.py data=folder "
            f"{override('data.source.root', path)} data.source.image_size=224 trains on it"
        )
    elif any(end.lower() in IMAGES for end in ends):
        advice = "ManifestSource reads its images by a table with a column of their paths"
    raise FormatError(f"{path}: is a folder; {advice}", file=path)
