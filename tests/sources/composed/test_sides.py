"""The side of each group: drawn so that sides hold their shares, also of each class, or named by the user."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import folds_of, held, numbered, parted, side_of

from lit_async_data import folds, split
from lit_async_data.errors import ConfigError


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
    [
        ({"train": [0, 1, 3], "val": [2]}, FOLDS),
        ({"train": np.array([3, 1, 0]), "val": (2,)}, FOLDS),
        ({"train": ["0", "1", "3"], "val": ["2"]}, "fold"),
    ],
)
def test_sides_may_list_their_groups_and_the_others_stay_unused(given, groups):
    sides = split(numbered(20, fold=FOLDS), given, groups=groups)
    assert side_of(sides, 20) == [{2: "val", 4: None}.get(fold, "train") for fold in FOLDS.tolist()]
    assert sides.described.endswith("val 0.20 (1 of 5 groups, 4 samples), unused 0.20 (4 samples); overlap 0")


@pytest.mark.parametrize(
    ("given", "groups", "message"),
    [
        ({"train": [0, 7, "x"], "val": [2]}, FOLDS, r"train names 7, x, .*no such group .*there are 0, 1, 2, … \(5 in"),
        ({"train": [0, 1], "val": [2, 1]}, FOLDS, "the group 1 .* is in train and in val"),
        ({"train": [0, 0]}, FOLDS, "the group 0 .* is in train and in train"),
        ({"train": [0], "val": []}, FOLDS, r"val = \[\] names no group"),
        ({"train": [0], "val": 0.2}, FOLDS, "train lists groups, but val = 0.2 is no list"),
        ({"train": [0], 1: [1]}, FOLDS, "1 is not the name of a side"),
        ({"train": np.arange(16), "val": np.arange(16, 20)}, None, r"train lists groups .*SubsetSource\(source, num"),
        ({"train": [0], "val": [1]}, "time", "train lists groups .*say with groups= what they are"),
    ],
)
def test_lists_that_name_no_sides_are_refused(given, groups, message):
    with pytest.raises(ConfigError, match=f"^split: .*{message}"):
        split(numbered(20), given, groups=groups)


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
    with pytest.raises(ConfigError, match="is in train and in val; name it once"):
        split(source, {"train": ["us"], "val": ["b/us.h5"]}, groups="file")
    groups = parted({"x.h5:/data/demo_0": 1, "x.h5:/data/demo_1": 2})
    for by in ({"groups": "group"}, {"by": "group"}):
        assert split(groups, {"train": ["demo_1"], "val": ["data/demo_0"]}, **by)["train"].samples.tolist() == [1, 2]
    with pytest.raises(ConfigError, match="no such group"):  # names of patients are no paths
        split(numbered(2), {"train": ["1"]}, groups=["a/1", "b/2"])
