"""`Ahead`: what a worker does after each read, for the batches after it.

It decodes the chunks that fall due, and fetches the data of later batches from storage if they are not in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_async_data.order.due import Shares, due
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import ALL, BatchIndex, Schedule, Share
from lit_async_data.sources.contract.source import Source

# Reads after which a worker checks again whether anything must be fetched, if nothing was the last time.
LOOKS = 8


class Ahead:
    """Fetches and decodes for later batches. Called by several workers at once.

    Args:
        source: Where samples come from.
        batches: Batches between the one that is read and the last one that is fetched.
        shares: How several readers share each batch.
    """

    def __init__(self, source: Source, batches: int, shares: Shares) -> None:
        self._source = source
        self._batches = batches
        self._shares = shares
        # Whether the source reads whole files ahead.
        self._holds = source.memory().files > 0
        self._walked: BatchIndex | None = None  # the first batch whose chunks have not fallen due yet
        self._idle = 0
        self._fetching = False

    def __call__(self, schedule: Schedule, keys: Sequence[BatchIndex], unread: BatchIndex, share: Share = ALL) -> None:
        """Decode and fetch for the batches after these, as far as their samples are in a share."""
        # Without a lock: chunks that two workers take at once are decoded once all the same.
        begin, self._walked = min(self._walked or keys[0], unread), unread
        for chunk_group, samples in due(schedule, begin, unread, self._shares, share):
            self._source.decode(samples, chunk_group)
        self._fetch(schedule, keys, share)

    def _fetch(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> None:
        if self._idle > 0:
            self._idle -= 1  # without a lock: two workers may count as one, and then look one read later
            return
        coming = [schedule.following(keys[-1])]
        while len(coming) < self._batches:
            coming.append(schedule.following(coming[-1]))
        # While everything seems to be in memory, only the last ones are asked for. A source that holds files is asked
        # for the nearest first: its threads begin them in this order.
        asked = 0 if self._holds and not self._fetching else max(len(coming) - len(keys), 0)
        found = self._source.fetch(self._samples(schedule, coming[asked:], share))
        if found and not self._fetching and asked:
            self._source.fetch(self._samples(schedule, coming[:asked], share))
        self._fetching = found
        if not found:
            self._idle = LOOKS

    def _samples(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> Indices:
        found = []
        for epoch, step in keys:
            plan = schedule.plan(epoch)
            samples = plan.batch(step)
            found.append(samples[self._shares.own(plan, plan.bounds(step)[0], samples, share)])
        return np.concatenate(found)
