"""Which datasets are likely images, labels, masks or recordings: from names, types and shapes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.inspect.contents import Dataset
from lit_async_data.tools.inspect.scopes import Scope, has_word, stage_of, words

# Words of names.
INPUTS = "x|data|images?|imgs?|volumes?|scans?|frames|inputs|signal"
LABELS = "y|labels?|targets?|class(es)?|category|species|diagnosis|gt|digits?|outcome|answer|type|truth|true|tags"
MASKS = "masks?|seg|segmentations?|annotations?|groundtruth"
# What a dataset of one value per sample is about, if it is no label.
GROUPS = "patients?|subjects?|site|donor|group|batch|person|run|session"
OTHERS = (
    "ids?|index|idx|indices|times?|timestamps?|date|rows?|offsets?|fold|split|seed|weights?|lat|lon|latitude|longitude"
)
OTHERS += "|uid|names?|valid|flag|channels?"
_RECORDINGS = "signals?|eeg|ecg|emg|recordings?|series|traces?|waveform"
# Groups of what is neither input nor label: where packed samples come from, and where electrodes are.
_NEVER = {"origin", "electrode", "electrodes"}
# Axes of a grid: along one in space, there are no samples; along one in time, there are.
_SPACE, _TIME = "lat|latitude|lon|longitude|x|y|z|level", "time|date|samples?|obs|case"
# Windows: the most rows; the fewest rows of a recording; how many times as many columns it has if it lies across.
WINDOW, FEWEST_ROWS, ACROSS = 512, 256, 64
# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32


@dataclasses.dataclass(frozen=True)
class Guess:
    """What a sample is, and the fields of its source by batch key.

    Attributes:
        likely: Whether ``y`` has the name of a label; else its values must look like class numbers.
        stages: The names of the datasets of each stage, by stage and batch key, if each has its own.
    """

    title: str
    fields: Mapping[str, str | Field]
    layout: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stride: int | None = None
    notes: tuple[str, ...] = ()
    likely: bool = True
    stages: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


def guesses(
    scope: Scope, usable: Sequence[Dataset], *, writer: str | None, parts: int = 1
) -> tuple[list[list[Guess]], str]:
    """What a source could read: alternatives in each list, the likeliest first; or why there is nothing.

    Args:
        scope: Where to look.
        usable: Its datasets that can be fields.
        writer: What wrote the file, if that is known.
        parts: Number of groups or files, if all have equal shapes.
    """
    staged: dict[str, dict[str, str]] = {}
    for node in usable:
        stage, rest = stage_of(scope.relative(node))
        staged.setdefault(stage, {})[rest] = scope.relative(node)
    if "train" not in staged or len(staged.keys() - {""}) < 2:
        return _Guesser(scope, usable, writer).guesses(parts)
    of_training = [node for node in usable if stage_of(scope.relative(node))[0] == "train"]
    found, why = _Guesser(scope, of_training, writer).guesses(parts)
    return [[_for_stages(guess, staged) for guess in each] for each in found], why


def _for_stages(guess: Guess, staged: Mapping[str, Mapping[str, str]]) -> Guess:
    """A guess for training, with the names of the datasets of all stages that have them."""
    rests = {key: stage_of(Field.of(given).name)[1] for key, given in guess.fields.items()}
    stages = {
        stage: {key: staged[stage][rest] for key, rest in rests.items()}
        for stage in ("train", "val", "test")
        if set(rests.values()) <= staged.get(stage, {}).keys()
    }
    return dataclasses.replace(guess, title=" ".join(stage_of(word)[1] for word in guess.title.split()), stages=stages)


class _Guesser:
    def __init__(self, scope: Scope, nodes: Sequence[Dataset], writer: str | None) -> None:
        self._scope, self._name, self._writer = scope, scope.relative, writer
        self._nodes = [node for node in nodes if not (node.scale or _NEVER & set(words(node.name.lower())))]

    def guesses(self, parts: int) -> tuple[list[list[Guess]], str]:
        inputs, labels = sorted(filter(_can_be_input, self._nodes), key=_score, reverse=True), self._labels()
        if not inputs:
            return [], ""
        x = next((n for n in inputs if any(_axis(n, label) is not None for label in labels)), inputs[0])
        labels = [label for label in labels if _axis(x, label) is not None]
        known = any(has_word(label.name, LABELS) for label in labels)
        if not known and (why := self._why_no_samples(x, inputs, parts)):
            return [], why
        found = [self._labelled(x, label) for label in labels]
        if self._is_recording(x) or (_lies_across(x) and not known):
            windows = [self._windows(x, label) for label in [*labels, None]]
            return ([found, windows] if found else [windows]), ""
        masks = [n for n in inputs if n is not x and len(x.shape) > 2 and n.shape[:3] == x.shape[:3] and _is_mask(n)]
        masked = [[self._masked(x, mask)] for mask in masks[:1]]
        return ([] if masks and not known else [[*found, self._alone(x, inputs)]]) + masked, ""

    def _why_no_samples(self, x: Dataset, inputs: Sequence[Dataset], parts: int) -> str:
        alike = [n for n in inputs if n.shape == x.shape and re.sub(r"\d", "", n.name) == re.sub(r"\d", "", x.name)]
        scalar = any(not node.shape and has_word(node.name, LABELS) for node in self._scope.nodes)
        h, w, c = x.shape if len(x.shape) == 3 else (9, 1, 0)
        image = c in (3, 4) and max(h, w) <= 4 * min(h, w) and x.dtype.kind == "u" and not x.axes
        if len(alike) > 2:
            count, what = len(alike), f"{len(alike)} datasets such as {self._name(x)}"
        elif parts > 1 and (scalar or image):
            count, what = parts, f"{parts} {'groups' if self._scope.groups else 'files'} with {self._name(x)}"
        else:
            return f"{self._name(x)} of shape {x.shape} looks like one image: its rows are no samples" if image else ""
        return (
            f"{what} of one shape {x.shape} are {count:,} samples, if each is one; this layout is not read yet: write "
            "them one after the other into one dataset, or write a Source of your own (docs/data/sources.md)"
        )

    def _labels(self) -> list[Dataset]:
        """The datasets of one value per sample, the likeliest label first; not those named after something else."""
        found = []
        for node in self._nodes:
            named, flat = has_word(node.name, LABELS), len(node.shape) < 2 or (len(node.shape) == 2 and 1 in node.shape)
            whole = node.dtype.kind in "iu" and flat and not has_word(node.name, f"{OTHERS}|{GROUPS}|{MASKS}")
            if node.shape and node.encoded in ("", "categorical") and node.dtype.kind in "biuf" and len(node.shape) < 3:
                found += [((named, bool(node.encoded), flat), node)] if named or whole else []
        return [node for _, node in sorted(found, key=lambda pair: pair[0], reverse=True)][:4]

    def _is_recording(self, x: Dataset) -> bool:
        rows = max(x.shape) if _lies_across(x) else min(shape[0] for shape in self._scope.shapes(x))
        named = any(has_word(each, _RECORDINGS) for each in x.name.split("/")) or bool(self._scope.groups)
        return named and not (x.encoded or x.axes or x.images) and len(x.shape) <= 2 and rows >= FEWEST_ROWS

    def _labelled(self, x: Dataset, label: Dataset) -> Guess:
        name, count, one = self._name(label), _count(label), len(label.shape) == 2 and 1 in label.shape
        of_x, layout = self._input(x, _axis(x, label) or 0)
        groups = [self._name(n) for n in self._scope.nodes if n.shape == (count,) and has_word(n.name, GROUPS)]
        notes = [
            f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{group}") keeps each {group} in one stage'
            for group in groups[:1]
        ]
        if self._writer == "MATLAB v7.3" and len(x.shape) > 2:
            notes.append(
                "MATLAB stores axes in reverse: images have width before height; transpose them in a transform"
            )
        fields = {"x": of_x, "y": Field(name, column=0) if one else name}
        layouts = layout | ({"y": "CN"} if one and label.shape[0] == 1 else {})
        likely = has_word(label.name, LABELS) or bool(label.encoded)
        return Guess(f"{_what(x)} with {name}", fields, layouts, notes=(*_decoding(x), *notes), likely=likely)

    def _masked(self, x: Dataset, mask: Dataset) -> Guess:
        of_x, layout = self._input(x, 0)
        layouts = {"x": layout["x"], "y": layout["x"]} if layout and len(mask.shape) == len(x.shape) else layout
        return Guess(f"{_what(x)} with {self._name(mask)}", {"x": of_x, "y": self._name(mask)}, layouts)

    def _alone(self, x: Dataset, inputs: Sequence[Dataset]) -> Guess:
        time = next((place for place, axis in enumerate(x.axes) if has_word(axis, _TIME)), 0)
        of_x, layout = self._input(x, time)
        grid = [n for n in inputs if x.axes and (n.shape, n.axes) == (x.shape, x.axes)]
        if len(grid) > 1:
            fields = {self._name(n).replace("/", "_"): self._input(n, time)[0] for n in grid}
            return Guess("variables of one grid", fields, dict.fromkeys(fields, layout["x"]) if layout else {})
        return Guess(f"{_what(x)} of {self._name(x)}", {"x": of_x}, layout, notes=_decoding(x))

    def _windows(self, x: Dataset, label: Dataset | None) -> Guess:
        across, name = _lies_across(x), self._name(x)
        rows = max(x.shape) if across else min(shape[0] for shape in self._scope.shapes(x))
        size = min(WINDOW, 2 ** int(math.log2(rows // 4)))
        ahead = max(size // 8, 1)
        y, target = Field(name, window=(size, size + ahead)), f"the {ahead} rows after a window"
        if label is not None and len(label.shape) == 1:
            y, target = Field(self._name(label), window=size - 1), f"{self._name(label)} at the last row of a window"
        notes = [f"the lengths are guesses: {size} rows every {ahead}; y is {target}"]
        if len(x.shape) == 2 and not across:
            notes.append('layout={"x": "NC"} puts channels before time, as convolutions want them')
        layout = {"x": "CN"} | ({"y": "CN"} if y.name == name else {}) if across else {}
        likely = label is None or has_word(label.name, LABELS)
        fields = {"x": Field(name, window=(0, size)), "y": y}
        return Guess(f"windows of {name}", fields, layout, ahead, tuple(notes), likely)

    def _input(self, node: Dataset, axis: int) -> tuple[str | Field, dict[str, str]]:
        """A dataset as a field, and its layout."""
        letters = None if node.encoded else layout_of(node.shape, axis)
        name, packed = self._name(node), node.packed and self._writer == "NetCDF"
        return (Field(name, mask_and_scale=True) if packed else name), ({"x": letters} if letters else {})


def _is_mask(node: Dataset) -> bool:
    return has_word(node.name, MASKS) or (has_word(node.name, LABELS) and node.dtype.kind in "biu")


def _can_be_input(node: Dataset) -> bool:
    if node.encoded == "categorical" or node.dtype.kind not in "biufc":
        return False
    if node.axes and has_word(node.axes[0], _SPACE) and not any(has_word(axis, _TIME) for axis in node.axes):
        return False
    return bool(node.encoded) or math.prod(node.shape) > max(node.shape)


def _score(node: Dataset) -> float:
    """The largest dataset, unless names say otherwise."""
    as_input, as_label = has_word(node.name, INPUTS), has_word(node.name, f"{MASKS}|{LABELS}")
    return math.log10(node.bytes + 1) + 1.5 * as_input - 3 * (as_label and not as_input) - 0.5 * node.name.count("/")


def _count(label: Dataset) -> int:
    return label.shape[1] if len(label.shape) == 2 and label.shape[0] == 1 else label.shape[0]


def _axis(x: Dataset, label: Dataset) -> int | None:
    """The axis that counts the samples of a label: the first, else the last that fits."""
    fitting = [axis for axis, n in enumerate(x.shape) if n == _count(label)]
    if not fitting or x is label or (x.encoded and fitting[0]):
        return None
    return 0 if 0 in fitting else fitting[-1]


def _lies_across(x: Dataset) -> bool:
    """Whether a recording has its time on the second axis."""
    return not (x.encoded or x.axes) and len(x.shape) == 2 and x.shape[1] >= max(FEWEST_ROWS, ACROSS * x.shape[0])


def _what(x: Dataset) -> str:
    """What samples of a dataset are called."""
    if x.encoded == "variable" or x.images:
        return f"encoded {x.images} images" if x.images else "sequences"
    if len(x.shape) == 3:
        return "images" if max(x.shape[1:]) <= 4 * min(x.shape[1:]) else "series"
    space = len(x.shape) - 1 - (layout_of(x.shape, 0) is not None)
    return "rows" if len(x.shape) < 3 else "images" if space == 2 else "volumes"


def _decoding(x: Dataset) -> tuple[str, ...]:
    return ("decode the images in a sample_transform",) if x.images else ()


def layout_of(shape: Sequence[int], axis: int) -> str | None:
    """The layout to give a source; None if it needs none: samples first, and no channels.

    Args:
        shape: As stored.
        axis: The axis that counts samples.

    Example:
        >>> layout_of((1000, 64, 48, 3), 0), layout_of((1000, 3, 64, 48), 0), layout_of((1000, 28, 28), 0)
        ('NHWC', 'NCHW', None)
        >>> layout_of((64, 48, 3, 1000), 3), layout_of((500, 5000, 12), 0)
        ('HWCN', 'NWC')
    """
    rest = [n for place, n in enumerate(shape) if place != axis]
    places = [place for place in (len(rest) - 1, 0) if len(rest) > 1 and _is_short(rest, place)]
    channel = min(places, key=lambda place: (rest[place], -place), default=None)
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
