"""Which columns of a table are likely paths, labels, stages, ids and groups; from names, kinds and values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.tools.inspect.contents.scope import STAGES, words
from lit_async_data.tools.inspect.guesses.datasets import GROUPS, LABELS, MASKS, OTHERS
from lit_async_data.tools.inspect.report.report import ColumnReport
from lit_async_data.tools.inspect.report.suggestion import Call, Given, Suggestion

# Side of images that have no common size.
IMAGE_SIZE = 224
# Folders beside a table in which its files are looked for.
MOST_FOLDERS = 200
_STAGE_COLUMNS = {"split", "stage", "set", "subset", "phase", "partition", "usage"}


def table_guesses(
    columns: Sequence[ColumnReport],
    table: Table,
    path: str | list[str],
    root: RootDirectory,
    options: Mapping[str, Any],
) -> Iterator[list[Suggestion]]:
    """Suggestions for a table: alternatives, the likeliest first. None if nothing is likely.

    Args:
        columns: What is known of the columns.
        table: The rows.
        path: The table, as a source takes it.
        root: The folder of the table.
        options: Options that the source needs to read the file.
    """
    files = [column for column in columns if column.kind in ("image", "npy", "hdf5")]
    labels = sorted((c for c in columns if _label_score(c, len(table)) > 0), key=lambda c: -_label_score(c, len(table)))
    features = [c.name for c in columns if c.kind == "number" and c not in labels[:1] and not _is(c, OTHERS | GROUPS)]
    fields: dict[str, Given] = {}
    if files:
        fields["x"] = files[0].name
    elif features:
        fields["x"] = features[0] if len(features) == 1 else features
    else:
        return
    used = dict(options)
    if files:
        used |= _root(files[0], table, root)
    ids = [c for c in columns if c.distinct == len(table) and _is(c, {"id", "uid", "key"}) and not c.missing]
    if ids:
        used["id"] = ids[0].name
    masks = [column for column in files[1:] if _is(column, MASKS)]
    if masks:
        fields["y"] = {"name": masks[0].name, "mode": "P"}
    calls = []
    for label in labels[:3] if labels and not masks else [None]:
        chosen = fields if label is None else {**fields, "y": _label(label)}
        for size in ({}, {"image_size": IMAGE_SIZE}) if files and files[0].kind == "image" else ({},):
            sources = _calls(path, chosen, {**used, **size}, columns, table)
            label_name = masks[0].name if masks else None if label is None else label.name
            title = _named(files) + ("" if label_name is None else f" with {label_name}")
            calls.append(Suggestion(title, sources, _notes(columns) if "all" in sources else ()))
    yield calls


def _is(column: ColumnReport, known: set[str]) -> bool:
    return any(word.lower() in known for word in words(column.name))


def _named(files: Sequence[ColumnReport]) -> str:
    names = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}
    return names[str(files[0].kind)] if files else "rows"


def _label_score(column: ColumnReport, rows: int) -> int:
    """How likely a column is what a network learns; 0 for none."""
    if column.kind not in ("class", "number") or column.distinct is None or column.distinct < 2:
        return 0
    if _is(column, LABELS):
        return 3
    if _is(column, OTHERS | GROUPS | _STAGE_COLUMNS) or column.distinct == rows:
        return 0
    return 2 if column.kind == "class" and column.distinct <= max(rows // 2, 2) else 0


def _label(column: ColumnReport) -> Given:
    return {"name": column.name, "null": "drop"} if column.missing else column.name


def _root(column: ColumnReport, table: Table, root: RootDirectory) -> dict[str, str]:
    """The folder of the files, where it is not that of the table."""
    first = str(table.first(column.name))
    if os.path.isabs(first):
        paths = [str(each) for each in table.array(column.name).unique().drop_null().to_pylist()]
        above = os.path.commonpath([os.path.dirname(each) for each in paths if os.path.isabs(each)])
        return {} if os.path.commonpath([above, root.root]) == root.root else {"root": above}
    if os.path.exists(os.path.join(root.root, first)):
        return {}
    with os.scandir(root.root) as entries:
        below = sorted(entry.path for entry in entries if entry.is_dir())[:MOST_FOLDERS]
    found = (
        each for each in [*below, os.path.dirname(root.root), os.getcwd()] if os.path.exists(os.path.join(each, first))
    )
    folder = next(found, None)
    return {} if folder is None else {"root": os.path.relpath(folder)}


def _calls(
    path: str | list[str],
    fields: Mapping[str, Given],
    options: Mapping[str, Any],
    columns: Sequence[ColumnReport],
    table: Table,
) -> dict[str, Call]:
    """One source; or one for each stage, if a column names them."""
    for column in columns:
        if column.kind == "class" and (_is(column, _STAGE_COLUMNS) or column.distinct in (2, 3)):
            values = [str(each) for each in table.array(column.name).unique().drop_null().to_pylist()]
            stages = {STAGES[each.lower()]: each for each in values if each.lower() in STAGES}
            if "train" in stages and len(stages) == len(values) > 1:
                return {
                    stage: Call(
                        "ManifestSource", path, fields, {**options, "filters": [[column.name, "==", stages[stage]]]}
                    )
                    for stage in ("train", "val", "test")
                    if stage in stages
                }
    return {"all": Call("ManifestSource", path, fields, options)}


def _notes(columns: Sequence[ColumnReport]) -> tuple[str, ...]:
    for column in columns:
        if _is(column, GROUPS) and column.distinct is not None and column.distinct > 1:
            call = f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{column.name}")'
            return (f"{call} keeps each {column.name} in one stage",)
    return ()
