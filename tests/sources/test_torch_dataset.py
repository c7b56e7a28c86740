"""`DatasetSource` against torch's own DataLoader: the same samples, in the same types, or an error that says why."""

import collections
import functools
import itertools
import re
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from support.files.values import some
from support.processes import in_fork
from support.sources.datasets import read, refused
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from lit_async_data import AsyncDataModule, AsyncLoader, DatasetSource, LoaderOptions
from lit_async_data.errors import ConfigError, FormatError, ReadError, SourceError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.sources import torch_dataset as dataset_source
from lit_async_data.sources.contract.source import Location
from lit_async_data.sources.torch_dataset import GRAIN
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


DATASETS = {
    "tensors": TensorDataset(IMAGES, LABELS),
    "a subset": Subset(TensorDataset(IMAGES, LABELS), list(range(LENGTH))[::-2]),
    "several": ConcatDataset([TensorDataset(IMAGES, LABELS), TensorDataset(IMAGES[:4], LABELS[:4])]),
    "a stack by name": StackDataset(image=IMAGES, label=LABELS),
    "dicts": Given(lambda number: {"x": IMAGES[number], "y": number}),
    "dicts together": Together(lambda number: {"x": IMAGES[number].numpy(), "y": float(number)}),
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
    source = DatasetSource(kind(lambda number: {"y": number * 7}))
    arrays = ArraySource({"y": np.arange(LENGTH) * 7})
    with AsyncLoader(source, options) as loader, AsyncLoader(arrays, options) as other:
        for batch, wanted in itertools.chain(zip(loader, other, strict=True), zip(loader, other, strict=True)):
            assert batch["index"].tolist() == wanted["index"].tolist()
            assert batch["y"].tolist() == wanted["y"].tolist() == [number * 7 for number in batch["index"].tolist()]


@pytest.mark.parametrize("bad", [-1, LENGTH, 1.0, True])
def test_a_number_out_of_range_is_an_index_error_and_never_counted_from_the_end(bad):
    source = DatasetSource(DATASETS["tensors"])
    assert source.locate([3, 22]) == [Location("TensorDataset", "/", 3), Location("TensorDataset", "/", 22)]
    with pytest.raises(IndexError, match=rf"{bad}"):
        source.locate([bad])
    if type(bad) is int:
        with pytest.raises(IndexError, match=rf"sample {bad} of 23 in TensorDataset"):
            read(source, [0, bad])


def test_samples_of_a_batch_are_asked_for_in_one_call_where_there_is_one():
    class Emptying(Together):
        def __getitems__(self, numbers):
            found = super().__getitems__(list(numbers))
            numbers.clear()  # the list is the dataset's
            return found

    dataset, one_by_one = Emptying(float), Given(float)
    assert read(DatasetSource(dataset), [5, 2, 2])["0"].tolist() == [5.0, 2.0, 2.0]
    read(DatasetSource(dataset), [])
    assert dataset.asked == [[0], [5, 2, 2], [0]]  # sample 0 once, to learn the fields
    assert all(type(number) is int for number in dataset.asked[1])
    read(DatasetSource(one_by_one), [5, 2])
    assert one_by_one.asked == [0, 5, 2]


def test_only_wanted_keys_are_written_and_only_their_values_looked_at():
    source = DatasetSource(Given(lambda number: {"text": 1.0 if number == 0 else "far too long", "y": number}))
    assert {key: values.tolist() for key, values in read(source, [5, 1], ["y"]).items()} == {"y": [5, 1]}


def test_a_mapping_of_another_kind_is_read_as_a_dict():
    class Lazy(collections.UserDict):
        def __getitem__(self, key):
            return self.data[key]()

    source = DatasetSource(Given(lambda number: Lazy(x=lambda: number, y=lambda: 1 / (number - 3))))
    assert (source.spec.as_mapping, read(source, [4, 2])["y"].tolist()) == (True, [1.0, -1.0])
    refused(ReadError, r"Given\[3\] raised ZeroDivisionError", lambda: read(source, [3]))


@pytest.mark.parametrize("samples_at_once", [1, 3, 5])
@pytest.mark.parametrize("kind", [Given, Together])
def test_samples_are_collected_up_to_some_bytes(monkeypatch, samples_at_once, kind):
    alive, most = weakref.WeakSet(), []

    def of(number):
        alive.add(made := IMAGES[number].clone())
        most.append(len(alive))
        return made, number

    source = DatasetSource(kind(of))
    monkeypatch.setattr(dataset_source, "COLLECTED_BYTES", samples_at_once * source.spec.nbytes)
    got = read(source, [5, 3, 3, 9, 0, 22, 1])
    assert np.array_equal(got["0"], IMAGES.numpy()[[5, 3, 3, 9, 0, 22, 1]])
    assert got["1"].tolist() == [5, 3, 3, 9, 0, 22, 1]
    assert max(most) <= (7 if kind is Together else 2 * samples_at_once)


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
        ({"x": 1, "y": 2}, {"x": 1}, "has the fields ['x'], but sample 0 has ['x', 'y']; return the same"),
        ((1, 2), {"x": 1, "y": 2}, "has the fields ['x', 'y'], but sample 0 has ['0', '1']"),
        (Pair(1, 2), (1, 2), "has the fields ['0', '1'], but sample 0 has ['image', 'label']"),
        ({"x": 1.0}, None, "is None, but sample 0 has ['x']"),
    ],
)
def test_other_keys_are_an_error(first, then, said):
    source = DatasetSource([first, then])
    wanted = [next(iter(source.spec.fields))]
    message = rf"^list\[1\] {re.escape(said)}"
    assert refused(FormatError, message, lambda: read(source, [1], wanted)).sample_id == 1


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda found: found[:-1], "a list of 3"),
        (lambda found: [*found, found[0]], "a list of 5"),
        (lambda found: {"x": np.zeros(4)}, "a dict of 1"),  # collated
    ],
)
def test_a_result_of_another_length_is_an_error(wrong, what):
    class Wrong(Together):
        def __getitems__(self, numbers):
            found = super().__getitems__(numbers)
            return wrong(found) if len(found) > 1 else found

    source = DatasetSource(Wrong(float))
    said = rf"^Wrong.+\(\[5, 2, 7, … \(4 in all\)\]\) returned {what} for 4 sample numbers; return a list"
    assert refused(FormatError, said, lambda: read(source, [5, 2, 7, 1])).sample_id == 5


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (ChainDataset([]), "ChainDataset is an iterable dataset.*prefetched"),
        (Dataset(), "Dataset has no __len__"),
        (Given(float, 0), "Given is empty"),
        (DataLoader([1, 2]), "DataLoader has no __getitem__.*prefetched"),
        (DatasetSource([1, 2]), "DatasetSource is a source already; give it to the loader itself"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, said):
    refused(ConfigError, f"^dataset: {said}", lambda: DatasetSource(dataset))


class OwnError(Exception): ...


def broken(*numbers, error=OwnError("no such picture")):  # noqa: B008  # the same one each time, as some datasets raise
    def of(number):
        if number in numbers:
            raise error
        return float(number)

    return of


def test_a_first_sample_that_fails_is_an_error_of_the_source():
    message = r"^Given\[0\] raised OwnError: no such picture; the source reads this sample"
    error = refused(SourceError, message, lambda: DatasetSource(Given(broken(0))))
    assert isinstance(error.__cause__, OwnError)
    assert error.sample_id == 0


@pytest.mark.parametrize("cause", [OwnError("why"), StopIteration("why"), IndexError("why"), FormatError("why")])
@pytest.mark.parametrize(("kind", "call", "sample"), [(Given, "[7]", 7), (Together, ".__getitems__([2, 7, 3])", 2)])
def test_an_error_of_the_dataset_is_kept_as_the_cause(kind, call, sample, cause):
    source = DatasetSource(kind(broken(7, error=cause)))
    said = rf"^{kind.__name__}{re.escape(call)} raised {type(cause).__name__}: why$"
    error = refused(ReadError, said, lambda: read(source, [2, 7, 3]))
    assert error.__cause__ is cause
    assert (error.sample_id, error.stage) == (sample, "read")


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
        assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2
        assert (loader.footprint.workers.threads, threading.active_count()) == (0, before)
        assert "no workers (a test of threads): the training loop reads" in summary_lines(loader)[2]
    with AsyncLoader(source, LoaderOptions(batch_size=4, workers=2)) as loader:  # as the user has said
        assert loader.footprint.workers.threads == 2
    AsyncLoader(source, LoaderOptions(batch_size=4), device_depth=0).close()  # nothing would be read ahead anyway
    (said,) = caplog.messages
    assert said.startswith("workers=auto reads each batch of TensorDataset when it is asked for")
    assert "workers=1" in said


REAL = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?", "c8", "c16"]


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_numbers_keep_their_type_but_whole_ones_without_an_axis(name, shape):
    values = some((5, *shape), name)
    if not shape and name[0] == "u":
        values = values >> 1  # int64 has one bit less than uint64
    turned = values.astype(values.dtype.newbyteorder(">"))
    samples = [(native, torch.from_numpy(np.array(native)), big) for native, big in zip(values, turned)]
    source, wanted = DatasetSource(samples), np.dtype(np.int64 if not shape and name[0] in "iu" else name)
    for key, got in read(source, [3, 0]).items():
        assert (source.spec[key].shape, source.spec[key].dtype) == (shape, wanted)
        assert source.spec[key].dtype.isnative
        assert np.array_equal(got, values[[3, 0]].astype(wanted), equal_nan=name[0] in "fc")


@pytest.mark.parametrize("value", [2**63, np.uint64(2**63), torch.tensor(2**63, dtype=torch.uint64), -(2**63) - 1])
def test_a_number_that_no_int64_holds_is_refused_and_never_wrapped(value):
    refused(FormatError, r"list\[0\], field '0': -?9\d+, which does not fit into int64", lambda: DatasetSource([value]))
    for samples in ([1], [0, 1]):
        refused(FormatError, r"list\[1\], field '0'", functools.partial(read, DatasetSource([1, value]), samples))


def test_gradients_conjugates_and_strides_are_no_matter():
    base = torch.arange(12.0).reshape(3, 4)
    values = {
        "gradient": base.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(base.clone()),
        "transposed": base.t(),
        "every other": base[:, ::2],
        "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "backwards": base.numpy()[::-1],
        "read-only": np.broadcast_to(base.numpy()[0], (2, 4)),
        "nothing": torch.zeros(0, 3),
    }
    got = read(DatasetSource([values, values]), [1])
    for key, value in values.items():
        wanted = value.detach().resolve_conj().resolve_neg().numpy() if isinstance(value, torch.Tensor) else value
        assert np.array_equal(got[key][0], wanted), key


@pytest.mark.parametrize("workers", [0, 1])
def test_large_samples_and_small_ones(workers):
    """Those of 32768 values are copied by numpy, in this thread; smaller ones by torch, several at a time."""
    large = [(torch.full((GRAIN,), float(n)), torch.full((GRAIN - 1,), n), torch.tensor(n % 2 > 0)) for n in range(9)]
    with AsyncLoader(DatasetSource(large), LoaderOptions(batch_size=4, shuffle=False, workers=workers)) as loader:
        for got, wanted in zip(loader, DataLoader(large, batch_size=4), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(2, requires_grad=True) * 2, torch.zeros(2)],
        [torch.arange(3.0), np.arange(3, dtype="f4"), torch.nn.Parameter(torch.ones(3))],
        [torch.tensor(3, dtype=torch.int16), torch.tensor(4, dtype=torch.int16), torch.tensor(5)],
        [1, torch.tensor(2), np.int8(3), True],
        [1.5, torch.tensor(2.5), np.float32(3.5), 4, True],
        [np.zeros(2, "f8"), np.array([1, 2], "f4"), np.array([3, 4], "i4"), np.array([True, False])],
    ],
)
def test_values_of_one_kind_or_several_in_one_batch(values):
    samples = [*range(len(values)), 0]
    got = read(DatasetSource(values), samples)["0"]
    plain = [value.detach().resolve_conj() if isinstance(value, torch.Tensor) else value for value in values]
    wanted = [np.asarray(plain[number]) for number in samples]
    assert np.array_equal(got, np.stack(wanted).astype(got.dtype))


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \(3,\), but sample 0 has shape \(2,\); pad or crop .*prefetched"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype float64.*one dtype"),
        (np.zeros(2, "i8"), 3, r"shape \(\), but sample 0 has shape \(2,\)"),  # a number never fills an array
        (np.zeros((3, 4)), np.zeros(4), r"shape \(4,\), but sample 0 has shape \(3, 4\)"),
        (np.zeros(2, "u1"), np.zeros(2, "i1"), "dtype int8, but sample 0 has uint8"),
        (1, 2.5, "dtype float64, but sample 0 has int64"),
    ],
)
def test_another_shape_or_type_than_that_of_sample_0_is_an_error(first, then, said):
    source = DatasetSource([first, first, then, then])
    for samples in ([1, 2], [2], [2, 3]):  # alone, all values of the batch are of one kind
        message = rf"list\[2\], field '0': {said}"
        assert refused(FormatError, message, functools.partial(read, source, samples)).sample_id == 2


REFUSED = {
    "text": ("cat", "a str, which no tensor can hold; .*prefetched"),
    "nothing": (None, "a NoneType, which no tensor can hold; .*prefetched"),
    "a list": ([1, 2], "a list, which .*; return its values under keys of their own.*prefetched"),
    "a picture": (Image.new("L", (2, 2)), r"a Image, .*return numpy.asarray"),
    "bfloat16": (torch.zeros(2, dtype=torch.bfloat16), r"a tensor of torch.bfloat16, .*which numpy .*\.float\(\)"),
    "sparse": (torch.eye(2).to_sparse(), "a tensor of torch.float32, torch.sparse_coo, .*dense"),
    "a record": (np.zeros(2, [("a", "f4")]), r"an array of \[\('a'"),
    "a masked array": (np.ma.masked_array([1.0, 2.0], [True, False]), "a MaskedArray, .*return numpy.asarray"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_value_that_is_no_number_is_refused_by_name_and_type(what):
    value, said = REFUSED[what]
    samples = [{"x": 1.0, "y": 1.0}, {"x": 1.0, "y": value}]
    error = refused(FormatError, rf"^list\[0\], field 'y': {said}", lambda: DatasetSource(samples[1:]))
    assert error.sample_id == 0
    error = refused(FormatError, rf"^list\[1\], field 'y': {said}", lambda: read(DatasetSource(samples), [0, 1]))
    assert error.sample_id == 1


class Birds(list):
    """As ImageFolder and MNIST of torchvision."""

    def __init__(self, classes, targets, **attributes):
        super().__init__([(torch.zeros(3), 0), (torch.zeros(3), 1)])
        vars(self).update(attributes, classes=classes, targets=targets)


@pytest.mark.parametrize("targets", [[0, 1], torch.tensor([0, 1]), np.array([0, 1])])
def test_classes_of_torchvision_are_names_of_the_targets(targets):
    assert DatasetSource(Birds(["auk", "emu"], targets)).spec["1"].named == {0: "auk", 1: "emu"}
    for names, numbers in (["auk"], targets), ("ab", targets), (["auk", "emu"], [0, 1, 0]), (["auk", "emu"], [{}, {}]):
        assert DatasetSource(Birds(names, numbers)).spec["1"].named == {}
    assert DatasetSource(Birds(["auk", "emu"], targets, target_transform=abs)).spec["1"].named == {}
    train, val = (DatasetSource(Birds(names, targets)) for names in (["auk", "emu", "owl"], ["emu", "owl"]))
    with pytest.raises(ConfigError, match="the same number would mean different classes"):
        AsyncDataModule(train=train, val=val, loader={"batch_size": 2}).setup("fit")
