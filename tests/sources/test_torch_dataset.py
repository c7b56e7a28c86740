"""`DatasetSource` against torch's own DataLoader: the same samples, in the same types, or an error that says why."""

import collections
import re
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.files.values import some
from support.processes import in_fork
from support.sources.datasets import read, refused
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from lit_async_data import AsyncLoader, DatasetSource, LoaderOptions
from lit_async_data.errors import ConfigError, FormatError, ReadError, SourceError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.sources import torch_dataset as dataset_source
from lit_async_data.sources.contract.source import Location, Source
from lit_async_data.testing import ArraySource

LENGTH = 23
IMAGES = torch.from_numpy(some((LENGTH, 3, 4, 5)).copy())
LABELS = torch.arange(LENGTH, dtype=torch.int32) * 7


class Pair(NamedTuple):
    image: Any
    label: Any


class Given(Dataset):
    """Returns what a function makes of a number; counts its calls."""

    def __init__(self, of, length=LENGTH):
        self.of, self.length, self.asked = of, length, []

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        self.asked.append(number)
        return self.of(number)


class Together(Given):
    """As above, several at a time, and never one alone."""

    def __getitem__(self, number):
        raise AssertionError("there is __getitems__")

    def __getitems__(self, numbers):
        self.asked.append(numbers)
        return [self.of(number) for number in numbers]


class ImageFolder:
    """As those of torchvision: no subclass of anything, an image and its class, made by a transform."""

    def __init__(self, transform):
        self.targets, self.transform = LABELS.tolist(), transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.transform(IMAGES[index].permute(1, 2, 0).numpy()), self.targets[index]


def to_tensor(picture):
    return torch.from_numpy(picture).permute(2, 0, 1).float().div(255)


DATASETS = {
    "tensors": TensorDataset(IMAGES, LABELS),
    "one tensor": TensorDataset(IMAGES),
    "a subset": Subset(TensorDataset(IMAGES, LABELS), list(range(LENGTH))[::-2]),
    "a subset of a subset": Subset(Subset(TensorDataset(IMAGES, LABELS), range(20)), range(3, 11)),
    "several": ConcatDataset([TensorDataset(IMAGES, LABELS), TensorDataset(IMAGES[:4], LABELS[:4])]),
    "a stack": StackDataset(IMAGES, LABELS),
    "a stack by name": StackDataset(image=IMAGES, label=LABELS),
    "a folder of images": ImageFolder(to_tensor),
    "dicts": Given(lambda number: {"x": IMAGES[number], "y": number}),
    "dicts together": Together(lambda number: {"x": IMAGES[number].numpy(), "y": float(number)}),
    "lists": Given(lambda number: [IMAGES[number], number % 2 == 0]),
    "named": Given(lambda number: Pair(IMAGES[number], number)),
    "single tensors": Given(lambda number: IMAGES[number]),
    "single numbers": Given(lambda number: number / 3),
    "an array": IMAGES.numpy(),
    "keys in another order": [{"x": 1, "y": 2.0}, {"y": 4.0, "x": 3}],
    "a list": [[float(number), number] for number in range(LENGTH)],
}


def flat(batch):
    """The values of a batch of torch, and of ours; those without an axis but N as int64, by the rule of the house."""
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else (batch,)
    whole = (torch.uint8, torch.int32, torch.int64)
    return [value.long() if value.ndim == 1 and value.dtype in whole else value for value in values]


@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_a_dataloader(name):
    dataset = DATASETS[name]
    with AsyncLoader(DatasetSource(dataset), LoaderOptions(batch_size=4, shuffle=False, workers=1)) as loader:
        batches = list(loader)
    for got, by_torch in zip(batches, DataLoader(dataset, batch_size=4), strict=True):
        if isinstance(by_torch, dict):
            assert list(got) == list(by_torch)
        else:
            assert type(got) is tuple
        assert [value.dtype for value in flat(got)] == [value.dtype for value in flat(by_torch)]
        assert all(torch.equal(one, other) for one, other in zip(flat(got), flat(by_torch), strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Given, Together])
def test_the_order_is_that_of_any_source(workers, kind):
    options = LoaderOptions(batch_size=4, shuffle=True, seed=3, return_indices=True, workers=workers)
    dataset = kind(lambda number: {"y": number * 7})
    arrays = ArraySource({"y": np.arange(LENGTH) * 7})
    with AsyncLoader(DatasetSource(dataset), options) as loader, AsyncLoader(arrays, options) as other:
        for _ in range(2):
            got, wanted = list(loader), list(other)
            assert [batch["index"].tolist() for batch in got] == [batch["index"].tolist() for batch in wanted]
            assert [batch["y"].tolist() for batch in got] == [batch["y"].tolist() for batch in wanted]
            assert all(torch.equal(batch["y"], batch["index"] * 7) for batch in got)


@pytest.mark.parametrize("bad", [-1, LENGTH, 1.0, True])
def test_a_number_out_of_range_is_an_index_error_and_never_counted_from_the_end(bad):
    source = DatasetSource(DATASETS["tensors"])
    assert source.locate([3, 22]) == [Location("TensorDataset", "/", 3), Location("TensorDataset", "/", 22)]
    with pytest.raises(IndexError, match=rf"{bad}"):
        source.locate([bad])
    if type(bad) is int:
        with pytest.raises(IndexError, match=rf"sample {bad} of 23 in TensorDataset"):
            read(source, [0, bad])


def test_it_is_a_source_that_lies_in_no_chunks_and_keeps_nothing():
    source = DatasetSource(DATASETS["tensors"])
    assert isinstance(source, Source)
    assert not source.chunks.ahead
    assert (len(source), source.name) == (LENGTH, "TensorDataset")
    assert (source.chunks.reading, source.chunks.runs, source.chunks.rows) == ("python", (), 1)


def test_samples_of_a_batch_are_asked_for_in_one_call_where_there_is_one():
    dataset, one_by_one = Together(float), Given(float)
    source = DatasetSource(dataset)
    read(source, [5, 2, 2])
    read(source, [])
    assert dataset.asked == [[0], [5, 2, 2]]  # sample 0 once, to learn the fields
    read(DatasetSource(one_by_one), [5, 2])
    assert one_by_one.asked == [0, 5, 2]
    assert all(type(number) is int for number in dataset.asked[1])


def test_a_dataset_may_do_as_it_likes_with_the_list_of_numbers():
    class Emptying(Together):
        def __getitems__(self, numbers):
            return [self.of(numbers.pop(0)) for _ in range(len(numbers))]

    assert read(DatasetSource(Emptying(float)), [4, 1])["0"].tolist() == [4.0, 1.0]


def test_several_samples_may_come_as_one_array():
    class Sliced(Given):
        def __getitems__(self, numbers):
            return IMAGES[numbers]

    assert np.array_equal(read(DatasetSource(Sliced(float)), [5, 2])["0"], IMAGES.numpy()[[5, 2]])


def test_getitems_that_is_none_is_none():
    dataset = Given(float)
    dataset.__getitems__ = None
    assert read(DatasetSource(dataset), [4])["0"].tolist() == [4.0]


def test_only_wanted_keys_are_written_and_only_their_values_looked_at():
    dataset = Given(lambda number: {"x": IMAGES[number], "text": 1.0 if number == 0 else "far too long", "y": number})
    got = read(DatasetSource(dataset), [5, 1], ["y"])
    assert list(got) == ["y"]
    assert got["y"].tolist() == [5, 1]


def test_a_mapping_of_another_kind_is_read_as_a_dict():
    class Lazy(collections.UserDict):
        def __getitem__(self, key):
            return self.data[key]()

    source = DatasetSource(Given(lambda number: Lazy(x=lambda: number, y=lambda: 1 / (number - 3))))
    assert source.spec.as_mapping
    assert read(source, [4, 2])["y"].tolist() == [1.0, -1.0]
    refused(ReadError, r"Given\[3\] raised ZeroDivisionError", lambda: read(source, [3]))


@pytest.mark.parametrize("samples_at_once", [1, 3, 5])
@pytest.mark.parametrize("kind", [Given, Together])
def test_samples_are_collected_up_to_some_bytes(monkeypatch, samples_at_once, kind):
    """Each sample notes how many others are alive when it is made."""
    alive, most = weakref.WeakSet(), [0]

    class Noted(torch.Tensor):
        pass

    def of(number):
        made = (IMAGES[number] + 0).as_subclass(Noted)
        alive.add(made)
        most[0] = max(most[0], len(alive))
        return made, number

    source = DatasetSource(kind(of))
    monkeypatch.setattr(dataset_source, "COLLECTED_BYTES", samples_at_once * source.spec.nbytes)
    got = read(source, [5, 3, 3, 9, 0, 22, 1])
    assert np.array_equal(got["0"], IMAGES.numpy()[[5, 3, 3, 9, 0, 22, 1]])
    assert got["1"].tolist() == [5, 3, 3, 9, 0, 22, 1]
    assert most[0] <= (7 if kind is Together else 2 * samples_at_once)


@pytest.mark.parametrize("kind", [Given, Together])
def test_one_lock_is_held_while_the_dataset_is_called_and_until_its_values_are_copied(kind):
    held = []

    class Telling(torch.Tensor):
        def numpy(self, *, force=False):
            held.append(("copied", source._lock.locked()))
            return super().numpy(force=force)

    def of(number):
        if number:
            held.append(("called", source._lock.locked()))
        return torch.arange(3.0).as_subclass(Telling) if number else torch.zeros(3)

    source = DatasetSource(kind(of))
    assert read(source, [1, 2])["0"].tolist() == [[0, 1, 2]] * 2
    assert sorted(held) == [("called", True)] * 2 + [("copied", True)] * 2
    assert not source._lock.locked()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, as torch does
def test_a_fork_waits_for_no_lock_that_was_held_when_it_was_made():
    """1. A thread is inside the dataset. 2. Another forks. 3. In the child nobody will ever let go of the lock."""
    inside, out = threading.Event(), threading.Event()

    def of(number):
        if number == 1:
            inside.set()
            assert out.wait(30)
        return number

    source = DatasetSource(Given(of))

    def act():
        assert read(source, [2])["0"].tolist() == [2]

    thread = threading.Thread(target=read, args=(source, [1]))
    thread.start()
    assert inside.wait(30)
    try:
        assert in_fork(act) == 0
    finally:
        out.set()
        thread.join()


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"x": 1, "y": 2}, {"x": 1}, "['x'], but sample 0 has ['x', 'y']"),
        ({"x": 1}, {"x": 1, "y": 2}, "['x', 'y'], but sample 0 has ['x']"),
        ((1, 2), (1,), "['0'], but sample 0 has ['0', '1']"),
        ((1, 2), {"x": 1, "y": 2}, "['x', 'y'], but sample 0 has ['0', '1']"),
        (Pair(1, 2), (1, 2), "['0', '1'], but sample 0 has ['image', 'label']"),
        ({"x": 1}, {3: 1}, "[3], but sample 0 has ['x']"),
    ],
)
def test_other_keys_are_an_error(first, then, said):
    source = DatasetSource([first, then])
    wanted = [next(iter(source.spec.fields))]
    message = rf"list\[1\] has the fields {re.escape(said)}; return the same"
    assert refused(FormatError, message, lambda: read(source, [1], wanted)).sample_id == 1


@pytest.mark.parametrize("wrong", [lambda found: found[:-1], lambda found: [*found, found[0]]])
def test_a_result_of_another_length_is_an_error(wrong):
    class Wrong(Together):
        def __getitems__(self, numbers):
            found = super().__getitems__(numbers)
            return wrong(found) if len(found) > 1 else found

    source = DatasetSource(Wrong(float))
    said = r"^Wrong.+\(\[5, 2, 7, … \(4 in all\)\]\) returned a list of [35] for 4 sample numbers; return a list"
    assert refused(FormatError, said, lambda: read(source, [5, 2, 7, 1])).sample_id == 5


def test_a_batch_in_place_of_samples_is_an_error():
    class Collated(Together):
        def __getitems__(self, numbers):
            return {"x": np.zeros((len(numbers), 2))}

    said = r"__getitems__\(\[0\]\) returned a dict of 1 for 1 sample numbers; return a list"
    refused(FormatError, said, lambda: DatasetSource(Collated(float)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self):
        return 3


class Unsized(Dataset):
    def __getitem__(self, number):
        return number


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Stream(), "Stream is an iterable dataset.*prefetched"),
        (SizedStream(), "SizedStream is an iterable dataset.*prefetched"),
        (Unsized(), "Unsized has no __len__"),
        (Given, "Given is a class; pass an instance"),
        (Given(float, 0), "Given is empty"),
        ([], "list is empty"),
        (3, "int has no __getitem__"),
        ({1, 2}, "set has no __getitem__"),
        (DataLoader([1, 2]), "DataLoader has no __getitem__.*prefetched"),
        (DatasetSource([1, 2]), "DatasetSource is a source already; give it to the loader itself"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, said):
    refused(ConfigError, f"^dataset: {said}", lambda: DatasetSource(dataset))


@pytest.mark.parametrize(
    ("sample", "said"), [*((empty, " holds no value") for empty in ({}, (), [])), ({3: 1.0}, ": the key 3 is not text")]
)
def test_what_is_no_sample_is_refused(sample, said):
    refused(FormatError, rf"list\[0\]{said}", lambda: DatasetSource([sample]))


class OwnError(Exception): ...


def broken(*numbers, error=OwnError("no such picture")):  # noqa: B008  # the same one each time, as some datasets raise
    def of(number):
        if number in numbers:
            raise error
        return float(number)

    return of


@pytest.mark.parametrize(
    ("kind", "said"), [(Given, r"Given\[0\]"), (Together, r"Together.__getitems__\(\[0\]\)")], ids=["one", "together"]
)
def test_a_first_sample_that_fails_is_an_error_of_the_source(kind, said):
    message = f"^{said} raised OwnError: no such picture; the source reads this sample"
    error = refused(SourceError, message, lambda: DatasetSource(kind(broken(0))))
    assert isinstance(error.__cause__, OwnError)
    assert error.sample_id == 0


@pytest.mark.parametrize("cause", [OwnError("why"), StopIteration("why"), IndexError("why"), FormatError("why")])
def test_an_error_of_the_dataset_is_kept_as_the_cause(cause):
    one = DatasetSource(Given(broken(7, error=cause)))
    error = refused(ReadError, rf"^Given\[7\] raised {type(cause).__name__}: why$", lambda: read(one, [2, 7, 3]))
    assert error.__cause__ is cause
    assert (error.sample_id, error.stage) == (7, "read")
    several = DatasetSource(Together(broken(7, error=cause)))
    said = rf"^Together.__getitems__\(\[2, 7, 3\]\) raised {type(cause).__name__}: why$"
    error = refused(ReadError, said, lambda: read(several, [2, 7, 3]))
    assert error.__cause__ is cause
    assert error.sample_id == 2


@pytest.mark.parametrize("kind", [Given, Together])
def test_ctrl_c_passes_through_and_the_lock_is_free(kind):
    source = DatasetSource(kind(broken(7, error=KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        read(source, [7])
    assert read(source, [6])["0"].tolist() == [6.0]


def test_by_itself_the_loop_reads_and_that_is_said_once_with_the_first_batch(caplog):
    source = DatasetSource(DATASETS["tensors"])
    before = threading.active_count()
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False)) as loader:
        assert not caplog.records
        assert len(list(loader)) == len(loader)
        said = [record.getMessage() for record in caplog.records]
        assert len(list(loader)) == len(loader)
        assert loader.footprint.workers.threads == 0
        assert threading.active_count() == before
        assert "no workers (a test of threads): the training loop reads" in summary_lines(loader)[2]
        assert summary_lines(loader)[0].startswith("23 samples from TensorDataset: 0 uint8 (3, 4, 5), 1 int64")
    with AsyncLoader(source, LoaderOptions(batch_size=4, workers=2)) as loader:  # as the user has said
        assert loader.footprint.workers.threads == 2
    AsyncLoader(source, LoaderOptions(batch_size=4), device_depth=0).close()  # nothing would be read ahead anyway
    assert len(said) == len(caplog.records) == 1
    assert said[0].startswith("workers=auto reads each batch of TensorDataset when it is asked for")
    assert "workers=1" in said[0]
    assert "no reader process can be used (a test of threads)" in said[0]
