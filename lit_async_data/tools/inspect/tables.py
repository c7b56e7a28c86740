"""The report on a table: what each column would be as a field, and the lines that read its rows or label files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.manifest.fields.column import Column, kind_of, kind_of_path
from lit_async_data.sources.manifest.fields.fields import labels_of
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.table.arrow import arrow, is_number, is_text
from lit_async_data.sources.table.delimited import TextFormat
from lit_async_data.sources.table.reading import column_names, files_of
from lit_async_data.sources.table.table import Table
from lit_async_data.tools.call import Call, Given, literal, named
from lit_async_data.tools.inspect.hdf5_files import hdf5_report
from lit_async_data.tools.inspect.report import ColumnReport, Report, Suggestion, by_groups
from lit_async_data.tools.inspect.words import GROUPS, LABELS, MASKS, OTHERS, TRAINING, has_word

# Side of images that have no common size; the most folds that are listed.
IMAGE_SIZE, MOST_FOLDS = 224, 20
_EXAMPLES, _WIDTH = 3, 24
_FILES = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}


def table_report(path: str) -> Report:
    """The report on a file, a pattern of files, or a folder of them; the first is described."""
    guesses = _Guesses(path)
    size, rows = sum(map(os.path.getsize, guesses.files)), len(guesses.table)
    report = Report("table", guesses.files, size, columns=guesses.columns, rows=rows)
    if data := [each.name for each in guesses.columns if is_number(each.name) or kind_of_path(each.name)]:
        report.notes.append(
            f"the first line looks like data ({data[0]}), but it must name the columns: put a line of names before it, "
            "or give pandas.read_csv(…, names=[…])"
        )
    else:
        report.suggest(guesses.suggestions(path))
    if not report.suggestions and not report.notes:
        report.notes.append('no column looks like samples: name yours in fields={"x": COLUMN, "y": COLUMN}')
    return report


def sized_images(suggestion: Suggestion) -> Suggestion:
    call, note = suggestion.call, f"images have several sizes: choose one instead of {IMAGE_SIZE}"
    sized = dataclasses.replace(call, options={**call.options, "image_size": IMAGE_SIZE})
    return dataclasses.replace(suggestion, call=sized, notes=(note, *suggestion.notes))


def _column(table: Table, name: str, root: RootDirectory) -> ColumnReport:
    array, distinct, why = table.array(name), None, ""
    with contextlib.suppress(arrow().ArrowException):  # lists have no such count
        distinct = int(arrow("compute").count_distinct(array).as_py())
    kind: str | None = None
    try:
        kind = kind_of("x", Column(name), table, root)
        if kind is None:
            kind = "class" if labels_of(Column(name, null="drop"), table).classes else "number"
    except AsyncDataError as error:
        why = error.message
    shown = dict.fromkeys(str(each) for each in array.slice(0, 1000).drop_null().to_pylist())
    examples = tuple(each if len(each) <= _WIDTH else f"…{each[1 - _WIDTH :]}" for each in list(shown)[:_EXAMPLES])
    type_name = "text" if is_text(array.type) else str(array.type)
    return ColumnReport(name, type_name, kind, distinct, array.null_count, examples, why)


class _Guesses:
    """Which columns of a table are likely paths, labels, ids and groups; from names, kinds and values."""

    def __init__(self, path: str) -> None:
        self.files, self._options = files_of(path), dict[str, Any]()
        first, names = self.files[0], column_names(self.files[0])
        if len(names) == 1 and (found := [each for each in ",;\t|" if each in names[0]]):
            self._options["delimiter"] = found[0]
            names = column_names(first, TextFormat(found[0]))
        self.table = Table.of(first, [name for name in names if name], text_format=TextFormat(**self._options))
        self._folder = os.path.dirname(os.path.abspath(first))
        self.columns = [_column(self.table, name, RootDirectory(self._folder)) for name in self.table.names]
        self.others = [c.name for c in self.columns if has_word(c.name, f"{OTHERS}|{GROUPS}")]
        #: Columns with names of labels, then others of few classes.
        known = [c for c in self.columns if c.kind in ("class", "number") and (c.distinct or 0) > 1]
        self.labels = [c for c in known if has_word(c.name, LABELS)]
        few = min(max(len(self.table) // 2, 2), len(self.table) - 1)
        classes = [c for c in known if c.kind == "class" and c.name not in self.others and (c.distinct or 0) <= few]
        self.labels += [c for c in classes if c not in self.labels]

    def suggestions(self, path: str) -> list[Suggestion]:
        """Alternatives, the likeliest first; none if nothing is likely."""
        files = [column for column in self.columns if column.kind in _FILES]
        numbers = [c.name for c in self.columns if c.kind == "number" and c not in self.labels[:1]]
        features, found = [name for name in numbers if name not in self.others], list[Suggestion]()
        if not files and not features:
            return []
        x: Given = features[0] if len(features) == 1 else features
        options, notes, what = dict(self._options), self.notes(), "rows"
        if files:
            root, *others = self._roots(files[0])
            notes += [f"files lie in other folders, too: root={' or '.join(map(repr, others))}"] if others else []
            options |= {"root": root} if root else {}
            x, what = self._of_files(files[0], root), _FILES[str(files[0].kind)]
        ids = [c for c in self.columns if c.distinct == len(self.table) and has_word(c.name, "id|uid|key")]
        options |= {"id": ids[0].name} if ids and not ids[0].missing else {}
        masks = [column for column in files[1:] if has_word(column.name, MASKS)]
        targets: list[ColumnReport | None] = [*masks[:1], *self.labels[:3]]
        for y in targets or [None]:
            fields, title = ({"x": x}, what) if y is None else ({"x": x, "y": self.target(y)}, f"{what} with {y.name}")
            found.append(Suggestion(title, Call("ManifestSource", path, fields, options), tuple(notes)))
            found += [sized_images(found[-1])] if what == "images" else []
        return found

    def values(self, column: ColumnReport) -> list[Any]:
        return list(self.table.array(column.name).unique().drop_null().to_pylist())

    def target(self, column: ColumnReport) -> Given:
        if column.kind in _FILES:
            return {"name": column.name, "mode": "P"}
        cells = self.values(column) if column.kind == "class" else []
        # Several classes in a cell are fewer than there are different cells.
        joined = [sep for sep in "|;," if len({part for cell in cells for part in cell.split(sep)}) < len(cells)]
        options = {"separator": joined[0]} if joined else {}
        if column.missing:
            options["null"] = "zero" if joined else "drop"
        return named(column.name, options)

    def _roots(self, column: ColumnReport) -> list[str]:
        """The folders from which paths lead to files, as ``root``; empty for the folder of the table."""
        paths = self.values(column)
        if os.path.isabs(paths[0]):
            above = os.path.commonpath([os.path.dirname(each) for each in paths if os.path.isabs(each)])
            return ["" if os.path.commonpath([above, self._folder]) == self._folder else above]
        below = sorted(entry.path for entry in os.scandir(self._folder) if entry.is_dir())
        places = dict.fromkeys([self._folder, *below, os.path.dirname(self._folder), os.getcwd()])
        found = [p for p in places if all(os.path.exists(os.path.join(p, each)) for each in (paths[0], paths[-1]))]
        return ["" if each == self._folder else os.path.relpath(each) for each in found] or [""]

    def _of_files(self, column: ColumnReport, root: str) -> Given:
        """Files; of HDF5 files their rows, with the dataset that looks like samples in the first of them."""
        if column.kind != "hdf5":
            return column.name
        names = self.table.names
        rows = [c.name for c in self.columns if c.kind == "number" and has_word(c.name, "rows?|slice|index|idx|frame")]
        found: dict[str, Any] = {"row": rows[0]} if rows and "row" not in names else {}
        if "dataset" not in names:
            with contextlib.suppress(AsyncDataError):  # the source says what is wrong with a file
                first = os.path.join(root or self._folder, str(self.table.first(column.name)))
                for call in [each.call for each in hdf5_report([first]).suggestions[:1]]:
                    found["dataset"], layout = call.name_of("x"), call.options.get("layout", {})
                    found |= {"layout": layout["x"]} if "x" in layout else {}
        return named(column.name, found)

    def notes(self) -> list[str]:
        """What keeps samples together; and what the stages of samples are in."""
        notes = by_groups([c.name for c in self.columns if has_word(c.name, GROUPS) and (c.distinct or 0) > 1])
        for column in [each for each in self.columns if each not in self.labels[:1]]:
            values = sorted(self.values(column)) if 1 < (column.distinct or 0) <= MOST_FOLDS else []
            if any(has_word(str(each), TRAINING) for each in values):
                notes.append(f'split(source, by="{column.name}") has the sides that it names: {", ".join(values)}')
            elif values and has_word(column.name, "folds?"):
                sides = literal({"train": values[:-1], "val": values[-1:]})
                notes.append(f'split(source, {sides}, by="{column.name}") leaves one fold for validation')
        return notes


def labelled(report: Report, tables: Sequence[str]) -> None:
    """Put first what a table, given or beside several HDF5 files, labels, if it has a row for each file."""
    names, found = {Path(path).stem for path in report.files}, Report("HDF5", report.files)
    candidates, beside = list[Suggestion](), Path(report.files[0]).parent.glob("*.csv") if len(names) > 1 else ()
    for path, call in itertools.product(tables or map(str, beside), [each.call for each in report.suggestions[:1]]):
        with contextlib.suppress(*(() if tables else (AsyncDataError,))):
            guesses = _Guesses(path)
            options = {name: value for name, value in call.options.items() if name != "layout"} | {"table": path}
            options |= {"layout": {"x": letters}} if (letters := call.options.get("layout", {}).get("x")) else {}
            known = {
                c.name: {Path(str(each)).stem for each in guesses.values(c)} for c in guesses.columns if c.distinct
            }
            for name, y in itertools.product([name for name in known if names <= known[name]], guesses.labels):
                options["on"] = "file" if name == "file" else {name: "file"}
                joined = Call(call.source, call.path, {"x": call.fields["x"], "y": guesses.target(y)}, dict(options))
                candidates.append(Suggestion(f"labels of {path}: {y.name}", joined, tuple(guesses.notes())))
    found.suggest(candidates)
    report.suggestions[:0] = found.suggestions
    if tables and not found.suggestions:
        none = f"no column of {tables[0]} has the names of all files, beside one that looks like labels"
        report.notes.append((found.notes or [none])[0])
