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
from lit_async_data.tools.inspect.report.report import Report
from lit_async_data.tools.overrides import override

# Exit status if some of several files cannot be read.
SOME_UNREADABLE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command to its parser."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="HDF5 files (also NetCDF, AnnData, MATLAB v7.3), or tables (CSV, Parquet, JSON lines); or a pattern",
    )
    parser.add_argument(
        "--json", action="store_true", help="print values for programs; docs/tools/inspect.md says which"
    )


def run(arguments: argparse.Namespace) -> int:
    """Inspect files and print the report.

    Args:
        arguments: As parsed.

    Returns:
        0; 1 if some of the files cannot be read.

    Raises:
        AsyncDataError: None of them can, or rich is missing.
    """
    if arguments.json:
        report = report_on(arguments.files)
        sys.stdout.write(json.dumps(report.as_dict(), ensure_ascii=False, indent=2, default=str) + "\n")
    else:
        from lit_async_data.tools.inspect.report.text import print_report
        from lit_async_data.tools.terminal import console

        target = console()
        report = report_on(arguments.files)
        print_report(report, target)
    return SOME_UNREADABLE if report.unreadable else 0


def report_on(given: Sequence[str]) -> Report:
    """The report on files.

    Args:
        given: Paths and patterns.

    Raises:
        AsyncDataError: There is no such file, or none can be read.
    """
    from lit_async_data.sources.manifest.table.reading import is_table

    paths = [path for each in given for path in _expanded(each)]
    tables = [path for path in paths if is_table(path)]
    if not tables:
        from lit_async_data.tools.inspect.hdf5_files import hdf5_report

        return hdf5_report(list(dict.fromkeys(paths)))
    if len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ConfigError(f"{tables[0]} is a table and {other} is none; inspect them one after the other")
    from lit_async_data.tools.inspect.tables import table_report

    return table_report(list(dict.fromkeys(paths)))


def _expanded(given: str) -> list[str]:
    path = os.path.expanduser(given)
    if os.path.isdir(path):
        raise FormatError(_folder(path), file=path)
    return files_matching(path) if is_pattern(path) else [path]


def _folder(path: str) -> str:
    """What to do about a folder, from what is in it."""
    from lit_async_data.sources.manifest.fields.column import HDF5, IMAGES
    from lit_async_data.sources.manifest.table.reading import is_table

    names = sorted(os.listdir(path))
    ends = [os.path.splitext(name)[1] for name in names]
    fitting = [end for end in ends if end.lower() in HDF5] or [end for end in ends if is_table(end)]
    if fitting:
        return f"{path}: is a folder; inspect its files: '{os.path.join(path, '*' + fitting[0])}'"
    below = next((name for name in names if os.path.isdir(os.path.join(path, name))), None)
    images = below is not None and any(
        os.path.splitext(name)[1].lower() in IMAGES for name in os.listdir(os.path.join(path, below))
    )
    if images:
        return (
            f"{path}: is a folder of images by class; ManifestSource.from_folder({path!r}, image_size=224) reads it, "
            f"doctor {shlex.quote(path)} --image-size 224 measures it, and python train.py data=folder "
            f"{override('data.source.root', path)} data.source.image_size=224 trains on it"
        )
    if any(os.path.splitext(name)[1].lower() in IMAGES for name in names):
        return f"{path}: is a folder of images; ManifestSource reads them by a table with a column of their paths"
    return f"{path}: is a folder without HDF5 files or tables; give files"
