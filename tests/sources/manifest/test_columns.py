"""The options of a column, and its kind where the user gives none."""

import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.manifests import given, labels
from support.sources.oracle import read

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError


@pytest.mark.parametrize(("name", "kind"), [("a.jpg", None), ("a", None), ("a", "image")])
def test_the_contents_and_not_the_name_say_what_a_file_is(name, kind, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / name, format="PNG")
    source = ManifestSource(pa.table({"path": [name]}), {"x": {"name": "path", "kind": kind}}, root=tmp_path)
    np.testing.assert_array_equal(read(source, [0])["x"][0].transpose(1, 2, 0), pixels)


def test_kind_says_what_text_means(tmp_path):
    (tmp_path / "t.csv").write_text("y\n10\n9\n10\n")
    number = ManifestSource(tmp_path / "t.csv", {"y": {"name": "y", "kind": "number"}})
    assert read(number, [0, 1, 2])["y"].tolist() == [10, 9, 10]
    kinds = ManifestSource(tmp_path / "t.csv", {"y": {"name": "y", "kind": "class"}})
    assert kinds.spec["y"].classes == ("9", "10")
    assert read(kinds, [0, 1, 2])["y"].tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match="kind"):
        labels(["a"], kind="klass")


def test_a_separator_parts_the_labels_of_a_cell():
    source, got = labels(["b", "a;c", "c;a;b"], separator=";")
    assert source.spec["y"].classes == ("a", "b", "c")
    assert (got.dtype, got.tolist()) == (np.uint8, [[0, 1, 0], [1, 0, 1], [1, 1, 1]])
    given_ = labels(["b", "a;c"], separator=";", classes=["c", "b", "a"])[1]
    assert given_.tolist() == [[0, 1, 0], [1, 0, 1]]
    with pytest.raises(ManifestError, match="row 1, column 'y': 'd' is not one of the classes a, b"):
        labels(["a", "a;d"], separator=";", classes=["a", "b"])
    source, got = labels(["1;2;3", "4;5;6.5"], separator=";", kind="number")
    assert source.spec["y"].shape == (3,)
    assert got.tolist() == [[1, 2, 3], [4, 5, 6.5]]


def test_text_that_leaves_the_root_is_no_path():
    assert ManifestSource(pa.table({"y": ["../b", "/a"]}), ["y"]).spec["y"].classes == ("../b", "/a")


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
        ({"name": "quality", "kind": "class"}, "fields.y.kind"),
        ({"name": "path", "dtype": "float32"}, "fields.y.dtype"),
        ({"name": ["path", "even"]}, "fields.y.name"),
        ({"name": "quality", "classes": ["a", "b"]}, "fields.y.classes"),
        ({"name": "path", "row": "rows"}, "fields.y.row"),
        ({"name": "path", "row": None}, "fields.y.row: None is not text"),
        ({"name": "species", "max_length": 2}, "fields.y.max_length"),
        ({"name": "path", "layout": "NHWC"}, "fields.y.layout"),
        ({"name": "even", "mode": "L"}, "fields.y.mode"),
    ],
)
def test_a_field_that_is_wrong_begins_the_message(column, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), {"x": "path", "y": column}, root=folder)
    assert re.match(message, str(caught.value)), str(caught.value)
