"""`Examined`: the source that is examined, the options of its loader, and how both are typed."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.given_source import GivenSource
from lit_async_data.tools.suggestion import Call, Suggestion


@dataclasses.dataclass(frozen=True)
class Examined:
    """What is examined."""

    source: Source
    options: LoaderOptions
    python: str = ""  # the lines that build the source
    command: str = ""  # the command line of ``train.py`` that reads it
    pack: str = ""  # the command that packs it


def of_arguments(paths: Sequence[str], arguments: argparse.Namespace) -> Examined:
    given = GivenSource.of(paths, arguments)
    options = LoaderOptions(batch_size=arguments.batch_size)
    folder = Call("ManifestSource.from_folder", given.paths[0], {}, given.options)
    call = folder if given.kind == "folder" else _call(given)
    typed = Suggestion("", {"all": call})
    packed = {"fields": call.fields, **call.options} if call.fields else call.options
    return Examined(call.build(), options, typed.python(), typed.command(), _pack(given.paths, packed))


def _call(given: GivenSource) -> Call:
    """The source of HDF5 files or a table; without fields, that which ``inspect`` suggests for training."""
    options = dict(given.options)
    fields = options.pop("fields", None)
    if fields is not None:
        path = given.paths[0] if len(given.paths) == 1 else list(given.paths)
        named = fields if isinstance(fields, dict) else {name: name for name in fields}
        return Call("HDF5Source" if given.kind == "hdf5" else "ManifestSource", path, named, options)
    from lit_async_data.tools.inspect.command import report_on

    found = report_on(given.paths).suggestions
    if not found:
        raise ConfigError(
            f"fields: nothing in {given.paths[0]} looks like samples; python -m lit_async_data inspect "
            f"{shlex.quote(given.paths[0])} says why; name them, as in --fields x=NAME y=NAME"
        )
    call = found[0].calls.get("train") or next(iter(found[0].calls.values()))
    return dataclasses.replace(call, options={**call.options, **options})


def _pack(paths: Sequence[str], options: Mapping[str, Any]) -> str:
    """The command that packs files, with the options of a source."""
    words = ["python", "-m", "lit_async_data", "pack", *paths, "-o", "packed.h5"]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words += [f"{key}={each.name if isinstance(each, Field) else each}" for key, each in value.items()]
        else:
            words += map(str, value if isinstance(value, list | tuple) else [value])
    return shlex.join(words)
