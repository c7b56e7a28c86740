"""The side of each sample: by its hash, by time, by groups, named by the user; what stays together; and folds."""

import itertools
import logging
import math
import pickle

import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import HALVES, files, folds_of, held, numbered, parted, side_of

import lit_async_data.sources.composed.split as module
from lit_async_data import ConcatSource, Field, HDF5Source, ManifestSource, StorageLayout, SubsetSource, folds, split
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.weights import class_weights
from lit_async_data.sources.composed.split import groups_of
from lit_async_data.sources.contract.source import hashed
from lit_async_data.sources.table.labels import note_names
from lit_async_data.testing import ArraySource

THREE = {"train": 0.6, "val": 0.2, "test": 0.2}


def side_by_hand(fractions, key):
    """Where a 64-bit key falls, if the fractions lie one after the other from 0 on."""
    end = 0.0
    for name, share in fractions.items():
        end += share
        if key / 2**64 < end:
            return name
    return None


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(ConfigError, match=f"^seed: {seed!r} is not"):
        split(numbered(100), HALVES, seed=seed)


@pytest.mark.parametrize("fractions", [{"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.1, "b": 0.7, "c": 0.2 + 5e-10}])
def test_fractions_that_are_1_up_to_rounding_leave_nothing_over_and_a_key_on_an_edge_is_on_the_next_side(fractions):
    edges = module.upper_edges(fractions)
    assert edges[-1] == 1.0
    assert module.sides_of_keys(edges, np.array([0, 2**64 - 1], np.uint64)).tolist() == [0, 2]
    keys = np.array([2**63 - 2**11, 2**63, 2**63 + 2**62 - 2**11, 2**63 + 2**62], np.uint64)
    assert module.sides_of_keys(module.upper_edges({"a": 0.5, "b": 0.25}), keys).tolist() == [0, 1, 1, module.UNUSED]


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


def test_what_was_split_is_described_for_others_to_say(caplog):
    with caplog.at_level(logging.INFO):
        sides = split(numbered(12_000), {"train": 0.5, "val": 0.25}, groups=np.arange(12_000) // 5, seed=3)
    assert not caplog.records
    counts = {name: len(side) for name, side in sides.items()}
    said = [f"{name} {n / 12_000:.2f} ({n // 5} of 2,400 groups, {n:,} samples)" for name, n in counts.items()]
    unused = 12_000 - sum(counts.values())
    said += [f"unused {unused / 12_000:.2f} ({unused:,} samples); overlap 0"]
    assert sides.described == f"split by the given array, seed 3: {', '.join(said)}"
    in_time = split(parted({"a.h5": 50, "b.h5": 50}, overlap=5), HALVES, groups="time").described
    assert in_time.startswith("split by time: train 0.46 (46 samples)")
    assert in_time.endswith("unused 0.10 (10 samples, gaps between the sides of each part included); overlap 0")
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


def test_a_split_can_be_pickled():
    sides = split(numbered(100), HALVES, groups="time")
    copy = pickle.loads(pickle.dumps(sides))
    assert copy.described == sides.described
    assert copy["val"].samples.tolist() == sides["val"].samples.tolist()


@given(st.lists(st.integers(1, 60), min_size=2, max_size=40), st.integers(1, 9), st.integers(0, 2**63 - 1))
def test_shares_are_as_near_as_the_groups_allow(sizes, tenths, seed):
    values = np.repeat(np.arange(len(sizes)), sizes)
    fractions = {"train": tenths / 10, "val": 1 - tenths / 10}
    sides = split(numbered(len(values)), fractions, groups=values, seed=seed)
    if min(fractions.values()) * sum(sizes) >= max(sizes) / 2:  # else a side needs a group that is too large for it
        off = abs(len(sides["train"]) - tenths / 10 * sum(sizes))
        assert off <= max(sizes) / 2 + 1e-9


@pytest.mark.parametrize("groups", [5, 4, 3])
def test_each_side_gets_a_group_if_there_are_enough(groups):
    for seed in range(10):
        sides = split(numbered(groups), {"train": 0.9, "val": 0.05, "test": 0.05}, groups=np.arange(groups), seed=seed)
        assert {name: len(side) for name, side in sides.items()} == {"train": groups - 2, "val": 1, "test": 1}


FOLDS = np.arange(20) // 2 % 5


@pytest.mark.parametrize(
    ("given", "groups"),
    [({"train": np.array([3, 1, 0]), "val": (2,)}, FOLDS), ({"train": ["0", "1", "3"], "val": ["2"]}, "fold")],
)
def test_sides_may_list_their_groups_and_the_others_stay_unused(given, groups):
    sides = split(numbered(20, fold=FOLDS), given, groups=groups)
    assert side_of(sides, 20) == [{2: "val", 4: None}.get(fold, "train") for fold in FOLDS.tolist()]
    assert sides.described.endswith("val 0.20 (1 of 5 groups, 4 samples), unused 0.20 (4 samples); overlap 0")


SHORT = parted({"a.h5": 50, "b.h5": 6, "c.h5": 50, "d.h5": 1}, overlap=5)
TOO_SHORT = r"^split: .* train, val with gaps of 5 samples: b\.h5 \(6 samples\), d\.h5 \(1 sample\); leave these parts"
EACH_WITH_9 = r"^groups: .*with the next 9, .* groups='file' .*groups='time'"


@pytest.mark.parametrize(
    ("source", "sides", "groups", "message"),
    [
        (20, {}, None, r"^split: \{\} is not a mapping of names to fractions"),
        (20, [0.8, 0.2], None, r"^split: \[0.8, 0.2\] is not a mapping"),
        (20, {1: 0.5}, None, "^split: 1 is not the name of a side"),
        (20, {"train": 0}, None, "^split: train = 0 is not a fraction"),
        (20, {"train": 80, "val": 20}, None, "^split: train = 80 is not"),
        (20, {"train": float("nan")}, None, "^split: train = nan is not"),
        (20, {"train": True}, None, "^split: train = True is not"),
        (20, {"train": 0.8, "val": 0.2 + 1e-8}, None, "^split: .* add up to 1, which is more than 1"),
        (1, HALVES, None, r"^split: '(train|val)' gets none of 1 sample;"),
        (2, THREE, "time", r"the source \(2 samples\)"),
        (SHORT, HALVES, "time", TOO_SHORT),
        (parted(files(2, 50), overlap=9), HALVES, None, EACH_WITH_9),
        (parted(files(1, 50), overlap=9), HALVES, None, "^groups: .*share values; groups='time'"),
        (20, {"train": [0, 7, "x"]}, FOLDS, r"^split: train names 7, x, .*no such group .*0, 1, 2, … \(5 in"),
        (20, {"train": [0, 1], "val": [2, 1]}, FOLDS, "^split: the group 1 .* is in train and in val"),
        (20, {"train": [0], "val": []}, FOLDS, r"^split: val = \[\] names no group"),
        (20, {"train": [0], "val": 0.2}, FOLDS, "^split: train lists groups, but val = 0.2 is no list"),
        (20, {"train": np.arange(16)}, None, r"^split: train lists groups .*SubsetSource\(source, num"),
        (20, {"train": [0], "val": [1]}, "time", "^split: train lists groups .*say with groups= what they are"),
    ],
)
def test_sides_that_cannot_be_are_refused(source, sides, groups, message):
    with pytest.raises(ConfigError, match=message):
        split(numbered(source) if isinstance(source, int) else source, sides, groups=groups)


@given(st.lists(st.integers(0, 4), min_size=10, max_size=90), st.integers(2, 7), st.integers(0, 2**63 - 1))
def test_classes_are_dealt_evenly_and_samples_too(labels, k, seed):
    labels = np.array(labels)
    fold = folds_of(folds(numbered(len(labels)), k, balance=labels, seed=seed), len(labels))
    for counts in (held(fold, k, labels), held(fold, k, np.zeros_like(labels))):
        assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()


def test_a_split_has_its_share_of_each_class():
    labels = np.random.default_rng(0).choice(20, 1000, p=[0.62] + [0.02] * 19)
    sides = split(numbered(1000, label=labels), {"train": 0.7, "val": 0.2}, balance="label")
    for side, share in zip(sides.values(), (0.7, 0.2)):
        assert np.abs(np.bincount(labels[side.samples]) - share * np.bincount(labels)).max() < 2
        assert abs(len(side) - share * 1000) < 2


def test_groups_are_dealt_so_that_classes_are_balanced():
    rng = np.random.default_rng(0)
    patient = rng.integers(0, 60, 1500)
    label = np.where(rng.random(1500) < 0.8, patient * 7 % 5, rng.integers(0, 5, 1500))
    fold = folds_of(folds(numbered(1500, p=patient, label=label), 5, groups="p", balance="label"), 1500)
    assert all(len(set(fold[patient == each])) == 1 for each in range(60))
    counts = held(fold, 5, label)
    assert (counts.max(axis=0) - counts.min(axis=0)).max() < 25  # 101 without balance
    assert np.ptp(counts.sum(axis=1)) <= 25


def test_several_labels_per_sample_are_balanced_and_none_is_a_class_too():
    tags = np.random.default_rng(0).random((2000, 6)) < [0.005, 0.03, 0.1, 0.2, 0.3, 0.4]
    fold = folds_of(folds(numbered(2000, tags=tags), 5, balance="tags"), 2000)
    tags = np.column_stack([tags, ~tags.any(axis=1), np.ones(2000, bool)])
    counts = np.array([tags[fold == number].sum(axis=0) for number in range(5)])
    assert np.ptp(counts, axis=0).max() <= 3


def test_files_and_groups_may_be_listed_by_any_end_of_a_path_that_only_one_has():
    source = parted({"a/s.h5": 2, "b/s.h5": 3, "b/us.h5": 1})
    sides = split(source, {"train": ["us"], "val": ["a/s", "b/s.h5"]}, groups="file")
    assert {name: side.samples.tolist() for name, side in sides.items()} == {"train": [5], "val": [0, 1, 2, 3, 4]}
    with pytest.raises(ConfigError, match=r"train names s\.h5, .*write the whole path, as in a/s\.h5, b/s\.h5$"):
        split(source, {"train": ["s.h5"], "val": ["b/us.h5"]}, groups="file")
    groups = parted({"x.h5:/data/demo_0": 1, "x.h5:/data/demo_1": 2})
    for by in ({"groups": "group"}, {"by": "group"}):
        assert split(groups, {"train": ["demo_1"], "val": ["data/demo_0"]}, **by)["train"].samples.tolist() == [1, 2]
    with pytest.raises(ConfigError, match="no such group"):  # names of patients are no paths
        split(numbered(2), {"train": ["1"]}, groups=["a/1", "b/2"])


KINDS = [
    np.array,
    lambda values: np.array(values, np.uint8),
    lambda values: np.array(values, object),
    lambda values: [str(value) for value in values],
    lambda values: np.array([str(value) for value in values], "S"),
    lambda values: np.array([str(value) for value in values], np.dtypes.StringDType()),
    lambda values: np.array([str(value).encode() for value in values], object),
    lambda values: np.ma.array(values, mask=False),
    lambda values: np.array(values)[None],  # as MATLAB stores a row or a column
    lambda values: np.array(values, float)[:, None],
]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_told_apart_by_their_text(kind):
    values = [12, 7, 7, 103, 12, 0, 55, 103, 8, 9]
    expected = side_of(split(numbered(10), HALVES, groups=values), 10)
    assert set(expected) == {"train", "val"}
    assert side_of(split(numbered(10), HALVES, groups=kind(values)), 10) == expected


@pytest.mark.parametrize("kind", ["U", "S", "O"])
def test_blanks_around_a_name_make_no_other_group_side_or_fold(kind, caplog):
    note_names.cache_clear()
    source = parted({"a.h5": 32}, who=np.array([f"{n // 4}{' ' * (n % 2)}" for n in range(32)], kind))
    sides = split(source, HALVES, groups="who")
    assert side_of(sides, 32) == side_of(split(source, HALVES, groups=np.arange(32) // 4), 32)
    assert "ArraySource: who: '0 ', '1 ', '2 ', '3 ', '4 ' differ from other names only by blanks" in caplog.text
    assert len(split(source, {"train": [" 1", "2"]}, groups="who")["train"]) == 8
    assert split(source, {"train": ["0"], "val": ["7 "]}, by="who")["val"].samples.tolist() == [28, 29, 30, 31]
    assert [len(fold["val"]) for fold in folds(source, by="who")] == [4] * 8
    assert class_weights(np.array(["cat", "cat ", "dog", " dog"], kind)).tolist() == [0.5] * 4  # as balance= counts


def test_true_and_false_and_text_that_is_not_utf8_are_groups_too():
    def names(values):
        return groups_of(numbered(len(values)), values, numbered(len(values)).places()).names

    assert names(np.arange(10) % 2 == 0) == ["0", "1"]
    assert len(set(hashed(names(np.array([b"\xff", b"a", b"\xfe"]))).tolist())) == 3


DOGS, TEN, TWO = parted({"dog.h5": 2, "cat.h5": 2}), numbered(10), SubsetSource(numbered(10), [1, 2])


@pytest.mark.parametrize(
    ("source", "groups", "message"),
    [
        (TEN, np.arange(9), "9 values for 10 samples"),
        (TEN, np.zeros((10, 2), int), r"has shape \(10, 2\)"),
        (TEN, np.arange(10) + 0.5, "type float64"),
        (TEN, np.arange(10).astype("M8[s]"), r"type datetime64\[s\]"),
        (TEN, np.array([1.5] * 10, object), "1.5 is neither a whole number nor text"),
        (TEN, "fiel", r"'fiel' .*with one value per sample: y\)"),
        (DOGS, "fiel", "'fiel' is neither file, file:REGEX, group, time, .*array of 4"),
        (DOGS, "file:dog", "'dog' does not match files/cat.h5"),
        (DOGS, "file:(", r"'\(' is not a regular expression: missing \)"),
        *((TWO, name, f"'{name}' needs a source that knows its files") for name in ("group", "file:a")),
    ],
)
def test_values_and_words_that_name_no_groups_are_refused(source, groups, message):
    with pytest.raises(ConfigError, match=f"^groups: .*{message}"):
        split(source, HALVES, groups=groups)


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 2, np.nan, np.nan]),
        np.array(["a", "b", float("nan"), None], object),
        np.array(["a", "b", type("NAType", (), {})(), None], object),  # as pandas calls what is not there
        np.ma.array([1, 2, 3, 4], mask=[False, False, True, True]),
        np.array(["2020-01-01", "2020-01-01", "NaT", "NaT"], "M8[D]"),
    ],
)
def test_a_sample_without_a_value_is_named(values):
    source = SubsetSource(parted({"a.h5": 10}), [9, 8, 7, 6])
    message = r"no value \(.*\) for sample 7 \(row 7 of files/a\.h5\), nor for 1 other;"
    with pytest.raises(ConfigError, match=message) as caught:
        split(source, HALVES, groups=values)
    assert (caught.value.sample_id, caught.value.row, caught.value.file) == (7, 7, "files/a.h5")


def test_groups_may_be_named_by_a_column_or_a_key():
    who = np.array([f"dog {number}" for number in range(20)])
    source = parted(files(5, 4), who=who)
    assert side_of(split(source, HALVES, groups="who"), 20) == side_of(split(source, HALVES, groups=who), 20)
    plain = numbered(20, dog=np.arange(20) // 2)
    by_key = split(SubsetSource(plain, np.arange(19, -1, -1)), HALVES, groups="dog")
    assert side_of(by_key, 20) == side_of(split(plain, HALVES, groups=np.arange(20) // 2), 20)[::-1]
    assert by_key.described.startswith("split by dog, seed 0: ")


NESTED = {f"{file}.h5:/{group}": 2 for file in range(8) for group in ("left", "right")}


@pytest.mark.parametrize(("groups", "samples", "said"), [("file", 4, "4 of 8 groups"), ("group", 2, "8 of 16 groups")])
def test_a_file_and_a_group_in_it_stay_together(groups, samples, said):
    sides = split(parted(NESTED), HALVES, groups=groups)
    side = side_of(sides, 32)
    assert side == np.repeat(side[::samples], samples).tolist()
    assert f"train 0.50 ({said}" in sides.described


def test_files_are_named_by_what_an_expression_finds():
    parts = {f"day{day}/dog{dog}.h5": 2 for day in range(3) for dog in range(6)}
    for expression in (r"dog\d", r"/dog(\d)\.", r"dog(\d)(\.h5)"):
        side = side_of(split(parted(parts), HALVES, groups=f"file:{expression}"), 36)
        assert side[:12] == side[12:24] == side[24:]
    named = groups_of(parted(parts), r"file:dog(\d)", parted(parts).places())
    assert named.names == list("012345")
    assert groups_of(parted(parts), r"file:dog\d", parted(parts).places()).names[1] == "dog1"


def test_files_of_one_name_in_two_folders_are_two_groups(h5, tmp_path):
    for folder in ("mon", "tue"):
        (tmp_path / folder).mkdir()
    days = ConcatSource([HDF5Source(h5(f"{folder}/a.h5", y=np.arange(3)), ["y"]) for folder in ("mon", "tue")])
    found = groups_of(days, "file", days.places())
    assert list(found.names) == [f"a.h5 of {tmp_path}/{folder}/a.h5" for folder in ("mon", "tue")]
    assert found.codes.tolist() == [0, 0, 0, 1, 1, 1]


def test_files_of_which_nothing_is_left_are_not_counted():
    source = SubsetSource(parted(files(10, 2)), np.arange(12))
    sides = split(source, HALVES, groups="file")
    assert "of 6 groups" in sides.described
    assert sorted({*sides["train"].group_codes, *sides["val"].group_codes}) == list(range(6))


def test_a_word_that_is_a_rule_and_a_column_is_refused():
    fours = np.arange(32) // 4
    source = parted(NESTED, group=fours, file=fours, time=fours)
    for word in ("file", "group", "time"):
        with pytest.raises(ConfigError, match=f"^groups: '{word}' is a rule, .*'column:{word}' or 'rule:{word}'"):
            split(source, HALVES, groups=word)
    assert "8 of 16 groups" in split(source, HALVES, groups="rule:group").described
    assert "4 of 8 groups" in split(source, HALVES, groups="column:group").described
    assert split(source, HALVES, groups="rule:time").described.startswith("split by time")


def test_an_empty_name_of_a_subject_is_no_group_wherever_it_is_stored(tmp_path, h5):
    ids, x = ["a", "", "b", "c"], np.zeros((4, 2), "f4")
    paths = [h5(x=x, who=ids, name=f"{n}.h5") for n in range(3)]
    (tmp_path / "t.csv").write_text("x,who\n1,a\n2,\n3,b\n")
    cases = [
        (HDF5Source(paths, {"x": "x"}), "who"),
        (HDF5Source(paths, {"x": "x"}, episodes="who"), "episode"),
        (ManifestSource(tmp_path / "t.csv", ["x"]), "who"),
        (ManifestSource(pd.DataFrame({"x": [1, 2], "who": ["a", " "]}), ["x"]), "who"),
    ]
    for source, groups in cases:
        with pytest.raises(ConfigError, match="no value"):
            split(source, HALVES, groups=groups)
    for empty in ([b"a", b"", b"b"] * 4, ["a", "  ", "b"] * 4):
        with pytest.raises(ConfigError, match=r"no value \(.*\) for sample 1 \(row 1 of .*\), nor for 3 others; add a"):
            folds(cases[0][0], 2, groups=np.array(empty, object))
    with pytest.raises(ConfigError, match="does not match"):
        split(cases[0][0], HALVES, groups="file:(z*)")
    sides = split(cases[0][0], {"train": ["a"], "val": ["b"]}, by="who")  # as before, without those that have none
    assert [len(side) for side in sides.values()] == [3, 3]


@given(st.integers(2, 7), st.integers(7, 90), st.integers(0, 2**63 - 1), st.randoms())
def test_samples_alone_are_dealt_evenly_and_whatever_their_order(k, length, seed, random):
    fold = folds_of(folds(numbered(length), k, seed=seed), length)
    sizes = np.bincount(fold, minlength=k)
    assert sizes.max() - sizes.min() <= 1
    order = random.sample(range(length), length)
    assert np.array_equal(folds_of(folds(SubsetSource(numbered(length), order), k, seed=seed), length), fold[order])


def test_samples_that_are_added_move_few_of_the_others():
    before, after = (
        folds_of(folds(ArraySource({"y": np.arange(n)}, parts=parts), 5), n)
        for n, parts in ((1000, {"a.h5": 1000}), (1100, {"a.h5": 1000, "b.h5": 100}))
    )
    assert (before == after[:1000]).mean() > 0.95
    assert (before == folds_of(folds(numbered(1000), 5, seed=1), 1000)).mean() == pytest.approx(0.2, abs=0.05)


@given(st.lists(st.integers(1, 30), min_size=7, max_size=40), st.integers(2, 7), st.integers(0, 2**63 - 1))
def test_groups_stay_whole_in_folds_of_nearly_the_same_size(sizes, k, seed):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    fold = folds_of(folds(numbered(len(groups)), k, groups=groups, seed=seed), len(groups))
    assert all(len(set(fold[groups == group])) == 1 for group in range(len(sizes)))
    counts = np.bincount(fold, minlength=k)
    assert counts.max() - counts.min() <= max(sizes)
    backwards = folds(numbered(len(groups)), k, groups=groups[::-1], seed=seed)
    assert np.array_equal(folds_of(backwards, len(groups)), fold[::-1])


def test_a_sample_that_is_there_twice_is_in_one_fold():
    fold = folds_of(folds(SubsetSource(numbered(50), np.repeat(np.arange(50), 2)), 3), 100)
    assert np.array_equal(fold[::2], fold[1::2])


def test_folds_by_time_are_stretches_with_gaps():
    source = ArraySource({"y": np.arange(60)}, parts={"a.h5": 30, "b.h5": 30}, chunks=StorageLayout(overlap=2))
    cut = folds(source, 3, groups="time")
    assert [sides["val"].samples.tolist()[:8] for sides in cut] == [[*range(n, n + 8)] for n in (0, 11, 21)]
    assert [len(sides["train"]) + len(sides["val"]) for sides in cut] == [52] * 3
    assert [sides.overlap for sides in cut] == [0] * 3
    with pytest.raises(ConfigError, match=r"^groups: each sample is a window .*groups='time'"):
        folds(source, 3)


SIDE = np.array(["train", "val", "train", "test", "train", "val"])
FOLD = np.array([10, 9, 1, 10, 1, 9])


def test_a_column_of_text_names_the_sides_and_others_are_listed():
    source = ArraySource({"y": np.arange(6)}, columns={"side": SIDE, "fold": FOLD})
    by_name = split(source, by="side")
    samples = {name: side.samples.tolist() for name, side in by_name.items()}
    assert samples == {"val": [1, 5], "test": [3], "train": [0, 2, 4]}
    assert by_name.described.startswith("split by side: val 0.33 (1 of 3 groups, 2 samples), test")
    listed = split(source, {"train": [1, 9], "val": [10]}, by="fold", groups=[0, 1, 2, 0, 2, 1])
    assert listed["train"].samples.tolist() == [1, 2, 4, 5]
    assert listed["val"].group_codes.tolist() == [0, 0]
    # Numbers in their order, not in that of their text.
    assert folds_of(folds(source, by="fold"), 6).tolist() == [2, 1, 0, 2, 0, 1]
    assert folds_of(folds(numbered(6, fold=FOLD[:, None]), by="fold"), 6).tolist() == [2, 1, 0, 2, 0, 1]
    assert folds_of(folds(numbered(4), by=[1, -10, 10, -9]), 4).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    "fold", [[0, -100, 1, 0], [b"0", b"", b"1", b"0"], ["0", None, "1", "0"], [0.0, math.nan, 1.0, 0.0]], ids=repr
)
def test_samples_without_a_fold_are_in_none_and_counted(fold, caplog):
    field = {"fold": np.array(fold)} if -100 in fold else {}
    source = ArraySource({"y": np.arange(4), **field}, columns=None if field else {"fold": np.array(fold)})
    assert [each["val"].samples.tolist() for each in folds(source, by="fold")] == [[0, 3], [2]]
    assert split(source, {"train": [0], "val": [1]}, by="fold")["val"].samples.tolist() == [2]
    assert [record.message for record in caplog.records] == ["ArraySource: no value in fold, so left out: 1 sample"] * 2


def test_an_attribute_may_name_the_sides(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, side in enumerate(SIDE.tolist()):
            file[f"{number}/x"] = 0
            file[str(number)].attrs["side"] = "" if number == 4 else side
    fields = {"x": "x", "side": Field(attr="side", classes=["train", "val", "test"], null="ignore")}
    sides = split(HDF5Source(tmp_path / "a.h5", fields, group="*", sample="group"), by="side")
    assert (list(sides), sides["train"].samples.tolist()) == (["val", "test", "train"], [0, 2])


BALANCE = r"^balance: the given array has no value \(None\) for sample 1 \(row 1 of .*nor for 1 other; add a value"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: folds(s, 1), "^k: 1 is not a whole number from 2 to 6"),
        (lambda s: folds(s, 3, by="fold"), "^k: 3, but by says the folds"),
        (lambda s: folds(s, 2, balance=np.array(["a", None, "b", "a", None, "b"], object)), BALANCE),
        (lambda s: folds(s, np.int64(4), groups="fold"), r"^split: 4 sides or folds need .* groups \(fold\) is 3"),
        (lambda s: folds(s, by="side", groups=[7, 7, 8, 9, 8, 7]), r"^groups: 7 .* is in train, val \(side\)"),
        (lambda s: folds(s, by="side", balance="y"), "^balance: only where sides are drawn"),
        (lambda s: folds(s, balance="z"), "no field 'z' with one value per sample"),
        (lambda s: folds(s, balance=[1, 2]), "^balance: 2 labels for 6 samples"),
        (lambda s: folds(s, balance="f"), "^balance: the labels are float64 numbers"),
        (lambda s: split(s, by="fold"), r"^split: the values of by, 1, 9, 10, .*'train': \['9', '10'\], 'val': \['1"),
        (lambda s: split(s, {"train": 0.5}, by="fold"), "^split: by says the sides"),
        (lambda s: split(s, {"train": [1.5]}, by="fold"), "^split: 1.5 is neither a whole number nor text"),
        (lambda s: split(s, by="flod"), "^by: 'flod' is neither"),
        (lambda s: split(s, by="f"), "^by: f has type float64"),
        (lambda s: split(s, by=np.array([(1, 2.0)] * 6, [("a", int), ("b", float)])), r"^by: .* has type \[\('a'"),
        (lambda s: folds(s, by=[""] * 6), "^by: no sample has a value in the given array"),
        (lambda s: folds(s, by=[0] * 6), "^by: all samples are in fold 0"),
        (lambda s: split(s, {"train": 0.8, "val": 0.2}, by="time"), "^by: to cut by time, write groups='time'"),
        (lambda s: folds(s, by="file:(["), r"^by: '\(\[' is not a regular expression"),
    ],
)
def test_folds_that_cannot_be_are_refused(call, message):
    columns = {"side": SIDE, "fold": FOLD}
    with pytest.raises((ConfigError, MissingError), match=message):
        call(ArraySource({"y": np.arange(6), "f": np.linspace(0, 1, 6)}, columns=columns))
