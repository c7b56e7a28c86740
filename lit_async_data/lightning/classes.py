"""How many classes the fields of a source have, and their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.sources.base import Source

# Labels looked at in one go while counting classes.
LABELS_AT_ONCE = 2**20


def named(source: Source) -> dict[str, tuple[str, ...]]:
    """The names of the values 0, 1, 2, … of each field that has any."""
    return {key: field.classes for key, field in source.spec.fields.items() if field.classes}


def adopted(source: Source, classes: Mapping[str, Sequence[str]]) -> Source:
    """A source with the numbers of other classes, where it found its own in a table.

    Args:
        source: Any; one that can do so has a method ``with_classes``.
        classes: Names by batch key.

    Raises:
        ManifestError: A row has a class that is none of them; names it.
    """
    own = named(source)
    others = {
        key: names for key, names in classes.items() if key in source.spec.fields and own.get(key) != tuple(names)
    }
    change = getattr(source, "with_classes", None)
    return source if change is None or not others else cast(Source, change(others))


def of_training(stages: Mapping[Any, Sequence[Source]]) -> dict[Any, list[Source]]:
    """The sources of each stage, with the classes of the first: training, where there is any."""
    first = next((source for sources in stages.values() for source in sources), None)
    if first is None:
        return {stage: list(sources) for stage, sources in stages.items()}
    found = {stage: [adopted(source, named(first)) for source in sources] for stage, sources in stages.items()}
    for stage, sources in found.items():
        for source in sources:
            _check_kinds(source, first, stage)
    return found


def _check_kinds(source: Source, first: Source, stage: Any) -> None:
    """Make sure that what are classes in a table are not numbers in another one.

    Raises:
        ConfigError: They are.
    """
    if not hasattr(source, "with_classes"):
        return
    own, others = named(source), named(first)
    for key in source.spec.fields.keys() & first.spec.fields.keys():
        if (key in own) != (key in others):
            here, there = ("classes", "numbers") if key in own else ("numbers", "classes")
            raise ConfigError(
                f"{stage}: {key} holds {here}, but {there} in the first stage; say kind: class or kind: number of both"
            )


def check_alike(stages: Mapping[Any, Sequence[Source]]) -> None:
    """Make sure that a number means the same class in every stage.

    Of two lists of names one may go on where the other ends.

    Args:
        stages: The sources of each stage.

    Raises:
        ConfigError: It does not; names both lists.
    """
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for stage, sources in stages.items():
        for source in sources:
            for key, names in named(source).items():
                first, others = known.setdefault(key, (stage, names))
                if any(name != other for name, other in zip(names, others, strict=False)):
                    raise ConfigError(
                        f"{stage}: the classes of {key} are {', '.join(names)}, but those of {first} are "
                        f"{', '.join(others)}: the same numbers would mean other things; store them in one order"
                    )
                known[key] = max((first, others), (stage, names), key=lambda each: len(each[1]))


def count_classes(source: Source) -> dict[str, int]:
    """How many classes each field of one whole number per sample has.

    Args:
        source: Whose fields they are. Where classes have no names, all labels are read.

    Returns:
        As many as have names; else one more than the largest value. Not of fields with negative values.
    """
    found = {key: len(names) for key, names in named(source).items()}
    for key, field in source.spec.fields.items():
        if key not in found and field.dtype.kind in "iu" and math.prod(field.shape) == 1:
            least, largest = _span(source, key)
            if least >= 0:
                found[key] = largest + 1
    return found


def _span(source: Source, key: str) -> tuple[int, int]:
    """The least and the largest value of a field."""
    field, spans = source.spec[key], []
    for first in range(0, len(source), LABELS_AT_ONCE):
        samples = np.arange(first, min(first + LABELS_AT_ONCE, len(source)))
        labels = np.empty((len(samples), *field.stored_shape), field.dtype)
        source.read_into(samples, {key: labels})
        spans.append((int(labels.min()), int(labels.max())))
    return min(least for least, _ in spans), max(largest for _, largest in spans)
