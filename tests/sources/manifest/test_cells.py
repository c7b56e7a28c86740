"""Cells that name rows of HDF5 files, or several files or texts of a sample."""

import collections
import contextlib
import csv
import json
import pickle

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncLoader, ConcatSource, LoaderOptions, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import (
    AsyncDataError,
    ConfigError,
    CorruptError,
    FormatError,
    ManifestError,
    MissingError,
    SourceError,
)
from lit_async_data.sources.manifest import fields as hdf5_fields
from lit_async_data.testing import check_contract


@pytest.fixture
def stored(tmp_path):
    """Three compressed files of 40 rows in chunks of 10, and a table that goes through them at random."""
    values = np.random.default_rng(0).integers(0, 255, (3, 40, 4, 4, 2), dtype=np.uint8)
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=values[number], chunks=(10, 4, 4, 2), compression="gzip")
            file["flat"] = values[number].reshape(40, -1)[:, :5].astype(">f4")
            file["more/data"] = values[number] // 2
    order = np.random.default_rng(1).permutation(120)
    table = {"id": [f"{row:03d}" for row in order], "path": [f"{row // 40}.h5" for row in order]}
    table |= {"row": order % 40, "y": order.astype("f4")}
    return tmp_path, values.reshape(120, 4, 4, 2), order, table


@pytest.mark.parametrize("named", [None, "more/data", "column"])
def test_rows_of_hdf5_files(named, stored):
    folder, values, order, table = stored
    wanted = values[order]
    if named == "more/data":
        wanted = wanted // 2
    elif named == "column":
        table["dataset"] = ["data" if row % 2 else "more/data" for row in order]
        wanted = np.where((order % 2).astype(bool)[:, None, None, None], wanted, wanted // 2)
    field = {"name": "path", "dataset": named} if named == "more/data" else "path"
    source = ManifestSource(pa.table(table), {"x": field, "y": "y"}, id="id", root=folder)
    samples = np.random.default_rng(2).permutation(120)
    got = read(source, samples)
    np.testing.assert_array_equal(got["x"], wanted[samples])
    np.testing.assert_array_equal(got["y"], order[samples])
    where = source.locate([5])[0]
    assert (where.row, where.id, where.path) == (5, f"{order[5]:03d}", f"{folder}/{order[5] // 40}.h5")
    copied = pickle.loads(pickle.dumps(source))
    for _ in range(2):
        with contextlib.closing(copied):
            np.testing.assert_array_equal(read(copied, [7])["x"][0], wanted[7])
    source.close()


def test_layout_and_type_of_several_rows_of_a_sample(stored):
    folder, values, order, table = stored
    table = pa.table({**table, "other": table["path"][::-1], "other_row": (order % 40)[::-1]})
    fields = {"x": {"name": "path", "layout": "NHWC", "dtype": "float32"}, "y": {"name": "path", "dataset": "flat"}}
    fields["z"] = {"name": "other", "row": "other_row"}
    with contextlib.closing(ManifestSource(table, fields, root=folder)) as source:
        assert (source.spec["x"].shape, source.spec["x"].dtype) == ((2, 4, 4), np.float32)
        assert (source.spec["y"].shape, source.spec["y"].dtype) == ((5,), np.float32)
        got = read(source, np.arange(120))
        np.testing.assert_array_equal(got["x"], values[order].transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(got["y"], values[order].reshape(120, -1)[:, :5])
        np.testing.assert_array_equal(got["z"], values[order[::-1]])


def test_rows_of_hdf5_files_may_stand_as_text_or_be_whole_fractions(stored):
    folder, values, order, table = stored
    lines = [f"{path},{row}" for path, row in zip(table["path"], table["row"])]
    (folder / "t.csv").write_text("\n".join(["path,row", *lines]))
    fractions = pa.table({**table, "row": (order % 40).astype("f8")})
    for each in (folder / "t.csv", fractions):
        with contextlib.closing(ManifestSource(each, {"x": "path"}, root=folder)) as source:
            np.testing.assert_array_equal(read(source, [3, 5])["x"], values[order[[3, 5]]])
    rows = [None if number == 3 else float(row) for number, row in enumerate(order % 40)]
    missing = pa.table({**table, "row": pa.array(rows)})
    with contextlib.closing(ManifestSource(missing, {"x": {"name": "path", "null": "drop"}}, root=folder)) as source:
        np.testing.assert_array_equal(read(source, [3])["x"], values[order[[4]]])
    with pytest.raises(ManifestError, match=r"row 3.*no row number; give one, or set null: drop"):
        ManifestSource(missing, {"x": "path"}, root=folder)
    for wrong in (0.5, 1e19, np.inf):
        with pytest.raises(ConfigError, match="does not hold whole numbers"):
            ManifestSource(pa.table({**table, "row": (order % 40) + wrong}), {"x": "path"}, root=folder)
    with pytest.raises(AsyncDataError, match=r"column.*row"):
        ManifestSource(pa.table({"path": table["path"]}), {"x": "path"}, root=folder)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_chunk_order_decodes_every_chunk_once(workers, stored):
    folder, values, order, table = stored
    options = LoaderOptions(batch_size=16, shuffle="chunk", shuffle_chunks=3, workers=workers, return_indices=True)
    orders = []
    with (
        contextlib.closing(ManifestSource(pa.table(table), {"x": "path", "y": "y"}, root=folder)) as source,
        AsyncLoader(source, options) as loader,
    ):
        for _ in range(2):
            orders.append([])
            for batch in loader:
                rows = order[batch["index"].numpy()]
                np.testing.assert_array_equal(batch["x"].numpy(), values[rows])
                np.testing.assert_array_equal(batch["y"].numpy(), rows)
                orders[-1] += batch["index"].tolist()
    assert orders[0] != orders[1]
    for ids in orders:
        assert sorted(ids) == list(range(120))
        # Each group of three chunks is dealt before the next one: 30 samples are of three chunks.
        for begin in range(0, 120, 30):
            chunks = collections.Counter(int(order[sample]) // 10 for sample in ids[begin : begin + 30])
            assert set(chunks.values()) == {10}


def test_an_hdf5_file_may_be_named_in_several_ways(tmp_path, h5, monkeypatch):
    opened = []
    make = hdf5_fields.HDF5Source
    monkeypatch.setattr(hdf5_fields, "HDF5Source", lambda files, *a, **o: opened.append(files) or make(files, *a, **o))
    h5("a.h5", data=np.arange(5.0))
    (tmp_path / "b.h5").symlink_to(tmp_path / "a.h5")
    table = pa.table({"path": ["a.h5", "./a.h5", "b.h5"], "row": [4, 2, 3]})
    with contextlib.closing(ManifestSource(table, {"x": "path"}, root=tmp_path)) as source:
        assert read(source, [0, 1, 2])["x"].tolist() == [4, 2, 3]
    assert opened == [[str(tmp_path / "a.h5")]]


@pytest.fixture
def two(tmp_path):
    """A folder with two files, a damaged one and one of another kind, and with a link to a file outside."""
    root = tmp_path / "root"
    root.mkdir()
    for path, rows in ((root / "a.h5", 10), (root / "b.h5", 6), (tmp_path / "out.h5", 6)):
        with h5py.File(path, "w") as file:
            file["data"] = np.arange(rows * 2, dtype="f4").reshape(rows, 2)
            file["other"] = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
    with h5py.File(root / "broken.h5", "w") as file:
        data = file.create_dataset("data", data=np.ones((200, 2), "f4"), chunks=(50, 2), fletcher32=True)
        place = data.id.get_chunk_info(0).byte_offset + 20
    with (root / "broken.h5").open("r+b") as file:
        file.seek(place)
        file.write(b"\xa5" * 20)
    (root / "bad.h5").write_bytes(b"not at all" * 300)
    (root / "link.h5").symlink_to(tmp_path / "out.h5")
    return root


def hdf5(root, path="b.h5", row=5, dataset="data"):
    rows = {"id": ["p", "q", "r-1"], "path": ["a.h5", "b.h5", path], "row": [9, 0, row]}
    table = pa.table({**rows, "dataset": ["data", "data", dataset]})
    return ManifestSource(table, {"x": "path"}, id="id", root=root)


@pytest.mark.parametrize(
    "wrong",
    [{"row": row} for row in (6, -1, None)]
    + [{"path": path} for path in ("gone.h5", "bad.h5", "broken.h5", "link.h5", None)]
    + [{"dataset": name} for name in ("nope", None)],
    ids=str,
)
def test_a_wrong_row_of_an_hdf5_file_is_named(wrong, two):
    assert read(hdf5(two), [0, 1, 2])["x"].tolist() == [[18, 19], [0, 1], [10, 11]]
    with pytest.raises(SourceError, match=r"row 2") as caught:
        read(hdf5(two, **wrong), [0, 1, 2])
    assert caught.value.row == 2
    if None not in wrong.values():
        assert "r-1" in str(caught.value)
        assert wrong.get("path", "b.h5") in str(caught.value)
    with pytest.raises(FormatError, match=r"'x' has shape \(3,\) in sources\[1\] .*, but \(2,\) in sources\[0\]"):
        hdf5(two, dataset="other")


@pytest.mark.parametrize("row", [99, None])
def test_a_path_of_an_hdf5_file_that_is_missing_can_be_dropped(row, two):
    table = pa.table({"path": ["a.h5", None], "row": [3, row]})
    with contextlib.closing(ManifestSource(table, {"x": {"name": "path", "null": "drop"}}, root=two)) as source:
        assert [sample["x"].tolist() for sample in (source[n] for n in range(len(source)))] == [[6, 7]]
    with pytest.raises(ManifestError, match=r"row 1, .*no (path|row number); give one, or set null: drop") as caught:
        ManifestSource(table, {"x": "path"}, root=two)
    assert caught.value.row == 1


def test_classes_that_files_name(tmp_path):
    for number, names in enumerate((["B", "T"], ["T", "NK"])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["y"] = np.array([0, 1, -1], "i1")
            file["y"].attrs["categories"] = file.create_dataset("names", data=names, dtype=h5py.string_dtype()).ref
    table = pa.table({"path": ["0.h5", "1.h5", "0.h5", "1.h5"], "row": [0, 1, 1, 0]})
    field = {"name": "path", "kind": "hdf5", "dataset": "y"}
    with pytest.raises(SourceError, match=r"row 1 of .*classes=\['B', 'T', 'NK'\]\) numbers them by name"):
        ManifestSource(table, {"y": field}, root=tmp_path)
    given = ManifestSource(table, {"y": {**field, "classes": ["NK", "T", "B"]}}, root=tmp_path)
    assert given.spec.names("y", [given[n]["y"] for n in range(4)]).tolist() == ["B", "NK", "T", "T"]
    missing = pa.table({"path": ["0.h5", "0.h5"], "row": [1, 2]})
    source = ManifestSource(missing, {"y": field}, root=tmp_path)
    with pytest.raises(SourceError, match=r"row 1 of .*0.h5:/y, row 2: -1 is a missing value"):
        source[1]
    ignored = ManifestSource(missing, {"y": {**field, "null": "ignore"}}, root=tmp_path)
    assert [ignored[n]["y"] for n in range(2)] == [1, -100]


COUNTS = [2, 3, 0, 1, 3, 2, 1]
RECORDS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
EMBEDDED = {"records": RECORDS, "bytes": pa.list_(pa.binary()), "three": pa.list_(pa.binary(), 3)}
EMBEDDED["repeated"] = pa.list_(pa.dictionary(pa.int32(), pa.binary()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images of several sizes, each of one colour."""
    monkeypatch.chdir(tmp_path)
    for number in range(max(20, sum(COUNTS))):
        Image.new("RGB", (10 + number, 20), (number, 2 * number, 7)).save(f"{number}.png")
    return tmp_path


def names(counts=COUNTS):
    files = iter(range(sum(counts)))
    return [[f"{next(files)}.png" for _ in range(count)] for count in counts]


def given(kind, folder, lists, place="memory"):
    if kind == "separator":
        with open(folder / "t.csv", "w", newline="") as file:
            csv.writer(file).writerows([["x"], *([" ; ".join(each) + ";"] for each in lists)])
        return folder / "t.csv"
    if kind in EMBEDDED:
        lists = [[(folder / name).read_bytes() for name in each] for each in lists]
        lists = [[{"bytes": data, "path": ""} for data in each] for each in lists] if kind == "records" else lists
    table = pa.table({"x": pa.array(lists, EMBEDDED.get(kind, pa.list_(pa.string())))})
    if place == "memory":
        return table
    pq.write_table(table, folder / "t.parquet", row_group_size=3)
    return folder / "t.parquet"


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("kind", ["paths", "separator", *EMBEDDED])
def test_lists_are_stacked_and_padded(kind, place, folder):
    counts = [3] * 6 if kind == "three" else COUNTS
    column = {"name": "x", "separator": ";"} if kind == "separator" else "x"
    source = ManifestSource(given(kind, folder, names(counts), place), {"x": column}, root=folder, image_size=8)
    assert source.spec["x"].shape == (3, 3, 8, 8)
    order = np.random.default_rng(0).permutation(len(counts))
    found = read(source, order)
    first = np.cumsum([0, *counts])
    for place_, sample in enumerate(order.tolist()):
        for item in range(3):
            colour = [number := first[sample] + item, 2 * number, 7] if item < counts[sample] else [0, 0, 0]
            assert (found["x"][place_, item] == np.array(colour)[:, None, None]).all()
    assert list(source.spec) == (["x"] if kind == "three" else ["x", "x_mask"])
    if kind != "three":
        assert found["x_mask"].sum(axis=1).tolist() == np.array(counts)[order].tolist()
    check_contract(source)


def test_images_of_a_sample_share_their_crop(folder):
    gradient = np.arange(400, dtype=np.uint32).reshape(20, 20, 1).repeat(3, axis=2).astype(np.uint8)
    Image.fromarray(gradient).save("one.png")
    table = pa.table({"x": [["one.png"] * 3] * 8, "y": ["one.png"] * 8})
    source = ManifestSource(table, {"x": "x", "y": "y"}, image_size=9, resize="random_crop")
    assert (source.spec["x"].shape, list(source.spec)) == ((3, 3, 9, 9), ["x", "y"])
    with AsyncLoader(source, {"batch_size": 8, "augment": True}) as loader:
        batch = next(loader)
    assert (batch["x"] == batch["y"][:, None]).all()
    assert (batch["x"][0] != batch["x"][1]).any()


def test_max_length_is_the_length_of_every_table(folder):
    column, sources = {"name": "x", "max_length": 4}, []
    for counts in ([2, 2], [1, 4]):
        sources.append(ManifestSource(pa.table({"x": names(counts)}), {"x": column}, image_size=8))
        assert sources[-1].spec["x"].shape == (4, 3, 8, 8)
        assert read(sources[-1], [0, 1])["x_mask"].sum(axis=1).tolist() == counts
    assert sources[0].fingerprint() != sources[1].fingerprint()
    with pytest.raises(ManifestError, match=r"row 1, .*a list of 5, more than max_length 4; the longest has 6"):
        ManifestSource(pa.table({"x": names([1, 5, 6])}), {"x": column}, image_size=8)


PADDED = {"name": "x", "max_length": 4}


@pytest.mark.parametrize(
    ("columns", "fields", "said"),
    [
        ({"x": ["1.png"]}, {"x": {**PADDED, "kind": "image"}}, r"fields\.x\.max_length: each row has one"),
        ({"x": [1, 2]}, {"x": PADDED}, r"fields\.x\.max_length: each row has one value"),
        ({"x": [["a", "b"], ["a"]]}, {"x": PADDED}, r"fields\.x\.max_length: lists of classes are not padded; leave"),
        ({"x": names(), "m": COUNTS}, {"x": "x", "x_mask": "m"}, r"fields\.x_mask: x_mask is the field that tells"),
        (
            {"x": pa.array([[]], pa.list_(pa.string()))},
            {"x": {"name": "x", "kind": "image"}},
            "every list in it is",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused(columns, fields, said, folder):
    with pytest.raises((ConfigError, ManifestError), match=said):
        ManifestSource(pa.table(columns), fields)


@pytest.mark.parametrize("kind", ["paths", "records"])
def test_an_error_names_the_place_in_the_list_and_the_sample_can_be_left_out(kind, folder):
    data = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(data[:60])
    table = given(kind, folder, names(), "file")
    source = ManifestSource(table, {"x": "x"}, image_size=8)
    with pytest.raises(CorruptError, match=r"row 1 of .*t.parquet: column 'x'\[2\]: .*the PNG cannot be decoded"):
        read(source, [0, 1])
    words = ["--check-all", "--bad-list", "bad.csv", "--fields", "x=x", "--image-size", "8"]
    assert main(["inspect", str(table), *words]) == 1
    assert len(ManifestSource(table, {"x": "x"}, image_size=8, exclude="bad.csv")) == len(COUNTS) - 1


@pytest.mark.parametrize(
    ("kind", "lists", "error", "message"),
    [
        ("paths", [["0.png"], ["1.png", "gone.png"]], MissingError, r"row 1 .*'x'\[1\]: \S*gone.png: no such file"),
        ("paths", [["0.png"], [None, "1.png"]], ManifestError, r"row 1 .*'x'\[0\]: no path; give one$"),
        ("paths", [["0.png"], ["1.png", "../2.png"]], ManifestError, r"row 1 .*'x'\[1\]: \S+: leaves root"),
        ("records", [["0.png"], ["1.png", None]], FormatError, r"row 1 .*'x'\[1\]: no bytes, only the path 'y'"),
    ],
)
def test_a_file_that_is_not_there_is_an_error_of_its_sample(kind, lists, error, message, folder):
    table = pa.table({"x": lists})
    if kind == "records":
        records = [[{"bytes": name and (folder / name).read_bytes(), "path": "y"} for name in each] for each in lists]
        table = pa.table({"x": pa.array(records, RECORDS)})
    source = ManifestSource(table, {"x": "x"}, image_size=8)
    assert read(source, [0])["x_mask"].tolist() == [[True, False]]
    with pytest.raises(error, match=message):
        read(source, [1])
    with AsyncLoader(source, {"batch_size": 1, "on_error": "skip"}) as loader:
        list(loader)
        assert loader.state_dict()["bad_samples"] == [1]
    if kind == "paths":
        assert source.grouped_by_path(str)[1] == ["0.png", lists[1][0] or "."]


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        ([["0.png"], None, [], ["a/../1.png", "2.png"]], {}),
        (["0", " ", " ; ", "a/../1;2"], {"separator": ";", "suffix": ".png"}),
    ],
)
def test_rows_without_a_list_and_what_else_goes_by_the_first_image(cells, options, folder):
    table, column = pa.table({"x": cells}), {"name": "x", **options}
    whole = ManifestSource(table, {"x": column}, image_size=8)
    assert read(whole, [2, 0])["x_mask"].tolist() == [[False, False], [True, False]]
    with pytest.raises(ManifestError, match=r"row 1 of .*: column 'x'\[0\]: no path; give one, or set null: drop$"):
        read(whole, [1])
    source = ManifestSource(table, {"x": {**column, "null": "drop"}}, image_size=8)
    assert [place.path and place.path[-5:] for place in source.locate([0, 1, 2])] == ["0.png", None, "1.png"]
    assert source.grouped_by_path(lambda path: path)[1] == ["0.png", ".", "1.png"]
    assert [run.samples for run in source.layout().runs] == [3]


@pytest.mark.parametrize("separator", [None, "|"])
def test_texts_of_a_sample_are_numbers(separator, tmp_path):
    texts = [["an owl", "a bird"], ["a bird"], ["an auk", "an owl"]]
    column = {"name": "t", "kind": "text"}
    if separator:
        (tmp_path / "t.csv").write_text("t\n" + "\n".join(map("|".join, texts)) + "\n")
        source = ManifestSource(tmp_path / "t.csv", {"t": {**column, "separator": separator}})
    else:
        source = ManifestSource(pa.table({"t": texts}), {"t": column})
    found = read(source, [1, 2])
    assert found["t"].tolist() == [[0, -100], [1, 2]]
    assert found["t_mask"].tolist() == [[True, False], [True, True]]
    assert source.spec.names("t", found["t"]).tolist() == [["a bird", ""], ["an auk", "an owl"]]
    check_contract(source)
    other = ManifestSource(pa.table({"t": [["a dodo", "an owl"], None]}), {"t": {**column, "null": "ignore"}})
    both = ConcatSource([source, other])
    assert both.spec.names("t", read(both, [0, 3, 4])["t"]).tolist() == [*texts[:1], ["a dodo", "an owl"], ["", ""]]


BOXES = [[1.5, 2.0], [], [3.0, 4.0, 5.0], [6.0]]


@pytest.mark.parametrize("kind", ["list", "csv", "json"])
def test_lists_of_numbers_are_padded_to_max_length_where_it_is_set(kind, tmp_path):
    table, column = pa.table({"b": BOXES, "k": [[int(v) for v in each] for each in BOXES]}), {}
    if kind == "csv":
        rows = [";".join(map(str, each)) + ";" for each in BOXES]  # a blank cell would be no value
        rows = [f"{each},{each.replace('.0', '').replace('.5', '')}" for each in rows]
        (tmp_path / "t.csv").write_text("\n".join(["b,k", *rows]))
        table, column = tmp_path / "t.csv", {"separator": ";"}
    elif kind == "json":
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))
        table = tmp_path / "t.jsonl"
    fields = {"b": {"name": "b", "max_length": 4, **column}, "k": {"name": "k", "max_length": 3, **column}}
    fields["k"]["kind"] = "number"
    source = ManifestSource(table, fields)
    check_contract(source)
    found = read(source, [3, 2, 1, 0])
    assert found["b"].tolist() == [[6, 0, 0, 0], [3, 4, 5, 0], [0, 0, 0, 0], [1.5, 2, 0, 0]]
    assert found["k"].tolist() == [[6, 0, 0], [3, 4, 5], [0, 0, 0], [1, 2, 0]]
    assert found["b_mask"].sum(axis=1).tolist() == found["k_mask"].sum(axis=1).tolist() == [1, 3, 0, 2]
    assert (source.spec["b"].shape, source.spec["k"].dtype) == ((4,), np.int64)
    with pytest.raises(ManifestError, match=r"row 2, column 'b': a list of 3, more than max_length 2") as caught:
        ManifestSource(table, {"b": {**fields["b"], "max_length": 2}})
    assert caught.value.row == 2


def test_a_row_without_a_list_of_numbers_is_no_list_of_zeros():
    table = pa.table({"b": pa.array([[1.0], None, [2.0, None]]), "y": [0, 1, 2]})
    column = {"name": "b", "max_length": 2}
    with pytest.raises(ManifestError, match=r"row 1.*: no value in row 1, row 2"):
        ManifestSource(table, {"b": column})
    found = read(ManifestSource(table, {"b": {**column, "null": "ignore"}}), [0, 1, 2])
    np.testing.assert_array_equal(found["b"], [[1, 0], [np.nan] * 2, [2, np.nan]])
    assert found["b_mask"].tolist() == [[True, False], [False, False], [True, True]]
    dropped = ManifestSource(table, {"b": {**column, "null": "drop"}, "y": "y"})
    assert (len(dropped), read(dropped, [0])["b_mask"].tolist()) == (1, [[True, False]])
    with pytest.raises(ManifestError, match=r"row 1, .*a list of 0, but row 0 has 2; .* set max_length: 3, which pads"):
        ManifestSource(pa.table({"b": BOXES}), {"b": "b"})
