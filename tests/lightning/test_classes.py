"""Classes are counted by their names, mean the same in all stages, and go on after a checkpoint."""

import re

import h5py
import numpy as np
import pytest
from support.lightning.datamodules import dm_of, source

from lit_async_data import AsyncDataModule, Field, HDF5Source
from lit_async_data.errors import ConfigError, ResumeError


@pytest.mark.parametrize("shape", [(1000,), (1000, 1)])
def test_classes_are_counted_where_no_number_is_below_zero(shape, monkeypatch):
    monkeypatch.setattr("lit_async_data.lightning.classes.LABELS_PER_READ", 300)
    labels = np.minimum(np.arange(1000), 7 + np.arange(1000) // 999).reshape(shape)
    dm = dm_of(train=source(y=labels, z=np.zeros((1000, 2), np.int64), shift=labels - 3))
    assert dm.num_classes == {"y": 9}


def of_classes(h5, *names):
    path = h5(
        f"{'-'.join(names)}.h5", data=np.zeros((30, 2), np.float32), labels=np.arange(30) % min(len(names) or 3, 3)
    )
    return HDF5Source(path, {"x": "data", "y": Field("labels", classes=names) if names else "labels"})


@pytest.mark.parametrize("stage", ["val", "predict"])
def test_stages_in_which_the_same_number_is_another_class_are_refused(h5, stage):
    def source(*names):
        return of_classes(h5, *names)

    def dm(*names):
        return AsyncDataModule(
            train=source("cat", "dog"),
            **{stage: [source("cat", "dog", "eel"), source(*names)]},
            loader={"batch_size": 9},
        )

    for names in [("dog", "cat"), ("cat", "dog", "fox")]:
        with pytest.raises(ConfigError) as caught:
            dm(*names)
        said = f"{stage}: the classes of y are {', '.join(names)}, but those of {stage} are cat, dog, eel: the same"
        assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError, match=f"^{stage}: the classes of y are dog, but those of train are cat: "):
        AsyncDataModule(train=source("cat"), **{stage: source("dog")}, loader={"batch_size": 9})
    for names in [("cat", "dog"), ("cat", "dog", "eel"), ("cat", "dog", "eel", "fox")]:
        assert dm(*names).classes == {"y": ("cat", "dog")}
    unseen = AsyncDataModule(train=source("cat", "dog", "eel"), loader={"batch_size": 9})
    assert unseen.num_classes == {"y": 3}, "names count, and not the labels that happen to be there"


def named(h5, *names):
    return AsyncDataModule(train=of_classes(h5, *names), loader={"batch_size": 10})


@pytest.mark.parametrize("names", [("dog", "cat", "eel"), ("cat", "dog"), ("cat", "dog", "eel", "fox")])
def test_a_checkpoint_of_other_classes_is_refused_and_both_are_named(h5, names):
    saved = named(h5, "cat", "dog", "eel").state_dict()
    with pytest.raises(ResumeError) as caught:
        named(h5, *names).load_state_dict(saved)
    assert f"the classes of y are {', '.join(names)}, but were cat, dog, eel in the checkpoint" in str(caught.value)
    assert "classes=['cat', 'dog', 'eel']" in str(caught.value)


def test_a_checkpoint_says_nothing_of_classes_without_names(h5):
    dm = named(h5)
    dm.load_state_dict(named(h5, "cat", "dog", "eel").state_dict())
    assert (dm.classes, dm.num_classes) == ({}, {"y": 3})


def named_by_the_file(path, names, gap=1):
    """An enumeration whose numbers are so far apart, with one sample of each name."""
    numbers = {name: gap * number for number, name in enumerate(names)}
    with h5py.File(path, "w") as file:
        file.create_dataset("y", data=[*numbers.values()], dtype=h5py.enum_dtype(numbers, "i4"))
    return str(path)


@pytest.mark.parametrize("gap", [1, 3])
def test_what_the_error_of_stages_advises_helps(tmp_path, gap):
    train = named_by_the_file(tmp_path / "train.h5", ["cat", "dog"], gap)
    val = named_by_the_file(tmp_path / "val.h5", ["dog", "eel"], gap)

    def dm(**options):
        train_and_val = [HDF5Source(path, {"y": Field("y", **options)}) for path in (train, val)]
        return AsyncDataModule(train=train_and_val[0], val=train_and_val[1], loader={"batch_size": 2})

    with pytest.raises(ConfigError, match="the same number would mean different classes; give the field of") as caught:
        dm()
    listed = re.search(r"classes=(\[.*\])", str(caught.value))[1]
    assert listed == "['cat', 'dog', 'eel']"
    module = dm(classes=["cat", "dog", "eel"])
    assert module.classes == {"y": ("cat", "dog", "eel")}
    with module.val_dataloader()[0] as loader:
        assert next(loader)["y"].tolist() == [1, 2]
