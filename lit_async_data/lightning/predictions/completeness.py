"""`check_complete`: every sample has exactly one prediction, in the place where the merging expects it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lit_async_data.errors import CorruptError, MissingError, few
from lit_async_data.order.permutation import Indices


def check_complete(
    parts: Sequence[Callable[[], Iterator[Indices]]], total: int, ids: Callable[[Indices], Indices], name: str
) -> None:
    """Check the samples of the parts of all ranks. Part r of W must have those at the positions r, r + W, r + 2W, ….

    Args:
        parts: Yields the samples of each part, in pieces; called again if something is wrong.
        total: Number of positions.
        ids: Gives the samples at positions.
        name: The file, for messages.

    Raises:
        MissingError: A part ends too soon, or samples are missing.
        CorruptError: Samples are there more often than they should be, or at another place.

    Example:
        >>> parts = [lambda: iter([np.array([0, 2])]), lambda: iter([np.array([1])])]
        >>> check_complete(parts, 3, lambda positions: positions, "p.parquet")
        >>> check_complete(parts[:1] * 2, 3, lambda positions: positions, "p.parquet")
        Traceback (most recent call last):
        lit_async_data.errors.MissingError: p.parquet: of 3 samples, missing: 1; too often: 0, 2; predict again
    """
    for rank, pieces in enumerate(parts):
        position = rank
        for found in pieces():
            positions = position + len(parts) * np.arange(len(found))
            if positions[-1] >= total or not np.array_equal(ids(positions), found):
                raise _wrong(parts, total, ids, name)
            position += len(parts) * len(found)
        if position < total:
            raise _wrong(parts, total, ids, name)


def _wrong(
    parts: Sequence[Callable[[], Iterator[Indices]]], total: int, ids: Callable[[Indices], Indices], name: str
) -> MissingError | CorruptError:
    found = np.concatenate([piece for pieces in parts for piece in pieces()] or [np.empty(0, np.int64)])
    wanted = ids(np.arange(total))
    samples, which = np.unique(np.concatenate([wanted, found]), return_inverse=True)
    excess = np.bincount(which[total:], minlength=len(samples)) - np.bincount(which[:total], minlength=len(samples))
    missing, often = samples[excess < 0].tolist(), samples[excess > 0].tolist()
    faults = [f"missing: {few(missing)}"] if missing else []
    faults += [f"too often: {few(often)}"] if often else []
    kind = MissingError if missing else CorruptError
    what = "; ".join(faults) or "some not at their places"
    return kind(f"{name}: of {total:,} samples, {what}; predict again", file=name)
