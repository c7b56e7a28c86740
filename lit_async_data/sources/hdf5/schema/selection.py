"""What a user has chosen: which files, which datasets of them under which keys, and how their axes are to be read."""

from __future__ import annotations

import collections
import fnmatch
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import h5py

from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.sources.descriptors import check_listable
from lit_async_data.sources.hdf5.schema.field import Field

Path = str | os.PathLike[str]
#: A field as it may be given.
Given = str | Field | Mapping[str, Any]


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts scan2 before scan10."""
    return [(piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in re.split(r"(\d+)", path)]


def chosen_files(path: Path | Sequence[Path]) -> dict[str, str]:
    """The files meant by a path, a glob or a list of these.

    Returns:
        By their path, absolute, since the source may outlive the working folder: a name for each that stays when other
        files are added or all of them are moved. That is its path below the folder that a glob begins with, or else
        its own name, unless another file has the same.

    Raises:
        ConfigError: It is none of these, or names a file twice.
        MissingError: A glob matches nothing.
        SourceError: No descriptor is left to list a folder with.
    """
    given: Any = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, Sequence) or not given or not all(p and isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(f"path: {path!r} is not a file, a glob or a list of these")
    chosen: dict[str, str] = {}
    for item in [os.path.abspath(os.path.expanduser(item)) for item in given]:
        many = glob.has_magic(item) and not os.path.exists(item)
        if many:
            check_listable(item)
        found = sorted(glob.glob(item), key=_natural) if many else [item]
        if not found:
            raise MissingError(f"{item} matches no file", file=item)
        folder = _folder(item) if many else os.path.dirname(item)
        for file in found:
            if file in chosen:
                raise ConfigError(f"path: {file} is named twice; its samples would count double")
            chosen[file] = os.path.relpath(file, folder)
    alike = {name for name, times in collections.Counter(chosen.values()).items() if times > 1}
    return {file: file if name in alike else name for file, name in chosen.items()}


def _folder(pattern: str) -> str:
    """The folder that a glob begins with."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def chosen_fields(fields: Mapping[str, Given] | Sequence[Given]) -> tuple[dict[str, Field], bool]:
    """The field of each batch key, and whether batches are dicts.

    Raises:
        ConfigError: It is neither a mapping nor a sequence of fields, or names a dataset twice without keys.
    """
    if isinstance(fields, Mapping):
        pairs = list(fields.items())
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        listed = [Field.of(each, f"fields.{number}.") for number, each in enumerate(fields)]
        pairs = [(each.name, each) for each in listed]
    else:
        pairs = []
    if not pairs or not all(isinstance(key, str) and key for key, _ in pairs):
        raise ConfigError(f"fields: {fields!r} is not a mapping from batch key to dataset name or a list of names")
    chosen = {key: Field.of(each, f"fields.{key}.") for key, each in pairs}
    if len(chosen) < len(pairs):
        names = [key for key, _ in pairs]
        raise ConfigError(f"fields: {names} names a dataset twice; a mapping gives each a key of its own")
    return chosen, isinstance(fields, Mapping)


def chosen_groups(file: h5py.File, path: str, group: str | None) -> list[str]:
    """The groups of a file that are parts: all whose names match, in natural order. None of them is opened.

    Args:
        file: The file, open.
        path: Its path, for messages.
        group: A name, or a pattern whose last component has wildcards; None for the root.

    Raises:
        ConfigError: It is no text, or has wildcards before its last component.
        MissingError: Nothing matches.
    """
    if group is None or group == "/":
        return ["/"]
    if not isinstance(group, str) or not group.strip("/"):
        raise ConfigError(f"group: {group!r} is not the name of a group or a pattern such as patient_* or run_[123]")
    name = group.strip("/")
    above, _, last = name.rpartition("/")
    if glob.has_magic(above):
        rest = f"; write the rest before names: group={above!r}, fields={{KEY: '{last}/NAME'}}"
        raise ConfigError(
            f"group: {group!r}: only the last component of a name may have wildcards"
            f"{'' if glob.has_magic(last) or '/' in above else rest}"
        )
    if not glob.has_magic(last) or (above or "/") not in file:
        if name not in file:
            raise MissingError(f"{path} has no group {name!r}", file=path, dataset=name)
        return [name]
    names: Any = file[above or "/"]
    found = sorted(fnmatch.filter(names, last), key=_natural)
    if not found:
        raise MissingError(f"{path}: {group!r} matches none of its groups", file=path)
    return [f"{above}/{each}" if above else each for each in found]


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
