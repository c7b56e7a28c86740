"""`LengthPlan`: deals a deck of batches by length. Rank r takes batch ``j·W + r`` of the deck at step j."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.decks import LengthDeck
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import EpochPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPlan(EpochPlan):
    """The batches of a `LengthDeck` for one rank; otherwise as `EpochPlan`.

    A batch has at most ``batch_size`` samples. ``drop_last`` drops the batches that do not fill a step of all ranks;
    otherwise the last batches are split until each rank has one.
    """

    def __post_init__(self) -> None:
        self._check_ranks()
        if not len(self):
            raise ConfigError(
                f"there are too few batches for {self.world_size} ranks, and drop_last drops batches that "
                "do not fill a step; set drop_last=false, or smaller batches",
                "batch_by",
            )

    @functools.cached_property
    def _edges(self) -> Indices:
        """The first positions of the batches of all ranks, from ``start`` on, and the end of the last batch."""
        assert isinstance(self.deck, LengthDeck)
        edges, longest = self.deck.edges, int(self.deck.buckets.bounds[-1])
        edges = np.append(self.start, edges[edges > self.start])
        return _shared(edges, self.world_size, drop_last=self.drop_last, longest=longest)

    @functools.cached_property
    def _own(self) -> tuple[Indices, Indices]:
        """The first position of each batch of this rank; its first index among this rank's positions, and the end."""
        begins, ends = self._edges[self.rank : -1 : self.world_size], self._edges[self.rank + 1 :: self.world_size]
        return begins, np.append(0, np.cumsum(ends - begins))

    @property
    def capacity(self) -> int:
        assert self.decks.buckets is not None
        return int(self.decks.buckets.sizes.max())

    @property
    def _rank_positions(self) -> int:
        return int(self._own[1][-1])

    def __len__(self) -> int:
        return (len(self._edges) - 1) // self.world_size

    @functools.cached_property
    def whole_steps(self) -> int:
        return 0

    def bounds(self, step: int) -> tuple[int, int]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        first, end = self._own[1][step : step + 2].tolist()
        return first, end

    def dealt(self, first: int, end: int) -> Indices:
        (begins, firsts), own = self._own, np.arange(first, end)
        batches = np.searchsorted(firsts, own, side="right") - 1
        return begins[batches] + own - firsts[batches]

    def position(self, steps: int) -> int:
        return self.length if steps == len(self) else int(self._edges[steps * self.world_size])

    def steps_to(self, position: int) -> int:
        return min(len(self), int(np.searchsorted(self._edges[:: self.world_size], position)))

    def drops_all(self, position: int) -> bool:
        assert isinstance(self.deck, LengthDeck)
        return self.drop_last and bool(np.count_nonzero(self.deck.edges > position) < self.world_size)


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
