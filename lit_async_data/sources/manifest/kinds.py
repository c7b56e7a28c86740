"""What stands in the columns of a table, and in which rows nothing does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.permutation import Indices
from lit_async_data.sources.manifest.column import FILES, Column, Kind
from lit_async_data.sources.manifest.image_shape import ImageShape
from lit_async_data.sources.manifest.paths import kind_of_path
from lit_async_data.sources.manifest.stored_file import Root
from lit_async_data.sources.manifest.table import Table

# Options of images.
_IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))


def kind_of(key: str, column: Column, table: Table, root: Root) -> Kind | None:
    """What stands in a column: by what the user says, else by its first value. None for values of any kind."""
    if column.kind is not None or column.several or column.classes is not None:
        kind = column.kind
    else:
        kind = _kind_of_value(table.first(column.names[0]), root)
    if kind in FILES and not table.is_text(column.names[0]):
        raise ConfigError(f"fields.{key}.kind: column {column.names[0]!r} holds no paths")
    _check_options(key, column, kind)
    if kind in FILES and column.null == "ignore":
        raise ConfigError(f"fields.{key}.null: nothing stands for a file that there is not; drop such samples")
    return kind


def _check_options(key: str, column: Column, kind: Kind | None) -> None:
    """Refuse what says nothing of such a column."""
    own = {"image": _IMAGE, "npy": (), "hdf5": ("dtype", "row", "dataset", "layout")}
    fitting = own.get(kind or "", ("dtype", "classes", "separator"))
    for name in column.given:
        if name not in ("name", "kind", "null", *fitting):
            what = f"{kind} files" if kind in FILES else "labels"
            hint = "; cast on the device" if name == "dtype" else ""
            raise ConfigError(f"fields.{key}.{name}: says nothing of {what}{hint}")


def _kind_of_value(value: Any, root: Root) -> Kind | None:
    if not isinstance(value, str) or not value:
        return None
    known = kind_of_path(value)
    if known is not None:
        return known
    try:
        return "image" if os.path.isfile(root.path_of(value)) else None
    except ManifestError:
        return None


def missing_of(columns: Iterable[Column], table: Table) -> list[Indices]:
    """The rows without a value in columns of which such rows are dropped."""
    return [table.missing(name) for column in columns if column.null == "drop" for name in column.names]


def check_paths(key: str, column: Column, table: Table) -> None:
    """Make sure that each row names a file.

    Raises:
        ManifestError: One does not.
    """
    name = column.names[0]
    missing = table.missing(name)
    if missing.size:
        more = f", nor in {missing.size - 1} other rows" if missing.size > 1 else ""
        raise table.origin.error(
            f"no path{more}; give one, or say null: drop in fields.{key}", row=int(missing[0]), column=name
        )
