"""`Call`: a source as the arguments of a command describe it, as Python, as a command line of train.py, and built."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.manifest.fields.column import HDF5
from lit_async_data.sources.table.reading import is_table

#: A field as it is given: a name, names, or options by name.
Given = str | Sequence[str] | Mapping[str, Any]


def named(name: str, options: Mapping[str, Any]) -> Given:
    return {"name": name, **options} if options else name


#: What each source takes, as the command line and the constructors name it.
OPTIONS = {
    "HDF5Source": ("layout", "group", "sample", "rows"),
    "ManifestSource": ("root", "id", "image_size", "resize", "mode", "delimiter"),
    "ManifestSource.from_folder": ("id", "image_size", "resize", "mode"),
}
NAMES = ("fields", *dict.fromkeys(itertools.chain(*OPTIONS.values())))
# By source: the configuration of `train.py`, the part of it that builds the source, and the name of the first argument.
_SETTINGS = {
    "HDF5Source": ("hdf5", "train", "path"),
    "ManifestSource": ("manifest", "source", "table"),
    "ManifestSource.from_folder": ("folder", "source", "root"),
}
# Text that Hydra takes as it is, in all places: not a number, not null, nothing of its grammar.
_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./\-]*")
_WORDS = {"null", "true", "false", "nan", "inf"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that builds a source: a class, or ``ManifestSource.from_folder``; its first argument; fields; options."""

    source: str
    path: str | list[str]
    fields: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def name_of(self, key: str) -> str:
        given: Any = self.fields[key]
        return str(given["name"] if isinstance(given, Mapping) else given)

    def build(self) -> Source:
        import lit_async_data

        build = operator.attrgetter(self.source)(lit_async_data)
        source: Source = build(self.path, *([dict(self.fields)] if self.fields else []), **self.options)
        return source

    def lines(self) -> dict[str, str]:
        return {"python": self.python(), "command": self.command()}

    def python(self) -> str:
        fields = f", {literal(self.fields)}" if self.fields else ""
        options = "".join(f", {name}={literal(value)}" for name, value in self.options.items())
        name = self.source.partition(".")[0]
        return f"from lit_async_data import {name}\nsource = {self.source}({literal(self.path)}{fields}{options})"

    def command(self) -> str:
        config, part, first = _SETTINGS[self.source]
        given: dict[str, Any] = {first: self.path}
        fields = {key: dict(field) if isinstance(field, Mapping) else field for key, field in self.fields.items()}
        nulls = {key: field.pop("null") for key, field in fields.items() if isinstance(field, dict) and "null" in field}
        if config == "hdf5":
            given["fields"] = fields
        settings = {f"data.{part}.{name}": value for name, value in (given | dict(self.options)).items()}
        if config != "hdf5" and self.fields:  # merged with {x: path, y: label}, of which some may have to go
            for name in ("x", "y"):
                settings |= {} if name in self.fields else {f"~data.{part}.fields.{name}": None}
            for name, field in fields.items():
                key = f"data.{part}.fields.{name}"
                settings[key if name in ("x", "y") else f"+{key}"] = field
        # No word that Hydra takes as a key in a mapping.
        settings |= {f"+data.{part}.fields.{name}.null": null for name, null in nulls.items()}
        typed = [override(key, value) for key, value in settings.items()]
        return " ".join(["python train.py", f"data={config}", *typed])


def literal(value: Any) -> str:
    """A value as it is written in Python."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def override(key: str, value: Any) -> str:
    """An argument for ``train.py``, as typed in a shell."""
    return shlex.quote(f"{key}={_of_hydra(value)}")


def _of_hydra(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_of_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_of_hydra, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    if _BARE.fullmatch(value) and value.lower() not in _WORDS and value.strip("."):
        return value
    return '"' + _escaped(_escaped(value, r"\$\{"), '"|$') + '"'


def _escaped(text: str, special: str) -> str:
    """Text with a backslash before what is special, first to OmegaConf and then to Hydra.

    Any other backslash stands for itself, but those right before something special are escaped too.
    """
    return re.sub(rf"(\\*)({special})", lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)


# -- as arguments ------------------------------------------------------------------------------------------------------


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--fields", nargs="+", metavar="KEY=NAME", help="datasets, attributes (NAME@ATTRIBUTE) or columns, by batch key"
    )
    add("--layout", nargs="+", metavar="KEY=NHWC", help="letters of the stored axes (HDF5)")
    add("--group", metavar="NAME", help="group of the datasets, or a pattern of groups (HDF5)")
    add("--sample", help="row; group or dataset if each of these is a sample (HDF5)")
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
        raise ConfigError(f"{source} has no such option; leave it out", min(others))
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
            raise ConfigError(f"{path} is a folder of HDF5 files; write {os.path.join(path, '*')}{found[0]}", "input")
        source = "ManifestSource" if ".parquet" in ends else "ManifestSource.from_folder"
    if len(paths) > 1 and source != "HDF5Source":
        raise ConfigError(f"{path} is a table or a folder; give one, or several HDF5 files", "input")
    return source


def _by_key(given: Sequence[str]) -> dict[str, str]:
    """A mapping from words ``KEY=NAME``, or ``NAME`` for a key of that name."""
    return {each.partition("=")[0]: each.partition("=")[2] or each for each in given}
