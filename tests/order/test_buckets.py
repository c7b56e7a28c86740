"""Batches by length: buckets, and their plan, whose batches all ranks share in one order."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import plan_of as epoch_plan

from lit_async_data.errors import ConfigError
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.plan import Schedule

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80).map(np.array)


def waste(lengths, bounds):
    return int(np.asarray(bounds)[np.searchsorted(bounds, lengths)].sum() - lengths.sum())


@given(LENGTHS, st.integers(1, 9), st.integers(60, 300), st.integers(1, 5), st.none() | st.integers(0, 3))
def test_batches_hold_each_sample_once_within_their_budget(lengths, batch_size, elements, count, key):
    buckets = Buckets.of(lengths, batch_size, elements, count)
    samples, edges = buckets.batches(key)
    assert sorted(samples.tolist()) == list(range(len(lengths)))
    assert (edges[0], edges[-1]) == (0, len(lengths))
    for first, end in itertools.pairwise(edges.tolist()):
        batch = samples[first:end]
        width = buckets.width(batch)
        assert len(set(buckets.numbers[batch].tolist())) == 1
        assert lengths[batch].max() <= width
        assert 0 < len(batch) <= batch_size
        assert len(batch) * width <= min(elements, buckets.elements)
    assert len(edges) == len(buckets.batches(7)[1])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30).map(np.array), st.integers(1, 4))
def test_the_bounds_need_the_least_padding(lengths, count):
    found = Buckets.of(lengths, 4, None, count).bounds
    each = np.unique(lengths)
    choices = itertools.combinations(each[:-1].tolist(), min(count, len(each)) - 1)
    assert waste(lengths, found) == min(waste(lengths, np.array([*choice, each[-1]])) for choice in choices)
    assert len(found) <= count


def test_buckets_beyond_the_longest_sample_cost_nothing():
    buckets = Buckets.of(np.array([0, 3, 40]), 8, 100, [8, 64, 10**9])
    assert buckets.bounds.tolist() == [8, 64]
    assert buckets.elements == 64
    assert len(buckets.batches(1)[1]) == 3


@pytest.mark.parametrize(
    ("elements", "given", "option", "text"),
    [
        (50, 2, "batch_elements", "sample 103 alone takes 90 elements"),
        (None, [10, 80], "buckets", "sample 103 has length 90, and the last bucket ends at 80"),
    ],
)
def test_a_sample_that_is_too_long_is_named(elements, given, option, text):
    with pytest.raises(ConfigError, match=text) as caught:
        Buckets.of(np.array([10, 10, 10, 90]), 4, elements, given, lambda samples: samples + 100)
    assert caught.value.option == option


MANY = st.lists(st.integers(0, 40), min_size=12, max_size=120).map(np.array)


def plan_of(lengths, rank=0, ranks=1, start=0, epoch=0, **options):
    options = {"shuffle": "global", "seed": 3, "batch_size": 5, **options}
    buckets = Buckets.of(lengths, options["batch_size"], options.pop("elements", 80), 4)
    options |= {"runs": (ChunkRun(len(lengths), 7),), "shuffle_chunks": 2, "buckets": buckets}
    return epoch_plan(length=len(lengths), rank=rank, world_size=ranks, start=start, epoch=epoch, **options)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def steps_of(lengths, ranks, start=0, **options):
    plans = [plan_of(lengths, rank, ranks, start, **options) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    return [[plan.batch(step).tolist() for plan in plans] for step in range(len(plans[0]))]


@given(MANY, st.integers(1, 4), st.sampled_from(["none", "global", "chunk"]))
def test_ranks_share_the_batches_of_one_order(lengths, ranks, shuffle):
    alone = [step[0] for step in steps_of(lengths, 1, shuffle=shuffle)]
    shared = flat(steps_of(lengths, ranks, shuffle=shuffle))
    assert flat(shared) == flat(alone)
    assert all(shared)
    assert len(shared) == -(-len(alone) // ranks) * ranks
    whole = len(alone) // ranks * ranks
    if len(flat(alone[whole:])) >= ranks:
        assert shared[:whole] == alone[:whole]


@given(MANY, st.integers(1, 4), st.integers(1, 4), st.sampled_from(["global", "chunk"]), st.data())
def test_a_resume_on_other_ranks_goes_on_with_the_same_samples(lengths, before, after, shuffle, data):
    plan, steps = plan_of(lengths, 0, before, shuffle=shuffle), functools.partial(steps_of, lengths, shuffle=shuffle)
    done = data.draw(st.integers(0, len(plan)))
    position = plan.position(done)
    assume(len(lengths) - position >= 2 * after)
    seen = flat(flat(steps(before)[:done]))
    assert len(seen) == position
    seen += flat(flat(steps(after, position)))
    assert seen == flat(flat(steps(1)))


@given(MANY, st.integers(1, 4))
def test_the_members_of_a_plan_agree(lengths, ranks):
    for plan in (plan_of(lengths, rank, ranks) for rank in range(ranks)):
        for step in range(len(plan)):
            samples = plan.batch(step)
            assert plan.count(step) == len(samples) <= plan.capacity
            assert (plan.deck.samples(plan.positions(step)) == samples).all()
            assert plan.steps_to(plan.position(step)) == step
        assert plan.steps_to(plan.length) == len(plan)
        keyed, edges = plan.stretch(0, len(plan))
        assert [keyed.samples[a:b].tolist() for a, b in itertools.pairwise(edges)] == [
            plan.batch(step).tolist() for step in range(len(plan))
        ]


def test_all_epochs_have_as_many_steps_and_other_batches():
    schedule = Schedule(functools.partial(plan_of, np.arange(100) % 37, ranks=3), shuffled=True)
    plans = [schedule.plan(epoch) for epoch in range(4)]
    assert {len(plan) for plan in plans} == {schedule.steps}
    assert len({tuple(plan.batch(0).tolist()) for plan in plans}) == 4


@given(MANY)
def test_by_chunks_a_batch_is_due_when_its_bucket_is_full(lengths):
    plans = [plan_of(lengths, shuffle="chunk", epoch=epoch) for epoch in range(3)]
    assert len({len(plan) for plan in plans}) == 1
    for plan in plans:
        found, waiting, left = [], [[] for _ in plan.decks.buckets.sizes], plan.decks.buckets.counts.tolist()
        for sample in plan.deck.chunk_order.samples(np.arange(len(lengths))).tolist():
            bucket = plan.decks.buckets.numbers[sample]
            waiting[bucket].append(sample)
            left[bucket] -= 1
            if len(waiting[bucket]) == plan.decks.buckets.sizes[bucket] or not left[bucket]:
                found.append(waiting[bucket])
                waiting[bucket] = []
        assert found == [plan.batch(step).tolist() for step in range(len(plan))]


def test_drop_last_drops_the_batches_that_fill_no_step():
    lengths = np.arange(100) % 37
    kept, alone = steps_of(lengths, 3, drop_last=True), flat(steps_of(lengths, 1))
    assert len(alone) % 3
    assert flat(kept) == alone[: len(alone) // 3 * 3]
    plan = plan_of(lengths, 0, 3, drop_last=True)
    assert not plan.drops_all(plan.position(len(kept) - 1))
    assert plan.drops_all(plan.position(len(kept) - 1) + 20)
    with pytest.raises(ConfigError, match="too few batches for 9 ranks"):
        plan_of(np.arange(12), 0, 9, drop_last=True)


def test_substitutes_are_of_the_same_bucket_or_shorter_on_all_ranks():
    lengths = np.arange(100) % 37
    plan = plan_of(lengths)
    drawn = [plan.deck.substitute(40, attempt) for attempt in range(20)]
    own = plan.decks.buckets.numbers[plan.deck.samples(np.array([40]))[0]]
    numbers = plan.decks.buckets.numbers[drawn]
    assert (set(numbers[::2]), set(numbers[1::2] <= own), len(set(numbers)) > 1) == ({own}, {True}, True)
    assert len(set(drawn)) > 3
    assert drawn == [plan_of(lengths, 2, 3, start=9).deck.substitute(40, attempt) for attempt in range(20)]


def test_batches_that_cannot_be_shared_are_an_error():
    with pytest.raises(ConfigError, match="4 samples in 4 batches cannot be shared by 3 ranks, "):
        plan_of(np.full(4, 70), 0, 3)
    assert len(plan_of(np.full(4, 70), 0, 3, elements=140)) == 1
