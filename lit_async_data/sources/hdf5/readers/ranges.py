"""`pieces`: cuts ranges of rows at the borders of chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices


class Pieces(NamedTuple):
    """Pieces of ranges, each within one chunk; int64, shape (m,).

    Attributes:
        chunk: Number of the chunk.
        inside: First row, counted from the start of the chunk.
        rows: Number of rows.
        where: First row among those of all ranges, one after the other.
    """

    chunk: Indices
    inside: Indices
    rows: Indices
    where: Indices


def pieces(firsts: Indices, counts: Indices, rows: int) -> Pieces:
    """Cut ranges at the borders of chunks of so many rows. Counts may be 0.

    Example:
        >>> [part.tolist() for part in pieces(np.array([3, 8]), np.array([4, 1]), rows=5)]
        [[0, 1, 1], [3, 0, 3], [2, 2, 1], [0, 2, 4]]
    """
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


def touched(firsts: Indices, counts: Indices, rows: int) -> Indices:
    """The distinct chunks, of this many rows, that ranges touch."""
    return distinct_of(pieces(firsts, counts, rows).chunk)
