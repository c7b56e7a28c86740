"""Digests of what identifies the data of a source, so that a checkpoint notices a changed dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices

# Values of an array that go into a digest: evenly spaced ones, so that it takes no time for any number of samples.
PROBES = 2**14


def probes(length: int, most: int = PROBES) -> Indices:
    """Evenly spaced numbers from 0 to ``length - 1``, the first and the last among them; all if they are few."""
    return np.arange(length) if length <= most else np.arange(most) * (length - 1) // (most - 1)


def digest(*pieces: str | npt.NDArray[Any] | Iterable[str]) -> str:
    """A short text that differs, almost surely, where texts or probed values of arrays differ."""
    made = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            text = f"{piece.dtype} {piece.shape}"
            made.update(text.encode() + np.ascontiguousarray(piece[probes(len(piece))]).tobytes())
        else:
            texts = [piece] if isinstance(piece, str) else list(piece)
            made.update(repr(texts).encode("utf-8", "surrogatepass"))
    return made.hexdigest()
