"""The side of each group of a split: drawn, so that sides hold their shares, or named by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, few
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.composed.groups import Groups, text_of

UNUSED = -1


def drawn_sides(groups: Groups, shares: Sequence[float], keys: Words) -> Indices:
    """The side of each group, or `UNUSED`, so that the sides hold their shares of samples as nearly as groups allow.

    Large groups come first, and those of about the same size (a power of two) in the order of their keys. Each goes to
    the side that holds least of its share. The last ones go to sides that have none.
    """
    if len(groups.names) < len(shares):
        raise ConfigError(
            f"split: {len(shares)} sides need as many groups, and the number of groups ({groups.what}) is "
            f"{len(groups.names)}; ask for fewer sides, or choose smaller groups"
        )
    sizes = np.bincount(groups.codes)
    rest = 1 - sum(shares)
    wanted = [*shares, rest] if rest > 0 else list(shares)
    held, sides = [0.0] * len(wanted), np.full(len(sizes), UNUSED)
    empty = set(range(len(shares)))
    order = np.lexsort((keys, -np.frexp(sizes)[1]))
    for turn, (group, size) in enumerate(zip(order.tolist(), sizes[order].tolist(), strict=True)):
        among = sorted(empty) if len(order) - turn == len(empty) else range(len(wanted))
        side = min(among, key=lambda side: (held[side] + size / 2) / wanted[side])
        held[side] += size
        empty.discard(side)
        sides[group] = side if side < len(shares) else UNUSED
    return sides


def named_sides(groups: Groups, given: Mapping[str, Sequence[Any]]) -> Indices:
    """The side of each group that the user has given by name; `UNUSED` for the others."""
    numbers = {name: number for number, name in enumerate(groups.names)}
    sides, taken = np.full(len(numbers), UNUSED), dict[str, str]()
    for side, (key, values) in enumerate(given.items()):
        names = [text_of(value) for value in values]
        if not names:
            raise ConfigError(f"split: {key} = {values!r} names no group ({groups.what}); leave it out, or name one")
        unknown = [name for name in names if name not in numbers]
        if unknown:
            raise ConfigError(
                f"split: {key} names {few(unknown)}, but there is no such group ({groups.what}); there are "
                f"{few(list(groups.names))}"
            )
        for name in names:
            if name in taken:
                raise ConfigError(
                    f"split: the group {name} ({groups.what}) is in {taken[name]} and in {key}; name it once"
                )
            taken[name] = key
            sides[numbers[name]] = side
    return sides
