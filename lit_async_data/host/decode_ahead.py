"""`DecodeAhead`: a worker decodes and fetches data for later batches after each read.

* If the order goes by chunks, workers decode the next group of chunks while one is dealt, evenly over its steps.
* If samples come as stored, a worker decodes the next chunk while one is read.
* In any order, workers fetch the data of later steps from the disk if they are not in memory.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

from lit_async_data.order.chunk_order import Group
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, EpochPlan, Limits, Schedule
from lit_async_data.sources.contract.source import Source

# Reads after which a worker checks again whether anything must be fetched, if nothing was the last time.
LOOKS = 8
ALL = Limits()
# Groups that are remembered: those that workers are reading, and the next one.
GROUPS = 4


class DecodeAhead:
    """Decodes and fetches for later batches. Called by several workers at once.

    Args:
        source: Where samples come from.
        schedule: Their order.
        steps: Steps between the batch that is read and the batch that is fetched.
    """

    def __init__(self, source: Source, schedule: Schedule, steps: int) -> None:
        self._source = source
        self._schedule = schedule
        self._steps = steps
        self._rows = source.chunks.rows
        # Whether the source reads whole files ahead.
        self._holds = source.file_bytes > 0
        self._idle = 0
        self._fetching = False
        # Batches that have been read, and whose share of the next group has not been decoded.
        self.owed: collections.deque[BatchIndex] = collections.deque()
        # The groups used last; replaced as a whole, since other workers may be reading.
        self._groups: tuple[tuple[int, Group], ...] = ()
        self._lanes: tuple[tuple[int, int, int], Indices] = ((-1, 0, 0), np.empty(0, np.int64))

    def __call__(
        self,
        keys: Sequence[BatchIndex],
        cursor: BatchIndex | None,
        oldest: BatchIndex | None = None,
        limits: Limits = ALL,
    ) -> None:
        """Decode and fetch for the batches after these.

        Args:
            keys: The batches that have just been read.
            cursor: The next batch to be read.
            oldest: The first batch that is still being read; None if none is.
            limits: Which part of each epoch will be asked for.
        """
        self._schedule = self._schedule.limited(limits)
        plan = self._schedule.plan(keys[0].epoch)
        if plan.chunk_order is not None:
            self.owed.extend(keys)
            self._decode_due(cursor, oldest or cursor)
        elif plan.shuffle == "none" and self._rows > 1:
            self._source.decode_ahead(self._next_chunk(plan, keys[-1].step), None)
        self._fetch(keys)

    def _next_chunk(self, plan: EpochPlan, step: int) -> Indices:
        """One sample of the next chunk, where samples come as stored."""
        last = int(plan.batch(step).samples[-1])
        return np.array([min(last + self._rows, plan.length - 1)])

    def _decode_due(self, cursor: BatchIndex | None, oldest: BatchIndex | None) -> None:
        # 1. A slow worker reads the last batch of group 0. 2. Others read group 1, and after each batch decode chunks
        # of group 2. There is memory for two groups, so the chunks of group 0 are dropped. 3. The slow worker decodes
        # them again, which drops chunks of group 1 that are still needed. So nothing is decoded for group 2 before
        # group 0 has been read; it is owed and decoded later. See test_a_slow_worker_costs_no_decoding.
        while self.owed:
            try:
                key = self.owed.popleft()
            except IndexError:  # another worker was faster
                return
            if cursor is not None and key >= cursor:
                continue  # of another order: the consumer has chosen another epoch meanwhile
            if oldest is not None and self._place(oldest) < self._place(key):
                self.owed.appendleft(key)
                return
            for turn, samples in self.due(key, cursor):
                if len(samples):
                    self._source.decode_ahead(samples, turn)

    def due(self, key: BatchIndex, cursor: BatchIndex | None) -> list[tuple[tuple[int, int], Indices]]:
        """The chunks of the next group that this rank decodes with a batch, one sample of each.

        None of a group that reading has passed: a slow worker would decode chunks that nobody needs any more.

        Args:
            key: The batch.
            cursor: The next batch to be read; None if that is not known.

        Returns:
            Epoch and number of the group, and the samples; several pairs if the batch is of several groups.
        """
        plan = self._schedule.plan(key.epoch)
        first, end = (min(self._position(plan, local), plan.length) for local in plan.bounds(key.step))
        found = []
        while first < end:
            group = self.group(plan, first)
            turn = self._after(plan, group)
            if cursor is None or self._place(cursor) <= turn:
                found.append((turn, self._part(group, first, min(end, group.end), turn)))
            first = group.end
        return found

    @staticmethod
    def _after(plan: EpochPlan, group: Group) -> tuple[int, int]:
        """Epoch and number of the next group."""
        assert plan.chunk_order is not None
        last = group.number + 1 == plan.chunk_order.groups
        return (plan.epoch + 1, 0) if last else (plan.epoch, group.number + 1)

    def _part(self, group: Group, first: int, end: int, coming: tuple[int, int]) -> Indices:
        """The part of the coming group that is decoded with these positions of a group."""
        lanes, size = self.lanes(*coming), group.end - group.first
        begin, stop = (math.ceil((at - group.first) / size * len(lanes)) for at in (first, end))
        return lanes[begin:stop]

    def lanes(self, epoch: int, number: int) -> Indices:
        """One sample of each chunk of a group that this rank begins with."""
        plan = self._schedule.plan(epoch)
        which, known = self._lanes
        if which == (epoch, plan.start, number):
            return known
        order = plan.chunk_order
        assert order is not None
        own = (plan.rank + plan.start - order.group(number).first) % plan.world_size
        places = order.lanes(number, own, plan.world_size)
        found = plan.numbered(order.first_of(places))
        self._lanes = (epoch, plan.start, number), found
        return found

    def group(self, plan: EpochPlan, position: int) -> Group:
        """The group of chunks that a position of an epoch belongs to."""
        for epoch, group in self._groups:
            if epoch == plan.epoch and group.first <= position < group.end:
                return group
        assert plan.chunk_order is not None
        group = plan.chunk_order.group_of(position)
        self._groups = (plan.epoch, group), *self._groups[: GROUPS - 1]
        return group

    def _place(self, key: BatchIndex) -> tuple[int, int]:
        plan = self._schedule.plan(key.epoch)
        position = min(self._position(plan, plan.bounds(key.step)[0]), plan.length - 1)
        return key.epoch, self.group(plan, position).number

    def _position(self, plan: EpochPlan, local: int) -> int:
        return local * plan.world_size + plan.rank + plan.start

    def _fetch(self, keys: Sequence[BatchIndex]) -> None:
        if self._idle > 0:
            self._idle -= 1  # without a lock: two workers may count as one, and then look one read later
            return
        later = range(keys[0].step + self._steps, keys[-1].step + self._steps + 1)
        if self._holds and not self._fetching:
            # Nearest first: threads begin files in this order.
            later = range(keys[-1].step + 1, later.stop)
        found = self._source.fetch(self._of_steps(keys[0].epoch, later))
        between = range(keys[-1].step + 1, later.start)
        if found and not self._fetching and between:
            # These were not fetched while everything seemed to be in memory.
            self._source.fetch(self._of_steps(keys[0].epoch, between))
        self._fetching = found
        if not found:
            self._idle = LOOKS

    def _of_steps(self, epoch: int, steps: range) -> Indices:
        """The samples of steps, which may go on into the next epochs."""
        found, schedule = [], self._schedule
        for step in steps:
            at = epoch
            while step >= (length := min(schedule.limits.of(at) or schedule.steps_of(at), schedule.steps_of(at))):
                at, step = at + 1, step - length  # noqa: PLW2901  # the place of this step in a later epoch
            found.append(schedule.plan(at).batch(step).samples)
        return np.concatenate(found)
