"""Which datasets are likely images, labels, masks or recordings: from names, types and shapes."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.tools.call import Call, Given
from lit_async_data.tools.inspect import words
from lit_async_data.tools.inspect.contents import Dataset, Scope
from lit_async_data.tools.inspect.report import Suggestion, by_groups
from lit_async_data.tools.inspect.words import anywhere, common_start, has_word, of_training

# Groups of what is neither input nor label: where packed samples come from, and where electrodes are.
_NEVER = "origin|electrodes?"
# Axes of a grid in space: along one, there are no samples.
_SPACE = "lat|latitude|lon|longitude|x|y|z|level"
# Windows: the most rows; the fewest rows of a recording; how many times as many columns it has if it lies across.
WINDOW, FEWEST_ROWS, ACROSS = 512, 256, 64
# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32


def suggestions(scope: Scope, paths: Sequence[str]) -> tuple[list[Suggestion], str]:
    """What a source could read, the likeliest first; or why there is nothing."""
    known = [n for n in scope.nodes if n.reading and not (n.scale or n.pandas or anywhere(n.name, _NEVER))]
    training = of_training(node.name for node in known)
    nodes = [node for node in known if node.name in training]
    inputs = sorted(filter(_can_be_input, nodes), key=_score, reverse=True)
    labels = sorted(filter(_can_be_label, nodes), key=lambda n: (not has_word(n.name, words.LABELS), not _is_flat(n)))
    if not inputs:
        return [], ""
    x = next((n for n in inputs if any(_axis(n, label) is not None for label in labels)), inputs[0])
    labels = [label for label in labels if _axis(x, label) is not None][:4]
    parts = scope.count if scope.group else len(paths)
    if not labels and (why := _why_no_samples(scope, x, parts)):
        return [], why
    if not labels and parts > 1 and (_is_image(x) or _single_labels(scope)):
        return [_groups(scope, paths, x, y) for y in [*_single_labels(scope), None]], ""
    if _is_recording(scope, x) or (_lies_across(x) and not labels):
        return [_windows(scope, paths, x, label) for label in [*labels, None]], ""
    masks = [n for n in inputs if n is not x and len(x.shape) > 2 and n.shape[:3] == x.shape[:3] and _is_mask(n)]
    return [_samples(scope, paths, x, y) for y in [*labels, *masks[:1], None]], ""


def _why_no_samples(scope: Scope, x: Dataset, parts: int) -> str:
    alike = [n for n in scope.nodes if n.shape == x.shape and re.sub(r"\d", "", n.name) == re.sub(r"\d", "", x.name)]
    if len(alike) < 3 and not (parts == 1 and _is_image(x)):
        return ""
    return (
        f"{scope.relative(x)} of shape {x.shape} may be one sample: its rows are none; this layout is not read yet: "
        "write samples one after the other into one dataset, or write a Source of your own (docs/data/sources.md)"
    )


def _is_image(x: Dataset) -> bool:
    h, w, c = x.shape if len(x.shape) == 3 else (9, 1, 0)
    return c in (3, 4) and max(h, w) <= 4 * min(h, w) and x.dtype.kind == "u" and not x.axis


def _single_labels(scope: Scope) -> list[Given]:
    """Labels that are single numbers: datasets without axes, and attributes."""
    scalars: list[Given] = [
        scope.relative(each) for each in scope.nodes if not each.shape and has_word(each.name, words.LABELS)
    ]
    return scalars + [{"attr": each} for each in scope.attributes if has_word(each, words.LABELS)]


def _groups(scope: Scope, paths: Sequence[str], x: Dataset, label: Given | None) -> Suggestion:
    """A group, or a file, with its whole datasets."""
    name, letters = scope.relative(x), layout_of((1, *x.shape), 0)
    fields: dict[str, Given] = {"x": name} | ({} if label is None else {"y": label})
    call = _call(scope, paths, fields, sample="group", layout={"x": letters[1:]} if letters else {})
    return Suggestion(f"one {'group' if scope.group else 'file'} per sample: {name}", call)


def _samples(scope: Scope, paths: Sequence[str], x: Dataset, y: Dataset | None) -> Suggestion:
    """A row of each dataset."""
    name, axis = scope.relative(x), 0
    fields: dict[str, Given] = {"x": {"name": name, "mask_and_scale": True} if x.packed else name}
    layouts = dict[str, str]()
    title, notes = name, list[str]()
    if y is not None:
        title, fields["y"] = f"{name} with {scope.relative(y)}", scope.relative(y)
        if len(y.shape) < 3:
            axis = _axis(x, y) or 0
        if len(y.shape) == 2 and _is_flat(y):
            fields["y"] = {"name": scope.relative(y), "column": 0}
            layouts |= {"y": "CN"} if y.shape[0] == 1 else {}
    if letters := None if x.encoded else layout_of(x.shape, axis):
        same = y is not None and len(y.shape) == len(x.shape) > 2
        layouts |= {"x": letters} | ({"y": letters} if same else {})
    if x.size:
        fields["x"] = {"name": name, "decode": "image", "image_size": list(x.size)}
        notes.append(
            "look at the colours of x: if red is blue, its RGB was encoded as BGR, and channels: BGR is missing"
        )
    elif x.images:
        notes.append(f"x holds encoded {x.images} images: decode them in a sample_transform")
    elif x.encoded == "variable":
        notes.append(
            "samples have different lengths: batch_by=x (loader.batch_by=x) puts those of like length together"
        )
    if x.matlab and len(x.shape) > 2:
        notes.append("MATLAB stores axes in reverse: images have width before height; transpose them in a transform")
    groups = [n for n in scope.nodes if n.shape == (x.shape[axis],) and has_word(n.name, words.GROUPS)]
    named = [scope.relative(n) + "/codes" * (n.encoded == "categorical") for n in groups]
    notes += by_groups([*named, *_parts(scope, paths)])
    return Suggestion(title, _call(scope, paths, fields, layout=layouts), tuple(notes))


def _windows(scope: Scope, paths: Sequence[str], x: Dataset, label: Dataset | None) -> Suggestion:
    across, name = _lies_across(x), scope.relative(x)
    size = min(WINDOW, 2 ** int(math.log2(_rows(x) // 4)))
    ahead = max(size // 8, 1)
    y, target = {"name": name, "window": (size, size + ahead)}, f"the {ahead} rows after a window"
    if label is not None:
        y = {"name": scope.relative(label), "window": size - 1}
        target = f"{y['name']} at the last row of a window"
    notes = [f"the lengths are guesses: {size} rows every {ahead}; y is {target}"]
    if len(x.shape) == 2 and not across:
        notes.append('layout={"x": "NC"} puts channels before time, as convolutions want them')
    layout = {"x": "CN"} | ({"y": "CN"} if label is None else {}) if across else {}
    fields: dict[str, Given] = {"x": {"name": name, "window": (0, size)}, "y": y}
    call = _call(scope, paths, fields, layout=layout, stride=ahead)
    return Suggestion(f"windows of {name}", call, (*notes, *by_groups(_parts(scope, paths))))


def _call(scope: Scope, paths: Sequence[str], fields: Mapping[str, Given], **options: Any) -> Call:
    given = {"group": scope.group, **options}
    return Call("HDF5Source", _path_of(paths), fields, {name: value for name, value in given.items() if value})


def _parts(scope: Scope, paths: Sequence[str]) -> list[str]:
    return ["group"] if scope.group else ["file"] if len(paths) > 1 else []


def _is_mask(node: Dataset) -> bool:
    return has_word(node.name, words.MASKS) or (has_word(node.name, words.LABELS) and node.dtype.kind in "biu")


def _is_flat(label: Dataset) -> bool:
    return len(label.shape) == 1 or 1 in label.shape


def _can_be_label(node: Dataset) -> bool:
    named = has_word(node.name, words.LABELS) and node.encoded == ""
    return (named or node.encoded == "categorical") and node.dtype.kind in "biuf" and 0 < len(node.shape) < 3


def _can_be_input(node: Dataset) -> bool:
    if node.encoded == "categorical" or node.dtype.kind not in "biufc" or has_word(node.axis, _SPACE):
        return False
    return bool(node.encoded) or math.prod(node.shape) > max(node.shape)


def _score(node: Dataset) -> float:
    """The largest dataset, unless names say otherwise."""
    as_input, as_label = has_word(node.name, words.INPUTS), has_word(node.name, f"{words.MASKS}|{words.LABELS}")
    nbytes = math.prod((node.shape[0], *node.size)) if node.size else node.bytes
    return math.log10(nbytes + 1) + 1.5 * as_input - 3 * (as_label and not as_input) - 0.5 * node.name.count("/")


def _axis(x: Dataset, label: Dataset) -> int | None:
    """The axis that counts the samples of a label: the first, else the last."""
    count = label.shape[1] if len(label.shape) == 2 and label.shape[0] == 1 else label.shape[0]
    places = (0,) if x.encoded else (0, len(x.shape) - 1)
    return next((axis for axis in places if x.shape[axis] == count and x is not label), None)


def _is_recording(scope: Scope, x: Dataset) -> bool:
    named = anywhere(x.name, words.RECORDINGS) or scope.group is not None
    return named and not (x.encoded or x.axis or x.images) and len(x.shape) <= 2 and _rows(x) >= FEWEST_ROWS


def _lies_across(x: Dataset) -> bool:
    """Whether a recording has its time on the second axis."""
    return not (x.encoded or x.axis) and len(x.shape) == 2 and x.shape[1] >= max(FEWEST_ROWS, ACROSS * x.shape[0])


def _rows(x: Dataset) -> int:
    """The fewest rows of a recording in all groups."""
    return max(x.shape) if _lies_across(x) or x.rows is None else x.rows[0]


def layout_of(shape: Sequence[int], axis: int) -> str | None:
    """The layout to give a source, whose samples an axis counts; None if it needs none.

    Example:
        >>> layout_of((1000, 64, 48, 3), 0), layout_of((1000, 3, 64, 48), 0), layout_of((1000, 28, 28), 0)
        ('NHWC', 'NCHW', None)
        >>> layout_of((64, 48, 3, 1000), 3), layout_of((500, 5000, 12), 0)
        ('HWCN', 'NWC')
    """
    rest = [n for place, n in enumerate(shape) if place != axis]
    places = [place for place in (len(rest) - 1, 0) if len(rest) > 1 and _is_short(rest, place)]
    channel = min(places, key=lambda place: rest[place], default=None)
    letters = {0: "", 1: "W", 2: "HW", 3: "DHW"}.get(len(rest) - (channel is not None))
    if letters is None or (axis == 0 and channel is None):
        return None
    letters = "C" if len(rest) == 1 else letters
    if channel is not None:
        letters = letters[:channel] + "C" + letters[channel:]
    return f"{letters[:axis]}N{letters[axis:]}"


def _is_short(rest: Sequence[int], place: int) -> bool:
    n, least = rest[place], min(each for other, each in enumerate(rest) if other != place)
    return (n <= FEW and len(rest) > 2 and n <= least) or (n <= MOST_CHANNELS and 4 * n <= least)


def _path_of(paths: Sequence[str]) -> str | list[str]:
    """One path for files: the file, a pattern that matches them and no others, or else a list."""
    if len(paths) == 1:
        return paths[0]
    folder, name = os.path.split(common_start(paths))
    begin, end = os.path.join(glob.escape(folder), ""), os.path.splitext(paths[0])[1]
    for pattern in (f"{begin}*{end}", f"{begin}{glob.escape(name)}*{end}", f"{begin}**/*{end}"):
        if sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True))) == sorted(paths):
            return pattern
    return list(paths)
