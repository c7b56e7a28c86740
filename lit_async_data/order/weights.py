"""`Weights`: how likely each sample is to be drawn, checked, summed up once, and shared by all epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.permutation import Indices, derived_keys

# The label that torch's losses leave out unless they are told otherwise.
IGNORED = -100
# Every so many edges one is kept by itself: the processor's cache holds those.
_COARSE = 64

Floats = npt.NDArray[np.float64]


def class_weights(labels: npt.ArrayLike) -> Floats:
    """A weight for each sample, so that each distinct label has the same total: 1.

    Args:
        labels: Whole numbers, booleans or text, shape (n,).

    Returns:
        float64, shape (n,): one over how many samples have the same label; 0 for −100, which losses ignore.

    Raises:
        ConfigError: There are no labels, all are ignored, they have more than one axis, or are of a type that cannot be
            counted by value.

    Example:
        >>> class_weights(["cat", "dog", "cat", "cat", "dog"]).round(2).tolist()
        [0.33, 0.5, 0.33, 0.33, 0.5]
    """
    given = _as_array("balance", labels)
    if given.dtype.kind == "f":
        raise ConfigError(
            f"balance: the labels are {given.dtype} numbers{_first_nan(given)}, which seldom have few values; make "
            "whole numbers or text of them, or give a weight for each sample with weights"
        )
    if given.dtype.kind not in "iubSUT" and not (_all(str, given) or _all(bytes, given)):
        raise ConfigError(
            f"balance: the labels are of type {given.dtype}, and not whole numbers, booleans or text; choose another "
            "field, or give a weight for each sample with weights"
        )
    _, which, counts = np.unique(given, return_inverse=True, return_counts=True)
    weights = np.asarray((1 / counts)[which], np.float64)
    if given.dtype.kind == "i":
        weights[given == IGNORED] = 0
        if not weights.any():
            raise ConfigError(f"balance: every label is {IGNORED}, which losses ignore")
    return weights


class WeighedChunks(NamedTuple):
    """Chunks by number: the first sample, how many there are, and the sum of their weights; all of shape (chunks,)."""

    firsts: Indices
    rows: Indices
    sums: Floats
    usual_rows: int


class Weights:
    """A weight for each sample, ready to be drawn by. Immutable; safe to use from any thread.

    Takes 8 bytes per sample. Probabilities are exact to about ``n · 1e-16``; a sample whose weight is less than 1e-16
    of all before it may never be drawn.

    Args:
        weights: Finite numbers from 0 on, shape (n,); samples of weight 0 are never drawn.
        samples: How many there must be; None where that is not known.

    Attributes:
        samples: How many there are.
        edges: float64, shape (n + 1,): the sum of the weights before each sample, and of all.

    Raises:
        ConfigError: The weights are not such numbers, or none is above 0.

    Example:
        >>> Weights([1, 0, 3]).edges.tolist()
        [0.0, 1.0, 1.0, 4.0]
        >>> Weights([1, -1])
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: weights: sample 1 has -1.0; each must be a finite number from 0 on
    """

    def __init__(self, weights: npt.ArrayLike, samples: int | None = None) -> None:
        given = _checked_weights(weights, samples)
        self.samples = given.size
        self.edges = np.zeros(given.size + 1)
        with np.errstate(over="ignore"):
            np.cumsum(given, out=self.edges[1:])
        self._coarse = self.edges[::_COARSE].copy()
        self.edges.flags.writeable = self._coarse.flags.writeable = False
        if not np.isfinite(self.edges[-1]):
            raise ConfigError("weights: their sum is more than a number holds; divide all of them by the largest")
        if not self.edges[-1] > 0:
            raise ConfigError("weights: all of them are 0; give those samples more that are to be drawn")
        # The chunks asked for last; replaced as a whole, since other threads may be reading it.
        self._chunks: tuple[tuple[ChunkRun, ...], WeighedChunks] | None = None

    def drawn(self, numbers: Floats) -> Indices:
        """The samples that uniform numbers fall on.

        Args:
            numbers: In [0, 1), shape (n,).

        Returns:
            int64, shape (n,): samples with a weight above 0.
        """
        sought = _sought(self.edges[0], self.edges[-1], numbers)
        low = (np.searchsorted(self._coarse, sought, side="right") - 1) * _COARSE
        return _bisected(self.edges, low, np.minimum(low + _COARSE, self.samples), sought)

    def chunks(self, runs: Sequence[ChunkRun]) -> WeighedChunks:
        """The chunks that have any weight.

        Raises:
            ConfigError: The runs hold more or fewer samples.
        """
        runs = tuple(runs)
        known = self._chunks
        if known is None or known[0] != runs:
            known = self._chunks = runs, self._weighed(ChunkExtents(runs))
        return known[1]

    def _weighed(self, layout: ChunkExtents) -> WeighedChunks:
        if layout.length != self.samples:
            raise ConfigError(
                f"weights: there are {self.samples} for {layout.length} samples; give one for each sample"
            )
        firsts, rows = layout.extents(np.arange(layout.chunks))
        sums = self.edges[firsts + rows] - self.edges[firsts]
        there = sums > 0
        return WeighedChunks(firsts[there], rows[there], sums[there], layout.usual_rows)


def _sought(base: Floats, top: Floats, numbers: Floats) -> Floats:
    """The numbers that stand in ``[base, top)`` where uniform ones stand in [0, 1)."""
    # The product may round up to the top itself, which would be the next one's.
    return np.minimum(base + numbers * (top - base), np.nextafter(top, 0))


def drawn(edges: Floats, low: Indices, high: Indices, numbers: Floats) -> Indices:
    """What uniform numbers fall on between two edges: never on what has no width.

    Args:
        edges: Sorted.
        low: Which edge each number begins at, shape (n,).
        high: Which edge it does not reach; greater than that at ``low``.
        numbers: Numbers in [0, 1), shape (n,).

    Returns:
        int64, shape (n,), from ``low`` to ``high - 1``.
    """
    return _bisected(edges, low, high, _sought(edges[low], edges[high], numbers))


def _bisected(edges: Floats, low: Indices, high: Indices, sought: Floats) -> Indices:
    """The last i for each number with ``edges[i]`` at most the number.

    As ``np.searchsorted`` from the right, less one, but it need not look at all edges: that takes half the time.

    Args:
        edges: Sorted.
        low: Which edge is at most the number, shape (n,).
        high: Which edge is more than the number, shape (n,).
        sought: The numbers, shape (n,).
    """
    while low.size and (high - low).max() > 1:
        middle = (low + high) >> 1
        above = edges[middle] <= sought
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return low


def uniform(key: int, positions: Indices) -> Floats:
    """A number in [0, 1) for each position, with all 53 bits that a float has."""
    return (derived_keys(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_array(option: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        found = np.asarray(given)
    except ValueError as error:
        raise ConfigError(f"{option}: no array can be made of what was given: {error}") from None
    if found.ndim != 1 or not found.size:
        raise ConfigError(f"{option}: an array of shape {found.shape} was given; give one value for each sample")
    return found


def _checked_weights(weights: npt.ArrayLike, samples: int | None) -> Floats:
    given = _as_array("weights", weights)
    if given.dtype.kind not in "iufb":
        raise ConfigError(f"weights: they are of type {given.dtype}, and not numbers")
    if samples is not None and given.size != samples:
        raise ConfigError(f"weights: there are {given.size} for {samples} samples; give one for each sample")
    with np.errstate(over="ignore"):  # long doubles
        given = given.astype(np.float64)
    wrong = np.flatnonzero(~((given >= 0) & np.isfinite(given)))
    if wrong.size:
        raise ConfigError(f"weights: sample {wrong[0]} has {given[wrong[0]]}; each must be a finite number from 0 on")
    return given


def _first_nan(labels: npt.NDArray[Any]) -> str:
    missing = np.flatnonzero(np.isnan(labels))
    return f" (that of sample {missing[0]} is NaN)" if missing.size else ""


def _all(kind: type, labels: npt.NDArray[Any]) -> bool:
    return labels.dtype.kind == "O" and all(isinstance(label, kind) for label in labels)
