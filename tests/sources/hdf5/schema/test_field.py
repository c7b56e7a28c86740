"""What users may ask for: fields, files, groups and layouts."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.stored_fields import ROWS, numbers
from support.sources.oracle import check, refused

from lit_async_data import ConfigError, Field, FormatError, HDF5Source, MissingError


def test_a_field_is_a_name_a_field_or_a_mapping(h5):
    fields = {"a": "data", "b": Field("data", column=1), "c": {"name": "data", "column": 1}}
    model = check(h5(data=numbers((ROWS, 3))), fields)
    assert Field.of({"name": "y", None: "drop"}).null == "drop"  # YAML reads null as None
    assert model.values["c"].tolist() == numbers((ROWS, 3))[:, 1].tolist()


@pytest.mark.parametrize("key", ["y", "a.b"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"colum": 1}, ".colum: no such option; did you mean column?"),
        ({"column": -1}, ".column: -1"),
        ({"window": (3, 3)}, ".window: (3, 3)"),
        ({"window": 10**20}, ".window: 100000000000000000000 reaches further"),
        ({"dtype": "float31"}, ".dtype: 'float31'"),
        ({"classes": "cat"}, ".classes: 'cat' is not a list of names"),
        ({"window": (0, 3), "pad": "first"}, ".pad: 'first' is not one of last, zero"),
        ({"pad": "last"}, ".pad: 'last' needs a window"),
        ({"offsets": []}, ".offsets: [] is neither the name of a dataset nor a list of whole numbers"),
        ({"offsets": [-1, 0], "window": (0, 2)}, ".offsets: a window and a list of rows are two choices of rows"),
        ({"offsets": [-1, 0], "lengths": "n"}, ".lengths: one of offsets, starts, ends, lengths is enough"),
        ({"ragged": "no"}, ".ragged: "),
        ({"ragged": "concat", "attr": "a"}, ".ragged: "),
        ({"ragged": "concat", "pad_side": "left"}, ".pad_side: "),
        ({"patch": (8, 0)}, ".patch: 0 is not a whole number from 1"),
        ({"patch": (8, True)}, ".patch: True"),
        ({"patch": (8, 8), "stride": (2,)}, ".stride: "),
        ({"stride": (2,)}, ".stride: (2,) needs patch="),
        ({"patch": (8, 8), "window": (0, 2)}, ".window: does not apply to patches"),
        ({"kind": "id"}, ".kind: 'id'"),
        ({"null": "none"}, ".null: 'none'"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_field_is_named(h5, key, wrong, said):
    refused(ConfigError, [f"fields.{key}{said}"], h5(data=numbers((ROWS, 3))), {key: {"name": "data", **wrong}})


FIELDS = {"x": "signal", "y": "label"}


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [("patient_?", [100, 200]), ("*_10", [1000]), ("patient_1*", [100, 1000]), ("*", [100, 200, 1000])],
)
def test_a_pattern_is_of_the_letters_that_file_names_have_and_reaches_one_level(patients, pattern, labels):
    path = patients(counts={1: 1, 2: 1, 10: 1})
    with h5py.File(path, "r+") as file:
        file["patient_1/patient_2/label"] = np.arange(7)
        if pattern != "*":
            file["more/patient_4/label"] = file["other"] = np.arange(7)
    assert check(path, FIELDS, group=pattern).values["y"].tolist() == labels


def test_a_list_of_groups_and_patterns_is_taken_in_its_order(patients):
    path = patients()
    model = check(path, FIELDS, group=["patient_10", "patient_?"])
    assert [name for _, name, _ in model.parts] == ["/patient_10", "/patient_1", "/patient_2"]
    refused(MissingError, ["patient_3"], path, FIELDS, group=["patient_1", "patient_3"])
    refused(ConfigError, ["group: patient_1 is named twice"], path, FIELDS, group=["patient_1", "patient_*"])
    refused(ConfigError, ["group: []"], path, FIELDS, group=[])
    refused(ConfigError, ["group: 3"], path, FIELDS, group=["patient_1", 3])


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("patient_*", ["patient_2", "signal"]),
        ("patient_3", ["patient_3"]),
        ("study/patient_*", ["study"]),
        ("nobody_*", ["nobody_*"]),
    ],
)
def test_a_group_or_a_dataset_that_is_not_there_is_named_with_its_file(patients, group, said):
    paths = [patients(f"{name}.h5", {1: 4, 2: 5}) for name in "ab"]
    with h5py.File(paths[0], "r+") as file:
        del file["patient_2/signal"]
    refused(MissingError, [paths[0], *said], paths, FIELDS, group=group)


def test_the_names_of_parts_differ_and_outlive_a_move_and_more_files(patients, tmp_path):
    paths = [patients(f"site{n}.h5") for n in (1, 2)]

    def names(*files):
        return [part.name for part in HDF5Source(list(files), FIELDS, group="patient_*").parts]

    before = names(*paths)
    assert len(set(before)) == 6
    assert names(paths[0]) == before[:3]
    assert names(paths[1]) == before[3:]
    (tmp_path / "moved").mkdir()
    assert names(*[shutil.move(path, tmp_path / "moved") for path in paths]) == before


@pytest.mark.parametrize("options", [{"group": "*"}, {"sample": "dataset"}])
def test_names_that_are_not_text_are_an_error_and_not_left_out(options, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["s1/x"], file["sx"] = [1], [1]
        file.create_dataset(b"s\xe9", data=[1])
    with pytest.raises(FormatError, match=r"x\.h5:/: holds the name b's\\xe9', which is not UTF-8; rename it"):
        HDF5Source(tmp_path / "x.h5", {"x": "x" if "group" in options else "s*"}, **options)


def test_a_list_takes_files_globs_and_path_objects_in_its_own_order(h5, tmp_path):
    one, _, ten = (h5(f"scan{number}.h5", y=[number] * 2) for number in (1, 2, 10))
    source = HDF5Source([ten, Path(one), str(tmp_path / "scan[2].h5")], ["y"])
    assert source.column("y").tolist() == [10, 10, 1, 1, 2, 2]
    assert len(HDF5Source(h5("scan[1]*.h5", y=np.arange(3)), ["y"])) == 3  # a name, if there is such a file


def test_arrays_are_lists():
    given = {"window": (-1, 2), "offsets": (-3, 0), "classes": ("a", "b")}
    for name, values in given.items():
        assert Field("x", **{name: np.array(values)}) == Field("x", **{name: values})
    assert Field("x", offsets=np.array([-0.5, 0.0]), time="t").steps == (-0.5, 0.0)
