"""The saved place of a loader: plain values, checked when they are read."""

import dataclasses
import json

import pytest

from lit_async_data.errors import ResumeError
from lit_async_data.order.epoch_cursor import OrderState, Place, Segment

STATE = OrderState(
    epoch=3,
    position=40,
    samples=100,
    seed=7,
    shuffle="chunk",
    shuffle_chunks=8,
    drawn="ab",
    source={"samples": 100, "fields": "x uint8"},
    history=(Segment(0, 2, 4), Segment(16, 3, 8)),
)


def test_it_survives_any_format_of_plain_values():
    for state in (STATE, dataclasses.replace(STATE, ahead=2)):
        assert OrderState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_passes_ahead_of_a_framework_are_in_it_only_if_there_are_any():
    assert "ahead" not in STATE.at(Place(3, 40)).to_dict()
    assert STATE.at(Place(3, 40, ahead=2)).to_dict()["ahead"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("position", 101),
        ("position", 40.0),
        ("samples", None),
        ("source", [1]),
        ("history", [[0, 2]]),
        ("history", [[0, 2, 0]]),
        ("history", [[16, 2, 4], [0, 2, 4]]),
        ("history", [[41, 2, 4]]),
        ("ahead", 4),
        ("ahead", -1),
    ],
)
def test_a_damaged_value_is_refused(name, value):
    with pytest.raises(ResumeError, match="the saved place is damaged"):
        OrderState.from_dict(STATE.to_dict() | {name: value})


@pytest.mark.parametrize("given", [{"_snapshot": {}, "_steps_since_snapshot": 3}, 7, None])
def test_another_kind_of_state_is_refused(given):
    with pytest.raises(ResumeError, match="was not written by AsyncLoader"):
        OrderState.from_dict(given)


def test_a_state_of_a_later_version_says_so():
    with pytest.raises(ResumeError, match=r"version 2, and this lit_async_data knows those up to 1"):
        OrderState.from_dict({"version": 2, "place": "elsewhere"})


def test_a_length_that_does_not_fit_the_source_is_told():
    now = dataclasses.replace(STATE, drawn=None)
    damaged = dataclasses.replace(now, samples=40)  # the epoch seems to be over
    assert damaged.differences(now) == ["samples of an epoch: 40 in the checkpoint, 100 now"]


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


def test_the_history_has_a_segment_for_each_change_of_ranks_or_batch_size():
    at = Place(0, 0)
    history = at.dealt_on(2, 4)
    assert history == ((0, 2, 4),)
    assert Place(0, 16, history=history).dealt_on(2, 4) == history  # stopped and continued
    assert Place(0, 12, history=history).dealt_on(2, 4) == ((0, 2, 4), (12, 2, 4))  # not at the end of a step
    assert Place(0, 16, history=history).dealt_on(4, 2) == ((0, 2, 4), (16, 4, 2))
