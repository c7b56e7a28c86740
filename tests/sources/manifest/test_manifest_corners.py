"""`ManifestSource` where two of its options meet, and what it says where they do not fit."""

from __future__ import annotations

import contextlib
import re

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import AsyncDataModule, AsyncLoader, Balanced, LoaderOptions, ManifestSource
from lit_async_data.errors import ConfigError, ManifestError, ResumeError


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        np.save(tmp_path / f"{number}.npy", np.full(2, number))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"], file["other"] = np.arange(10.0), -np.arange(10.0)
    return tmp_path


ROWS = {
    "path": ["a.h5"] * 4,
    "row": [3, 4, 5, 6],
    "dataset": ["data", "other", "other", "data"],
    "array": [f"{number}.npy" for number in range(4)],
    "y": [None, 1, 2, 3],
}


def test_rows_of_hdf5_files_where_samples_are_dropped(folder):
    fields = {"x": "path", "y": {"name": "y", "null": "drop"}}
    with contextlib.closing(ManifestSource(pa.table(ROWS), fields, root=folder)) as source:
        assert read(source, [0, 1, 2])["x"].tolist() == [-4, -5, 6]


@pytest.mark.parametrize("row", [99, None])
def test_a_path_of_an_hdf5_file_that_is_missing_can_be_dropped(row, folder):
    table = pa.table({"path": ["a.h5", None], "row": [3, row]})
    with contextlib.closing(ManifestSource(table, {"x": {"name": "path", "null": "drop"}}, root=folder)) as source:
        assert read(source, np.arange(len(source)))["x"].tolist() == [3]


def test_balance_leaves_out_what_is_ignored():
    source = ManifestSource(pa.table({"y": ["a", None, "b", "b"]}), {"y": {"name": "y", "null": "ignore"}})
    with AsyncLoader(source, LoaderOptions(batch_size=4, weights=Balanced("y"), epoch_size=40)) as loader:
        assert {int(value) for batch in loader for value in batch["y"]} == {0, 1}


def test_files_without_an_ending_are_images(folder):
    (folder / "0.png").rename(folder / "zero")
    source = ManifestSource(pa.table({"path": ["zero"]}), ["path"], root=folder)
    assert read(source, [0])["path"].shape == (1, 3, 4, 4)


def test_text_that_leaves_the_root_is_no_path():
    assert ManifestSource(pa.table({"y": ["../b", "/a"]}), ["y"]).spec["y"].classes == ("../b", "/a")


def test_given_classes_may_look_like_paths():
    column = {"name": "y", "classes": ["b.jpg", "a.jpg"]}
    assert read(ManifestSource(pa.table({"y": ["a.jpg"]}), {"y": column}), [0])["y"].tolist() == [1]


@pytest.mark.parametrize(
    "values",
    [
        ["b", "b", "a", "c", "c"],
        pytest.param(["b", None, "a", "c", "c"]),
    ],
)
def test_other_classes(values):
    first = 2 if values[1] else -100
    ignored = ManifestSource(pa.table({"y": values}), {"y": {"name": "y", "null": "ignore"}})
    again = ignored.with_classes({"y": ["z", "c", "b", "a"]})
    assert read(again, np.arange(5))["y"].tolist() == [2, first, 3, 1, 1]
    assert again.spec["y"].classes == ("z", "c", "b", "a")
    assert ignored.spec["y"].classes == ("a", "b", "c")
    with pytest.raises(ManifestError, match=r"row 3.*'c'") as caught:
        ignored.with_classes({"y": ["a", "b"]})
    assert caught.value.row == 3
    given = ManifestSource(pa.table({"y": ["b"]}), {"y": {"name": "y", "classes": ["b", "c"]}})
    assert given.with_classes({"y": ["c", "b"]}).spec["y"].classes == ("b", "c")


@pytest.mark.parametrize(
    ("column", "option"),
    [
        ({"name": "path", "null": "ignore"}, "fields.f.null"),
        ({"name": "number", "kind": "image"}, "fields.f.kind"),
        ({"name": "number", "kind": "class"}, "fields.f.kind"),
        pytest.param({"name": "path", "dtype": "float32"}, "fields.f.dtype"),
        pytest.param({"name": ["path", "number"]}, "fields.f.name"),
        pytest.param({"name": "number", "classes": ["a", "b"]}, "fields.f.classes"),
        pytest.param({"name": "path", "row": "rows"}, "fields.f.row"),
        pytest.param({"name": "path", "separator": ";"}, "fields.f.separator"),
        pytest.param({"name": "path", "layout": "NHWC"}, "fields.f.layout"),
        pytest.param({"name": "number", "mode": "L"}, "fields.f.mode"),
    ],
)
def test_an_option_that_does_not_fit_the_column_begins_the_message(column, option, folder):
    table = pa.table({"path": [f"{number}.png" for number in range(4)], "number": [0, 1, 0, 1]})
    with pytest.raises(ConfigError) as caught:
        ManifestSource(table, {"f": column}, root=folder)
    assert re.match(re.escape(option), str(caught.value)), str(caught.value)


def test_rows_that_go_into_several_stages_keep_the_classes_of_training_through_a_checkpoint():
    table = pa.table({"y": ["owl", "auk", "owl", "jay"]})
    dm = AsyncDataModule(train=ManifestSource(table, {"y": "y"}), loader={"batch_size": 2})
    again = AsyncDataModule(test=ManifestSource(table.slice(0, 1), {"y": "y"}), loader={"batch_size": 2})
    assert again.classes == {"y": ("owl",)}
    again.load_state_dict(dm.state_dict())
    assert again.classes == {"y": ("auk", "jay", "owl")}
    (batch,) = list(again.test_dataloader()[0])
    assert batch["y"].tolist() == [2]
    again.close()
    other = AsyncDataModule(test=ManifestSource(pa.table({"y": ["emu"]}), {"y": "y"}), loader={"batch_size": 2})
    with pytest.raises(ResumeError, match=r"row 0.*'emu' is not one of the 3 classes"):
        other.load_state_dict(dm.state_dict())
