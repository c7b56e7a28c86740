"""Tables of files where several things meet: stages, subsets, dropped rows, and tables that change."""

import os

import numpy as np
import pyarrow as pa
import pytest
from support.sources.oracle import read

from lit_async_data import (
    AsyncDataModule,
    ConcatSource,
    ManifestSource,
    SubsetSource,
    split,
)
from lit_async_data.errors import ConfigError, ManifestError, ResumeError


def csv(tmp_path, name, *lines):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path / name)


def labels(source, key="y"):
    return read(source, range(len(source)))[key].tolist()


def test_numbers_in_validation_are_classes_where_training_has_classes(tmp_path):
    train = ManifestSource(csv(tmp_path, "train.csv", "y", "2a", "10", "3"), {"y": "y"})
    val = ManifestSource(csv(tmp_path, "val.csv", "y", "3", "10", "3"), {"y": "y"})
    dm = AsyncDataModule(train=train, val=val, loader={"batch_size": 3})
    assert dm.classes == {"y": ("10", "2a", "3")}
    assert labels(dm.sources["val"][0]) == [2, 0, 2]
    other = ManifestSource(csv(tmp_path, "other.csv", "y", "4"), {"y": "y"})
    with pytest.raises(ManifestError, match=r"row 0.*'4' is not one of the classes 10, 2a, 3"):
        AsyncDataModule(train=train, val=other, loader={"batch_size": 3})
    again = AsyncDataModule(test=val, loader={"batch_size": 3})
    again.load_state_dict(dm.state_dict())
    assert labels(again.sources["test"][0]) == [2, 0, 2]
    assert again.num_classes == {"y": 3}


def test_classes_in_validation_where_training_has_numbers_are_refused(tmp_path):
    train = ManifestSource(csv(tmp_path, "train.csv", "y", "1", "2"), {"y": "y"})
    val = ManifestSource(csv(tmp_path, "val.csv", "y", "a", "2"), {"y": "y"})
    with pytest.raises(ConfigError, match=r"val: y holds classes, but numbers in the first stage; set kind: class"):
        AsyncDataModule(train=train, val=val, loader={"batch_size": 2})


@pytest.mark.parametrize("dtype", [None, "int32", "float32"])
def test_other_classes_keep_type_and_what_is_ignored(dtype):
    field = {"name": "y", "null": "ignore", "dtype": dtype}
    source = ManifestSource(pa.table({"y": ["b", None, "a"]}), {"y": field})
    changed = source.with_classes({"y": ["z", "a", "b"]})
    assert labels(changed) == [2, -100, 1]
    assert changed.spec["y"].dtype == np.dtype(dtype or "int64")
    assert (changed.spec["y"].classes, source.spec["y"].classes) == (("z", "a", "b"), ("a", "b"))
    with pytest.raises(ManifestError, match="'b' is not one of") as caught:
        source.with_classes({"y": ["a", "c"]})
    assert caught.value.row == 0
    given = ManifestSource(pa.table({"y": ["b"]}), {"y": {**field, "classes": ["b", "c"]}})
    assert given.with_classes({"y": ["c", "b"]}).spec["y"].classes == ("b", "c")


def test_sources_in_a_row_take_the_classes_of_training():
    train = ManifestSource(pa.table({"y": ["a", "b", "c"]}), {"y": "y"})
    val = ManifestSource(pa.table({"y": ["c", "a"]}), {"y": "y"})
    dm = AsyncDataModule(train=train, val=ConcatSource([val, val]), loader={"batch_size": 2})
    assert labels(dm.sources["val"][0]) == [2, 0, 2, 0]
    subset = AsyncDataModule(train=train, val=SubsetSource(val, [0]), loader={"batch_size": 2})
    assert labels(subset.sources["val"][0]) == [2]


def test_the_number_of_classes_is_that_of_the_checkpoint():
    dm = AsyncDataModule(train=ManifestSource(pa.table({"y": ["a", "c"]}), {"y": "y"}), loader={"batch_size": 2})
    assert dm.num_classes == {"y": 2}
    dm.load_state_dict({"classes": {"y": ["a", "b", "c"]}})
    assert dm.num_classes == {"y": 3}
    with pytest.raises(ResumeError, match=r"row 1.*'c' is not one of"):
        dm.load_state_dict({"classes": {"y": ["a", "b"]}})


def test_so_many_different_texts_are_no_classes(tmp_path):
    table = pa.table({"p": [f"a/{number}" for number in range(2**16 + 1)]})
    with pytest.raises(ConfigError, match=r"fields.y.classes: 65537 distinct texts, which seem to be ids or paths"):
        ManifestSource(table, {"y": "p"})


def test_a_row_that_one_field_drops_counts_for_no_other():
    table = pa.table({"id": ["a", "b", "b"], "x": [1.5, 2.5, None], "y": ["owl", "auk", "rare"], "z": [1, 2, None]})
    source = ManifestSource(table, {"x": {"name": "x", "null": "drop"}, "y": "y", "z": "z"}, id="id")
    assert len(source) == 2
    assert source.spec["y"].classes == ("auk", "owl")
    assert source.with_classes({"y": ["auk", "owl"]}).spec == source.spec
    assert labels(source, "z") == [1, 2]


def test_a_dropped_row_needs_no_value_that_fits():
    table = pa.table({"y": [1, None, 3], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, None]]})
    fields = {"y": {"name": "y", "null": "drop", "dtype": "uint8"}, "v": {"name": "v", "null": "drop"}}
    source = ManifestSource(table, fields)
    assert labels(source) == [1]
    assert source.spec["y"].dtype == np.uint8
    assert source.locate([0])[0].row == 0


@pytest.mark.parametrize("groups", ["file", r"file:(\d+)_"])
def test_files_are_never_on_two_sides_however_they_are_named(groups, tmp_path):
    """200 files of 20 patients, each named twice, in two ways."""
    (tmp_path / "p").mkdir()
    names = [f"p/{patient}_{visit}.npy" for patient in range(20) for visit in range(10)]
    np.save(tmp_path / names[0], np.zeros(1))
    for name in names[1:]:
        (tmp_path / name).hardlink_to(tmp_path / names[0])
    one, other = (
        ManifestSource(pa.table({"x": [prefix + name for name in names]}), ["x"], root=tmp_path)
        for prefix in ("", "./")
    )
    sides = split(ConcatSource([one, SubsetSource(other, range(0, 200, 3))]), {"train": 0.5, "val": 0.5}, groups=groups)
    assert sides.overlap == 0
    train, val = (
        {os.path.basename(place.path).partition("_" if "(" in groups else "!")[0] for place in located}
        for side in sides.values()
        for located in [side.locate(side.ids(np.arange(len(side))))]
    )
    assert not train & val


@pytest.mark.parametrize("cell", ["nan", "NA", "NaN", " N/A "])
def test_words_for_nothing_are_no_numbers(tmp_path, cell):
    path = csv(tmp_path, "t.csv", "y", "1", f'"{cell}"', "3")
    with pytest.raises(ManifestError, match=r"row 1.*no value"):
        ManifestSource(path, {"y": "y"})
    source = ManifestSource(path, {"y": {"name": "y", "null": "ignore"}})
    assert (labels(source), source.spec["y"].dtype) == ([1, -100, 3], np.int64)


@pytest.mark.parametrize("cell", ["0x10", "inf", "-Infinity"])
def test_what_reads_as_a_number_and_is_no_label_is_refused(tmp_path, cell):
    with pytest.raises(ManifestError, match=r"row 1.*is not a finite decimal number"):
        ManifestSource(csv(tmp_path, "t.csv", "y", "1", cell), {"y": "y"})


def test_a_file_of_the_table_of_which_nothing_is_left_is_no_part(tmp_path):
    csv(tmp_path, "a.csv", "y", "0", "0")
    csv(tmp_path, "b.csv", "y", *map(str, range(1, 11)))
    source = ManifestSource(f"{tmp_path}/*.csv", {"y": "y"}, filters=[["y", ">", 0]])
    (part,) = source.parts
    assert (os.path.basename(part.file), part.samples) == ("b.csv", 10)
    places = source.places()
    assert places.which.tolist() == [0] * 10
    assert places.rows.tolist() == list(range(10))
    sides = split(source, {"train": 0.8, "val": 0.2}, groups="time")
    assert labels(sides["val"]) == [9, 10]
