"""The order of ``shuffle="chunk"``: every sample once, and every chunk in one visit.

A chunk is what is decoded together. Reading samples in a random order would decode each chunk once per sample, and
reading chunk after chunk would give batches of one chunk. Between the two:

* The chunks of all files are put in a keyed order, which is cut into **groups** of ``width`` chunks.
* The chunks of a group are its **lanes**, and positions take samples from them in turn: position u of a group of m
  chunks takes from lane ``u % m`` the sample of **tick** ``u // m``. Ticks go through the rows of a chunk in a keyed
  order of its own. A lane of fewer rows than others runs out, and the others go on without it.
* All of a group is dealt before the next begins, so that at most ``width`` chunks are open at any position.

Where all chunks have as many rows this is arithmetic. A chunk of another number of rows (the last of a file, or one of
a file with other chunks) makes its group **uneven** and shifts what comes behind; such groups are found with the
inverse permutation, and kept sorted. So is the last group, if fewer than ``width`` chunks are left for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices, Permutation, Permutations, derived_key, derived_keys

# Up to so many chunks, their order is kept as a table: it then costs next to nothing, also where there are very few.
_TABLE = 4096


@dataclasses.dataclass(frozen=True)
class ChunkRun:
    """Samples that follow each other, cut into equal chunks; the last chunk may be short.

    Attributes:
        samples: How many, ≥ 1.
        rows: Samples in one chunk, ≥ 1.
    """

    samples: int
    rows: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.rows < 1:
            raise ValueError(f"a run of {self.samples} samples in chunks of {self.rows}")


class Group(NamedTuple):
    """A group of chunks, and its positions ``[first, end)`` in the order."""

    number: int
    first: int
    end: int


class ChunkOrder:
    """A keyed order of samples in which each chunk is visited once. Immutable; safe to call from any thread.

    Any block of positions takes O(block) time and memory, whatever the number of samples and of chunks. What is kept is
    O(runs + odd chunks), odd being those that have not the number of rows that most have. An uneven group takes
    O(width · (log width + e)) more in a block that touches it, if lanes run out at e places within the block.

    Args:
        runs: The samples of each file; sample numbers and chunk numbers run through.
        width: Chunks of a group, ≥ 1; more than there are is as many as there are.
        key: Which order, 64 bits; for another one each epoch, derive it from seed and epoch.

    Attributes:
        length: How many samples there are.
        chunks: How many chunks there are.
        width: Chunks of a group.
        rows: Samples of a usual chunk.
        groups: How many groups there are.

    Example:
        >>> order = ChunkOrder([ChunkRun(samples=6, rows=2)], width=2, key=0)
        >>> order.samples(np.arange(6)).tolist()
        [0, 2, 1, 3, 5, 4]
        >>> order.first_samples(group=0).tolist(), order.first_samples(group=1).tolist()
        ([0, 2], [4])
    """

    def __init__(self, runs: Sequence[ChunkRun], width: int, key: int) -> None:
        if width < 1:
            raise ValueError(f"groups of {width} chunks")
        self._layout = ChunkExtents(runs)
        self.length, self.chunks, self.rows = self._layout.length, self._layout.chunks, self._layout.usual_rows
        self.width = min(width, self.chunks)
        self.groups = -(-self.chunks // self.width)
        self._shuffled = Permutation(self.chunks, derived_key(key, 0))
        self._table = self._shuffled(np.arange(self.chunks)) if self.chunks <= _TABLE else None
        self._row_key = derived_key(key, 1)
        self._find_uneven_groups()

    def samples(self, positions: npt.ArrayLike) -> Indices:
        """The samples at these positions.

        Args:
            positions: Integers in ``range(length)``, shape (n,).

        Returns:
            int64, shape (n,): sample numbers.
        """
        places, ticks = self.dealt(positions)
        distinct, which = _window(places)
        chunks = self._chunks_at(distinct)
        first, rows = self._layout.extents(chunks)
        return first[which] + Permutations(rows, derived_keys(self._row_key, chunks))(ticks, which)

    def group(self, number: int) -> Group:
        """A group by its number.

        Raises:
            IndexError: There is no such group.
        """
        if not 0 <= number < self.groups:
            raise IndexError(f"group {number} of {self.groups}")
        before = np.searchsorted(self._uneven, [number, number + 1])
        first, end = self._shifts[before] + np.array([number, number + 1]) * (self.width * self.rows)
        return Group(number, int(first), int(end))

    def group_of(self, position: int) -> Group:
        """The group that a position belongs to."""
        places, _ = self.dealt([position])
        return self.group(int(places[0]) // self.width)

    def first_samples(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        """The first sample number of each chunk of a group, lane by lane: what must be decoded for it.

        Args:
            group: Its number.
            begin: Of the group's positions, only every ``step``-th from this one on counts: those of one rank.
            step: 1 for all. Chunks that such positions only come to after the first round are left out.

        Raises:
            IndexError: There is no such group.
        """
        first = self.group(group).number * self.width
        places = np.arange(first, min(first + self.width, self.chunks))[begin::step]
        return self._layout.extents(self._chunks_at(places))[0]

    def dealt(self, positions: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Which chunk and which of its ticks these positions take.

        Args:
            positions: Integers in ``range(length)``, shape (n,).

        Returns:
            Places in the order of chunks, and ticks; int64, both of shape (n,).
        """
        given = np.asarray(positions, np.int64)
        if given.size and (given.min() < 0 or given.max() >= self.length):
            raise IndexError(f"position outside an order of {self.length} samples")
        # Uneven groups that end before each position: without them, every group in front of it has the usual size.
        before = np.searchsorted(self._ends, given, side="right")
        even = given - self._shifts[before]
        turns = even // self.width
        groups = turns // self.rows
        places, ticks = even - (turns - groups) * self.width, turns - groups * self.rows
        inside = np.flatnonzero(given >= self._firsts[before])
        if inside.size:
            places[inside], ticks[inside] = self._dealt_unevenly(given[inside], before[inside])
        return places, ticks

    def touched(self, batch_size: int) -> float:
        """Distinct chunks in a batch of a true permutation, on average.

        A batch of B out of N samples, drawn without replacement, misses a chunk of R samples with the probability
        ``C(N − R, B) / C(N, B) = ∏ (1 − R / (N − i))`` over i < B (hypergeometric); it touches ``chunks·(1 − ∏ …)`` on
        average. R is taken to be the mean of all chunks.

        Args:
            batch_size: Samples per batch, at most ``length``.
        """
        left = self.length - np.arange(batch_size)
        return float(self.chunks * (1 - np.prod(np.maximum(1 - self.length / self.chunks / left, 0))))

    def _dealt_unevenly(self, positions: Indices, uneven: Indices) -> tuple[Indices, Indices]:
        """As `dealt`, for positions in uneven groups.

        A lane of n rows is closed from tick n on. With the m lanes of a group sorted by their rows, i of them are
        closed from tick n_i on, and ``n_1 + … + n_i + (m − i)·n_i`` samples come before it. The stretch from there to
        where the next lane closes is dealt to the ``m − i`` open lanes.
        """
        touched = np.unique(uneven)
        rows = self._lane_rows(self._uneven[touched])
        closing = np.zeros((touched.size, self.width + 1), np.int64)
        closing[:, 1:] = np.sort(rows, axis=1)
        still_open = self.width - np.arange(self.width + 1)
        begins = self._firsts[touched, None] + np.cumsum(closing, axis=1) + still_open * closing
        # Both the groups and, in each, the beginnings are sorted, so that one search finds group and stretch.
        stretch = np.searchsorted(begins.ravel(), positions, side="right") - 1
        stretches, which = np.unique(stretch, return_inverse=True)
        group, closed = np.divmod(stretches, self.width + 1)
        tick, count = closing.ravel()[stretches], still_open[closed]
        # All open lanes of all stretches, one stretch after the other.
        lanes = np.nonzero(rows[group] > tick[:, None])[1]
        offset = positions - begins.ravel()[stretch]
        lane = lanes[(np.cumsum(count) - count)[which] + offset % count[which]]
        return self._uneven[touched[group[which]]] * self.width + lane, tick[which] + offset // count[which]

    def _lane_rows(self, groups: Indices) -> Indices:
        """The rows of each lane of these groups, shape (groups, width); 0 where the last group has no lane."""
        places = groups[:, None] * self.width + np.arange(self.width)
        rows, there = np.zeros_like(places), places < self.chunks
        rows[there] = self._layout.extents(self._chunks_at(places[there]))[1]
        return rows

    def _chunks_at(self, places: Indices) -> Indices:
        return self._shuffled(places) if self._table is None else self._table[places]

    def _find_uneven_groups(self) -> None:
        """Numbers of the uneven groups; where they begin and end; how far positions are shifted behind them."""
        odd, surplus = self._layout.odd_chunks()
        groups = self._shuffled.inverse(odd) // self.width
        missing = self.groups * self.width - self.chunks
        if missing:  # the last group lacks that many lanes
            groups, surplus = np.append(groups, self.groups - 1), np.append(surplus, -missing * self.rows)
        self._uneven, which = np.unique(groups, return_inverse=True)
        surpluses = np.zeros(self._uneven.size, np.int64)
        np.add.at(surpluses, which, surplus)
        self._shifts = np.append(0, np.cumsum(surpluses))
        usual = self.width * self.rows
        self._ends = (self._uneven + 1) * usual + self._shifts[1:]
        # One more, which is never reached: behind the last of them, all groups are of the usual size.
        self._firsts = np.append(self._uneven * usual + self._shifts[:-1], self.length)


class ChunkExtents:
    """Where chunks lie: pieces of equal chunks, two for each run whose last chunk is short. Immutable.

    Args:
        runs: The samples of each file; sample numbers and chunk numbers run through.

    Attributes:
        length: How many samples there are.
        chunks: How many chunks there are.
        usual_rows: Samples of a usual chunk.

    Raises:
        ValueError: There are no runs.

    Example:
        >>> layout = ChunkExtents([ChunkRun(samples=5, rows=2), ChunkRun(samples=4, rows=2)])
        >>> first, rows = layout.extents(np.arange(layout.chunks))
        >>> first.tolist(), rows.tolist()
        ([0, 2, 4, 5, 7], [2, 2, 1, 2, 2])
    """

    def __init__(self, runs: Sequence[ChunkRun]) -> None:
        if not runs:
            raise ValueError("an order of no samples")
        samples, rows = np.array([(run.samples, run.rows) for run in runs], np.int64).T
        counts = np.stack([samples // rows, samples % rows > 0], axis=1).ravel()
        there = counts > 0
        self._rows, self._counts = np.stack([rows, samples % rows], axis=1).ravel()[there], counts[there]
        self._chunks = np.append(0, np.cumsum(self._counts))
        self._samples = np.append(0, np.cumsum(self._counts * self._rows))
        self.chunks, self.length = int(self._chunks[-1]), int(self._samples[-1])
        sizes, which = np.unique(self._rows, return_inverse=True)
        self.usual_rows = int(sizes[np.bincount(which, self._counts).argmax()])

    def extents(self, chunks: Indices) -> tuple[Indices, Indices]:
        """First sample and number of samples of each of these chunks; int64, both of the shape of ``chunks``."""
        piece = np.searchsorted(self._chunks, chunks, side="right") - 1
        rows = self._rows[piece]
        return self._samples[piece] + (chunks - self._chunks[piece]) * rows, rows

    def chunks_of(self, samples: Indices) -> Indices:
        """The chunk that each of these samples is in; int64, of the shape of ``samples``."""
        piece = np.searchsorted(self._samples, samples, side="right") - 1
        found: Indices = self._chunks[piece] + (samples - self._samples[piece]) // self._rows[piece]
        return found

    def odd_chunks(self) -> tuple[Indices, Indices]:
        """The chunks that have not the usual number of samples, and how many more each has."""
        odd = np.flatnonzero(self._rows != self.usual_rows)
        counts = self._counts[odd]
        starts = np.repeat(self._chunks[odd] - (np.cumsum(counts) - counts), counts)
        return starts + np.arange(starts.size), np.repeat(self._rows[odd] - self.usual_rows, counts)


def _window(places: Indices) -> tuple[Indices, Indices]:
    """Places that hold all of these, no more than they are, and where in them each is."""
    if not places.size:
        return places, places
    first, end = int(places.min()), int(places.max()) + 1
    if end - first <= places.size:
        return np.arange(first, end), places - first
    return places, np.arange(places.size)
