"""The order of ``shuffle="chunk"``: every sample once, and every chunk in one visit.

A chunk is the unit of decoding. Reading samples in a random order would decode each chunk once per sample. Reading
chunk after chunk would give batches of one chunk. This order lies between the two:

* A keyed permutation orders the chunks of all files. The result is cut into **groups** of ``width`` chunks.
* Positions take samples from the chunks of a group round-robin: position u of a group of m chunks takes the sample of
  **tick** ``u // m`` from its chunk ``u % m``. Each chunk has its own keyed permutation from ticks to rows. A chunk
  with fewer rows than others runs out, and the others go on without it.
* A group is dealt completely before the next begins, so that at most ``width`` chunks are open at any position.

If all chunks have the same number of rows, arithmetic finds each sample. A chunk with another number of rows (the last
chunk of a file, or one of a file with other chunks) makes its group **uneven** and shifts the positions behind it. The
inverse permutation finds these groups; they are kept sorted. A last group of fewer than ``width`` chunks is uneven too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices, Permutation, Permutations, derived_key, derived_keys, in_range

# Up to this many chunks, their order is kept as a table: a permutation costs 100 µs per call.
_TABLE_CHUNKS = 4096


@dataclasses.dataclass(frozen=True)
class ChunkRun:
    """Consecutive samples, cut into equal chunks; the last chunk may be short."""

    samples: int  # ≥ 1
    rows: int  # samples in one chunk, ≥ 1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.rows < 1:
            raise ValueError(f"a run of {self.samples} samples in chunks of {self.rows}; it needs at least 1 of both")


def runs_of(counts: Indices) -> tuple[ChunkRun, ...]:
    """Chunks of ``counts`` samples; those of one size that follow each other are a run."""
    first = np.flatnonzero(np.diff(counts, prepend=-1))
    return tuple(map(ChunkRun, np.add.reduceat(counts, first).tolist(), counts[first].tolist()))


class ChunkOrder:
    """A keyed order of samples in which each chunk is visited once. Immutable; safe to call from any thread.

    Any block of positions takes O(block) time and memory, for any number of samples and chunks. The order itself takes
    O(runs + odd chunks) of memory; a chunk is odd if it does not have the most frequent number of rows. An uneven group
    adds O(width · (log width + e)) to a block that touches it and in which chunks run out at e positions. Positions
    outside of ``range(length)`` raise an IndexError.
    """

    def __init__(self, runs: Sequence[ChunkRun], width: int, key: int) -> None:
        self._layout = ChunkExtents(runs)
        self.length, self.chunks, self.rows = self._layout.length, self._layout.chunks, self._layout.usual_rows
        self.width = min(width, self.chunks)
        self.groups = -(-self.chunks // self.width)
        self._shuffled = Permutation(self.chunks, derived_key(key, 0))
        self._table = self._shuffled(np.arange(self.chunks)) if self.chunks <= _TABLE_CHUNKS else None
        self._row_key = derived_key(key, 1)
        self._find_uneven_groups()

    def samples(self, positions: npt.ArrayLike) -> Indices:
        places, ticks = self.located(positions)
        distinct, which = _window(places)
        chunks = self._chunks_at(distinct)
        first, rows = self._layout.extents(chunks)
        return first[which] + Permutations(rows, derived_keys(self._row_key, chunks))(ticks, which)

    def group(self, number: int) -> range:
        """The positions of a group."""
        bounds = np.array([number, number + 1])
        shifts = self._shifts[np.searchsorted(self._uneven, bounds)]
        return range(*(shifts + bounds * (self.width * self.rows)).tolist())

    def group_of(self, position: int) -> int:
        places, _ = self.located([position])
        return int(places[0]) // self.width

    def places_of(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        """The places of the chunks of a group, in the order of dealing: all, or from ``begin`` on every ``step``-th."""
        first = group * self.width
        return np.arange(first, min(first + self.width, self.chunks))[begin::step]

    def first_of(self, places: Indices) -> Indices:
        return self._layout.extents(self._chunks_at(places))[0]

    def located(self, positions: npt.ArrayLike) -> tuple[Indices, Indices]:
        """The place of each position's chunk in the order of chunks, and the tick of the position."""
        positions = in_range(positions, self.length)
        # Without the shift of the uneven groups before it, a position has only groups of the usual size before it.
        before = np.searchsorted(self._ends, positions, side="right")
        even = positions - self._shifts[before]
        rounds = even // self.width
        groups = rounds // self.rows
        places, ticks = even - (rounds - groups) * self.width, rounds - groups * self.rows
        inside = np.flatnonzero(positions >= self._firsts[before])
        if inside.size:
            places[inside], ticks[inside] = self._located_unevenly(positions[inside], before[inside])
        return places, ticks

    def _located_unevenly(self, positions: Indices, uneven: Indices) -> tuple[Indices, Indices]:
        """As `located`, in uneven groups.

        A chunk of n rows is closed from tick n on. With the m chunks of a group sorted by their rows, i of them are
        closed from tick n_i on, and ``n_1 + … + n_i + (m − i)·n_i`` samples come before it. The stretch of positions
        from there to the next closing chunk goes to the ``m − i`` open chunks.
        """
        distinct = distinct_of(uneven)
        rows = self._rows_of(self._uneven[distinct])
        closing = np.zeros((distinct.size, self.width + 1), np.int64)
        closing[:, 1:] = np.sort(rows, axis=1)
        still_open = self.width - np.arange(self.width + 1)
        begins = self._firsts[distinct, None] + np.cumsum(closing, axis=1) + still_open * closing
        # The groups are sorted, and so are the stretches in each: one search finds group and stretch.
        stretch = np.searchsorted(begins.ravel(), positions, side="right") - 1
        stretches, which = np.unique(stretch, return_inverse=True)
        group, closed = np.divmod(stretches, self.width + 1)
        tick, count = closing.ravel()[stretches], still_open[closed]
        still = np.nonzero(rows[group] > tick[:, None])[1]
        offset = positions - begins.ravel()[stretch]
        chunk = still[(np.cumsum(count) - count)[which] + offset % count[which]]
        return self._uneven[distinct[group[which]]] * self.width + chunk, tick[which] + offset // count[which]

    def _rows_of(self, groups: Indices) -> Indices:
        """The rows of each chunk of these groups, shape (groups, width); 0 for chunks that the last group lacks."""
        places = groups[:, None] * self.width + np.arange(self.width)
        rows, exists = np.zeros_like(places), places < self.chunks
        rows[exists] = self._layout.extents(self._chunks_at(places[exists]))[1]
        return rows

    def _chunks_at(self, places: Indices) -> Indices:
        return self._shuffled(places) if self._table is None else self._table[places]

    def _find_uneven_groups(self) -> None:
        """Sets the numbers of the uneven groups, their first and end positions, and the shifts of later positions."""
        odd, surplus = self._layout.odd_chunks()
        groups = self._shuffled.inverse(odd) // self.width
        missing = self.groups * self.width - self.chunks
        if missing:  # chunks that the last group lacks
            groups, surplus = np.append(groups, self.groups - 1), np.append(surplus, -missing * self.rows)
        self._uneven, which = np.unique(groups, return_inverse=True)
        surpluses = np.zeros(self._uneven.size, np.int64)
        np.add.at(surpluses, which, surplus)
        self._shifts = np.append(0, np.cumsum(surpluses))
        usual = self.width * self.rows
        self._ends = (self._uneven + 1) * usual + self._shifts[1:]
        # The sentinel at the end is never reached: after the last uneven group, all groups have the usual size.
        self._firsts = np.append(self._uneven * usual + self._shifts[:-1], self.length)


class ChunkExtents:
    """The first sample and rows of each chunk. Each run is a piece of equal chunks; a short last chunk is another."""

    def __init__(self, runs: Sequence[ChunkRun]) -> None:
        samples, rows = np.array([(run.samples, run.rows) for run in runs], np.int64).T
        counts = np.stack([samples // rows, samples % rows > 0], axis=1).ravel()
        exists = counts > 0
        self._rows, self._counts = np.stack([rows, samples % rows], axis=1).ravel()[exists], counts[exists]
        self._chunks = np.append(0, np.cumsum(self._counts))
        self._samples = np.append(0, np.cumsum(self._counts * self._rows))
        self.chunks, self.length = int(self._chunks[-1]), int(self._samples[-1])
        sizes, which = np.unique(self._rows, return_inverse=True)
        self.usual_rows = int(sizes[np.bincount(which, self._counts).argmax()])  # chunks with another number are odd

    def extents(self, chunks: Indices) -> tuple[Indices, Indices]:
        piece = np.searchsorted(self._chunks, chunks, side="right") - 1
        rows = self._rows[piece]
        return self._samples[piece] + (chunks - self._chunks[piece]) * rows, rows

    def chunks_of(self, samples: Indices) -> Indices:
        piece = np.searchsorted(self._samples, samples, side="right") - 1
        chunks: Indices = self._chunks[piece] + (samples - self._samples[piece]) // self._rows[piece]
        return chunks

    def whole(self, samples: Indices) -> Indices:
        """All samples of the chunks that have some of these."""
        firsts, counts = self.extents(distinct_of(self.chunks_of(samples)))
        ends = np.cumsum(counts)
        found: Indices = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
        return found

    def odd_chunks(self) -> tuple[Indices, Indices]:
        """The odd chunks, and the difference of each one's samples to ``usual_rows``."""
        odd = np.flatnonzero(self._rows != self.usual_rows)
        counts = self._counts[odd]
        starts = np.repeat(self._chunks[odd] - (np.cumsum(counts) - counts), counts)
        return starts + np.arange(starts.size), np.repeat(self._rows[odd] - self.usual_rows, counts)


def _window(places: Indices) -> tuple[Indices, Indices]:
    """At most as many distinct places, among them all given ones, and the index of each given place in them."""
    if not places.size:
        return places, places
    first, end = int(places.min()), int(places.max()) + 1
    if end - first <= places.size:
        return np.arange(first, end), places - first
    return places, np.arange(places.size)


def distinct_of(numbers: Indices) -> Indices:
    """As ``np.unique``, which would import ``numpy.ma`` into each reader process."""
    ordered = np.sort(numbers)
    fresh = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]
