"""Samples of all parts: chosen rows, text, tables; and what is left out."""

import logging
import pickle
import re
import textwrap

import h5py
import hydra
import jsonargparse
import numpy as np
import omegaconf
import pandas as pd
import pyarrow as pa
import pytest
from support.files.hdf5 import numbered
from support.files.stored_fields import set_attributes
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    Balanced,
    ConcatSource,
    ConfigError,
    Field,
    FormatError,
    HDF5Source,
    LoaderOptions,
    ManifestError,
    ManifestSource,
    MissingError,
    SubsetSource,
    split,
)
from lit_async_data.lightning.display import summary_lines
from lit_async_data.sources.contract.source import read as read_source
from lit_async_data.testing import check_contract


def test_a_file_and_a_link_to_it_are_refused(h5, tmp_path):
    path = h5(data=np.ones(3))
    (tmp_path / "latest.h5").symlink_to(path)
    refused(ConfigError, ["same file, whose samples would count twice"], [path, tmp_path / "latest.h5"], ["data"])


@pytest.mark.parametrize("stride", [0, 1.5, "2", True])
def test_a_stride_that_is_no_number_of_rows_or_goes_with_rows_is_named(h5, stride):
    path = h5(y=np.arange(5), chosen=[1])
    refused(ConfigError, ["stride: ", repr(stride)], path, {"y": "y"}, stride=stride)
    for rows in ([1], "chosen"):
        refused(ConfigError, ["rows", "stride"], path, {"y": "y"}, rows=rows, stride=2)


def test_rows_that_begin_no_window_are_said_and_parts_too_short_for_one_named(h5, caplog):
    path = h5(**{"p_1/x": np.arange(9), "p_2/x": np.arange(3), "p_3/x": np.arange(5)})
    for window, said in {
        (0, 4): "9 of 17 rows begin no window (the end of each part)",
        (-3, 1): "9 of 17 rows begin no window (the start of each part)",
        (-1, 3): "9 of 17 rows begin no window (the start and the end of each part)",
    }.items():
        caplog.clear()
        source = HDF5Source(path, {"x": Field("x", window=window)}, group="p_*")
        assert (len(source), re.findall("p_.", caplog.text)) == (8, ["p_2"])
        assert f"; {said}; read" in repr(source)
        assert said in repr(SubsetSource(source, [0]))
        assert said in repr(ConcatSource([source, source]))
        with AsyncLoader(source, {"batch_size": 2}) as loader:
            assert summary_lines(loader)[0].endswith(f": x int64 (4,); {said}")
    options = {"fields": {"x": Field("x", window=(0, 4), pad="last")}}, {"stride": 3, "fields": ["x"]}
    for each in (*options, {"rows": [0, 1], "fields": {"x": Field("x", window=(0, 4))}}):
        assert "begin no window" not in repr(HDF5Source(path, group="p_*", **each))


WITHOUT_ROWS = {
    "one axis, as some programs write what is empty": lambda rows: {"x": numbered((rows, 2)) if rows else np.array([])},
    "chunks": lambda rows: {"x": {"shape": (rows, 2), "dtype": "i2", "chunks": (3, 2), "maxshape": (None, 2)}},
    "ragged": lambda rows: {"x/values": np.ones(2 * rows, "f4"), "x/offsets": 2 * np.arange(rows + 1)},
    "sparse": lambda rows: {"x/data": np.ones(rows), "x/indices": np.arange(rows), "x/indptr": np.arange(rows + 1)},
}


@pytest.mark.parametrize("kind", WITHOUT_ROWS)
def test_files_without_rows_are_left_out_with_one_line_that_lists_them(h5, caplog, kind):
    sizes, made = {1: 3, 2: 0, 3: 4, 10: 0}, WITHOUT_ROWS[kind]
    paths = [h5(f"{number}.h5", **made(rows), y=np.full(rows, number)) for number, rows in sizes.items()]
    if kind == "sparse":
        for path, rows in zip(paths, sizes.values(), strict=True):
            set_attributes(path, "x", **{"encoding-type": "csr_matrix", "shape": [rows, 4]})
    source = HDF5Source(paths, ["x", "y"], layout="NC" if kind.startswith("one axis") else None)
    assert caplog.messages == [f"2 of 4 parts hold no samples and are left out: {paths[1]}, {paths[3]}"]
    assert read(source, np.arange(7))["y"].tolist() == [1, 1, 1, 3, 3, 3, 3]
    assert read(pickle.loads(pickle.dumps(source)), [0, 6])["y"].tolist() == [1, 3]


def test_where_no_part_has_rows_that_is_an_error(h5):
    empty = {"data": np.zeros((0, 3)), "labels": np.arange(0)}
    one, two = h5("1.h5", **empty), h5("2.h5", **empty)
    refused(FormatError, [f"{one}:/data", "(0, 3)", "no samples"], one, {"x": "data", "y": "labels"})
    refused(FormatError, [one, two, "no part holds samples"], [one, two], {"x": "data", "y": "labels"})


def test_chosen_rows_count_parts_without_rows_as_nothing(h5):
    paths = [h5(f"{n}.h5", y=np.arange(n, n + rows), chosen=np.arange(rows)) for n, rows in ((0, 3), (50, 0), (80, 2))]
    assert check(paths, {"y": "y"}, rows=np.array([0, 2, 3])).values["y"].tolist() == [0, 2, 80]  # noqa: PD011
    assert read_from(paths, {"y": "y"}, rows="chosen")["y"].tolist() == [0, 1, 2, 80, 81]


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        ({"patient_1": [3], "patient_10": np.array([1, 0]), "patient_2": None}, [1, 0]),
        ({"/patient_10": np.arange(3) < 2, "x.h5:/patient_1": [False, False, False, True]}, [0, 1]),
        ([[3], np.array([], int), [1, 0]], [1, 0]),
        (([3], None, np.array([1, 0])), [1, 0]),
        (np.isin(np.arange(12), [3, 9, 10]), [0, 1]),
    ],
    ids=str,
)
def test_rows_are_chosen_by_part_in_each_form_alike(patients, rows, order):
    path = patients()
    source = HDF5Source(path, {"y": "label"}, group="patient_*", rows=rows)
    assert read(source, [0, 1, 2])["y"].tolist() == [103, *(1000 + row for row in order)]
    assert "; no row is chosen of 1 of 3 parts, such as" in repr(source)
    numbers = np.array([3, *(9 + row for row in order)])
    whole = HDF5Source(path, {"y": "label"}, group="patient_*", rows=numbers)
    assert source.fingerprint() == whole.fingerprint()
    assert pickle.loads(pickle.dumps(source)).fingerprint() == source.fingerprint()


@pytest.mark.parametrize("rows", ["{patient_1: [3], patient_10: [1]}", "[[3], [], [1]]", "[3, 10]"])
def test_rows_come_from_yaml_too(patients, rows):
    text = f"path: {patients()}\nfields: {{y: label}}\ngroup: patient_*\nrows: {rows}\n"
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HDF5Source, "source")
    parsed = parser.parse_string("source:\n" + textwrap.indent(text, "  "))
    hydras = omegaconf.OmegaConf.create(f"_target_: lit_async_data.HDF5Source\n{text}")
    for source in (HDF5Source(**parsed.source.as_dict()), hydra.utils.instantiate(hydras)):
        assert read(source, [0, 1])["y"].tolist() == [103, 1001]


def test_rows_are_chosen_by_file_by_any_end_of_its_path_and_files_without_rows_count_in_a_list(h5, tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    paths = [h5(f"{name}.h5", y=np.arange(rows)) for name, rows in (("a/1", 9), ("b/2", 0), ("c/1", 9))]
    for rows in ({"c/1": [7], "a/1.h5": [3]}, {paths[2]: [7], paths[0]: [3], "2": []}, [[3], [], [7]]):
        source = HDF5Source(paths, {"y": "y"}, rows=rows)
        assert [(place.file, place.row) for place in source.locate([0, 1])] == [(paths[0], 3), (paths[2], 7)]
    for rows, said in (
        ({"1": [3]}, ["'1' is the end of no part, or of several", *paths]),
        ({"a/1": [3], "a/1.h5": [4]}, ["'a/1.h5' names a part that another key names"]),
        ({"2": [0], "a/1": [3]}, [f"{paths[1]} has no rows to choose"]),
        ({"a/1": [9]}, [f"9 is not one of the 9 rows of {paths[0]}"]),
        ({"a/1": [0.5]}, [f"for {paths[0]}: it holds neither", "float64", "a mapping from each to an array"]),
        ({}, ["choose no row of any part"]),
        ([[3], [7]], ["a list for 2 parts, but there are 3", *paths]),
    ):
        refused(ConfigError, ["rows: ", *said], paths, {"y": "y"}, rows=rows)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([9, 4, 3], ["row 4, in ", "/patient_2, comes after row 9, in ", "/patient_10", "SubsetSource"]),
        ([12], ["12 is not one of the 12 rows of all parts"]),
        ([True] * 4, ["a mask of 4 values, but there are 12 rows"]),
        ([1, 8], ["4 is one of the 5 rows of ", "/patient_2", "others Field(pad='last')"]),
    ],
    ids=str,
)
def test_messages_say_that_an_array_counts_over_all_parts_and_how_to_choose_by_part(patients, rows, said):
    fields = {"y": Field("label", window=(0, 2))}
    counted = ["over the rows of all 3 parts, put end to end", "rows={'patient_1': […], …}", "a list with an array"]
    error = refused(ConfigError, [*said, *counted], patients(), fields, group="patient_*", rows=np.array(rows))
    assert "sort" not in str(error)
    alone = refused(ConfigError, ["rows: "], patients("y.h5"), fields, group="patient_1", rows=np.array([4]))
    assert "parts, put end" not in str(alone)


@pytest.mark.parametrize(
    ("window", "said"),
    [(32, "its window leaves them; windows inside them need rows 0 to 48"), (99, "no row has its windows inside: ")],
)
def test_a_row_whose_window_leaves_the_rows_is_still_one_of_them(h5, window, said):
    fields = {"x": Field("data", window=(0, window))}
    path = h5(data=np.arange(80.0))
    refused(ConfigError, ["rows: 50 is one of the 80 rows of ", said], path, fields, rows=[50])
    refused(ConfigError, ["rows: 0.2 s at 250 Hz, row 50, is one of", said], path, fields, rows=[0.2], rate=250)
    refused(ConfigError, ["rows: 4 s at 250 Hz, row 1000, is not one of"], path, fields, rows=[4.0], rate=250)


def test_windows_that_no_part_has_are_answered_by_ways_out(h5):
    path = h5(x=numbered((3, 10, 4)))
    windows = {"x": Field("x", window=(0, 5))}
    said = ["x.h5 (3 rows): shorter than the windows of a sample, 5 rows", "Field(pad='last')", "N in layout="]
    refused(FormatError, said, path, windows, layout={"x": "NTX"})
    assert HDF5Source(path, windows, layout={"x": "TNX"}).spec["x"].shape == (5, 3, 4)


TEXTS = [["owl", "jay", "owl", "emu"], ["jay", "auk"]]
ALL = [text for texts in TEXTS for text in texts]


def first_of(dm):
    with dm.val_dataloader() as loader:
        return next(loader)


@pytest.fixture
def two(h5, tmp_path):
    for number, (texts, dtype) in enumerate(zip(TEXTS, ("S5", h5py.string_dtype()), strict=True)):
        rows = np.arange(len(texts))
        events = np.array([(0, text) for text in texts], [("onset", "i8"), ("bird", dtype)])
        h5(f"{number}.h5", x=rows, y={"data": texts, "dtype": dtype}, patient=10 * number + rows, events=events)
    return tmp_path / "*.h5"


def test_text_is_classes_in_order_over_all_files(two):
    fields = {
        "x": "x",
        "y": "y",
        "given": Field("y", classes=["owl", "jay", "emu", "auk"], dtype="uint8"),
        "id": Field("y", kind="text"),
        "patient": Field("patient", kind="text"),
        "member": "events.bird",
        "pair": Field("y", window=(-1, 1), pad="last"),
    }
    source = HDF5Source(two, fields)
    check_contract(source)
    spec = source.spec
    assert spec["y"].classes == spec["id"].texts == ("auk", "emu", "jay", "owl")
    assert (spec["id"].classes, spec["y"].texts, spec["patient"].texts[-1]) == ((), (), "11")
    assert source.column("y").tolist() == [3, 2, 3, 1, 2, 0]
    assert source.column("given").tolist() == [0, 1, 0, 2, 1, 3]
    for each in (pickle.loads(pickle.dumps(source)), SubsetSource(source, np.arange(6))):
        for key in ("y", "given", "id", "member"):
            assert each.spec.names(key, each.column(key)).tolist() == ALL
        assert each.spec.names("patient", each.column("patient")).tolist() == ["0", "1", "2", "3", "10", "11"]
    found = source.spec.names("pair", [sample["pair"] for sample in source.__getitems__([3, 4])])
    assert found.tolist() == [["owl", "emu"], ["jay", "jay"]]
    assert source.spec.names("y", np.array([[-100, 1]])).tolist() == [["", "emu"]]
    for key, codes, error in (("x", [0], MissingError), ("y", [4], IndexError), ("y", [0.0], IndexError)):
        with pytest.raises(error):
            source.spec.names(key, codes)
    sides = split(source, {"train": ["3", "11"], "val": ["0"]}, groups="patient")  # by what the numbers stand for
    assert [side.samples.tolist() for side in sides.values()] == [[3, 5], [0]]
    for side in split(source, {"train": 0.5, "val": 0.5}, groups="y").values():
        with AsyncLoader(side, LoaderOptions(batch_size=8, shuffle="none")) as loader:
            batch = next(loader)
        assert side.spec.names("y", batch["y"]).tolist() == [ALL[sample] for sample in side.samples]


def test_a_class_of_validation_only(two):
    first, second = (HDF5Source(two.parent / f"{number}.h5", {"x": "x", "y": "y"}) for number in (0, 1))
    for val in (second, SubsetSource(second, [0])):  # the subset has no auk, but its file does
        with pytest.raises(FormatError, match=r"1.h5:/y, row 1: 'auk' is not one of emu, jay, owl; give all classes: "):
            AsyncDataModule(train=first, val=val, loader=LoaderOptions(batch_size=4))
    dm = AsyncDataModule(train=HDF5Source(two, {"x": "x", "y": "y"}), val=second, loader=LoaderOptions(batch_size=4))
    assert (first_of(dm)["y"].tolist(), dm.num_classes["y"]) == ([2, 0], 4)
    with pytest.raises(FormatError, match="classes"):
        ConcatSource([first, second])


def test_texts_of_several_sources_are_numbered_alike(two):
    tables = [pa.table({"x": range(len(texts)), "y": texts}) for texts in TEXTS]
    sources = [HDF5Source(two.parent / f"{number}.h5", {"x": "x", "y": Field("y", kind="text")}) for number in (0, 1)]
    of_tables = [ManifestSource(table, {"x": "x", "y": {"name": "y", "kind": "text"}}) for table in tables]
    for each in (sources, of_tables):
        both = ConcatSource(each)
        check_contract(both)
        assert both.spec.names("y", both.column("y")).tolist() == ALL
        loader = LoaderOptions(batch_size=4)
        dm = AsyncDataModule(train=each[0], val=each[1], loader=loader)
        assert each[1].spec.names("y", first_of(dm)["y"]).tolist() == TEXTS[1]
        assert "y" not in dm.num_classes


@pytest.mark.parametrize("texts", [["0,5", "1,5"], ["0x0a", "0x10"], ["[1, 2]", "[3]"], ["a.png", "b.png"]])
def test_text_that_seems_to_be_no_names_is_refused(texts, h5):
    paths = [h5(f"{number}.h5", x=np.arange(2), y=[text, text]) for number, text in enumerate(texts)]
    said = ["0.h5:/y: ", " look like ", ", or write kind='class' if these are"]
    assert refused(FormatError, said, paths, {"x": "x", "y": "y"}).dataset == "y"
    assert HDF5Source(paths, {"x": "x", "y": Field("y", kind="class")}).spec["y"].classes == tuple(texts)
    assert HDF5Source(paths, {"x": "x", "y": Field("y", kind="text")}).spec["y"].texts == tuple(texts)
    assert HDF5Source(paths, {"x": "x", "y": Field("y", classes=texts)}).spec["y"].classes == tuple(texts)


def test_blanks_around_a_name_make_no_other_class(h5, caplog):
    names = ["auk", "auk  ", "owl"], [" owl", "\ufeffauk", "emu"]
    paths = [h5(f"{number}.h5", x=np.arange(3), y=each) for number, each in enumerate(names)]
    source = HDF5Source(paths, {"x": "x", "y": "y"})
    assert (source.spec["y"].classes, source.column("y").tolist()) == (("auk", "emu", "owl"), [0, 0, 2, 2, 0, 1])
    assert "0.h5:/y: ' owl', 'auk  ', '\\ufeffauk' differ from other names only by blanks" in caplog.text
    assert source.with_classes({"y": ("emu", "owl", "auk")}).column("y").tolist() == [2, 2, 1, 1, 2, 0]
    ids = HDF5Source(paths, {"x": "x", "y": Field("y", kind="text")})
    assert ids.spec["y"].texts == (" owl", "auk", "auk  ", "emu", "owl", "\ufeffauk")


def test_empty_text(h5):
    texts = ["b", "", "a", "a", ""]
    path = h5(x=np.arange(5), y=texts)

    def source(**options):
        return HDF5Source(path, {"x": "x", "y": Field("y", **options)})

    with pytest.raises(FormatError, match=r"x.h5:/y: no text in rows 1, 4; write it, or set null='ignore'") as caught:
        source()
    assert caught.value.row == 1
    assert HDF5Source(path, {"y": "y"}, rows=[0, 2, 3]).column("y").tolist() == [1, 0, 0]
    ignored = source(null="ignore")
    assert ignored.column("y").tolist() == [1, -100, 0, 0, -100]
    assert ignored.spec.names("y", ignored.column("y")).tolist() == texts
    assert source(null="drop").column("x").tolist() == [0, 2, 3]
    assert source(null="drop", window=(0, 2)).column("x").tolist() == [2]
    assert source(classes=["", "a", "b"]).column("y").tolist() == [2, 0, 1, 1, 0]


def test_attributes_and_groups_of_text(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number, text in enumerate(ALL):
            group = file.create_group(f"p{number}")
            group["x"], group["kind"], group["age"], group.attrs["bird"] = np.zeros(3), text, 20 + number, text
    fields = {"x": "x", "y": Field(attr="bird"), "kind": "kind", "age": Field("age", kind="text")}
    source = HDF5Source(tmp_path / "x.h5", fields, group="p*", sample="group", cache_dir=tmp_path)
    check_contract(source)
    for key, wanted in {"y": ALL, "kind": ALL, "age": [str(20 + number) for number in range(6)]}.items():
        assert source.spec.names(key, source.column(key)).tolist() == wanted
    rows = HDF5Source(tmp_path / "x.h5", {"x": "x", "y": Field(attr="bird")}, group="p*")
    assert rows.spec.names("y", rows.column("y")).tolist() == [text for text in ALL for _ in range(3)]
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["p4"].attrs["bird"] = ""
    options = {"fields": {"y": Field(attr="bird")}, "group": "p*", "sample": "group"}
    error = refused(FormatError, ["no text in row 4; "], tmp_path / "x.h5", **options)
    assert error.dataset == "p4@bird"


ROWS = {"p1": ("b", 61, 0), "p2": ("a", 47, 1), "p3": ("b", 55, 1), "p4": ("c", 30, 0)}


@pytest.fixture
def files(tmp_path):
    """Three files of patients, with 5 rows in each of the groups of two patients."""
    for number, name in enumerate(["p1", "p2", "p3"]):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"], file["patient"] = np.arange(5) + 5 * number, [f"p{1 + (number + row) % 3}" for row in range(5)]
            file["number"], file.attrs["id"] = (number + np.arange(5)) % 3 + 1, name
            file["columns"], file["rows"] = file["number"][...][None] / 1, file["number"][...][:, None] / 1  # MATLAB's
            file["half"], file["flag"], file["null"] = np.arange(5) / 2, [True] * 5, h5py.Empty("f8")
            for group in ("p1", "p3"):
                file[f"g/{group}/x"] = np.arange(2) + 10 * number
    return tmp_path


def table_of(files, key="patient", names="{}", **more):
    """A CSV; ``names`` makes the names in it."""
    lines = [f"{names.format(name)},{y},{age},{fold}" for name, (y, age, fold) in ROWS.items()]
    (files / "t.csv").write_text("\n".join([f"{key},diagnosis,age,fold", *lines]))
    return files / "t.csv"


FIELDS = {"x": "x", "y": "diagnosis", "age": Field("age", dtype="float32")}


def opened(files, table, on, fields=FIELDS, **options):
    return HDF5Source(files / "*.h5", fields, table=table, on=on, **options)


def check_rows(source, patients):
    """Each sample has the values of its patient, whichever way it is read."""
    check_contract(source)
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert source.spec["y"].classes == ("a", "b", "c")
        assert each.spec.names("y", each.column("y")).tolist() == [ROWS[patient][0] for patient in patients]
        assert each.column("age").tolist() == [ROWS[patient][1] for patient in patients]
        assert each.column("fold").tolist() == [str(ROWS[patient][2]) for patient in patients]  # CSV has no types


@pytest.mark.parametrize("names", ["{}", "{}.h5", "{root}/{}.h5"])
def test_a_row_for_each_file(names, files):
    table = table_of(files, "file", names.replace("{root}", str(files)))
    patients = np.repeat(["p1", "p2", "p3"], 5)
    check_rows(source := opened(files, table, "file"), patients)
    some = opened(files, pd.read_csv(table), "file", rows=np.arange(3, 12))
    for place, key in ((1, "age"), (2, "fold")):
        assert some.column(key).tolist() == [ROWS[patient][place] for patient in patients[3:12]]
    sides = split(source, {"train": [1], "val": [0]}, groups="fold")
    assert [np.unique(side.column("x") // 5).tolist() for side in sides.values()] == [[1, 2], [0]]
    options = LoaderOptions(batch_size=64, weights=Balanced("y"), drop_last=False)
    with AsyncLoader(SubsetSource(source, np.arange(10)), options) as loader:
        batch = next(loader)
    assert source.spec.names("y", batch["y"]).tolist() == [ROWS[f"p{1 + x // 5}"][0] for x in batch["x"].tolist()]


def test_a_row_for_each_group_or_subject(files):
    by_name = [f"p{1 + (number + row) % 3}" for number in range(3) for row in range(5)]
    check_rows(opened(files, table_of(files), "patient"), by_name)
    check_rows(opened(files, table_of(files, "who"), {"who": Field("patient")}), by_name)
    check_rows(opened(files, table_of(files, "id"), Field(attr="id")), np.repeat(["p1", "p2", "p3"], 5))
    check_rows(opened(files, table_of(files), {"patient": {"attr": "id"}}), np.repeat(["p1", "p2", "p3"], 5))
    groups = ["p1", "p1", "p3", "p3"] * 3
    check_rows(opened(files, table_of(files), {"patient": "group"}, group="g/*"), groups)
    check_rows(opened(files, table_of(files, "group", "g/{}"), "group", group="g/*", sample="group"), groups[::2])
    numbers = pa.table({"id": [1, 2, 3], "y": ["b", "a", "c"]})
    for stored in ("number", "columns", "rows"):
        fields = {"x": Field("x", window=(0, 2)), "y": "y", "n": "number"}
        source = opened(files, numbers, {"id": stored}, fields)
        wanted = ["bac"[number - 1] for number in source.column("n")]
        assert source.spec.names("y", source.column("y")).tolist() == wanted


def test_samples_without_a_row_and_rows_without_samples(files, caplog):
    caplog.set_level(logging.INFO)
    table = pd.DataFrame({"file": ["p1", "p4", "p3"], "y": ["b", "c", None]})
    with pytest.raises(ManifestError, match=r"file': 1 of 3 files have no row: 'p2.h5'; it has 'p1', 'p4', .*'skip'"):
        opened(files, table, "file", {"x": "x", "y": Field("y", null="ignore")})
    source = opened(files, table, "file", {"x": "x", "y": Field("y", null="ignore")}, unmatched="skip")
    assert source.column("x").tolist() == [*range(5), *range(10, 15)]
    assert source.column("y").tolist() == [0] * 5 + [-100] * 5
    said = "1 of 3 files have no row: 'p2.h5'; their samples are left out; 1 of its rows have no samples: 'p4'"
    assert (caplog.records[-1].levelname, caplog.messages[-1]) == ("WARNING", f"the table given: {said}")
    opened(files, pd.DataFrame({"file": ["p1", "p2", "p3", "p4"]}), "file", {"x": "x"}, unmatched="skip")
    assert caplog.messages[-1] == "the table given: 1 of its rows have no samples: 'p4'"
    dropped = opened(files, table, "file", {"x": "x", "y": Field("y", null="drop")}, unmatched="skip", exclude=[1])
    assert dropped.column("x").tolist() == [0, 2, 3, 4]
    with pytest.raises(ManifestError, match="row 2, column 'y': no value; give one"):
        opened(files, table, "file", {"x": "x", "y": "y"}, unmatched="skip")


def test_several_classes_in_a_cell_and_rows_that_no_sample_has(files):
    rows = {"file": ["p4", "p1", "p2", "p3", "p3"], "y": ["d", "b;c", "a", "a", "c"], "n": ["?", "1", "2", "9", "3"]}
    table, fields = pd.DataFrame(rows), {"x": "x", "y": Field("y", separator=";"), "n": Field("n", kind="number")}
    source = opened(files, table, "file", fields, filters=[["n", "!=", "9"]])
    assert source.spec["y"].classes == ("a", "b", "c", "d")
    assert source.column("n").tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert read_source(source, np.array([0, 5, 10]))["y"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    fields["y"] = Field("y", separator=";", classes=["c", "b"], null="zero")
    source = opened(files, table.drop(index=3).replace({"a": None}), "file", fields)
    assert read_source(source, np.array([0, 5, 10]))["y"].tolist() == [[1, 1], [0, 0], [1, 0]]
    for option in ({"separator": ";"}, {"null": "zero"}):
        with pytest.raises(ConfigError, match=rf"fields\.y\.{next(iter(option))}: 'z' is no column of a table"):
            HDF5Source(files / "*.h5", {"x": "x", "y": Field("z", **option)})


@pytest.mark.parametrize(("on", "x"), [("file", range(5)), ("number", [0, 7, 11, 14, 3])])
def test_filters_leave_out_samples_but_not_those_that_have_no_row(on, x, files, caplog):
    caplog.set_level(logging.INFO)
    names = {"file": ["p1", "p2", "p3"], "number": [1, 2, 3]}[on]
    table, options = pd.DataFrame({on: names, "q": [0.9, 0.1, 0.2]}), {"filters": [["q", ">", 0.5]]}
    assert opened(files, table, on, {"x": "x"}, **options).column("x").tolist() == sorted(x)
    assert "the filters leave out the rows of 2 of 3" in caplog.text
    with pytest.raises(ManifestError, match=r"1 of 3 .* have no row"):
        opened(files, table[:2], on, {"x": "x"}, **options)
    with pytest.raises(ManifestError, match=r"filters leave out the rows of 2 of 3 .*; change filters"):
        opened(files, table.replace({"p1": "p4", 1: 4}), on, {"x": "x"}, **options)


N, Y = {"fields": {"x": "x", "n": "number"}}, {"fields": {"x": "x", "y": "aged"}}


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"file": ["p1", "p2", "p3", "p1"]}, {}, ManifestError, "row 3, column 'file': 'p1' is in row 0 too; keep one"),
        ({"file": ["p1", None, "p3"]}, {}, ManifestError, "row 1, column 'file': no value"),
        ({"number": ["01", "2"]}, {"on": "number"}, ManifestError, "compared as text: 0012 is not 12"),
        ({"null": ["1"]}, {"on": "null"}, FormatError, "null: holds text or sequences on 0 axes"),
        ({"half": ["1"]}, {"on": "half"}, ConfigError, "^on: .*half holds float64, with fractions or NaN, .*; ids are"),
        ({"number": [1.0, 2.0]}, {"on": "number"}, ManifestError, "holds double; give text or whole numbers"),
        ({"who": ["a"]}, {"unmatched": "skip"}, ConfigError, "no column 'file'; it has 'who'; .* on={COLUMN: 'file'}"),
        ({"file": ["p1"]}, {"filters": [["q", ">", 1]]}, ConfigError, "^filters: .*has no column 'q'; it has 'file'"),
        ({"who": ["p1"]}, {"on": "who"}, MissingError, "has no dataset 'who'"),
        ({"flag": ["p1"]}, {"on": "flag"}, ConfigError, "^on: .*flag holds bool; name a dataset of ids: text or"),
        ({"who": ["p1"]}, {"on": {"id": Field(attr="s")}}, ConfigError, r"'id'; .* on={COLUMN: Field\('', attr='s'\)}"),
        ({"file": ["p1"], "age": 1}, Y, MissingError, "no dataset 'aged'"),
        ({"file": ["a"]}, {"unmatched": "skip"}, ManifestError, "3 of 3 files have no row"),
        ({"file": ["p1"], "number": 1}, N, ConfigError, "'number' is a dataset, and a column of .*; rename"),
        ({"file": ["p1"]}, {"on": None}, ConfigError, "table: goes with on, which says"),
        ({"file": ["p1"], "y": "a"}, {"fields": {"y": Field("y", window=2)}}, ConfigError, "y.window: does not"),
        ({"file": ["p1"]}, {"on": 3}, ConfigError, "on: 3 does not say whose rows"),
        ({"file": ["p1"]}, {"unmatched": "drop"}, ConfigError, "unmatched: 'drop' is not one of error, skip"),
    ],
)
def test_a_table_that_does_not_fit_is_named(table, options, error, message, files):
    with pytest.raises(error, match=message):
        opened(files, pd.DataFrame(table), **{"on": "file", "fields": {"x": "x"}, **options})


def test_files_of_one_name_need_their_folders(h5, tmp_path):
    for number, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        h5(f"{folder}/s.h5", x=[number] * 5)
    path, options = tmp_path / "*/s.h5", {"fields": {"x": "x", "y": "y"}, "on": "file"}
    source = HDF5Source(path, table=pa.table({"file": ["b/s", "a/s"], "y": [2, 1]}), **options)
    assert source.column("y").tolist() == [1] * 5 + [2] * 5
    said = r"2 of 2 files have no row: 'a/s\.h5', 'b/s\.h5'; 's' is the name of 2 of them; write b/s\.h5$"
    with pytest.raises(ManifestError, match=said):
        HDF5Source(path, table=pa.table({"file": ["s"], "y": [1]}), **options)


def test_empty_ids_are_an_error_or_left_out(files, caplog):
    with h5py.File(files / "p2.h5", "a") as file:
        file["who"] = ["p1", "", "p3", "", "p1"]
    options = {"path": files / "p2.h5", "fields": FIELDS, "table": table_of(files, "who")}
    error = refused(FormatError, ["p2.h5:/who, row 1: no id, as in 2 rows in all; ", "'skip'"], **options, on="who")
    assert (error.dataset, error.row) == ("who", 1)
    assert HDF5Source(**options, on="who", unmatched="skip").column("x").tolist() == [5, 7, 9]
    assert "row 1: no id, as in 2 rows in all; their samples are left out" in caplog.text
    with h5py.File(files / "p2.h5", "a") as file:
        file["g/p1"].attrs["who"], file["g/p3"].attrs["who"] = "", "p1"
    options |= {"group": "g/*", "sample": "group", "fields": {"x": "x"}}
    assert len(HDF5Source(**options, on=Field(attr="who"), unmatched="skip")) == 1
    assert f"{files}/p2.h5:/g/p1@who: no id; their samples are left out" in caplog.text


@pytest.mark.parametrize(
    ("stored", "layout", "warned"),
    [
        (np.zeros((4, 9, 8, 3), "u1"), None, True),
        (np.zeros((4, 9, 8, 3), "u1"), "NHWC", False),
        (np.zeros((4, 9, 8, 3), "u1"), "NHWX", False),
        (np.zeros((4, 9, 8, 3), "f4"), None, False),  # such as joints of a skeleton in time
        (np.zeros((4, 3, 8, 4), "u1"), None, False),
    ],
)
def test_images_with_the_channels_last_are_named(stored, layout, warned, h5, caplog):
    HDF5Source(h5(x=stored), {"x": "x"}, layout=layout)
    assert ("layout={'x': 'NHWC'} puts channels first" in caplog.text) == warned
