"""The rows of samples: `Episodes`, `WindowStarts` (the row of each sample), `Window` (the rows that a field reads)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices

Span = tuple[int, int]


class Episodes(NamedTuple):
    """Ranges of rows that no window leaves: the episodes of a part, or the whole part; int64, ascending, shape (n,)."""

    begins: Indices
    ends: Indices

    @classmethod
    def whole(cls, rows: int) -> Episodes:
        return cls(np.array([0]), np.array([rows]))

    def number(self, rows: Indices) -> Indices:
        """The episode of each row; for rows of no episode, one that does not contain them."""
        return np.searchsorted(self.begins, rows, side="right") - 1

    def with_edges(self, *, apart: bool = False) -> Episodes:
        """Episodes with one row more each: end to end, or ``apart`` as they are."""
        if apart:
            before = np.arange(len(self.begins))
            return Episodes(self.begins + before, self.ends + before + 1)
        ends = np.cumsum(self.ends - self.begins + 1)
        return Episodes(np.append(0, ends[:-1]), ends)

    def of(self, rows: Indices) -> Episodes:
        """The episode of each row. A single one is not repeated, but broadcasts."""
        if len(self.begins) == 1:
            return self
        number = self.number(rows)
        return Episodes(self.begins[number], self.ends[number])

    def anchors(self, inside: Span) -> tuple[Indices, Indices]:
        """The first and the last anchor in each, with these rows inside. If there is none, the last is smaller."""
        return self.begins - inside[0], self.ends - inside[1]


@dataclasses.dataclass(frozen=True, eq=False)
class WindowStarts:
    """The anchors of samples: at equal steps, or chosen by the user."""

    first: int
    stride: int
    count: int
    chosen: Indices | None = None

    @classmethod
    def within(cls, episodes: Episodes, inside: Span, stride: int) -> WindowStarts:
        """The anchors with these rows inside their episode."""
        firsts, lasts = episodes.anchors(inside)
        counts = np.maximum((lasts - firsts) // stride + 1, 0)
        if len(counts) == 1 or not counts.any():
            return cls(int(firsts[0]), stride, int(counts[0]))
        rows = np.repeat(firsts, counts) + stride * Select(np.zeros_like(counts), counts).rows
        return cls(int(rows[0]), stride, len(rows)) if (np.diff(rows) == stride).all() else cls.at(rows)

    @classmethod
    def at(cls, chosen: Indices) -> WindowStarts:
        return cls(0, 1, len(chosen), chosen)

    def rows(self, samples: Indices) -> Indices:
        if self.chosen is not None:
            return self.chosen[samples]
        if self.first == 0 and self.stride == 1:
            return samples
        return self.first + samples * self.stride

    def fingerprint(self, rows: int) -> int:
        """Differs between choices of anchors; 0 if every row is an anchor."""
        if self.chosen is not None:
            return zlib.crc32(self.chosen.tobytes()) + 1
        whole = (self.first, self.stride, self.count) == (0, 1, rows)
        return 0 if whole else zlib.crc32(f"{self.first} {self.stride} {self.count}".encode()) + 1

    def overlap(self, length: int) -> int:
        """The largest number of later samples that share rows with a sample, if each reads ``length`` rows."""
        if self.chosen is None:
            return min(-(-length // self.stride), self.count) - 1
        if (np.diff(self.chosen) >= length).all():
            return 0  # the usual case; this test is much faster than the next lines
        ordered = np.sort(self.chosen)
        nearest = np.searchsorted(ordered, ordered + length) - np.arange(self.count)
        most = int(nearest.max()) - 1
        # Unordered, any two samples may share rows.
        return self.count - 1 if most and (np.diff(self.chosen) < 0).any() else most


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The rows that a field reads for a sample."""

    offsets: Sequence[float] = range(1)  # relative to the anchor: rows, or the seconds of a `TimedWindow`
    axis: bool = False  # whether the rows of a sample have an axis of their own
    # How windows that reach beyond their episode are filled; None if there are none.
    pad: Literal["last", "zero"] | None = None
    episodes: Episodes = dataclasses.field(default_factory=lambda: Episodes.whole(0))  # if windows are padded
    # If the rows of the field are not those of anchors: anchors, ascending, and the row from each on; else None.
    at: tuple[Indices, Indices] | None = None
    edge: bool = False  # whether each episode has one row more than anchors

    @functools.cached_property
    def _offsets(self) -> Indices:
        return np.array(self.offsets)

    @functools.cached_property
    def span(self) -> Span:
        """The first row and the end, relative to the anchor."""
        return int(min(self.offsets)), int(max(self.offsets)) + 1

    @property
    def consecutive(self) -> bool:
        return self._offsets.dtype.kind == "i" and bool((np.diff(self._offsets) == 1).all())

    @property
    def inside(self) -> Span:
        """The rows around an anchor that must lie inside its episode."""
        return (0, 1) if self.pad else (self.span[0], self.span[1] - self.edge)

    @property
    def reach(self) -> Span:
        """The rows that are read around an anchor. With ``pad``, a window may be moved into its episode."""
        begin, end = self.span
        return (min(begin, 1 + begin - end), max(end, end - begin)) if self.pad else self.span

    @property
    def length(self) -> int:
        length = self.span[1] - self.span[0]
        return min(length, int(self.episodes.ends[-1])) if self.pad else length

    def own(self, anchors: Indices) -> Indices:
        return anchors if self.at is None else self.at[1][np.searchsorted(self.at[0], anchors, side="right") - 1]

    def begins(self, anchors: Indices) -> Indices:
        """The first row that is read for each sample. Windows that reach beyond their episode are moved into it."""
        begins = anchors + self.span[0]
        if self.pad:
            low, end = self.episodes.of(anchors)
            begins = np.minimum(begins, end - self.length).clip(low, self.episodes.ends[-1] - self.length)
        return begins

    def extent(self, anchors: Indices) -> tuple[Indices, Indices]:
        """The first and the last row that is read for each sample."""
        first = self.begins(anchors)
        return first, first + self.length - 1

    def wanted(self, anchors: Indices) -> Indices:
        """The rows of the windows of samples, shape (n, window), also beyond their episode."""
        return np.asarray(anchors[:, None] + self._offsets)

    def rows(self, anchors: Indices) -> Indices:
        """As `wanted`. Beyond the episode, its nearest row repeats."""
        wanted = self.wanted(anchors)
        if self.pad:
            low, end = self.episodes.of(anchors)
            wanted.clip(low[:, None], end[:, None] - 1, out=wanted)
        return wanted

    def real(self, anchors: Indices) -> Array:
        """Whether rows of windows lie inside the episode; bool, shape (n, window)."""
        wanted, (low, end) = self.wanted(anchors), self.episodes.of(anchors)
        return np.asarray((wanted >= low[:, None]) & (wanted < end[:, None]))


ROW = Window()


@dataclasses.dataclass(frozen=True, eq=False)
class TimedWindow(Window):
    """The rows of a field that are nearest to some times, or the last before them, relative to the time of a sample."""

    time: str = ""  # the dataset of the times of the rows, in seconds
    backward: bool = False  # whether a row must not be later than its time
    tolerance: float | None = None  # the largest distance; None until the times are known
    times: Any = None  # of the rows of the field, ascending; None until they are known
    anchor_times: Any = None
    slack: float = 0.0  # a distance that is none

    def __str__(self) -> str:
        edges = f"{min(self.offsets):g} to {max(self.offsets):g} s from its own, within {self.tolerance:g} s"
        return f"values of {self.time} at all of its times, {edges}"

    @property
    def inside(self) -> Span:
        return 0, 1  # `real` says where a row is missing

    @functools.cached_property
    def span(self) -> Span:
        """The anchors before and behind a sample that may share rows with it."""
        own = self.anchor_times
        anchors = np.arange(len(own))
        first, last = (self.times[rows] for rows in self.extent(anchors))
        begins, ends = np.searchsorted(own, np.minimum(first, own)), np.searchsorted(own, np.maximum(last, own))
        return int((begins - anchors).min()), int((ends - anchors).max()) + 1

    def extent(self, anchors: Indices) -> tuple[Indices, Indices]:
        rows = dataclasses.replace(self, offsets=(min(self.offsets), max(self.offsets))).rows(anchors)
        return rows[:, 0], rows[:, 1]

    @property
    def doubt(self) -> str:
        """Why offsets and times hardly have one unit, or both clocks one start; empty if they may."""
        own, enough = self.anchor_times, min(len(self.anchor_times), len(self.times)) >= 10
        some = np.linspace(0, len(own) - 1, min(len(own), 1000)).astype(np.int64)
        wanted, (low, end) = self.wanted(some), self.episodes.of(some)
        outside = np.maximum(self.times[low][:, None] - wanted, wanted - self.times[end - 1][:, None])
        missed = (outside > (self.tolerance or 0) + self.slack).mean(axis=0)
        rows = dataclasses.replace(self, offsets=(0, *self.offsets), backward=False).rows(some)
        reach, used = np.ptp((0, *self.offsets)), np.ptp(rows[:, 1]) + 1
        why = ""
        if enough and missed.max() > 0.99:
            why = f"at {self.offsets[missed.argmax()]:g} s almost all samples look before the first or after the last"
        elif enough and 0 < reach < np.median(np.diff(own)) and (rows == rows[:, :1]).all(axis=1).mean() > 0.99:
            why = f"offsets reach {reach:.6g} s, and almost no sample has another row so near"
        elif used * 50 < len(self.times) and used * 10 < len(own):
            why = f"{len(own)} samples, from {own[0]:.6g} to {own[-1]:.6g}, are at {used} of its {len(self.times)} rows"
        said = f"but {why}; offsets, tolerance and all times need one unit, and both clocks one time that is 0"
        return why and f"the times in {self.time} lie {np.median(np.diff(self.times)):g} apart (median), {said}"

    def wanted(self, anchors: Indices) -> Array:
        """The times of the rows, shape (n, window)."""
        return np.asarray(self.anchor_times[anchors][:, None] + self._offsets)

    def rows(self, anchors: Indices) -> Indices:
        wanted, (low, end) = self.wanted(anchors), self.episodes.of(anchors)
        rows = np.searchsorted(self.times, wanted + self.slack, side="right") - 1
        rows = rows.clip(low[:, None], end[:, None] - 1)
        if not self.backward:
            after = np.minimum(rows + 1, end[:, None] - 1)
            rows = np.where(self.times[after] - wanted < wanted - self.times[rows], after, rows)
        return rows

    def real(self, anchors: Indices) -> Array:
        """Whether rows lie within the tolerance; bool, shape (n, window)."""
        late = self.times[self.rows(anchors)] - self.wanted(anchors)
        near: Array = np.abs(late) <= (self.tolerance or 0) + self.slack
        return near & (late <= self.slack) if self.backward else near


class Select(NamedTuple):
    """Rows of a dataset, or ranges of rows, which lie end to end in the output."""

    firsts: Indices  # int64, shape (n,)
    counts: Indices | None = None  # the rows of each range, also 0; None for single rows

    @property
    def rows(self) -> Indices:
        if self.counts is None:
            return self.firsts
        wheres = np.cumsum(self.counts) - self.counts
        return np.repeat(self.firsts - wheres, self.counts) + np.arange(self.counts.sum())

    def pieces(self, rows: int) -> Pieces:
        """Ranges, cut at the borders of chunks of ``rows`` rows."""
        firsts, counts = self.firsts, self.counts
        assert counts is not None
        wheres = np.cumsum(counts) - counts
        there = counts > 0
        if not there.all():
            firsts, counts, wheres = firsts[there], counts[there], wheres[there]
        ends = firsts + counts
        low = firsts // rows
        each = (ends - 1) // rows - low + 1
        which = np.repeat(np.arange(len(firsts)), each)
        chunk = low[which] + np.arange(len(which)) - (np.cumsum(each) - each)[which]
        begin = np.maximum(firsts[which], chunk * rows)
        count = np.minimum(ends[which], (chunk + 1) * rows) - begin
        return Pieces(chunk, begin - chunk * rows, count, wheres[which] + begin - firsts[which])

    def chunks(self, rows: int) -> Indices:
        """The distinct chunks of ``rows`` rows."""
        return distinct_of(self.firsts // rows if self.counts is None else self.pieces(rows).chunk)


class Pieces(NamedTuple):
    """Pieces of ranges, each within one chunk; int64, shape (m,)."""

    chunk: Indices
    inside: Indices  # first row, counted from the start of the chunk
    rows: Indices
    where: Indices  # place of the first row in the output


@dataclasses.dataclass(frozen=True)
class Steps:
    """Rows on an axis of episodes and one of their steps beside it: row e · length + t is step t of episode e.

    Stored rows are numbered as they lie in the file: chunk by chunk, each with all that it has room for.
    """

    shape: tuple[int, ...]  # of both axes, in stored order
    chunk: tuple[int, ...]  # the shape of a chunk on both axes; of all if chunks do not matter
    swapped: bool  # whether steps are on the first axis

    @property
    def length(self) -> int:
        return self.shape[1 - self.swapped]

    @functools.cached_property
    def grid(self) -> tuple[int, ...]:
        """The numbers of chunks along both axes, and the shape of a chunk: axes of stored rows."""
        return *(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)), *self.chunk

    @property
    def in_order(self) -> bool:
        """Whether each row has its own number as a stored row."""
        one = self.grid[1] == 1 or self.chunk[0] == 1
        return one and not self.swapped and self.length % self.chunk[1] == 0

    def _places(self, rows: Indices) -> list[tuple[Indices, Indices]]:
        """On both axes, the place of the chunk, and in it."""
        places = np.divmod(rows, self.length)[:: -1 if self.swapped else 1]
        return [np.divmod(place, size) for place, size in zip(places, self.chunk, strict=True)]

    def stored(self, rows: Indices) -> Select:
        (i, a), (j, b) = self._places(rows)
        return Select(np.asarray(np.ravel_multi_index((i, j, a, b), self.grid)))

    def chunks(self, rows: Indices) -> Indices:
        """The number of each row's chunk, counted along the steps, and then along the episodes."""
        (i, _), (j, _) = self._places(rows)
        return j * self.grid[0] + i if self.swapped else i * self.grid[1] + j

    @property
    def chunks_together(self) -> int:
        """The number of chunks that hold consecutive rows: of one episode, or all of several episodes."""
        return 1 if self.chunk[self.swapped] == 1 else self.grid[1 - self.swapped]

    def at(self, stored: int) -> tuple[int, int]:
        """The place of a stored row on both axes."""
        i, j, a, b = (int(each) for each in np.unravel_index(stored, self.grid))
        return i * self.chunk[0] + a, j * self.chunk[1] + b

    def row(self, stored: int) -> int:
        episode, step = self.at(stored)[:: -1 if self.swapped else 1]
        return episode * self.length + step

    def box(self, first: int, end: int) -> tuple[slice, ...]:
        """Both axes of a chunk of stored rows, or of rows at one place on the first axis."""
        sizes = self.chunk if end - first == math.prod(self.chunk) else (1, end - first)
        places = zip(self.at(first), sizes, self.shape, strict=True)
        return tuple(slice(at, min(at + size, n)) for at, size, n in places)

    def flat(self, values: Array) -> Array:
        """One value for each row, of values for all steps of all episodes, or for the steps of any episode."""
        if values.shape == (self.length,):
            return np.tile(values, math.prod(self.shape) // self.length)
        return np.asarray(values.T if self.swapped else values).reshape(-1)


def count_distinct(firsts: Indices, lasts: Indices) -> int:
    """The number of rows, or chunks, in ranges that may overlap."""
    order = np.argsort(firsts, kind="stable")
    ends = np.maximum.accumulate(lasts[order])
    seen_to = np.append(firsts[order][:1] - 1, ends[:-1])
    return int(np.maximum(ends - np.maximum(seen_to, firsts[order] - 1), 0).sum())


def runs(rows: Indices, step: int = 1) -> list[tuple[int, int, Indices]]:
    """Runs of consecutive rows, in storage order: the first row, the end, and the places in the batch."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered) != step) + 1).tolist(), len(rows)] if len(rows) else [0]
    pairs = itertools.pairwise(edges)
    return [(int(ordered[begin]), int(ordered[end - 1]) + 1, order[begin:end]) for begin, end in pairs]


def grouped(numbers: Indices) -> list[tuple[int, Indices]]:
    """The distinct numbers, ascending, each with its places."""
    return [(number, where) for number, _, where in runs(numbers, step=0)]
