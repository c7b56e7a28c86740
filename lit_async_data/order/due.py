"""`due`: which chunks a reader decodes ahead while it reads batches.

`Shares` divides the samples of a batch among several readers, so that only one of them decodes each chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import ALL, BatchIndex, EpochPlan, Schedule, Share


@dataclasses.dataclass(frozen=True)
class Shares:
    """Divides each batch among readers. All samples of a chunk go to the same reader. Safe to use from any thread.

    * If the order goes by chunks, the readers take the chunks of a group in turn, and so the samples of a batch.
    * If readers keep chunks, or the order goes by samples, the readers take the chunks in storage order: each reader
      has the same chunks in each epoch.
    """

    chunks: ChunkExtents | None  # the samples of each chunk; None if each sample is stored alone, for a single reader
    kept: bool = False  # whether readers keep chunks from epoch to epoch
    # Sample numbers in storage order, which ``chunks`` count; None if samples are numbered in storage order.
    order: Indices | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def rows(self) -> int:
        return 1 if self.chunks is None else self.chunks.usual_rows

    def readers(self, plan: EpochPlan, first: int, samples: Indices, readers: int) -> Indices:
        """The reader of each sample, from this rank's position ``first`` on."""
        if self.kept or plan.deck.chunk_order is None:
            return self._stored(samples) % readers
        return plan.deck.chunk_places(plan.dealt(first, first + len(samples))) // plan.world_size % readers

    def readers_of(self, plan: EpochPlan, places: Indices, readers: int, which: int = 0) -> Indices:
        """The readers of the chunks at places in an order of chunks.

        If ``world_size`` divides the chunks of a group, a rank reads every ``world_size``-th chunk, and only those are
        shared among its readers.
        """
        if self.kept or plan.deck.chunk_order is None:  # a mixture
            return self._stored(plan.deck.first_samples(places, which)) % readers
        return places // plan.world_size % readers

    def _stored(self, samples: Indices) -> Indices:
        """The chunk of each sample, in storage order."""
        assert self.chunks is not None
        return self.chunks.chunks_of(samples if self._places is None else self._places[samples])

    @functools.cached_property
    def _places(self) -> Indices | None:
        return None if self.order is None else np.argsort(self.order)

    def own(self, plan: EpochPlan, first: int, samples: Indices, share: Share) -> Indices:
        """The indices of the samples of one reader, ascending."""
        if share.readers == 1:
            return np.arange(len(samples))
        return np.flatnonzero(self.readers(plan, first, samples, share.readers) == share.reader)

    def end_with(self, schedule: Schedule, batch: BatchIndex) -> bool:
        """Whether a batch shares no chunk with the next one. True in storage order only."""
        plan, following = schedule.plan(batch.epoch), schedule.following(batch)
        if self.chunks is None or not plan.decks.as_stored or plan.decks.order is not None:
            return False
        ends = plan.batch(batch.step)[-1], schedule.plan(following.epoch).batch(following.step)[0]
        before, after = self.chunks.chunks_of(np.array(ends))
        return bool(before != after)


# The epoch and the number of a group of chunks that a chunk shuffle deals from.
ChunkGroup = tuple[int, int]


def due(
    schedule: Schedule, begin: BatchIndex, end: BatchIndex, shares: Shares, share: Share = ALL
) -> list[tuple[ChunkGroup | None, Indices]]:
    """The chunks to decode once the batches from ``begin`` up to ``end`` have been read.

    If the order goes by chunks, the chunks of a group fall due while the group before it is dealt, evenly over its
    positions. Memory holds two groups, so a chunk falls due after the last group but one has been read, and before its
    own group is. In storage order, the next chunk that begins at or after ``end`` falls due.

    Returns, by group, one sample of each chunk that this rank begins and ``share`` has. Without groups, the group is
    None.
    """
    plan = schedule.plan(end.epoch)
    position = _position(plan, end)
    if not plan.deck.chunk_orders:
        if not plan.decks.as_stored or shares.rows == 1:
            return []
        following = np.minimum(position + shares.rows * np.arange(1, share.readers + 1), plan.length) - 1
        return [(None, following[shares.own(plan, 0, following, share)][:1])]
    found = list[tuple[ChunkGroup | None, Indices]]()
    for which, order in enumerate(plan.deck.chunk_orders):
        group = order.group_of(plan.deck.reached(position, which)).number
        reading = [(end.epoch, number) for number in (group - 1, group) if number >= 0]
        if not group and begin.epoch < end.epoch:
            before = schedule.plan(end.epoch - 1).deck.chunk_orders[which]
            reading.insert(0, (end.epoch - 1, before.groups - 1))
        found += (_due_of(schedule, (which, *each), (begin, end), shares, share) for each in reading)
    return [(group, chunks) for group, chunks in found if len(chunks)]


def _due_of(
    schedule: Schedule, group: tuple[int, int, int], batches: Sequence[BatchIndex], shares: Shares, share: Share
) -> tuple[ChunkGroup | None, Indices]:
    """The group after this one, and its chunks that fall due while these batches are read from this group."""
    which, epoch, number = group
    plan = schedule.plan(epoch)
    order = plan.deck.chunk_orders[which]
    _, first, stop = order.group(number)
    following = (epoch, number + 1) if number + 1 < order.groups else (epoch + 1, 0)
    coming = schedule.plan(following[0])
    places = coming.places_begun(following[1], which)
    if share.readers > 1:
        places = places[shares.readers_of(coming, places, share.readers, which) == share.reader]
    dealt = (min(max(plan.deck.reached(_position(plan, key), which), first), stop) - first for key in batches)
    low, high = (math.ceil(positions / (stop - first) * len(places)) for positions in dealt)
    places = places[low:high]
    return following, coming.deck.first_samples(places, which) if len(places) else places


def _position(plan: EpochPlan, key: BatchIndex) -> int:
    """The position of a batch in this epoch; for a batch of another epoch, the start or end of this one."""
    if key.epoch != plan.epoch:
        return 0 if key.epoch < plan.epoch else plan.length
    return plan.position(key.step)
