"""Which datasets are likely images, labels, masks or recordings; from names, types and shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.inspect.contents.scope import Scope, stage_of, words
from lit_async_data.tools.inspect.contents.tree import Node
from lit_async_data.tools.inspect.guesses.axes import layout_of

INPUTS = {
    "x",
    "data",
    "image",
    "images",
    "img",
    "imgs",
    "volume",
    "volumes",
    "scan",
    "scans",
    "frames",
    "inputs",
    "signal",
}
LABELS = {"y", "label", "labels", "target", "targets", "class", "classes", "category", "species", "diagnosis", "gt"}
LABELS |= {"digit", "digits", "outcome", "answer", "type", "truth"}
MASKS = {"mask", "masks", "seg", "segmentation", "segmentations", "annotation", "annotations", "groundtruth"}
# What a dataset of one value per sample is about, if it is no label.
GROUPS = {"patient", "patients", "subject", "subjects", "site", "donor", "group", "batch", "person", "run", "session"}
OTHERS = {
    "id",
    "ids",
    "index",
    "idx",
    "indices",
    "time",
    "times",
    "timestamp",
    "date",
    "row",
    "rows",
    "offset",
    "offsets",
}
OTHERS |= {"fold", "split", "seed", "weight", "weights", "lat", "lon", "latitude", "longitude", "uid", "name", "names"}
RECORDINGS = {
    "signal",
    "signals",
    "eeg",
    "ecg",
    "emg",
    "recording",
    "recordings",
    "series",
    "trace",
    "traces",
    "waveform",
}
# Windows: the most rows, and the fewest rows of a recording.
WINDOW, FEWEST_ROWS = 512, 256


@dataclasses.dataclass(frozen=True)
class Guess:
    """Fields of one source.

    Attributes:
        title: What a sample is.
        fields: By batch key.
        layout: Letters of the stored axes, by batch key, where not the samples come first.
        stride: Rows from one window to the next.
        notes: What to know before using it.
        stages: The names of the datasets of each stage, by stage and batch key, if each has its own.
    """

    title: str
    fields: Mapping[str, str | Field]
    layout: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stride: int | None = None
    notes: tuple[str, ...] = ()
    stages: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Label:
    """A dataset of one value per sample.

    Attributes:
        node: The dataset.
        count: Number of samples.
        field: It as a field.
        layout: Letters of its axes, if samples are not on the first.
        score: How likely it is what a network learns.
    """

    node: Node
    count: int
    field: str | Field
    layout: str | None
    score: int


def guesses(scope: Scope, usable: Sequence[Node], *, writer: str | None) -> list[list[Guess]]:
    """What a source could read from a scope: alternatives in each list, the likeliest first."""
    staged = _staged(scope, usable)
    if staged:
        train = staged["train"]
        found = _guesses(scope, list(train.values()), writer)
        return [kept for each in found if (kept := [g for g in (_for_stages(scope, g, staged) for g in each) if g])]
    return _guesses(scope, usable, writer)


def _guesses(scope: Scope, nodes: Sequence[Node], writer: str | None) -> list[list[Guess]]:
    inputs = sorted((n for n in nodes if _can_be_input(n)), key=_input_score, reverse=True)
    labels = sorted(_labels(scope, nodes), key=lambda label: label.score, reverse=True)
    for node in inputs:
        pairs = [
            (label, axis) for label in labels if label.score > 0 and (axis := _axis(node, label.count)) is not None
        ]
        if pairs and len(node.shape or ()) > 1:
            found = [[_labelled(scope, node, label, axis, writer=writer) for label, axis in pairs[:4]]]
            found += [[_masked(scope, node, mask)] for mask in _masks(node, inputs)]
            return found + ([[_windows(scope, node, pairs[0][0])]] if _is_recording(scope, node) else [])
    if not inputs:
        return []
    first = inputs[0]
    masks = _masks(first, inputs)
    if masks:
        return [[_masked(scope, first, masks[0])]]
    if _is_recording(scope, first, unlabelled=True) and writer not in ("NetCDF", "AnnData"):
        return [[_windows(scope, first, None)]]
    return [[_alone(scope, first, inputs, writer)]] if len(first.shape or ()) > 1 or first.encoded else []


# -- what a dataset can be --------------------------------------------------------------------------------------------


def _is(node: Node, known: set[str]) -> bool:
    return any(word.lower() in known for word in words(node.last))


def is_label(node: Node) -> bool:
    """Whether a dataset has the name of a label."""
    return _is(node, LABELS)


def _can_be_input(node: Node) -> bool:
    if node.scale or node.encoded == "categorical" or not node.shape or node.dtype is None:
        return False
    flat = len(node.shape) == 1 or (len(node.shape) == 2 and 1 in node.shape)
    return node.dtype.kind in "biufc" and not (flat and (_is(node, LABELS | OTHERS | GROUPS)))


def _input_score(node: Node) -> float:
    """The largest dataset, unless names say otherwise."""
    flat = len(node.shape or ()) < 2 and not node.encoded
    named = 1.5 * _is(node, INPUTS) - 3 * (_is(node, MASKS) or (_is(node, LABELS) and not _is(node, INPUTS))) - 2 * flat
    return math.log10(node.nbytes + 1) + named - 0.5 * node.name.count("/")


def _labels(scope: Scope, nodes: Sequence[Node]) -> Iterator[Label]:
    for node in nodes:
        shape, name = node.shape or (), scope.relative(node)
        if (
            node.scale
            or node.encoded in ("csr", "csc", "variable")
            or node.dtype is None
            or node.dtype.kind not in "biuf"
        ):
            continue
        score = 4 * _is(node, LABELS) + 2 * (node.dtype.kind in "biu") + (node.encoded == "categorical") - 1
        score -= 8 * (_is(node, OTHERS | GROUPS) and not _is(node, LABELS))
        if len(shape) == 1:
            yield Label(node, shape[0], name, None, score)
        elif len(shape) == 2 and 1 in shape:
            of_first = shape[1] == 1
            yield Label(node, shape[0 if of_first else 1], Field(name, column=0), None if of_first else "CN", score)
        elif len(shape) == 2 and _is(node, LABELS):
            yield Label(node, shape[0], name, None, score - 2)


def _axis(node: Node, count: int) -> int | None:
    """The axis that counts samples, given their number: the first, else the last that fits."""
    shape = node.shape or ()
    if node.encoded:
        return 0 if shape[:1] == (count,) else None
    fitting = [axis for axis, n in enumerate(shape) if n == count]
    return None if not fitting else 0 if 0 in fitting else fitting[-1]


def _masks(image: Node, inputs: Sequence[Node]) -> list[Node]:
    """The datasets that give each pixel of an image a class; at most one."""
    found = []
    for node in inputs:
        shape, other = node.shape or (), image.shape or ()
        same = node is not image and len(shape) > 2 and shape[:3] == other[:3] and node.dtype is not None
        if same and (_is(node, MASKS) or (_is(node, LABELS) and node.dtype.kind in "biu")):  # type: ignore[union-attr]
            found.append(node)
    return found[:1]


def _is_recording(scope: Scope, node: Node, *, unlabelled: bool = False) -> bool:
    shape, rows = node.shape or (), scope.rows(node)
    if node.encoded or len(shape) > 2 or rows is None or rows[0] < FEWEST_ROWS:
        return False
    return unlabelled or bool(scope.groups) or _is(node, RECORDINGS)


# -- guesses ----------------------------------------------------------------------------------------------------------


def _input(scope: Scope, node: Node, axis: int, writer: str | None) -> tuple[str | Field, str | None]:
    """A dataset as field ``x``, and its layout."""
    name = scope.relative(node)
    layout = None if node.encoded else layout_of(node.shape or (), axis, reverse=writer == "MATLAB v7.3")
    return (Field(name, mask_and_scale=True) if node.packed and writer == "NetCDF" else name), layout


def _layouts(**given: str | None) -> dict[str, str]:
    return {key: letters for key, letters in given.items() if letters}


def _what(node: Node) -> str:
    """What samples of a dataset are called."""
    sides = (node.shape or ())[1:]
    if node.encoded == "variable":
        return "sequences"
    if len(sides) == 2:
        return "images" if max(sides) <= 4 * min(sides) else "series"
    channels = layout_of(node.shape or (), 0) is not None
    return "rows" if len(sides) < 2 else "images" if len(sides) - channels == 2 else "volumes"


def _labelled(scope: Scope, node: Node, label: Label, axis: int, *, writer: str | None) -> Guess:
    x, layout = _input(scope, node, axis, writer)
    notes = list(_grouping(scope, label.count))
    if writer == "MATLAB v7.3" and len(node.shape or ()) > 2:
        notes.append(
            "MATLAB stores axes in reverse: images come with width before height; transpose them in a transform"
        )
    return Guess(
        f"{_what(node)} with {scope.relative(label.node)}",
        {"x": x, "y": label.field},
        _layouts(x=layout, y=label.layout),
        notes=tuple(notes),
    )


def _grouping(scope: Scope, count: int) -> Iterator[str]:
    for node in scope.nodes:  # also text, which no field can be
        if node.shape == (count,) and _is(node, GROUPS):
            name = scope.relative(node)
            yield f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{name}") keeps each {node.last} in one stage'
            return


def _masked(scope: Scope, image: Node, mask: Node) -> Guess:
    x, layout = _input(scope, image, 0, None)
    return Guess(
        f"{_what(image)} with {scope.relative(mask)}",
        {"x": x, "y": scope.relative(mask)},
        _layouts(x=layout, y=layout if len(mask.shape or ()) == len(image.shape or ()) else None),
    )


def _alone(scope: Scope, first: Node, inputs: Sequence[Node], writer: str | None) -> Guess:
    alike = [n for n in inputs if n.shape == first.shape and scope.relative(n).isidentifier()]
    if writer == "NetCDF" and len(alike) > 1:
        fields = {scope.relative(n): _input(scope, n, 0, writer)[0] for n in alike}
        return Guess("variables of one grid", fields)
    x, layout = _input(scope, first, 0, writer)
    return Guess(f"{_what(first)} of {scope.relative(first)}", {"x": x}, _layouts(x=layout))


def _windows(scope: Scope, node: Node, label: Label | None) -> Guess:
    rows = scope.rows(node) or (FEWEST_ROWS, FEWEST_ROWS)
    size = min(WINDOW, 2 ** int(math.log2(rows[0] // 4)))
    name, ahead = scope.relative(node), max(size // 8, 1)
    y: Field
    if label is not None and isinstance(label.field, str):
        y, target = Field(label.field, window=size - 1), f"y is {label.field} at the last row of a window"
    else:
        y, target = Field(name, window=(size, size + ahead)), f"y is the {ahead} rows after a window"
    notes = [f"the lengths are guesses: {size} rows every {ahead}; {target}"]
    if len(node.shape or ()) == 2:
        notes.append('layout={"x": "NC"} puts channels before time, as convolutions want them')
    return Guess(f"windows of {name}", {"x": Field(name, window=(0, size)), "y": y}, stride=ahead, notes=tuple(notes))


# -- datasets of stages -----------------------------------------------------------------------------------------------


def _staged(scope: Scope, nodes: Sequence[Node]) -> dict[str, dict[str, Node]]:
    """The datasets of each stage by their name without it; empty unless there are those of training and others."""
    found: dict[str, dict[str, Node]] = {}
    for node in nodes:
        stage, rest = stage_of(scope.relative(node))
        if stage:
            found.setdefault(stage, {})[rest] = node
    return found if "train" in found and len(found) > 1 else {}


def _for_stages(scope: Scope, guess: Guess, staged: Mapping[str, Mapping[str, Node]]) -> Guess | None:
    """A guess for training, with the names of the datasets of all stages that have them."""
    names: dict[str, dict[str, str]] = {}
    for stage in ("train", "val", "test"):
        of_stage = {rest: scope.relative(node) for rest, node in staged.get(stage, {}).items()}
        keys = {}
        for key, given in guess.fields.items():
            _, rest = stage_of(given if isinstance(given, str) else given.name)
            keys[key] = of_stage.get(rest, "")
        if all(keys.values()):
            names[stage] = keys
    of_training = names.get("train", {}).get("y", "")
    title = guess.title.removesuffix(of_training) + stage_of(of_training)[1]
    return dataclasses.replace(guess, title=title, stages=names) if "train" in names else None
