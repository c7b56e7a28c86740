"""Recordings as people store them: windows, groups, several files and chosen rows, literally, and what is refused."""

import contextlib
import logging
import pickle
import shutil

import h5py
import numpy as np
import pytest
from support.files.hdf5 import numbered
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, SubsetSource
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, MissingError
from lit_async_data.lightning.summary import summary_lines


def length(path, fields, **options):
    with contextlib.closing(HDF5Source(path, fields, **options)) as source:
        return len(source)


@pytest.mark.parametrize("stride", [0, -1, 1.5, "2", True])
def test_a_stride_that_is_no_number_of_rows_is_named(h5, stride):
    refused(ConfigError, ["stride: ", repr(stride)], h5(y=np.arange(5)), {"y": "y"}, stride=stride)


def test_a_part_too_short_for_a_window_is_named_in_a_warning_and_gives_nothing(h5, caplog):
    path = h5(**{"p_1/x": np.arange(6), "p_2/x": np.arange(3), "p_3/x": np.arange(4)})
    fields = {"x": Field("x", window=(0, 4))}
    with caplog.at_level(logging.INFO):
        assert length(path, fields, group="p_*") == 4
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("p_2" in line for line in warned)
    assert not any("p_1" in line or "p_3" in line for line in warned)
    check(path, fields, group="p_*")


def test_where_every_part_is_too_short_that_is_an_error(h5):
    path = h5(x=np.arange(7))
    refused(FormatError, [path, 7, 12], path, {"x": Field("x", window=(0, 12))})
    refused(FormatError, [path, 7], path, {"x": Field("x", window=(-4, 1)), "y": Field("x", window=4)})
    groups = h5("g.h5", **{"p_1/x": np.arange(5), "p_2/x": np.arange(5)})
    refused(FormatError, [groups, "p_", 5, 12], groups, {"x": Field("x", window=(0, 12))}, group="p_*")


def test_samples_that_repeat_a_row_as_padding_overlap(h5):
    path = h5(x=np.arange(20))
    for window, overlap in ((0, 3), 2), ((4, 6), 5), ((-6, -4), 6):
        with contextlib.closing(HDF5Source(path, {"x": Field("x", window=window, pad="last")})) as source:
            assert source.chunks.overlap == overlap


def test_a_key_that_the_mask_needs_is_refused(h5):
    fields = {"x": Field("x", window=(0, 3), pad="last"), "x_mask": "x"}
    refused(ConfigError, ["x_mask", "the mask of x"], h5(x=np.arange(9)), fields)


def test_rows_that_begin_no_window_are_said(h5):
    path = h5(**{"p_1/x": np.arange(9), "p_2/x": np.arange(3), "p_3/x": np.arange(5)})
    for window, said in {
        (0, 4): "9 of 17 rows begin no window (the end of each part)",
        (-3, 1): "9 of 17 rows begin no window (the start of each part)",
        (-1, 3): "9 of 17 rows begin no window (the start and the end of each part)",
    }.items():
        source = HDF5Source(path, {"x": Field("x", window=window)}, group="p_*")
        assert f"; {said}; read" in repr(source)
        assert said in repr(SubsetSource(source, [0]))
        assert said in repr(ConcatSource([source, source]))
        with AsyncLoader(source, {"batch_size": 2}) as loader:
            assert summary_lines(loader)[0].endswith(f": x int64 (4,); {said}")
        source.close()
    options = {"fields": {"x": Field("x", window=(0, 4), pad="last")}}, {"stride": 3, "fields": ["x"]}
    for each in (*options, {"rows": [0, 1], "fields": {"x": Field("x", window=(0, 4))}}):
        assert "begin no window" not in repr(HDF5Source(path, group="p_*", **each))


def sparse_group(file, name, rows):
    group = file.create_group(name)
    group.attrs.update({"encoding-type": "csr_matrix", "shape": [rows, 4]})
    group["data"], group["indices"] = np.ones(rows, "f4"), np.arange(rows) % 4
    group["indptr"] = np.arange(rows + 1)


def ragged_group(file, name, rows):
    group = file.create_group(name)
    group["values"], group["offsets"] = np.ones(2 * rows, "f4"), 2 * np.arange(rows + 1)


def plain(file, name, rows):
    file[name] = numbered((rows, 2))


def one_axis(file, name, rows):
    """As some programs write what is empty."""
    file[name] = numbered((rows, 2)) if rows else np.array([])


def chunked(file, name, rows):
    file.create_dataset(name, (rows, 2), "i2", chunks=(3, 2), maxshape=(None, 2))


SIZES = {1: 3, 2: 0, 3: 4, 10: 0}


@pytest.mark.parametrize(
    ("write", "layout"),
    [(plain, None), (one_axis, "NC"), (chunked, None), (sparse_group, None), (ragged_group, None)],
)
def test_files_without_rows_are_left_out_with_one_line_that_lists_them(tmp_path, caplog, write, layout):
    for number, rows in SIZES.items():
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            write(file, "x", rows)
            file["y"] = np.full(rows, number)
    with contextlib.closing(HDF5Source(f"{tmp_path}/*.h5", ["x", "y"], layout=layout)) as source:
        said = f"2 of 4 parts hold no samples and are left out: {tmp_path}/2.h5, {tmp_path}/10.h5"
        assert caplog.messages == [said]
        assert read(source, np.arange(7))["y"].tolist() == [1, 1, 1, 3, 3, 3, 3]
        with contextlib.closing(pickle.loads(pickle.dumps(source))) as copied:
            assert read(copied, [0, 6])["y"].tolist() == [1, 3]


def test_groups_without_rows_are_left_out_too(h5, caplog):
    path = h5(**{f"p_{number}/x": np.arange(rows) for number, rows in SIZES.items()})
    check(path, {"x": Field("x", window=(0, 2))}, group="p_*")
    assert caplog.messages == [f"2 of 4 parts hold no samples and are left out: {path}:/p_2, {path}:/p_10"]


def test_where_no_part_has_rows_that_is_an_error(h5):
    empty = {"data": np.zeros((0, 3)), "labels": np.arange(0)}
    one, two = h5("1.h5", **empty), h5("2.h5", **empty)
    refused(FormatError, [f"{one}:/data", "(0, 3)", "no samples"], one, {"x": "data", "y": "labels"})
    refused(FormatError, [one, two, "none of them holds samples"], [one, two], {"x": "data", "y": "labels"})


def test_a_field_without_rows_beside_one_with_rows_is_an_error(h5):
    paths = [h5("1.h5", x=np.arange(3), y=np.arange(3)), h5("2.h5", x=np.arange(3), y=np.arange(0))]
    refused(FormatError, [f"{paths[1]}:/y", "(0,)", "no samples"], paths, {"x": "x", "y": "y"})


def test_chosen_rows_count_parts_without_rows_as_nothing(h5):
    paths = [h5(f"{n}.h5", y=np.arange(n, n + rows), chosen=np.arange(rows)) for n, rows in ((0, 3), (50, 0), (80, 2))]
    assert check(paths, {"y": "y"}, rows=np.array([0, 2, 3])).values["y"].tolist() == [0, 2, 80]
    assert read_from(paths, {"y": "y"}, rows="chosen")["y"].tolist() == [0, 1, 2, 80, 81]


@pytest.mark.parametrize("write", [sparse_group, ragged_group])
def test_samples_without_a_single_value_are_not_taken_for_no_samples(tmp_path, write):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        write(file, "x", 3)
        for name, dataset in list(file["x"].items()):
            ends = name in {"indptr", "offsets"}
            del file["x"][name]
            file["x"][name] = np.zeros(len(dataset) if ends else 0, "i8")
    refused(FormatError, [f"{path}:/x", "3 rows without a single value"], path, {"x": "x"})


def patients(h5, name="x.h5", counts={1: 4, 2: 5, 10: 3}, prefix="", first=0):  # noqa: B006  # it is not changed
    """Groups patient_1, patient_10, patient_2, in which every value encodes its place."""
    datasets = {}
    for number, count in counts.items():
        values = first + 100 * number + np.arange(count)
        datasets[f"{prefix}patient_{number}/label"] = values
        datasets[f"{prefix}patient_{number}/signal"] = {
            "data": np.repeat(values[:, None], 3, axis=1).astype("f4"),
            "chunks": (min(2, count), 3),
            "compression": "gzip",
        }
    return h5(name, **datasets)


FIELDS = {"x": "signal", "y": "label"}


@pytest.mark.parametrize("group", ["train", "/train", "train/", "/train/"])
def test_a_group_stands_before_the_names_of_fields(h5, group):
    path = h5(
        **{
            "train/x": numbered((5, 2)),
            "train/deep/y": np.arange(5),
            "y": np.arange(50, 55),
            "x": numbered((9,)),
        }
    )
    model = check(path, {"x": "x", "y": "deep/y", "other": "/y"}, group=group)
    assert model.values["y"].tolist() == [0, 1, 2, 3, 4]
    assert model.values["other"].tolist() == [50, 51, 52, 53, 54]
    assert model.parts == [(path, "/train", 5)]


def test_a_group_stands_before_the_names_of_indices_too(h5):
    path = h5(
        **{"train/who": np.array([1, 0, 1]), "train/age": np.array([5, 6]), "age": np.array([7, 8]), "who": [0, 0]}
    )
    fields = {
        "here": Field("age", lookup="who"),
        "root": Field("/age", lookup="who"),
        "far": Field("/age", lookup="/train/who"),
    }
    model = check(path, fields, group="train")
    assert [model.values[key].tolist() for key in fields] == [[6, 5, 6], [8, 7, 8], [8, 7, 8]]


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [("patient_?", [100, 200]), ("*_10", [1000]), ("patient_1*", [100, 1000]), ("*", [100, 200, 1000])],
)
def test_a_pattern_is_of_the_letters_that_file_names_have(h5, pattern, labels):
    model = check(patients(h5, counts={1: 1, 2: 1, 10: 1}), FIELDS, group=pattern)
    assert model.values["y"].tolist() == labels


def test_a_pattern_reaches_one_level_only(h5):
    path = patients(h5, counts={1: 2, 3: 2})
    with h5py.File(path, "r+") as file:
        file["patient_1/patient_2/label"] = np.arange(7)
        file["more/patient_4/label"] = np.arange(7)
        file["other"] = np.arange(7)
    assert check(path, {"y": "label"}, group="patient_*").values["y"].tolist() == [100, 101, 300, 301]


@pytest.mark.parametrize("above", ["study", "/study", "study/train"])
def test_the_levels_above_a_pattern_are_names(h5, above):
    path = patients(h5, prefix=above.strip("/") + "/")
    model = check(path, FIELDS, group=above + "/patient_*")
    assert [group for _, group, _ in model.parts] == [f"/{above.strip('/')}/patient_{n}" for n in (1, 2, 10)]


def test_a_link_to_a_group_matches_by_its_own_name(h5):
    path = patients(h5, counts={1: 2})
    with h5py.File(path, "r+") as file:
        file["elsewhere/label"] = np.array([7, 8, 9])
        file["patient_0"] = h5py.SoftLink("/elsewhere")
    assert check(path, {"y": "label"}, group="patient_*").values["y"].tolist() == [7, 8, 9, 100, 101]


def test_a_list_of_groups_and_patterns_is_taken_in_its_order(h5):
    path = patients(h5)
    model = check(path, FIELDS, group=["patient_10", "patient_?"])
    assert [name for _, name, _ in model.parts] == ["/patient_10", "/patient_1", "/patient_2"]
    refused(MissingError, ["patient_3"], path, FIELDS, group=["patient_1", "patient_3"])
    refused(ConfigError, ["group: patient_1 is named twice"], path, FIELDS, group=["patient_1", "patient_*"])
    refused(ConfigError, ["group: []"], path, FIELDS, group=[])
    refused(ConfigError, ["group: 3"], path, FIELDS, group=["patient_1", 3])


def test_parts_without_groups_are_files(h5):
    paths = [h5(f"{n}.h5", y=np.arange(n)) for n in (3, 2)]
    with contextlib.closing(HDF5Source(paths, {"y": "y"})) as source:
        assert [(part.file, part.group, part.samples) for part in source.parts] == [
            (paths[0], "/", 3),
            (paths[1], "/", 2),
        ]
        assert source.locate([4, 1]) == [(paths[1], "/", 1), (paths[0], "/", 1)]


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("patient_*", ["patient_2", "signal"]),
        ("patient_2", ["patient_2", "signal"]),
        ("patient_3", ["patient_3"]),
        ("study/patient_*", ["study"]),
        ("nobody_*", ["nobody_*"]),
    ],
)
def test_a_group_or_a_dataset_that_is_not_there_is_named_with_its_file(h5, group, said):
    paths = [patients(h5, f"{name}.h5", {1: 4, 2: 5}) for name in "ab"]
    with h5py.File(paths[0], "r+") as file:
        del file["patient_2/signal"]
    refused(MissingError, [paths[0], *said], paths, FIELDS, group=group)


def test_the_names_of_parts_differ_and_outlive_a_move_and_more_files(h5, tmp_path):
    paths = [patients(h5, f"site{n}.h5") for n in (1, 2)]

    def names(*files):
        with contextlib.closing(HDF5Source(list(files), FIELDS, group="patient_*")) as source:
            return [part.name for part in source.parts]

    before = names(*paths)
    assert len(set(before)) == 6
    assert names(paths[0]) == before[:3]
    assert names(paths[1]) == before[3:]
    (tmp_path / "moved").mkdir()
    assert names(*[shutil.move(path, tmp_path / "moved") for path in paths]) == before


ORDERED = np.array([2, 3, 11, 17])
ROWS = {
    "ordered": ORDERED,
    "any order": np.array([17, 0, 11, 3, 19, 4]),
    "uint8": ORDERED.astype("u1"),
    "int32": ORDERED.astype(">i4"),
    "mask": np.isin(np.arange(20), ORDERED),
    "one": np.array([19]),
    "all": np.ones(20, bool),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_may_be_chosen(h5, rows):
    path = h5(
        data={"data": numbered((20, 3)), "chunks": (8, 2), "compression": "gzip"},
        labels=np.arange(20),
        chosen=ROWS[rows],
    )
    for chosen in (ROWS[rows], "chosen", "/chosen"):
        model = check(path, {"x": "data", "y": "labels"}, layout="NC", rows=chosen)
        wanted = ROWS[rows]
        assert model.values["y"].tolist() == (np.flatnonzero(wanted) if wanted.dtype == bool else wanted).tolist()


def test_chosen_rows_of_parts_are_counted_over_all_of_them(h5):
    for rows in (np.array([3, 4, 9]), np.isin(np.arange(12), [3, 4, 9])):
        model = check(patients(h5), FIELDS, group="patient_*", rows=rows)
        assert model.values["y"].tolist() == [103, 200, 1000]


def test_chosen_rows_that_go_back_to_an_earlier_part_point_to_a_subset(h5):
    refused(ConfigError, ["rows", "SubsetSource"], patients(h5), FIELDS, group="patient_*", rows=np.array([9, 4, 3]))


def test_chosen_rows_in_the_file_are_those_of_each_part_or_the_same_for_all(h5):
    path = patients(h5)
    with h5py.File(path, "r+") as file:
        for number, rows in {1: [3, 0], 2: [4], 10: [2, 1]}.items():
            file[f"patient_{number}/split/train"] = rows
        file["first"] = [0]
    check(path, FIELDS, group="patient_*", rows="split/train")
    assert check(path, FIELDS, group="patient_*", rows="/first").values["y"].tolist() == [100, 200, 1000]


@pytest.mark.parametrize("row", [0, 1, 26, 28])
def test_a_window_around_a_chosen_row_that_leaves_its_part_is_refused(h5, row):
    path = h5(data=numbered((29,)), split=np.array([5, row, 7]))
    fields = {"x": Field("data", window=(-2, 4))}
    for rows in (np.array([5, row, 7]), "split"):
        refused(AsyncDataError, ["rows", row], path, fields, rows=rows)


def test_a_window_around_a_chosen_row_does_not_reach_into_the_next_part(h5):
    path = h5(**{"p_1/x": np.arange(10), "p_2/x": np.arange(10)})
    fields = {"x": Field("x", window=(0, 3))}
    check(path, fields, group="p_*", rows=np.array([0, 7, 10, 17]))
    refused(AsyncDataError, ["rows", 8], path, fields, group="p_*", rows=np.array([0, 8, 12]))


WRONG = {
    "too large": (np.array([1, 20]), [20]),
    "far too large": (np.array([10**12]), [10**12]),
    "negative": (np.array([1, -1]), [-1]),
    "mask too short": (np.ones(19, bool), [19]),
    "mask too long": (np.ones(21, bool), [21]),
    "empty": (np.array([], "i8"), []),
    "empty mask": (np.zeros(20, bool), []),
    "no whole numbers": (np.array([1.0, 2.0]), ["float64"]),
    "two axes": (np.array([[1, 2], [3, 4]]), []),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("in_file", [False, True])
def test_wrong_rows_are_named(h5, wrong, in_file):
    rows, said = WRONG[wrong]
    path = h5(labels=np.arange(20), chosen=rows)
    refused(AsyncDataError, ["rows", *said], path, {"y": "labels"}, rows="chosen" if in_file else rows)


@pytest.mark.parametrize("rows", [np.array([1]), "chosen"], ids=str)
def test_rows_and_a_stride_exclude_each_other(h5, rows):
    path = h5(y=np.arange(20), chosen=np.array([1]))
    refused(ConfigError, ["rows", "stride"], path, {"y": "y"}, rows=rows, stride=2)


def test_rows_that_are_changed_afterwards_change_nothing(h5):
    rows = np.array([3, 1])
    with contextlib.closing(HDF5Source(h5(y=np.arange(20)), {"y": "y"}, rows=rows)) as source:
        rows[:] = 7
        assert read(source, [0, 1])["y"].tolist() == [3, 1]
