"""Fields, folds and groups from a table with a row for each file, group or subject."""

import logging
import pickle

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from lit_async_data import (
    AsyncLoader,
    Balanced,
    ConfigError,
    Field,
    FormatError,
    HDF5Source,
    LoaderOptions,
    ManifestError,
    MissingError,
    SubsetSource,
    split,
)
from lit_async_data.sources.contract.source import read
from lit_async_data.testing import check_contract

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


def check(source, patients):
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
    check(source := opened(files, table, "file"), patients)
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
    check(opened(files, table_of(files), "patient"), by_name)
    check(opened(files, table_of(files, "who"), {"who": Field("patient")}), by_name)
    check(opened(files, table_of(files, "id"), Field(attr="id")), np.repeat(["p1", "p2", "p3"], 5))
    check(opened(files, table_of(files), {"patient": {"attr": "id"}}), np.repeat(["p1", "p2", "p3"], 5))
    groups = ["p1", "p1", "p3", "p3"] * 3
    check(opened(files, table_of(files), {"patient": "group"}, group="g/*"), groups)
    check(opened(files, table_of(files, "group", "g/{}"), "group", group="g/*", sample="group"), groups[::2])
    numbers = pa.table({"id": [1, 2, 3], "y": ["b", "a", "c"]})
    for stored in ("number", "columns", "rows"):
        fields = {"x": Field("x", window=(0, 2)), "y": "y", "n": "number"}
        source = opened(files, numbers, {"id": stored}, fields)
        assert source.spec.names("y", source.column("y")).tolist() == [
            "bac"[number - 1] for number in source.column("n")
        ]


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
    assert read(source, np.array([0, 5, 10]))["y"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    fields["y"] = Field("y", separator=";", classes=["c", "b", "a"])
    source = opened(files, table.drop(index=3), "file", fields)
    assert read(source, np.array([0, 5, 10]))["y"].tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]
    fields["y"] = Field("y", separator=";", null="zero")
    source = opened(files, table.drop(index=3).replace({"a": None}), "file", fields)
    assert read(source, np.array([0, 5, 10]))["y"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]
    for option in ({"separator": ";"}, {"null": "zero"}):
        with pytest.raises(ConfigError, match=rf"fields\.y\.{next(iter(option))}: 'z' is no column of a table"):
            HDF5Source(files / "*.h5", {"x": "x", "y": Field("z", **option)})


@pytest.mark.parametrize(("on", "x"), [("file", range(5)), ("number", [0, 7, 11, 14, 3])])
def test_filters_leave_out_samples_but_not_those_that_have_no_row(on, x, files, caplog):
    caplog.set_level(logging.INFO)
    names = {"file": ["p1", "p2", "p3"], "number": [1, 2, 3]}[on]
    table, options = pd.DataFrame({on: names, "q": [0.9, 0.1, 0.2]}), {"filters": [["q", ">", 0.5]]}
    source = opened(files, table, on, {"x": "x"}, **options)
    assert source.column("x").tolist() == sorted(x)
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
        ({"file": ["p1", "p2", "p3", "p1.h5"]}, {}, ManifestError, "'p1.h5' is in row 0 too"),
        ({"file": ["p1", None, "p3"]}, {}, ManifestError, "row 1, column 'file': no value"),
        ({"number": ["01", "02"]}, {"on": "number"}, ManifestError, "3 of 3 ids have no row: '1', '2', '3'; it"),
        ({"number": ["01", "2"]}, {"on": "number"}, ManifestError, "compared as text: 0012 is not 12"),
        ({"null": ["1"]}, {"on": "null"}, FormatError, "null: holds text, ids or values .* on 0 axes"),
        ({"half": ["1"]}, {"on": "half"}, ConfigError, "^on: .*half holds float64, which is not text; ids are text or"),
        ({"number": [1.0, 2.0]}, {"on": "number"}, ManifestError, "holds double; give text or whole numbers"),
        ({"who": ["a"]}, {"unmatched": "skip"}, ConfigError, "no column 'file'; it has 'who'; .* on={COLUMN: 'file'}"),
        ({"file": ["p1"]}, {"filters": [["q", ">", 1]]}, ConfigError, "^filters: .*has no column 'q'; it has 'file'"),
        ({"who": ["p1"]}, {"on": "who"}, MissingError, "has no dataset 'who'"),
        ({"flag": ["p1"]}, {"on": "flag"}, ConfigError, "^on: .*flag holds bool; name a dataset of ids: text or"),
        ({"who": ["p1"]}, {"on": {"file": "who"}}, ConfigError, "has no column 'file'; .* on={COLUMN: 'file'}"),
        ({"who": ["p1"]}, {"on": {"id": Field(attr="s")}}, ConfigError, r"'id'; .* on={COLUMN: Field\('', attr='s'\)}"),
        ({"file": ["p1"], "age": 1}, Y, MissingError, "no dataset 'aged'; .* has no column 'aged'; did you mean 'age'"),
        ({"file": ["a"]}, {"unmatched": "skip"}, ManifestError, "3 of 3 files have no row"),
        ({"file": ["p1"], "number": 1}, N, ConfigError, "'number' is a dataset, and a column of .*; rename"),
        ({"file": ["p1"], "y": "a"}, {"fields": {"y": Field("y", window=2)}}, ConfigError, "y.window: does not"),
        ({"file": ["p1"]}, {"on": None}, ConfigError, "table: goes with on"),
        ({"file": ["p1"]}, {"on": 3}, ConfigError, "on: 3 does not say whose rows"),
        ({"file": ["p1"]}, {"unmatched": "drop"}, ConfigError, "unmatched: 'drop' is not one of error, skip"),
    ],
)
def test_a_table_that_does_not_fit_is_named(table, options, error, message, files):
    with pytest.raises(error, match=message):
        opened(files, pd.DataFrame(table), **{"on": "file", "fields": {"x": "x"}, **options})


def test_files_of_one_name_need_their_folders(files):
    for folder, name in (("a", "p1"), ("b", "p2")):
        (files / folder).mkdir()
        (files / f"{name}.h5").rename(files / folder / "s.h5")
    options = {"fields": {"x": "x", "y": "y"}, "on": "file"}
    for path in (files / "*/s.h5", [files / "a/s.h5", files / "b/s.h5"]):
        source = HDF5Source(path, table=pa.table({"file": ["b/s", "a/s"], "y": [2, 1]}), **options)
        assert source.column("y").tolist() == [1] * 5 + [2] * 5
    said = r"2 of 2 files have no row: 'a/s\.h5', 'b/s\.h5'; 's' is the name of 2 of them; write b/s\.h5$"
    with pytest.raises(ManifestError, match=said):
        HDF5Source(files / "*/s.h5", table=pa.table({"file": ["s"], "y": [1]}), **options)


def test_empty_ids_are_an_error_or_left_out(files, caplog):
    with h5py.File(files / "p2.h5", "a") as file:
        file["who"] = ["p1", "", "p3", "", "p1"]
        file["none"] = [""] * 5
    options = {"path": files / "p2.h5", "fields": FIELDS, "table": table_of(files, "who")}
    with pytest.raises(FormatError, match=r"p2\.h5:/who, row 1: no id, as in 2 rows in all; .*'skip'") as raised:
        HDF5Source(**options, on="who")
    assert (raised.value.dataset, raised.value.row) == ("who", 1)
    assert HDF5Source(**options, on="who", unmatched="skip").column("x").tolist() == [5, 7, 9]
    assert "row 1: no id, as in 2 rows in all; their samples are left out" in caplog.text
    with h5py.File(files / "each.h5", "w") as file:
        for name in ("a", "b", "c"):
            file[f"{name}/x"], file[name].attrs["who"] = 1, "" if name == "b" else "p1"
    options |= {"path": files / "each.h5", "group": "*", "sample": "group", "fields": {"x": "x"}}
    assert len(HDF5Source(**options, on=Field(attr="who"), unmatched="skip")) == 2
    assert f"{files}/each.h5:/b@who: no id; their samples are left out" in caplog.text
    options = {"path": files / "p2.h5", "fields": FIELDS, "table": table_of(files, "who")}
    for unmatched in ("error", "skip"):
        with pytest.raises(FormatError, match="none, row 0: no id, as in 5 rows in all; write it"):
            HDF5Source(**options, on={"who": "none"}, unmatched=unmatched)
