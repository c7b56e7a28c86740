"""What public objects show of themselves, in a console, a log or somebody else's error."""

import inspect
import os
import pickle
import pydoc
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from support.lightning.trainer import Learning, Recorder, trainer
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


@pytest.fixture
def source(images):
    return lad.HDF5Source([images], {"x": "data", "y": "labels"})


def test_sources_say_where_how_many_and_which_fields(source, images):
    fields = "x uint8 (1, 8, 8), y int64"
    assert repr(source) == str(source) == f"<HDF5Source of 100 samples from {images}: {fields}; read by copying>"
    subset = lad.SubsetSource(source, np.arange(30))
    assert repr(subset) == f"<SubsetSource of 30 of 100 samples of {images}: {fields}; read by copying>"
    both = lad.ConcatSource([subset, source])
    whence = f"30 of 100 samples of {images} and 1 more"
    assert repr(both) == f"<ConcatSource of 130 samples from {whence}: {fields}; read by copying>"
    dataset = lad.DatasetSource(list(range(7)))
    assert repr(dataset) == "<DatasetSource of 7 samples from list: 0 int64; read by Python code>"
    assert repr(ArraySource({"x": np.zeros((5, 2))})) == "<ArraySource of 5 samples: x float64 (2,); read under a lock>"
    table = lad.ManifestSource(pa.table({"y": [1, 2], "z": ["a", "b"]}), {"y": "y", "z": "z"})
    assert repr(table) == "<ManifestSource of 2 samples from the table given: y int64, z int64; read by copying>"
    sides = lad.split(source, {"train": 0.5, "val": 0.5})
    assert repr(sides).startswith("{'train': <SubsetSource of ")
    source.close()


def test_loaders_and_what_goes_with_them_do_too():
    source = ArraySource({"x": np.zeros((1000, 2), "f4"), "y": np.arange(1000)})
    inside = "<ArraySource of 1,000 samples: x float32 (2,), y int64; read under a lock>"
    loader = lad.AsyncLoader(source, {"batch_size": 64})
    assert repr(loader) == f"<AsyncLoader of 16 batches of 64, shuffle=none, from {inside}>"
    dm = lad.AsyncDataModule(train=source, val=[source, source], loader={"batch_size": 64})
    assert repr(dm) == "<AsyncDataModule of train 1,000, val 2,000 samples: x float32 (2,), y int64>"
    assert repr(source.spec) == "<BatchSpec of dicts: x float32 (2,), y int64>"
    assert repr(lad.ConcatSource([source, source]).places()) == "<Places of 2,000 samples of 2 parts>"
    assert repr(lad.DevicePrefetcher(3)) == "DevicePrefetcher(device_depth=3)"
    assert repr(lad.ToFloat("x", dtype="float16")) == "ToFloat(['x'], dtype='float16')"
    shown = "Normalize(mean=(0.5, 0.1), std=2.0, axis=0, scale=None, fields=None, dtype='float32')"
    assert repr(lad.Normalize([0.5, 0.1], 2)) == shown


def test_a_prefetched_loader_shows_neither_batches_nor_addresses():
    loader = lad.prefetched(DataLoader(range(5), batch_size=2), device="cpu")
    line = "PrefetchedLoader of DataLoader, device=cpu, device_depth=2>"
    assert repr(loader) == f"<{line}"
    loader.close()
    assert repr(loader) == f"<closed {line}"
    unsized = lad.prefetched(iter([1, 2]))
    assert repr(unsized) == "<PrefetchedLoader of list_iterator, device=the accelerator, device_depth=2>"


def test_showing_reads_nothing(source, images, monkeypatch):
    loader = lad.AsyncLoader(source, {"batch_size": 8}, batch_transform=pytest.fail)
    subset = lad.SubsetSource(source, np.arange(30))
    dm = lad.AsyncDataModule(train=subset, loader={"batch_size": 8}, batch_transform=pytest.fail)
    before = [repr(each) for each in (source, subset, loader, dm)]
    os.unlink(images)
    # A plan of memory takes a look at each sample.
    monkeypatch.setattr(lad.AsyncLoader, "footprint", property(pytest.fail))
    monkeypatch.setattr(lad.HDF5Source, "read_into", pytest.fail)
    assert [repr(each) for each in (source, subset, loader, dm)] == before
    source.close()
    assert repr(source) == before[0]
    assert repr(pickle.loads(pickle.dumps(source))) == before[0]
    loader.close()


def test_help_shows_what_a_user_may_call():
    shown = pydoc.plain(pydoc.render_doc(lad.LoaderOptions))
    assert "batch_size: 'int'," in shown  # Python 3.13 writes a line for each argument
    assert inspect.signature(lad.LoaderOptions).parameters["batch_size"].default is inspect.Parameter.empty
    assert "of_batch" not in dir(lad.ReadError)
    assert not {name for name in dir(lad.SubsetSource) if name.startswith("routed")}


def test_help_of_a_loader_shows_no_machinery():
    def shown(kind):
        return {name for name in dir(kind) if name[0] != "_"}

    settings, looks = {"device", "device_depth"}, {"fill", "stats", "verdict"}
    own = {"close", "next", "set_epoch", "state_dict", "load_state_dict", "spec", "order", "footprint", "evaluation"}
    assert shown(lad.AsyncLoader) == settings | looks | own
    wrapped = type(lad.prefetched(DataLoader(range(5), batch_size=2), device="cpu"))
    orders = "dealt_order", "resumed_order"
    assert shown(wrapped) == {*settings, *looks, "close", "stop", "counted", "sharded_by_trainer", *orders}


def test_a_spec_is_a_mapping_of_its_fields():
    spec = ArraySource({"x": np.zeros((5, 2)), "y": np.zeros(5)}).spec
    assert list(spec) == ["x", "y"]
    assert ("x" in spec, "z" in spec, 0 in spec, len(spec)) == (True, False, False, 2)
    assert isinstance(spec, Mapping)
    assert dict(spec) == dict(spec.items()) == dict(spec.fields)
    assert spec.get("z") is None
    with pytest.raises(KeyError):
        spec[0]
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
def test_a_source_given_to_a_trainer_is_not_shown_as_a_path(source, images):
    with pytest.raises(TypeError, match="Found <HDF5Source of 100 samples from"):
        trainer().fit(Recorder(), source)


def test_a_source_given_to_prefetched_is_said_to_need_a_loader(source):
    with pytest.raises(ConfigError, match=r"<HDF5Source of .* is a source.*AsyncLoader\(source, LoaderOptions\(batch"):
        lad.prefetched(source)


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
def test_without_validation_lightning_does_not_speak_of_a_val_dataloader(recwarn):
    source, model = ArraySource({"x": np.zeros((8, 2))}), Learning()
    model.training_step = lambda *_: None
    dm = lad.AsyncDataModule(train=source, loader={"batch_size": 4})
    trainer().fit(model, datamodule=dm)
    assert not [warned for warned in recwarn if "val_dataloader" in str(warned.message)]
    both = lad.AsyncDataModule(train=source, val=source, loader={"batch_size": 4})
    with pytest.warns(UserWarning, match="no `validation_step`"):
        trainer().fit(model, datamodule=both)
