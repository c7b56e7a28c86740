"""Several files or texts of a sample: values, padding, crops, errors."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncLoader, ConcatSource, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import ConfigError, CorruptError, FormatError, ManifestError, MissingError
from lit_async_data.testing import check_contract

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
    column = {"name": "x", "max_length": 4}
    for counts in ([2, 2], [1, 4]):
        source = ManifestSource(pa.table({"x": names(counts)}), {"x": column}, image_size=8)
        assert source.spec["x"].shape == (4, 3, 8, 8)
        assert read(source, [0, 1])["x_mask"].sum(axis=1).tolist() == counts
    one, other = (ManifestSource(pa.table({"x": names(it)}), {"x": column}, image_size=8) for it in ([1, 3], [3, 1]))
    assert one.fingerprint() != other.fingerprint()
    with pytest.raises(ManifestError, match=r"row 1, .*a list of 5, more than max_length 4; the longest has 6"):
        ManifestSource(pa.table({"x": names([1, 5, 6])}), {"x": column}, image_size=8)
    for kind in ("image", "text"):
        with pytest.raises(ConfigError, match=r"fields\.x\.max_length: each row has one"):
            ManifestSource(pa.table({"x": ["1.png"]}), {"x": {**column, "kind": kind}}, image_size=8)
    with pytest.raises(ConfigError, match=r"fields\.x_mask: x_mask is the field that tells the padding of x"):
        ManifestSource(pa.table({"x": names(), "m": COUNTS}), {"x": "x", "x_mask": "m"}, image_size=8)
    with pytest.raises(ManifestError, match="column 'x': every list in it is empty"):
        ManifestSource(pa.table({"x": pa.array([[]], pa.list_(pa.string()))}), {"x": {"name": "x", "kind": "image"}})


@pytest.mark.parametrize("kind", ["paths", "records"])
def test_an_error_names_the_place_in_the_list_and_the_sample_can_be_left_out(kind, folder):
    data = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(data[:60])
    table = given(kind, folder, names(), "file")
    source = ManifestSource(table, {"x": "x"}, root=folder, image_size=8)
    said = r"row 1 of .*t.parquet: column 'x'\[2\]: .*the PNG cannot be decoded"
    with pytest.raises(CorruptError, match=said):
        read(source, [0, 1])
    with AsyncLoader(source, {"batch_size": 8, "on_error": "skip"}) as loader:
        assert len(next(loader)["x"]) == len(COUNTS) - 1
    words = ["--check-all", "--bad-list", "bad.csv", "--fields", "x=x", "--image-size", "8"]
    assert main(["inspect", str(table), *words]) == 1
    assert len(ManifestSource(table, {"x": "x"}, image_size=8, exclude="bad.csv")) == len(COUNTS) - 1


@pytest.mark.parametrize(
    ("kind", "lists", "error", "message"),
    [
        ("paths", [["0.png"], ["1.png", "gone.png"]], MissingError, r"row 1 .*'x'\[1\]: \S*gone.png: no such file"),
        ("paths", [["0.png"], [None, "1.png"]], ManifestError, r"row 1 .*'x'\[0\]: no path; give one$"),
        ("paths", [["0.png"], ["../1.png", "2.png"]], ManifestError, r"row 1 .*'x'\[0\]: \S+: leaves root"),
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
    npy = pa.table({"x": [["0.npy"], ["1.npy", "0.npy"]]})
    for number in range(2):
        np.save(f"{number}.npy", np.full((2,), number + 1, "f4"))
    assert read(ManifestSource(npy, ["x"]), [1, 0])["x"].tolist() == [[[2, 2], [1, 1]], [[1, 1], [0, 0]]]


def test_a_mask_of_another_shape_in_a_list_is_named(folder):
    for name, size in {"mask": (10, 20), "wide": (30, 10)}.items():
        Image.new("P", size).save(f"{name}.png")
    table = pa.table({"x": [["0.png", "0.png"]], "m": [["mask.png", "wide.png"]]})
    fields = {"x": "x", "m": {"name": "m", "mode": "P"}}
    with pytest.raises(FormatError, match=r"row 0 .*column 'm'\[1\]: .*mask and image differ in shape"):
        ManifestSource(table, fields, image_size=8)


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


def test_lists_of_numbers_of_other_lengths_say_how_to_pad_them_and_classes_are_not_padded():
    with pytest.raises(ManifestError, match=r"row 1, .*a list of 0, but row 0 has 2; .* set max_length: 3, which pads"):
        ManifestSource(pa.table({"b": BOXES}), {"b": "b"})
    with pytest.raises(ConfigError, match=r"fields\.c\.max_length: lists of classes are not padded; leave it out"):
        ManifestSource(pa.table({"c": [["a", "b"], ["a"]]}), {"c": {"name": "c", "max_length": 3}})
    with pytest.raises(ConfigError, match=r"fields\.c\.max_length: each row has one value"):
        ManifestSource(pa.table({"c": [1, 2]}), {"c": {"name": "c", "max_length": 3}})
