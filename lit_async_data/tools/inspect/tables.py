"""The report on a table: what each column would be as a field, and the lines that read the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.manifest.fields.column import Column, kind_of, kind_of_path
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.table.arrow import arrow, is_number, is_text
from lit_async_data.sources.table.delimited import TextFormat
from lit_async_data.sources.table.reading import column_names, files_of
from lit_async_data.sources.table.table import Table
from lit_async_data.tools.call import Call, Given, literal
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import ColumnReport, Report, Suggestion, by_groups
from lit_async_data.tools.inspect.words import GROUPS, LABELS, MASKS, OTHERS, TRAINING, has_word

# Side of images that have no common size.
IMAGE_SIZE = 224
_EXAMPLES, _WIDTH = 3, 24
_FILES = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}


def table_report(path: str) -> Report:
    """The report on a file, a pattern of files, or a folder of them; the first is described."""
    arrow()
    files = files_of(path)
    report, options = Report("table", files, sum(map(os.path.getsize, files))), dict[str, str]()
    header = column_names(files[0])
    if len(header) == 1 and (found := [each for each in ",;\t|" if each in header[0]]):
        options["delimiter"] = found[0]
        header = column_names(files[0], TextFormat(found[0]))
    table = Table.of(files[0], [name for name in header if name], text_format=TextFormat(**options))
    root = RootDirectory(os.path.dirname(os.path.abspath(files[0])))
    report.columns, report.rows = [_column(table, name, root) for name in header if name], len(table)
    if data := [name for name in header if is_number(name) or kind_of_path(name)]:
        report.notes.append(
            f"the first line looks like data ({data[0]}), but it must name the columns: put a line of names before it, "
            "or give pandas.read_csv(…, names=[…])"
        )
        return report
    report.suggest(list(_Guesses(table, report.columns, root.root).suggestions(path, options)))
    if not report.suggestions and not report.notes:
        report.notes.append('no column looks like samples: name yours in fields={"x": COLUMN, "y": COLUMN}')
    return report


def sized_images(suggestion: Suggestion) -> Suggestion:
    """The suggestion for images that have no common size."""
    call, note = suggestion.call, f"images have several sizes: choose one instead of {IMAGE_SIZE}"
    sized = dataclasses.replace(call, options={**call.options, "image_size": IMAGE_SIZE})
    return dataclasses.replace(suggestion, call=sized, notes=(note, *suggestion.notes))


def _column(table: Table, name: str, root: RootDirectory) -> ColumnReport:
    array, distinct, why = table.array(name), None, ""
    kind: str | None = None
    with contextlib.suppress(arrow().ArrowException):  # lists have no such count
        distinct = int(arrow("compute").count_distinct(array).as_py())
    try:
        kind = kind_of("x", Column(name), table, root)
        if kind is None:
            first = table.first(name)
            is_class = isinstance(first, str) and not is_number(first)
            table.labels(name, kind=None if is_class else "number", null="drop")
            kind = "class" if is_class else "number"
    except AsyncDataError as error:
        why = str(error).removeprefix("fields.x.kind: ")
    shown = dict.fromkeys(str(each) for each in array.slice(0, 1000).drop_null().to_pylist())
    examples = tuple(each if len(each) <= _WIDTH else f"…{each[1 - _WIDTH :]}" for each in list(shown)[:_EXAMPLES])
    type_name = "text" if is_text(array.type) else str(array.type)
    return ColumnReport(name, type_name, kind, distinct, array.null_count, examples, why)


class _Guesses:
    """Which columns are likely paths, labels, ids and groups; from names, kinds and values."""

    def __init__(self, table: Table, columns: Sequence[ColumnReport], folder: str) -> None:
        self._table, self._columns, self._folder = table, columns, folder
        self._separators = {c.name: found for c in columns if (found := self._separator(c))}

    def suggestions(self, path: str, options: dict[str, Any]) -> Iterator[Suggestion]:
        """Alternatives, the likeliest first; none if nothing is likely."""
        files = [column for column in self._columns if column.kind in _FILES]
        labels = sorted((c for c in self._columns if self._score(c)), key=self._score, reverse=True)
        numbers = [c for c in self._columns if c.kind == "number" and c not in labels[:1]]
        features = [c.name for c in numbers if not has_word(c.name, f"{OTHERS}|{GROUPS}")]
        if not files and not features:
            return
        x: Given = features[0] if len(features) == 1 else features
        notes, what = self._notes(labels), "rows"
        if files:
            roots = self._roots(files[0])
            notes += [f"files lie in other folders, too: root={' or '.join(map(repr, roots[1:]))}"] if roots[1:] else []
            options |= {"root": roots[0]} if roots[0] else {}
            x, what = self._files(files[0], roots[0]), _FILES[str(files[0].kind)]
        ids = [c for c in self._columns if c.distinct == len(self._table) and has_word(c.name, "id|uid|key")]
        options |= {"id": ids[0].name} if ids and not ids[0].missing else {}
        masks = [column for column in files[1:] if has_word(column.name, MASKS)]
        targets: list[ColumnReport | None] = [*masks[:1], *labels[:3]]
        for y in targets or [None]:
            fields = {"x": x} if y is None else {"x": x, "y": self._target(y)}
            others = [literal(self._target(each)) for each in labels if y in labels and each is not y]
            more = [f"may be labels too: {', '.join(others)}"] if others else []
            title = what if y is None else f"{what} with {y.name}"
            suggestion = Suggestion(title, Call("ManifestSource", path, fields, options), (*notes, *more))
            yield suggestion
            if what == "images":
                yield sized_images(suggestion)

    def _values(self, column: ColumnReport) -> list[str]:
        return [str(each) for each in self._table.array(column.name).unique().drop_null().to_pylist()]

    def _separator(self, column: ColumnReport) -> str | None:
        """What separates several classes in a cell: it makes fewer classes than there are different cells."""
        cells = self._values(column) if column.kind == "class" else []
        for separator in "|;,":
            if len({part for cell in cells for part in cell.split(separator)}) < len(cells):
                return separator
        return None

    def _score(self, column: ColumnReport) -> int:
        """How likely a column is what a network learns; 0 for none."""
        if column.kind not in ("class", "number") or column.distinct is None or column.distinct < 2:
            return 0
        if has_word(column.name, LABELS):
            return 2
        other = has_word(column.name, f"{OTHERS}|{GROUPS}") or column.distinct == len(self._table)
        return int(not other and column.kind == "class" and column.distinct <= max(len(self._table) // 2, 2))

    def _target(self, column: ColumnReport) -> Given:
        options = {"separator": self._separators[column.name]} if column.name in self._separators else {}
        if column.kind in _FILES:
            options["mode"] = "P"
        elif column.missing:
            options["null"] = "zero" if options else "drop"
        return {"name": column.name, **options} if options else column.name

    def _roots(self, column: ColumnReport) -> list[str]:
        """The folders from which paths lead to files, as ``root``; empty for the folder of the table."""
        paths = self._values(column)
        if os.path.isabs(paths[0]):
            above = os.path.commonpath([os.path.dirname(each) for each in paths if os.path.isabs(each)])
            return ["" if os.path.commonpath([above, self._folder]) == self._folder else above]
        below = sorted(entry.path for entry in os.scandir(self._folder) if entry.is_dir())
        places = dict.fromkeys([self._folder, *below, os.path.dirname(self._folder), os.getcwd()])
        found = [p for p in places if all(os.path.exists(os.path.join(p, each)) for each in (paths[0], paths[-1]))]
        return ["" if each == self._folder else os.path.relpath(each) for each in found] or [""]

    def _files(self, column: ColumnReport, root: str) -> Given:
        """Files; of HDF5 files their rows, with the dataset that looks like samples in the first of them."""
        if column.kind != "hdf5":
            return column.name
        found, names = dict[str, Any](), {each.name for each in self._columns}
        rows = [c.name for c in self._columns if c.kind == "number" and has_word(c.name, "rows?|slice|index|idx|frame")]
        if rows and "row" not in names:
            found["row"] = rows[0]
        if "dataset" not in names:
            with contextlib.suppress(AsyncDataError):  # the source says what is wrong with a file
                first = os.path.join(root or self._folder, str(self._table.first(column.name)))
                for call in [each.call for each in hdf5_report([first]).suggestions[:1]]:
                    found["dataset"], layout = call.name_of("x"), call.options.get("layout", {})
                    found |= {"layout": layout["x"]} if "x" in layout else {}
        return {"name": column.name, **found} if found else column.name

    def _notes(self, labels: Sequence[ColumnReport]) -> list[str]:
        notes = by_groups([c.name for c in self._columns if has_word(c.name, GROUPS) and (c.distinct or 0) > 1])
        for column in self._columns:
            values = self._values(column) if column.distinct in (2, 3) and column not in labels[:1] else []
            training = [each for each in values if has_word(each, TRAINING)]
            notes += [f'filters=[["{column.name}", "==", "{each}"]] takes the rows for training' for each in training]
        return notes
