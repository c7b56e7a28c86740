"""How many classes the fields of a source have, and their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import contradict, listed_names
from lit_async_data.errors import ConfigError, FormatError, ManifestError, ResumeError
from lit_async_data.sources.contract.source import Source, read

# Labels per read while `count_classes` looks for the largest one.
LABELS_PER_READ = 2**20


def class_names(source: Source) -> dict[str, tuple[str, ...]]:
    """The names of the values 0, 1, 2, … of each field that has class names."""
    return {key: field.classes for key, field in source.spec.fields.items() if field.classes}


def with_classes(source: Source, classes: Mapping[str, Sequence[str]]) -> Source:
    """A copy of a source whose class numbers follow other names, if the source found its own classes in text."""
    own = class_names(source)
    changed = {
        key: names for key, names in classes.items() if key in source.spec.fields and own.get(key) != tuple(names)
    }
    return source.with_classes(changed) if changed else source


def with_training_classes(stages: Mapping[Any, Sequence[Source]]) -> dict[Any, list[Source]]:
    """The sources of each stage, with the class numbers of the first source: that of training, if there is one."""
    first = next(source for sources in stages.values() for source in sources)
    names = class_names(first)
    renumbered = {stage: [with_classes(source, names) for source in sources] for stage, sources in stages.items()}
    for stage, sources in renumbered.items():
        for source in sources:
            _check_kinds(source, first, stage)
    return renumbered


def with_saved_classes(
    stages: Mapping[Any, Sequence[Source]], saved: Mapping[str, list[str]]
) -> dict[Any, list[Source]]:
    """The sources of each stage, with the class numbers of a checkpoint."""
    try:
        renumbered = {stage: [with_classes(source, saved) for source in sources] for stage, sources in stages.items()}
    except (FormatError, ManifestError) as error:
        raise ResumeError(f"the classes are not those of the checkpoint: {error}", file=error.file) from error
    found = class_names(next(source for sources in renumbered.values() for source in sources))
    for key, names in saved.items():
        now = found.get(key)
        if now is not None and list(now) != names:
            raise ResumeError(
                f"the classes of {key} are {', '.join(now)}, but were {', '.join(names)} in the checkpoint; use "
                f"the same files, or give the field classes={names}, in the order of the checkpoint"
            )
    return renumbered


def _check_kinds(source: Source, first: Source, stage: Any) -> None:
    """Refuse a table whose column holds classes where the first table's holds numbers, or the reverse."""
    if source.with_classes({}) is source:
        return  # its class numbers are stored, not found in text
    own, others = class_names(source), class_names(first)
    for key in source.spec.fields.keys() & first.spec.fields.keys():
        if (key in own) != (key in others):
            here, there = ("classes", "numbers") if key in own else ("numbers", "classes")
            raise ConfigError(
                f"{key} holds {here}, but {there} in the first stage; set kind: class or kind: number in both", stage
            )


def check_same_classes(stages: Mapping[Any, Sequence[Source]]) -> None:
    """Make sure that a class number means the same class in every stage.

    A source may lack names that another has.
    """
    known: dict[str, tuple[str, dict[int, str]]] = {}
    for stage, sources in stages.items():
        for source in sources:
            for key, names in ((key, field.named) for key, field in source.spec.fields.items()):
                first, others = known.setdefault(key, (stage, names))
                if contradict(names, others):
                    own, theirs = map(listed_names, (names, others))
                    every = list(dict.fromkeys([*others.values(), *names.values()]))
                    raise ConfigError(
                        f"the classes of {key} are {own}, but those of {first} are {theirs}: the same number would "
                        f"mean different classes; give the field of each stage classes={every}",
                        stage,
                    )
                known[key] = max((first, others), (stage, names), key=lambda each: len(each[1]))


def count_classes(source: Source) -> dict[str, int]:
    """The number of classes of each field with one whole number per sample, by batch key.

    It is the number of class names, or one more than the largest label. Fields with negative values are left out.
    """
    counts = {key: len(names) for key, names in class_names(source).items()}
    for key, field in source.spec.fields.items():
        if key not in counts and field.dtype.kind in "iu" and not field.texts and math.prod(field.shape) == 1:
            least, largest = _value_range(source, key)
            if least >= 0:
                counts[key] = largest + 1
    return counts


def _value_range(source: Source, key: str) -> tuple[int, int]:
    ranges = []
    for first in range(0, len(source), LABELS_PER_READ):
        samples = np.arange(first, min(first + LABELS_PER_READ, len(source)))
        labels = read(source, samples, [key])[key]
        ranges.append((int(labels.min()), int(labels.max())))
    return min(least for least, _ in ranges), max(largest for _, largest in ranges)
