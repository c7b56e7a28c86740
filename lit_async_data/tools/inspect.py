"""Shows what HDF5 files, tables and folders hold, how each dataset is read, and the lines that read them.

  python -m lit_async_data inspect scans/*.h5
  python -m lit_async_data inspect scans/*.h5 patients.csv --json
  python -m lit_async_data inspect birds.csv --check-all

Several files are parts of one dataset: the first is described. A table beside them has their labels. --check-all reads
every sample, lists those that cannot be read, and ends with exit status 1 if there are any. The options from --fields
on describe the source that it reads; without --fields, it is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import csv
import dataclasses
import fnmatch
import glob
import itertools
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from lit_async_data.engine.pipeline.sample_reader import is_of_a_sample
from lit_async_data.errors import AsyncDataError, ConfigError, ManifestError, MissingError, SourceError, counted, redact
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts.samples import groups_of
from lit_async_data.sources.hdf5.readers.part_reader import LOOKS
from lit_async_data.sources.hdf5.schema.categories import PACKING
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.handles import open_h5py
from lit_async_data.sources.local_files import COLUMNS, bad_sample, ends_of, has_word, is_pattern, local_path
from lit_async_data.sources.manifest.columns import FILES, Column, Given, kind_of, kind_of_path
from lit_async_data.sources.manifest.fields import Fields, no_repeats
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.manifest.source import root_of
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import TextFormat, arrow, is_list, is_number, is_text
from lit_async_data.sources.table.labels import Null
from lit_async_data.sources.table.table import Table, TableReader, column_names, files_of
from lit_async_data.tools import contents
from lit_async_data.tools.call import IMAGE, Call, add_source_arguments, given_source, source_of
from lit_async_data.tools.contents import PLAIN, SPACE, ColumnReport, Dataset, Report, Scope, Suggestion
from lit_async_data.tools.terminal import Piece, Progress, as_json, in_threads, indented, progress_bar, section

BLOCK_BYTES = 4 * 2**20  # of samples that a thread reads at a time, or one chunk


def check_all(call: Call, path: str) -> int:
    """Write the list of bad samples; returns 1 if there are any, else 0."""
    target = local_path(path)
    if not os.access(os.path.dirname(target), os.W_OK):
        raise ConfigError(f"{path} is in no folder that you may write to; give another path", "bad-list")
    unchecked = {} if call.source == "HDF5Source" else {"check_files": "none"}
    context = contextvars.copy_context()
    context.run(LOOKS.set, False)  # a sample without a value is listed
    source = context.run(call.with_options(**unchecked).build)
    with progress_bar(sys.stderr) as progress:
        bad = [bad_sample(source, number, error) for number, error in unreadable(source, progress).items()]
    bad += (dropped := list(_dropped(call, source.name)))
    with open(target, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(bad)
    lines = [f"{len(bad):,} of {counted(len(source) + len(dropped), 'sample')} of {source.name} cannot be read: {path}"]
    if bad:
        without = call.with_options(exclude=path)
        lines += section("Why", list(dict.fromkeys(str(each["cause"]) for each in bad)))
        lines += ["", "Leave them out", *indented(without.python().splitlines()), *indented([without.command()])]
    sys.stdout.write("\n".join([*lines, ""]))
    return int(bool(bad))


def _dropped(call: Call, name: str) -> Iterator[dict[str, str | int | None]]:
    """The lines of the list for rows of a table that ``null: drop`` leaves out, since a value is missing."""
    columns = [Column.of(each) for each in call.fields.values()] if call.source == "ManifestSource" else []
    dropping = {each: column.separator for column in columns if column.null == "drop" for each in column.names}
    if dropping:
        text_format = TextFormat.of(call.options.get("delimiter"), call.options.get("encoding"))
        with closing(Files(**call.access)) as files:
            table = TableReader(files.copied(call.path), None, text_format).columns([*dropping])
        missing = {row: each for each in dropping for row in table.missing(each, dropping[each]).tolist()}
        for row, each in sorted(missing.items()):
            why = table.origin.error("no value; null: drop leaves the row out", row=row, column=each)
            file, number = table.origin.place(row)
            yield dict(zip(COLUMNS, (name, file, "/", number, None, None, str(why)), strict=True))


def unreadable(source: Source, progress: Progress) -> dict[int, AsyncDataError]:
    """The error of each sample that cannot be read, by its number. Raises errors that are no sample's fault.

    Samples are read in storage order, in blocks. A block that fails is halved, down to single samples.
    """
    layout, bad = source.layout(), dict[int, AsyncDataError]()
    order = np.arange(len(source)) if layout.order is None else layout.order
    most = -(-max(BLOCK_BYTES // max(source.spec.nbytes, 1), 1) // layout.rows) * layout.rows
    pieces = (Piece("", len(order), row, order[row : row + most]) for row in range(0, len(order), most))
    with contextlib.closing(source):
        for _, found in in_threads(lambda piece: _errors(source, piece.samples), pieces, "reading", source, progress):
            bad |= found
    if len(bad) == len(order):
        raise SourceError(f"{source.name}: no sample can be read; is the disk there, and is root right? {bad[0]}")
    return dict(sorted(bad.items()))


def _errors(source: Source, samples: Indices) -> dict[int, AsyncDataError]:
    try:
        read(source, samples)
    except AsyncDataError as error:
        if not is_of_a_sample(error):
            raise
        half = len(samples) // 2
        return _errors(source, samples[:half]) | _errors(source, samples[half:]) if half else {int(samples[0]): error}
    return {}


MOST_DATASETS = 20_000  # of one file that `inspect` reads
LABELS = "y|labels?|targets?|class(es)?|clusters?|(cell)?types?|actions?|gt|truth|true"
MASKS = "masks?|segmentations?|reconstructions?"
ONSETS = "onsets?|peaks?|triggers?|cues?"  # of events in a recording
_RATES, _TIMES = "rate|fs|sfreq|srate|hz", "times?|timestamps?|index"
_EVENTS = f"{LABELS}|codes?|descriptions?"  # labels of events
# Ways to divide rows into episodes: the parts of `episodes`, and names of datasets; "" are ids.
_EPISODES = [
    {"": "(episode|traj|trajectory)(_(index|idx|ids?))?"},
    {"flags": "terminals?|timeouts?|dones?|terminations?|truncations?|is_last"},
    {"ends": "(episode|traj)_ends"},
    {"starts": "(ep|episode|traj)_(offsets?|starts?)", "lengths": "(ep|episode|traj)_(len|lengths?)"},
    {"lengths": "(ep|episode|traj)_(len|lengths?)|total_steps"},
]
CODED = ("categorical", "nullable")  # kinds of datasets of numbers that stand for names, or beside a mask
# Names of datasets that are neither inputs nor labels: of pyramids, and of networks.
_PARAMETERS = "resolutions|subdivisions|histograms?|weights?|kernels?|bias(es)?"
ACROSS = 64  # a recording without labels lies across if it has this many times as many columns as rows
_SWAPPED = "look at the colours of x: if red is blue, its RGB was encoded as BGR, and channels: BGR is missing"
_BY_LENGTH = "samples have different lengths: batch_by=x (loader.batch_by=x) puts those of like length together"
_MISSING = 'rows without a value of y are left out; null="ignore" keeps them, as -100'
# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32
PATCH, WINDOW = 64, 256  # the most elements of a patch along an axis, and rows behind an event
IMAGE_SIZE = 224  # side of images that have no common size
_EXAMPLES, _WIDTH = 3, 24
_FILES = {"image": "images", "npy": "arrays", "hdf5": "rows of HDF5 files"}
_OTHERS = "ids?|uid|index|split|fold|stage|set|subset"  # names of columns that are neither inputs nor labels
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_ ./\-()\[\]:=,]*")  # names that Hydra takes for keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "HDF5 files (also NetCDF, AnnData, MATLAB v7.3), a table (CSV, Parquet, JSON lines), or a folder of classes"
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{kinds}; or a pattern; or files and a table")
    parser.add_argument("--json", action="store_true", help="print values for programs; docs/tools/inspect.md has them")
    parser.add_argument("--check-all", action="store_true", help="read every sample, and list the bad ones")
    parser.add_argument("--bad-list", default="bad_samples.csv", metavar="PATH", help="the list (bad_samples.csv)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.check_all:
        return check_all(given_call(arguments.files, arguments), arguments.bad_list)
    call = given_source(arguments.files, arguments)
    given = {*call.options, *["fields"] * bool(call.fields)} - {"table", "root", *call.access}
    if name := min(given, default="").replace("_", "-"):
        raise ConfigError(f"describes what --check-all reads; add --check-all, or leave --{name} out", name)
    known = {name: call.options[name] for name in ("table", "root") if name in call.options}
    report = report_on(arguments.files, **known, **call.access)
    sys.stdout.write(as_json(report.as_dict(), str) if arguments.json else contents.text_of(report))
    return 0


def given_call(paths: Sequence[str], arguments: argparse.Namespace, *, whole: bool = False) -> Call:
    """The source of a command; without ``--fields``, as ``inspect`` suggests it. ``whole``: of the test files, too."""
    call = given_source(paths, arguments)
    if call.fields and call.source != "HDF5Source":
        return call
    table = "" if "on" in call.options else call.options.get("table", "")
    suggest, root = bool(table) or not call.fields, call.options.get("root", "")
    report = report_on(paths, suggest=suggest, table=table, root=root, **call.access)
    if not report.suggestions and not call.fields:
        why = f"python -m lit_async_data inspect {shlex.join(paths[:3])} says why; name them: --fields x=NAME y=NAME"
        raise ConfigError(f"nothing in {paths[0]} looks like samples; {why}", "fields")
    found = report.suggestions[0].call if report.suggestions else call
    if table and "on" not in found.options:
        what = "name yours: --on COLUMN=DATASET, or COLUMN=@ATTRIBUTE"
        raise ConfigError(f"no column of {table} fits, as inspect says; {what}", "on")
    taken = ("on", "unmatched") if call.fields else found.options
    options = {**{name: each for name, each in found.options.items() if name in taken}, **call.options}
    path, fields = call.path if whole or call.fields else found.path, call.fields or found.fields
    call = dataclasses.replace(call, path=path, fields=fields, options=options)
    return _with_images(call, report.datasets) if call.source == "HDF5Source" else call


def _with_images(call: Call, nodes: Sequence[Dataset]) -> Call:
    """A source of HDF5 files that decodes encoded images, by the options of images; and what it leaves out."""
    names = {key: each.get("name", "") if isinstance(each, Mapping) else each for key, each in call.fields.items()}
    fields, options = dict(call.fields), dict(call.options)
    image = {name: options.pop(name) for name in IMAGE if name in options}
    for (key, name), node in itertools.product(names.items(), nodes):
        fits = name in (node.field, node.each) or fnmatch.fnmatch(str(name), node.name)
        if node.decoding and fits and (fields[key] == name or "decode" in fields[key]):
            fields[key] = {"name": name, **node.decoding, **image}
    if image and fields == call.fields:
        raise ConfigError("no field holds encoded images; leave it out", min(image))
    plain = {n.field: n.shape[:1] for n in nodes if n.kind != "metadata"}
    rows = {n.shape[:1] for n in nodes if {n.field, n.name} & {*names.values()}}
    others = (name for name, length in plain.items() if name not in names.values() and length in rows)
    return dataclasses.replace(call, fields=fields, options=options, left_out=tuple(others))


def report_on(
    given: Sequence[str], *, suggest: bool = True, table: Any = None, root: str = "", **options: Any
) -> Report:
    """What files hold; ``table`` is the one beside them, if not given; the options are those of `ACCESS`."""
    source, paths, beside = source_of(given)
    if source == "HDF5Source":
        return hdf5_report(paths, beside if table is None else table, suggest=suggest, **options)
    if source == "ManifestSource":
        return table_report(paths[0], root, **options)
    report, call = Report("folder", paths), Call(source, paths[0], options=options)
    folders = Suggestion("a folder for each class", call)
    with heard(report.notes):
        report.suggest([folders, sized_images(folders)])
    if not report.suggestions:
        raise ConfigError(report.notes[0])
    return report


def hdf5_report(given: Sequence[str], table: str = "", *, suggest: bool = True, **options: Any) -> Report:
    files = Files(**options)
    matched = [files.matching(each) if is_pattern(each) else [each] for each in given]
    paths = contents.of_training(dict.fromkeys(itertools.chain.from_iterable(matched)))
    first, report, path = paths[0], Report("HDF5", paths), given[0] if matched == [paths] else _path_of(paths)
    if columns := _Columns(table, options, files) if table else None:
        report.columns, report.rows = columns.columns, len(columns.table)
    with as_source_errors(first, "cannot be read", file=first), closing(files), open_h5py(first, files) as file:
        if all(map(os.path.exists, paths)):
            report.bytes = sum(map(os.path.getsize, paths))
        nodes = list(itertools.islice(contents.datasets_of(file["/"], set()), MOST_DATASETS))
        for scope in contents.scopes_of(nodes):
            group = OpenGroup(file, first, scope.first, IndexCache(None), allow_external=False)
            scope.files, scope.attributes = len(paths), list(file[scope.first].attrs)
            scope.call = Call("HDF5Source", path, options=options)
            for node in scope.nodes:
                contents.describe(group, node, options)
            known = len(report.suggestions)
            base = report.suggest(suggestions(scope, report.notes) if suggest else [])
            report.notes += scope.unread(base.call) if base else []
            if columns and base:
                with heard(report.notes):
                    report.suggest(labelled := list(columns.labelled(base, scope)))
                report.suggestions[known:] = report.suggestions[-1:]
                if not labelled:
                    what = "names files or groups, or has the ids of a dataset or attribute of its name, each once"
                    how = "on={COLUMN: DATASET}, or on={COLUMN: Field(attr=NAME)} for an attribute of groups"
                    report.notes.append(f"{base.title}: no column of {table} {what}; else give {how}")
            report.groups += [{"name": scope.group, "count": scope.count}] if scope.group else []
            report.datasets += scope.nodes
            report.attributes |= contents.attributes_of(group, scope)
    if not report.suggestions and not report.notes:
        report.notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    if len(nodes) == MOST_DATASETS:
        report.notes.append(f"no more than the first {MOST_DATASETS:,} datasets are looked at")
    return report


def suggestions(scope: Scope, notes: list[str]) -> Iterator[Suggestion]:
    """Proposals for a scope, the likeliest first; if there is none, a note gives the reason."""
    known = [n for n in scope.nodes if n.reading and n.kind != "metadata" and not has_word(n.name, _PARAMETERS)]
    if any(n.field == "origin/part" for n in known):  # `pack` has written these datasets: they are the fields
        nodes = [n for n in scope.nodes if n.reading and not n.field.startswith("origin/")]
        layout = {n.field: layout_of(n.shape, 0) for n in nodes if n.kind in PLAIN}
        yield _suggestion(scope, "packed fields", {n.field: _decoded(n) for n in nodes}, [], layout=layout)
    each = list(_of_datasets(scope, [n for n in known if n.each and not scope.group]))
    rows = _of_rows(scope, [n for n in known if "*" not in n.field], [] if each else notes)
    yield from _around_events(scope, known, notes)
    yield from sorted([*rows, *each], key=lambda one: "y" not in one.call.fields)
    yield from _patches(scope, known)


def _of_datasets(scope: Scope, known: Sequence[Dataset]) -> Iterator[Suggestion]:
    """Each dataset of a group is a sample; its label is an attribute, or a dataset of the same name elsewhere."""
    labels = [n.each for n in known if has_word(n.name, f"{LABELS}|{MASKS}", whole=True)]
    for x in sorted((n for n in known if n.each not in labels), key=_score, reverse=True):
        plain = [None] if "*" in x.field and (x.decoding or x.varies or len(x.shape) > 1) else []
        attributes = [{"attr": name} for name in x.attributes if has_word(name, LABELS)]
        yield from _whole(scope, "dataset", x, [*attributes, *labels, *plain])


def _patches(scope: Scope, known: Sequence[Dataset]) -> Iterator[Suggestion]:
    """Patches of volumes of several sizes; the smallest gives the size of a patch."""
    nodes = [n for n in known if n.kind in PLAIN and n.dtype.kind in "biuf" and (scope.several or n.each)]
    x = max((n for n in nodes if len(n.shape) in (3, 4)), key=_score, default=None)
    if x is None:
        return
    channels = len(x.shape) > 3 or (x.dtype.kind == "u" and min(x.shape) <= FEW)
    letters = layout_of(x.shape, None) if channels else None
    sides = tuple(n for n, letter in zip(x.shape, letters or x.shape, strict=True) if letter != "C")
    given, shapes = {"layout": {"x": letters}, "sample": "dataset" * bool(x.each)}, list[Any]()
    every = _suggestion(scope, "", {"x": {"name": x.each or x.field, "patch": [1] * len(sides)}}, [], **given).call
    with contextlib.suppress(AsyncDataError), closing(cast("HDF5Source", every.build())) as source:
        shapes += {found.shape for part in source.stored_parts if (found := part.fields["x"].patches)}
    masks = [n for n in nodes if n.shape == sides and n is not x and bool(n.each) == bool(x.each)]
    called = [n for n in masks if has_word(n.name, f"{MASKS}|{LABELS}", whole=True)]
    masks = [n for n in masks if n in called or n.dtype.itemsize == 1 < x.dtype.itemsize]
    for taken in (*({"x": x, "y": y} for y in masks), {"x": x}) if len(shapes) > 1 else ():
        patch = [min(PATCH, *each) for each in zip(*shapes, strict=True)]
        fields = {key: {"name": n.each or n.field, "patch": patch} for key, n in taken.items()}
        title = f"patches of {' with '.join(n.field for n in taken.values())}"
        notes = [f"volumes of {len(shapes)} sizes: patches_per_volume=8 draws patches, anew in each epoch"]
        yield _suggestion(scope, title, fields, notes, **given)


def _around_events(scope: Scope, known: Sequence[Dataset], notes: list[str]) -> Iterator[Suggestion]:
    """Windows that begin at events. Onsets are rows, or seconds with a rate; time is an axis as long as they say."""
    plain = [n for n in known if n.kind in PLAIN and n.dtype.kind in "iuf" and len(n.shape) in (1, 2)]
    for onset in (n for n in plain if n.flat and has_word(n.name, ONSETS)):
        waves = [n for n in plain if 4 * onset.shape[0] < max(n.shape) and not has_word(n.name, _TIMES)]
        beside = re.sub(r"[^./]*$", "", onset.field)
        if (x := max(waves, key=lambda n: (n.field.startswith(beside), _score(n)), default=None)) is None:
            continue
        scalars, seconds = [n for n in scope.nodes if not n.shape], onset.dtype.kind == "f"
        rates = [{"name": n.field, "attr": name} for n in (x, *scalars) for name in n.attributes]
        rates += [*({"attr": name} for name in scope.attributes), *({"name": n.field} for n in scalars)]
        rates = [given for given in rates if has_word([*given.values()][-1], _RATES)]
        if seconds and not rates:
            notes.append(f"rows={onset.field!r} with rate= takes windows of {x.field} at these times")
            continue
        labels = [n for n in known if n.shape == onset.shape and n.field.startswith(beside)]
        times = [axis for axis, n in enumerate(x.shape) if n > 4 * onset.shape[0] and axis >= x.across]
        for axis, y in itertools.product(times, (*(n for n in labels if has_word(n.name, _EVENTS)), None)):
            window, rate = [0, min(WINDOW, x.shape[axis] // onset.shape[0])], rates[0] if seconds else None
            fields = {"x": {"name": x.field, "window": window}, "y": {"name": y.field, "per": "anchor"} if y else None}
            title, how = f"windows of {x.field} around {onset.field}", "window: choose the rows around an event"
            yield _suggestion(scope, title, fields, [how], layout={"x": "CN" * axis}, rows=onset.field, rate=rate)


def _episodes(nodes: Sequence[Dataset]) -> Iterator[Any]:
    """What may divide rows into episodes, as `episodes` takes it."""
    last = {n.field: n.field.rpartition("/")[2] for n in nodes if n.flat and n.shape}
    for parts in _EPISODES:
        found = {part: [each for each in last if re.fullmatch(names, last[each])] for part, names in parts.items()}
        if all(found.values()):
            taken = {part: each if each[1:] else each[0] for part, each in found.items()}
            yield taken.get("", taken)


def _whole(scope: Scope, of: str, x: Dataset, labels: Sequence[Dataset | Given | None]) -> Iterator[Suggestion]:
    notes = [_SWAPPED] if x.decoding else [_BY_LENGTH] * x.varies
    name, sample = (x.each, "dataset") if of == "dataset" else (x.field, "group")
    for y in labels:
        arrays = {key: n for key, n in (("x", x), ("y", y)) if isinstance(n, Dataset) and not (n.decoding or n.varies)}
        layout = {key: layout_of(n.shape, None) for key, n in arrays.items()}
        fields = {"x": named(name, x.decoding), "y": y.field if isinstance(y, Dataset) else y}
        yield _suggestion(scope, f"one {of} per sample: {name}", fields, notes, sample=sample, layout=layout)


def _of_rows(scope: Scope, known: Sequence[Dataset], notes: list[str]) -> Iterator[Suggestion]:
    training = contents.of_training(node.name for node in known)
    nodes = [node for node in known if node.name in training]
    inputs = [n for n in nodes if n.dtype.kind in "biufc" and (scope.several or not has_word(n.axis, SPACE))]
    inputs = [n for n in inputs if not (n.kind in CODED or (n.kind in PLAIN and n.flat))]
    inputs.sort(key=_score, reverse=True)
    if not inputs:
        return
    labels = [n for n in nodes if n.kind == CODED[0] or (n.kind in PLAIN + CODED and has_word(n.name, LABELS))]
    labels = [n for n in labels if n.dtype.kind in "biuf" and 0 < len(n.shape) < 3]
    labels.sort(key=lambda n: (not has_word(n.name, LABELS), not n.flat))
    x = next((n for n in inputs if any(_axis(n, label) is not None for label in labels)), inputs[0])
    edges = [n for n in labels if x.shape[:1] == (n.shape[0] + 1,) and not x.kind]
    masks = [n for n in inputs if n is not x and has_word(n.name, f"{MASKS}|{LABELS}") and n.dtype.kind in "biuf"]
    # One image, unless each row has a label.
    square = len(x.shape) > 1 and x.shape[0] == x.shape[1] and not x.kind and x.samples is None
    labels = [n for n in labels if _axis(x, n) is not None and not (square and n.shape == x.shape[:2])][:4]
    h, w, c = x.shape if len(x.shape) == 3 else (*x.shape, 1) if len(x.shape) == 2 and scope.several else (9, 1, 0)
    masked = any(has_word(n.name, MASKS) and n.shape[:2] == (h, w) for n in masks) and c <= FEW
    image = c in (3, 4) and max(h, w) <= 4 * min(h, w) and x.dtype.kind == "u"
    image = ((image or masked or square) and not x.axis) or x.one_image or has_word(x.axis, SPACE)
    plain = len(x.shape) == 2 and x.samples is None and not x.kind and not x.axis
    sides: Any = x.shape  # of a recording, the second is time
    recording = x.across or (plain and sides[1] >= ACROSS * sides[0])
    alone: list[Given] = [n.field for n in scope.nodes if not n.shape and has_word(n.name, LABELS)]
    alone += [{"attr": name} for name in scope.attributes if has_word(name, LABELS)]
    if not labels and image and not scope.several:
        many = 'sample="dataset", or sample="group" with group=, takes many by a name with a * for what differs'
        what = f"{x.field} of shape {x.shape} may be one sample"
        notes.append(f"{what}: {many}; Field(NAME, decode='image') decodes images")
    elif not labels and scope.several and (image or alone):
        yield from _whole(scope, "group" if scope.group else "file", x, [*alone, *masks[:1], None])
    elif labels or not recording:
        masks = [n for n in masks if n.shape[:1] == x.shape[:1] and len(n.shape) > 2]
        divided = [*_episodes(() if scope.group else scope.nodes), None]
        for episodes, y in itertools.product(divided, (*labels, *edges[: not labels], *masks[:1], None)):
            for null in ("", "drop") if y is not None and y.kind in CODED else ("",):
                yield _row_by_row(scope, x, y, masks * (y in labels), null=null, episodes=episodes)
    for label in (*alone, None) if recording and not labels else ():
        rows, how = min(WINDOW, sides[1]), "window and stride=: choose the rows of a window, and from one to the next"
        fields = {"x": {"name": x.field, "window": [0, rows]}, "y": label}
        yield _suggestion(scope, f"windows of {x.field}", fields, [how], layout={"x": "CN"}, stride=rows)


def _row_by_row(
    scope: Scope, x: Dataset, y: Dataset | None, masks: Sequence[Dataset], *, null: str, episodes: Any
) -> Suggestion:
    axis = x.samples % len(x.shape) if x.samples else 0
    title, layout, fields = x.field, dict[str, str | None](), {"x": _decoded(x)}
    if y is not None:
        title, axis = f"{x.field} with {y.field}", (_axis(x, y) or 0) if len(y.shape) < 3 else axis
        how = {"column": 0} if len(y.shape) == 2 and y.flat else {"null": null} if null else dict[str, Any]()
        fields["y"] = named(y.field, how)
        # An observation before and behind each action.
        if [n - 1 for n in x.shape[:1]] == [*y.shape[:1]] and _axis(x, y) is None:
            fields["x"] = {"name": x.field, "per": "edge"}
        flat = "CN" if y.flat and y.shape[:1] == (1,) else None
        layout["y"] = flat if len(y.shape) == 2 else layout_of(y.shape, axis) if len(y.shape) > 2 else None
    layout["x"] = None if x.kind else layout_of(x.shape, axis)
    sides = x.shape[1:3], x.shape[2:4], tuple(x.decoding.get("image_size", ()))
    if mask := next((n for n in masks if axis == 0 and n.shape[1:3] in sides), None):
        fields["mask"], layout["mask"] = mask.field, layout_of(mask.shape, 0)
    notes = ([_SWAPPED] if x.decoding else [_BY_LENGTH] * (x.kind == "variable")) + [_MISSING] * bool(null)
    return _suggestion(scope, title, fields, notes, layout=layout, episodes=episodes)


def _suggestion(
    scope: Scope, title: str, fields: Mapping[str, Given | None], notes: list[str], **options: Any
) -> Suggestion:
    layout = {key: letters for key, letters in options.pop("layout", {}).items() if letters}
    options = {"group": scope.group, **options, "layout": layout, **scope.call.options}
    options = {name: value for name, value in options.items() if value}
    parts = "group" if scope.group or "sample" in options else "file" * (scope.files > 1)
    parts = "episode" if "episodes" in options else parts
    taken = [str(each.get("name") if isinstance(each, Mapping) else each) for each in fields.values()]
    if "sample" not in options and layout.get("x", "N")[0] == "N" and "edge" not in str(fields.get("x")):
        parts = contents.of_people(scope.nodes, taken) or parts
    if parts and ("sample" not in options or "patch" in title):
        split = f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{parts}")'
        notes = [*notes, f"{split} keeps each {parts} in one stage"]
    given = {key: each for key, each in fields.items() if each is not None}
    return Suggestion(title, dataclasses.replace(scope.call, fields=given, options=options), tuple(notes))


def _decoded(node: Dataset) -> Given:
    packed = {"mask_and_scale": True} if set(PACKING[:3]) & set(node.attributes) else {}
    return named(node.field, node.decoding or packed)


def named(name: str | list[str], options: Mapping[str, Any]) -> Given:
    return {"name": name, **options} if options else name


def _score(node: Dataset) -> float:
    """Larger datasets have larger scores; the name of a label or a deep path lowers the score."""
    nbytes = math.prod((*node.shape[:1], *node.decoding["image_size"])) if node.decoding else node.bytes
    label = has_word(node.name, f"{MASKS}|{LABELS}", whole=bool(node.each))
    return math.log10(nbytes + 1) - 3 * label - 0.5 * node.name.count("/")


def _axis(x: Dataset, label: Dataset) -> int | None:
    """The axis of ``x`` that is as long as the label: the first axis, else the last."""
    count = max(label.shape) if label.flat else label.shape[0]
    places = () if x.one_image else (0,) if x.kind else (0, len(x.shape) - 1)
    places = places if x.samples is None else (x.samples % len(x.shape),)
    return next((axis for axis in places if x.shape[axis] == count and x is not label), None)


def layout_of(shape: Sequence[int], axis: int | None) -> str | None:
    """The letters of a layout with the samples on ``axis``, or on none; None if the source needs no layout."""
    rest, places = [n for place, n in enumerate(shape) if place != axis], list[int]()
    for place in (len(rest) - 1, 0) if len(rest) > 1 else ():
        n, least = rest[place], min(rest[:place] + rest[place + 1 :])
        if (n <= FEW and len(rest) > 2 and n <= least) or (n <= MOST_CHANNELS and 4 * n <= least):
            places.append(place)
    channel = min(places, key=rest.__getitem__, default=None)
    others = len(rest) - (channel is not None)
    if others > 3 or (not axis and channel is None):
        return None
    letters = [*("DHW"[3 - others :] if len(rest) > 1 else "C")]
    if channel is not None:
        letters.insert(channel, "C")
    if axis is not None:
        letters.insert(axis, "N")
    return "".join(letters)


def _path_of(paths: Sequence[str]) -> str | list[str]:
    """The file, a pattern that matches these files and no others, or else a list."""
    begin, end = contents.common_start(paths), os.path.splitext(paths[0])[1]
    folder = os.path.join(glob.escape(os.path.dirname(begin)), "")
    patterns = f"{folder}*{end}", f"{glob.escape(begin)}*{end}", f"{folder}**/*{end}"
    fitting = (p for p in patterns if sorted(filter(os.path.isfile, glob.glob(p, recursive=True))) == sorted(paths))
    return paths[0] if len(paths) == 1 else next(fitting, list(paths))


def table_report(path: str, root: str = "", **options: Any) -> Report:
    with closing(Files(**options)) as files:
        given = _Columns(path, options, files, root)
    report = Report("table", [path], sum(map(os.path.getsize, given.files)))
    report.columns, report.rows = given.columns, len(given.table)
    if data := [each.name for each in given.columns if is_number(each.name) or kind_of_path(each.name)]:
        what = f"the first line looks like data ({data[0]}), but it must name the columns"
        report.notes.append(f"{what}: put a line of names before it, or give pandas.read_csv(…, names=[…])")
    else:
        report.suggest(given.suggestions())
        if report.notes and not root and any(each.kind in FILES for each in given.columns):
            places = f", such as {' or '.join(given.folders)}" * bool(given.folders)
            report.notes.append(f"--root FOLDER, or root=, says where the paths begin{places}")
    if not report.suggestions and not report.notes:
        report.notes.append('no column looks like samples: name yours in fields={"x": COLUMN, "y": COLUMN}')
    return report


def sized_images(suggestion: Suggestion) -> Suggestion:
    notes = (f"images have several sizes: choose one instead of {IMAGE_SIZE}", *suggestion.notes)
    return dataclasses.replace(suggestion, call=suggestion.call.with_options(image_size=IMAGE_SIZE), notes=notes)


@contextlib.contextmanager
def heard(notes: list[str]) -> Iterator[None]:
    """Add the lines that the package logs to the notes, each once."""
    log, handler = logging.getLogger("lit_async_data"), BufferingHandler(1000)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        notes += dict.fromkeys(each for record in handler.buffer if (each := record.getMessage()) not in notes)


def _separator(table: Table, name: str) -> str | None:
    """What separates several paths in a cell, if any cell has several."""
    array = table.array(name)
    for each in ";|, " if is_text(array.type) else "":
        cells = array.filter(arrow("compute").match_substring(array, each)).slice(0, 1000).to_pylist()
        if any(all(map(kind_of_path, cell.split(each))) for cell in cells):
            return each
    return None


def _column(table: Table, name: str, root: RootDirectory) -> ColumnReport:
    """Describe a column as `ManifestSource` reads it, without rows that lack a value; or why it cannot be a field."""
    array, distinct, why, given = table.array(name), None, "", len(table) - len(table.missing(name))
    # Neither lists nor bytes have such a count.
    with contextlib.suppress(arrow().ArrowException, TypeError):
        distinct = int(arrow("compute").count_distinct(array).as_py())
    kind, rows, whole = None, len(table), SimpleNamespace(columns=lambda _: table, select=lambda _: None)
    nulls: tuple[Null, ...] = ("drop", "error")
    for column in (Column(name, null=each, separator=_separator(table, name)) for each in nulls):
        try:
            if (kind := kind_of("x", column, table, root)) != "hdf5":
                fields = Fields({"x": column}, cast("TableReader", whole), root, None)
                rows = len(fields.rows)
                kind = kind if kind in FILES else "class" if fields.labels["x"].classes else "number"
                why = no_repeats(fields.labels["x"]) if kind == "class" and is_list(array.type) else ""
            break
        except AsyncDataError as error:
            if kind in FILES and given and isinstance(error, MissingError | ManifestError):
                break  # root may be another folder
            kind, why = None, error.message
    listed = [] if isinstance(array, EmbeddedFiles) else array.slice(0, 1000).drop_null().to_pylist()
    shown = dict.fromkeys(redact(str(each)) for each in listed)
    examples = tuple(each if len(each) <= _WIDTH else f"…{each[1 - _WIDTH :]}" for each in list(shown)[:_EXAMPLES])
    of = "text" if is_text(array.type) else str(array.type)
    return ColumnReport(name, of, kind, distinct, len(table) - min(given, rows), examples, why)


class _Columns:
    """The columns of a table. `labels` holds columns with the name of a label, then columns of repeated classes."""

    def __init__(self, path: str, options: Mapping[str, Any], files: Files, root: str = "") -> None:
        self.path, self.files, self.options = path, files_of(files.copied(path)), dict(options)
        self.roots, self.folders = [root] if root else ["", ".", "/"], list[str]()
        self.store, self.access = files, options
        first, names = os.path.abspath(self.files[0]), column_names(self.files[0])
        if len(names) == 1 and (found := [each for each in ",;\t|" if each in names[0]]):
            self.options["delimiter"] = found[0]
            names = column_names(first, TextFormat(found[0]))
        text_format = TextFormat.of(self.options.get("delimiter"), None)
        self.table = Table.of(first, [name for name in names if name], text_format=text_format)
        folder = RootDirectory(root or root_of(path), files=files)
        with heard([]):  # whether columns of ids are classes
            self.columns = [_column(self.table, name, folder) for name in self.table.names]
        known = [c for c in self.columns if c.kind in ("class", "number") and c.distinct not in (0, 1) and not c.why]
        self.labels = [c for c in known if has_word(c.name, LABELS)]
        known = [c for c in known if c.kind == "class" and not has_word(c.name, f"{LABELS}|{_OTHERS}")]
        self.labels += [c for c in known if (c.distinct or 0) <= max(len(self.table) // 2, 2)]

    def suggestions(self) -> Iterator[Suggestion]:
        """Proposals, the likeliest first; none for a table without files and numbers."""
        files, options = [c for c in self.columns if c.kind in _FILES], self.options
        numbers = [c for c in self.columns if c.kind == "number" and not has_word(c.name, _OTHERS)]
        numbers = [c for c in numbers if c not in self.labels[:1]]
        lists, plain = [c for c in numbers if c.distinct is None], [c for c in numbers if c.type != "bool"]
        x = files[:1] or lists[:1] or plain or numbers
        what, roots = "rows", [""]
        if files:
            first = str(self.table.first(files[0].name, _separator(self.table, files[0].name)))
            beside = glob.glob(os.path.join(glob.escape(os.path.dirname(self.path)), "*", ""))
            self.folders = sorted(each[:-1] for each in beside if os.path.exists(each + first))
            what, roots = _FILES[str(files[0].kind)], self.roots
            roots = [*roots, *self.folders] if len(self.folders) == 1 and roots[1:] else roots
        if any((c.name, c.distinct) == ("id", len(self.table)) for c in self.columns):
            options = {**options, "id": "id"}
        masks = [c for c in files[1:] if has_word(c.name, MASKS)][:1]
        targets: list[ColumnReport | None] = [*masks, *self.labels[:3]]
        for y, root in itertools.product(targets or [None], roots) if x else ():
            fields, title = {"x": self.field(*x, **self._in_file(x[0], root))}, what
            if y is not None:
                fields["y"] = self.field(y, mode="P") if y in masks else self.field(y)
                title = f"{what} with {y.name}"
            others = ", ".join(c.name for c in self.labels if c is not y)
            call = Call("ManifestSource", self.path, fields, options | ({"root": root} if root else {}))
            yield (whole := Suggestion(title, call, (f"other labels: {others}",) if others else ()))
            if what == "images":
                yield sized_images(whole)

    def _in_file(self, column: ColumnReport, root: str) -> dict[str, Any]:
        """What is suggested for the first HDF5 file of a column, as options of the column: a dataset and its layout."""
        if column.kind == "hdf5" and "dataset" not in self.table.names:
            with contextlib.suppress(AsyncDataError):  # the source says what is wrong with a file
                folder = RootDirectory(root or root_of(self.path), files=self.store)
                report = hdf5_report([folder.path_of(str(self.table.first(column.name)))], **self.access)
                for call in (each.call for each in report.suggestions if isinstance(each.call.fields.get("x"), str)):
                    layout = call.options.get("layout", {})
                    return {"dataset": call.fields["x"], **({"layout": layout["x"]} if "x" in layout else {})}
        return {}

    def field(self, *columns: ColumnReport, **options: Any) -> Given:
        first, *others = (each.name for each in columns)
        if not others and (separator := _separator(self.table, first)):
            options["separator"] = separator
        options |= {"null": "drop"} if any(each.missing for each in columns) else {}
        return named([first, *others] if others else first, options)

    def labelled(self, given: Suggestion, scope: Scope) -> Iterator[Suggestion]:
        """A proposal for HDF5 files with each label of this table; at last, with those of the files."""
        ways = list(self._ways(given.call, scope))
        for unmatched, (name, what) in itertools.product(("", "skip"), ways):
            labels = [c for c in self.labels if c.name != name]
            for y in (*labels[:3], None):
                fields, title, notes = dict(given.call.fields), given.title, list(given.notes)
                layout = dict(given.call.options.get("layout", {}))
                if y is not None:
                    key = y.name if "patch" in str(fields.get("y")) else "y"  # beside a mask
                    fields[key], title = self.field(y), f"{title.partition(' with ')[0]} with {y.name} of {self.path}"
                    layout.pop(key, None)
                if others := ", ".join(c.name for c in labels if c is not y):
                    notes.append(f"{self.path} has other labels: {others}")
                if names := ", ".join({other: "" for other, _ in ways if other != name}):
                    notes.append(f"{names} of {self.path} fits, too: check that {name} is the column for on=")
                if what not in ("file", "group"):
                    notes.append(f'split(…, groups="{name}") keeps the samples of one row of {self.path} in one stage')
                on = name if name == what else {name: what}
                options = {**given.call.options, "layout": layout, "table": self.path, "on": on, "unmatched": unmatched}
                options = {option: each for option, each in options.items() if each}
                yield Suggestion(title, dataclasses.replace(given.call, fields=fields, options=options), tuple(notes))

    def _ways(self, call: Call, scope: Scope) -> Iterator[tuple[str, Any]]:
        """Columns of different values, and what they name, as ``on`` takes it; the surest first."""
        ids = dict[str, Any]({name: {"attr": name} for name in scope.attributes})
        ids |= {n.field.rpartition("/")[2]: n.field for n in scope.nodes if n.flat}
        names = [c.name for c in self.columns if c.distinct == len(self.table)]
        yield from ((name, ids[name]) for name in names if name in ids and not has_word(name, LABELS))
        with closing(cast("HDF5Source", call.build())) as source:
            groups = [group for part in source.stored_parts for group in groups_of(part)]
            units = {"file": source.paths, "group": groups}
        ends = {what: {end for unit in units[what] for end in ends_of(unit)} for what in units}
        values = dict[str, set[str]]()
        for name in filter(_KEY.fullmatch, names):
            with contextlib.suppress(AsyncDataError):  # neither text nor integers, or a value is missing
                values[name] = {*self.table.encoded(name)[1]}
        yield from ((name, what) for name in values for what in ends if not values[name].isdisjoint(ends[what]))
        options = {option: each for option, each in call.options.items() if option != "layout"}
        for node in (n for n in scope.nodes if n.flat and not has_word(n.name, LABELS)):  # ids under another name
            other = dataclasses.replace(call, fields={"x": {"name": node.field, "kind": "text"}}, options=options)
            with contextlib.suppress(AsyncDataError), closing(other.build()) as source:  # neither text nor integers
                texts = {*source.spec["x"].texts}
                for name in (each for each in values if ids.get(each) != node.field):
                    # Numbers such as ages are in most columns of numbers, but they are few of these.
                    if len(texts) >= (1 if node.type == "text" else len(values[name]) / 2) and texts <= values[name]:
                        yield name, node.field
