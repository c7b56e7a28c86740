"""`Call`: a source that the arguments of a command describe. It is built, or printed as Python or for train.py."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lit_async_data
from lit_async_data.errors import ConfigError
from lit_async_data.sources.files.stores import public
from lit_async_data.sources.local_files import expanded, is_address, local_path
from lit_async_data.sources.manifest.columns import HDF5, Given
from lit_async_data.sources.table.table import is_table

ARGUMENTS: dict[str, dict[str, Any]] = {
    "fields": {"nargs": "+", "metavar": "KEY=NAME", "help": "datasets, attributes (NAME@ATTRIBUTE) or columns, by key"},
    "layout": {"nargs": "+", "metavar": "KEY=NHWC", "help": "letters of the stored axes (HDF5)"},
    "group": {"metavar": "NAME", "help": "group of the datasets, or a pattern of groups (HDF5)"},
    "sample": {"help": "row; group or dataset if each of these is a sample (HDF5)"},
    "rows": {"metavar": "NAME", "help": "a dataset with the rows to take (HDF5)"},
    "table": {"metavar": "TABLE", "help": "a table of more columns (HDF5)"},
    "on": {"nargs": "+", "metavar": "COLUMN", "help": "its column of ids; COLUMN=file, group, NAME or @ATTRIBUTE"},
    "root": {"metavar": "DIR", "help": "the folder that relative paths start from (tables)"},
    "id": {"metavar": "NAME", "help": "column of sample ids (tables)"},
    "image_size": {"nargs": "+", "type": int, "metavar": "N", "help": "height and width of images"},
    "resize": {"help": "stretch, crop or pad (images)"},
    "mode": {"help": "mode of images: RGB, L, P, …"},
    "delimiter": {"metavar": "CHARACTER", "help": "separator of cells, if neither comma nor tab (CSV, TSV)"},
    "encoding": {"metavar": "NAME", "help": "encoding of the text, if not UTF-8, such as cp1252 (CSV, TSV)"},
}
_json: Any = functools.partial(json.loads)
_json.__name__ = "JSON (such as '{\"anon\": true}')"  # argparse says: invalid JSON (…) value
# How files are reached.
ACCESS: dict[str, dict[str, Any]] = {
    "cache": {"metavar": "FOLDER", "help": "folder that keeps what was read of remote files and slow mounts"},
    "cache_limit": {"metavar": "SIZE", "help": "the most bytes there, such as 400GB"},
    "storage_options": {"type": _json, "metavar": "JSON", "help": "of the store, such as '{\"anon\": true}'"},
}
IMAGE = ("image_size", "resize", "mode")  # in HDF5 files, options of the fields that are encoded images
# By source: the configuration of `train.py`, the part that builds it, the name of its first argument, its options.
_SOURCES = {
    "HDF5Source": ("hdf5", "train", "path", ("layout", "group", "sample", "rows", "table", "on", *IMAGE, *ACCESS)),
    "ManifestSource": ("manifest", "source", "table", ("root", "id", *IMAGE, "delimiter", "encoding", *ACCESS)),
    "ManifestSource.from_folder": ("folder", "source", "root", ("id", *IMAGE, "cache", "cache_limit")),
}


@dataclasses.dataclass(frozen=True)
class Call:
    source: str  # a class, or ``ManifestSource.from_folder``
    path: str | list[str]
    fields: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # datasets of as many rows that no field takes

    def with_options(self, **options: Any) -> Call:
        return dataclasses.replace(self, options={**self.options, **options})

    @property
    def access(self) -> dict[str, Any]:
        """How files are reached."""
        return {name: self.options[name] for name in ACCESS if name in self.options}

    def build(self) -> lit_async_data.Source:
        given = [self.path, dict(self.fields)] if self.fields else [self.path]
        made: lit_async_data.Source = operator.attrgetter(self.source)(lit_async_data)(*given, **self.options)
        return made

    def python(self) -> str:
        given = [_written(each) for each in (self.path, self.fields) if each]
        given += [f"{name}={_written(value)}" for name, value in self._shown.items()]
        return f"from lit_async_data import {self.source.split('.')[0]}\nsource = {self.source}({', '.join(given)})"

    @property
    def _shown(self) -> Mapping[str, Any]:
        """The options, with … in place of what may be secret."""
        given = self.options.get("storage_options", {})
        shown = dict.fromkeys(given, "…") | public(given)
        return self.with_options(storage_options=shown).options if given else self.options

    def command(self) -> str:
        config, part, first, _ = _SOURCES[self.source]
        fields = {key: dict(field) if isinstance(field, Mapping) else field for key, field in self.fields.items()}
        nulls = {key: field.pop("null") for key, field in fields.items() if isinstance(field, dict) and "null" in field}
        given = {first: self.path, **({"fields": fields} if config == "hdf5" else {}), **self._shown}
        settings: dict[str, Any] = {f"data.{part}.{name}": value for name, value in given.items()}
        if config != "hdf5" and fields:  # merged with {x: path, y: label} of the configuration
            settings |= {f"~data.{part}.fields.{name}": None for name in ("x", "y") if name not in fields}
            settings |= {f"{'+' * (key not in ('x', 'y'))}data.{part}.fields.{key}": fields[key] for key in fields}
        settings |= {f"+data.{part}.fields.{name}.null": null for name, null in nulls.items()}  # no key for Hydra
        return " ".join(["python train.py", f"data={config}", *(override(key, settings[key]) for key in settings)])


def override(key: str, value: Any) -> str:
    return shlex.quote(f"{key}={_written(value, hydra=True)}")


def _written(value: Any, *, hydra: bool = False) -> str:
    if isinstance(value, Mapping):
        keys = [re.sub(r"([()\[\]:=, ])", r"\\\1", key) if hydra else _written(key) for key in value]
        pairs = (f"{key}: {_written(each, hydra=hydra)}" for key, each in zip(keys, value.values(), strict=True))
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(each, hydra=hydra) for each in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value) if hydra else repr(value)
    if not hydra:
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if re.fullmatch(r"(?!\.+$)(?!(?i:null|true|false|nan|inf)$)[A-Za-z_./][A-Za-z0-9_./\-]*", value):
        return value
    # Escape what OmegaConf, then what Hydra treats specially: double the backslashes before it, and add one.
    for special in (r"\$\{", '"|$'):
        value = re.sub(rf"(\\*)({special})", lambda found: found[1] * 2 + ("\\" + found[2]) * bool(found[2]), value)
    return f'"{value}"'


def add_source_arguments(parser: argparse.ArgumentParser, given: Mapping[str, Any] = ARGUMENTS | ACCESS) -> None:
    for name, options in given.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)


def given_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def given_source(paths: Sequence[str], arguments: argparse.Namespace) -> Call:
    source, files, table = source_of(paths)
    options = given_options(arguments, ARGUMENTS | ACCESS)
    if table and options.setdefault("table", table) != table:
        raise ConfigError(f"{table} is a second table; give one", "table")
    fields = _by_key(options.pop("fields", ()), source)
    if others := options.keys() - set(_SOURCES[source][3]):
        raise ConfigError(f"{source} has no such option; leave it out", min(others))
    for name, each in ((name, each) for name, each in options.items() if isinstance(each, list)):
        options[name] = _by_key(each, source) if "=" in str(each[0]) else tuple(each) if each[1:] else each[0]
    return Call(source, files if files[1:] else files[0], fields, options)


def source_of(paths: Sequence[str]) -> tuple[str, list[str], str]:
    """The class, its files, and the table beside HDF5 files; empty if there is none."""
    files = list(map(expanded, paths))
    table = next(filter(is_table, files), "") if len(files) > 1 else ""
    files = [each for each in files if each != table]
    path = next(filter(is_table, files), files[0])
    folder = not is_address(path) and os.path.isdir(local_path(path))
    ends = {os.path.splitext(name)[1].lower() for name in os.listdir(path)} if folder else set[str]()
    if found := sorted(ends & set(HDF5)):
        raise ConfigError(f"{path} is a folder of HDF5 files; write {os.path.join(path, '*')}{found[0]}", "input")
    source = "ManifestSource.from_folder" if folder else "ManifestSource" if is_table(path) else "HDF5Source"
    source = "ManifestSource" if ".parquet" in ends else source
    if len(paths) > 1 and source != "HDF5Source":
        raise ConfigError(f"{path} is a table or a folder; give it alone, or HDF5 files and one table", "input")
    return source, files, table


def _by_key(given: Sequence[str], source: str) -> dict[str, Any]:
    """What KEY=NAME and NAME say; NAME@ATTRIBUTE is an attribute, of HDF5 files."""
    named = {each.partition("=")[0]: each.partition("=")[2] or each for each in given}
    parts = {key: name.partition("@") for key, name in named.items() if "@" in name and source == "HDF5Source"}
    return named | {key: {"name": name, "attr": attribute} for key, (name, _, attribute) in parts.items()}
