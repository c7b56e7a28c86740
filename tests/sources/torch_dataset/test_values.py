"""Values of samples: they keep their types in batches, or an error says why not."""

import functools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.files.values import some
from support.sources.datasets import read, refused
from torch.utils.data import DataLoader

from lit_async_data import AsyncDataModule, AsyncLoader, DatasetSource, LoaderOptions
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.sources.torch_dataset import GRAIN

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
        [torch.complex(torch.ones(2), torch.ones(2)).conj(), torch.zeros(2, dtype=torch.complex64)],
        [torch.eye(4)[:, 1], torch.arange(4.0)],
        [torch.arange(3.0), np.arange(3, dtype="f4"), torch.nn.Parameter(torch.ones(3))],
        [torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.float16)],
        [torch.tensor(3, dtype=torch.int16), torch.tensor(4, dtype=torch.int16), torch.tensor(5)],
        [1, torch.tensor(2), np.int8(3), True],
        [1.5, torch.tensor(2.5), np.float32(3.5), 4, True],
        [np.zeros(2, "f8"), np.array([1, 2], "f4"), np.array([3, 4], "i4"), np.array([True, False])],
        [1, -(2**63), 2**63 - 1],
        [0.1, math.inf, -0.0],
        [True, False],
        [torch.zeros(0, 2), torch.ones(0, 2)],
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
        (torch.zeros(2), torch.zeros(1, 2), r"shape \(1, 2\), but sample 0 has shape \(2,\)"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "a tensor on meta"),
        (torch.zeros(2), torch.zeros(2).to_sparse(), "a tensor of torch.float32, torch.sparse_coo"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype float64.*one dtype"),
        (np.zeros(2, "i8"), 3, r"shape \(\), but sample 0 has shape \(2,\)"),  # a number never fills an array
        (np.zeros(2, "f8"), 2.5, r"shape \(\), but sample 0 has shape \(2,\)"),
        (np.zeros((3, 4)), np.zeros(4), r"shape \(4,\), but sample 0 has shape \(3, 4\)"),
        (np.zeros(2, "f4"), np.zeros(2, "f8"), "dtype float64, but sample 0 has float32"),
        (np.zeros(2, "u1"), np.zeros(2, "i1"), "dtype int8, but sample 0 has uint8"),
        (np.zeros(2, "i8"), torch.zeros(2), "dtype float32, but sample 0 has int64"),
        (1, 2.5, "dtype float64, but sample 0 has int64"),
        (True, 1, "dtype int64, but sample 0 has bool"),
        (np.float32(1), 0.1, "dtype float64, but sample 0 has float32"),
    ],
)
def test_another_shape_or_type_than_that_of_sample_0_is_an_error(first, then, said):
    source = DatasetSource([first, first, then, then])
    for samples in ([1, 2], [2], [2, 3]):  # alone, all values of the batch are of one kind
        message = rf"list\[2\], field '0': {said}"
        assert refused(FormatError, message, functools.partial(read, source, samples)).sample_id == 2


def test_a_sample_that_is_none_is_called_so():
    source = DatasetSource([{"x": 1.0}, None])
    refused(FormatError, r"^list\[1\] is None, but sample 0 has \['x'\]", lambda: read(source, [0, 1]))


REFUSED = {
    "text": ("cat", "a str, which no tensor can hold; .*prefetched"),
    "bytes": (b"cat", "a bytes"),
    "nothing": (None, "a NoneType, which no tensor can hold; .*prefetched"),
    "an object": (object(), "a object, which"),
    "a complex": (1j, "a complex, which"),
    "a list": ([1, 2], "a list, which .*; return its values under keys of their own.*prefetched"),
    "a dict": ({"a": 1}, "a dict, which .*; return its values under keys"),
    "a picture": (Image.new("L", (2, 2)), r"a Image, .*return numpy.asarray"),
    "bfloat16": (torch.zeros(2, dtype=torch.bfloat16), r"a tensor of torch.bfloat16, .*which numpy .*\.float\(\)"),
    "sparse": (torch.eye(2).to_sparse(), "a tensor of torch.float32, torch.sparse_coo, .*dense"),
    "elsewhere": (torch.zeros(2, device="meta"), "a tensor on meta; return it on the CPU"),
    "texts": (np.array(["a", "b"]), "an array of <U1, which no tensor can hold"),
    "objects": (np.array([None, 1]), "an array of object"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "an array of datetime64"),
    "a record": (np.zeros(2, [("a", "f4")]), r"an array of \[\('a'"),
    "a long double": (np.zeros(2, np.longdouble), "an array of float128"),
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
