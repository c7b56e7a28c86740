"""Shows what HDF5 files, tables and folders hold, how each dataset is read, and the lines that read them.

  python -m lit_async_data inspect scans/*.h5
  python -m lit_async_data inspect birds.csv --json
  python -m lit_async_data inspect birds.csv --check-all

Several files are parts of one dataset: the first is described. --check-all reads every sample, lists those that cannot
be read, and ends with exit status 1 if there are any. The options from --fields on describe the source that it reads;
without --fields, it is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.schema.categories import PACKING
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.sources.local_files import expanded, files_matching, is_pattern
from lit_async_data.sources.manifest.columns import Column, kind_of, kind_of_path
from lit_async_data.sources.manifest.fields import labels_of
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import TextFormat, arrow, is_number, is_text
from lit_async_data.sources.table.table import Table, column_names, files_of
from lit_async_data.tools import contents
from lit_async_data.tools.call import ARGUMENTS, Call, Given, add_source_arguments, given_source, source_of
from lit_async_data.tools.check_all import check_all
from lit_async_data.tools.contents import PLAIN, ColumnReport, Dataset, Report, Scope, Suggestion, has_word
from lit_async_data.tools.terminal import as_json

# Of one file: datasets that are looked at; and those that are described, where groups of equal structure count once.
MOST_DATASETS, MOST_DESCRIBED = 20_000, 500
LABELS, MASKS = "y|labels?|targets?|class(es)?|actions?|gt|truth|true", "masks?|segmentations?"
# Kinds of datasets of numbers that stand for names, or beside a mask.
CODED = ("categorical", "nullable")
# Groups that hold neither inputs nor labels: origins of packed samples, and names of classes (AnnData).
_NEVER = "origin|__categories"
# Axes of a grid in space: along one, there are no samples.
_SPACE = "lat|latitude|lon|longitude|x|y|z|level"
# A recording without labels lies across if it has this many times as many columns as rows.
ACROSS = 64
_SWAPPED = "look at the colours of x: if red is blue, its RGB was encoded as BGR, and channels: BGR is missing"
_BY_LENGTH = "samples have different lengths: batch_by=x (loader.batch_by=x) puts those of like length together"
_MISSING = 'rows without a value of y are left out; null="ignore" keeps them, as -100'
# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32
# Side of images that have no common size.
IMAGE_SIZE = 224
_EXAMPLES, _WIDTH = 3, 24
_FILES = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}
# Names of columns that are neither inputs nor labels.
_OTHERS = "ids?|uid|index|split|fold|stage|set|subset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "HDF5 files (also NetCDF, AnnData, MATLAB v7.3), a table (CSV, Parquet, JSON lines), or a folder of classes"
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{kinds}; or a pattern")
    parser.add_argument("--json", action="store_true", help="print values for programs; docs/tools/inspect.md has them")
    parser.add_argument("--check-all", action="store_true", help="read every sample, and list the bad ones")
    parser.add_argument("--bad-list", default="bad_samples.csv", metavar="PATH", help="the list (bad_samples.csv)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.check_all:
        return check_all(given_call(arguments.files, arguments), arguments.bad_list)
    if option := next((name.replace("_", "-") for name in ARGUMENTS if getattr(arguments, name) is not None), ""):
        raise ConfigError(f"describes what --check-all reads; add --check-all, or leave --{option} out", option)
    report = report_on(arguments.files)
    sys.stdout.write(as_json(report.as_dict(), str) if arguments.json else contents.text_of(report))
    return 0


def given_call(paths: Sequence[str], arguments: argparse.Namespace) -> Call:
    """Without ``--fields``, the source that ``inspect`` suggests."""
    call = given_source(paths, arguments)
    if call.fields:
        return call
    found = report_on(paths).suggestions
    if not found:
        why = f"python -m lit_async_data inspect {shlex.quote(paths[0])} says why; name them: --fields x=NAME y=NAME"
        raise ConfigError(f"nothing in {paths[0]} looks like samples; {why}", "fields")
    return dataclasses.replace(found[0].call, options={**found[0].call.options, **call.options})


def report_on(given: Sequence[str]) -> Report:
    paths = list(map(expanded, given))
    source = source_of(paths)
    if source in ("ManifestSource", "HDF5Source"):
        return hdf5_report(paths) if source == "HDF5Source" else table_report(paths[0])
    report, folders = Report("folder", paths), Suggestion("a folder for each class", Call(source, paths[0]))
    report.suggest([folders, sized_images(folders)])
    if not report.suggestions:
        raise ConfigError(report.notes[0])
    return report


def hdf5_report(given: Sequence[str]) -> Report:
    matched = [files_matching(each) if is_pattern(each) else [each] for each in given]
    paths = contents.of_training(dict.fromkeys(itertools.chain.from_iterable(matched)))
    first, report = paths[0], Report("HDF5", paths)
    with as_source_errors(first, "cannot be read", file=first), open_h5py(first) as file:
        nodes = list(itertools.islice(contents.datasets_of(file["/"], set()), MOST_DATASETS))
        for scope in contents.scopes_of(nodes):
            group = OpenGroup(file, first, scope.first, IndexCache(None), allow_external=False)
            scope.paths, scope.attributes = paths, list(file[scope.first].attrs)
            if len(scope.nodes) > MOST_DESCRIBED:
                report.notes.append(f"only the first {MOST_DESCRIBED} of {len(scope.nodes):,} datasets are shown")
                del scope.nodes[MOST_DESCRIBED:]
            for node in scope.nodes:
                contents.describe(group, node)
            report.suggest(suggestions(scope, report.notes))
            report.groups += [{"name": scope.group, "count": scope.count}] if scope.group else []
            report.datasets += scope.nodes
    report.bytes = sum(map(os.path.getsize, paths))
    if not report.suggestions and not report.notes:
        report.notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    if len(nodes) == MOST_DATASETS:
        report.notes.append(f"no more than the first {MOST_DATASETS:,} datasets are looked at")
    return report


def suggestions(scope: Scope, notes: list[str]) -> list[Suggestion]:
    """The likeliest first; a note says why there is none."""
    known = [n for n in scope.nodes if n.reading and n.kind != "scale" and not has_word(n.name, _NEVER, whole=True)]
    each, found = [n for n in known if n.each and not scope.group], list[Suggestion]()
    labels = [n.each for n in each if has_word(n.name, LABELS, whole=True)]
    for x in sorted((n for n in each if n.each not in labels), key=_score, reverse=True):
        plain = [None] if "*" in x.field and (x.decoding or x.varies or len(x.shape) > 1) else []
        found += _whole(scope, "dataset", x, x.each, [*_attributes(x.attributes), *labels, *plain])
    labelled = [one for one in found if "y" in one.call.fields]
    rows = _of_rows(scope, [n for n in known if "*" not in n.field], [] if found else notes)
    return [*labelled, *rows, *(one for one in found if one not in labelled)]


def _whole(scope: Scope, of: str, x: Dataset, name: str, labels: Sequence[Given | None]) -> Iterator[Suggestion]:
    letters = None if x.decoding or x.varies else layout_of((1, *x.shape), 0)
    options = {"sample": "dataset" if of == "dataset" else "group", "layout": {"x": letters[1:]} if letters else {}}
    notes = [_SWAPPED] if x.decoding else [_BY_LENGTH] * x.varies
    for y in labels:
        yield _suggestion(scope, f"one {of} per sample: {name}", named(name, x.decoding), y, notes, **options)


def _of_rows(scope: Scope, known: Sequence[Dataset], notes: list[str]) -> Iterator[Suggestion]:
    training = contents.of_training(node.name for node in known)
    nodes = [node for node in known if node.name in training]
    inputs = [n for n in nodes if n.dtype.kind in "biufc" and not has_word(n.axis, _SPACE)]
    inputs = [n for n in inputs if not (n.kind in CODED or (n.kind in PLAIN and n.flat))]
    inputs.sort(key=_score, reverse=True)
    if not inputs:
        return
    labels = [n for n in nodes if n.kind == CODED[0] or (n.kind in PLAIN + CODED and has_word(n.name, LABELS))]
    labels = [n for n in labels if n.dtype.kind in "biuf" and 0 < len(n.shape) < 3]
    labels.sort(key=lambda n: (not has_word(n.name, LABELS), not n.flat))
    x = next((n for n in inputs if any(_axis(n, label) is not None for label in labels)), inputs[0])
    square = len(x.shape) > 1 and x.shape[0] == x.shape[1] and not x.kind  # one image, unless each row has a label
    labels = [n for n in labels if _axis(x, n) is not None and not (square and n.shape == x.shape[:2])][:4]
    several = max(scope.count, len(scope.paths)) > 1
    h, w, c = x.shape if len(x.shape) == 3 else (9, 1, 0)
    image = c in (3, 4) and max(h, w) <= 4 * min(h, w) and x.dtype.kind == "u" and not x.axis
    image = image or x.one_image or (square and not x.axis)
    alone: list[Given] = [n.field for n in scope.nodes if not n.shape and has_word(n.name, LABELS)]
    alone += _attributes(scope.attributes)
    alike = [n for n in scope.nodes if n.shape == x.shape and re.sub(r"\d", "", n.name) == re.sub(r"\d", "", x.name)]
    if not labels and (len(alike) > 2 or (image and not several)):
        many = 'sample="dataset", or sample="group" with group=, takes many by a name with a * for what differs'
        what = f"{x.field} of shape {x.shape} may be one sample"
        notes.append(f"{what}: {many}; Field(NAME, decode='image') decodes images")
    elif not labels and several and (image or alone):
        yield from _whole(scope, "group" if scope.group else "file", x, x.field, [*alone, None])
    else:
        masks = [n for n in inputs if n is not x and len(x.shape) > 2 and n.shape[:3] == x.shape[:3]]
        masks = [n for n in masks if has_word(n.name, f"{MASKS}|{LABELS}") and n.dtype.kind in "biuf"]
        for y in [*labels, *masks[:1], None]:
            yield _row_by_row(scope, x, y)
            if y is not None and y.kind in CODED:
                yield _row_by_row(scope, x, y, null="drop")


def _row_by_row(scope: Scope, x: Dataset, y: Dataset | None, null: str = "") -> Suggestion:
    in_time = y is None and not x.kind and not x.axis and len(x.shape) < 3
    title, layout = x.field, dict[str, str]()
    axis = int(in_time and len(x.shape) == 2 and x.shape[1] >= ACROSS * x.shape[0])
    packed = {"mask_and_scale": True} if set(PACKING[:3]) & set(x.attributes) else {}
    label: Given | None = None
    if y is not None:
        title, axis = f"{x.field} with {y.field}", (_axis(x, y) or 0) if len(y.shape) < 3 else 0
        label = named(y.field, {"column": 0} if len(y.shape) == 2 and y.flat else {"null": null} if null else {})
        layout |= {"y": "CN"} if len(y.shape) == 2 and y.flat and y.shape[0] == 1 else {}
    if letters := None if x.kind else layout_of(x.shape, axis):
        layout["x"] = letters
        layout |= {"y": letters} if y is not None and len(y.shape) == len(x.shape) > 2 else {}
    notes = [_SWAPPED] if x.decoding else [_BY_LENGTH] * (x.kind == "variable")
    notes += [_MISSING] * bool(null)
    return _suggestion(scope, title, named(x.field, x.decoding or packed), label, notes, layout=layout)


def _suggestion(scope: Scope, title: str, x: Given, y: Given | None, notes: list[str], **options: Any) -> Suggestion:
    fields = {"x": x} if y is None else {"x": x, "y": y}
    parts = "" if "sample" in options else "group" if scope.group else "file" if len(scope.paths) > 1 else ""
    split = f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{parts}") keeps each {parts} in one stage'
    options = {name: value for name, value in {"group": scope.group, **options}.items() if value}
    call = Call("HDF5Source", _path_of(scope.paths), fields, options)
    return Suggestion(title, call, (*notes, *[split] * bool(parts)))


def named(name: str, options: Mapping[str, Any]) -> Given:
    return {"name": name, **options} if options else name


def name_of(given: Given) -> str:
    return str(given["name"] if isinstance(given, Mapping) else given)


def _attributes(names: Sequence[str]) -> list[Given]:
    return [{"attr": name} for name in names if has_word(name, LABELS)]


def _score(node: Dataset) -> float:
    """The largest dataset, unless its name is that of a label."""
    nbytes = math.prod((*node.shape[:1], *node.decoding["image_size"])) if node.decoding else node.bytes
    return math.log10(nbytes + 1) - 3 * has_word(node.name, f"{MASKS}|{LABELS}") - 0.5 * node.name.count("/")


def _axis(x: Dataset, label: Dataset) -> int | None:
    """The axis that counts the samples of a label: the first, else the last."""
    count = max(label.shape) if label.flat else label.shape[0]
    places = () if x.one_image else (0,) if x.kind else (0, len(x.shape) - 1)
    return next((axis for axis in places if x.shape[axis] == count and x is not label), None)


def layout_of(shape: Sequence[int], axis: int) -> str | None:
    """The layout to give a source, whose samples an axis counts; None if it needs none."""
    rest, places = [n for place, n in enumerate(shape) if place != axis], list[int]()
    for place in (len(rest) - 1, 0) if len(rest) > 1 else ():
        n, least = rest[place], min(rest[:place] + rest[place + 1 :])
        if (n <= FEW and len(rest) > 2 and n <= least) or (n <= MOST_CHANNELS and 4 * n <= least):
            places.append(place)
    channel = min(places, key=rest.__getitem__, default=None)
    others = len(rest) - (channel is not None)
    if others > 3 or (axis == 0 and channel is None):
        return None
    letters = "DHW"[3 - others :] if len(rest) > 1 else "C"
    if channel is not None:
        letters = f"{letters[:channel]}C{letters[channel:]}"
    return f"{letters[:axis]}N{letters[axis:]}"


def _path_of(paths: Sequence[str]) -> str | list[str]:
    """The file, a pattern that matches these files and no others, or else a list."""
    begin, end = contents.common_start(paths), os.path.splitext(paths[0])[1]
    folder = os.path.join(glob.escape(os.path.dirname(begin)), "")
    patterns = f"{folder}*{end}", f"{glob.escape(begin)}*{end}", f"{folder}**/*{end}"
    fitting = (p for p in patterns if sorted(filter(os.path.isfile, glob.glob(p, recursive=True))) == sorted(paths))
    return paths[0] if len(paths) == 1 else next(fitting, list(paths))


def table_report(path: str) -> Report:
    given = _Columns(path)
    size, rows = sum(map(os.path.getsize, given.files)), len(given.table)
    report = Report("table", given.files, size, columns=given.columns, rows=rows)
    if data := [each.name for each in given.columns if is_number(each.name) or kind_of_path(each.name)]:
        what = f"the first line looks like data ({data[0]}), but it must name the columns"
        report.notes.append(f"{what}: put a line of names before it, or give pandas.read_csv(…, names=[…])")
    else:
        report.suggest(given.suggestions(path))
    if not report.suggestions and not report.notes:
        report.notes.append('no column looks like samples: name yours in fields={"x": COLUMN, "y": COLUMN}')
    return report


def sized_images(suggestion: Suggestion) -> Suggestion:
    call, note = suggestion.call, f"images have several sizes: choose one instead of {IMAGE_SIZE}"
    sized = dataclasses.replace(call, options={**call.options, "image_size": IMAGE_SIZE})
    return dataclasses.replace(suggestion, call=sized, notes=(note, *suggestion.notes))


def _column(table: Table, name: str, root: RootDirectory) -> ColumnReport:
    array, distinct, why = table.array(name), None, ""
    # Neither lists nor bytes have such a count.
    with contextlib.suppress(arrow().ArrowException, TypeError):
        distinct = int(arrow("compute").count_distinct(array).as_py())
    kind: str | None = None
    try:
        kind = kind_of("x", Column(name), table, root)
        if kind is None:
            kind = "class" if labels_of(Column(name, null="drop"), table).classes else "number"
    except AsyncDataError as error:
        why = error.message
    listed = [] if isinstance(array, EmbeddedFiles) else array.slice(0, 1000).drop_null().to_pylist()
    shown = dict.fromkeys(map(str, listed))
    examples = tuple(each if len(each) <= _WIDTH else f"…{each[1 - _WIDTH :]}" for each in list(shown)[:_EXAMPLES])
    of = "text" if is_text(array.type) else str(array.type)
    return ColumnReport(name, of, kind, distinct, array.null_count, examples, why)


class _Columns:
    """`labels` have names of labels, then classes that repeat."""

    def __init__(self, path: str) -> None:
        self.files, self.options = files_of(path), dict[str, Any]()
        first, names = self.files[0], column_names(self.files[0])
        if len(names) == 1 and (found := [each for each in ",;\t|" if each in names[0]]):
            self.options["delimiter"] = found[0]
            names = column_names(first, TextFormat(found[0]))
        self.table = Table.of(first, [name for name in names if name], text_format=TextFormat(**self.options))
        self.folder = os.path.dirname(os.path.abspath(first))
        self.columns = [_column(self.table, name, RootDirectory(self.folder)) for name in self.table.names]
        few = min(max(len(self.table) // 2, 2), len(self.table) - 1)
        known = [c for c in self.columns if c.kind in ("class", "number") and (c.distinct or 0) > 1]
        self.labels = [c for c in known if has_word(c.name, LABELS)]
        known = [c for c in known if c.kind == "class" and c not in self.labels and not has_word(c.name, _OTHERS)]
        self.labels += [c for c in known if (c.distinct or 0) <= few]

    def suggestions(self, path: str) -> list[Suggestion]:
        """The likeliest first; none if there are neither files nor numbers."""
        files, options, what = [c for c in self.columns if c.kind in _FILES], dict(self.options), "rows"
        numbers = [c for c in self.columns if c.kind == "number" and c not in self.labels[:1]]
        names = [c.name for c in numbers if not has_word(c.name, _OTHERS)]
        x: Given = names[0] if len(names) == 1 else names
        if files:
            options |= {"root": root} if (root := self._root(self.values(files[0]))) else {}
            x, what = self._of_files(files[0], root or self.folder), _FILES[str(files[0].kind)]
        if not x:
            return []
        ids = [c for c in self.columns if (c.name, c.distinct, c.missing) == ("id", len(self.table), 0)]
        options |= {"id": "id"} if ids else {}
        stages = [c.name for c in self.columns if c.kind == "class" and all(map(contents.is_stage, self.values(c)))]
        notes = tuple(f'split(source, by="{name}") has the sides that it names' for name in stages)
        masks, found = [c for c in files[1:] if has_word(c.name, MASKS)], list[Suggestion]()
        targets: list[ColumnReport | None] = [*masks[:1], *self.labels[:3]]
        for y in targets or [None]:
            fields: dict[str, Given] = {"x": x} if y is None else {"x": x, "y": self.target(y)}
            title = what if y is None else f"{what} with {y.name}"
            found.append(Suggestion(title, Call("ManifestSource", path, fields, options), notes))
            found += [sized_images(found[-1])] if what == "images" else []
        return found

    def values(self, column: ColumnReport) -> list[Any]:
        array = self.table.array(column.name)
        return [] if isinstance(array, EmbeddedFiles) else list(array.unique().drop_null().to_pylist())

    def target(self, column: ColumnReport) -> Given:
        if column.kind in _FILES:
            return {"name": column.name, "mode": "P"}
        return named(column.name, {"null": "drop"} if column.missing else {})

    def _root(self, paths: Sequence[str]) -> str:
        """The folder from which paths lead to files, as ``root``; empty for the folder of the table."""
        if not paths:
            return ""
        if os.path.isabs(paths[0]):
            above = os.path.commonpath([os.path.dirname(each) for each in paths if os.path.isabs(each)])
            return "" if os.path.commonpath([above, self.folder]) == self.folder else above
        below = sorted(entry.path for entry in os.scandir(self.folder) if entry.is_dir())
        for place in (self.folder, *below, os.path.dirname(self.folder), os.getcwd()):
            if all(os.path.exists(os.path.join(place, each)) for each in (paths[0], paths[-1])):
                return "" if place == self.folder else os.path.relpath(place)
        return ""

    def _of_files(self, column: ColumnReport, folder: str) -> Given:
        found = dict[str, Any]()
        if column.kind == "hdf5" and "dataset" not in self.table.names:
            with contextlib.suppress(AsyncDataError):  # the source says what is wrong with a file
                first = os.path.join(folder, str(self.table.first(column.name)))
                for call in [each.call for each in hdf5_report([first]).suggestions[:1]]:
                    found["dataset"], layout = name_of(call.fields["x"]), call.options.get("layout", {})
                    found |= {"layout": layout["x"]} if "x" in layout else {}
        return named(column.name, found)
