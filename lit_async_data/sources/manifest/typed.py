"""`typed`: a table or folder with its options, as the command line of the packer names it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.sources.contract.pack_arguments import option, shown_path
from lit_async_data.sources.manifest.fields.column import Column
from lit_async_data.sources.manifest.table.reading import FolderTable

# Options that the command line has, too.
_OPTIONS = ("root", "id", "image_size", "resize", "mode")


def typed(
    table: Any, columns: Mapping[str, Column], options: Mapping[str, Any], others: Sequence[Any] = ()
) -> list[str]:
    """Words of a command line; none where it has no words for an option, or the table is in memory.

    Args:
        table: As for `ManifestSource`, or a listed folder.
        columns: By batch key.
        options: By name; None for those that are not given.
        others: Values of options that the command line has not.

    Example:
        >>> " ".join(typed("/data/birds.csv", {"x": Column("path")}, {"id": "name", "image_size": 224}))
        '/data/birds.csv --fields x=path --id name --image-size 224'
    """
    folder = isinstance(table, FolderTable)
    path = table.folder if folder else table
    plain = all(isinstance(column.name, str) and not column.given for column in columns.values())
    if not plain or any(others) or {*options} - {*_OPTIONS} or not isinstance(path, str | os.PathLike):
        return []
    root = None if folder or options.get("root") is None else shown_path(options["root"])
    return [
        shown_path(path),
        *option("fields", {key: column.names[0] for key, column in columns.items()}),
        *(word for name in _OPTIONS for word in option(name, {**options, "root": root}.get(name))),
    ]
