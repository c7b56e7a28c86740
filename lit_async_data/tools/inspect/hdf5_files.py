"""The report on HDF5 files: what is in the first, and what of it is likely: images, labels, masks or recordings."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.schema.conversion import PACKING
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.sources.local_files.patterns import files_matching, is_pattern
from lit_async_data.tools.call import Call, Given, named
from lit_async_data.tools.inspect import words
from lit_async_data.tools.inspect.contents import CODED, PLAIN, Dataset, Scope, datasets_of, describe, scopes_of
from lit_async_data.tools.inspect.report import Report, Suggestion, by_groups
from lit_async_data.tools.inspect.words import anywhere, common_start, has_word, of_training

# Of one file: datasets that are looked at; and those that are described, where groups of equal structure count once.
MOST_DATASETS, MOST_DESCRIBED = 20_000, 500
# Groups of what is neither input nor label: where packed samples come from, where electrodes are, names of classes.
_NEVER = "origin|electrodes?|__categories"
# Axes of a grid in space: along one, there are no samples.
_SPACE = "lat|latitude|lon|longitude|x|y|z|level"
# Windows: the most rows; the fewest rows of a recording; how many times as many columns it has if it lies across.
WINDOW, FEWEST_ROWS, ACROSS = 512, 256, 64
_SWAPPED = "look at the colours of x: if red is blue, its RGB was encoded as BGR, and channels: BGR is missing"
_BY_LENGTH = "samples have different lengths: batch_by=x (loader.batch_by=x) puts those of like length together"
_MISSING = 'rows without a value of y are left out; null="ignore" keeps them, as -100'
_WHOLE_GROUPS = 'sample="group" (data.train.sample=group) makes one sample of each group; x then has its length'
_REVERSED = "MATLAB stores axes in reverse: images have width before height; transpose them in a transform"
# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32


def hdf5_report(given: Sequence[str]) -> Report:
    """The report on HDF5 files, given by paths and patterns; the first is described."""
    matched = [files_matching(each) if is_pattern(each) else [each] for each in given]
    paths = of_training(dict.fromkeys(itertools.chain.from_iterable(matched)))
    first, report = paths[0], Report("HDF5", paths)
    with as_source_errors(first, "cannot be read", file=first), open_h5py(first) as file:
        nodes = list(itertools.islice(datasets_of(file["/"], set()), MOST_DATASETS))
        for scope in scopes_of(nodes):
            group = OpenGroup(file, first, scope.first, IndexCache(None), allow_external=False)
            scope.paths, scope.attributes = paths, list(file[scope.first].attrs)
            if len(scope.nodes) > MOST_DESCRIBED:
                report.notes.append(f"only the first {MOST_DESCRIBED} of {len(scope.nodes):,} datasets are shown")
                del scope.nodes[MOST_DESCRIBED:]
            for node in scope.nodes:
                describe(group, node)
            candidates = suggestions(scope, report.notes)
            report.suggest(candidates)
            for call, node in itertools.product([each.call for each in candidates[:1]], scope.nodes):
                if call.options.get("sample") == "group" and not node.shape and node.field == call.fields.get("y"):
                    node.reading, node.why = "copied", ""
                for key, letters in call.options.get("layout", {}).items():
                    if letters.find("N") > 0 and node.field == call.name_of(key):
                        describe(group, node, letters)  # its samples are not on axis 0
            report.groups += [{"name": scope.group, "count": scope.count}] if scope.group else []
            report.datasets += scope.nodes
    report.bytes = sum(map(os.path.getsize, paths))
    if not report.suggestions and not report.notes:
        report.notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    if len(nodes) == MOST_DATASETS:
        report.notes.append(f"no more than the first {MOST_DATASETS:,} datasets are looked at")
    return report


def suggestions(scope: Scope, notes: list[str]) -> list[Suggestion]:
    """What a source could read, the likeliest first; a note says why there is nothing."""
    known = [n for n in scope.nodes if n.reading and n.kind != "scale" and not anywhere(n.name, _NEVER)]
    each, found = [n for n in known if n.each and not scope.group], list[Suggestion]()
    labels = [n.each for n in each if anywhere(n.name, words.LABELS)]
    for x in sorted((n for n in each if n.each not in labels), key=_score, reverse=True):
        plain = [None] if "*" in x.field and (x.decoding or x.varies or len(x.shape) > 1) else []
        found += _whole(scope, "dataset", x, x.each, [*_attributes(x.attributes), *labels, *plain])
    labelled = [one for one in found if "y" in one.call.fields]
    rows = _of_rows(scope, [n for n in known if "*" not in n.field], [] if found else notes)
    return [*labelled, *rows, *(one for one in found if one not in labelled)]


def _whole(scope: Scope, of: str, x: Dataset, name: str, labels: Sequence[Given | None]) -> Iterator[Suggestion]:
    """A sample is a whole dataset, or the image in it; its label is an attribute, or another dataset."""
    letters = None if x.decoding or x.varies else layout_of((1, *x.shape), 0)
    options = {"sample": "dataset" if of == "dataset" else "group", "layout": {"x": letters[1:]} if letters else {}}
    notes = [_SWAPPED] if x.decoding else [_BY_LENGTH] * x.varies
    for y in labels:
        yield _suggestion(scope, f"one {of} per sample: {name}", named(name, x.decoding), y, notes, **options)


def _of_rows(scope: Scope, known: Sequence[Dataset], notes: list[str]) -> Iterator[Suggestion]:
    """Rows, windows of rows, groups or files."""
    training = of_training(node.name for node in known)
    nodes = [node for node in known if node.name in training]
    inputs = [n for n in nodes if n.dtype.kind in "biufc" and not has_word(n.axis, _SPACE)]
    inputs = [n for n in inputs if not (n.kind in CODED or (n.kind in PLAIN and n.flat))]
    inputs.sort(key=_score, reverse=True)
    if not inputs:
        return
    labels = [n for n in nodes if n.kind == CODED[0] or (n.kind in PLAIN + CODED and has_word(n.name, words.LABELS))]
    labels = [n for n in labels if n.dtype.kind in "biuf" and 0 < len(n.shape) < 3]
    labels.sort(key=lambda n: (not has_word(n.name, words.LABELS), not n.flat))
    starts = [n for n in nodes if has_word(n.name.rpartition(".")[2], words.STARTS) and n.dtype.kind in "iu"]
    starts = [n for n in starts if len(n.shape) == 1 and n.shape[0] < _time(inputs[0])[1] >= FEWEST_ROWS]
    for start in starts:
        yield from _windows(scope, inputs[0], [label for label in labels if label.shape == start.shape], start)
    x = next((n for n in inputs if any(_axis(n, label) is not None for label in labels)), inputs[0])
    square = len(x.shape) > 1 and x.shape[0] == x.shape[1] and not x.kind  # one image, unless each row has a label
    labels = [n for n in labels if _axis(x, n) is not None and not (square and n.shape == x.shape[:2])][:4]
    several = max(scope.count, len(scope.paths)) > 1
    h, w, c = x.shape if len(x.shape) == 3 else (9, 1, 0)
    image = c in (3, 4) and max(h, w) <= 4 * min(h, w) and x.dtype.kind == "u" and not x.axis
    image = image or x.one_image or (square and not x.axis)
    alone: list[Given] = [n.field for n in scope.nodes if not n.shape and has_word(n.name, words.LABELS)]
    alone += _attributes(scope.attributes)
    alike = [n for n in scope.nodes if n.shape == x.shape and re.sub(r"\d", "", n.name) == re.sub(r"\d", "", x.name)]
    (across, length), recording = _time(x), anywhere(x.name, words.RECORDINGS) or scope.group is not None
    if not (labels or starts) and (len(alike) > 2 or (image and not several)):
        notes.append(
            f"groups such as {x.field} hold one image each: group='*', or a pattern of these groups, sample='group' "
            "and Field(NAME, decode='image') make each of them a sample"
            if x.kind == "images" and x.shape == (1,)
            else f"{x.field} of shape {x.shape} may be one sample: its rows are none; if there are more of them, "
            """sample="dataset" and fields={"x": NAME} with a * for what differs in their names make each a sample"""
        )
    elif not labels and several and (image or alone):
        yield from _whole(scope, "group" if scope.group else "file", x, x.field, [*alone, None])
    elif (recording and length >= FEWEST_ROWS) or (across and not labels):
        yield from _windows(scope, x, labels, None)
    else:
        masks = [n for n in inputs if n is not x and len(x.shape) > 2 and n.shape[:3] == x.shape[:3]]
        masks = [n for n in masks if has_word(n.name, f"{words.MASKS}|{words.LABELS}") and n.dtype.kind in "biuf"]
        for y in [*labels, *masks[:1], None]:
            yield _row_by_row(scope, x, y)
            if y is not None and y.kind in CODED:
                yield _row_by_row(scope, x, y, null="drop")


def _row_by_row(scope: Scope, x: Dataset, y: Dataset | None, null: str = "") -> Suggestion:
    title, axis, layout = x.field, 0, dict[str, str]()
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
    notes += [_MISSING] * bool(null) + [_WHOLE_GROUPS] * (scope.group is not None and y is None)
    notes += [_REVERSED] * ("MATLAB_class" in x.attributes and len(x.shape) > 2)
    notes += by_groups([n.field for n in scope.nodes if n.shape == (x.shape[axis],) and has_word(n.name, words.GROUPS)])
    return _suggestion(scope, title, named(x.field, x.decoding or packed), label, notes, layout=layout)


def _windows(scope: Scope, x: Dataset, labels: Sequence[Dataset], start: Dataset | None) -> Iterator[Suggestion]:
    """Windows of a recording: where something begins, filled up if some reach beyond its end; or at equal steps."""
    across, length = _time(x)
    size = min(WINDOW, 2 ** int(math.log2(length // 4)))
    ahead, title = max(size // 8, 1), f"windows of {x.field}"
    targets: list[tuple[dict[str, Any] | None, str]]
    if start:
        title, note = f"{title} from {start.field} on", f"the length is a guess: {size} rows"
        targets = [*(({"name": n.field, "per": "anchor"}, note) for n in labels), (None, note)]
    else:
        note, last = f"the lengths are guesses: {size} rows every {ahead}; y is ", "at the last row of a window"
        targets = [({"name": n.field, "window": size - 1}, f"{note}{n.field} {last}") for n in labels]
        after = {"name": x.field, "window": (size, size + ahead)}
        targets.append((after, f"{note}the {ahead} rows after a window"))
    options: dict[str, Any] = {"rows": start.field} if start else {"stride": ahead}
    for (y, note), pad in itertools.product(targets, ({}, {"pad": "zero"}) if start else ({},)):
        fields = {"x": {"name": x.field, "window": (0, size), **pad}, "y": y}
        layout = {key: "CN" for key, field in fields.items() if across and field and field["name"] == x.field}
        yield _suggestion(scope, title, fields["x"], y, [note], layout=layout, **options)


def _suggestion(scope: Scope, title: str, x: Given, y: Given | None, notes: list[str], **options: Any) -> Suggestion:
    fields = {"x": x} if y is None else {"x": x, "y": y}
    parts = [] if "sample" in options else ["group"] if scope.group else ["file"] if len(scope.paths) > 1 else []
    options = {name: value for name, value in {"group": scope.group, **options}.items() if value}
    return Suggestion(title, Call("HDF5Source", _path_of(scope.paths), fields, options), (*notes, *by_groups(parts)))


def _attributes(names: Sequence[str]) -> list[Given]:
    return [{"attr": name} for name in names if has_word(name, words.LABELS)]


def _score(node: Dataset) -> float:
    """The largest dataset, unless names say otherwise."""
    as_input, as_label = has_word(node.name, words.INPUTS), has_word(node.name, f"{words.MASKS}|{words.LABELS}")
    nbytes = math.prod((*node.shape[:1], *node.decoding["image_size"])) if node.decoding else node.bytes
    return math.log10(nbytes + 1) + 1.5 * as_input - 3 * (as_label and not as_input) - 0.5 * node.name.count("/")


def _axis(x: Dataset, label: Dataset) -> int | None:
    """The axis that counts the samples of a label: the first, else the last."""
    count = max(label.shape) if label.flat else label.shape[0]
    places = () if x.one_image else (0,) if x.kind else (0, len(x.shape) - 1)
    return next((axis for axis in places if x.shape[axis] == count and x is not label), None)


def _time(x: Dataset) -> tuple[int, int]:
    """The axis of time of what may be a recording, and its length, the least in all groups; (0, 0) if it is none."""
    if x.kind or x.axis or len(x.shape) > 2 or x.rows is None:
        return 0, 0
    across = len(x.shape) == 2 and max(x.shape[1:]) >= max(FEWEST_ROWS, ACROSS * x.shape[0])
    return (1, max(x.shape)) if across else (0, x.rows[0])


def layout_of(shape: Sequence[int], axis: int) -> str | None:
    """The layout to give a source, whose samples an axis counts; None if it needs none.

    Example:
        >>> layout_of((1000, 64, 48, 3), 0), layout_of((1000, 3, 64, 48), 0), layout_of((1000, 28, 28), 0)
        ('NHWC', 'NCHW', None)
        >>> layout_of((64, 48, 3, 1000), 3), layout_of((500, 5000, 12), 0)
        ('HWCN', 'NWC')
    """
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
    """One path for files: the file, a pattern that matches them and no others, or else a list."""
    begin, end = common_start(paths), os.path.splitext(paths[0])[1]
    folder = os.path.join(glob.escape(os.path.dirname(begin)), "")
    patterns = f"{folder}*{end}", f"{glob.escape(begin)}*{end}", f"{folder}**/*{end}"
    fitting = (p for p in patterns if sorted(filter(os.path.isfile, glob.glob(p, recursive=True))) == sorted(paths))
    return paths[0] if len(paths) == 1 else next(fitting, list(paths))
