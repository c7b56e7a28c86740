"""`ManifestSource` over every kind of table: which samples there are, what they are called, and their labels."""

import json
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources.oracle import read

from lit_async_data import (
    AsyncLoader,
    Balanced,
    ConcatSource,
    LoaderOptions,
    ManifestSource,
    SubsetSource,
    split,
)
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, ManifestError, MissingError

COUNT = 12
IDS = [f"{number:03d}" for number in range(COUNT)]
SPECIES = ["owl", "auk", "emu"] * 4
QUALITY = [number / 8 for number in range(COUNT)]
COLUMNS = {
    "id": IDS,
    "path": [f"a/{number}.npy" for number in range(COUNT)],
    "species": SPECIES,
    "even": [number % 2 for number in range(COUNT)],
    "quality": QUALITY,
}
FIELDS = {"x": "path", "y": "species", "q": "quality"}


@pytest.fixture
def folder(tmp_path):
    """Twelve arrays, which hold their own number, and no table yet."""
    (tmp_path / "a").mkdir()
    for number in range(COUNT):
        np.save(tmp_path / f"a/{number}.npy", np.full((2, 3), number, "f4"))
    return tmp_path


def given(**changed):
    return pa.table({**COLUMNS, **changed})


def labels(values, *, name="y", **column):
    """The source of one column of labels, and what a batch of all samples has there."""
    table = pa.table({"y": values}) if not isinstance(values, dict) else pa.table(values)
    source = ManifestSource(table, {"y": {"name": name, **column} if column else name})
    return source, read(source, np.arange(len(source)))["y"]


def rows_of(suffix, folder):
    """Writes the table as text; returns its path."""
    path = folder / f"table.{suffix}"
    lines = list(zip(*COLUMNS.values(), strict=True))
    if suffix == "csv":
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in [tuple(COLUMNS), *lines]))
    else:
        path.write_text("".join(json.dumps(dict(zip(COLUMNS, line, strict=True))) + "\n" for line in lines))
    return path


def assert_is_the_table(source):
    assert len(source) == COUNT
    order = np.random.default_rng(1).permutation(COUNT)
    got = read(source, order)
    np.testing.assert_array_equal(got["x"], np.broadcast_to(order[:, None, None], (COUNT, 2, 3)).astype("f4"))
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    assert [source.spec["y"].classes[code] for code in got["y"]] == [SPECIES[number] for number in order]
    assert got["y"].dtype == np.int64
    np.testing.assert_array_equal(got["q"], np.array(QUALITY)[order])
    assert got["q"].dtype == np.float64
    assert [where.id for where in source.locate(order)] == [IDS[number] for number in order]


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_a_table_of_text(format_, folder):
    path = rows_of(format_, folder)
    source = ManifestSource(path, FIELDS, id="id")
    assert_is_the_table(source)
    where = source.locate([7])[0]
    assert (*where, where.id, where.path) == (str(path), "/", 7, "007", str(folder / "a/7.npy"))
    assert source.name == str(path)


@pytest.mark.parametrize("pattern", ["parts", "parts/*.parquet"])
def test_several_parquet_files_are_one_table_with_rows_of_their_own(pattern, folder):
    (folder / "parts").mkdir()
    for part, begin in enumerate([0, 4, 10]):
        pq.write_table(given().slice(begin, [4, 6, 2][part]), folder / f"parts/{part}.parquet")
    source = ManifestSource(folder / pattern, FIELDS, id="id", root=folder)
    assert_is_the_table(source)
    assert [(where.file, where.row) for where in source.locate([3, 4, 11])] == [
        (str(folder / "parts/0.parquet"), 3),
        (str(folder / "parts/1.parquet"), 0),
        (str(folder / "parts/2.parquet"), 1),
    ]
    assert [part.samples for part in source.parts] == [4, 6, 2]


@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "polars"])
def test_a_table_in_memory(kind, folder, monkeypatch):
    if kind == "pandas":
        table = pytest.importorskip("pandas").DataFrame(COLUMNS)
    elif kind == "polars":
        table = pytest.importorskip("polars").DataFrame(COLUMNS)
    else:
        table = given()
    assert_is_the_table(ManifestSource(table, FIELDS, id="id", root=folder))
    monkeypatch.chdir(folder)
    assert_is_the_table(ManifestSource(table, FIELDS, id="id"))


@pytest.mark.parametrize("format_", ["csv", "parquet", "memory"])
def test_filters_leave_rows_with_their_own_names(format_, folder):
    table = given()
    filters, wanted = [["species", "not in", ["owl"]], ["quality", ">=", 0.5]], [4, 5, 7, 8, 10, 11]
    if format_ == "csv":
        table = rows_of("csv", folder)
    elif format_ == "parquet":
        table = folder / "t.parquet"
        pq.write_table(given(), table)
    source = ManifestSource(table, {"x": "path", "e": "even"}, id="id", filters=filters, root=folder)
    assert read(source, np.arange(len(source)))["x"][:, 0, 0].tolist() == wanted
    assert [where.id for where in source.locate(np.arange(len(source)))] == [IDS[row] for row in wanted]
    assert [where.row for where in source.locate(np.arange(len(source)))] == wanted
    # Cells of CSV are text until someone asks for numbers.
    assert source.column("quality").astype(float).tolist() == [QUALITY[row] for row in wanted]


def test_ids_are_text(tmp_path):
    names = ["007", "7", "7.0", "1e3", "NA", "true", " 8", "ä"]
    (tmp_path / "t.csv").write_text("id,y\n" + "".join(f"{name},1\n" for name in names))
    for table in (tmp_path / "t.csv", pa.table({"id": names, "y": [1] * len(names)})):
        source = ManifestSource(table, {"y": "y"}, id="id")
        assert [where.id for where in source.locate(range(len(names)))] == names
    numbers = ManifestSource(pa.table({"id": [7, 8], "y": [0, 1]}), {"y": "y"}, id="id")
    assert [where.id for where in numbers.locate([1, 0])] == ["8", "7"]


def test_ids_that_stand_twice_are_named_with_both_rows(tmp_path):
    (tmp_path / "t.csv").write_text("id,y\n007,1\n008,1\n007,2\n")
    with pytest.raises(ManifestError, match=r"t\.csv.*007.*row 2.*row 0") as caught:
        ManifestSource(tmp_path / "t.csv", {"y": "y"}, id="id")
    assert caught.value.row == 2
    assert caught.value.file == str(tmp_path / "t.csv")
    # Only what is wanted must be unique.
    source = ManifestSource(tmp_path / "t.csv", {"y": "y"}, id="id", filters=[["y", "<", 2]])
    assert len(source) == 2


def test_without_an_id_samples_have_none_and_the_path_is_that_of_the_first_field_with_files(folder):
    table = given(other=[f"a/{COUNT - 1 - row}.npy" for row in range(COUNT)])
    source = ManifestSource(table, {"y": "even", "b": "other", "x": "path"}, root=folder)
    assert source.locate([0])[0].id is None
    assert source.locate([0])[0].path == str(folder / "a/11.npy")
    assert ManifestSource(given(), {"y": "species"}).locate([3])[0].path is None


def test_cells_of_csv_are_numbers_where_they_are_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("i,f,t,m\n1,0.5,a,1\n2,1e3,b,2.5\n")
    source = ManifestSource(tmp_path / "t.csv", ["i", "f", "t", "m"])
    got = read(source, [0, 1])
    assert (got["i"].dtype, got["i"].tolist()) == (np.int64, [1, 2])
    assert (got["f"].dtype, got["f"].tolist()) == (np.float64, [0.5, 1000.0])
    assert (got["t"].dtype, got["t"].tolist()) == (np.int64, [0, 1])
    assert (got["m"].dtype, got["m"].tolist()) == (np.float64, [1, 2.5])


def test_a_type_of_ones_own():
    assert labels([0, 1, 2], dtype="float32")[1].dtype == np.float32
    assert labels([0, 1, 2], dtype="uint8")[1].tolist() == [0, 1, 2]
    assert labels([0.5, 1.5], dtype="float32")[0].spec["y"].dtype == np.float32
    with pytest.raises(AsyncDataError, match="300"):
        labels([0, 300], dtype="uint8")
    with pytest.raises(ConfigError, match="dtype"):
        labels([0, 1], dtype="flot32")


def test_kind_says_what_text_means(tmp_path):
    (tmp_path / "t.csv").write_text("y\n10\n9\n10\n")
    number = ManifestSource(tmp_path / "t.csv", {"y": {"name": "y", "kind": "number"}})
    assert read(number, [0, 1, 2])["y"].tolist() == [10, 9, 10]
    kinds = ManifestSource(tmp_path / "t.csv", {"y": {"name": "y", "kind": "class"}})
    assert kinds.spec["y"].classes == ("9", "10")
    assert read(kinds, [0, 1, 2])["y"].tolist() == [1, 0, 1]
    assert labels(["1.5", "2"], kind="number")[1].tolist() == [1.5, 2.0]
    with pytest.raises(ManifestError, match="row 1") as caught:
        labels(["1.5", "two"], kind="number")
    assert caught.value.row == 1
    with pytest.raises(ConfigError, match="kind"):
        labels(["a"], kind="klass")


def test_a_separator_parts_the_labels_of_a_cell():
    source, got = labels(["b", "a;c", "c;a;b"], separator=";")
    assert source.spec["y"].classes == ("a", "b", "c")
    assert (got.dtype, got.tolist()) == (np.uint8, [[0, 1, 0], [1, 0, 1], [1, 1, 1]])
    given_ = labels(["b", "a;c"], separator=";", classes=["c", "b", "a"])[1]
    assert given_.tolist() == [[0, 1, 0], [1, 0, 1]]
    with pytest.raises(ManifestError, match="d") as caught:
        labels(["a", "a;d"], separator=";", classes=["a", "b"])
    assert caught.value.row == 1

    source, got = labels(["1;2;3", "4;5;6.5"], separator=";", kind="number")
    assert source.spec["y"].shape == (3,)
    assert got.tolist() == [[1, 2, 3], [4, 5, 6.5]]


@pytest.mark.parametrize("values", [[1, None, 3], [0.5, float("nan"), 1.5], ["a", None, "b"]])
def test_null_drop_leaves_the_sample_out_of_all_fields(values, folder):
    table = pa.table({"id": IDS[:3], "path": COLUMNS["path"][:3], "y": values})
    source = ManifestSource(table, {"x": "path", "y": {"name": "y", "null": "drop"}}, id="id", root=folder)
    assert len(source) == 2
    assert [(where.row, where.id) for where in source.locate([0, 1])] == [(0, "000"), (2, "002")]
    got = read(source, [1, 0])
    assert got["x"][:, 0, 0].tolist() == [2, 0]
    assert source.column("id").tolist() == ["000", "002"]
    assert source.column("y").tolist() == [got["y"][1], got["y"][0]]
    assert source.parts[0].samples == 2


def test_null_drop_of_every_row_is_an_error():
    with pytest.raises((ManifestError, ConfigError), match=r"(?i)row|sample"):
        labels(pa.array([None, None], pa.float64()), null="drop", kind="number")


def test_a_path_that_is_missing_can_be_dropped(folder):
    table = given(path=[None, *COLUMNS["path"][1:]])
    with pytest.raises(ManifestError, match="row 0") as caught:
        ManifestSource(table, FIELDS, id="id", root=folder)
    assert "000" in str(caught.value)
    source = ManifestSource(table, {"x": {"name": "path", "null": "drop"}}, root=folder)
    assert read(source, np.arange(11))["x"][:, 0, 0].tolist() == list(range(1, 12))


def first_batch(source, **options):
    with AsyncLoader(source, LoaderOptions(batch_size=5, shuffle=False, **options)) as loader:
        return next(loader)


def test_a_mapping_gives_dicts_and_a_sequence_tuples(folder):
    assert list(first_batch(ManifestSource(given(), FIELDS, root=folder))) == ["x", "y", "q"]
    several = ManifestSource(given(), ["path", "species", ["even", "quality"]], root=folder)
    batch = first_batch(several, return_indices=True)
    assert isinstance(batch, tuple)
    assert [tuple(each.shape) for each in batch] == [(5, 2, 3), (5,), (5, 2), (5,)]
    assert batch[3].tolist() == [0, 1, 2, 3, 4]


def test_a_pickled_source_has_its_columns_unless_the_table_is_held_by_another_process(folder):
    source = ManifestSource(rows_of("csv", folder), FIELDS, id="id", root=folder)
    copied = pickle.loads(pickle.dumps(source))
    assert_is_the_table(copied)
    assert copied.column("even").astype(int).tolist() == COLUMNS["even"]
    copied = pickle.loads(pickle.dumps(ManifestSource(given(), FIELDS, id="id", root=folder)))
    assert_is_the_table(copied)
    # A frame may be large, and what is used of it is held anyway.
    with pytest.raises(MissingError, match="'even': was not read before pickling, and the table is in another process"):
        copied.column("even")


def test_a_column_by_key_or_by_name(folder):
    source = ManifestSource(rows_of("csv", folder), FIELDS, id="id")
    assert source.column("y").tolist() == [sorted(set(SPECIES)).index(name) for name in SPECIES]
    assert source.column("species").tolist() == SPECIES
    assert source.column("even").astype(int).tolist() == COLUMNS["even"]
    assert source.column("id").tolist() == IDS
    with pytest.raises(MissingError, match="speces"):
        source.column("speces")


def test_split_by_file_is_the_same_wherever_the_folder_lies(tmp_path):
    found = []
    for root in (tmp_path / "here", tmp_path / "there"):
        root.mkdir()
        for number in range(40):
            np.save(root / f"{number}.npy", np.array(number))
        source = ManifestSource(pa.table({"path": [f"{number}.npy" for number in range(40)]}), ["path"], root=root)
        found.append(split(source, {"train": 0.5, "val": 0.5}, groups="file")["train"].samples.tolist())
    assert found[0] == found[1]


def test_manifests_with_other_classes_are_not_one(folder):
    one = ManifestSource(pa.table({"y": ["a", "b"]}), {"y": "y"})
    other = ManifestSource(pa.table({"y": ["a", "c"]}), {"y": "y"})
    with pytest.raises((FormatError, ConfigError), match="class"):
        ConcatSource([one, other])
    agreed = {"name": "y", "classes": ["a", "b", "c"]}
    both = ConcatSource([ManifestSource(pa.table({"y": names}), {"y": agreed}) for names in (["a", "b"], ["a", "c"])])
    assert read(both, [0, 1, 2, 3])["y"].tolist() == [0, 1, 0, 2]


def test_paths_that_are_taken_for_classes_are_told(tmp_path, caplog):
    ManifestSource(pa.table({"v": [[f"{number}"] for number in range(10)]}), {"v": "v"})  # may be several to a row
    assert not caplog.records
    ManifestSource(
        pa.table({"p": [f"img_{number}" for number in range(10)], "y": ["a", "b"] * 5}),
        {"x": "p", "y": "y"},
        root=tmp_path,
    )
    assert [record.getMessage()[:62] for record in caplog.records] == [
        "column 'p': each of its 10 rows is another class; if these are"
    ]


def test_class_names_with_dots_and_slashes_are_classes(tmp_path, caplog):
    for names in (["E.coli", "S.aureus"], ["v1.2", "v1.3"], ["Mr. X", "Mrs. Y"], ["one.txt"], ["a/alley", "b/beach"]):
        source = ManifestSource(pa.table({"y": names}), {"y": "y"}, root=tmp_path)
        assert source.spec["y"].classes == tuple(sorted(names))
    assert not caplog.records


def test_image_size_without_images_says_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"^image_size: .*: x \(column 'p'\); set kind: image for paths"):
        ManifestSource(pa.table({"p": ["one", "two"]}), {"x": "p"}, image_size=8)


def test_balance_leaves_out_what_is_ignored():
    source = ManifestSource(pa.table({"y": ["a", None, "b", "b"]}), {"y": {"name": "y", "null": "ignore"}})
    with AsyncLoader(source, LoaderOptions(batch_size=4, weights=Balanced("y"), epoch_size=40)) as loader:
        assert {int(value) for batch in loader for value in batch["y"]} == {0, 1}


def test_text_that_leaves_the_root_is_no_path():
    assert ManifestSource(pa.table({"y": ["../b", "/a"]}), ["y"]).spec["y"].classes == ("../b", "/a")


def test_given_classes_may_look_like_paths():
    column = {"name": "y", "classes": ["b.jpg", "a.jpg"]}
    assert read(ManifestSource(pa.table({"y": ["a.jpg"]}), {"y": column}), [0])["y"].tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter": []}, "filter: .*filters"),
        ({"resise": "crop"}, "resise: .*resize"),
        ({"check_files": "some"}, "check_files: 'some'.*first, none"),
        ({"allow_external": "yes"}, "allow_external: 'yes'"),
        ({"image_size": 32}, "image_size: "),
        ({"resize": "crop"}, "image_size: missing"),
    ],
)
def test_an_option_that_is_wrong_begins_the_message(options, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), FIELDS, root=folder, **options)
    assert re.match(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"nam": "species"}, "fields.y.nam: .*name"),
        ({"name": "species", "clases": ["a"]}, "fields.y.clases: .*classes"),
        ({"name": "species", "null": "skip"}, "fields.y.null: 'skip'.*error, ignore, drop"),
        ({"name": "species", "classes": []}, "fields.y.classes: "),
        ({"name": "species", "classes": ["a", "a"]}, "fields.y.classes: "),
        ({"name": ["species", "species"]}, "fields.y.name: .*twice"),
        ({"kind": "class"}, "fields.y.name: missing"),
        ({"name": ["even", "quality"], "separator": ";"}, "fields.y.name: "),
        (7, "fields.y"),
        ([], "fields.y"),
        # Options that do not fit the column.
        ({"name": "path", "null": "ignore"}, "fields.y.null"),
        ({"name": "path", "null": "zero"}, "fields.y.null: a missing file has no value for zero; set null: drop"),
        ({"name": "even", "kind": "image"}, "fields.y.kind"),
        ({"name": "even", "kind": "class"}, "fields.y.kind"),
        ({"name": "path", "dtype": "float32"}, "fields.y.dtype"),
        ({"name": ["path", "even"]}, "fields.y.name"),
        ({"name": "even", "classes": ["a", "b"]}, "fields.y.classes"),
        ({"name": "path", "row": "rows"}, "fields.y.row"),
        ({"name": "path", "separator": ";"}, "fields.y.separator"),
        ({"name": "path", "layout": "NHWC"}, "fields.y.layout"),
        ({"name": "even", "mode": "L"}, "fields.y.mode"),
    ],
)
def test_a_field_that_is_wrong_begins_the_message(column, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), {"x": "path", "y": column}, root=folder)
    assert re.match(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("fields", [{}, [], None, 7, {7: "even"}])
def test_fields_that_are_none(fields):
    with pytest.raises(ConfigError, match=r"^fields"):
        ManifestSource(given(), fields)


def test_patients_that_are_no_label_stay_out_of_the_fields_and_are_looked_up():
    # Folds by patient: those of validation are none of training's, which is what is wanted.
    patients, folds = [f"p{number // 2}" for number in range(12)], [number // 4 for number in range(12)]
    table = pa.table({"patient": patients, "fold": folds, "y": [0, 1] * 6})
    fold = [["fold", "==", 2]]
    val = ManifestSource(table, {"y": "y", "patient": "patient"}, filters=fold)
    with pytest.raises(ManifestError, match="'p4' is not one of the 4 classes") as caught:
        val.with_classes({"patient": ["p0", "p1", "p2", "p3"]})
    message = str(caught.value)
    assert "train with it" not in message
    assert "leave the row out" not in message
    # Each way out that it names works.
    assert '{"name": "patient", "classes": [...]}' in message
    given = {"y": "y", "patient": {"name": "patient", "classes": sorted(set(patients))}}
    val = ManifestSource(table, given, filters=fold).with_classes({"patient": ["p0"]})
    assert val.column("patient").tolist() == [4, 4, 5, 5]
    assert "set kind: text; source.names(KEY, batch[KEY])" in message
    val = ManifestSource(table, {"patient": {"name": "patient", "kind": "text"}}, filters=fold)
    assert val.names("patient", val.column("patient")).tolist() == ["p4", "p4", "p5", "p5"]
    source = ManifestSource(table, {"y": "y"}, filters=fold)
    side = SubsetSource(source, np.array([3, 1, 0]))
    with AsyncLoader(side, LoaderOptions(batch_size=4, shuffle="none", return_indices=True)) as loader:
        assert source.column("patient")[next(loader)["index"]].tolist() == ["p5", "p4", "p4"]
