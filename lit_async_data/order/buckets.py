"""`Buckets`: which samples may share a batch by length, and the batches of an epoch, the same for any ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices, Permutation, derived_key

# Separates the key of the order of batches from other keys.
BATCHES = 7
# Number of lengths among which the bounds of buckets are chosen, and default number of buckets.
CANDIDATES, BUCKETS = 256, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    lengths: Indices  # the length of each sample; int64
    bounds: Indices  # the length to which each bucket pads its samples; ascending
    sizes: Indices  # samples per batch of each bucket

    @classmethod
    def of(
        cls,
        lengths: npt.ArrayLike,
        batch_size: int,
        elements: int | None,
        given: int | npt.ArrayLike = BUCKETS,
        ids: Callable[[Indices], Indices] = np.asarray,
    ) -> Buckets:
        """Raises a ConfigError if a sample is longer than the last bucket, or has more elements than a batch.

        A batch has at most ``elements``, padding included; None for any number. ``given`` are the bounds of the
        buckets, or their number; ``ids`` maps samples to the numbers that errors show.
        """
        known = np.asarray(lengths, np.int64)
        bounds = _least_padding(known, given) if isinstance(given, int) else np.unique(np.asarray(given, np.int64))
        longest = int(known.argmax())
        named = ids(np.array([longest]))[0]
        if known[longest] > bounds[-1]:
            what = f"sample {named} has length {known[longest]}, and the last bucket ends at {bounds[-1]}"
            raise ConfigError(f"{what}; end with {known[longest]}, or leave the sample out by exclude", "buckets")
        bounds = np.maximum(bounds[: np.searchsorted(bounds, known[longest]) + 1], 1)
        sizes = np.full(len(bounds), batch_size)
        if elements is not None:
            if bounds[-1] > elements:
                what = f"sample {named} alone takes {bounds[-1]} elements, padded to its bucket, and a batch may have"
                ways = "raise batch_elements, or leave the sample out by exclude"
                raise ConfigError(f"{what} {elements}; {ways}", "batch_elements")
            sizes = np.minimum(sizes, elements // bounds)
        return cls(known, bounds, sizes)

    @functools.cached_property
    def numbers(self) -> npt.NDArray[np.uint16]:
        return np.searchsorted(self.bounds, self.lengths).astype(np.uint16)

    @functools.cached_property
    def counts(self) -> Indices:
        return np.bincount(self.numbers, minlength=len(self.bounds))

    @property
    def elements(self) -> int:
        """The most elements of a batch, padding included."""
        return int((self.sizes * self.bounds).max())

    @property
    def mean_width(self) -> float:
        """The mean number of elements per sample, padding included."""
        return float(self.counts @ self.bounds) / len(self.lengths)

    def width(self, samples: Indices) -> int:
        """The length to which the samples of a batch are padded."""
        return int(self.bounds[self.numbers[samples].max()])

    def batches(self, key: int | None, order: Indices | None = None) -> tuple[Indices, Indices]:
        """The samples, batch after batch, and the edges of the batches; without a key, in storage order.

        With an ``order`` of all samples, batches are sorted by the position of their last sample in ``order``.
        """
        every = np.arange(len(self.lengths))
        samples = order if order is not None else every if key is None else Permutation(len(every), key)(every)
        places = np.argsort(self.numbers[samples], kind="stable")
        ends, counts = np.cumsum(self.counts), -(-self.counts // self.sizes)
        bucket = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(bucket)) - (np.cumsum(counts) - counts)[bucket]
        firsts = (ends - self.counts)[bucket] + number * self.sizes[bucket]
        rows = np.minimum(self.sizes[bucket], ends[bucket] - firsts)
        turns = np.arange(len(rows)) if order is None else np.argsort(places[firsts + rows - 1])
        if order is None and key is not None:
            turns = Permutation(len(rows), derived_key(key, BATCHES))(turns)
        firsts, rows = firsts[turns], rows[turns]
        edges = np.concatenate([[0], np.cumsum(rows)])
        return samples[places[every + np.repeat(firsts - edges[:-1], rows)]], edges


def _least_padding(lengths: Indices, buckets: int) -> Indices:
    """The bounds, among quantiles of the lengths, that need the least padding; found bucket by bucket."""
    bounds = np.unique(np.quantile(lengths, np.linspace(0, 1, CANDIDATES + 1), method="higher").astype(np.int64))
    below = np.searchsorted(np.sort(lengths), bounds, side="right")
    # The cost of a bucket that begins after one candidate (rows) and ends with another (columns).
    step = (below[None, :] - np.append(0, below)[:, None]) * bounds.astype(np.float64)
    step[np.arange(len(bounds) + 1)[:, None] > np.arange(len(bounds))] = np.inf
    best, chosen = step[0], list[Indices]()
    for _ in range(min(buckets, len(bounds)) - 1):
        costs = best[:, None] + step[1:]
        chosen.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    found = [len(bounds) - 1]
    for before in reversed(chosen):
        found.append(int(before[found[-1]]))
    return bounds[sorted(set(found))]
