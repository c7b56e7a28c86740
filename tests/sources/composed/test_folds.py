import math

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources.parted import folds_of, numbered

from lit_async_data import Field, HDF5Source, StorageLayout, SubsetSource, folds, split
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.testing import ArraySource


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


EMPTY = [[0, -100, 1, 0], ["0", "", "1", "0"], [b"0", b"", b"1", b"0"], ["0", None, "1", "0"]]
EMPTY += [[0.0, math.nan, 1.0, 0.0], ["0.0", "", "1.0", "0.0"]]


@pytest.mark.parametrize("fold", EMPTY, ids=repr)
def test_samples_without_a_fold_are_in_none_and_counted(fold, caplog):
    field = {"fold": np.array(fold)} if -100 in fold else {}
    source = ArraySource({"y": np.arange(4), **field}, columns=None if field else {"fold": np.array(fold)})
    assert [each["val"].samples.tolist() for each in folds(source, by="fold")] == [[0, 3], [2]]
    assert split(source, {"train": [0], "val": [1]}, by="fold")["val"].samples.tolist() == [2]
    assert [record.message for record in caplog.records] == ["ArraySource: no value in fold, so left out: 1 sample"] * 2


def test_a_row_or_a_column_of_matlab_names_the_folds(h5):
    path = h5(x=np.zeros((6, 3)), row=FOLD[None].astype(float), column=FOLD[:, None], side=[[b"a"], [b"b"]] * 3)
    source = HDF5Source(path, ["x"])
    for by, sides in {"row": [2, 1, 0, 2, 0, 1], "column": [2, 1, 0, 2, 0, 1], "side": [0, 1, 0, 1, 0, 1]}.items():
        assert folds_of(folds(source, by=by), 6).tolist() == sides


def test_an_attribute_may_name_the_sides(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, side in enumerate(SIDE.tolist()):
            file[f"{number}/x"] = np.zeros(3)
            file[str(number)].attrs["side"] = "" if number == 4 else side
    fields = {"x": "x", "side": Field(attr="side", classes=["train", "val", "test"], null="ignore")}
    source = HDF5Source(tmp_path / "a.h5", fields, group="*", sample="group")
    sides = split(source, by="side")
    assert (list(sides), sides["train"].samples.tolist()) == (["val", "test", "train"], [0, 2])


BALANCE = r"^balance: the given array has no value \(None\) for sample 1 \(row 1 of .*nor for 1 other; add a value"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: folds(s, 1), "^k: 1 is not a whole number from 2 to 6"),
        (lambda s: folds(s, 7), "^k: 7 is not"),
        (lambda s: folds(s, 3, by="fold"), "^k: 3, but by says the folds"),
        (lambda s: folds(s, 2, balance=np.array(["a", None, "b", "a", None, "b"], object)), BALANCE),
        (lambda s: folds(s, 2, balance=np.array([1, np.nan, 2, 1, np.nan, 2])), BALANCE.replace("None", "nan")),
        (lambda s: folds(s, np.int64(4), groups="fold"), r"^split: 4 sides or folds need .* groups \(fold\) is 3"),
        (lambda s: folds(s, by="side", groups=[7, 7, 8, 9, 8, 7]), r"^groups: 7 .* is in train, val \(side\)"),
        (lambda s: split(s, by="side", groups=[7, 7, 8, 9, 8, 7]), r"^groups: 7 .* is in train, val \(side\)"),
        (lambda s: folds(s, by="side", balance="y"), "^balance: only where sides are drawn"),
        (lambda s: folds(s, balance="z"), "no field 'z' with one value per sample"),
        (lambda s: folds(s, balance=[1, 2]), "^balance: 2 labels for 6 samples"),
        (lambda s: folds(s, balance="f"), "^balance: the labels are float64 numbers"),
        (lambda s: split(s, by="fold"), r"^split: the values of by, 1, 9, 10, .*'train': \['9', '10'\], 'val': \['1"),
        (lambda s: split(s, {"train": 0.5}, by="fold"), "^split: by says the sides"),
        (lambda s: split(s, {"train": [3]}, by="fold"), r"^split: train names 3, .* there are 1, 9, 10"),
        (lambda s: split(s, {"train": [1.5]}, by="fold"), "^split: 1.5 is neither a whole number nor text"),
        (lambda s: split(s, by="flod"), "^by: 'flod' is neither"),
        (lambda s: split(s, by="f"), "^by: f has type float64"),
        (lambda s: split(s, by=np.array([(1, 2.0)] * 6, [("a", int), ("b", float)])), r"^by: .* has type \[\('a'"),
        (lambda s: split(s, {"train": 0.8, "val": 0.2}, by="time"), "^by: to cut by time, write groups='time'"),
        (lambda s: folds(s, by="file:(["), r"^by: '\(\[' is not a regular expression"),
    ],
)
def test_folds_that_cannot_be_are_refused(call, message):
    columns = {"side": SIDE, "fold": FOLD}
    with pytest.raises((ConfigError, MissingError), match=message):
        call(ArraySource({"y": np.arange(6), "f": np.linspace(0, 1, 6)}, columns=columns))


@pytest.mark.parametrize(
    ("by", "said"),
    [([""] * 20, "^by: no sample has a value in the given array"), ([0] * 20, "^by: all samples are in fold 0")],
)
def test_stored_folds_are_two_at_least(by, said):
    with pytest.raises(ConfigError, match=said):
        folds(ArraySource({"x": np.zeros(20)}), by=np.array(by))
