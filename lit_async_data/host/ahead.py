"""`Ahead`: what a worker does after each read, for the batches after it.

It decodes the chunks that fall due, and fetches the data of later batches from storage if they are not in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_async_data.order.due import due
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.sources.contract.source import Source

# Reads after which a worker checks again whether anything must be fetched, if nothing was the last time.
LOOKS = 8


class Ahead:
    """Fetches and decodes for later batches. Called by several workers at once.

    Args:
        source: Where samples come from.
        batches: Batches between the one that is read and the last one that is fetched.
    """

    def __init__(self, source: Source, batches: int) -> None:
        self._source = source
        self._batches = batches
        self._rows = source.chunks.rows
        # Whether the source reads whole files ahead.
        self._holds = source.memory().files > 0
        self._walked: BatchIndex | None = None  # the first batch whose chunks have not fallen due yet
        self._idle = 0
        self._fetching = False

    def __call__(self, schedule: Schedule, keys: Sequence[BatchIndex], unread: BatchIndex) -> None:
        """Decode and fetch for the batches after these."""
        # Without a lock: chunks that two workers take at once are decoded once all the same.
        begin, self._walked = min(self._walked or keys[0], unread), unread
        for turn, samples in due(schedule, begin, unread, self._rows):
            self._source.decode(samples, turn)
        self._fetch(schedule, keys)

    def _fetch(self, schedule: Schedule, keys: Sequence[BatchIndex]) -> None:
        if self._idle > 0:
            self._idle -= 1  # without a lock: two workers may count as one, and then look one read later
            return
        coming = [schedule.following(keys[-1])]
        while len(coming) < self._batches:
            coming.append(schedule.following(coming[-1]))
        # While everything seems to be in memory, only the last ones are asked for. A source that holds files is asked
        # for the nearest first: its threads begin them in this order.
        asked = 0 if self._holds and not self._fetching else max(len(coming) - len(keys), 0)
        found = self._source.fetch(_samples(schedule, coming[asked:]))
        if found and not self._fetching and asked:
            self._source.fetch(_samples(schedule, coming[:asked]))
        self._fetching = found
        if not found:
            self._idle = LOOKS


def _samples(schedule: Schedule, keys: Sequence[BatchIndex]) -> Indices:
    return np.concatenate([schedule.plan(key.epoch).batch(key.step).samples for key in keys])
