"""Decks: the order of an epoch over all ranks. It never changes, or runs would resume in another one.

Mixtures: each batch of each rank has its shares, each source goes on where it was, at any number of ranks.
"""

import functools
import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.plans import plan_of

from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.decks import PERIOD, Decks, Mixture
from lit_async_data.order.plan import ALL, BatchIndex, EpochPlan, Schedule, Share, Shares, due
from lit_async_data.order.weights import Weights

LENGTH = 94
LENGTHS = np.arange(LENGTH) * 7919 % 37
KINDS = {
    "plain": {},
    "in storage order": {"order": np.arange(LENGTH)[::-1]},
    "weighted": {"weights": Weights(np.arange(LENGTH) + 1.0)},
    "by length": {"buckets": Buckets.of(LENGTHS, 10, 80, 4)},
}


def deck_of(shuffle, epoch=3, **options):
    runs = ChunkRun(47, 9), ChunkRun(47, 5)
    given = {"length": LENGTH, "batch_size": 10, "seed": 5, "epoch": epoch, "runs": runs, "shuffle_chunks": 3}
    return plan_of(shuffle=shuffle, **given, **options).deck


# Made by the version of 2026-11-29, before orders were decks.
DIGESTS = {
    ("chunk", "plain"): "a263ca46beba",
    ("chunk", "in storage order"): "d9975e82421f",
    ("chunk", "weighted"): "c2dce76a28f8",
    ("chunk", "by length"): "7e816f08d383",
    ("global", "plain"): "d184cdd2f994",
    ("global", "in storage order"): "d184cdd2f994",
    ("global", "weighted"): "4bc2dbd4a04c",
    ("global", "by length"): "a064b25696b9",
}


@pytest.mark.parametrize(("shuffle", "kind"), DIGESTS)
def test_the_order_is_the_one_of_earlier_versions(shuffle, kind):
    deck = deck_of(shuffle, **KINDS[kind])
    order = deck.samples(np.arange(LENGTH)).astype("<i8")
    assert hashlib.sha256(order.tobytes()).hexdigest()[:12] == DIGESTS[shuffle, kind]


@pytest.mark.parametrize("kind", ["plain", "in storage order", "by length"])
@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
def test_a_deck_has_each_sample_once_and_chunks_by_position(shuffle, kind):
    deck, positions = deck_of(shuffle, **KINDS[kind]), np.arange(LENGTH)
    samples = deck.samples(positions)
    assert sorted(samples.tolist()) == list(range(LENGTH))
    assert (deck.chunk_order is not None) == (shuffle == "chunk")
    if shuffle == "chunk":
        stored = samples if kind != "in storage order" else LENGTH - 1 - samples
        chunks = np.where(stored < 47, stored // 9, 6 + (stored - 47) // 5)
        places = deck.chunk_places(positions)
        assert len({*zip(places.tolist(), chunks.tolist(), strict=True)}) == len({*chunks.tolist()}) == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", ["chunk", "global"])
def test_substitutes_depend_on_position_and_attempt_alone(shuffle, kind):
    decks = [deck_of(shuffle, **KINDS[kind]) for _ in range(2)]
    drawn = [[deck.substitute(at, attempt) for at in (0, 50) for attempt in range(40)] for deck in decks]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) > 3


shares_of = st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(lambda given: np.array(given) / sum(given))
batch_sizes, worlds = st.integers(1, 12), st.integers(1, 5)
SIZES = 40, 7, 23, 5, 11


def decks_of(shares, batch_size, length, shuffle="global"):
    given = {"shuffle": shuffle, "shuffle_chunks": 2}
    sources = [Decks(length=size, runs=(ChunkRun(size, 3),), **given) for size in SIZES[: len(shares)]]
    mixture = Mixture(shares, batch_size)
    return Decks(length=length, shuffle=shuffle, seed=3, mixture=mixture, sources=tuple(sources))


def plans_of(shares, batch_size, length, ranks, shuffle="global", **options):
    decks = decks_of(shares, batch_size, length, shuffle)
    given = {"batch_size": batch_size, "world_size": ranks, "epoch": 0, "repeats": True, **options}
    return [EpochPlan(decks=decks, rank=rank, **given) for rank in range(ranks)]


def sources_of(samples):
    return np.searchsorted(np.cumsum(SIZES), samples, side="right")


def off(samples, shares):
    """How far a batch is from its shares."""
    counts = np.bincount(sources_of(samples), minlength=len(shares))
    return np.abs(counts - shares * len(samples)).max()


@given(shares_of, batch_sizes, worlds, st.integers(5, 300), st.booleans())
@example(np.array([0.5, 0.5]), 4, 2, 64, False)  # dealt sample by sample, each rank would get one source
@example(np.array([0.7, 0.2, 0.1]), 7, 4, 57, False)  # one sample is left for four ranks
def test_each_batch_of_each_rank_is_whole_and_has_its_shares(shares, batch_size, ranks, length, drop_last):
    assume(length >= (batch_size * ranks if drop_last else ranks))
    for plan in plans_of(shares, batch_size, length, ranks, drop_last=drop_last):
        steps = length / (batch_size * ranks)
        assert len(plan) == (math.floor(steps) if drop_last else math.ceil(steps))
        for step in range(len(plan)):
            samples = plan.batch(step)
            assert len(samples) == plan.count(step) == plan.batch_size <= plan.capacity
            assert off(samples, shares) < 1
            assert (np.diff(sources_of(samples)) >= 0).all()


@given(shares_of, batch_sizes, st.tuples(worlds, worlds), st.integers(10, 300), st.data())
def test_ranks_share_one_order_and_a_resume_on_other_ranks_goes_on_with_it(shares, batch_size, ranks, length, data):
    shuffle, (before, after) = data.draw(st.sampled_from(["none", "chunk", "global"])), ranks
    plans = plans_of(shares, batch_size, length, before, shuffle)
    done = data.draw(st.integers(0, len(plans[0])))
    position = plans[0].position(done)
    assume(length - position >= after or position == length)
    assert all(plan.steps_to(position) == done for plan in plans)
    seen = [plan.positions(step).tolist() for plan in plans for step in range(done)]
    assert sorted(itertools.chain(*seen))[:position] == list(range(position))
    rest = plans_of(shares, batch_size, length, after, shuffle, start=position) if position < length else []
    later = sorted(itertools.chain(*(plan.positions(step).tolist() for plan in rest for step in range(len(plan)))))
    assert later == list(range(position, position + len(later)))
    assert length <= position + len(later) < length + batch_size * after
    whole = plans[0].deck.samples(np.arange(length + 60 * ranks[0] * ranks[1]))
    for plan in plans + rest:
        for step in range(len(plan)):
            assert plan.batch(step).tolist() == whole[plan.positions(step)].tolist()
        keyed, edges = plan.stretch(0, len(plan))
        assert keyed.numbers.tolist() == np.concatenate([plan.positions(step) for step in range(len(plan))]).tolist()
        assert [keyed.samples[a:b].tolist() for a, b in itertools.pairwise(edges)] == [
            plan.batch(step).tolist() for step in range(len(plan))
        ]


@given(shares_of, batch_sizes, st.integers(10, 400), st.sampled_from(["none", "chunk", "global"]))
def test_a_source_comes_pass_after_pass_each_complete_and_in_another_order(shares, batch_size, length, shuffle):
    deck = plans_of(shares, batch_size, length, 1, shuffle)[0].deck
    samples = deck.samples(np.arange(length))
    which = sources_of(samples)
    for number in range(len(shares)):
        own, first, size = samples[which == number], sum(SIZES[:number]), SIZES[number]
        passes = [own[at : at + size].tolist() for at in range(0, len(own) - size + 1, size)]
        assert all(sorted(each) == list(range(first, first + size)) for each in passes)
        distinct = len({*map(tuple, passes)})  # two of many passes over few samples may be equal by chance
        assert distinct == min(1, len(passes)) if shuffle == "none" else 2 * distinct >= len(passes)
        assert len({*own[len(passes) * size :].tolist()}) == len(own) % size


def test_shares_hold_over_many_batches_too():
    shares = np.array([0.61, 0.25, 0.1, 0.04])
    mixture = Mixture(shares, 32)
    counts = np.array([mixture.counts(32 * batches) for batches in (1, 999, 12_345, 10 * PERIOD + 7)])
    assert counts.sum(axis=1).tolist() == [32, 32 * 999, 32 * 12_345, 32 * (10 * PERIOD + 7)]
    assert np.abs(counts[:3] - np.array([[32], [32 * 999], [32 * 12_345]]) * shares).max() < 6
    assert np.abs(counts[3] / counts[3].sum() - shares).max() < 1e-6


@given(shares_of, batch_sizes, st.integers(1, 500), st.data())
def test_an_epoch_ends_when_all_samples_of_a_source_have_come(shares, batch_size, samples, data):
    source, mixture = data.draw(st.integers(0, len(shares) - 1)), Mixture(shares, batch_size)
    length = mixture.length_with(source, samples)
    assert mixture.counts(length)[source] >= samples > mixture.counts(length - batch_size)[source]


def test_too_small_a_share_has_no_batch():
    assert Mixture([1, 1e-9], 4).length_with(1, 10) == 0


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_substitutes_are_of_the_same_source_on_any_rank(shuffle):
    shares = np.array([0.5, 0.3, 0.2])
    deck = plans_of(shares, 8, 200, 1, shuffle)[0].deck
    samples = deck.samples(np.arange(200))
    for position in range(0, 200, 7):
        drawn = np.array([deck.substitute(position, attempt) for attempt in range(64)])
        assert set(sources_of(drawn).tolist()) == {int(sources_of(samples[position]))}
        other = plans_of(shares, 8, 200, 3, shuffle, start=16)[2].deck
        assert drawn.tolist() == [other.substitute(position, attempt) for attempt in range(64)]
        assert len({*drawn.tolist()}) > 2


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shares_read", [[ALL], [Share(reader, 3) for reader in range(3)]])
def test_each_chunk_of_a_source_falls_due_once_for_each_of_its_groups(ranks, shares_read):
    sizes = 97, 200, 50
    sources = [Decks(length=n, shuffle="chunk", runs=(ChunkRun(n, 10),), shuffle_chunks=4) for n in sizes]
    mixture = Mixture([0.6, 0.1, 0.3], 5)
    decks = Decks(length=301, shuffle="chunk", seed=3, mixture=mixture, sources=tuple(sources))
    plan = functools.partial(EpochPlan, decks=decks, batch_size=5, rank=ranks - 1, world_size=ranks, repeats=True)
    schedule, found, key = Schedule(plan, shuffled=True), {}, BatchIndex(0, 0)
    readers = Shares(ChunkExtents([ChunkRun(size, 10) for size in sizes]))
    while key.epoch < 2:
        begin, key = key, schedule.following(key)
        for share in shares_read:
            for group, samples in due(schedule, begin, key, readers, share):
                (source,) = {*np.searchsorted(np.cumsum(sizes), samples, side="right").tolist()}
                found.setdefault((source, group), []).extend(readers.chunks.chunks_of(samples).tolist())
    for (source, (epoch, number)), chunks in found.items():
        passes = schedule.plan(epoch).deck.chunk_orders[source]
        if epoch < 2:
            places = passes.places_of(number)
            assert sorted(chunks) == sorted(readers.chunks.chunks_of(passes.first_of(places)).tolist())
    groups = [order.groups for order in schedule.plan(1).deck.chunk_orders]
    assert {(source, group) for source, group in found if group[0] == 1} == {
        (source, (1, number)) for source, count in enumerate(groups) for number in range(count)
    }
