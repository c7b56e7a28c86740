"""`Suggestion`: sources that would read the files, as Python, as a command line, and built."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.overrides import override

#: A field as it is given: a name, names, a `Field`, or a mapping of options.
Given = str | Field | Sequence[str] | Mapping[str, Any]

# Name of the first argument.
_FIRST = {"HDF5Source": "path", "ManifestSource": "table", "ManifestSource.from_folder": "root"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that builds a source: a class, or ``ManifestSource.from_folder``; its first argument; fields; options."""

    source: str
    path: str | list[str]
    fields: Mapping[str, Given]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def python(self) -> str:
        """The call as an expression."""
        fields = f", {literal(dict(self.fields))}" if self.fields else ""
        options = "".join(f", {name}={literal(value)}" for name, value in self.options.items())
        return f"{self.source}({literal(self.path)}{fields}{options})"

    def build(self) -> Source:
        """The source. Raises what its constructor raises."""
        import lit_async_data

        build = operator.attrgetter(self.source)(lit_async_data)
        source: Source = build(self.path, dict(self.fields) or None, **self.options)
        return source

    def settings(self) -> dict[str, Any]:
        """The arguments as settings of the configuration, by name."""
        fields = {"fields": {key: _setting(given) for key, given in self.fields.items()}} if self.fields else {}
        return {_FIRST[self.source]: self.path, **fields, **self.options}


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What a sample is, and what builds its sources: by stage, or ``all`` for one source.

    Attributes:
        likely: Whether ``y`` has the name of a label; else its values must be class numbers.
    """

    title: str
    calls: Mapping[str, Call]
    notes: tuple[str, ...] = ()
    likely: bool = True

    def python(self) -> str:
        """A program of two lines or more, which builds the sources."""
        names = sorted({call.source.partition(".")[0] for call in self.calls.values()})
        if any(isinstance(given, Field) for call in self.calls.values() for given in call.fields.values()):
            names = sorted([*names, "Field"])
        lines = [f"{'source' if stage == 'all' else stage} = {call.python()}" for stage, call in self.calls.items()]
        return "\n".join([f"from lit_async_data import {', '.join(names)}", *lines])

    def command(self) -> str:
        """The command line of the reference script."""
        first = next(iter(self.calls.values()))
        if first.source == "HDF5Source":
            chosen = "data=hdf5"
        elif first.source != "ManifestSource":
            chosen = "data=folder"
        else:
            chosen = "data=manifest" if "all" in self.calls else "data=manifest_stages"
        typed = [override(key, value) for key, value in self._overrides().items()]
        return " ".join(["python train.py", chosen, *typed])

    def _overrides(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        first = next(iter(self.calls.values())).settings()
        for stage, call in self.calls.items():
            at = stage if stage != "all" else "train" if call.source == "HDF5Source" else "source"
            for name, value in call.settings().items():
                if name in ("path", "table") or stage in ("all", "train") or value != first.get(name):
                    settings |= _overridden(f"data.{at}.{name}", value, call.source)
        return settings


def _overridden(key: str, value: Any, source: str) -> dict[str, Any]:
    if not key.endswith(".fields") or source == "HDF5Source":
        return {key: value}
    # The fields of a table are merged with {x: path, y: label}, of which some may have to go.
    dropped = {f"~{key}.{name}": None for name in ("x", "y") if name not in value}
    known = {f"{key}.{name}": given for name, given in value.items() if name in ("x", "y")}
    return known | {f"+{key}.{name}": given for name, given in value.items() if name not in ("x", "y")} | dropped


def _setting(given: Given) -> Any:
    options = _options(given) if isinstance(given, Field) else given
    return options["name"] if isinstance(options, dict) and list(options) == ["name"] else options


def _options(field: Field) -> dict[str, Any]:
    """The options of a field that are not their defaults, as plain values."""
    found = {}
    for each in dataclasses.fields(field):
        value = getattr(field, each.name)
        if value != each.default:
            found[each.name] = (
                str(value) if isinstance(value, np.dtype) else list(value) if isinstance(value, tuple) else value
            )
    return found


def literal(value: Any) -> str:
    """A value as it is written in Python.

    Example:
        >>> literal({"x": "images", "size": (2, 3)})
        '{"x": "images", "size": (2, 3)}'
    """
    if isinstance(value, Field):
        options = {name: tuple(each) if isinstance(each, list) else each for name, each in _options(value).items()}
        name = options.pop("name")
        return f"Field({literal(name)}{''.join(f', {key}={literal(each)}' for key, each in options.items())})"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)
