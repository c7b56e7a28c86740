"""The report on tables: what each column would be as a field, and the lines that read the rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.manifest.fields.column import Column, kind_of, kind_of_path
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.table.arrow import arrow, is_number, is_text
from lit_async_data.sources.manifest.table.delimited import TextFormat
from lit_async_data.sources.manifest.table.reading import column_names
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.tools.inspect.guesses import GROUPS, LABELS, MASKS, OTHERS
from lit_async_data.tools.inspect.hdf5_files import hdf5_report, path_of
from lit_async_data.tools.inspect.report import ColumnReport, Report
from lit_async_data.tools.inspect.scopes import STAGES, has_word
from lit_async_data.tools.inspect.verified import first_that_works
from lit_async_data.tools.suggestion import Call, Given, Suggestion

# Side of images that have no common size.
IMAGE_SIZE = 224
_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 24
_STAGE_COLUMNS, _ROWS = "split|stage|set|subset|phase|partition|usage", "rows?|slice|index|idx|frame"
_NAMES = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}


def table_report(paths: Sequence[str]) -> Report:
    """Inspect tables: the first that can be read is described.

    Raises:
        AsyncDataError: No file can be read; the error of the first.
    """
    arrow()  # raises if it is missing
    names: dict[str, list[str]] = {}
    errors: dict[str, AsyncDataError] = {}
    for path in paths:
        try:
            names[path] = column_names(path, _format(path))
        except AsyncDataError as error:
            errors[path] = error
    if not names:
        raise next(iter(errors.values()))
    first, header = next(iter(names.items()))
    table = Table.of(first, [name for name in header if name], text_format=_format(first))
    guesses = _Guesses(table, header, path_of(list(names)), _format(first))
    report = Report(
        "table",
        [{"path": path, "bytes": os.path.getsize(path)} for path in names],
        columns=guesses.columns,
        rows=len(table),
        unreadable={path: " ".join(str(error).split()) for path, error in errors.items()},
    )
    if data := [name for name in header if is_number(name) or kind_of_path(name)]:
        report.notes.append(
            f"the first line looks like data ({data[0]}), but it must name the columns: put a line of names before it, "
            "or give pandas.read_csv(…, names=[…])"
        )
        return report
    works = first_that_works(list(guesses.suggestions()))
    if isinstance(works, str):
        report.notes.append(works or 'no column looks like samples: name yours in fields={"x": COLUMN, "y": COLUMN}')
    else:
        report.suggestions.append(works)
    return report


def _format(path: str) -> TextFormat:
    """The delimiter, if the first line has one of another kind."""
    if not path.lower().removesuffix(".gz").endswith((".csv", ".tsv")):
        return TextFormat()
    names = column_names(path)
    return TextFormat(next((each for each in ",;\t|" if len(names) == 1 and each in names[0]), None))


def _shown(value: object) -> str:
    """A value, shortened: a path loses its beginning, which is the same in all rows."""
    text, most = str(value), _EXAMPLE_CHARACTERS
    return text if len(text) <= most else f"…{text[1 - most :]}" if "/" in text else f"{text[: most - 1]}…"


class _Guesses:
    """Which columns are likely paths, labels, stages, ids and groups; from names, kinds and values."""

    def __init__(self, table: Table, header: Sequence[str], path: str | list[str], text_format: TextFormat) -> None:
        first = path if isinstance(path, str) else path[0]
        self._table, self._path = table, path
        self._root = RootDirectory(os.path.dirname(os.path.abspath(first)))
        self._options = {} if text_format.delimiter is None else {"delimiter": text_format.delimiter}
        self.columns = [self._column(name) for name in header if name]
        self._separators = {c.name: found for c in self.columns if (found := self._separator(c))}

    def _column(self, name: str) -> ColumnReport:
        array, distinct, why = self._table.array(name), None, ""
        kind: str | None = None
        with contextlib.suppress(arrow().ArrowException):  # lists have no such count
            distinct = int(arrow("compute").count_distinct(array).as_py())
        try:
            kind = kind_of("x", Column(name), self._table, self._root)
            if kind is None:
                first = self._table.first(name)
                is_class = isinstance(first, str) and not is_number(first)
                self._table.labels(name, kind=None if is_class else "number")
                kind = "class" if is_class else "number"
        except AsyncDataError as error:
            why = str(error).removeprefix("fields.x.kind: ")
        shown = dict.fromkeys(_shown(value) for value in array.slice(0, 1000).drop_null().to_pylist())
        type_name = "text" if is_text(array.type) else str(array.type)
        return ColumnReport(name, type_name, kind, distinct, array.null_count, tuple(shown)[:_EXAMPLES], why)

    def suggestions(self) -> Iterator[Suggestion]:
        """Alternatives, the likeliest first; none if nothing is likely."""
        files = [column for column in self.columns if column.kind in _NAMES]
        labels = sorted((c for c in self.columns if self._score(c)), key=self._score, reverse=True)
        others = f"{OTHERS}|{GROUPS}"
        numbers = [c for c in self.columns if c.kind == "number" and c not in labels[:1]]
        features = [c.name for c in numbers if not has_word(c.name, others)]
        if not files and not features:
            return
        options: dict[str, Any] = self._options | (self._root_option(files[0]) if files else {})
        x: Given = features[0] if len(features) == 1 else features
        if files:
            x = self._hdf5(files[0], options) if files[0].kind == "hdf5" else files[0].name
        ids = [c for c in self.columns if c.distinct == len(self._table) and has_word(c.name, "id|uid|key")]
        options |= {"id": ids[0].name} if ids and not ids[0].missing else {}
        masks = [column for column in files[1:] if has_word(column.name, MASKS)]
        chosen: list[ColumnReport | None] = [*(masks[:1] or labels[:3])]
        what = _NAMES[str(files[0].kind)] if files else "rows"
        for label in chosen or [None]:
            fields = {"x": x} if label is None else {"x": x, "y": self._label(label, mask=bool(masks))}
            for size in ({}, {"image_size": IMAGE_SIZE}) if what == "images" else ({},):
                calls = self._calls(fields, options | size)
                notes = [f"images have several sizes: choose one instead of {IMAGE_SIZE}"] if size else []
                notes += self._notes(label, labels, one="all" in calls)
                yield Suggestion(f"{what} with {label.name}" if label else what, calls, tuple(notes))

    def _values(self, column: ColumnReport) -> list[str]:
        return [str(each) for each in self._table.array(column.name).unique().drop_null().to_pylist()]

    def _separator(self, column: ColumnReport) -> str | None:
        """What separates several classes in a cell: it makes no more classes than there are different cells."""
        cells = self._values(column) if column.kind == "class" else []
        for separator in "|;,":
            classes = {part for cell in cells for part in cell.split(separator)}
            if sum(separator in cell for cell in cells) > 1 and len(classes) <= len(cells):
                return separator
        return None

    def _score(self, column: ColumnReport) -> int:
        """How likely a column is what a network learns; 0 for none."""
        if column.kind not in ("class", "number") or column.distinct is None or column.distinct < 2:
            return 0
        if has_word(column.name, LABELS):
            return 2
        other = has_word(column.name, f"{OTHERS}|{GROUPS}|{_STAGE_COLUMNS}") or column.distinct == len(self._table)
        return int(not other and column.kind == "class" and column.distinct <= max(len(self._table) // 2, 2))

    def _label(self, column: ColumnReport, *, mask: bool) -> Given:
        options = {"mode": "P"} if mask else {"null": "drop"} if column.missing else {}
        if column.name in self._separators:
            options["separator"] = self._separators[column.name]
        return {"name": column.name, **options} if options else column.name

    def _root_option(self, column: ColumnReport) -> dict[str, str]:
        """The folder of the files, where it is not that of the table."""
        first, root = str(self._table.first(column.name)), self._root.root
        if os.path.isabs(first):
            above = os.path.commonpath([os.path.dirname(each) for each in self._values(column) if os.path.isabs(each)])
            return {} if os.path.commonpath([above, root]) == root else {"root": above}
        below = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
        places = [root, *below, os.path.dirname(root), os.getcwd()]
        folder = next((each for each in places if os.path.exists(os.path.join(each, first))), root)
        return {} if folder == root else {"root": os.path.relpath(folder)}

    def _hdf5(self, column: ColumnReport, options: Mapping[str, Any]) -> Given:
        """Rows of HDF5 files, with the dataset that looks like samples in the first of them."""
        found, names = dict[str, Any](), {each.name for each in self.columns}
        rows = [each.name for each in self.columns if each.kind == "number" and has_word(each.name, _ROWS)]
        if rows and "row" not in names:
            found["row"] = rows[0]
        first = os.path.join(options.get("root", self._root.root), str(self._table.first(column.name)))
        with contextlib.suppress(AsyncDataError):  # the source says what is wrong with a file
            suggestions = hdf5_report([first]).suggestions if "dataset" not in names else []
            for call in [call for each in suggestions[:1] for call in each.calls.values() if "x" in call.fields]:
                given, layout = call.fields["x"], call.options.get("layout", {})
                found["dataset"] = given.name if isinstance(given, Field) else given
                found |= {"layout": layout["x"]} if "x" in layout else {}
        return {"name": column.name, **found} if found else column.name

    def _calls(self, fields: Mapping[str, Given], options: Mapping[str, Any]) -> dict[str, Call]:
        """One source; or one for each stage, if a column names them."""
        for column in self.columns:
            if column.kind == "class" and (has_word(column.name, _STAGE_COLUMNS) or column.distinct in (2, 3)):
                values = self._values(column)
                stages = {STAGES[each.lower()]: each for each in values if each.lower() in STAGES}
                if "train" in stages and len(stages) == len(values) > 1:
                    filters = {stage: [[column.name, "==", stages[stage]]] for stage in stages}
                    return {
                        stage: Call("ManifestSource", self._path, fields, {**options, "filters": filters[stage]})
                        for stage in ("train", "val", "test")
                        if stage in stages
                    }
        return {"all": Call("ManifestSource", self._path, fields, options)}

    def _notes(self, label: ColumnReport | None, labels: Sequence[ColumnReport], *, one: bool) -> Iterator[str]:
        groups = [c.name for c in self.columns if has_word(c.name, GROUPS) and (c.distinct or 0) > 1]
        for group in groups[:one]:
            yield f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{group}") keeps each {group} in one stage'
        others = {c.name: c.name for c in labels if c != label and label in labels}
        others |= {
            name: f'{{"name": "{name}", "separator": "{separator}"}}, which makes a vector of 0 and 1'
            for name, separator in self._separators.items()
            if label is None or label.name != name
        }
        if others:
            yield f"may be labels too: {'; '.join(others.values())}"
