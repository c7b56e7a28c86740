"""How well a shuffle by chunks mixes, and what it costs on several ranks: figures to be said before training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import ChunkOrder
from lit_async_data.order.permutation import Permutation, derived_key
from lit_async_data.order.weighted import WeightedChunkOrder

# Positions that `mixing` looks at.
_LOOKED_AT = 2**18


def mixing(order: ChunkOrder | WeightedChunkOrder, batch_size: int, world_size: int = 1) -> float:
    """Distinct chunks in a batch, as a share of those in a batch of the global shuffle; from 1 on, as well mixed.

    The mean over batches of the first rank is counted: all of them, or keyed ones of 2¹⁸ positions in all. For one rank
    and a batch that is small beside a group it is near ``min(batch_size, width)``. The global shuffle is a true
    permutation, or independent draws by the same weights.

    Args:
        order: The order.
        batch_size: Samples per batch and rank.
        world_size: Ranks, to which positions are dealt in turn.

    Example:
        >>> from lit_async_data.order.chunk_order import ChunkRun
        >>> order = ChunkOrder([ChunkRun(samples=64_000, rows=64)], width=16, key=0)
        >>> round(mixing(order, batch_size=256), 2)
        0.07
    """
    own = -(-order.length // world_size)
    size = min(batch_size, own)
    batches = own // size
    looked_at = min(batches, max(_LOOKED_AT // size, 1))
    chosen = Permutation(batches, derived_key(0))(np.arange(looked_at))
    places, _ = order.dealt((chosen[:, None] * size + np.arange(size)).ravel() * world_size)
    found = np.sort(places.reshape(looked_at, size), axis=1)
    distinct = 1 + np.count_nonzero(np.diff(found, axis=1), axis=1).mean()
    return float(distinct / order.touched(size))


def evenness(batches: npt.NDArray[Any], shuffled: npt.NDArray[Any]) -> float:
    """How well the values of a field are mixed: the entropy of those in a batch, against batches of a global shuffle.

    Chunks may be mixed well, and what lies in them badly, since those of one patient lie together.

    Args:
        batches: Values in some batches; shape (batches, samples).
        shuffled: Values in some batches of a global shuffle; likewise.

    Returns:
        From 0, where each batch has a single value, to 1; 1 too where there is but one value at all.

    Example:
        >>> evenness(np.array([[0, 0, 1, 1], [0, 0, 0, 0]]), np.array([[0, 1, 0, 1], [1, 0, 1, 0]]))
        0.5
    """
    wanted = _entropy(shuffled)
    return min(_entropy(batches) / wanted, 1.0) if wanted else 1.0


def _entropy(batches: npt.NDArray[Any]) -> float:
    """The mean entropy of the values in a batch."""
    shares = [np.unique(batch, return_counts=True)[1] / batch.size for batch in batches]
    return float(np.mean([-(share * np.log(share)).sum() for share in shares]))


def ranks_per_chunk(order: ChunkOrder | WeightedChunkOrder, world_size: int) -> float:
    """By how many ranks each chunk is decoded: the amplification over ranks.

    Position q goes to rank ``q % W``, and the samples of a chunk lie ``width`` positions apart: they go to
    ``W / gcd(W, width)`` ranks, or to as many as there are samples. That is 1 where W divides the width. (In uneven
    groups lanes run out, and a chunk may go to more.) Where samples are drawn by weight, a chunk goes to whichever
    ranks draw it, often to all; the mean is given.

    Example:
        >>> from lit_async_data.order.chunk_order import ChunkRun
        >>> order = ChunkOrder([ChunkRun(samples=64_000, rows=64)], width=12, key=0)
        >>> [ranks_per_chunk(order, world_size) for world_size in (1, 4, 8)]
        [1, 1, 2]
    """
    if isinstance(order, WeightedChunkOrder):
        return order.ranks_per_chunk(world_size)
    return min(world_size // math.gcd(world_size, order.width), order.rows)
