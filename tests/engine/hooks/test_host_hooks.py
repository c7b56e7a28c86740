"""The fields that come out of host hooks are found before the first batch, and not before they are needed."""

import contextlib
import copy
import logging
import pickle
import random
import sys
import threading

import numpy as np
import pytest
import torch
from support.sources.hooked_loaders import IMAGES, STEPS, WANTED, assert_same, copied, drawing, hooked, source
from support.sources.hooks import LENGTH, cropped, mixed

from lit_async_data import AsyncDataModule, AsyncLoader, FieldSpec
from lit_async_data.batch.spec import BatchSpec
from lit_async_data.engine.hooks.transformation import HostHooks
from lit_async_data.errors import ConfigError, CorruptError, TransformError
from lit_async_data.sources.contract.user_code import states
from lit_async_data.testing import ArraySource


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
        (0.5, "f8", ()),
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
    with hooked(sample=lambda sample: {"v": value}) as loader:
        assert loader.spec["v"] == FieldSpec(shape, np.dtype(dtype))
        batch = next(loader)["v"]
        assert batch.shape == (4, *shape)
        plain = value.detach() if torch.is_tensor(value) else value
        assert np.array_equal(batch.numpy(), np.broadcast_to(np.asarray(plain), batch.shape))


def test_fields_keep_the_order_of_the_source_and_new_ones_follow():
    loader = hooked(sample=lambda sample: {"new": 1, **dict(reversed(sample.items())), "last": 2})
    assert list(loader.spec) == ["x", "y", "new", "last"]
    assert list(hooked(sample=lambda sample: {"y": sample["y"]}).spec) == ["y"]


def test_tuples_stay_tuples_in_the_order_of_the_fields():
    of, values = tuples()
    with hooked(of, sample=lambda s: {"new": 1.5, "y": s["y"], "x": s["x"]}) as loader:
        x, y, new = next(loader)
        assert np.array_equal(x.numpy(), values[:4].transpose(0, 3, 1, 2))
        assert x.is_contiguous()
        assert (y.tolist(), new.tolist()) == ([0, 1, 0, 1], [1.5] * 4)
        assert loader.spec["x"] == FieldSpec((3, 8, 6), np.dtype("u1"))
        assert loader.spec["y"].classes == ("auk", "jay")
    with hooked(of, sample=lambda s: {"y": s["y"]}, return_indices=True) as loader:
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

    with hooked(of, sample=look) as loader:
        x, y, total = next(loader)
    assert all(seen)  # a view of what is stored: nothing was moved
    assert (x[:, 0] == 9).all()
    assert np.array_equal(x[:, 1:].numpy(), values[:4, :, :, 1:].transpose(0, 3, 1, 2))
    assert y.tolist() == [5, 6, 5, 6]
    assert total.tolist() == x.long().sum((1, 2, 3)).tolist()


def test_a_batch_may_be_changed_in_place_and_lose_and_gain_fields():
    def mean(batch):
        batch["mean"] = batch.pop("x").mean(axis=(1, 2, 3))

    with hooked(source(10), batch=mean) as loader:
        assert np.allclose(torch.cat([batch["mean"] for batch in loader]), IMAGES[:10].mean((1, 2, 3)))
        assert list(loader.spec) == ["y", "mean"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_samples_are_enough(length):
    with hooked(source(length), batch=lambda batch: {"z": batch["y"] * 2}) as loader:
        assert [batch["z"].tolist() for batch in loader] == [[2 * n for n in range(length)]]


class Damaged(ArraySource):
    def read_into(self, samples, out):
        raise CorruptError("x.h5: bad chunk")


def test_constructors_call_no_hook_and_read_nothing():
    def never(sample):
        raise AssertionError("a constructor calls no hook")

    of = Damaged({"y": np.arange(4)})
    hooked(of, sample=never, batch=never)
    dm = AsyncDataModule(train=of, loader={"batch_size": 2}, sample_transform=never)
    assert "y int64" in repr(dm)
    dm.train_dataloader()


def test_the_first_sample_is_transformed_once_for_all_that_ask():
    calls = []
    with hooked(sample=lambda sample: calls.append(int(sample["y"]))) as loader:
        loader.spec, loader.footprint, loader.spec
        assert calls == [0]
        list(loader)
    assert calls == [0, *range(LENGTH)]


def test_the_probe_leaves_the_global_generators_as_they_are_and_notes_draws():
    def careless(sample):
        sample["x"][...] = random.random() + np.random.random() + float(torch.rand(()))  # noqa: NPY002

    before = states()
    for name in ("sample", "batch"):
        loader = hooked(**{name: careless})
        loader.spec
        assert states() == before
        assert loader._recipe.outcome.drawn == ["torch", "numpy", "random"]
    loader = hooked(sample=lambda sample: None)
    loader.spec
    assert not loader._recipe.outcome.drawn


LEFT = "left the first arrays as they were"


@pytest.mark.parametrize("name", ["sample_transform", "batch_transform"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda values: {**values}, True),
        (lambda values: {"drawn": np.random.rand(), **values} and values, True),  # noqa: NPY002
        (lambda values: None, True),
        (lambda values, rng: values, False),
        (lambda values: {"x": values["x"] + 1, "y": values["y"]}, False),
        (lambda values: values["x"].__iadd__(1) is None or values, False),
        (lambda values: {"x": values["x"][..., ::-1], "y": values["y"]}, False),
        (lambda values: {"x": values["x"]}, False),
        (lambda values: {"z": values["x"], **values}, False),
    ],
)
def test_a_hook_that_leaves_all_arrays_is_warned_of_once_where_torchvision_is_there(
    monkeypatch, caplog, name, function, says
):
    arrays = ArraySource({"x": np.arange(24.0).reshape(4, 6), "y": np.arange(4)})
    for there in (False, True):
        if there:
            monkeypatch.setitem(sys.modules, "torchvision.transforms", object())
        with AsyncLoader(arrays, {"batch_size": 2, "workers": 0}, **{name: function}) as loader:
            next(loader)
        found = [text for text in caplog.messages if LEFT in text]
        assert len(found) == (there and says)
        assert all(text.startswith(name) and "docs/data/transforms.md" in text for text in found)
    assert len([text for text in caplog.messages if "drew random numbers" in text]) in (0, 2)


def test_the_loader_can_be_asked_again_after_the_probe_has_failed():
    broken = [True]

    def hook(sample):
        if broken:
            raise OSError("not yet")

    with hooked(sample=hook) as loader:
        for _ in range(2):
            with pytest.raises(TransformError, match="not yet"):
                next(loader)
        broken.clear()
        assert next(loader)["y"].tolist() == [0, 1, 2, 3]


def test_a_first_sample_that_cannot_be_read_is_the_error_of_the_source():
    with (
        hooked(Damaged({"y": np.arange(4)}), sample=doubled) as loader,
        pytest.raises(CorruptError, match="bad chunk"),
    ):
        next(loader)


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


def test_evaluation_gets_no_random_numbers_and_stages_get_their_hooks():
    def marked(value):
        def mark(batch):
            return {**batch, "mark": np.full(len(batch["y"]), value)}

        return mark

    dm = AsyncDataModule(
        train=source(),
        val=source(),
        test=source(),
        loader={"batch_size": 4, "seed": 5, "return_indices": True, "workers": 0},
        sample_transform=cropped,
        batch_transform={"train": mixed, "eval": marked(1), "test": marked(2)},
    )
    with contextlib.closing(dm):
        assert list(dm.spec) == ["x", "y", "drawn", "batch"]
        assert_same([copied(batch) for batch in dm.train_dataloader()], WANTED[:STEPS])
        for loader, mark in ((dm.val_dataloader()[0], 1), (dm.test_dataloader()[0], 2)):
            batches = list(loader)
            assert {n for batch in batches for n in batch["mark"].tolist()} == {mark}
            assert {n for batch in batches for n in batch["drawn"].tolist()} == {-1}
        assert "x uint8 (3, 8, 6)" in dm.describe()


def test_whoever_calls_the_hooks_of_a_loader_holds_their_lock_an_iterator_beside_too(monkeypatch):
    made, held = [], []
    of = HostHooks.of
    monkeypatch.setattr(HostHooks, "of", lambda *given: made.append(of(*given)) or made[-1])

    def hook(sample):
        held.append(made[0].lock.locked())

    with drawing(ArraySource({"y": np.arange(8)}), sample=hook, batch=None, workers=0) as loader:
        loader.spec
        held.clear()
        passing = iter(loader)
        next(passing), next(iter(loader))
    assert set(held) == {True}
    assert not copy.deepcopy(made[0]).lock.locked()


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, value):
        return value


@pytest.mark.processes
@pytest.mark.parametrize("name", ["sample", "batch"])
def test_a_hook_that_cannot_be_pickled_stays_here_or_is_refused(caplog, name):
    caplog.set_level(logging.INFO)
    hooks = {"sample": None, "batch": None, name: Unpicklable()}
    with drawing(**hooks, worker_kind="auto", shuffle=False) as loader:
        assert next(loader)["y"].tolist() == [0, 1, 2, 3]
        assert loader.footprint.workers.kind == "caller"
    why = f"{name}_transform cannot be pickled (TypeError: "
    assert f"ArraySource: no workers ({why}" in caplog.text
    assert f"no reader process can be used ({why}" in caplog.text
    with (
        drawing(**hooks, worker_kind="process") as loader,
        pytest.raises(
            ConfigError, match=rf"^worker_kind: .*: {name}_transform cannot .* its lock; .*, or set worker_kind=thread"
        ),
    ):
        next(loader)


def test_without_a_process_the_loop_calls_hooks_and_says_why(caplog):
    with drawing(worker_kind="auto") as loader:
        assert_same([copied(batch) for _ in range(2) for batch in loader], WANTED)
        assert loader.footprint.workers[:3] == ("caller", 0, "a test of threads")
    assert "workers=auto reads each batch of ArraySource when it is asked for" in caplog.text
    assert pickle.loads(pickle.dumps(loader.spec)) == loader.spec
