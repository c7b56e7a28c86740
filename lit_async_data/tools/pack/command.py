"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. After an interrupt or a crash, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.tools.pack.codec import LEVELS, NAMES

if TYPE_CHECKING:
    import h5py

_TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json", ".gz", ".txt")
# Options of tables, which HDF5 files do not have, and the other way round.
_OF_TABLES = ("root", "id", "image_size", "resize", "mode")
_OF_HDF5 = ("layout", "group", "rows")

# Names that a line shows.
MOST_NAMES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="HDF5 files, or one table, or one folder")
    add("-o", "--output", required=True, metavar="OUT.h5", help="the file to write")
    add("--fields", nargs="+", metavar="KEY=NAME", help="datasets or columns; KEY names the packed dataset")
    add("--columns", nargs="+", default=[], metavar="NAME", help="keep more columns, for groups of a split")
    add("--layout", nargs="+", metavar="KEY=NHWC", help="letters of the stored axes (HDF5)")
    add("--group", metavar="NAME", help="group of the datasets, or a pattern of groups (HDF5)")
    add("--rows", metavar="NAME", help="a dataset with the rows to take (HDF5)")
    add("--root", metavar="DIR", help="the folder that relative paths start from (tables)")
    add("--id", metavar="NAME", help="column of sample ids (tables)")
    add("--image-size", nargs="+", type=int, metavar="N", help="height and width of images (tables)")
    add("--resize", help="stretch, crop or pad (tables)")
    add("--mode", help="mode of images: RGB, L, P, … (tables)")
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
        source, recipe = opened(args)
        try:
            for text in _left_out(source, args.columns):
                progress.say(text)
            packed = pack(
                source,
                args.output,
                codec=args.codec,
                level=args.level,
                chunk=args.chunk,
                columns=args.columns,
                keep_parts=args.keep_parts,
                recipe=recipe,
                force=args.force,
                progress=progress,
            )
        finally:
            source.close()
    except KeyboardInterrupt:
        _tell(f"interrupted; the same command goes on with {args.output}.part")
        return 130
    except ConfigError as error:
        _tell(str(error))
        return 2
    except AsyncDataError as error:
        _tell(str(error))
        return 1
    from lit_async_data.tools.pack.report import report

    sys.stdout.write(report(packed, os.path.relpath(packed.path)))
    return 0


def _tell(text: str) -> None:
    sys.stderr.write(f"pack: {' '.join(text.split())}\n")


def opened(args: argparse.Namespace) -> tuple[Source, dict[str, str]]:
    """The input, and its settings as a resumed run must share them.

    Raises:
        ConfigError: Settings do not fit the input.
        SourceError: The input cannot be read.
    """
    table, folder = _kind(args.input)
    wrong = next(
        (name for name in (_OF_HDF5 if table or folder else _OF_TABLES) if getattr(args, name) is not None), None
    )
    if wrong is not None:
        what = "HDF5 files" if table or folder else "tables and folders"
        raise ConfigError(f"{wrong}: only for {what}; leave it out")
    names = ("fields", *(_OF_TABLES if table or folder else _OF_HDF5))
    options: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    recipe = {name: str(value) for name, value in options.items()}
    if "fields" in options:
        options["fields"] = _named(options["fields"])
    if not (table or folder):
        from lit_async_data.sources.hdf5.source import HDF5Source

        layouts = _named(options.get("layout", []))
        options["layout"] = layouts if isinstance(layouts, dict) else next(iter(layouts), None)
        return HDF5Source(args.input, **options), recipe
    from lit_async_data.sources.manifest.source import ManifestSource

    if "image_size" in options:
        sizes = options["image_size"]
        options["image_size"] = sizes[0] if len(sizes) == 1 else tuple(sizes)
    if folder:
        if "root" in options:
            raise ConfigError("root: only for tables; leave it out")
        return ManifestSource.from_folder(args.input[0], options.pop("fields", None), **options), recipe
    if "fields" not in options:
        raise ConfigError(f"fields: missing; which columns of {args.input[0]}? For example --fields x=path y=label")
    return ManifestSource(args.input[0], **options), recipe


def _kind(inputs: Sequence[str]) -> tuple[bool, bool]:
    """Whether the input is a table, and whether it is a folder."""
    folder = os.path.isdir(os.path.expanduser(inputs[0]))
    table = inputs[0].lower().endswith(_TABLES)
    if (table or folder) and len(inputs) > 1:
        raise ConfigError(f"input: {inputs[0]} is a {'folder' if folder else 'table'}; give one, or several HDF5 files")
    if folder:
        names = [name.lower() for name in os.listdir(os.path.expanduser(inputs[0]))]
        if any(name.endswith((".h5", ".hdf5")) for name in names):
            raise ConfigError(f"input: {inputs[0]} is a folder of HDF5 files; write {inputs[0].rstrip('/')}/*.h5")
        table = any(name.endswith(".parquet") for name in names)
    return table, folder and not table


def _named(given: Sequence[str]) -> dict[str, str] | list[str]:
    """A mapping of ``KEY=NAME``, or a list of names."""
    if not any("=" in each for each in given):
        return list(given)
    return {each.partition("=")[0]: each.partition("=")[2] or each for each in given}


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
