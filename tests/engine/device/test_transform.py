"""Transforms on the device: who gets random numbers, and which; modules; and that nothing else decides about them."""

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.failures import raising
from support.sources import numbered
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncDataModule, Normalize, prefetched
from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.engine.device.queues import DeviceTransform, widened
from lit_async_data.engine.hooks import StageTransform
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.pipeline.sample_reader import BATCH_KEYS
from lit_async_data.errors import ConfigError, TransformError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.composed.composed import SubsetSource
from lit_async_data.testing import ArraySource

CPU = torch.device("cpu")


def test_it_gets_a_generator_however_it_asks_for_it():
    for function in (lambda batch, g: g, lambda batch, *, rng=None: rng):
        rng = DeviceTransform(function, CPU, number=lambda key: 2**64 - 1)({}, BatchIndex(0, 0))
        assert rng.initial_seed() == 2**64 - 1
        with pytest.raises(TransformError, match="returned None"):  # without a number there is no generator
            DeviceTransform(function, CPU)({}, BatchIndex(0, 0))


HALVE = type("Halve", (), {"__module__": "torchvision.transforms.v2._misc", "__call__": lambda _, batch: batch})()
IMAGE, MASK, BOX = torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8), torch.zeros(2, 4)


@pytest.mark.parametrize("v2", [HALVE, functools.partial(HALVE), StageTransform(HALVE, "device_transform")])
def test_torchvision_refuses_several_images_of_which_it_would_transform_one(v2):
    refused = {"'x'; images are 'x', 'm'": {"x": IMAGE, "m": MASK}, "'b'; images are 'x'": {"b": BOX, "x": IMAGE}}
    for said, batch in (refused | {"0; images are 1": (BOX, IMAGE)}).items():
        with pytest.raises(ConfigError, match=f"^device_transform: Halve of .*, {said}; transform one field, "):
            DeviceTransform(v2, CPU)(batch, BatchIndex(0, 0))
    as_tv_tensors = {"x": torch.nn.Parameter(IMAGE), "m": MASK}  # of a class of their own
    for batch in ({"x": IMAGE, "b": BOX, "n": ["a"]}, [IMAGE, BOX], {"b": BOX, "y": BOX}, as_tv_tensors, IMAGE):
        assert DeviceTransform(v2, CPU)(batch, BatchIndex(0, 0)) is batch


LENGTH = 22


def source():
    return ArraySource({"x": np.repeat(np.arange(LENGTH, dtype=np.float32)[:, None], 4200, axis=1)})


def drawing(batch, rng):
    drawn = torch.full((1,), -1, dtype=torch.int64) if rng is None else torch.randint(2**62, (1,), generator=rng)
    return batch | {"drawn": drawn}


def drawn_by(loader, epochs=2):
    with loader:
        return [(batch["index"].tolist(), batch["drawn"].item()) for _ in range(epochs) for batch in loader]


def loader_of(of=None, transform=drawing, *, depth=2, **options):
    chosen = {"return_indices": True, "seed": 5} | options
    return numbered.loader_of(of or source(), device_transform=transform, device_depth=depth, **chosen)


def expected(seed, epoch, first):
    rng = torch.Generator().manual_seed(derived_key(seed, epoch, BATCH_KEYS, first))
    return torch.randint(2**62, (1,), generator=rng).item()


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 2, "depth": 0, "queue_depth": 1},
        {"rank": 1, "world_size": 2},
        {"of": SubsetSource(source(), [*range(11, LENGTH)])},
        {"shuffle": False},
        {"seed": 6},
    ],
    ids=list,
)
def test_what_is_drawn_goes_by_seed_epoch_and_first_sample_alone(options):
    found = drawn_by(loader_of(**options))
    steps = len(found) // 2
    for epoch, batches in enumerate((found[:steps], found[steps:])):
        assert [drawn for _, drawn in batches] == [
            expected(options.get("seed", 5), epoch, ids[0]) for ids, _ in batches
        ]
    assert len({drawn for _, drawn in found}) == len(found)


def test_nothing_is_drawn_in_evaluation_and_where_the_options_say_so():
    options = LoaderOptions(batch_size=4, return_indices=True).for_evaluation()
    for loader in (AsyncLoader(source(), options, device_transform=drawing), loader_of(augment=False)):
        assert {drawn for _, drawn in drawn_by(loader)} == {-1}


@pytest.mark.parametrize("slow", ["side", "compute"])
def test_a_device_with_streams_draws_the_same(monkeypatch, slow):
    wanted, streams = drawn_by(loader_of()), FakeStreams(slow)
    pretend(monkeypatch, lambda device: streams)
    with loader_of() as loader:
        found = []
        for _ in range(2):
            for batch in loader:
                streams.synchronize()
                found.append((batch["index"].tolist(), batch["drawn"].item()))
    assert found == wanted


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))
        self.moves = []

    def to(self, device):
        self.moves.append(device)
        return super().to(device)

    def forward(self, batch, rng):
        return batch | {"x": batch["x"] * self.scale, "drawn": rng is not None}


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_module_for_all_stages_is_moved_once_and_computes_no_gradients(stage):
    module = Scaled()
    options = {"batch_size": 4, "return_indices": True}
    dm = AsyncDataModule(**{stage: source()}, loader=options, device_transform=module)
    with contextlib.closing(dm):
        loader = dm.train_dataloader() if stage == "train" else dm.val_dataloader()
        assert module.moves == []  # nothing before the first batch
        for batch in loader:
            assert torch.equal(batch["x"][:, 0], 3.0 * batch["index"])
            assert not batch["x"].requires_grad
            assert batch["drawn"] is (stage == "train")
    assert module.moves == [CPU]


async def later(batch):
    return batch


def one_by_one(batch):
    yield batch


@pytest.mark.filterwarnings("ignore:.*was never awaited")
@pytest.mark.parametrize(
    ("transform", "what"),
    [(lambda batch, rng: None, "None"), (one_by_one, "a generator"), (later, "a coroutine")],
)
def test_a_transform_that_returns_no_batch_is_an_error_of_that_batch(transform, what):
    message = rf"^device_transform: returned {what} for batch 0 of epoch 0; return the batch"
    with loader_of(transform=transform) as loader, pytest.raises(TransformError, match=message) as caught:
        next(loader)
    assert caught.value.stage == "transform"
    with prefetched([None, 1], device="cpu", device_transform=lambda batch: batch) as batches:
        assert list(batches) == [None, 1]  # what is None may stay so


def noisy(batch):
    return batch | {"x": batch["x"] + np.random.random()}  # noqa: NPY002  # as many a transform does


def chosen(batch):
    return batch | {"x": batch["x"] * random.choice([1.0, 2.0])}


def heedless(batch, rng):
    return batch | {"x": batch["x"] + torch.rand((), generator=rng)}  # None stands for the global generator


def warned(caplog):
    return [record.getMessage() for record in caplog.records if "evaluation batch" in record.getMessage()]


@pytest.mark.parametrize(("transform", "generator"), [(noisy, "numpy"), (chosen, "random"), (heedless, "torch")])
def test_a_transform_for_all_stages_that_draws_in_evaluation_is_warned_of_once(caplog, transform, generator):
    dm = AsyncDataModule(
        train=source(), val=[source(), source()], test=source(), loader={"batch_size": 4}, device_transform=transform
    )
    with contextlib.closing(dm):
        list(dm.train_dataloader())
        assert not warned(caplog)  # training may draw what it likes
        for loader in (dm.val_dataloader(), dm.test_dataloader()):
            list(loader)
    (line,) = warned(caplog)
    assert line.startswith(f"device_transform drew random numbers from {generator} on an evaluation batch")


@pytest.mark.parametrize("transform", [{"eval": noisy}, {"val": noisy}, drawing, Normalize(mean=0.5, std=0.5), None])
def test_one_that_was_given_for_evaluation_may_draw_and_one_that_draws_nothing_is_not_warned_of(caplog, transform):
    dm = AsyncDataModule(val=source(), loader={"batch_size": 4}, device_transform=transform)
    with contextlib.closing(dm):
        assert len(list(dm.val_dataloader())) == 6
    assert not warned(caplog)


@pytest.mark.parametrize("as_mapping", [True, False])
def test_what_travels_in_a_narrow_type_is_widened_before_the_users_own_transform(as_mapping):
    narrow = {"x": FieldSpec((2,), np.dtype("f4"), narrow=np.dtype("u1")), "y": FieldSpec((), np.dtype("i8"))}
    spec = BatchSpec(narrow | {"z": FieldSpec((), np.dtype("f8"), narrow=np.dtype("i2"))}, as_mapping=as_mapping)
    x, z = torch.tensor([[1, 255]], dtype=torch.uint8), torch.tensor([-3], dtype=torch.int16)
    batch, seen = spec.packed({"x": x, "y": torch.tensor([2**40]), "z": z}), []
    for transform in (None, lambda wide: seen.append(wide) or wide):
        got = DeviceTransform(transform, CPU, cast=widened(spec))(batch, BatchIndex(0, 0))
        assert type(got) is (dict if as_mapping else tuple)
        x, y, z = got.values() if as_mapping else got
        assert (x.dtype, y.dtype, z.dtype) == (torch.float32, torch.int64, torch.float64)
        assert (x.tolist(), y.tolist(), z.tolist()) == ([[1.0, 255.0]], [2**40], [-3.0])
    assert len(seen) == 1


def test_a_transform_without_memory_raises_torchs_error_by_which_lightning_finds_a_batch_size():
    full = raising(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.") as caught:
        DeviceTransform(full, CPU)({}, BatchIndex(2, 3))
    assert caught.value.args == ("CUDA out of memory.",)  # one argument, as Lightning wants it
    assert caught.value.__notes__ == ["device_transform: no memory for batch 3 of epoch 2"]
