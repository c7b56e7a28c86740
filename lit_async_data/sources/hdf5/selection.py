"""What a user has chosen: which files, which datasets of them under which keys, and how their axes are to be read."""

from __future__ import annotations

import collections
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ConfigError, MissingError

Path = str | os.PathLike[str]


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts scan2 before scan10."""
    return [(piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in re.split(r"(\d+)", path)]


def chosen_files(path: Path | Sequence[Path]) -> list[str]:
    """The files meant by a path, a glob or a list of these, absolute: the source may outlive the working folder.

    Raises:
        ConfigError: It is none of these, or names a file twice.
        MissingError: A glob matches nothing.
    """
    given: Any = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, Sequence) or not given or not all(p and isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(f"path: {path!r} is not a file, a glob or a list of these")
    chosen = []
    for item in [os.path.abspath(os.path.expanduser(item)) for item in given]:
        found = sorted(glob.glob(item), key=_natural) if glob.has_magic(item) and not os.path.exists(item) else [item]
        if not found:
            raise MissingError(f"{item} matches no file", file=item)
        chosen += found
    twice = sorted(file for file, times in collections.Counter(chosen).items() if times > 1)
    if twice:
        raise ConfigError(f"path: {twice[0]} is named twice; its samples would count double")
    return chosen


def chosen_fields(fields: Mapping[str, str] | Sequence[str]) -> tuple[dict[str, str], bool]:
    """The dataset of each batch key, and whether batches are dicts.

    Raises:
        ConfigError: It is neither a mapping nor a sequence of names, or names a dataset twice without keys.
    """
    as_mapping = isinstance(fields, Mapping)
    chosen = dict(fields) if isinstance(fields, Mapping) else {}
    if not as_mapping and isinstance(fields, Sequence) and not isinstance(fields, str):
        chosen = {str(name): name for name in fields}
        if len(chosen) < len(fields):
            raise ConfigError(f"fields: {list(fields)} names a dataset twice; a mapping gives each a key of its own")
    if not chosen or not all(isinstance(n, str) and n for pair in chosen.items() for n in pair):
        raise ConfigError(f"fields: {fields!r} is not a mapping from batch key to dataset name or a list of names")
    return chosen, as_mapping


def chosen_layouts(layout: str | Mapping[str, str] | None, keys: list[str]) -> dict[str, str]:
    """The letters of the axes of each batch key that has any; a single string belongs to the first key.

    Raises:
        ConfigError: It is neither, or names a key that is not there.
    """
    if not isinstance(layout, str | Mapping | None):
        raise ConfigError(f"layout: {layout!r} is neither letters nor a mapping from batch key to letters")
    chosen = {keys[0]: layout} if isinstance(layout, str) else dict(layout or {})
    for key in chosen:
        if key not in keys:
            raise ConfigError(f"layout: {key!r} is not one of the fields {', '.join(keys)}")
    return chosen
