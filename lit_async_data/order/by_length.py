"""`LengthPlan`: the batches of one epoch and one rank, each of samples of like length.

Position q is the index of a sample in the order of `Buckets`, batch after batch, over all ranks. Rank r takes batch
``j·W + r`` at step j.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices, derived_key
from lit_async_data.order.plan import SUBSTITUTES, EpochPlan, KeyedSamples


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPlan(EpochPlan):
    """The batches of one epoch for one rank, each of samples of like length; otherwise as `EpochPlan`.

    A batch has at most ``batch_size`` samples. ``drop_last`` drops the batches that do not fill a step of all ranks;
    otherwise the last batches are split until each rank has one.
    """

    buckets: Buckets = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        self._check_ranks()
        if not len(self):
            raise ConfigError(
                f"there are too few batches for {self.world_size} ranks, and drop_last drops batches that "
                "do not fill a step; set drop_last=false, or smaller batches",
                "batch_by",
            )

    @functools.cached_property
    def _ordered(self) -> tuple[Indices, Indices, Indices]:
        """The samples, batch after batch; the edges of batches; the position of each sample in the order by chunks."""
        if self.chunk_order is None:
            return *self.buckets.batches(None if self.shuffle == "none" else self._key), np.empty(0, np.int64)
        order = self.numbered(self.chunk_order.samples(np.arange(self.length)))
        return *self.buckets.batches(None, order), np.argsort(order)

    @functools.cached_property
    def _edges(self) -> Indices:
        """The first positions of the batches of all ranks, from ``start`` on, and the end of the last batch."""
        edges = self._ordered[1]
        edges = np.append(self.start, edges[edges > self.start])
        return _shared(edges, self.world_size, drop_last=self.drop_last, longest=int(self.buckets.bounds[-1]))

    @property
    def capacity(self) -> int:
        return int(self.buckets.sizes.max())

    def __len__(self) -> int:
        return (len(self._edges) - 1) // self.world_size

    @functools.cached_property
    def whole_steps(self) -> int:
        return 0

    def count(self, step: int) -> int:
        first, end = self.bounds(step)
        return end - first

    def position(self, steps: int) -> int:
        return self.length if steps == len(self) else int(self._edges[steps * self.world_size])

    def steps_to(self, position: int) -> int:
        return min(len(self), int(np.searchsorted(self._edges[:: self.world_size], position)))

    def drops_all(self, position: int) -> bool:
        return self.drop_last and bool(np.count_nonzero(self._ordered[1] > position) < self.world_size)

    def positions(self, step: int) -> Indices:
        return np.arange(*self.bounds(step))

    def batch(self, step: int) -> Indices:
        first, end = self.bounds(step)
        return self._ordered[0][first:end]

    def stretch(self, step: int, count: int) -> tuple[KeyedSamples, list[int]]:
        batches = [self.batch(number) for number in range(step, step + count)]
        return self._keyed(np.concatenate(batches), step, count), [0, *itertools.accumulate(map(len, batches))]

    def samples(self, positions: Indices) -> Indices:
        return self._ordered[0][positions + self.start]

    def front(self, step: int) -> int:
        (samples, _, places), first = self._ordered, int(self._edges[step * self.world_size])
        return int(places[samples[first - 1]]) if first and len(places) else first

    def chunk_places(self, first: int, samples: Indices) -> Indices:  # noqa: ARG002  # samples may lie anywhere
        assert self.chunk_order is not None
        return self.chunk_order.located(self._ordered[2][samples])[0]

    def places_begun(self, group: int) -> Indices:
        assert self.chunk_order is not None
        return self.chunk_order.places_of(group)  # each rank has samples of each chunk

    def substitute(self, position: int, attempt: int, *, alone: bool = False) -> int:
        """A sample of the same bucket; every second attempt also accepts shorter ones: a bucket may hold only one."""
        numbers, own = self.buckets.numbers, self.buckets.numbers[self._ordered[0][position]]
        alike = np.flatnonzero((numbers <= own) | alone if attempt % 2 else numbers == own)
        return int(alike[derived_key(self._key, SUBSTITUTES, position, attempt) % len(alike)])

    def bounds(self, step: int) -> tuple[int, int]:
        """``[first, end)`` of positions over all ranks, unlike in `EpochPlan.bounds`."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        number = step * self.world_size + self.rank
        return int(self._edges[number]), int(self._edges[number + 1])


def _shared(edges: Indices, ranks: int, *, drop_last: bool, longest: int = 0) -> Indices:
    """Splits the last batches until each step has one for every rank; takes and returns the edges of batches."""
    steps, rest = divmod(len(edges) - 1, ranks)
    if not rest:
        return edges
    if drop_last:
        return edges[: steps * ranks + 1]
    for kept in range(steps, -1, -1):  # as few batches as possible change
        last, count = edges[kept * ranks :], (steps + 1 - kept) * ranks
        if last[-1] - last[0] >= count:
            return np.concatenate([edges[: kept * ranks], _halved(last, count)])
    raise ConfigError(
        f"{edges[-1] - edges[0]} samples in {len(edges) - 1} batches cannot be shared by {ranks} ranks, with equally "
        f"many batches each: let two samples share a batch, by batch_elements={2 * longest} and a batch_size above 1, "
        "or drop the last batches, by drop_last=True (in evaluation val_loader={'drop_last': True})",
        "batch_by",
    )


def _halved(edges: Indices, count: int) -> Indices:
    batches = [(first - end, first) for first, end in itertools.pairwise(edges.tolist())]
    heapq.heapify(batches)
    while len(batches) < count:
        size, first = batches[0]
        half = -size // 2
        heapq.heapreplace(batches, (-half, first))
        heapq.heappush(batches, (size + half, first + half))
    return np.append(np.sort([first for _, first in batches]), edges[-1])
