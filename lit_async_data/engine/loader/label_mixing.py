"""How well labels are mixed in the batches of an order: measured on labels that are read for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.order.mixing import evenness
from lit_async_data.order.permutation import Indices, Permutation, derived_key
from lit_async_data.order.plan import EpochPlan
from lit_async_data.order.weighted import WeightedOrder
from lit_async_data.sources.composed.subset import SubsetSource
from lit_async_data.sources.contract.source import Source, read

# At most this many samples, in at most this many batches, are read to measure how well labels are mixed.
SAMPLES, BATCHES = 8192, 64
# A field with more different values among those samples is no label.
MOST_VALUES = 1000

Values = npt.NDArray[Any]


def label_evenness(source: Source, order: EpochPlan) -> Iterator[tuple[str, float]]:
    """How well labels, and ``groups`` or ``parts``, are mixed in batches: the `evenness` of each, by name."""
    if source.chunks.reading == "python":
        return  # the user's code may be slow
    size = min(order.batch_size, -(-order.length // order.world_size))
    count = max(min(SAMPLES // size, BATCHES, order.length // (size * order.world_size)), 1)
    steps = Permutation(max(order.length // (size * order.world_size), 1), derived_key(0))(np.arange(count))
    positions = (steps[:, None] * size + np.arange(size)) * order.world_size
    planned, shuffled = order.samples(positions.ravel()), _globally_shuffled(source, order, positions.size)
    for name, values_of in _labels(source):
        values = values_of(np.concatenate([planned, shuffled])).reshape(2, count, size)
        if 1 < np.unique(values).size <= MOST_VALUES:
            yield name, evenness(*values)


def _globally_shuffled(source: Source, order: EpochPlan, count: int) -> Indices:
    if order.weights is not None:
        return WeightedOrder(order.weights, count, derived_key(1)).samples(np.arange(count))
    return Permutation(len(source), derived_key(1))(np.arange(count) % len(source))


def _labels(source: Source) -> Iterator[tuple[str, Callable[[Indices], Values]]]:
    """Fields with one whole number per sample, and the groups or parts that samples belong to."""
    for key, field in source.spec.fields.items():
        if field.dtype.kind in "iub" and math.prod(field.shape) == 1:
            yield key, functools.partial(_read, source, key)
    codes = source.group_codes if isinstance(source, SubsetSource) else None
    parts = source.parts
    if codes is not None:
        yield "groups", lambda samples: codes[samples]
    elif len(parts) > 1:
        ends = np.cumsum([part.samples for part in parts])
        yield "parts", lambda samples: np.searchsorted(ends, samples, side="right")


def _read(source: Source, key: str, samples: Indices) -> Values:
    return read(source, samples, [key])[key].reshape(-1)
