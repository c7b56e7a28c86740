"""The options of a column, its kind where the user gives none, and classes that stages share."""

import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.manifests import given
from support.sources.oracle import read

from lit_async_data import AsyncDataModule, ConcatSource, ManifestSource, SubsetSource
from lit_async_data.errors import ConfigError, ManifestError, ResumeError


@pytest.mark.parametrize(("name", "kind"), [("a.jpg", None), ("a", None), ("a", "image")])
def test_the_contents_and_not_the_name_say_what_a_file_is(name, kind, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / name, format="PNG")
    source = ManifestSource(pa.table({"path": [name]}), {"x": {"name": "path", "kind": kind}}, root=tmp_path)
    np.testing.assert_array_equal(read(source, [0])["x"][0].transpose(1, 2, 0), pixels)


def test_text_that_leaves_the_root_is_no_path():
    assert ManifestSource(pa.table({"y": ["../b", "/a"]}), ["y"]).spec["y"].classes == ("../b", "/a")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"nam": "species"}, "fields.y.nam: .*name"),
        ({"name": "species", "null": "skip"}, "fields.y.null: 'skip'.*error, ignore, drop"),
        ({"name": "species", "classes": []}, "fields.y.classes: "),
        ({"name": ["species", "species"]}, "fields.y.name: .*twice"),
        ({"kind": "class"}, "fields.y.name: missing"),
        # Options that do not fit the column.
        ({"name": "path", "null": "zero"}, "fields.y.null: a missing file has no value for zero; set null: drop"),
        ({"name": "even", "kind": "image"}, "fields.y.kind"),
        ({"name": "species", "kind": "klass"}, "fields.y.kind: 'klass' is not one of"),
        ({"name": ["path", "even"]}, "fields.y.name"),
        ({"name": "quality", "classes": ["a", "b"]}, "fields.y.classes"),
        ({"name": "path", "row": "rows"}, "fields.y.row"),
        ({"name": "species", "max_length": 2}, "fields.y.max_length"),
        ({"name": "even", "mode": "L"}, "fields.y.mode"),
    ],
)
def test_a_field_that_is_wrong_begins_the_message(column, message, folder):
    with pytest.raises(ConfigError) as caught:
        ManifestSource(given(), {"x": "path", "y": column}, root=folder)
    assert re.match(message, str(caught.value)), str(caught.value)


def numbers(source):
    return read(source, range(len(source)))["y"].tolist()


def test_numbers_in_validation_are_classes_where_training_has_classes(tmp_path):
    stages = {}
    for name, cells in {"train": ["2a", "10", "3"], "val": ["3", "10", "3"], "other": ["4"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["y", *cells]))
        stages[name] = ManifestSource(tmp_path / f"{name}.csv", {"y": "y"})
    dm = AsyncDataModule(train=stages["train"], val=stages["val"], loader={"batch_size": 3})
    assert dm.classes == {"y": ("10", "2a", "3")}
    assert numbers(dm.sources["val"][0]) == [2, 0, 2]
    with pytest.raises(ManifestError, match=r"row 0.*'4' is not one of the classes 10, 2a, 3"):
        AsyncDataModule(train=stages["train"], val=stages["other"], loader={"batch_size": 3})
    with pytest.raises(ConfigError, match=r"val: y holds classes, but numbers in the first stage; set kind: class"):
        AsyncDataModule(train=stages["val"], val=stages["train"], loader={"batch_size": 2})
    again = AsyncDataModule(test=stages["val"], loader={"batch_size": 3})
    again.load_state_dict(dm.state_dict())
    assert (numbers(again.sources["test"][0]), again.num_classes) == ([2, 0, 2], {"y": 3})


def test_sources_in_a_row_take_the_classes_of_training():
    train = ManifestSource(pa.table({"y": ["a", "b", "c"]}), {"y": "y"})
    val = ManifestSource(pa.table({"y": ["c", "a"]}), {"y": "y"})
    dm = AsyncDataModule(train=train, val=[ConcatSource([val, val]), SubsetSource(val, [0])], loader={"batch_size": 2})
    assert [numbers(source) for source in dm.sources["val"]] == [[2, 0, 2, 0], [2]]


def test_the_number_of_classes_is_that_of_the_checkpoint():
    dm = AsyncDataModule(train=ManifestSource(pa.table({"y": ["a", "c"]}), {"y": "y"}), loader={"batch_size": 2})
    assert (dm.spec["y"].classes, dm.num_classes) == (("a", "c"), {"y": 2})
    dm.load_state_dict({"classes": {"y": ["a", "b", "c"]}})
    assert (dm.spec["y"].classes, dm.num_classes) == (("a", "b", "c"), {"y": 3})
    with pytest.raises(ResumeError, match=r"row 1.*'c' is not one of"):
        dm.load_state_dict({"classes": {"y": ["a", "b"]}})
