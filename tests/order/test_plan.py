import functools
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import plan_of

from lit_async_data.errors import ConfigError
from lit_async_data.order.plan import UNLIMITED, BatchIndex, Limits, Schedule, amplification

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


def test_seeking_costs_the_same_anywhere_in_a_huge_dataset():
    epoch_plan = plan(10**12, 256)
    batch = epoch_plan.batch(len(epoch_plan) - 2)
    assert len(batch) == 256
    assert len(epoch_plan) == -(-(10**12) // 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 3, "world_size": 4}, "3 samples cannot be shared by 4 ranks"),
        (
            {"length": 3, "batch_size": 4, "drop_last": True},
            "batch_size: 4 is more than the 3 samples.*drop_last=false.*smaller batch_size",
        ),
        ({"length": 7, "world_size": 2, "drop_last": True}, "4 × 2 ranks = 8 is more than the 7 samples"),
        ({"length": 10, "rank": 2, "world_size": 2}, "rank: 2 is not one of 2 ranks"),
    ],
)
def test_plans_with_too_few_samples_or_ranks_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)


def test_a_step_outside_the_epoch_is_refused():
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


def test_the_plan_of_an_epoch_is_built_once_whatever_its_limits():
    endless = Schedule(functools.partial(plan, 10), shuffled=True)
    assert endless.limited(Limits(1)).plan(1) is endless.limited(Limits(1, 2)).plan(1)


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 300))
def test_amplification_equals_a_simulation(length, rows, batch_size):
    assume(batch_size <= length)
    random = np.random.default_rng(0)
    chunks = [len(np.unique(random.integers(0, length, batch_size) // rows)) for _ in range(60)]
    simulated = np.mean(chunks) * min(rows, length) / batch_size
    assert amplification(length, rows, batch_size) == pytest.approx(max(simulated, 1), rel=0.35)


def test_windows_of_several_chunks_are_counted_each():
    """Four of 3000 frames, each a chunk, for each of 64 samples."""
    assert amplification(3000, 1, 64, 4.0) == pytest.approx(3.83, abs=0.01)
    assert amplification(3000, 1 / 16, 64, 4.0) == 1  # windows apart from each other


def test_another_epoch_or_seed_is_another_order():
    order = samples(plan(30, seed=1, epoch=1))
    assert order != samples(plan(30, seed=1, epoch=2))
    assert order != samples(plan(30, seed=2, epoch=1))


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
