"""`Examined`: what is examined: a source, the options of its loader, and how both are typed."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.given_source import GivenSource
from lit_async_data.tools.inspect.report.suggestion import Call, Suggestion

# Samples per batch where nobody says.
BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Examined:
    """What is examined.

    Attributes:
        source: The samples of training.
        options: Of its loader.
        build: Builds a loader of the source with other options.
        prefix: Of the loader's options on a command line.
        python: The lines that build the source; empty if a configuration does.
        command: The command line of ``train.py`` that reads it; empty likewise.
        pack: The command that packs it.
    """

    source: Source
    options: LoaderOptions
    build: Callable[[LoaderOptions], AsyncLoader]
    prefix: str = "loader."
    python: str = ""
    command: str = ""
    pack: str = "python -m lit_async_data pack"


def of_source(source: Source, options: LoaderOptions, **typed: str) -> Examined:
    """A source without transforms.

    Args:
        source: The source.
        options: Of its loader.
        typed: ``python``, ``command`` and ``pack``, where they are known.

    Example:
        >>> import numpy
        >>> from lit_async_data.testing import ArraySource
        >>> examined = of_source(ArraySource({"x": numpy.zeros(8)}), LoaderOptions(batch_size=4))
        >>> len(examined.build(examined.options))
        2
    """
    return Examined(source, options, lambda given: AsyncLoader(source, given), **typed)


def of_arguments(paths: Sequence[str], arguments: argparse.Namespace) -> Examined:
    """What the arguments of a command describe.

    Args:
        paths: Files.
        arguments: As parsed.

    Raises:
        AsyncDataError: The files cannot be read, or the arguments do not fit them.
    """
    given = GivenSource.of(paths, arguments)
    options = LoaderOptions(batch_size=BATCH_SIZE if arguments.batch_size is None else arguments.batch_size)
    if given.kind == "folder":
        call = Call("ManifestSource.from_folder", given.paths[0], {}, given.options)
        pack = _pack(given.paths, given.options)
    else:
        call = _with(_suggested(paths) if "fields" not in given.options else None, given)
        pack = _pack(given.paths, {"fields": call.fields, **call.options})
    typed = Suggestion("", {"all": call})
    return of_source(call.build(), options, python=typed.python(), command=typed.command(), pack=pack)


def _suggested(paths: Sequence[str]) -> Call:
    """The source that ``inspect`` suggests for training."""
    from lit_async_data.tools.inspect.command import report_on

    report = report_on(paths)
    if not report.suggestions:
        raise ConfigError(
            f"fields: nothing in {paths[0]} looks like samples; python -m lit_async_data inspect "
            f"{shlex.quote(paths[0])} says why; name them, as in --fields x=NAME y=NAME"
        )
    calls = report.suggestions[0].calls
    return calls.get("train") or next(iter(calls.values()))


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


def _with(call: Call | None, given: GivenSource) -> Call:
    options = dict(given.options)
    fields = options.pop("fields", None)
    if call is not None:
        return dataclasses.replace(call, options={**call.options, **options})
    assert fields is not None
    path = given.paths[0] if len(given.paths) == 1 else list(given.paths)
    named = fields if isinstance(fields, dict) else {name: name for name in fields}
    return Call("HDF5Source" if given.kind == "hdf5" else "ManifestSource", path, named, options)
