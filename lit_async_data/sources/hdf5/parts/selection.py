"""The user's choice of files, groups, fields and layouts."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from lit_async_data.errors import ConfigError, FormatError, MissingError
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.storage.external_files import refuse_external_link
from lit_async_data.sources.local_files import files_matching, folder_of, is_pattern, natural

if TYPE_CHECKING:
    import h5py

PathLike = str | os.PathLike[str]
#: A field as the user may give it.
FieldLike = str | Field | Mapping[str, Any] | Sequence[str | Field | Mapping[str, Any]]


def chosen_files(path: PathLike | Sequence[PathLike]) -> dict[str, str]:
    """The files that a path, a glob or a list of these names, by absolute path.

    The source may outlive the working folder. The other name of each file stays the same when files are added or all of
    them are moved: the path below the folder of the glob, or the file name; the absolute path if two are the same.
    """
    given: Any = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, Sequence) or not given or not all(p and isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(f"{path!r} is not a file, a glob or a list of these", "path")
    chosen: dict[str, str] = {}
    for item in [os.path.abspath(os.path.expanduser(item)) for item in given]:
        pattern = is_pattern(item)
        folder = folder_of(item) if pattern else os.path.dirname(item)
        for file in files_matching(item) if pattern else [item]:
            if file in chosen:
                raise ConfigError(f"{file} is named twice, so its samples would count twice; name it once", "path")
            chosen[file] = os.path.relpath(file, folder)
    alike = {name for name, times in collections.Counter(chosen.values()).items() if times > 1}
    return {file: file if name in alike else name for file, name in chosen.items()}


def chosen_fields(fields: Mapping[str, FieldLike] | Sequence[FieldLike]) -> tuple[dict[str, Field], bool]:
    """The field for each batch key, and whether batches are dicts."""
    if isinstance(fields, Mapping):
        pairs = list(fields.items())
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        listed = [Field.of(each, f"fields.{number}.") for number, each in enumerate(fields)]
        pairs = [(each.attr or each.dataset, each) for each in listed]
    else:
        pairs = []
    if not pairs or not all(isinstance(key, str) and key for key, _ in pairs):
        example = f"; write {{'x': {fields!r}}}" if isinstance(fields, str) and fields else ""
        raise ConfigError(
            f"{fields!r} is not a mapping from batch key to dataset name or a list of names{example}", "fields"
        )
    chosen = {key: Field.of(each, f"fields.{key}.") for key, each in pairs}
    if len(chosen) < len(pairs):
        names = [key for key, _ in pairs]
        raise ConfigError(f"{names} names a dataset twice; give a mapping with a key for each", "fields")
    return chosen, isinstance(fields, Mapping)


def check_options(fields: Mapping[str, Field], options: AbstractSet[str], where: str) -> None:
    """Refuse other options of fields than these."""
    for key, field in fields.items():
        if field.stacked:
            raise ConfigError(f"several datasets are no field {where}; give each a key", f"fields.{key}")
        for option in dataclasses.fields(field):
            if option.name not in options and getattr(field, option.name) != option.default:
                raise ConfigError(f"does not apply {where}; leave it out", f"fields.{key}.{option.name}")


def chosen_groups(file: h5py.File, path: str, group: str | Sequence[str] | None, *, allow_external: bool) -> list[str]:
    """The groups of a file that match, in natural order for a pattern. Opens none of them."""
    for name in ([group] if isinstance(group, str) else group or ()) if not allow_external else ():
        refuse_external_link(file, str(name))
    if isinstance(group, str) or not isinstance(group, Sequence) or not group:
        return _matching_groups(file, path, group)
    chosen = [name for each in group for name in _matching_groups(file, path, each)]
    name, times = collections.Counter(chosen).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{name} is named twice, so its samples would count twice; name it once", "group")
    return chosen


def _matching_groups(file: h5py.File, path: str, group: Any) -> list[str]:
    import glob

    if group is None or group == "/":
        return ["/"]
    if not isinstance(group, str) or not group.strip("/"):
        raise ConfigError(f"{group!r} is not the name of a group or a pattern such as patient_* or run_[123]", "group")
    name = group.strip("/")
    above, _, last = name.rpartition("/")
    if glob.has_magic(above):
        rest = f"; write the rest before names: group={above!r}, fields={{KEY: '{last}/NAME'}}"
        rest = "" if glob.has_magic(last) or "/" in above else rest
        raise ConfigError(f"{group!r}: only the last component of a name may have wildcards{rest}", "group")
    if not glob.has_magic(last) or (above or "/") not in file:
        if name not in file:
            raise MissingError(f"{path}: has no group {name!r}; check group=", file=path, dataset=name)
        return [name]
    matches = sorted(fnmatch.filter(names_in(file[above or "/"], path), last), key=natural)
    if not matches:
        raise MissingError(f"{path}: {group!r} matches none of its groups; check group=", file=path)
    return [f"{above}/{each}" if above else each for each in matches]


def names_in(group: Any, path: str) -> list[str]:
    """The names in a group; h5py gives those that are not UTF-8 as bytes, and does not open them by text."""
    names = list(group)
    for name in names:
        if isinstance(name, bytes):
            what = f"holds the name {name!r}, which is not UTF-8; rename it, as by h5py: group.move(OLD, NEW)"
            raise FormatError(f"{path}:{group.name}: {what}", file=path, dataset=group.name)
    return names


def chosen_layouts(layout: str | Mapping[str, str] | None, keys: list[str]) -> dict[str, str]:
    """The letters of the axes by batch key, where given. A single string belongs to the first key."""
    if not isinstance(layout, str | Mapping | None):
        raise ConfigError(f"{layout!r} is neither letters nor a mapping from batch key to letters", "layout")
    chosen = {keys[0]: layout} if isinstance(layout, str) else dict(layout or {})
    for key in chosen:
        if key not in keys:
            raise ConfigError(f"{key!r} is not one of the fields {', '.join(keys)}", "layout")
    return chosen
