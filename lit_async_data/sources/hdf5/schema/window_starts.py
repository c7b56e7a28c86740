"""`WindowStarts`: the row of each sample of a part, its anchor. Windows are relative to it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from lit_async_data.order.permutation import Indices

Span = tuple[int, int]


class WindowStarts:
    """Anchors at equal steps, or chosen ones. Immutable."""

    def __init__(self, first: int, stride: int, count: int, chosen: Indices | None = None) -> None:
        self.first = first
        self.stride = stride
        self.count = count
        self.chosen = chosen

    @classmethod
    def within(cls, rows: int, spans: Sequence[Span], stride: int) -> WindowStarts:
        """Anchors at equal steps whose windows, one span for each field, lie inside a part of ``rows`` rows."""
        first, last = anchor_range(rows, spans)
        return cls(first, stride, max((last - first) // stride + 1, 0))

    @classmethod
    def at(cls, chosen: Indices) -> WindowStarts:
        """Anchors at chosen rows."""
        return cls(0, 1, len(chosen), chosen)

    def rows(self, samples: Indices) -> Indices:
        """The rows of samples, counted from the start of the part."""
        if self.chosen is not None:
            return self.chosen[samples]
        if self.first == 0 and self.stride == 1:
            return samples
        return self.first + samples * self.stride

    def fingerprint(self, rows: int) -> int:
        """A number that differs between choices of anchors in a part of this many rows; 0 if all rows are anchors."""
        if self.chosen is not None:
            return zlib.crc32(self.chosen.tobytes()) + 1
        whole = (self.first, self.stride, self.count) == (0, 1, rows)
        return 0 if whole else zlib.crc32(f"{self.first} {self.stride} {self.count}".encode()) + 1

    def overlap(self, length: int) -> int:
        """How many of the samples after it share rows with a sample, if each reads this many rows."""
        if self.chosen is None:
            return min(-(-length // self.stride), self.count) - 1
        if (np.diff(self.chosen) >= length).all():
            return 0  # the usual case, which is found much sooner
        ordered = np.sort(self.chosen)
        nearest = np.searchsorted(ordered, ordered + length) - np.arange(self.count)
        most = int(nearest.max()) - 1
        # Unordered, any two samples may share rows.
        return self.count - 1 if most and (np.diff(self.chosen) < 0).any() else most


def anchor_range(rows: int, spans: Sequence[Span]) -> Span:
    """The first and the last anchor whose windows lie inside a part; there is none if the last is smaller."""
    return max(0, *(-begin for begin, _ in spans)), rows - max(1, *(end for _, end in spans))
