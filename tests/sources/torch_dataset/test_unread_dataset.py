"""Datasets that open their files with their first sample go to a reader process as if nobody had looked at them."""

import os
import pickle
import tracemalloc

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lit_async_data import AsyncLoader, DatasetSource
from lit_async_data.sources import torch_dataset as dataset_source


class Lazy(Dataset):
    """As in most tutorials."""

    def __init__(self, path):
        self.path, self.file, self.add = path, None, 0

    def __len__(self):
        return 8

    def opened(self):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return self.file

    def __getitem__(self, number):
        return {"x": self.opened()["x"][number] + self.add, "process": os.getpid()}


class New(Lazy):
    """Has no such attribute before."""

    def __init__(self, path):
        self.path, self.add = path, 0

    def opened(self):
        if not hasattr(self, "file"):
            self.file = h5py.File(self.path, "r")
        return self.file


class Marked(Lazy):
    is_open = False

    def opened(self):
        if not self.is_open:
            self.file, self.is_open = h5py.File(self.path, "r"), True
        return self.file


class Many(Lazy):
    def __init__(self, path):
        self.path, self.files, self.add = path, {}, 0

    def opened(self):
        if self.path not in self.files:
            self.files[self.path] = h5py.File(self.path, "r")
        return self.files[self.path]


@pytest.fixture
def path(h5):
    return h5(x=np.arange(16.0).reshape(8, 2))


def sent(source):
    return cloudpickle.loads(cloudpickle.dumps(source)).dataset


@pytest.mark.parametrize(
    "make",
    [Lazy, New, Marked, Many, lambda path: Subset(Lazy(path), range(8)), lambda path: ConcatDataset([Many(path)])],
    ids=["None", "new attribute", "flag", "dict", "subset", "concat"],
)
def test_a_dataset_that_opens_its_file_with_its_first_sample_is_sent_unopened(path, make):
    dataset = make(path)
    source = DatasetSource(dataset)
    source.read_into(np.arange(2), {"x": np.empty((2, 2)), "process": np.empty(2, "i8")})
    assert source.dataset is dataset
    assert [sent(source)[number]["x"].tolist() for number in (0, 7)] == [[0, 1], [14, 15]]


@pytest.mark.processes
def test_a_reader_process_reads_it(path):
    options = {"batch_size": 8, "shuffle": False, "worker_kind": "process", "workers": 1}
    with AsyncLoader(DatasetSource(Lazy(path)), options) as loader:
        (batch,) = loader
    assert batch["x"].tolist() == np.arange(16.0).reshape(8, 2).tolist()
    assert os.getpid() not in batch["process"].tolist()


def test_what_the_user_sets_later_is_sent_and_what_was_opened_is_not(path):
    dataset = Marked(path)
    source = DatasetSource(dataset)
    dataset.add = 5
    assert vars(sent(source)) == {"path": path, "file": None, "add": 5}
    assert (dataset.file["x"][1] == [2, 3]).all()


def test_a_dataset_that_can_be_pickled_is_sent_as_it_is(path):
    source = DatasetSource(TensorDataset(torch.zeros(4, 2)))
    source.dataset.tensors[0][1] = 7
    assert pickle.loads(pickle.dumps(source)).dataset.tensors[0][1].tolist() == [7, 7]


@pytest.mark.parametrize("held", [torch.zeros(4, 2**20), np.zeros((4, 2**20), "f4")], ids=["torch", "numpy"])
def test_what_a_dataset_holds_is_not_copied(path, held):
    dataset = Lazy(path)
    dataset.held = held
    tracemalloc.start()
    try:
        source = DatasetSource(dataset)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    assert (sent(source).held == held).all()


def test_a_dataset_that_is_too_large_is_left_as_it_is(path, monkeypatch):
    monkeypatch.setattr(dataset_source, "MOST_BYTES", 100)
    source = DatasetSource(Lazy(path))
    with pytest.raises(TypeError, match="h5py objects cannot be pickled"):
        pickle.dumps(source)
