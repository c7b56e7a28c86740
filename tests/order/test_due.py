"""Which chunks fall due: all of a group while the one before is dealt, each once, and none too early or in vain."""

import functools
import itertools

import numpy as np
import pytest

from lit_async_data.order.buckets import Buckets
from lit_async_data.order.by_length import LengthPlan
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.due import due
from lit_async_data.order.plan import ALL, BatchIndex, EpochPlan, Limits, Schedule, Share
from lit_async_data.order.shares import Shares
from lit_async_data.order.weights import Weights

ROWS, WIDTH = 10, 8
SHARES = Shares(ChunkExtents([ChunkRun(600, ROWS)]))


def schedule_of(batch_size=16, *, kind=EpochPlan, shuffle="chunk", length=600, start=0, **options):
    plan = functools.partial(
        kind,
        length=length,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=1,
        runs=(ChunkRun(length, ROWS),),
        shuffle_chunks=WIDTH,
        **options,
    )
    return Schedule(plan, shuffled=True).limited(Limits(0, start=start))


def keys_of(schedule, epochs):
    """All batches of some epochs, and the one after them."""
    keys = [BatchIndex(0, 0)]
    while keys[-1].epoch < epochs:
        keys.append(schedule.following(keys[-1]))
    return keys


def chunks_of_group(schedule, epoch, number):
    plan = schedule.plan(epoch)
    group = plan.chunk_order.group(number)
    return set(plan.chunk_order.samples(np.arange(group.first, group.end)) // ROWS)


DRAWN = {"weights": Weights(np.arange(600) + 1.0, 600)}
BY_LENGTH = {"kind": LengthPlan, "buckets": Buckets.of(np.arange(600) % 29, 16, None, 4)}
ON_RANK_1 = BY_LENGTH | {"rank": 1, "world_size": 3, "drop_last": True}


@pytest.mark.parametrize("options", [{}, {"batch_size": 70}, DRAWN, BY_LENGTH, ON_RANK_1])
@pytest.mark.parametrize("shares", [[ALL], [Share(reader, 3) for reader in range(3)]])
def test_each_chunk_falls_due_once_while_the_group_before_is_dealt(options, shares):
    schedule, found = schedule_of(**options), {}
    for begin, end in itertools.pairwise(keys_of(schedule, 2)):
        plan = schedule.plan(end.epoch)
        reading = end.epoch, plan.chunk_order.group_of(plan.front(end.step)).number
        for share in shares:
            for group, samples in due(schedule, begin, end, SHARES, share):
                assert group >= reading
                found.setdefault(group, []).extend((samples // ROWS).tolist())
    assert len(found) == 2 * plan.chunk_order.groups
    for group, chunks in found.items():
        assert sorted(chunks) == sorted(chunks_of_group(schedule, *group))


def test_a_group_falls_due_evenly():
    schedule = schedule_of()
    counts = [
        sum(len(found) for _, found in due(schedule, *pair, SHARES))
        for pair in itertools.pairwise(keys_of(schedule, 1))
    ]
    assert set(counts[:30]) == {1, 2}


def test_groups_that_were_passed_are_left_out():
    schedule = schedule_of()
    ((group, _),) = due(schedule, BatchIndex(0, 0), BatchIndex(0, 4), SHARES)
    assert group == (0, 1)
    assert [group for group, _ in due(schedule, BatchIndex(0, 0), BatchIndex(0, 29), SHARES)] == [(0, 5), (0, 6)]
    assert [group for group, _ in due(schedule, BatchIndex(0, 3), BatchIndex(7, 1), SHARES)] == [(7, 0), (7, 1)]
    assert due(schedule, BatchIndex(0, 4), BatchIndex(0, 4), SHARES) == []


@pytest.mark.parametrize("start", [0, 85])
def test_each_rank_decodes_the_chunks_that_it_begins_with(start):
    for rank in range(3):
        schedule = schedule_of(4, start=start, rank=rank, world_size=3)
        plan = schedule.plan(0)
        first_round = plan.chunk_order.group(2).first + np.arange(WIDTH)
        own = plan.chunk_order.samples(first_round[(first_round - start) % 3 == rank])
        begun = plan.chunk_order.first_of(plan.places_begun(2))
        assert (begun // ROWS).tolist() == (own // ROWS).tolist()


def test_in_storage_order_the_next_chunk_falls_due():
    schedule = schedule_of(4, shuffle="none")
    ((group, samples),) = due(schedule, BatchIndex(0, 1), BatchIndex(0, 2), SHARES)
    assert (group, samples.tolist()) == (None, [8 + ROWS - 1])
    assert due(schedule, BatchIndex(0, 148), BatchIndex(0, 149), SHARES)[0][1].tolist() == [599]
    assert due(schedule, BatchIndex(0, 1), BatchIndex(0, 2), Shares(None)) == []


def test_a_global_shuffle_decodes_nothing_beforehand():
    assert due(schedule_of(shuffle="global"), BatchIndex(0, 1), BatchIndex(0, 2), SHARES) == []
