"""Which chunks fall due: all of a group while the one before is dealt, each once, and none too early or in vain."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import plan_of

from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.decks import Decks, Mixture
from lit_async_data.order.plan import ALL, BatchIndex, Limits, Schedule, Share, Shares, due
from lit_async_data.order.weights import Weights

ROWS, WIDTH = 10, 8
SHARES = Shares(ChunkExtents([ChunkRun(600, ROWS)]))


def schedule_of(batch_size=16, *, shuffle="chunk", length=600, start=0, **options):
    given = {"length": length, "batch_size": batch_size, "shuffle": shuffle, "shuffle_chunks": WIDTH, "seed": 1}
    plan = functools.partial(plan_of, runs=(ChunkRun(length, ROWS),), **given | options)
    return Schedule(plan, shuffled=True).limited(Limits(0, start=start))


def keys_of(schedule, epochs):
    keys = [BatchIndex(0, 0)]
    while keys[-1].epoch < epochs:
        keys.append(schedule.following(keys[-1]))
    return keys


def chunks_of_group(schedule, epoch, number):
    plan = schedule.plan(epoch)
    group = plan.deck.chunk_order.group(number)
    return set(plan.deck.chunk_order.samples(np.arange(group.start, group.stop)) // ROWS)


DRAWN = {"weights": Weights(np.arange(600) + 1.0, 600)}
BY_LENGTH = {"buckets": Buckets.of(np.arange(600) % 29, 16, None, 4)}
ON_RANK_1 = BY_LENGTH | {"rank": 1, "world_size": 3, "drop_last": True}


@pytest.mark.parametrize("options", [{}, {"batch_size": 70}, DRAWN, BY_LENGTH, ON_RANK_1])
@pytest.mark.parametrize("shares", [[ALL], [Share(reader, 3) for reader in range(3)]])
def test_each_chunk_falls_due_once_while_the_group_before_is_dealt(options, shares):
    schedule, found = schedule_of(**options), {}
    for begin, end in itertools.pairwise(keys_of(schedule, 2)):
        plan = schedule.plan(end.epoch)
        reading = end.epoch, plan.deck.chunk_order.group_of(plan.deck.reached(plan.position(end.step)))
        for share in shares:
            for group, samples in due(schedule, begin, end, SHARES, share):
                assert group >= reading
                found.setdefault(group, []).extend((samples // ROWS).tolist())
    assert len(found) == 2 * plan.deck.chunk_order.groups
    for group, chunks in found.items():
        assert sorted(chunks) == sorted(chunks_of_group(schedule, *group))


def test_a_group_falls_due_evenly():
    schedule = schedule_of()
    pairs = itertools.islice(itertools.pairwise(keys_of(schedule, 1)), 30)
    assert {sum(len(found) for _, found in due(schedule, *pair, SHARES)) for pair in pairs} == {1, 2}


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
        first_round = plan.deck.chunk_order.group(2).start + np.arange(WIDTH)
        own = plan.deck.chunk_order.samples(first_round[(first_round - start) % 3 == rank])
        begun = plan.deck.chunk_order.first_of(plan.places_begun(2))
        assert (begun // ROWS).tolist() == (own // ROWS).tolist()


def test_in_storage_order_the_next_chunk_falls_due():
    schedule = schedule_of(4, shuffle="none")
    ((group, samples),) = due(schedule, BatchIndex(0, 1), BatchIndex(0, 2), SHARES)
    assert (group, samples.tolist()) == (None, [8 + ROWS - 1])
    assert due(schedule, BatchIndex(0, 148), BatchIndex(0, 149), SHARES)[0][1].tolist() == [599]
    assert due(schedule, BatchIndex(0, 1), BatchIndex(0, 2), Shares(None)) == []


def test_a_global_shuffle_decodes_nothing_beforehand():
    assert due(schedule_of(shuffle="global"), BatchIndex(0, 1), BatchIndex(0, 2), SHARES) == []


few_runs = st.lists(st.builds(ChunkRun, samples=st.integers(3, 90), rows=st.integers(1, 20)), min_size=1, max_size=4)


@st.composite
def plans(draw, shuffles=("none", "chunk", "global")):
    runs, world_size = draw(few_runs), draw(st.integers(1, 3))
    length = sum(run.samples for run in runs)
    order = {"shuffle": st.sampled_from(shuffles), "shuffle_chunks": st.integers(1, 12), "seed": st.integers(0, 9)}
    dealt = {"batch_size": st.integers(1, 40), "rank": st.integers(0, world_size - 1), "epoch": st.integers(0, 2)}
    given = draw(st.fixed_dictionaries(order | dealt | {"start": st.integers(0, length - world_size)}))
    weights = Weights(np.arange(1, length + 1), length) if draw(st.booleans()) else None
    return plan_of(length=length, world_size=world_size, runs=tuple(runs), weights=weights, **given)


def batches(plan):
    for step in range(len(plan)):
        yield step, plan.bounds(step)[0], plan.batch(step)


@given(plan=plans(), readers=st.integers(2, 5), kept=st.booleans())
def test_all_samples_of_a_chunk_have_one_reader_all_epoch_and_in_the_next_where_chunks_are_kept(plan, readers, kept):
    extents = ChunkExtents(plan.decks.runs)
    shares, readers_of = Shares(extents, kept), collections.defaultdict(set)
    for each in [plan, dataclasses.replace(plan, epoch=1)][: 1 + kept]:
        for _, first, samples in batches(each):
            found = shares.readers(each, first, samples, readers)
            for reader in range(readers):
                own = shares.own(each, first, samples, Share(reader, readers))
                assert own.tolist() == np.flatnonzero(found == reader).tolist()
            assert {*found.tolist()} <= {*range(readers)}
            for chunk, reader in zip(extents.chunks_of(samples).tolist(), found.tolist(), strict=True):
                readers_of[chunk].add(reader)
    assert all(len(found) == 1 for found in readers_of.values())


@given(plan=plans(shuffles=("chunk",)), readers=st.integers(2, 5), kept=st.booleans())
def test_what_is_decoded_ahead_by_a_reader_is_what_it_will_read(plan, readers, kept):
    order, extents = plan.deck.chunk_order, ChunkExtents(plan.decks.runs)
    shares, reader_of_chunk = Shares(extents, kept), {}
    for number in range(order.groups):
        places = order.places_of(number)
        chunks = extents.chunks_of(order.first_of(places))
        found = shares.readers_of(plan, places, readers)
        reader_of_chunk.update(zip(chunks.tolist(), found.tolist(), strict=True))
    for _, first, samples in batches(plan):
        found = shares.readers(plan, first, samples, readers)
        expected = [reader_of_chunk[chunk] for chunk in extents.chunks_of(samples).tolist()]
        assert found.tolist() == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_chunks_of_a_group_fall_evenly_to_the_readers_of_each_rank(world_size):
    for rank in range(world_size):
        plan = schedule_of(length=640, rank=rank, world_size=world_size, shuffle_chunks=16).plan(0)
        shares = Shares(ChunkExtents(plan.decks.runs))
        for _, first, samples in batches(plan):
            assert np.bincount(shares.readers(plan, first, samples, 4)).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_chunk_whose_samples_have_scattered_numbers_has_one_reader(shuffle, kept, mixed):
    order, runs = np.random.default_rng(0).permutation(60), (ChunkRun(60, ROWS),)
    given = {"shuffle": shuffle, "shuffle_chunks": 2, "runs": runs, "order": order, "length": 60}
    plan = plan_of(batch_size=12, epoch=0, **given)
    if mixed:
        mixture = {"mixture": Mixture([1.0], 12), "sources": (Decks(**given),)}
        plan = plan_of(length=60, shuffle=shuffle, batch_size=12, epoch=0, **mixture)
    shares, chunk_of, readers_of = Shares(ChunkExtents(runs), kept, order), np.argsort(order) // ROWS, {}
    for _, first, samples in batches(plan):
        for sample, reader in zip(samples, shares.readers(plan, first, samples, 3), strict=True):
            readers_of.setdefault(chunk_of[sample], set()).add(int(reader))
    assert [len(found) for found in readers_of.values()] == [1] * 6
    for which, chunks in enumerate(plan.deck.chunk_orders):
        for group in range(chunks.groups):
            places = chunks.places_of(group)
            found = shares.readers_of(plan, places, 3, which).tolist()
            assert found == [*map(min, map(readers_of.get, chunk_of[plan.deck.first_samples(places, which)]))]


def test_a_mixture_is_not_in_storage_order_even_without_a_shuffle():
    sources = tuple(Decks(length=size, shuffle="none") for size in (40, 20))
    given = {"length": 120, "shuffle": "none", "mixture": Mixture([0.5, 0.5], 16), "sources": sources}
    schedule = Schedule(functools.partial(plan_of, batch_size=16, **given), shuffled=True)
    shares = Shares(ChunkExtents([ChunkRun(60, ROWS)]))
    for begin, end in itertools.pairwise(keys_of(schedule, 1)):
        assert not shares.end_with(schedule, begin)
        assert due(schedule, begin, end, shares) == []  # positions are no sample numbers
