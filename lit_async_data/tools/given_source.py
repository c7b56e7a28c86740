"""`GivenSource`: the source that the arguments of a command describe."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source

# Options of each kind of input, as the command line and the constructors name them.
_OPTIONS = {
    "hdf5": ("layout", "group", "rows"),
    "table": ("root", "id", "image_size", "resize", "mode"),
    "folder": ("id", "image_size", "resize", "mode"),
}


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a source."""
    add = parser.add_argument
    add("--fields", nargs="+", metavar="KEY=NAME", help="datasets or columns, by batch key")
    add("--layout", nargs="+", metavar="KEY=NHWC", help="letters of the stored axes (HDF5)")
    add("--group", metavar="NAME", help="group of the datasets, or a pattern of groups (HDF5)")
    add("--rows", metavar="NAME", help="a dataset with the rows to take (HDF5)")
    add("--root", metavar="DIR", help="the folder that relative paths start from (tables)")
    add("--id", metavar="NAME", help="column of sample ids (tables)")
    add("--image-size", nargs="+", type=int, metavar="N", help="height and width of images (tables)")
    add("--resize", help="stretch, crop or pad (tables)")
    add("--mode", help="mode of images: RGB, L, P, … (tables)")


@dataclasses.dataclass(frozen=True)
class GivenSource:
    """A source as it was typed.

    Attributes:
        kind: What the files are.
        paths: The files; one, unless they are HDF5.
        options: Further arguments of the constructor: those that were given.
    """

    kind: Literal["hdf5", "table", "folder"]
    paths: Sequence[str]
    options: dict[str, Any]

    @classmethod
    def of(cls, paths: Sequence[str], arguments: argparse.Namespace) -> GivenSource:
        """The source that arguments describe.

        Args:
            paths: As typed.
            arguments: As parsed.

        Raises:
            ConfigError: Arguments do not fit the kind of the files.
        """
        kind = _kind(paths)
        for name in (name for names in _OPTIONS.values() for name in names if name not in _OPTIONS[kind]):
            if getattr(arguments, name) is not None:
                others = " and ".join(_KINDS[each] for each, names in _OPTIONS.items() if name in names)
                raise ConfigError(f"{name}: only for {others}; leave it out")
        given = {name: getattr(arguments, name) for name in ("fields", *_OPTIONS[kind])}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "fields" in options:
            options["fields"] = _named(options["fields"])
        if "layout" in options:
            layouts = _named(options["layout"])
            options["layout"] = layouts if isinstance(layouts, dict) else layouts[0]
        if "image_size" in options:
            sizes = options["image_size"]
            options["image_size"] = sizes[0] if len(sizes) == 1 else tuple(sizes)
        return cls(kind, paths, options)

    def open(self) -> Source:
        """The source.

        Raises:
            ConfigError: Settings do not fit the input.
            SourceError: The input cannot be read.
        """
        if self.kind == "hdf5":
            from lit_async_data.sources.hdf5.source import HDF5Source

            return HDF5Source(self.paths, **self.options)
        from lit_async_data.sources.manifest.source import ManifestSource

        if self.kind == "folder":
            options = dict(self.options)
            return ManifestSource.from_folder(self.paths[0], options.pop("fields", None), **options)
        if "fields" not in self.options:
            raise ConfigError(f"fields: missing; which columns of {self.paths[0]}? For example --fields x=path y=label")
        return ManifestSource(self.paths[0], **self.options)


_KINDS = {"hdf5": "HDF5 files", "table": "tables", "folder": "folders"}


def _kind(paths: Sequence[str]) -> Literal["hdf5", "table", "folder"]:
    from lit_async_data.sources.manifest.fields.column import HDF5
    from lit_async_data.sources.manifest.table.reading import is_table

    is_folder, of_rows = os.path.isdir(os.path.expanduser(paths[0])), is_table(paths[0])
    if (of_rows or is_folder) and len(paths) > 1:
        raise ConfigError(
            f"input: {paths[0]} is a {'folder' if is_folder else 'table'}; give one, or several HDF5 files"
        )
    if is_folder:
        ends = {os.path.splitext(name)[1].lower() for name in os.listdir(os.path.expanduser(paths[0]))}
        if found := sorted(ends & set(HDF5)):
            raise ConfigError(
                f"input: {paths[0]} is a folder of HDF5 files; write {os.path.join(paths[0], '*')}{found[0]}"
            )
        of_rows = ".parquet" in ends
    return "table" if of_rows else "folder" if is_folder else "hdf5"


def _named(given: Sequence[str]) -> dict[str, str] | list[str]:
    """A mapping of ``KEY=NAME``, or a list of names."""
    if not any("=" in each for each in given):
        return list(given)
    return {each.partition("=")[0]: each.partition("=")[2] or each for each in given}
