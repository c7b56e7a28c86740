"""`Shares`: which of several readers reads which samples of a batch, so that only one of them decodes a chunk."""

from __future__ import annotations

import dataclasses

import numpy as np

from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, EpochPlan, Schedule, Share


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares each batch among readers. The samples of a chunk always fall to the same one. Safe to use from any thread.

    * If the order goes by chunks, the chunks of a group fall to the readers in turn, and so do the samples of a batch.
    * If a reader keeps chunks, or the order goes by samples, the chunks fall to the readers as they are stored: to the
      same one in each epoch.

    Example:
        >>> plan = EpochPlan(length=8, batch_size=4, shuffle="none", seed=0, epoch=0)
        >>> samples = plan.batch(1)
        >>> from lit_async_data.order.chunk_order import ChunkRun
        >>> Shares(ChunkExtents([ChunkRun(samples=8, rows=3)])).readers(plan, 4, samples, 2).tolist()
        [1, 1, 0, 0]
    """

    chunks: ChunkExtents | None  # which samples share chunks; None if each is stored alone, for a single reader
    kept: bool = False  # whether readers keep chunks from epoch to epoch

    @property
    def rows(self) -> int:
        """Samples of most chunks."""
        return 1 if self.chunks is None else self.chunks.usual_rows

    def readers(self, plan: EpochPlan, first: int, samples: Indices, readers: int) -> Indices:
        """Returns the reader of each sample, from this rank's position ``first`` on; int64, shape (n,)."""
        if plan.chunk_order is not None:
            return self.readers_of(plan, plan.chunk_places(first, samples), readers)
        assert self.chunks is not None
        return self.chunks.chunks_of(samples) % readers

    def readers_of(self, plan: EpochPlan, places: Indices, readers: int) -> Indices:
        """Returns the readers of the chunks at places in the order of chunks.

        If ``world_size`` divides the chunks of a group, a rank reads every ``world_size``-th chunk, and only those are
        shared among its readers.
        """
        order = plan.chunk_order
        assert order is not None
        if self.kept:
            return order.first_of(places) // order.rows % readers
        return places // plan.world_size % readers

    def own(self, plan: EpochPlan, first: int, samples: Indices, share: Share) -> Indices:
        """Returns the places of the samples that one reader reads, ascending; see `readers`."""
        if share.readers == 1:
            return np.arange(len(samples))
        return np.flatnonzero(self.readers(plan, first, samples, share.readers) == share.reader)

    def end_with(self, schedule: Schedule, batch: BatchIndex) -> bool:
        """Whether chunks end with a batch: none is read for it and for later ones. True in storage order only."""
        plan, following = schedule.plan(batch.epoch), schedule.following(batch)
        if self.chunks is None or plan.shuffle != "none" or plan.buckets is not None or plan.order is not None:
            return False
        ends = plan.batch(batch.step)[-1], schedule.plan(following.epoch).batch(following.step)[0]
        before, after = self.chunks.chunks_of(np.array(ends))
        return bool(before != after)
