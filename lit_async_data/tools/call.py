"""`Call`: a source as Python, as a command line of ``train.py``, and built."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.sources.contract.source import Source

#: A field as it is given: a name, names, or options by name.
Given = str | Sequence[str] | Mapping[str, Any]

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

    def python(self) -> str:
        fields = f", {literal(self.fields)}" if self.fields else ""
        options = "".join(f", {name}={literal(value)}" for name, value in self.options.items())
        name = self.source.partition(".")[0]
        return f"from lit_async_data import {name}\nsource = {self.source}({literal(self.path)}{fields}{options})"

    def command(self) -> str:
        config, part, first = _SETTINGS[self.source]
        given: dict[str, Any] = {first: self.path}
        if config == "hdf5":
            given["fields"] = self.fields
        settings = {f"data.{part}.{name}": value for name, value in (given | dict(self.options)).items()}
        if config != "hdf5" and self.fields:  # merged with {x: path, y: label}, of which some may have to go
            for name in ("x", "y"):
                settings |= {} if name in self.fields else {f"~data.{part}.fields.{name}": None}
            for name, field in self.fields.items():
                key, options = f"data.{part}.fields.{name}", dict(field) if isinstance(field, Mapping) else {}
                null = options.pop("null", None)  # no word that Hydra takes as a key in a mapping
                settings[key if name in ("x", "y") else f"+{key}"] = options or field
                settings |= {f"+{key}.null": null} if null else {}
        typed = [override(key, value) for key, value in settings.items()]
        return " ".join(["python train.py", f"data={config}", *typed])


def literal(value: Any) -> str:
    """A value as it is written in Python.

    Example:
        >>> literal({"x": "images", "size": (2, 3)})
        '{"x": "images", "size": (2, 3)}'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def override(key: str, value: Any) -> str:
    r"""An argument for ``train.py``, as typed in a shell.

    Example:
        >>> override("data.train.path", "x (v2).h5")
        '\'data.train.path="x (v2).h5"\''
        >>> override("data.train.fields", {"x": "images", "y": {"name": "labels", "column": 0}})
        "'data.train.fields={x: images, y: {name: labels, column: 0}}'"
    """
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
