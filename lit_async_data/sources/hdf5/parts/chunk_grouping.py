"""`ChunkGrouping`: which samples share chunks, also where samples are windows, chosen rows or sparse rows.

Samples are grouped by the chunk they begin in. If they reach into the next chunk, that chunk is decoded for them, and
again for its own samples. So several chunks form one group then, and only the last is decoded twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.parts.part import StoredPart

# Chunks per group for each chunk that samples reach into. A quarter of the chunks is then decoded twice.
CHUNKS_PER_RUN = 4
# Share of chunks decoded twice up to which every chunk is a group.
MAX_DECODED_TWICE = 0.05
# A compressed field with at least this share of the bytes of the largest field determines the grouping.
MIN_SHARE = 0.1


class ChunkGrouping(NamedTuple):
    """How the samples of one field share chunks; the first three as in `StorageLayout`."""

    runs: tuple[ChunkRun, ...]
    spread: float
    chunks_per_run: int
    max_slabs: int  # the largest number of stored chunks that the samples of one group read


def grouping_key(part: StoredPart) -> str:
    """The key of the field whose chunks group the samples: the largest field.

    If other fields are compressed in chunks of several samples and have at least a tenth of its bytes, the largest of
    those: what needs no decoding can be read in any order.
    """
    sizes = {key: field.spec.nbytes for key, field in part.fields.items()}
    decoded = {
        key: sizes[key]
        for key, field in part.fields.items()
        if field.values.filtered and field.values.chunk_rows > 1 and sizes[key] >= MIN_SHARE * max(sizes.values())
    }
    return max(decoded or sizes, key=sizes.__getitem__)


def group_samples(parts: Sequence[StoredPart], key: str) -> ChunkGrouping:
    """Group the samples of all parts by the chunks of one field."""
    if all(_is_plain(part, key) for part in parts):
        runs = tuple(ChunkRun(part.rows, part.fields[key].values.chunk_rows) for part in parts)
        return ChunkGrouping(runs, 1.0, 1, 1)
    if not any(part.fields[key].values.filtered for part in parts):
        # Nothing is decoded, so grouping gains nothing; and there may be very many chunks.
        return ChunkGrouping((ChunkRun(sum(part.anchors.count for part in parts), 1),), 1.0, 1, 1)
    alone = _grouping(parts, key, 1)
    reach = alone.max_slabs - 1
    if alone.spread <= 1 + MAX_DECODED_TWICE or not reach:
        return alone
    return _grouping(parts, key, CHUNKS_PER_RUN * reach)


def _is_plain(part: StoredPart, key: str) -> bool:
    anchors, field = part.anchors, part.fields[key]
    # Windows of other fields may exclude rows at either end.
    all_rows = anchors.chosen is None and (anchors.first, anchors.stride, anchors.count) == (0, 1, part.rows)
    return field.stored is field.values and field.span == (0, 1) and all_rows


def _grouping(parts: Sequence[StoredPart], key: str, chunks_per_run: int) -> ChunkGrouping:
    runs: list[ChunkRun] = []
    touched = distinct = max_slabs = 0
    for part in parts:
        if part.anchors.count:
            counts, firsts, lasts = _grouped_extents(part, key, chunks_per_run)
            runs += _runs(counts)
            each = lasts - firsts + 1
            touched, distinct = touched + int(each.sum()), distinct + _count_distinct(firsts, lasts)
            max_slabs = max(max_slabs, int(each.max()))
    return ChunkGrouping(tuple(runs), max(touched / distinct, 1.0), chunks_per_run, max_slabs)


def _grouped_extents(part: StoredPart, key: str, chunks_per_run: int) -> tuple[Indices, Indices, Indices]:
    """For each group of samples that begin in the same chunks: its number of samples, and its first and last chunk."""
    field, count = part.fields[key], part.anchors.count
    rows = field.values.chunk_rows
    begins = _group_starts(part, key, chunks_per_run)
    counts = np.diff(np.append(begins, count))
    if part.anchors.chosen is None and field.stored is field.values:
        ends = part.anchors.rows(begins + counts - 1)
        return counts, field.extent(part.anchors.rows(begins))[0] // rows, field.extent(ends)[1] // rows
    first, last = field.extent(part.anchors.rows(np.arange(count)))
    return counts, np.minimum.reduceat(first // rows, begins), np.maximum.reduceat(last // rows, begins)


def _group_starts(part: StoredPart, key: str, chunks_per_run: int) -> Indices:
    field, anchors = part.fields[key], part.anchors
    rows = field.values.chunk_rows * chunks_per_run
    if anchors.chosen is None and field.stored is field.values:
        # By arithmetic, since there may be very many samples: the first sample whose window begins in the next chunks.
        first = anchors.first + field.span[0]
        last = first + (anchors.count - 1) * anchors.stride
        borders = np.arange(first // rows + 1, last // rows + 1) * rows
        begins = np.append(0, -((first - borders) // anchors.stride))
        starts: Indices = begins[np.append(True, np.diff(begins) > 0)]
        return starts
    home = field.extent(anchors.rows(np.arange(anchors.count)))[0] // rows
    return np.append(0, np.flatnonzero(np.diff(home)) + 1)


def _runs(counts: Indices) -> Iterator[ChunkRun]:
    """Groups as runs of equal size; a last, smaller group ends the run before it."""
    borders = np.append(0, np.flatnonzero(np.diff(counts)) + 1)
    sizes, repeats = counts[borders].tolist(), np.diff(np.append(borders, len(counts))).tolist()
    for size, repeat in zip(sizes, repeats, strict=True):
        yield ChunkRun(size * repeat, size)


def _count_distinct(firsts: Indices, lasts: Indices) -> int:
    """Number of chunks in the union of ranges of chunks."""
    order = np.argsort(firsts, kind="stable")
    ends = np.maximum.accumulate(lasts[order])
    seen_to = np.append(firsts[order][:1] - 1, ends[:-1])
    return int(np.maximum(ends - np.maximum(seen_to, firsts[order] - 1), 0).sum())
