"""Which keys a loader is asked for, over passes as Lightning makes them."""

import dataclasses
import json

import pytest
from support.plans import plan_of

from lit_async_data.errors import ResumeError
from lit_async_data.order.epoch_cursor import EpochCursor, OrderState, Place, Segment
from lit_async_data.order.plan import Schedule


def new_cursor(*, shuffled=True):
    shuffle = "global" if shuffled else "none"
    return EpochCursor(
        Schedule(lambda **at: plan_of(length=10, batch_size=4, shuffle=shuffle, seed=0, **at), shuffled=shuffled)
    )


def run(cursor, steps=None, limit=None):
    """Consumes one pass, or its first steps; returns the keys."""
    keys = []
    cursor.begin(lambda: (limit, limit))
    while (steps is None or len(keys) < steps) and (key := cursor.upcoming) is not None:
        keys.append(tuple(key))
        cursor.state = cursor.after(key)
    return keys


def whole(epoch):
    return [(epoch, 0), (epoch, 1), (epoch, 2)]


@pytest.mark.parametrize(("steps", "wanted"), [(0, (0, 0)), (1, (0, 1)), (2, (0, 2)), (3, (1, 0))])
def test_the_next_key_is_the_one_predicted(steps, wanted):
    cursor = new_cursor()
    run(cursor, steps=steps)
    assert cursor.wanted == wanted
    if steps == 3:
        cursor.state = cursor.state._replace(fresh=True)
    assert run(cursor, steps=1) == [wanted]


def test_after_a_limit_the_next_epoch_is_predicted_but_the_pass_may_go_on():
    cursor = new_cursor()
    run(cursor, steps=2, limit=2)
    assert cursor.wanted == (1, 0)
    assert run(cursor) == [(0, 2)]


def names(cursor, epoch, rounds=1, steps=None):
    """The epochs of the passes that a framework makes of one of its own, of which the last may take fewer steps."""
    cursor.name_epoch(epoch)
    epochs = []
    for number in range(rounds):
        cursor.state = cursor.state._replace(fresh=True)
        epochs.append(run(cursor, steps if number == rounds - 1 else None)[0][0])
    return epochs


def test_one_pass_for_each_epoch_that_is_named_is_that_epoch():
    cursor = new_cursor()
    assert [names(cursor, epoch, steps=steps) for epoch, steps in ((0, None), (1, 2), (2, None))] == [[0], [1], [2]]
    assert [names(cursor, epoch) for epoch in (2, 0, 7, 8)] == [[2], [0], [7], [8]]  # new runs with the same loader
    assert cursor.place().ahead == 0


def test_passes_that_begin_again_in_one_epoch_are_epochs_of_their_own():
    cursor = new_cursor()
    found = [names(cursor, epoch, rounds, steps=2) for epoch, rounds in ((0, 3), (1, 1), (2, 2))]
    assert found == [[0, 1, 2], [3], [4, 5]]
    cursor.name_epoch(3)
    assert names(cursor, 3) == [6]  # named twice
    assert names(cursor, 0, rounds=2) == [0, 1]  # a new run
    cursor.set_epoch(1)
    assert [key[0] for key in run(cursor)] == []  # the pass goes on
    cursor.state = cursor.state._replace(fresh=True)
    assert run(cursor) == whole(1)  # what a user names is exact


@pytest.mark.parametrize(("rounds", "steps"), [(1, 2), (2, 1), (3, 2), (3, None)])
def test_a_saved_place_goes_on_in_the_same_numbers(rounds, steps):
    cursor = new_cursor()
    first = names(cursor, 0, 2) + names(cursor, 1, rounds, steps)
    place = cursor.place()
    assert place.epoch - place.ahead == 1
    here, next_epoch = new_cursor(), new_cursor()
    for resumed in (here, next_epoch):
        resumed.resume(place)
    here.name_epoch(1)
    assert [epoch for epoch, _ in run(here)] == [first[-1]] * (3 - (steps or 3))
    assert names(here, 2, 2) == [first[-1] + 1, first[-1] + 2]
    assert names(next_epoch, 2, 2) == [first[-1] + 1, first[-1] + 2]


def test_a_loader_that_takes_the_place_of_another_counts_on():
    before, after = new_cursor(), new_cursor()
    names(before, 0, 3)
    after.name_epoch(1)
    after.follow(before.state.origin)
    assert run(after) == whole(3)
    assert names(after, 2) == [4]


ORDER = {"seed": 7, "shuffle": "chunk", "shuffle_chunks": 8, "drawn": "ab"}
SOURCE, HISTORY = {"samples": 100, "fields": "x uint8"}, (Segment(0, 2, 4), Segment(16, 3, 8))
STATE = OrderState(epoch=3, position=40, samples=100, source=SOURCE, history=HISTORY, **ORDER)


def test_it_survives_any_format_of_plain_values_and_has_passes_ahead_only_if_there_are_any():
    for state in (STATE, dataclasses.replace(STATE, ahead=2)):
        assert OrderState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert "ahead" not in STATE.at(Place(3, 40)).to_dict()
    assert STATE.at(Place(3, 40, ahead=2)).to_dict()["ahead"] == 2


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": -1},
        {"position": 101},
        {"position": 40.0},
        {"source": [1]},
        {"history": [[0, 2, 0]]},
        {"history": [[16, 2, 4], [0, 2, 4]]},
        {"ahead": 4},
    ],
)
def test_a_damaged_value_is_refused(damage):
    with pytest.raises(ResumeError, match="the saved place is damaged"):
        OrderState.from_dict(STATE.to_dict() | damage)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"_snapshot": {}, "_steps_since_snapshot": 3}, "was not written by AsyncLoader"),
        (None, "was not written by AsyncLoader"),
        ({"version": 2, "place": "x"}, r"version 2, and this lit_async_data reads versions up to 1"),
    ],
)
def test_another_kind_of_state_or_version_is_refused(given, said):
    with pytest.raises(ResumeError, match=said):
        OrderState.from_dict(given)


def test_what_has_changed_is_told_with_both_values():
    now = OrderState(epoch=0, position=0, samples=1100, seed=8, shuffle="global", source={"samples": 1100, "files": 2})
    assert STATE.differences(now) == [
        "seed: 7 in the checkpoint, 8 now",
        "shuffle: chunk in the checkpoint, global now",
        "weights: ab in the checkpoint, none now",
        "samples: 100 in the checkpoint, 1 100 now",
        "fields: x uint8 in the checkpoint, none now",
        "files: none in the checkpoint, 2 now",
        "samples of an epoch: 100 in the checkpoint, 1 100 now",
    ]
    assert STATE.differences(STATE) == []
    fewer = dataclasses.replace(STATE, shuffle_chunks=4)
    assert STATE.differences(fewer) == ["shuffle_chunks: 8 in the checkpoint, 4 now"]
    now = dataclasses.replace(STATE, drawn=None)
    damaged = dataclasses.replace(now, samples=40)  # the epoch seems to be over
    assert damaged.differences(now) == ["samples of an epoch: 40 in the checkpoint, 100 now"]
    specs = ["x uint8 (3, 8, 8), y int64", "y int64, x uint8 (3, 8, 8)", "x uint8 (3, 8), y int64", "x uint8 (3, 8, 8)"]
    one, *others = (dataclasses.replace(STATE, source={"fields": spec}) for spec in specs)
    assert [len(one.differences(other)) for other in others] == [0, 1, 1]  # another order of fields is none


def test_the_history_has_a_segment_for_each_change_of_ranks_or_batch_size():
    at = Place(0, 0)
    history = at.dealt_on(2, 4)
    assert history == ((0, 2, 4),)
    assert Place(0, 16, history=history).dealt_on(2, 4) == history  # stopped and continued
    assert Place(0, 12, history=history).dealt_on(2, 4) == ((0, 2, 4), (12, 2, 4))  # not at the end of a step
    assert Place(0, 16, history=history).dealt_on(4, 2) == ((0, 2, 4), (16, 4, 2))
