"""The fields that come out of host hooks are found before the first batch, and not before they are needed."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch

from lit_async_data import AsyncDataModule, AsyncLoader, FieldSpec, StorageLayout
from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import ConfigError, CorruptError, MemoryBudgetError, ReadError, TransformError
from lit_async_data.testing import ArraySource

LENGTH = 10


def source(length=LENGTH):
    rows = np.arange(length)
    return ArraySource({"x": np.broadcast_to(rows.astype(np.uint8)[:, None, None, None], (length, 3, 8, 6)), "y": rows})


def loader_of(of=None, *, sample=None, batch=None, **options):
    return AsyncLoader(
        source() if of is None else of,
        {"batch_size": 4, "workers": 0, **options},
        sample_transform=sample,
        batch_transform=batch,
    )


def spec_of(**hooks):
    return loader_of(**hooks).spec


class Tuples(ArraySource):
    """Batches are tuples; images are stored with the channels last, and labels have names."""

    @property
    def spec(self):
        return BatchSpec(
            {
                "x": FieldSpec((3, 8, 6), np.dtype("u1"), channel=2),
                "y": FieldSpec((), np.dtype("i8"), classes=("auk", "jay")),
            },
            as_mapping=False,
        )


def tuples():
    values = np.random.default_rng(0).integers(0, 255, (LENGTH, 8, 6, 3), np.uint8)
    return Tuples({"x": values, "y": np.arange(LENGTH) % 2}), values


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (7, "i8", ()),
        (0.5, "f4", ()),
        (True, "?", ()),
        (np.float64(0.5), "f8", ()),
        (np.uint8(3), "u1", ()),
        (np.zeros((2, 3), ">f4"), "f4", (2, 3)),
        (np.zeros((2, 3), np.complex64), "c8", (2, 3)),
        (torch.zeros(2, 3, dtype=torch.int16), "i2", (2, 3)),
        (torch.zeros(2, requires_grad=True), "f4", (2,)),
        (torch.tensor(1.5), "f4", ()),
    ],
    ids=lambda value: f"{type(value).__name__} {value}" if np.ndim(value) == 0 else type(value).__name__,
)
def test_a_value_keeps_its_type_and_only_numbers_of_python_get_one(value, dtype, shape):
    with loader_of(sample=lambda sample: {"v": value}) as loader:
        assert loader.spec["v"] == FieldSpec(shape, np.dtype(dtype))
        batch = next(loader)["v"]
        assert batch.shape == (4, *shape)
        assert np.array_equal(
            batch.numpy(),
            np.broadcast_to(np.asarray(value if not torch.is_tensor(value) else value.detach()), batch.shape),
        )


def test_fields_keep_the_order_of_the_source_and_new_ones_follow():
    assert list(spec_of(sample=lambda sample: {"new": 1, **dict(reversed(sample.items())), "last": 2})) == [
        *("x", "y", "new", "last")
    ]
    assert list(spec_of(sample=lambda sample: {"y": sample["y"]})) == ["y"]


def test_tuples_stay_tuples_in_the_order_of_the_fields():
    of, values = tuples()
    with loader_of(of, sample=lambda s: {"new": 1.5, "y": s["y"], "x": s["x"]}, shuffle=False) as loader:
        x, y, new = next(loader)
        assert np.array_equal(x.numpy(), values[:4].transpose(0, 3, 1, 2))
        assert x.is_contiguous()
        assert (y.tolist(), new.tolist()) == ([0, 1, 0, 1], [1.5] * 4)
        assert loader.spec["x"] == FieldSpec((3, 8, 6), np.dtype("u1"))
        assert loader.spec["y"].classes == ("auk", "jay")
    with loader_of(of, sample=lambda s: {"y": s["y"]}, return_indices=True, shuffle=False) as loader:
        y, ids = next(loader)
        assert ids.tolist() == [0, 1, 2, 3]


def test_samples_have_the_axes_of_a_batch_and_may_be_written_to():
    of, values = tuples()
    seen = []

    def look(sample):
        seen.append(sample["x"].base is not None and not sample["x"].flags.c_contiguous)
        sample["x"][0] = 9
        sample["y"][...] += 5
        sample["sum"] = sample["x"].astype(np.int64).sum()

    with loader_of(of, sample=look, shuffle=False) as loader:
        x, y, total = next(loader)
    assert all(seen)  # a view of what is stored: nothing was moved
    assert (x[:, 0] == 9).all()
    assert np.array_equal(x[:, 1:].numpy(), values[:4, :, :, 1:].transpose(0, 3, 1, 2))
    assert y.tolist() == [5, 6, 5, 6]
    assert total.tolist() == x.long().sum((1, 2, 3)).tolist()


def test_a_batch_may_be_changed_in_place_and_lose_and_gain_fields():
    def mean(batch):
        batch["mean"] = batch.pop("x").mean(axis=(1, 2, 3))

    with loader_of(batch=mean, shuffle=False) as loader:
        assert [batch["mean"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert list(loader.spec) == ["y", "mean"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_samples_are_enough(length):
    with loader_of(source(length), batch=lambda batch: {"z": batch["y"] * 2}, shuffle=False) as loader:
        assert [batch["z"].tolist() for batch in loader] == [[2 * n for n in range(length)]]


class Unread(ArraySource):
    def read_into(self, samples, out):
        raise AssertionError("a constructor reads nothing")


def test_constructors_call_no_hook_and_read_nothing():
    def never(sample):
        raise AssertionError("a constructor calls no hook")

    of = Unread({"y": np.arange(4)})
    loader_of(of, sample=never, batch=never)
    dm = AsyncDataModule(train=of, loader={"batch_size": 2}, sample_transform=never)
    assert "y int64" in repr(dm)
    dm.train_dataloader()


def test_the_first_sample_is_transformed_once_for_all_that_ask():
    calls = []
    with loader_of(sample=lambda sample: calls.append(int(sample["y"])), shuffle=False) as loader:
        loader.spec, loader.footprint, loader.spec
        assert calls == [0]
        list(loader)
    assert calls == [0, *range(LENGTH)]


def test_the_probe_leaves_the_global_generators_as_they_are_and_warns_of_draws(caplog):
    def careless(sample):
        sample["x"][...] = random.random() + np.random.random() + float(torch.rand(()))  # noqa: NPY002

    torch.manual_seed(0)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    loader_of(sample=careless).spec
    assert torch.equal(torch.rand(3), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "sample_transform drew random numbers from the global generator of torch and numpy and random"
    )
    caplog.clear()
    loader_of(sample=lambda sample: None).spec
    assert not caplog.records


def test_memory_for_the_transform_is_part_of_the_budget():
    def tiny(sample):
        return {"y": sample["y"]}

    raw = 3 * 8 * 6 * 400
    with loader_of(sample=tiny, batch_size=400, workers=3, of=source(400)) as loader:
        budget = loader.footprint.budget
        assert raw <= budget.scratch / 3 <= raw + 8 * 400 + 1024
        assert " scratch" in str(budget)
        assert budget.total == 5 * budget.slot_bytes + budget.scratch
    limited = loader_of(sample=tiny, batch_size=400, workers=3, of=source(400), memory_budget=raw)
    with pytest.raises(MemoryBudgetError, match="scratch need"):
        next(limited)
    dm = AsyncDataModule(
        train=source(400), loader={"batch_size": 400, "workers": 3, "memory_budget": raw}, sample_transform=tiny
    )
    with pytest.raises(MemoryBudgetError, match="scratch need"):
        dm.describe()
    with loader_of(sample=tiny, batch=tiny, batch_size=400, workers=0, of=source(400)) as loader:
        assert loader.footprint.budget.scratch > raw + 8 * 400


def same(values):
    return values


@pytest.mark.parametrize(
    ("reading", "workers", "hooks", "together"),
    [
        ("copied", 1, {}, True),
        ("copied", 1, {"sample": same}, True),
        ("decoded", 1, {"sample": same}, True),
        ("copied", 1, {"batch": same}, False),
        ("copied", 1, {"sample": same, "batch": same}, False),
        ("copied", 0, {}, True),
        ("copied", 0, {"sample": same}, False),  # the loop would wait for all of them
        ("python", 1, {"sample": same}, False),
    ],
)
def test_small_batches_are_read_together_unless_a_transform_takes_a_batch(reading, workers, hooks, together):
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading=reading))
    found = loader_of(of, workers=workers, **hooks).footprint
    assert (found.layout.batches > 1) == together
    assert found.budget.scratch >= bool(hooks) * found.layout.batches * 4 * found.layout.spec.nbytes


def test_samples_that_are_large_before_the_transform_are_not_read_together():
    """Their memory is bounded as that of the slots is."""
    of = ArraySource({"x": np.zeros((8, 2**22), np.uint8)}, parts={"a": 8}, chunks=StorageLayout(reading="copied"))
    found = loader_of(of, workers=1, sample=lambda sample: {"y": sample["x"][0]}).footprint
    assert (found.layout.batches, found.layout.spec.nbytes) == (1, 1)


class Panic(BaseException):
    """As libraries that are written in Rust raise it."""


def panics(sample):
    if sample["y"] == 33:
        raise Panic
    return sample


def test_a_hook_that_panics_fails_its_batch_and_no_other():
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading="copied"))
    with loader_of(of, batch_size=10, shuffle=False, workers=2, sample=panics) as loader:
        for _ in range(5):  # batches are read together after the first
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == [0, 10, 20]
            with pytest.raises(ReadError, match=r"batch 3 .*Panic"):
                next(batches)
            assert [next(batches)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]


HOW = [
    (lambda s: [s], r"returned a list for sample 0 \(row 0 of ArraySource\); return a dict with an array for each key"),
    (lambda s: {}, r"returned no field for sample 0 \(row 0 of ArraySource\); return at least one"),
    (lambda s: {"x": "text"}, r"field 'x' of sample 0 \(.*\) is a str; return an array or a number, or leave it out"),
    (lambda s: {"x": None}, r"field 'x' of sample 0 \(.*\) is a NoneType; return"),
    (lambda s: {"x": np.array(["a"])}, r"field 'x' of .* is an array of <U1, which no tensor can hold; return numbers"),
    (lambda s: {"x": np.ma.array([1])}, r"field 'x' of .* is a MaskedArray; return numpy.asarray\(…\) of it"),
    (lambda s: {"x": 2**70}, r"field 'x' of .* which does not fit into int64; return it as a float"),
    (
        lambda s: {"x": torch.zeros(2, dtype=torch.bfloat16)},
        r"field 'x' of .* is a tensor of torch.bfloat16, .* return a dense tensor",
    ),
    (lambda s: {"x": torch.zeros(2, device="meta")}, r"field 'x' of .* is a tensor on meta; return it on the CPU"),
    (lambda s: {3: 1}, r"the key 3 in the result for sample 0 \(.*\) is not text; name each field by text"),
    (lambda s: 1 / 0, r"failed on sample 0 \(row 0 of ArraySource\): ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("hook", "message"), HOW, ids=range(len(HOW)))
def test_a_result_that_cannot_be_a_sample_is_an_error_that_says_what_to_return(hook, message):
    with (
        loader_of(sample=hook) as loader,
        pytest.raises(TransformError, match=f"^sample_transform: {message}") as caught,
    ):
        next(loader)
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 0, 0, "ArraySource")
    assert "to learn what comes out" in error.__notes__[0]


BATCHES = [
    (
        lambda b: b["y"],
        r"returned a ndarray for the batch of samples 0, 1 \(the first is row 0 of ArraySource\); return",
    ),
    (lambda b: {"x": b["x"].mean()}, r"field 'x' of the batch .* has shape \(\), but the first axis must have one row"),
    (
        lambda b: {"x": b["x"][:1]},
        r"field 'x' of .* has shape \(1, 3, 8, 6\), but .* one row for each of the 2 samples",
    ),
    (lambda b: {"x": np.zeros(2)}, r"field 'x' of .* has shape \(2,\), but .* one row for each of the 3 samples"),
    (lambda b: {"x": np.eye(len(b["y"]))}, r"field 'x' of .* is float64 \(3,\) for each sample, but float64 \(2,\) in"),
    (lambda b: {"y": b["y"], **({"z": b["y"]} if len(b["y"]) > 2 else {})}, r"field 'z' of .*, but missing in a batch"),
    (lambda b: 1 / 0, r"failed on the batch of samples 0, 1 \(the first is row 0 of ArraySource\): ZeroDivisionError"),
]


@pytest.mark.parametrize(("hook", "message"), BATCHES, ids=range(len(BATCHES)))
def test_a_result_that_cannot_be_a_batch_is_an_error_that_says_what_to_return(hook, message):
    with loader_of(batch=hook) as loader, pytest.raises(TransformError, match=f"^batch_transform: {message}"):
        next(loader)


def test_the_loader_can_be_asked_again_after_the_probe_has_failed():
    broken = [True]

    def hook(sample):
        if broken:
            raise OSError("not yet")

    with loader_of(sample=hook, shuffle=False) as loader:
        for _ in range(2):
            with pytest.raises(TransformError, match="not yet"):
                next(loader)
        broken.clear()
        assert next(loader)["y"].tolist() == [0, 1, 2, 3]


class Damaged(ArraySource):
    def read_into(self, samples, out):
        raise CorruptError("x.h5: bad chunk")


def test_a_first_sample_that_cannot_be_read_is_the_error_of_the_source():
    with (
        loader_of(Damaged({"y": np.arange(4)}), sample=doubled) as loader,
        pytest.raises(CorruptError, match="bad chunk"),
    ):
        next(loader)


def test_the_key_of_indices_is_reserved():
    for name in ("sample", "batch"):
        with (
            loader_of(**{name: lambda values: values | {"index": values["index"] + 1}}, return_indices=True) as loader,
            pytest.raises(
                TransformError, match=rf"^{name}_transform: returned another 'index' for .*under another key"
            ),
        ):
            next(loader)
    with (
        loader_of(ArraySource({"index": np.arange(4)}), sample=lambda sample: {"y": 1}, return_indices=True) as loader,
        pytest.raises(ConfigError, match=r"^return_indices: the source has a field 'index' of its own"),
    ):
        next(loader)
    with loader_of(sample=lambda sample: {"index": 1}) as loader:
        assert next(loader)["index"].tolist() == [1, 1, 1, 1]


def doubled(sample):
    return {"y": sample["y"] * 2}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda dm: pickle.loads(pickle.dumps(dm))])
def test_a_datamodule_with_hooks_can_be_copied(way):
    dm = AsyncDataModule(train=source(), loader={"batch_size": 4, "workers": 0}, sample_transform=doubled)
    assert list(dm.spec) == ["y"]
    copied = way(dm)
    assert copied.spec == dm.spec
    batch = next(copied.train_dataloader())
    assert list(batch) == ["y"]
    copied.close()
