"""Classes that stages share, and those of a checkpoint."""

import pyarrow as pa
import pytest
from support.sources.oracle import read

from lit_async_data import AsyncDataModule, ConcatSource, ManifestSource, SubsetSource
from lit_async_data.errors import ConfigError, ManifestError, ResumeError


@pytest.fixture
def csv(tmp_path):
    """The source of a table of text."""

    def written(name, *cells):
        (tmp_path / name).write_text("\n".join(["y", *cells]))
        return ManifestSource(tmp_path / name, {"y": "y"})

    return written


def labels(source):
    return read(source, range(len(source)))["y"].tolist()


def test_numbers_in_validation_are_classes_where_training_has_classes(csv):
    train = csv("train.csv", "2a", "10", "3")
    val = csv("val.csv", "3", "10", "3")
    dm = AsyncDataModule(train=train, val=val, loader={"batch_size": 3})
    assert dm.classes == {"y": ("10", "2a", "3")}
    assert labels(dm.sources["val"][0]) == [2, 0, 2]
    other = csv("other.csv", "4")
    with pytest.raises(ManifestError, match=r"row 0.*'4' is not one of the classes 10, 2a, 3"):
        AsyncDataModule(train=train, val=other, loader={"batch_size": 3})
    again = AsyncDataModule(test=val, loader={"batch_size": 3})
    again.load_state_dict(dm.state_dict())
    assert labels(again.sources["test"][0]) == [2, 0, 2]
    assert again.num_classes == {"y": 3}


def test_classes_in_validation_where_training_has_numbers_are_refused(csv):
    train = csv("train.csv", "1", "2")
    val = csv("val.csv", "a", "2")
    with pytest.raises(ConfigError, match=r"val: y holds classes, but numbers in the first stage; set kind: class"):
        AsyncDataModule(train=train, val=val, loader={"batch_size": 2})


def test_sources_in_a_row_take_the_classes_of_training():
    train = ManifestSource(pa.table({"y": ["a", "b", "c"]}), {"y": "y"})
    val = ManifestSource(pa.table({"y": ["c", "a"]}), {"y": "y"})
    dm = AsyncDataModule(train=train, val=ConcatSource([val, val]), loader={"batch_size": 2})
    assert labels(dm.sources["val"][0]) == [2, 0, 2, 0]
    subset = AsyncDataModule(train=train, val=SubsetSource(val, [0]), loader={"batch_size": 2})
    assert labels(subset.sources["val"][0]) == [2]


def test_the_number_of_classes_is_that_of_the_checkpoint():
    dm = AsyncDataModule(train=ManifestSource(pa.table({"y": ["a", "c"]}), {"y": "y"}), loader={"batch_size": 2})
    assert (dm.spec["y"].classes, dm.num_classes) == (("a", "c"), {"y": 2})
    dm.load_state_dict({"classes": {"y": ["a", "b", "c"]}})
    assert (dm.spec["y"].classes, dm.num_classes) == (("a", "b", "c"), {"y": 3})
    with pytest.raises(ResumeError, match=r"row 1.*'c' is not one of"):
        dm.load_state_dict({"classes": {"y": ["a", "b"]}})
