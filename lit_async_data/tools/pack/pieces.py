"""Reads and compresses pieces in several threads, and hands them over in order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.system import usable_cores
from lit_async_data.tools.pack.origin import Origin
from lit_async_data.tools.pack.planning.codec import Codec
from lit_async_data.tools.pack.planning.plan import PackedField, Piece, Plan
from lit_async_data.tools.pack.writing.part_file import Written

_T = TypeVar("_T")
# Pieces per thread that are read, or wait to be written.
AHEAD = 2


def in_threads(work: Callable[[Piece], _T], pieces: Iterable[Piece]) -> Generator[tuple[Piece, _T], None, None]:
    """Yields each piece, in order, with the result of some work on it.

    Args:
        work: Called in as many threads as there are cores.
        pieces: At most `AHEAD` of them per thread are in memory.
    """
    threads = usable_cores()
    pool = ThreadPoolExecutor(threads, "lit_async_data pack")
    waiting: collections.deque[tuple[Piece, Future[_T]]] = collections.deque()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(work, piece)))
            if len(waiting) >= AHEAD * threads:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read(source: Source, piece: Piece) -> tuple[Indices, dict[str, Array]]:
    """The numbers of the samples of a piece, and their values by batch key."""
    samples = piece.first + np.arange(piece.count)
    fields = source.spec.fields
    values = {key: np.empty((piece.count, *field.stored_shape), field.dtype) for key, field in fields.items()}
    source.read_into(samples, values)
    return samples, values


def encoded(piece: Piece, source: Source, plan: Plan, origin: Origin) -> Written:
    """Read a piece, and turn it into what the file stores.

    Raises:
        SourceError: A sample cannot be read; the error names it.
        FormatError: A sample has no class.
    """
    samples, values = read(source, piece)
    written = Written()
    for field in plan.fields:
        stored = _stored(values.pop(field.key), field, samples)
        if field.chunk:
            written.chunks[field.dataset] = list(_chunks(stored, field, plan.codec, piece))
        else:
            written.arrays[field.dataset] = stored
    numbers, written.texts = origin.of(samples)
    written.arrays |= numbers
    return written


def _stored(values: Array, field: PackedField, samples: Indices) -> Array:
    if field.categorical:
        outside = (values < 0) | (values >= len(field.classes))
        if outside.any():
            sample = int(samples[outside.argmax()])
            raise FormatError(
                f"{field.key}, sample {sample}: {values[outside][0]} is none of its {len(field.classes)} classes; "
                "leave such samples out",
                dataset=field.key,
                sample_id=sample,
            )
    return values.astype(field.dtype, copy=False)


def _chunks(values: Array, field: PackedField, codec: Codec, piece: Piece) -> Iterator[Any]:
    rows = min(field.chunk, piece.section.count)
    for first in range(0, len(values), rows):
        chunk = values[first : first + rows]
        if len(chunk) < rows:  # the last chunk is as long as the others
            chunk = np.concatenate([chunk, np.zeros((rows - len(chunk), *chunk.shape[1:]), chunk.dtype)])
        yield codec.encode(chunk, shuffle=field.shuffle)
