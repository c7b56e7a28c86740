"""Measures how fast files can feed training, and says what limits that, which options to use, and when to pack.

  python -m lit_async_data doctor scans/*.h5
  python -m lit_async_data doctor birds.csv --fields x=path y=species --image-size 224 --batch-size 128
  python -m lit_async_data doctor configs/train.yaml data=hdf5 data.train.path=x.h5

Without --fields, the source is the one that inspect suggests. A configuration is examined with its transforms and
options.
"""

from __future__ import annotations

import argparse
import json
import sys

from lit_async_data.errors import ConfigError
from lit_async_data.tools.given_source import add_source_arguments

# Seconds of each measurement.
SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command to its parser."""
    add = parser.add_argument
    add(
        "files", nargs="+", metavar="FILE", help="HDF5 files, a table, a folder; or a Hydra configuration and overrides"
    )
    add("--batch-size", type=int, metavar="N", help="samples per batch (64)")
    add_source_arguments(parser)
    add("--seconds", type=float, default=SECONDS, metavar="S", help="for each measurement (1); more is more exact")
    add("--warm", action="store_true", help="leave the page cache alone: other programs are using these files")
    add("--json", action="store_true", help="print values for programs; docs/tools/doctor.md says which")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the report.

    Args:
        arguments: As parsed.

    Returns:
        0.

    Raises:
        AsyncDataError: The files cannot be read, arguments do not fit them, or rich is missing.
    """
    from lit_async_data.tools.doctor.configuration import is_configuration, of_configuration
    from lit_async_data.tools.doctor.examination import examination
    from lit_async_data.tools.doctor.examined import of_arguments

    if not 0.05 <= arguments.seconds <= 600:
        raise ConfigError(f"seconds: {arguments.seconds} is not from 0.05 to 600")
    if is_configuration(arguments.files[0]):
        examined = of_configuration(arguments.files[0], _overrides(arguments))
    else:
        examined = of_arguments(arguments.files, arguments)
    try:
        if arguments.json:
            report = examination(examined, arguments.seconds, cold=not arguments.warm)
            sys.stdout.write(json.dumps(report.as_dict(), ensure_ascii=False, indent=2, default=str) + "\n")
        else:
            from lit_async_data.tools.doctor.text import print_report
            from lit_async_data.tools.terminal import console

            target = console()
            with target.status("measuring") as status:
                report = examination(
                    examined,
                    arguments.seconds,
                    cold=not arguments.warm,
                    say=lambda text: status.update(f"measuring: {text}"),
                )
            print_report(report, target)
    finally:
        examined.source.close()
    return 0


def _overrides(arguments: argparse.Namespace) -> list[str]:
    given = ("fields", "layout", "group", "rows", "root", "id", "image_size", "resize", "mode", "batch_size")
    wrong = next((name for name in given if getattr(arguments, name) is not None), None)
    if wrong is not None:
        raise ConfigError(f"{wrong}: a configuration sets it; give it as an override, or give data files")
    return list(arguments.files[1:])
