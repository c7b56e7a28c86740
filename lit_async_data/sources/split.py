"""`split`: a source cut into sides for training, validation and test, so that no side knows of another."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.options import MAX_SEED
from lit_async_data.order.permutation import Indices, Words, derived_keys
from lit_async_data.sources.base import Source
from lit_async_data.sources.groups import Groups, groups_of, hashed
from lit_async_data.sources.places import Places, check_source, name_of, overlap_of, places_of, starts
from lit_async_data.sources.subset import SubsetSource

log = logging.getLogger(__name__)

# How far from 1 a sum of fractions may be that is meant to be 1.
ROUNDING = 1e-9
UNUSED = -1
BY_TIME = "by time"


class Split(dict[str, SubsetSource]):
    """The sides of a split by name, in the order of the fractions.

    Attributes:
        described: What they hold, in one line for people: real fractions, what is unused, and how much is on two sides.
        overlap: Groups that are on two sides, and pairs of samples on two sides that share values; 0 if all is well.
    """

    described: str = ""
    overlap: int = 0


def split(
    source: Source,
    fractions: Mapping[str, float],
    *,
    groups: str | npt.ArrayLike | None = None,
    seed: int = 0,
) -> Split:
    """Cut a source into sides.

    Which side a sample or group comes to depends on its name, the seed and the fractions alone: files that are added
    later move nothing that was there. So fractions are met on average, and not exactly. Samples stay in their order.

    Args:
        source: What to split.
        fractions: The share of each side, by its name: ``{"train": 0.8, "val": 0.2}``. Above 0; at most 1 in all, and
            what is left over is not used.
        groups: What belongs together, and is never torn apart:

            * None: nothing, each sample is drawn by itself. Refused where windows overlap.
            * ``"file"``: the samples of a file. ``"file:REGEX"``: of all files in whose path the expression finds the
              same, in its first pair of parentheses if it has any: ``"file:(subject-[0-9]+)"``.
            * ``"group"``: the samples of each group in each file.
            * ``"time"``: nothing is drawn. Each file or group is cut into stretches in the order of the fractions, so
              far from each other that they share no values.
            * Another text: samples for which the dataset, column or batch key of that name has the same value.
            * An array, whole numbers or text, shape (len(source),): samples with the same value.
        seed: For another draw; 0 to 2**63 − 1.

    Returns:
        The sides by name, and in ``described`` what they hold, which is also logged. Where groups were drawn, each
        side's ``group_codes`` says which of its samples belong together.

    Raises:
        ConfigError: Fractions, groups or seed are wrong; a side would be empty; windows overlap and nothing keeps
            them on one side; a part is too short for ``"time"``. Begins with ``split:``, ``groups:`` or ``seed:``.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((100, 3)), "dog": np.arange(100) // 5})
        >>> sides = split(source, {"train": 0.7, "val": 0.3}, groups="dog")
        >>> print(sides.described)
        split by dog, seed 0: train 0.80 (16 of 20 groups, 80 samples), val 0.20 (4 of 20 groups, 20 samples); overlap 0
    """
    check_source("source", source)
    edges = _edges(fractions)
    key = _checked_seed(seed)
    places, found = places_of(source), None
    if groups is None:
        how, sides = f"by sample, seed {seed}", _by_sample(source, places, edges, key)
    elif isinstance(groups, str) and groups == "time":
        how, sides = BY_TIME, _by_time(places, edges, list(fractions), overlap_of(source))
    else:
        found = groups_of(source, groups, places)
        how = f"by {found.what}, seed {seed}"
        sides = _drawn(edges, derived_keys(key, hashed(found.names)))[found.codes]
    result = Split(_subsets(source, list(fractions), sides, found))
    _describe(result, source, places, how, found)
    (log.warning if result.overlap else log.info)("%s: %s", name_of(source), result.described)
    return result


def _edges(fractions: Any) -> npt.NDArray[np.float64]:
    """Where in [0, 1] each side ends."""
    if not isinstance(fractions, Mapping) or not fractions:
        raise ConfigError(
            f"split: {fractions!r} is not a mapping of names to fractions, as {{'train': 0.8, 'val': 0.2}}"
        )
    for name, share in fractions.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"split: {name!r} is not the name of a side")
        real = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not real or not 0 < float(share) <= 1:
            raise ConfigError(f"split: {name} = {share!r} is not a fraction above 0 and up to 1")
    edges = np.cumsum([float(share) for share in fractions.values()])
    if edges[-1] > 1 + ROUNDING:
        raise ConfigError(f"split: the fractions add up to {edges[-1]:.6g}, which is more than 1")
    edges[edges > 1 - ROUNDING] = 1.0  # so that nothing is left over where nothing should be
    return edges


def _checked_seed(seed: Any) -> int:
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not whole or not 0 <= int(seed) <= MAX_SEED:
        raise ConfigError(f"seed: {seed!r} is not a whole number from 0 to {MAX_SEED}")
    return int(seed)


def _drawn(edges: npt.NDArray[np.float64], keys: Words) -> Indices:
    """The side to which each key falls, or `UNUSED`."""
    # 53 bits are what a float holds: one more could be rounded to 1, which is on no side.
    side = np.searchsorted(edges, (keys >> np.uint64(11)) * 2.0**-53, side="right")
    return np.where(side < len(edges), side, UNUSED)


def _by_sample(source: Source, places: Places, edges: npt.NDArray[np.float64], seed: int) -> Indices:
    overlap = overlap_of(source)
    if overlap > 0:
        several = (
            "groups='file' or groups='group' keeps those of a file or group together, " if len(places.parts) > 1 else ""
        )
        raise ConfigError(
            f"groups: samples are windows that share values with {overlap} after them, and would share them with "
            f"another side; {several}groups='time' cuts with a gap"
        )
    parts = derived_keys(seed, hashed([part.name for part in places.parts]))
    return _drawn(edges, derived_keys(parts[places.which], places.rows))


def _by_time(places: Places, edges: npt.NDArray[np.float64], names: list[str], overlap: int) -> Indices:
    """Each part cut into stretches, ``overlap`` rows between them left out."""
    order = places.order()
    which, rows = places.which[order], places.rows[order]
    # Rows are counted, and one that is there twice counts once: both go to the same side.
    new = np.append(True, (np.diff(which) != 0) | (np.diff(rows) != 0))
    counts = np.bincount(which[new], minlength=len(places.parts))
    turn = np.cumsum(new) - 1 - starts(counts)[which]
    gaps = np.arange(len(edges)) * overlap
    left = np.maximum(counts - gaps[-1], 0)
    ends = np.floor(edges * left[:, None] + 0.5).astype(np.int64)
    begins = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    _check_long_enough(places, counts, (ends <= begins).any(axis=1) & (counts > 0), names, overlap)
    sides = np.full(which.size, UNUSED)
    for side, gap in enumerate(gaps.tolist()):
        inside = (turn >= begins[which, side] + gap) & (turn < ends[which, side] + gap)
        sides[order[inside]] = side
    return sides


def _check_long_enough(
    places: Places, counts: Indices, short: npt.NDArray[np.bool_], names: list[str], overlap: int
) -> None:
    found = np.flatnonzero(short).tolist()
    if found:
        named = [(places.parts[part].name or "the source", _many(int(counts[part]), "sample")) for part in found[:3]]
        said = ", ".join(f"{name} ({many})" for name, many in named)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"split: too short for stretches of {', '.join(names)} with gaps of {_many(overlap, 'sample')}: {said}"
            f"{more}; leave them out, choose other fractions, or keep parts whole with groups='file'"
        )


def _subsets(source: Source, names: list[str], sides: Indices, groups: Groups | None) -> dict[str, SubsetSource]:
    subsets = {}
    for side, name in enumerate(names):
        samples = np.flatnonzero(sides == side)
        if not samples.size:
            many = _many(len(source), "sample")
            if groups is not None:
                many = f"{_many(len(groups.names), 'group')} ({groups.what})"
            raise ConfigError(
                f"split: nothing comes to {name!r}, of {many} in all; try larger fractions, smaller groups, or another "
                "seed, as in AsyncDataModule(**split(source, …, seed=1))"
            )
        subsets[name] = SubsetSource(source, samples, group_codes=None if groups is None else groups.codes[samples])
    return subsets


def _describe(result: Split, source: Source, places: Places, how: str, groups: Groups | None) -> None:
    """Say what the sides hold, counted from them as they are."""
    total, said = len(source), []
    for name, side in result.items():
        own = "" if side.group_codes is None else f"{np.unique(side.group_codes).size} of "
        own += f"{_many(len(groups.names), 'group')}, " if groups else ""
        said.append(f"{name} {len(side) / total:.2f} ({own}{_many(len(side), 'sample')})")
    unused = total - sum(map(len, result.values()))
    if unused:
        gaps = ", gaps between the sides of each part included" if how == BY_TIME and overlap_of(source) else ""
        said.append(f"unused {unused / total:.2f} ({_many(unused, 'sample')}{gaps})")
    torn = _on_two_sides(result)
    near = _near_pairs(result, places, overlap_of(source))
    result.overlap = torn + near
    two = [f"{_many(torn, 'group')} on two sides"] if torn else []
    two += [f"{_many(near, 'sample')} with values that another side has too"] if near else []
    result.described = f"split {how}: {', '.join(said)}; overlap {', '.join(two) or 0}"


def _on_two_sides(result: Split) -> int:
    """How many groups are."""
    codes = [np.unique(side.group_codes) for side in result.values() if side.group_codes is not None]
    return int((np.unique(np.concatenate(codes), return_counts=True)[1] > 1).sum()) if codes else 0


def _near_pairs(result: Split, places: Places, overlap: int) -> int:
    """Samples that share values with the one before them in storage, which is on another side."""
    taken = places.taken(np.concatenate([side.samples for side in result.values()]))
    sides = np.repeat(np.arange(len(result)), [len(side) for side in result.values()])
    order = taken.order()
    near = (np.diff(taken.which[order]) == 0) & (np.diff(taken.rows[order]) <= overlap)
    return int((near & (np.diff(sides[order]) != 0)).sum())


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
