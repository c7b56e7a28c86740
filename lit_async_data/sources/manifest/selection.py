"""What a user has chosen: which columns under which keys, and where the files lie."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.options import check_names
from lit_async_data.sources.manifest.column import Column
from lit_async_data.sources.manifest.images.image_shape import ImageShape

# Of a manifest, and of images in it.
OPTIONS = ["root", "id", "filters", "check_files", "allow_outside_root", "table_cache", "delimiter", "encoding"]
OPTIONS += [field.name for field in dataclasses.fields(ImageShape)]

# Which files are looked at before training.
CHECKS = ("first", "all", "none")


def chosen_columns(fields: Any, image: ImageShape) -> tuple[dict[str, Column], bool]:
    """The column of each batch key, and whether batches are dicts."""
    if isinstance(fields, Mapping):
        pairs = [(key, Column.of(each, f"fields.{key}.", image)) for key, each in fields.items()]
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        listed = [Column.of(each, f"fields.{number}.", image) for number, each in enumerate(fields)]
        pairs = [("_".join(column.names), column) for column in listed]
    else:
        pairs = []
    if not pairs or not all(isinstance(key, str) and key for key, _ in pairs):
        raise ConfigError(f"fields: {fields!r} is not a mapping from batch key to column or a list of columns")
    chosen = dict(pairs)
    if len(chosen) < len(pairs):
        raise ConfigError(
            f"fields: {list(map(str, fields))} names a column twice; a mapping gives each a key of its own"
        )
    return chosen, isinstance(fields, Mapping)


def root_of(table: Any) -> str:
    """The folder of a table; that in which a pattern of several begins."""
    if not isinstance(table, str | os.PathLike):
        return os.getcwd()
    path = os.path.abspath(os.path.expanduser(table))
    if os.path.isdir(path):
        return str(path)
    while glob.has_magic(path) and not os.path.exists(path):
        path = os.path.dirname(path)
        if not glob.has_magic(path):
            return str(path)
    return str(os.path.dirname(path))


def check_options(root: Any, id: Any, check_files: Any, *, allow_outside_root: Any, image: Mapping[str, Any]) -> None:  # noqa: A002  # the user's word
    """Make sure that options are what they must be.

    Raises:
        ConfigError: One is not, or there is none of its name; begins with it.
    """
    if not (root is None or (isinstance(root, str | os.PathLike) and os.fspath(root))):
        raise ConfigError(f"root: {root!r} is not a folder")
    if not (id is None or (isinstance(id, str) and id)):
        raise ConfigError(f"id: {id!r} is not the name of a column")
    if not isinstance(allow_outside_root, bool):
        raise ConfigError(f"allow_outside_root: {allow_outside_root!r} is not true or false")
    if check_files not in CHECKS:
        raise ConfigError(f"check_files: {check_files!r} is not one of {', '.join(CHECKS)}")
    check_names(image, OPTIONS)
