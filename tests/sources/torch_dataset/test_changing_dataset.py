"""Datasets that their users change between epochs, that draw, or that open files with their first sample."""

import itertools
import os
import pickle
import random
import time
import tracemalloc

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from support.threads.waits import until
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lit_async_data import AsyncLoader, ConcatSource, DatasetSource, SubsetSource
from lit_async_data.errors import ChangedError, ReadError
from lit_async_data.sources.contract.user_code import READING, states

LENGTH = 12
THREADS = {"worker_kind": "thread", "workers": 2}
PROCESS = {"worker_kind": "process", "workers": 1}


class Curriculum(Dataset):
    def __init__(self):
        self.strength, self.epoch, self.calls, self.length = 0, -1, 0, LENGTH

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        self.calls += 1  # changes by itself
        return {"strength": self.strength, "epoch": self.epoch, "process": os.getpid()}


class Epochs(Curriculum):
    def set_epoch(self, epoch):
        if epoch == 99:
            raise ValueError("no such epoch")
        self.epoch = epoch


class Wrapper(Dataset):
    """Keeps a dataset under a name of its own."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return LENGTH

    def __getitem__(self, number):
        return self.inner[number]


WAYS = {
    "alone": DatasetSource,
    "a subset": lambda of: DatasetSource(Subset(of, range(LENGTH))),
    "a chain": lambda of: DatasetSource(ConcatDataset([of])),
    "a wrapper": lambda of: DatasetSource(Wrapper(of)),
    "a side": lambda of: SubsetSource(DatasetSource(of), range(LENGTH)),
    "sources": lambda of: ConcatSource(2 * [DatasetSource(of)]),
}


def loader_of(source, **options):
    return AsyncLoader(source, {"batch_size": 3, "shuffle": False} | options)


def read_ahead(loader):
    """Waits until threads have read some batches of the next epoch."""
    pipeline = loader._run.engine.feed.pipeline
    until(pipeline, lambda: pipeline.ready >= 2)


def epochs(loader, change, count=3, wait=False):
    """What the samples of each epoch say, where a change comes before it; some passes are left."""
    found = []
    with loader:
        for epoch in range(count):
            change(epoch)
            batches = list(itertools.islice(loader, 2 if epoch == 1 else None))
            found.append({pair for b in batches for pair in zip(*(b[k].tolist() for k in ("epoch", "strength")))})
            if wait:
                read_ahead(loader)
    return found


@pytest.mark.parametrize("options", [{"workers": 0}, THREADS], ids=["loop", "threads"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "seen"), [(Curriculum, [-1, -1, -1]), (Epochs, [0, 1, 7])])
def test_an_attribute_that_is_set_and_the_epoch_hold_from_the_next_pass_on(kind, seen, way, options):
    of = kind()
    loader = loader_of(WAYS[way](of), **options)

    def change(epoch):
        of.strength = 10 * epoch
        if epoch == 2:
            loader.set_epoch(7)

    found = epochs(loader, change, wait=options is THREADS)
    assert found == [{(seen[0], 0)}, {(seen[1], 10)}, {(seen[2], 20)}]
    assert READING.epoch is None  # whoever reads the dataset now, reads it as it is


@pytest.mark.parametrize("way", WAYS)
def test_who_calls_set_epoch_has_called_it(way, caplog):
    of = Epochs()
    caplog.set_level("INFO")
    found = epochs(loader_of(WAYS[way](of), **THREADS), lambda epoch: of.set_epoch(3 * epoch + 5), wait=True)
    assert found == [{(5, 0)}, {(8, 0)}, {(11, 0)}]
    assert sum("set_epoch is yours to call from now on" in line for line in caplog.messages) == 1


def test_a_change_that_comes_while_another_thread_calls_set_epoch_is_not_missed():
    # 1. The user sets an attribute. 2. A thread reads the next epoch ahead, and calls set_epoch: now the dataset is as
    # it was noted. 3. The next pass begins.
    of = Epochs()
    source = DatasetSource(of)
    before = source.count_changes()
    of.strength = 1
    with READING.of(1, None, alike=False):
        source.read_into(np.arange(2), source.spec.empty(2))
    assert source.count_changes() == before + 1
    assert of.epoch == 1


def test_evaluation_and_who_reads_without_a_loader_call_no_set_epoch():
    of = Epochs()
    source = DatasetSource(of)
    loader = loader_of(source, workers=0)
    loader.evaluation = True
    assert epochs(loader, lambda _: None) == [{(-1, 0)}] * 3
    assert source[3]["epoch"] == -1


def test_an_error_of_set_epoch_is_that_of_its_batch():
    with loader_of(DatasetSource(Epochs()), workers=0) as loader:
        loader.set_epoch(99)
        with pytest.raises(ReadError, match=r"Epochs\.set_epoch\(99\) raised ValueError: no such epoch"):
            next(loader)


@pytest.mark.parametrize("length", [LENGTH - 2, LENGTH + 2])
def test_another_length_is_refused_as_long_as_it_lasts(length):
    of = Curriculum()
    with loader_of(DatasetSource(of), **THREADS) as loader:
        list(loader)
        of.length = length
        for _ in range(2):
            with pytest.raises(ChangedError, match=f"Curriculum has {length} samples now, and had 12 when the source"):
                next(iter(loader))
        of.length = LENGTH
        assert len(list(loader)) == 4


def test_a_counter_of_the_dataset_does_not_end_the_calls_of_set_epoch():
    class Counts(Epochs):
        epochs_read = 0

        def __getitem__(self, number):
            self.epochs_read += number == LENGTH - 1
            return super().__getitem__(number)

    of = Counts()
    assert epochs(loader_of(DatasetSource(of), workers=0), lambda epoch: None) == [{(n, 0)} for n in range(3)]
    assert of.epochs_read == 2


class Slow(Epochs):
    """Tasks reach a reader process before it has been read there."""

    def __setstate__(self, state):
        time.sleep(0.3)
        vars(self).update(state)


@pytest.mark.processes
def test_reader_processes_get_what_was_set_and_go_on(caplog):
    caplog.set_level("INFO")
    of, found, processes = Slow(), [], set()
    with loader_of(DatasetSource(Wrapper(of)), **PROCESS) as loader:
        for epoch in range(4):
            of.strength = epoch % 3
            batches = list(loader)
            found.append({(e, s) for b in batches for e, s in zip(b["epoch"].tolist(), b["strength"].tolist())})
            processes |= {process for batch in batches for process in batch["process"].tolist()}
    assert found == [{(0, 0)}, {(1, 1)}, {(2, 2)}, {(3, 0)}]
    assert len(processes) == 1
    assert of.epoch == -1
    assert sum("attributes of the source or of a transform were changed" in line for line in caplog.messages) == 1


# -- a dataset that draws ----------------------------------------------------------------------------------------------


class Noise(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, number):
        return {"torch": torch.rand(2), "numpy": np.random.rand(2), "random": random.random()}  # noqa: NPY002


class Batches(Noise):
    """Draws once for the samples that are asked for together."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def drawn(source, *, resumes=False, **options):
    """The values of two epochs; the second may be read again from a place in its middle."""
    with loader_of(source, seed=3, **options) as loader:
        first = list(loader)
        next(passing := iter(loader))
        state, rest = loader.state_dict(), list(passing)
        if resumes:
            loader.load_state_dict(state)
            for one, two in zip(rest, loader, strict=True):
                assert all(torch.equal(one[key], two[key]) for key in one)
    return {key: torch.cat([batch[key].flatten() for batch in (*first, *rest)]).tolist() for key in first[0]}


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Noise, Batches])
def test_reader_processes_seed_each_sample(kind):
    torch.rand(()), random.random()
    one = drawn(DatasetSource(kind()), resumes=True, **PROCESS)
    torch.rand(()), random.random()
    assert drawn(SubsetSource(DatasetSource(kind()), range(LENGTH)), **PROCESS | {"workers": 2}) == one
    every = [value for values in one.values() for value in values]
    assert len(set(every)) == len(every)


def test_a_source_leaves_the_global_generators_as_they_were():
    before = states()
    DatasetSource(Noise())
    assert states() == before


def test_the_loop_draws_as_a_dataloader_without_workers():
    torch.manual_seed(1)
    with loader_of(SubsetSource(DatasetSource(Noise()), range(LENGTH)), workers=0) as loader:
        ours = [batch["torch"] for batch in loader]
    torch.manual_seed(1)
    theirs = [batch["torch"] for batch in DataLoader(Noise(), 3, generator=torch.Generator())]
    assert torch.equal(torch.cat(ours), torch.cat(theirs))


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


@pytest.mark.parametrize("make", [Lazy, Marked, Many, lambda path: ConcatDataset([Subset(Many(path), range(8))])])
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
