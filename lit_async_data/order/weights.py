"""Weights of samples, and orders that draw samples by weight, with replacement. See docs/design/order.md.

The sample at a position is a pure function of (weights, key, position), so that ranks need not communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.permutation import Indices, Permutation, derived_key, derived_keys, in_range

# The default ``ignore_index`` of torch's losses.
IGNORED = -100
# A group with more positions is assumed to need all of its chunks: draws for 2¹⁸ positions take 0.1 s.
_MOST_DRAWN = 2**18

Floats = npt.NDArray[np.float64]


class SampleClasses(NamedTuple):
    """The labels of samples as pairs: sample ``samples[n]`` has class ``classes[n]``, counted from 0.

    ``counts`` and ``names`` have an entry for each class. If samples may have ``several`` labels, the names are column
    numbers, and −1 for the class of samples without a label.
    """

    samples: Indices
    classes: Indices
    counts: Indices
    names: npt.NDArray[Any]
    several: bool

    @classmethod
    def of(cls, given: npt.ArrayLike, option: str) -> SampleClasses:
        array = _as_array(option, given, axes=(1, 2))
        if array.ndim == 2:
            has = np.asarray(array == 1)
            wrong = array[~has & (array != 0) & (array != IGNORED)]
            if wrong.dtype.kind == "f":  # NaN marks an unknown label, as −100 does
                wrong = wrong[~np.isnan(wrong)]
            if wrong.size or not has.any():
                what = f"these are {array.dtype}, such as {wrong[0]}" if wrong.size else "no sample has a label"
                raise ConfigError(f"give 1 for each label of a sample and 0 for the other labels; {what}", option)
            found = np.argwhere(np.column_stack([has, (array == 0).all(axis=1)]))
            samples, labels = found[:, 0], np.where(found[:, 1] < has.shape[1], found[:, 1], -1)
        elif array.dtype.kind == "f":
            missing = np.flatnonzero(np.isnan(array))
            which = f" (sample {missing[0]} has NaN)" if missing.size else ""
            what = f"the labels are {array.dtype} numbers{which}, which seldom name classes"
            raise ConfigError(f"{what}; convert them to whole numbers or text, or leave {option} out", option)
        elif array.dtype.kind not in "iubSUT" and not (_all(str, array) or _all(bytes, array)):
            what = f"the labels are of type {array.dtype}, not whole numbers, booleans or text"
            raise ConfigError(f"{what}; choose another field, or leave {option} out", option)
        else:
            samples = np.flatnonzero(array != IGNORED) if array.dtype.kind == "i" else np.arange(len(array))
            is_text, labels = array.dtype.kind not in "iub", array[samples]
            labels = np.array([name.strip() or name for name in labels.tolist()]) if is_text else labels
        if not samples.size:
            raise ConfigError(f"every label is {IGNORED}, which losses ignore; choose another field", option)
        names, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        return cls(samples, classes, counts, names, array.ndim == 2)


def class_weights(labels: npt.ArrayLike) -> Floats:
    """Weights with which each class is drawn equally often (class-aware sampling).

    Each draw chooses a class, all with the same probability, and then one of its samples. So the weight of a sample is
    a sum over its labels (for several labels: Wu et al. 2020, arXiv 2007.09654).

    Args:
        labels: Whole numbers, booleans or text, shape (n,). Or, for several labels per sample, 1 for each label that a
            sample has and 0 for the others, shape (n, classes).

    Returns:
        float64, shape (n,): one over the number of samples with the same label, summed over the labels of the sample.
        0 for −100, which losses ignore, and for NaN among several labels. With several labels per sample, samples
        without a label form one more class.

    Raises:
        ConfigError: There are no labels, all are ignored, or their shape or type is wrong.

    Example:
        >>> class_weights(["cat", "dog", "cat", "cat", "dog"]).round(2).tolist()
        [0.33, 0.5, 0.33, 0.33, 0.5]
        >>> class_weights([[1, 0], [1, 1], [0, 0], [0, 0]]).tolist()
        [0.5, 1.5, 0.5, 0.5]
    """
    found = SampleClasses.of(labels, "weights")
    weights = np.bincount(found.samples, (1 / found.counts)[found.classes], minlength=len(np.asarray(labels)))
    return np.asarray(weights, np.float64)


class Weights:
    """A weight for each sample, and their cumulative sum. Immutable; safe to use from any thread.

    Takes 8 bytes per sample. Probabilities are exact to about ``n · 1e-16``. A sample may never be drawn if its weight
    is less than 1e-16 of the sum of the weights before it.
    """

    def __init__(self, weights: npt.ArrayLike, samples: int | None = None) -> None:
        array = _as_array("weights", weights)
        if array.dtype.kind not in "iufb":
            raise ConfigError(f"they are of type {array.dtype}; give numbers", "weights")
        if samples is not None and array.size != samples:
            raise ConfigError(f"there are {array.size} for {samples} samples; give one for each sample", "weights")
        self.samples = array.size
        self.edges = np.zeros(array.size + 1)  # the sum of the weights before each sample, and the total
        with np.errstate(over="ignore", invalid="ignore"):  # long doubles, and sums
            array = array.astype(np.float64)
            np.cumsum(array, out=self.edges[1:])
        if (wrong := np.flatnonzero(~((array >= 0) & np.isfinite(array)))).size:
            what = f"sample {wrong[0]} has {array[wrong[0]]}; each must be a finite number from 0 on"
            raise ConfigError(what, "weights")
        self.edges.flags.writeable = False
        if not np.isfinite(self.edges[-1]):
            raise ConfigError("their sum exceeds the range of float64; divide all of them by the largest", "weights")
        if not self.edges[-1] > 0:
            raise ConfigError("all of them are 0; give at least one sample a weight above 0", "weights")

    def drawn(self, numbers: Floats) -> Indices:
        """Maps uniform numbers in [0, 1) to samples, in proportion to the weights."""
        return drawn_between(self.edges, 0, -1, numbers)


def drawn_between(edges: Floats, low: Any, high: Any, numbers: Floats) -> Indices:
    """Maps uniform numbers to intervals between two edges, in proportion to their widths; never to an empty one."""
    begin, end = edges[low], edges[high]
    # The product may round up to ``end``, where the next interval begins.
    values = np.minimum(begin + numbers * (end - begin), np.nextafter(end, 0))
    found: Indices = np.searchsorted(edges, values, side="right") - 1
    return found


def uniform(key: int, positions: Indices) -> Floats:
    """Random numbers in [0, 1), with all 53 bits of a float64."""
    return (derived_keys(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_array(option: str, values: npt.ArrayLike, axes: tuple[int, ...] = (1,)) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ConfigError(f"not an array: {error}; give one value for each sample", option) from None
    if array.ndim not in axes or not array.size:
        raise ConfigError(f"the array has shape {array.shape}; give one value for each sample", option)
    return array


def _all(kind: type, labels: npt.NDArray[Any]) -> bool:
    return labels.dtype.kind == "O" and all(isinstance(label, kind) for label in labels)


class WeightedChunkOrder:
    """Samples drawn by weight, with replacement, from a few chunks at a time. Immutable; safe to call from any thread.

    Groups of chunks get positions in proportion to their weights, rounded at random so that the mean over keys is
    exact. Each position draws a chunk of its group by weight, and then a sample of that chunk by weight. Chunks without
    weight and groups without positions are left out. Methods as in `ChunkOrder`.
    """

    def __init__(self, runs: Sequence[ChunkRun], width: int, weights: Weights, length: int, key: int) -> None:
        layout = ChunkExtents(runs)
        if layout.length != weights.samples:
            what = f"there are {weights.samples} for {layout.length} samples; give one for each sample"
            raise ConfigError(what, "weights")
        firsts, rows = layout.extents(np.arange(layout.chunks))
        sums = weights.edges[firsts + rows] - weights.edges[firsts]
        weighed = np.flatnonzero(sums > 0)
        self.length, self.chunks, self.rows = length, weighed.size, layout.usual_rows
        self.width = min(width, self.chunks)
        order = weighed[Permutation(self.chunks, derived_key(key, 0))(np.arange(self.chunks))]
        self._sample_edges = weights.edges
        self._firsts, self._rows = firsts[order], rows[order]
        self._chunk_edges = np.append(0.0, np.cumsum(sums[order]))
        self._assign_positions(float(uniform(derived_key(key, 1), np.zeros(1, np.int64))[0]))
        self.groups = self._ends.size
        self._chunk_key, self._row_key = derived_key(key, 2), derived_key(key, 3)
        self._latest = (-1, 0, 0), np.empty(0, np.int64)  # the last result of `places_of`

    def samples(self, positions: npt.ArrayLike) -> Indices:
        places, rows = self.located(positions)
        return self._firsts[places] + rows

    def group(self, number: int) -> range:
        return range(int(self._begins[number]), int(self._ends[number]))

    def group_of(self, position: int) -> int:
        return int(self._groups_of(in_range([position], self.length))[0])

    def places_of(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        """As `ChunkOrder.places_of`, in the order of first draws; all chunks if a group has more than 2¹⁸ positions."""
        wanted, positions = (group, begin, step), self.group(group)
        if len(positions[::step]) > _MOST_DRAWN:
            return np.arange(*self._places[group])
        latest = self._latest  # read once, and replaced as a whole: other threads may replace it
        if latest[0] != wanted:
            drawn = np.arange(positions.start + begin, positions.stop, step)
            places, earliest = np.unique(self.located(drawn)[0], return_index=True)
            self._latest = latest = wanted, places[np.argsort(earliest)]
        return latest[1]

    def first_of(self, places: Indices) -> Indices:
        return self._firsts[places]

    def located(self, positions: npt.ArrayLike) -> tuple[Indices, Indices]:
        checked = in_range(positions, self.length)
        first, end = self._places[self._groups_of(checked)].T
        places = drawn_between(self._chunk_edges, first, end, uniform(self._chunk_key, checked))
        first, end = self._firsts[places], self._firsts[places] + self._rows[places]
        return places, drawn_between(self._sample_edges, first, end, uniform(self._row_key, checked)) - first

    def _groups_of(self, positions: Indices) -> Indices:
        return np.searchsorted(self._ends, positions, side="right")

    def _assign_positions(self, shift: float) -> None:
        """Sets first and end position of each group, and first and end place of its chunks, shape (groups, 2).

        All bounds share one uniform shift, so that rounding down gives each group its exact share on average.
        """
        cuts = np.minimum(np.arange(-(-self.chunks // self.width) + 1) * self.width, self.chunks)
        shares = self._chunk_edges[cuts] / self._chunk_edges[-1]
        bounds = np.floor(shares * self.length + shift).astype(np.int64)
        # A float cannot hold the length of a very long epoch, and the last group may add nothing to the rounded sum.
        bounds[shares == 1] = self.length
        nonempty = np.flatnonzero(np.diff(bounds))
        self._begins, self._ends = bounds[nonempty], bounds[nonempty + 1]
        self._places = np.stack([cuts[nonempty], cuts[nonempty + 1]], axis=1)
