"""Which samples a split keeps together: by values, files, or what an expression finds in paths."""

import numpy as np
import pandas as pd
import pytest
from support.sources.parted import HALVES, files, numbered, parted, side_of

from lit_async_data import ConcatSource, HDF5Source, ManifestSource, SubsetSource, folds, split
from lit_async_data.errors import ConfigError
from lit_async_data.order.weights import class_weights
from lit_async_data.sources.composed.split import groups_of
from lit_async_data.sources.contract.source import hashed
from lit_async_data.sources.table.labels import note_names

KINDS = [
    np.array,
    lambda values: np.array(values, np.uint8),
    lambda values: np.array(values, float),
    lambda values: np.array(values, object),
    lambda values: [str(value) for value in values],
    lambda values: np.array([str(value) for value in values], "S"),
    lambda values: np.array([str(value) for value in values], np.dtypes.StringDType()),
    lambda values: np.array([str(value).encode() for value in values], object),
    lambda values: np.array([np.int16(value) for value in values], object),
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
        (TEN, np.arange(11), "11 values for 10 samples"),
        (TEN, np.zeros((10, 2), int), r"has shape \(10, 2\)"),
        (TEN, np.arange(10) + 0.5, "type float64"),
        (TEN, np.arange(10) * 1e300, "type float64"),
        (TEN, np.arange(10).astype("M8[s]"), r"type datetime64\[s\]"),
        (TEN, np.array([1.5] * 10, object), "1.5 is neither a whole number nor text"),
        (TEN, np.array([(1, 2.0)] * 10, [("a", int), ("b", float)]), r"has type \[\('a'"),
        (TEN, "fiel", r"'fiel' .*with one value per sample: y\)"),
        (DOGS, "fiel", "'fiel' is neither file, file:REGEX, group, time, .*array of 4"),
        (DOGS, "file:dog", "'dog' does not match files/cat.h5"),
        (DOGS, r"file:(dog)|cat", "does not match files/cat.h5"),
        (DOGS, "file:(", r"'\(' is not a regular expression: missing \)"),
        *((TWO, name, f"'{name}' needs a source that knows its files") for name in ("file", "group", "file:a")),
    ],
)
def test_values_and_words_that_name_no_groups_are_refused(source, groups, message):
    with pytest.raises(ConfigError, match=f"^groups: .*{message}"):
        split(source, HALVES, groups=groups)


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 2, np.nan, np.nan]),
        np.array(["a", "b", None, None], object),
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


@pytest.mark.parametrize("empty", ["", "  ", b""])
@pytest.mark.parametrize("cut", [lambda *given, **named: split(*given, HALVES, **named), folds])
def test_an_empty_name_is_no_group(empty, cut):
    values = np.array([b"a" if isinstance(empty, bytes) else "a", empty, "b", "c", empty], object)
    with pytest.raises(
        ConfigError, match=r"no value \(.*\) for sample 1 \(row 1 of .*\), nor for 1 other; add a value, or"
    ):
        cut(numbered(5), groups=values)


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
    with pytest.raises(ConfigError, match="does not match"):
        split(cases[0][0], HALVES, groups="file:(z*)")
    sides = split(cases[0][0], {"train": ["a"], "val": ["b"]}, by="who")  # as before, without those that have none
    assert [len(side) for side in sides.values()] == [3, 3]
