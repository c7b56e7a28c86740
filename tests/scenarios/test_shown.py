"""What public objects show of themselves, in a console, a log or somebody else's error."""

import numpy as np
import pyarrow as pa
import pytest
from support.lightning.trainer import Learning, trainer

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
    table = lad.ManifestSource(pa.table({"y": [1, 2], "z": ["a", "b"]}), {"y": "y", "z": "z"})
    assert repr(table) == "<ManifestSource of 2 samples from the table given: y int64, z int64; read by copying>"
    source.close()


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
