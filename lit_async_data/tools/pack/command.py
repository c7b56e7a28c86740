"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. After an interrupt or a crash, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.tools.given_source import GivenSource, add_source_arguments
from lit_async_data.tools.pack.planning.codec import LEVELS, NAMES

if TYPE_CHECKING:
    import h5py

# Names that a line shows.
MOST_NAMES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="HDF5 files, or one table, or one folder")
    add("-o", "--output", required=True, metavar="OUT.h5", help="the file to write")
    add_source_arguments(parser)
    add("--columns", nargs="+", default=[], metavar="NAME", help="keep more columns, for groups of a split")
    levels = ", ".join(f"{name} {low} to {high} ({usual})" for name, (low, usual, high) in LEVELS.items())
    add(
        "--codec",
        choices=["auto", *NAMES],
        default="auto",
        help="auto: deflate where it saves a third, none if the input has none",
    )
    add("--level", type=int, metavar="N", help=levels)
    add("--chunk", type=int, metavar="N", help="samples per chunk; by default one, or 64 KiB of small ones")
    add("--keep-parts", action="store_true", help="files, or groups in them, become groups; windows cross no group")
    add("--force", action="store_true", help="replace OUT.h5 if it exists")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0; 1 if it failed, 2 if an argument is wrong, 130 after Ctrl-C.
    """
    from lit_async_data.tools.pack.packing import pack
    from lit_async_data.tools.pack.progress import chosen

    progress = chosen(sys.stderr)
    try:
        given = GivenSource.of(args.input, args)
        source = given.open()
        try:
            for text in _left_out(source, args.columns):
                progress.print_line(text)
            packed = pack(
                source,
                args.output,
                codec=args.codec,
                level=args.level,
                chunk=args.chunk,
                columns=args.columns,
                keep_parts=args.keep_parts,
                recipe=given.recipe,
                force=args.force,
                progress=progress,
            )
        finally:
            source.close()
    except KeyboardInterrupt:
        _print(f"pack: interrupted; the same command goes on with {args.output}.part")
        return 130
    except ConfigError as error:
        _print(f"error: {error}")
        return 2
    except AsyncDataError as error:
        _print(f"error: {error}")
        return 1
    from lit_async_data.tools.pack.report import report

    sys.stdout.write(report(packed, args.output))
    return 0


def _print(text: str) -> None:
    sys.stderr.write(f"{' '.join(text.split())}\n")


def _left_out(source: Source, columns: Sequence[str]) -> list[str]:
    """A line that names the datasets of the first file that are not packed."""
    from lit_async_data.sources.hdf5.source import HDF5Source
    from lit_async_data.sources.hdf5.storage.failures import open_h5py

    if not isinstance(source, HDF5Source):
        return []
    part = source.stored_parts[0]
    used = {*columns, *(field.stored.name.strip("/") for field in part.fields.values())}
    above = "" if part.group == "/" else f"{part.group}/"
    taken = {name.removeprefix(above).split("/")[0] for name in used}
    with open_h5py(part.path) as file:
        names = [name for name in map(str, cast("h5py.Group", file[part.group])) if name not in taken]
    more = f", … ({len(names)} in all)" if len(names) > MOST_NAMES else ""
    return [f"{part.path}: left out: {', '.join(names[:MOST_NAMES])}{more}"] if names else []
