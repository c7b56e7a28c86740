"""The source that the arguments of a command describe."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.sources.manifest.fields.column import HDF5
from lit_async_data.sources.table.reading import is_table
from lit_async_data.tools.call import Call

#: What each source takes, as the command line and the constructors name it.
OPTIONS = {
    "HDF5Source": ("layout", "group", "sample", "rows"),
    "ManifestSource": ("root", "id", "image_size", "resize", "mode", "delimiter"),
    "ManifestSource.from_folder": ("id", "image_size", "resize", "mode"),
}
NAMES = ("fields", *dict.fromkeys(itertools.chain(*OPTIONS.values())))


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--fields", nargs="+", metavar="KEY=NAME", help="datasets, attributes (NAME@ATTRIBUTE) or columns, by batch key"
    )
    add("--layout", nargs="+", metavar="KEY=NHWC", help="letters of the stored axes (HDF5)")
    add("--group", metavar="NAME", help="group of the datasets, or a pattern of groups (HDF5)")
    add("--sample", help="row, or group if each group is a sample (HDF5)")
    add("--rows", metavar="NAME", help="a dataset with the rows to take (HDF5)")
    add("--root", metavar="DIR", help="the folder that relative paths start from (tables)")
    add("--id", metavar="NAME", help="column of sample ids (tables)")
    add("--image-size", nargs="+", type=int, metavar="N", help="height and width of images (tables)")
    add("--resize", help="stretch, crop or pad (tables)")
    add("--mode", help="mode of images: RGB, L, P, … (tables)")
    add("--delimiter", metavar="CHARACTER", help="what separates cells, if no comma or tab (CSV, TSV)")


def given_source(paths: Sequence[str], arguments: argparse.Namespace) -> Call:
    """The call that builds the source; without ``--fields``, it has no fields."""
    source = source_of(paths)
    options: dict[str, Any] = {name: value for name in NAMES[1:] if (value := getattr(arguments, name)) is not None}
    if others := options.keys() - set(OPTIONS[source]):
        raise ConfigError(f"{min(others)}: {source} has no such option; leave it out")
    if "layout" in options:
        layouts = _by_key(options["layout"])
        options["layout"] = layouts if "=" in arguments.layout[0] else arguments.layout[0]
    if "image_size" in options:
        options["image_size"] = tuple(options["image_size"]) if options["image_size"][1:] else options["image_size"][0]
    path = paths[0] if len(paths) == 1 else list(paths)
    fields: dict[str, Any] = _by_key(arguments.fields or ())
    for key, name in fields.items() if source == "HDF5Source" else ():
        if "@" in name:
            fields[key] = dict(zip(("name", "attr"), name.split("@", 1), strict=True))
    return Call(source, path, fields, options)


def source_of(paths: Sequence[str]) -> str:
    """Which source reads these files, patterns or folder."""
    path = os.path.expanduser(paths[0])
    if not os.path.isdir(path):
        source = "ManifestSource" if is_table(path) else "HDF5Source"
    else:
        ends = {os.path.splitext(name)[1].lower() for name in os.listdir(path)}
        if found := sorted(ends & set(HDF5)):
            raise ConfigError(f"input: {path} is a folder of HDF5 files; write {os.path.join(path, '*')}{found[0]}")
        source = "ManifestSource" if ".parquet" in ends else "ManifestSource.from_folder"
    if len(paths) > 1 and source != "HDF5Source":
        raise ConfigError(f"input: {path} is a table or a folder; give one, or several HDF5 files")
    return source


def _by_key(given: Sequence[str]) -> dict[str, str]:
    """A mapping from words ``KEY=NAME``, or ``NAME`` for a key of that name."""
    return {each.partition("=")[0]: each.partition("=")[2] or each for each in given}
