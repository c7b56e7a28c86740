"""Orders in which samples are drawn by weight, with replacement.

The sample at a position is a pure function of (weights, key, position). Key and position give two uniform numbers, and
a search in the cumulative sum of the weights maps those to a sample. So any position can be computed directly, alone or
in a block, and ranks need not communicate.

* `WeightedOrder` draws from all samples at each position.
* `WeightedChunkOrder` draws by the same weights from one group of chunks after another, so that each chunk is decoded
  in one visit. Groups get positions of the epoch in proportion to their weights; only this share is not random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import ChunkRun, Group
from lit_async_data.order.permutation import Indices, Permutation, derived_key
from lit_async_data.order.weights import Floats, Weights, drawn_between, uniform

# A group with more positions is assumed to need all of its chunks: drawing for 2¹⁸ positions takes 0.1 s.
_MOST_DRAWN = 2**18


class WeightedOrder:
    """Samples drawn by weight, with replacement, independently. Immutable; safe to call from any thread.

    A block of 16384 positions takes 4 to 5 ms for 10⁶ samples. `samples` is as in `ChunkOrder`.

    Args:
        weights: A weight for each sample.
        length: Number of positions, ≥ 1.
        key: 64 bits that select the draws. Derive it from seed and epoch to get other draws each epoch.
    """

    def __init__(self, weights: Weights, length: int, key: int) -> None:
        self.length = length
        self._weights = weights
        self._key = derived_key(key, 0)

    def samples(self, positions: npt.ArrayLike) -> Indices:
        return self._weights.drawn(uniform(self._key, _checked_positions(positions, self.length)))


class WeightedChunkOrder:
    """Samples drawn by weight, with replacement, from a few chunks at a time. Immutable; safe to call from any thread.

    A keyed permutation orders the chunks, and the result is cut into groups of ``width`` chunks. Each group gets
    positions in proportion to its weight, rounded at random so that the mean over keys is exact. Each position draws a
    chunk of its group by weight, and then a sample of that chunk by weight. Chunks without weight and groups without
    positions are left out.

    Over many keys a sample is drawn ``length · weight / sum`` times on average, as in `WeightedOrder`. The members are
    those of `ChunkOrder`, with the same arguments, attributes and errors.

    Args:
        runs, width, key: As for `ChunkOrder`.
        weights: A weight for each sample.
        length: Number of positions, ≥ 1.

    Attributes:
        chunks: Number of chunks with any weight.
        groups: Number of groups with positions.

    Raises:
        ConfigError: There are not as many weights as samples.

    Example:
        >>> runs, weights = [ChunkRun(samples=6, rows=2)], Weights([1, 1, 0, 0, 3, 1])
        >>> order = WeightedChunkOrder(runs, 1, weights, length=9, key=0)
        >>> order.samples(np.arange(9)).tolist()
        [0, 1, 0, 4, 4, 5, 4, 4, 4]
        >>> order.first_of(order.places_of(group=0)).tolist(), order.first_of(order.places_of(group=1)).tolist()
        ([0], [4])
    """

    def __init__(self, runs: Sequence[ChunkRun], width: int, weights: Weights, length: int, key: int) -> None:
        weighed = weights.chunks(runs)
        self.length, self.chunks, self.rows = length, weighed.sums.size, weighed.usual_rows
        self.width = min(width, self.chunks)
        order = Permutation(self.chunks, derived_key(key, 0))(np.arange(self.chunks))
        self._sample_edges = weights.edges
        self._firsts, self._rows = weighed.firsts[order], weighed.rows[order]
        self._chunk_edges = np.append(0.0, np.cumsum(weighed.sums[order]))
        self._assign_positions(float(uniform(derived_key(key, 1), np.zeros(1, np.int64))[0]))
        self.groups = self._ends.size
        self._chunk_key, self._row_key = derived_key(key, 2), derived_key(key, 3)

    def samples(self, positions: npt.ArrayLike) -> Indices:
        places, rows = self.located(positions)
        return self._firsts[places] + rows

    def group(self, number: int) -> Group:
        if not 0 <= number < self.groups:
            raise IndexError(f"group {number} of {self.groups}")
        return Group(number, int(self._begins[number]), int(self._ends[number]))

    def group_of(self, position: int) -> Group:
        return self.group(int(self._groups_of(_checked_positions([position], self.length))[0]))

    def places_of(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        """As `ChunkOrder.places_of`, by their first draws; all chunks of a group of more than 2¹⁸ positions."""
        _, first, end = self.group(group)
        if -(-(end - first) // step) > _MOST_DRAWN:
            return np.arange(*self._places[group])
        places, earliest = np.unique(self.located(np.arange(first + begin, end, step))[0], return_index=True)
        found: Indices = places[np.argsort(earliest)]
        return found

    def first_of(self, places: Indices) -> Indices:
        return self._firsts[places]

    def located(self, positions: npt.ArrayLike) -> tuple[Indices, Indices]:
        checked = _checked_positions(positions, self.length)
        first, end = self._places[self._groups_of(checked)].T
        places = drawn_between(self._chunk_edges, first, end, uniform(self._chunk_key, checked))
        first, end = self._firsts[places], self._firsts[places] + self._rows[places]
        return places, drawn_between(self._sample_edges, first, end, uniform(self._row_key, checked)) - first

    def ranks_per_chunk(self, world_size: int) -> float:
        """Returns how many ranks decode a chunk on average, among the chunks that any rank decodes.

        Ranks share positions round-robin, and each position draws by itself: every rank decodes a chunk that is drawn
        often.
        """
        return float(self._expected_ranks(world_size).sum() / self._expected_ranks(1).sum())

    def amplification(self) -> float:
        """Returns how many samples are decoded per sample used, on average in this epoch on one rank.

        That is (chunks decoded) · (their mean rows) / length: below 1 if a long epoch uses samples more than once,
        above 1 if a short epoch uses only a few samples of each chunk.
        """
        return float(np.sum(self._expected_ranks(1) * self._rows) / self.length)

    def _expected_ranks(self, world_size: int) -> Floats:
        """The expected number of ranks that draw from each chunk.

        A rank with n positions in a group misses a chunk that has the share p of the group with the probability
        ``(1 − p)ⁿ``. Of the group's c positions, ``c % W`` ranks get one more than the others.
        """
        group = np.arange(self.chunks) // self.width
        weights = np.maximum(np.diff(self._chunk_edges[self._cuts]), np.nextafter(0, 1))  # some add nothing to the sum
        missed = 1 - np.diff(self._chunk_edges) / weights[group]
        count, longer = (part[group] for part in np.divmod(self._positions, world_size))
        expected: Floats = world_size - longer * missed ** (count + 1) - (world_size - longer) * missed**count
        return expected

    def _groups_of(self, positions: Indices) -> Indices:
        return np.searchsorted(self._ends, positions, side="right")

    def _assign_positions(self, shift: float) -> None:
        """Sets first and end position of each group, and first and end place of its chunks, shape (groups, 2).

        All bounds share one uniform shift, so that rounding down gives each group its exact share on average.
        """
        cuts = np.minimum(np.arange(-(-self.chunks // self.width) + 1) * self.width, self.chunks)
        shares = self._chunk_edges[cuts] / self._chunk_edges[-1]
        bounds = np.floor(shares * self.length + shift).astype(np.int64)
        # A float cannot hold the length of a very long epoch, and a last group may add nothing to the rounded sum.
        bounds[shares == 1] = self.length
        self._cuts, self._positions = cuts, np.diff(bounds)  # of all groups, also of those without positions
        nonempty = np.flatnonzero(self._positions)
        self._begins, self._ends = bounds[nonempty], bounds[nonempty + 1]
        self._places = np.stack([cuts[nonempty], cuts[nonempty + 1]], axis=1)


def _checked_positions(positions: npt.ArrayLike, length: int) -> Indices:
    checked = np.asarray(positions, np.int64)
    if checked.size and (checked.min() < 0 or checked.max() >= length):
        raise IndexError(f"position outside an order of {length} positions")
    return checked
