"""The plan of an epoch for each rank; which chunks fall due: all of a group while the one before is dealt, each once,
and none too early or in vain."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import plan_of

from lit_async_data.errors import ConfigError
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.decks import Decks, Mixture
from lit_async_data.order.plan import ALL, UNLIMITED, BatchIndex, Limits, Schedule, Share, Shares, amplification, due
from lit_async_data.order.weights import Weights

lengths = st.integers(1, 400)
batches = st.integers(1, 40)
worlds = st.integers(1, 9)
shuffles = st.sampled_from(["none", "global"])


def plan(length, batch_size=4, shuffle="global", *, seed=0, epoch=0, **others):
    return plan_of(length=length, batch_size=batch_size, shuffle=shuffle, seed=seed, epoch=epoch, **others)


def ranks(length, batch_size, world_size, **others):
    return [plan(length, batch_size, rank=rank, world_size=world_size, **others) for rank in range(world_size)]


def samples(plan):
    return [plan.batch(step).tolist() for step in range(len(plan))]


@given(lengths, batches, worlds, shuffles, st.data())
def test_ranks_take_turns_in_the_one_order_and_have_equally_many_batches(length, batch_size, world_size, shuffle, data):
    start, drop_last = data.draw(st.tuples(st.integers(0, length - 1), st.booleans()))
    assume(length - start >= (batch_size * world_size if drop_last else world_size))
    plans = ranks(length, batch_size, world_size, shuffle=shuffle, start=start, drop_last=drop_last)
    steps = list(zip(*map(samples, plans), strict=True))
    for p, own in zip(plans, zip(*steps, strict=True), strict=True):
        sizes = [len(batch) for batch in own]
        assert sizes == [p.count(step) for step in range(len(p))]
        assert 1 <= min(sizes) <= max(sizes) <= (batch_size if drop_last else p.capacity)
    found = [each for step in steps for turn in itertools.zip_longest(*step) for each in turn if each is not None]
    end = start + len(steps) * batch_size * world_size if drop_last else length
    assert found == plan(length, batch_size, shuffle).deck.samples(np.arange(start, end)).tolist()


@pytest.mark.parametrize(
    ("of", "dealt"),
    [
        ((9, 4, 2), [[[0, 2], [4, 6, 8]], [[1, 3], [5, 7]]]),  # a step of 8 and a rest of 1, dealt again as 4 and 5
        ((5, 1, 3), [[[0, 3]], [[1, 4]], [[2]]]),
    ],
)
def test_a_last_step_too_small_for_the_ranks_is_joined_to_the_one_before(of, dealt):
    assert [samples(p) for p in ranks(*of, shuffle="none")] == dealt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 3, "world_size": 4}, "3 samples cannot be shared by 4 ranks"),
        ({"length": 3, "drop_last": True}, "batch_size: 4 is more than the 3 samples.*smaller batch_size"),
        ({"length": 7, "world_size": 2, "drop_last": True}, "4 × 2 ranks = 8 is more than the 7 samples"),
        ({"length": 10, "rank": 2, "world_size": 2}, "rank: 2 is not one of 2 ranks"),
    ],
)
def test_plans_with_too_few_samples_or_ranks_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)
    with pytest.raises(IndexError, match="step 3 of 3"):
        plan(10).batch(3)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(
    ("steps", "at", "then"),
    [
        (UNLIMITED, (0, 1), (0, 2)),
        # Also without a shuffle: a worker that reads an epoch ahead would claim a claimed batch, and lose its slot.
        (UNLIMITED, (0, 2), (1, 0)),
        (2, (0, 1), (1, 0)),
        (1, (0, 1), (0, 2)),  # beyond the limit, the limit does not hold
    ],
)
def test_after_the_last_step_or_a_limit_comes_the_next_epoch(shuffled, steps, at, then):
    endless = Schedule(functools.partial(plan, 10), shuffled=shuffled).limited(Limits(0, steps, steps))
    assert endless.following(BatchIndex(*at)) == then


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 300))
def test_amplification_equals_a_simulation(length, rows, batch_size):
    assume(batch_size <= length)
    random = np.random.default_rng(0)
    chunks = [len(np.unique(random.integers(0, length, batch_size) // rows)) for _ in range(60)]
    simulated = np.mean(chunks) * min(rows, length) / batch_size
    assert amplification(length, rows, batch_size) == pytest.approx(max(simulated, 1), rel=0.35)
    # Windows: four of 3000 frames, each a chunk, for each of 64 samples; and apart from each other.
    assert amplification(3000, 1, 64, 4.0) == pytest.approx(3.83, abs=0.01)
    assert amplification(3000, 1 / 16, 64, 4.0) == 1


@pytest.mark.parametrize("repeats", [False, True])
def test_a_stretch_of_steps_equals_its_single_batches_and_keeps_their_positions(repeats):
    for length, world_size in ((42, 1), (43, 3), (25, 8)):
        given = {"batch_size": 4, "shuffle": "global", "seed": 1, "rank": world_size - 1, "world_size": world_size}
        plan = plan_of(length=length, epoch=2, repeats=repeats, **given)
        for step in range(len(plan)):
            for count in range(1, len(plan) - step + 1):
                keyed, edges = plan.stretch(step, count)
                for each, (begin, end) in enumerate(itertools.pairwise(edges), step):
                    part, samples = keyed[begin:end], plan.batch(each)
                    keys = plan.positions(each) if repeats else -samples
                    assert (part.epoch, part.samples.tolist()) == (2, samples.tolist())
                    assert part.keys(np.negative).tolist() == keys.tolist()


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


def steps_of(plan):
    for step in range(len(plan)):
        yield step, plan.bounds(step)[0], plan.batch(step)


@given(plan=plans(), readers=st.integers(2, 5), kept=st.booleans())
def test_all_samples_of_a_chunk_have_one_reader_all_epoch_and_in_the_next_where_chunks_are_kept(plan, readers, kept):
    extents = ChunkExtents(plan.decks.runs)
    shares, readers_of = Shares(extents, kept), collections.defaultdict(set)
    for each in [plan, dataclasses.replace(plan, epoch=1)][: 1 + kept]:
        for _, first, samples in steps_of(each):
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
    for _, first, samples in steps_of(plan):
        found = shares.readers(plan, first, samples, readers)
        expected = [reader_of_chunk[chunk] for chunk in extents.chunks_of(samples).tolist()]
        assert found.tolist() == expected


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
    for _, first, samples in steps_of(plan):
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
