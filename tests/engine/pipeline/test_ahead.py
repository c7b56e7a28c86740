"""What a worker decodes and fetches for the batches after those that it has read."""

import collections
import functools

from support.plans import plan_of

from lit_async_data.engine.pipeline.sample_reader import LOOKS, Ahead
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.plan import BatchIndex, Schedule, Shares

RUN = ChunkRun(100, 10)


def schedule_of(shuffle):
    plan = functools.partial(plan_of, length=100, batch_size=2, shuffle=shuffle, seed=0, runs=(RUN,), shuffle_chunks=2)
    return Schedule(plan, shuffled=True)


class Storage:
    """A source that notes what is asked of it, and says whether anything had to be fetched."""

    def __init__(self, cold=True):
        self.cold, self.fetched, self.decoded = cold, [], []

    def fetch(self, samples):
        self.fetched.append(samples.tolist())
        return self.cold

    def decode(self, samples, chunk_group):
        self.decoded += [(chunk_group, chunk) for chunk in (samples // 10).tolist()]


def read(storage, rounds, shuffle="none"):
    """Have workers read ahead after batches; those of a round have all been read before the first of them does."""
    ahead, schedule = Ahead(storage, 4, Shares(ChunkExtents([RUN]))), schedule_of(shuffle)
    unread = set(range(51))
    for steps in rounds:
        unread -= set(steps)
        for step in steps:
            ahead(schedule, [BatchIndex(0, step)], BatchIndex(*divmod(min(unread), 50)))


def test_at_first_all_that_come_are_fetched_and_then_the_last_one():
    read(storage := Storage(), [[0], [1]])
    assert storage.fetched == [[8, 9], [2, 3, 4, 5, 6, 7], [10, 11]]


def test_while_all_is_in_memory_it_looks_only_now_and_then():
    read(storage := Storage(cold=False), [[step] for step in range(2 * LOOKS + 2)])
    assert storage.fetched == [[8, 9], [8 + 2 * (LOOKS + 1), 9 + 2 * (LOOKS + 1)]]


def test_each_chunk_is_decoded_once_whichever_worker_comes_first():
    read(storage := Storage(), [[1], [0], [2, 3], [4], [6], [5], *([n, n + 1] for n in range(7, 49, 2)), [49]], "chunk")
    turns = [*((0, number) for number in range(1, 5)), (1, 0)]
    assert collections.Counter(chunk_group for chunk_group, _ in storage.decoded) == dict.fromkeys(turns, 2)
    assert len(set(storage.decoded)) == 10
