"""How well a shuffle by chunks mixes, and how many ranks decode each chunk: figures for the summary before training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import ChunkOrder
from lit_async_data.order.permutation import Permutation, derived_key
from lit_async_data.order.weighted import WeightedChunkOrder

# Positions from which `mixing` estimates.
_SAMPLED_POSITIONS = 2**18


def mixing(order: ChunkOrder | WeightedChunkOrder, batch_size: int, world_size: int = 1) -> float:
    """Distinct chunks in a batch, as a share of those in a batch of the global shuffle; 1 is as well mixed.

    Counts distinct chunks in batches of the first rank and takes the mean: over all batches, or over a keyed choice of
    them with 2¹⁸ positions. For one rank and a batch much smaller than a group, it is near ``min(batch_size, width)``.
    The global shuffle is a true permutation, or independent draws by the same weights.

    Example:
        >>> from lit_async_data.order.chunk_order import ChunkRun
        >>> order = ChunkOrder([ChunkRun(samples=64_000, rows=64)], width=16, key=0)
        >>> round(mixing(order, batch_size=256), 2)
        0.07
    """
    rank_positions = -(-order.length // world_size)
    size = min(batch_size, rank_positions)
    batches = rank_positions // size
    count = min(batches, max(_SAMPLED_POSITIONS // size, 1))
    chosen = Permutation(batches, derived_key(0))(np.arange(count))
    places, _ = order.dealt((chosen[:, None] * size + np.arange(size)).ravel() * world_size)
    ordered = np.sort(places.reshape(count, size), axis=1)
    distinct = 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1).mean()
    return float(distinct / order.chunks_per_global_batch(size))


def evenness(batches: npt.NDArray[Any], shuffled: npt.NDArray[Any]) -> float:
    """How well the values of a field mix: their entropy per batch, as a share of that under a global shuffle.

    Chunks may mix well while a field does not: the chunks of one patient, say, are neighbours in the file.

    Args:
        batches: Values of the field in sampled batches; shape (batches, samples).
        shuffled: The same for batches of a global shuffle.

    Returns:
        From 0, if each batch has a single value, to 1; also 1 if the field has only one value.

    Example:
        >>> evenness(np.array([[0, 0, 1, 1], [0, 0, 0, 0]]), np.array([[0, 1, 0, 1], [1, 0, 1, 0]]))
        0.5
    """
    reference = _mean_entropy(shuffled)
    return min(_mean_entropy(batches) / reference, 1.0) if reference else 1.0


def _mean_entropy(batches: npt.NDArray[Any]) -> float:
    shares = [np.unique(batch, return_counts=True)[1] / batch.size for batch in batches]
    return float(np.mean([-(share * np.log(share)).sum() for share in shares]))


def ranks_per_chunk(order: ChunkOrder | WeightedChunkOrder, world_size: int) -> float:
    """How many ranks decode each chunk: the amplification over ranks.

    Position q goes to rank ``q % W``, and the samples of a chunk are ``width`` positions apart. So they go to
    ``W / gcd(W, width)`` ranks, but to no more than the chunk has samples. That is 1 if W divides the width. (In uneven
    groups chunks run out, and a chunk may go to more ranks.) Where samples are drawn by weight, a chunk goes to every
    rank that draws it, often to all; the result is the mean.
    """
    if isinstance(order, WeightedChunkOrder):
        return order.ranks_per_chunk(world_size)
    return min(world_size // math.gcd(world_size, order.width), order.rows)
