"""What host hooks make of batches is the same however they are read."""

import contextlib
import copy
import logging
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.failures import raising
from support.sources.hooked_loaders import IMAGES, STEPS, WANTED, assert_same, copied, drawing, hooked, read, source
from support.sources.hooks import LENGTH, Rows, cropped, mixed

from lit_async_data import AsyncDataModule, FieldSpec, Normalize, StorageLayout
from lit_async_data.batch.spec import BatchSpec
from lit_async_data.engine.hooks import HostHooks
from lit_async_data.errors import ConfigError, CorruptError, MemoryBudgetError, ReadError, TransformError
from lit_async_data.sources.contract.user_code import states
from lit_async_data.testing import ArraySource


@settings(max_examples=25)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3), st.integers(0, STEPS - 1), st.integers(0, 1))
def test_workers_depths_and_earlier_passes_change_nothing(workers, queue_depth, depth, start, epoch):
    with drawing(workers=workers, queue_depth=queue_depth, depth=depth) as loader:
        for _ in range(start):  # a pass that is left
            next(loader)
        loader.set_epoch(epoch)
        again = [copied(batch) for batch in loader]
    assert_same(again, WANTED[epoch * STEPS : (epoch + 1) * STEPS])


@pytest.mark.processes
@pytest.mark.parametrize(("reading", "workers"), [("copied", 1), ("copied", 2), ("decoded", 3)])
def test_reader_processes_change_nothing(reading, workers):
    of = Rows({"x": IMAGES, "y": np.arange(LENGTH)}, reading)
    with drawing(of, workers=workers, worker_kind="process") as loader:
        assert loader.footprint.workers[:3] == ("process", workers, "worker_kind=process")
        one = drawing(of, workers=0).footprint.budget.scratch
        assert loader.footprint.budget.scratch == one * workers
        assert_same([copied(batch) for _ in range(2) for batch in loader], WANTED)


def test_one_thread_at_a_time_calls_hooks_while_others_read():
    """A worker is inside the hook until another has read, which shows that reading goes on; and nobody joins it."""
    inside, reads = [], threading.Semaphore(0)
    readers = set()

    class Counted(ArraySource):
        def read_into(self, samples, out):
            super().read_into(samples, out)
            if threading.current_thread() is not threading.main_thread():
                readers.add(threading.get_ident())
                reads.release()

    def hook(sample):
        inside.append(threading.get_ident())
        if waiting:
            waiting.pop()
            for _ in range(2):  # this worker's read and another's
                assert reads.acquire(timeout=60)
        assert set(inside) == {threading.get_ident()}
        inside.pop()

    waiting = []
    with drawing(Counted({"y": np.arange(200)}), sample=hook, batch=None, workers=3, shuffle=False) as loader:
        loader.spec
        waiting.append(True)
        assert [batch["y"].tolist() for batch in loader] == np.arange(200).reshape(50, 4).tolist()
    assert len(readers) > 1


@pytest.mark.processes
def test_lambdas_and_errors_travel_to_a_reader_process_and_back():
    offset = 100

    def hook(sample):
        if sample["y"] == 9:
            raise ZeroDivisionError("no light")
        sample["y"][...] += offset

    with drawing(sample=hook, batch=lambda batch: batch, worker_kind="auto", shuffle=False) as loader:
        assert loader.footprint.workers[:3] == ("process", 1, "Python code transforms the samples")
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[100, 101, 102, 103], [104, 105, 106, 107]]
        with pytest.raises(TransformError, match=r"^sample_transform: failed on sample 9 \(row 9 of") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [112, 113, 114, 115]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_device_transform_gets_what_the_host_hooks_return():
    found = read(drawing(device=Normalize(0.5, 0.5, scale="type", fields="x")))
    for batch, wanted in zip(found, WANTED, strict=True):
        assert torch.allclose(batch["x"], wanted["x"] / 127.5 - 1, atol=1e-6)


class Panic(BaseException):
    """As libraries that are written in Rust raise it."""


def panics(sample):
    if sample["y"] == 33:
        raise Panic
    return sample


def test_a_hook_that_panics_fails_its_batch_and_no_other():
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading="copied"))
    with hooked(of, batch_size=10, workers=2, sample=panics) as loader:
        for _ in range(5):  # batches are read together after the first
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == [0, 10, 20]
            with pytest.raises(ReadError, match=r"batch 3 .*Panic"):
                next(batches)
            assert [next(batches)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]


def same(values):
    return values


def test_memory_for_the_transform_is_part_of_the_budget():
    def tiny(sample):
        return {"y": sample["y"]}

    of = ArraySource({"x": np.zeros((400, 3, 8, 6), np.uint8), "y": np.arange(400)})
    raw = 3 * 8 * 6 * 400
    with hooked(sample=tiny, batch_size=400, workers=3, of=of) as loader:
        budget = loader.footprint.budget
        assert raw <= budget.scratch / 3 <= raw + 8 * 400 + 1024
        assert " scratch" in str(budget)
        assert budget.total == 5 * budget.slot_bytes + budget.scratch
    with pytest.raises(MemoryBudgetError, match="scratch need"):
        next(hooked(sample=tiny, batch_size=400, workers=3, of=of, memory_budget=raw))
    with hooked(sample=tiny, batch=tiny, batch_size=400, workers=0, of=of) as loader:
        assert loader.footprint.budget.scratch > raw + 8 * 400


@pytest.mark.parametrize(
    ("reading", "workers", "hooks", "together"),
    [
        ("copied", 1, {}, True),
        ("decoded", 1, {"sample": same}, True),
        ("copied", 1, {"batch": same}, False),
        ("copied", 0, {}, True),
        ("copied", 0, {"sample": same}, False),  # the loop would wait for all of them
        ("python", 1, {"sample": same}, False),
    ],
)
def test_small_batches_are_read_together_unless_a_transform_takes_a_batch(reading, workers, hooks, together):
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading=reading))
    found = hooked(of, workers=workers, **hooks).footprint
    assert (found.layout.batches > 1) == together
    assert found.budget.scratch >= bool(hooks) * found.layout.batches * 4 * found.layout.spec.nbytes


class Tuples(ArraySource):
    """Batches are tuples; images are stored with the channels last, and labels have names."""

    @property
    def spec(self):
        labels = FieldSpec((), np.dtype("i8"), classes=("auk", "jay"))
        return BatchSpec({"x": FieldSpec((3, 8, 6), np.dtype("u1"), channel=2), "y": labels}, as_mapping=False)


def tuples():
    values = np.random.default_rng(0).integers(0, 255, (LENGTH, 8, 6, 3), np.uint8)
    return Tuples({"x": values, "y": np.arange(LENGTH) % 2}), values


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (7, "i8", ()),
        (True, "?", ()),
        (np.float64(0.5), "f8", ()),
        (np.zeros((2, 3), ">f4"), "f4", (2, 3)),
        (torch.zeros(2, requires_grad=True), "f4", (2,)),
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


class Damaged(ArraySource):
    def read_into(self, samples, out):
        raise CorruptError("x.h5: bad chunk")


def test_constructors_call_no_hook_and_read_nothing():
    never = raising(AssertionError("a constructor calls no hook"))
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
    with hooked(Damaged({"y": np.arange(4)}), sample=doubled) as loader, pytest.raises(CorruptError, match="bad chunk"):
        next(loader)


def doubled(sample):
    return {"y": sample["y"] * 2}


def test_evaluation_gets_no_random_numbers_and_stages_get_their_hooks():
    def marked(value):
        def mark(batch):
            return {**batch, "mark": np.full(len(batch["y"]), value)}

        return mark

    hooks = {"train": mixed, "eval": marked(1), "test": marked(2)}
    stages = {stage: source() for stage in ("train", "val", "test")}
    options = {"batch_size": 4, "seed": 5, "return_indices": True, "workers": 0}
    dm = AsyncDataModule(**stages, loader=options, sample_transform=cropped, batch_transform=hooks)
    with contextlib.closing(dm):
        assert list(dm.spec) == ["x", "y", "drawn", "batch"]
        assert_same([copied(batch) for batch in dm.train_dataloader()], WANTED[:STEPS])
        for loader, mark in ((dm.val_dataloader(), 1), (dm.test_dataloader(), 2)):
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
    said = rf"^worker_kind: .*: {name}_transform cannot .*; .*, or set worker_kind=thread"
    with drawing(**hooks, worker_kind="process") as loader, pytest.raises(ConfigError, match=said):
        next(loader)
