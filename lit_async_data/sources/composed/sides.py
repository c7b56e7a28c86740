"""The side of each group of a split: drawn, so that sides hold their shares, or named by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, few
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.weights import SampleClasses
from lit_async_data.sources.composed.groups import Groups, text_of

UNUSED = -1


def drawn_sides(groups: Groups, shares: Sequence[float], keys: Words, labels: SampleClasses | None = None) -> Indices:
    """The side of each group, or `UNUSED`, so that the sides hold their shares of samples as nearly as groups allow.

    Large groups come first, and those of about the same size (a power of two) in the order of their keys. Each goes to
    the side that holds least of its share. The last ones go to sides that have none. With labels, large are those with
    much of a class, and the side is the one that adds least to the sum, over all classes and the samples as a whole, of
    the squares of the part of each side.
    """
    if len(groups.names) < len(shares):
        raise ConfigError(
            f"{len(shares)} sides or folds need as many groups, and the number of groups ({groups.what}) is "
            f"{len(groups.names)}; ask for fewer, or choose smaller groups",
            "split",
        )
    codes, classes = groups.codes, np.zeros_like(groups.codes)
    if labels is not None:  # class 0 are all samples
        codes, classes = np.append(codes, codes[labels.samples]), np.append(classes, labels.classes + 1)
    pairs, counts = np.unique(codes * (classes.max() + 1) + classes, return_counts=True)
    group, which = np.divmod(pairs, classes.max() + 1)
    totals = np.bincount(classes)
    weights = counts if labels is None else np.bincount(group, (counts / totals[which]) ** 2)
    parts = list(zip(which.tolist(), counts.tolist(), (counts / totals[which] ** 2.0).tolist(), strict=True))
    first = np.searchsorted(group, np.arange(len(groups.names) + 1)).tolist()
    rest = 1 - sum(shares)
    wanted = [*shares, rest] if rest > 0 else list(shares)
    held, sides = [[0.0] * len(wanted) for _ in totals], np.full(len(groups.names), UNUSED)
    empty = set(range(len(shares)))
    order = np.lexsort((keys, -np.frexp(weights)[1])).tolist()
    for turn, number in enumerate(order):
        own = parts[first[number] : first[number + 1]]
        among = sorted(empty) if len(order) - turn == len(empty) else range(len(wanted))
        side = min(among, key=lambda side: sum([(held[c][side] + n / 2) * f for c, n, f in own]) / wanted[side])
        for c, n, _ in own:
            held[c][side] += n
        empty.discard(side)
        sides[number] = side if side < len(shares) else UNUSED
    return sides


def dealt(keys: Words, turns: Indices, shares: Sequence[float], labels: SampleClasses | None) -> Indices:
    """The side of each sample that is drawn alone: in turn, one class after the other.

    Within a class, the samples of a side are neighbours in the order of their keys, so that few of them move where
    others are added. Where a sample occurs twice or has several labels, samples are drawn as groups.
    """
    distinct, codes = np.unique(keys, return_inverse=True)
    if len(distinct) < len(keys) or (labels is not None and labels.several):
        return drawn_sides(Groups(codes, list(map(str, distinct)), "sample"), shares, distinct, labels)[codes]
    classes = np.zeros_like(codes)
    if labels is not None:
        classes[labels.samples] = labels.classes + 1
    order, sides = np.lexsort((codes, classes)), np.empty_like(codes)
    sides[order] = turns[np.lexsort((turns, classes[order]))]
    return sides


def named_sides(groups: Groups, given: Mapping[str, Sequence[Any]]) -> Indices:
    """The side of each group that the user has given by name; `UNUSED` for the others."""
    numbers = {name: number for number, name in enumerate(groups.names)}
    sides, taken = np.full(len(numbers), UNUSED), dict[str, str]()
    for side, (key, values) in enumerate(given.items()):
        names = [text_of(value, "split") for value in values]
        if not names:
            raise ConfigError(f"{key} = {values!r} names no group ({groups.what}); leave it out, or name one", "split")
        unknown = [name for name in names if name not in numbers]
        if unknown:
            raise ConfigError(
                f"{key} names {few(unknown)}, but there is no such group ({groups.what}); there are "
                f"{few(list(groups.names))}",
                "split",
            )
        for name in names:
            if name in taken:
                raise ConfigError(
                    f"the group {name} ({groups.what}) is in {taken[name]} and in {key}; name it once", "split"
                )
            taken[name] = key
            sides[numbers[name]] = side
    return sides
