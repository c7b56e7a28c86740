"""Orders in which samples are drawn by weight, with replacement.

What stands at a position is a pure function of (weights, key, position): two words derived from key and position are
uniform numbers, and what they fall on is found in a cumulative sum. So any position is found at once, alone or in a
block, and ranks need not talk to each other.

* `WeightedOrder` draws from all samples at each position.
* `WeightedChunkOrder` draws by the same weights from groups of chunks, group after group, so that each chunk is decoded
  in one visit. The positions of an epoch are shared out to groups in proportion to their weights: only that share is
  not drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import ChunkRun, Group
from lit_async_data.order.permutation import Indices, Permutation, derived_key
from lit_async_data.order.weights import Floats, Weights, drawn, uniform

# A group of more positions is taken to need all of its chunks; drawing so many takes 0.1 s.
_LOOKED_AT = 2**18


class WeightedOrder:
    """Samples drawn by weight, with replacement, each on its own. Immutable; safe to call from any thread.

    A block of 16384 positions takes 4 to 5 ms for 10⁶ samples.

    Args:
        weights: A weight for each sample.
        length: Positions, ≥ 1.
        key: Which draws, 64 bits; for others each epoch, derive it from seed and epoch.

    Attributes:
        length: How many positions there are.

    Example:
        >>> order = WeightedOrder(Weights([1, 0, 3]), length=8, key=0)
        >>> order.samples(np.arange(8)).tolist()
        [2, 0, 0, 2, 0, 0, 2, 2]
    """

    def __init__(self, weights: Weights, length: int, key: int) -> None:
        _check_length(length)
        self.length = length
        self._weights = weights
        self._key = derived_key(key, 0)

    def samples(self, positions: npt.ArrayLike) -> Indices:
        """The samples at these positions.

        Args:
            positions: Integers in ``range(length)``, shape (n,).

        Returns:
            int64, shape (n,): sample numbers.

        Raises:
            IndexError: There is no such position.
        """
        return self._weights.drawn(uniform(self._key, _checked_positions(positions, self.length)))


class WeightedChunkOrder:
    """Samples drawn by weight, with replacement, from a few chunks at a time. Immutable; safe to call from any thread.

    The chunks are put in a keyed order, which is cut into groups of ``width`` chunks. Each group gets as many positions
    as its weight is of all, rounded up or down by chance so that the mean over keys is exact; each of its positions
    draws one of its chunks by weight, and one of that chunk's samples by weight. Chunks of no weight, and groups that
    get no position, are not there.

    Over many keys a sample is drawn ``length · weight / sum`` times on average, as in `WeightedOrder`.

    Args:
        runs: How samples lie in chunks.
        width: Chunks of a group, ≥ 1; more than there are is as many as there are.
        weights: A weight for each sample.
        length: Positions, ≥ 1.
        key: Which order and draws, 64 bits; for others each epoch, derive it from seed and epoch.

    Attributes:
        length: How many positions there are.
        chunks: How many chunks have any weight.
        width: Chunks of a group.
        rows: Samples of a usual chunk.
        groups: How many groups get positions.

    Raises:
        ConfigError: There are not as many weights as samples.

    Example:
        >>> runs, weights = [ChunkRun(samples=6, rows=2)], Weights([1, 1, 0, 0, 3, 1])
        >>> order = WeightedChunkOrder(runs, 1, weights, length=9, key=0)
        >>> order.samples(np.arange(9)).tolist()
        [0, 1, 0, 4, 4, 5, 4, 4, 4]
        >>> order.first_samples(group=0).tolist(), order.first_samples(group=1).tolist()
        ([0], [4])
    """

    def __init__(self, runs: Sequence[ChunkRun], width: int, weights: Weights, length: int, key: int) -> None:
        _check_length(length)
        if width < 1:
            raise ValueError(f"groups of {width} chunks")
        found = weights.chunks(runs)
        self.length, self.chunks, self.rows = length, found.sums.size, found.usual_rows
        self.width = min(width, self.chunks)
        order = Permutation(self.chunks, derived_key(key, 0))(np.arange(self.chunks))
        self._samples = weights.edges
        self._firsts, self._rows = found.firsts[order], found.rows[order]
        self._places = np.append(0.0, np.cumsum(found.sums[order]))
        self._share_out(float(uniform(derived_key(key, 1), np.zeros(1, np.int64))[0]))
        self.groups = self._ends.size
        self._chunk_key, self._row_key = derived_key(key, 2), derived_key(key, 3)

    def samples(self, positions: npt.ArrayLike) -> Indices:
        """The samples at these positions.

        Args:
            positions: Integers in ``range(length)``, shape (n,).

        Returns:
            int64, shape (n,): sample numbers.

        Raises:
            IndexError: There is no such position.
        """
        places, rows = self.dealt(positions)
        return self._firsts[places] + rows

    def group(self, number: int) -> Group:
        """A group by its number; it has a position at least.

        Raises:
            IndexError: There is no such group.
        """
        if not 0 <= number < self.groups:
            raise IndexError(f"group {number} of {self.groups}")
        return Group(number, int(self._begins[number]), int(self._ends[number]))

    def group_of(self, position: int) -> Group:
        """The group that a position belongs to.

        Raises:
            IndexError: There is no such position.
        """
        return self.group(int(self._groups_of(_checked_positions([position], self.length))[0]))

    def first_samples(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        """The first sample number of each chunk that a group draws from, in the order of its first draw.

        That is what must be decoded for it. (Of a group of more than 2¹⁸ positions, all chunks.)

        Args:
            group: Its number.
            begin: Of the group's positions, only every ``step``-th from this one on counts: those of one rank.
            step: 1 for all.

        Raises:
            IndexError: There is no such group.
        """
        _, first, end = self.group(group)
        if -(-(end - first) // step) > _LOOKED_AT:
            return self._firsts[self._lanes[group, 0] : self._lanes[group, 1]]
        places, earliest = np.unique(self.dealt(np.arange(first + begin, end, step))[0], return_index=True)
        return self._firsts[places[np.argsort(earliest)]]

    def dealt(self, positions: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Which chunk and which of its samples these positions take.

        Args:
            positions: Integers in ``range(length)``, shape (n,).

        Returns:
            Places in the order of chunks, and rows in the chunk; int64, both of shape (n,).

        Raises:
            IndexError: There is no such position.
        """
        given = _checked_positions(positions, self.length)
        first, end = self._lanes[self._groups_of(given)].T
        places = drawn(self._places, first, end, uniform(self._chunk_key, given))
        first, end = self._firsts[places], self._firsts[places] + self._rows[places]
        return places, drawn(self._samples, first, end, uniform(self._row_key, given)) - first

    def touched(self, batch_size: int) -> float:
        """Distinct chunks in a batch of `WeightedOrder`, on average.

        Args:
            batch_size: Samples per batch, ≥ 1.
        """
        shares = np.diff(self._places) / self._places[-1]
        return float(np.sum(1 - (1 - shares) ** batch_size))

    def ranks_per_chunk(self, world_size: int) -> float:
        """By how many ranks a chunk is decoded that any of them needs, on average.

        Positions go to ranks in turn, and each draws for itself: where a chunk is drawn often, every rank decodes it.

        Args:
            world_size: Ranks, ≥ 1.
        """
        return float(self._readers(world_size)[1].sum() / self._readers(1)[1].sum())

    def amplification(self, world_size: int = 1) -> float:
        """Samples that are decoded for each one used, in this epoch over all ranks, on average.

        That is (chunks decoded) · (mean rows of those) / length. It is below 1 where the epoch is long enough to use
        samples more than once, and above 1 where it is short, or goes to a few samples of each chunk.

        Args:
            world_size: Ranks, ≥ 1, that each decode what they need.
        """
        places, readers = self._readers(world_size)
        return float(np.sum(readers * self._rows[places]) / self.length)

    def _readers(self, world_size: int) -> tuple[Indices, Floats]:
        """The places of chunks in groups with positions, and how many ranks are expected to draw from each.

        A chunk with the share p of its group is missed by a rank that has n of the group's positions with the
        probability ``(1 − p)ⁿ``; of the group's c positions, ``c % W`` ranks have one more than the others.
        """
        lanes = self._lanes[:, 1] - self._lanes[:, 0]
        group = np.repeat(np.arange(self.groups), lanes)
        places = np.arange(group.size) + (self._lanes[:, 0] - (np.cumsum(lanes) - lanes))[group]
        spans = self._places[self._lanes[:, 1]] - self._places[self._lanes[:, 0]]
        left = 1 - np.diff(self._places)[places] / spans[group]
        few, more = (part[group] for part in np.divmod(self._ends - self._begins, world_size))
        return places, world_size - more * left ** (few + 1) - (world_size - more) * left**few

    def _groups_of(self, positions: Indices) -> Indices:
        return np.searchsorted(self._ends, positions, side="right")

    def _share_out(self, shift: float) -> None:
        """The groups that get positions: where those begin and end, and their first place and last, shape (groups, 2).

        With the same uniform shift everywhere, rounding down gives each group its exact share on average.
        """
        cuts = np.minimum(np.arange(-(-self.chunks // self.width) + 1) * self.width, self.chunks)
        shares = self._places[cuts] / self._places[-1]
        bounds = np.floor(shares * self.length + shift).astype(np.int64)
        # A float is not the length of a very long epoch; and what adds nothing to the sum gets no positions.
        bounds[shares == 1] = self.length
        there = np.flatnonzero(np.diff(bounds))
        self._begins, self._ends = bounds[there], bounds[there + 1]
        self._lanes = np.stack([cuts[there], cuts[there + 1]], axis=1)


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"an order of {length} positions")


def _checked_positions(positions: npt.ArrayLike, length: int) -> Indices:
    given = np.asarray(positions, np.int64)
    if given.size and (given.min() < 0 or given.max() >= length):
        raise IndexError(f"position outside an order of {length} positions")
    return given
