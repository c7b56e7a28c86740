import itertools
import logging
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import HALVES, files, numbered, parted, side_of

import lit_async_data.sources.composed.split as module
from lit_async_data import ConcatSource, SubsetSource, split
from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import derived_key
from lit_async_data.sources.contract.source import hashed

THREE = {"train": 0.6, "val": 0.2, "test": 0.2}


def side_by_hand(fractions, key):
    """Where a 64-bit key falls, if the fractions lie one after the other from 0 on."""
    end = 0.0
    for name, share in fractions.items():
        end += share
        if key / 2**64 < end:
            return name
    return None


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({}, r"\{\} is not a mapping of names to fractions"),
        ([0.8, 0.2], r"\[0.8, 0.2\] is not a mapping"),
        (None, "None is not a mapping"),
        ({"": 0.5}, "'' is not the name of a side"),
        ({1: 0.5}, "1 is not the name of a side"),
        ({"train": 0}, "train = 0 is not a fraction"),
        ({"train": -0.1}, "train = -0.1 is not"),
        ({"train": 1.1}, "train = 1.1 is not"),
        ({"train": 80, "val": 20}, "train = 80 is not"),
        ({"train": float("nan")}, "train = nan is not"),
        ({"train": True}, "train = True is not"),
        ({"train": "0.8"}, "train = '0.8' is not"),
        ({"train": 0.8, "val": 0.21}, "add up to 1.01, which is more than 1"),
        ({"train": 0.8, "val": 0.2 + 1e-8}, "add up to 1, which is more than 1"),
    ],
)
def test_wrong_fractions_are_refused(fractions, message):
    with pytest.raises(ConfigError, match=f"^split: .*{message}"):
        split(numbered(100), fractions)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "0", None])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(ConfigError, match=f"^seed: {seed!r} is not"):
        split(numbered(100), HALVES, seed=seed)


@pytest.mark.parametrize("fractions", [{"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.1, "b": 0.7, "c": 0.2 + 5e-10}])
def test_fractions_that_are_1_up_to_rounding_leave_nothing_over(fractions):
    edges = module.upper_edges(fractions)
    assert edges[-1] == 1.0
    # The largest key of all is on the last side.
    assert module.sides_of_keys(edges, np.array([0, 2**64 - 1], np.uint64)).tolist() == [0, 2]


def test_a_key_on_an_edge_belongs_to_the_next_side():
    edges = module.upper_edges({"a": 0.5, "b": 0.25})
    keys = np.array([2**63 - 2**11, 2**63, 2**63 + 2**62 - 2**11, 2**63 + 2**62], np.uint64)
    assert module.sides_of_keys(edges, keys).tolist() == [0, 1, 1, module.UNUSED]


fractions_of_some_sides = st.lists(st.integers(1, 10), min_size=1, max_size=4).flatmap(
    lambda weights: st.integers(sum(weights), 2 * sum(weights)).map(
        lambda whole: {f"side{number}": weight / whole for number, weight in enumerate(weights)}
    )
)


@given(st.integers(1, 6), fractions_of_some_sides, st.integers(0, 2**63 - 1))
def test_every_sample_is_on_the_side_of_its_hash(count, fractions, seed):
    source = parted(files(count, samples=60))
    sides = split(source, fractions, seed=seed)
    expected = []
    for part in source.parts:
        key = derived_key(seed, int(hashed([part.name])[0]))
        expected += [side_by_hand(fractions, derived_key(key, row)) for row in range(part.samples)]
    assert side_of(sides, len(source)) == expected
    assert sides.overlap == 0
    assert None not in expected or sum(fractions.values()) < 1
    assert all(subset.group_codes is None for subset in sides.values())
    assert all((np.diff(subset.samples) > 0).all() for subset in sides.values())


def test_a_subset_and_a_concatenation_draw_the_samples_of_a_file_alike():
    whole = parted({"a.h5": 100, "b.h5": 100})
    drawn = side_of(split(whole, HALVES), 200)
    some = np.arange(150, 20, -3).repeat(2)
    assert side_of(split(SubsetSource(whole, some), HALVES), len(some)) == [drawn[sample] for sample in some]
    both = ConcatSource([parted({"b.h5": 100}), parted({"a.h5": 100})])
    assert side_of(split(both, HALVES), 200) == drawn[100:] + drawn[:100]


def test_samples_that_share_values_are_not_drawn_one_by_one():
    with pytest.raises(ConfigError, match=r"^groups: .*with the next 9, .* groups='file' .*groups='time'"):
        split(parted(files(2, 50), overlap=9), HALVES)
    with pytest.raises(ConfigError, match="share values; groups='time'"):
        split(parted(files(1, 50), overlap=9), HALVES)


@given(st.lists(st.integers(-5, 30), min_size=8, max_size=80), fractions_of_some_sides, st.integers(0, 2**63 - 1))
def test_no_group_is_on_two_sides(values, fractions, seed):
    if len(set(values)) < len(fractions):
        with pytest.raises(ConfigError, match=rf"groups \(the given array\) is {len(set(values))};"):
            split(numbered(len(values)), fractions, groups=values, seed=seed)
        return
    sides = split(numbered(len(values)), fractions, groups=values, seed=seed)
    assert sides.overlap == 0
    assert all(map(len, sides.values()))
    codes = {}
    for side in sides.values():
        for code, sample in zip(side.group_codes.tolist(), side.samples.tolist()):
            assert codes.setdefault(code, values[sample]) == values[sample]
    assert len(codes) == len(set(codes.values()))
    # Only the names and the sizes of groups matter.
    order = np.random.default_rng(0).permutation(len(values))
    again = split(numbered(len(values)), fractions, groups=[str(values[sample]) for sample in order], seed=seed)
    side = side_of(sides, len(values))
    assert side_of(again, len(values)) == [side[sample] for sample in order]


@given(
    st.lists(st.integers(30, 80), min_size=1, max_size=4),
    st.integers(0, 8),
    st.sampled_from([{"a": 1.0}, HALVES, THREE, {"a": 0.5, "b": 0.25}]),
)
def test_stretches_share_no_values(lengths, overlap, fractions):
    source = parted({f"{number}.h5": length for number, length in enumerate(lengths)}, overlap=overlap)
    sides = split(source, fractions, groups="time")
    side, begin = side_of(sides, len(source)), 0
    for length in lengths:
        own = side[begin : begin + length]
        begin += length
        seen = [name for number, name in enumerate(own) if name and name not in own[:number]]
        assert seen == list(fractions)
        gaps = (len(fractions) - 1) * overlap
        for name, share in fractions.items():
            places = [number for number, one in enumerate(own) if one == name]
            assert places == list(range(places[0], places[-1] + 1)), "a stretch"
            assert len(places) == pytest.approx(share * (length - gaps), abs=1)
        for one, other in itertools.pairwise(seen):
            last = max(number for number, name in enumerate(own) if name == one)
            assert own.index(other) == last + overlap + 1
        if sum(fractions.values()) == 1:
            assert None not in (own[0], own[-1])
    assert sides.overlap == 0


@given(st.lists(st.integers(0, 79), min_size=40, max_size=120), st.integers(0, 3))
def test_the_gap_is_kept_in_any_order_and_with_holes(samples, overlap):
    source = SubsetSource(parted({"a.h5": 40, "b.h5": 40}, overlap=overlap), samples)
    lengths = [len({sample for sample in samples if begin <= sample < begin + 40}) for begin in (0, 40)]
    if any(0 < length < overlap + 2 for length in lengths):
        with pytest.raises(ConfigError, match="too short"):
            split(source, HALVES, groups="time")
        return
    sides = split(source, HALVES, groups="time")
    for begin in (0, 40):
        kept = [source.samples[side.samples].tolist() for side in sides.values()]
        train, val = ([sample for sample in samples if begin <= sample < begin + 40] for samples in kept)
        assert bool(train) == bool(val)
        assert not train or max(train) + overlap < min(val)


def test_parts_that_are_too_short_are_named():
    parts = {"a.h5": 50, "b.h5": 6, "c.h5": 50, "d.h5": 1, "e.h5": 1, "f.h5": 1}
    with pytest.raises(ConfigError, match=r"^split: .* train, val with gaps of 5 samples: b\.h5 \(6 samples\), d\.h5"):
        split(parted(parts, overlap=5), HALVES, groups="time")
    with pytest.raises(ConfigError, match=r"e\.h5 \(1 sample\), … \(4 in all\); leave these parts out"):
        split(parted(parts, overlap=5), HALVES, groups="time")
    with pytest.raises(ConfigError, match=r"the source \(2 samples\)"):
        split(numbered(2), THREE, groups="time")
    assert len(split(parted({"a.h5": 7}, overlap=5), HALVES, groups="time")) == 2


def test_an_empty_side_says_of_how_many():
    with pytest.raises(ConfigError, match=r"^split: '(train|val)' gets none of 1 sample;"):
        split(numbered(1), HALVES)


def test_what_was_split_is_described_for_others_to_say(caplog):
    with caplog.at_level(logging.INFO):
        sides = split(numbered(1000), {"train": 0.5, "val": 0.25}, groups=np.arange(1000) // 5, seed=3)
    assert not caplog.records
    train, val = (len(side) for side in sides.values())
    unused = 1000 - train - val
    assert sides.described == (
        f"split by the given array, seed 3: train {train / 1000:.2f} ({train // 5} of 200 groups, {train} samples), "
        f"val {val / 1000:.2f} ({val // 5} of 200 groups, {val} samples), "
        f"unused {unused / 1000:.2f} ({unused} samples); overlap 0"
    )


def test_large_numbers_are_written_so_that_they_can_be_read():
    assert "train 1.00 (12,345 samples); overlap 0" in split(numbered(12_345), {"train": 1}).described
    assert split(numbered(10), HALVES, groups="time").described.startswith("split by time: train 0.50 (5 samples)")


def test_the_gaps_of_a_split_by_time_are_said_to_be_unused():
    source = parted({"a.h5": 50, "b.h5": 50}, overlap=5)
    said = "unused 0.10 (10 samples, gaps between the sides of each part included); overlap 0"
    assert split(source, HALVES, groups="time").described.endswith(said)
    assert "gaps" not in split(numbered(100), {"train": 0.5, "val": 0.3}, groups="time").described


def test_values_that_are_shared_in_spite_of_groups_are_counted_and_warned_of(caplog):
    source = parted({"a.h5": 100, "b.h5": 100}, overlap=2)
    values = np.arange(200) // 10
    sides = split(source, HALVES, groups=values)
    side = side_of(sides, 200)
    within = [range(max(row - 2, row // 100 * 100), min(row + 3, row // 100 * 100 + 100)) for row in range(200)]
    near = sum(any(side[other] != side[row] for other in rows) for row, rows in enumerate(within))
    assert near > 0
    assert sides.overlap == near
    assert f"overlap {near} samples with values of another side" in sides.described
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_overlap_would_be_noticed():
    """No split makes one; so sides are made that have one."""
    source = numbered(10)
    train = SubsetSource(source, [0, 1, 2], group_codes=[0, 0, 1])
    val = SubsetSource(source, [2, 3, 4], group_codes=[1, 2, 2])
    result = module.Split(train=train, val=val)
    groups = module.Groups(np.zeros(10, int), ["a", "b", "c"], "dog")
    drawn = module.Drawn(["train", "val"], np.zeros(10, int), "by dog", source.places(), groups)
    module.describe(result, source, drawn)
    assert result.overlap == 3
    assert "overlap 1 group on two sides, 2 samples with values of another side" in result.described


def test_a_split_can_be_pickled():
    sides = split(numbered(100), HALVES, groups="time")
    copy = pickle.loads(pickle.dumps(sides))
    assert copy.described == sides.described
    assert copy["val"].samples.tolist() == sides["val"].samples.tolist()
