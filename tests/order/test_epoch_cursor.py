"""The contract "Passes": the keys that are asked for, in all the ways in which Lightning asks."""

from __future__ import annotations

import pytest

from lit_async_data.order.epoch_cursor import EpochCursor
from lit_async_data.order.plan import BatchIndex, EpochPlan, Schedule


def passes(*, shuffled=True):
    shuffle = "global" if shuffled else "none"
    return EpochCursor(
        Schedule(
            lambda epoch: EpochPlan(length=10, batch_size=4, shuffle=shuffle, seed=0, epoch=epoch), shuffled=shuffled
        )
    )


def run(of, steps=None, wanted=None):
    """The keys of one pass, or of its first steps."""
    keys = []
    of.begin(lambda: (wanted, wanted))
    while (steps is None or len(keys) < steps) and (key := of.upcoming) is not None:
        keys.append(tuple(key))
        of.at = of.after(key)
    return keys


def whole(epoch):
    return [(epoch, 0), (epoch, 1), (epoch, 2)]


def test_passes_are_epochs_one_after_the_other():
    of = passes()
    for epoch in range(3):
        of.restart()
        of.restart()  # Lightning calls iter() several times
        assert run(of) == whole(epoch)


def test_set_epoch_counts_before_and_after_iter():
    of = passes()
    of.restart()
    of.set_epoch(4)
    assert run(of) == whole(4)
    of.set_epoch(7)
    of.restart()
    assert run(of) == whole(7)


def test_after_a_break_comes_the_next_epoch():
    of = passes()
    assert run(of, steps=1) == [(0, 0)]
    of.restart()
    assert run(of) == whole(1)


def test_a_pass_that_is_over_stays_over():
    of = passes()
    run(of)
    assert of.over
    assert run(of) == []


def test_epochs_without_a_shuffle_are_counted_and_cannot_be_chosen():
    of = passes(shuffled=False)
    for epoch in range(2):
        of.set_epoch(7)
        of.restart()
        assert run(of) == whole(epoch)


def test_a_batch_that_never_came_is_asked_for_again():
    of = passes()
    run(of, steps=1)
    of.set_epoch(5)
    assert of.upcoming == of.upcoming == (0, 1)
    assert run(of) == [(0, 1), (0, 2)]
    of.restart()
    assert of.upcoming == (5, 0)
    assert not of.started
    of.restart()
    assert run(of) == whole(5)


@pytest.mark.parametrize(("steps", "wanted"), [(0, (0, 0)), (1, (0, 1)), (2, (0, 2)), (3, (1, 0))])
def test_what_is_wanted_next_is_what_comes_next(steps, wanted):
    of = passes()
    run(of, steps=steps)
    assert of.wanted == wanted
    if steps == 3:
        of.restart()
    assert run(of, steps=1) == [wanted]


def test_a_limit_is_where_the_next_epoch_is_expected_and_the_pass_goes_on_if_it_is_not():
    of = passes()
    run(of, steps=2, wanted=2)
    assert of.wanted == (1, 0)
    assert run(of) == [(0, 2)]


def test_a_check_before_training_takes_less_than_the_passes_after_it():
    of = passes()
    of.begin(lambda: (2, None))
    of.at = of.after(of.upcoming)
    assert [*run(of, steps=1), of.wanted] == [(0, 1), (1, 0)]
    assert of.schedule.following(BatchIndex(1, 1)) == (1, 2)
    of.restart()
    assert run(of) == whole(1)


def test_what_is_read_before_its_pass_begins_ends_where_the_pass_will():
    of = passes()
    of.begin(lambda: (2, 1))
    assert of.wanted == (0, 0)
    assert of.schedule.following(BatchIndex(0, 1)) == (1, 0)
    assert of.schedule.following(BatchIndex(1, 0)) == (2, 0)
    run(of, steps=1)
    of.begin(lambda: (1, 1))  # one is on: it knows better
    assert of.schedule.following(BatchIndex(0, 0)) == (0, 1)
