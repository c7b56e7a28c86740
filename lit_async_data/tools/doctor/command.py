"""Measures how fast files can feed training, and says which options to use, and when to pack.

  python -m lit_async_data doctor scans/*.h5
  python -m lit_async_data doctor birds.csv --fields x=path y=species --image-size 224 --batch-size 128

Without --fields, the source is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import json
import sys

from lit_async_data.errors import ConfigError
from lit_async_data.tools.given_source import add_source_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command to its parser."""
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="HDF5 files, a table, or a folder")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (64)")
    add_source_arguments(parser)
    add("--seconds", type=float, default=1.0, metavar="S", help="for each measurement (1); more is more exact")
    add("--warm", action="store_true", help="leave the page cache alone: other programs are using these files")
    add("--json", action="store_true", help="print values for programs; docs/tools/doctor.md says which")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the report. Raises `AsyncDataError`."""
    from lit_async_data.tools.doctor.examination import examination
    from lit_async_data.tools.doctor.examined import of_arguments
    from lit_async_data.tools.doctor.text import print_report
    from lit_async_data.tools.terminal import console

    if not 0.05 <= arguments.seconds <= 600:
        raise ConfigError(f"seconds: {arguments.seconds} is not from 0.05 to 600")
    target = None if arguments.json else console()
    examined = of_arguments(arguments.files, arguments)
    try:
        if target is None:
            report = examination(examined, arguments.seconds, cold=not arguments.warm)
            sys.stdout.write(json.dumps(report, ensure_ascii=False, indent=2, default=vars) + "\n")
        else:
            with target.status("measuring"):
                report = examination(examined, arguments.seconds, cold=not arguments.warm)
            print_report(report, target)
    finally:
        examined.source.close()
    return 0
