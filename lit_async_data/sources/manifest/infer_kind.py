"""What stands in the columns of a table, and in which rows nothing does."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.column import FILES, Column, Kind
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.paths import kind_of_path
from lit_async_data.sources.manifest.table.arrow import is_number, numbered
from lit_async_data.sources.manifest.table.row_origin import shown
from lit_async_data.sources.manifest.table.table import Table

# Rows whose text is compared where it is no path at first sight, and those of them whose files are looked up.
_COMPARED, _LOOKED_UP = 1024, 16
# How a file ends that is none of those which can be read.
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,4}")
# Options of images.
_IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))

_log = logging.getLogger(__name__)


def kind_of(key: str, column: Column, table: Table, root: RootDirectory) -> Kind | None:
    """What stands in a column: by what the user says, else by its first value. None for values of any kind."""
    if column.kind is not None or column.several or column.classes is not None:
        kind = column.kind
    else:
        first = table.first(column.names[0])
        kind = _kind_of_value(first, root)
        if kind is None and isinstance(first, str) and column.separator is None and not is_number(first):
            _check_not_paths(key, column.names[0], table, root, first)
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


def _kind_of_value(value: Any, root: RootDirectory) -> Kind | None:
    if not isinstance(value, str) or not value:
        return None
    known = kind_of_path(value)
    if known is not None:
        return known
    try:
        return "image" if os.path.isfile(root.path_of(value)) else None
    except ManifestError:
        return None


def _check_not_paths(key: str, name: str, table: Table, root: RootDirectory, first: str) -> None:
    """Refuse to make classes of what seems to be paths: without an error, training would go on with their numbers.

    Raises:
        ConfigError: Other values are paths, or all end alike, as files do.
    """
    rows = np.unique(np.linspace(0, len(table) - 1, min(_COMPARED, len(table))).astype(np.int64))
    texts = list(dict.fromkeys(table.array(name).take(numbered(rows)).drop_null().to_pylist()))
    begins = f"fields.{key}.kind: column {shown(name)} begins with {shown(first)}"
    ways = "say kind: image, npy or hdf5 if these are paths, or kind: class if they are classes"
    known = next((text for text in texts if kind_of_path(text)), None)
    known = known or next((text for text in texts[:_LOOKED_UP] if _kind_of_value(text, root)), None)
    if known is not None:
        raise ConfigError(
            f"{begins}, which is no file and does not end as one that can be read, but also holds {shown(known)}; mend "
            f"the first path, or {ways}"
        )
    ends = {os.path.splitext(text)[1] for text in texts}
    if len(texts) > 1 and len(ends) == 1 and _SUFFIX.fullmatch(next(iter(ends))):
        raise ConfigError(
            f"{begins}, and all end in {next(iter(ends))}, but there is no such file in {root.root}; {ways}"
        )
    if all("/" in text for text in texts):
        _log.warning(
            "column %s: %s and others like it are taken for classes, since there are no such files in %s; %s",
            shown(name),
            shown(first),
            root.root,
            ways,
        )


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
