"""The way to a device, on one that is there: ``pytest -m gpu`` on a machine with a CUDA device.

Each test runs on a pretended device, too, which every suite has: with the same sizes, and without what only a GPU
shows. What is forced and measured here is built in `benchmarks/waiting/on_device/`, which `benchmarks/waiting/gpu.py`
turns into figures.
"""

import copy
import os
import statistics
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from support.device import pretended
from support.device.pretended import MACHINES, PretendedRig
from support.sources.numbered import numbers
from waiting.on_device import measures
from waiting.on_device.contenders import MIB, Contender, Resident, contenders, source
from waiting.on_device.hazards import HAZARDS
from waiting.on_device.rig import Gpu, cycles_per_second, sleep

import lit_async_data as lad
from lit_async_data.testing import ArraySource

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*but AMP with fp16 is not supported on CPU:UserWarning"),
]

ROOT = Path(__file__).parents[3]
DEPTHS = pytest.mark.parametrize("depth", [None, 0, 2], ids=["no callback", "device_depth=0", "device_depth=2"])
SAMPLES, BATCH = 60, 8


@pytest.fixture(autouse=True, params=MACHINES)
def machine(request, monkeypatch):
    with pretended.machine(monkeypatch, real=request.param) as made:
        yield made


@pytest.fixture
def step(machine):
    """Kernels of 5 ms: longer than what is copied here takes."""
    return measures.Kernels(0.005)


def fitted(model, loader, *callbacks, **options):
    trainer = pl.Trainer(**measures.QUIET | options, callbacks=list(callbacks))
    trainer.fit(model, loader)
    return model


def prefetchers(depth):
    return [] if depth is None else [lad.DevicePrefetcher(device_depth=depth)]


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_a_hazard_comes_true_without_its_guard_only(hazard, guarded, machine):
    rig = Gpu(hazard.slow) if machine.real else PretendedRig(hazard.slow, Gpu.width)
    assert hazard.shows(rig, guarded=guarded) is not guarded


def test_a_slot_is_not_filled_again_while_it_is_copied(machine):
    """1. Side is held back. 2. Two copies are enqueued behind that: from all slots that there are. 3. Both batches are
    handed out, and a third is asked for: it comes when side has gone on, and not before."""
    machine.late = True
    options = {"batch_size": 4, "shuffle": False, "queue_depth": 1, "workers": 1}
    with lad.AsyncLoader(ArraySource({"x": np.zeros((40, MIB), "u1")}), options, device="cuda") as loader:
        loader._wiring.externally_driven = True
        loader.next()
        torch.cuda.synchronize()
        queue = measures.engine_of(loader).queue
        with queue.streams.on_side():
            sleep(round(0.2 * cycles_per_second()))
        held = queue.streams.record(queue.streams.side)
        happened = held.query if machine.real else lambda: held.done

        def submitted():
            loader._prefetch()
            return queue.ready == 2

        measures.wait_until(submitted)
        loader.next()
        loader.next()
        assert not happened()
        loader.next()
        assert happened()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_slots_are_pinned(kind, machine):
    numbers = np.arange(40, dtype=np.float32).repeat(MIB // 4).reshape(40, MIB // 4)
    options = {"batch_size": 4, "shuffle": False, "workers": 1, "worker_kind": kind}
    with lad.AsyncLoader(ArraySource({"x": numbers}), options, device="cuda") as loader:
        found = [batch["x"].amax(dim=1).tolist() for batch in loader]
        assert found == [[4 * step + i for i in range(4)] for step in range(10)]
        pool = measures.engine_of(loader).feed.pipeline.pool
        pinned = {torch.from_numpy(pool.memories[slot]).is_pinned() for slot in range(len(pool))}
        assert pinned == {machine.real}


# A race that torch's own sanitizer sees: one tensor, written on one stream and read on another.
SANITIZED = """
import sys, numpy as np, torch
sys.path.insert(0, "benchmarks")
from waiting.on_device.hazards import ComputeNeverWaits, mixed
from waiting.on_device.simulated import replaced_streams
from lit_async_data import AsyncLoader
from lit_async_data.engine.device.streams import Streams
from lit_async_data.testing import ArraySource

streams = mixed(ComputeNeverWaits if sys.argv[1] == "mutant" else None, Streams)
streams.held = True
with replaced_streams(streams, simulated=False):
    source = ArraySource({"x": np.zeros((32, 2**20), "u1")})
    with AsyncLoader(source, {"batch_size": 4}, device="cuda") as loader:
        for batch in loader:
            batch["x"].amax()
"""


@pytest.mark.parametrize(("mutant", "races"), [("none", False), ("mutant", True)])
def test_the_sanitizer_of_torch_sees_a_race_only_without_a_wait(mutant, races, machine, monkeypatch):
    if not machine.real:
        monkeypatch.setattr(sys, "argv", ["-c", mutant])
        monkeypatch.setattr(sys, "path", [*sys.path])
        exec(SANITIZED, {})
        return
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SANITIZED, mutant]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    assert ("data race" in done.stderr) is races, done.stderr
    assert (done.returncode != 0) is races, done.stderr


class Looking(pl.LightningModule):
    """A model that learns, and may look at a value: that waits for the GPU."""

    def __init__(self, looks=False):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
        self.looks = looks

    def training_step(self, batch, number):
        loss = self.layer(batch["x"][:, :16].float()).square().mean()
        if self.looks:
            loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@DEPTHS
@pytest.mark.parametrize("transform", [None, lad.ToFloat("x"), lad.Normalize(100, 50, fields="x")], ids=str)
def test_an_epoch_has_the_program_wait_for_nothing(depth, transform):
    with source(4, 10, 0.0, device_transform=transform) as loader:
        fitted(Looking(), loader, measures.NoSynchronising(), *prefetchers(depth), max_epochs=2)


def test_a_step_that_has_it_wait_is_an_error(machine):
    with source(4, 10, 0.0) as loader, machine.raises(RuntimeError, match="synchroniz"):
        fitted(Looking(looks=True), loader, measures.NoSynchronising(), *prefetchers(2))


def test_a_copy_is_started_in_under_a_millisecond_while_both_streams_are_busy(machine):
    seconds = measures.submit_seconds(20)
    assert len(seconds) == 20
    if machine.real:
        assert statistics.median(seconds) < 0.001
        assert max(seconds) < 0.025  # the streams sleep for 50 ms: whoever waits for one takes as long


@pytest.mark.parametrize("new_streams", [False, True])
def test_the_allocator_holds_more_and_more_only_with_a_stream_for_each_epoch(new_streams, machine):
    held = measures.reserved(5, new_streams=new_streams)
    assert held[-1] > held[0] if new_streams and machine.real else held == held[:1] * 5


def profiled(contender, step, machine):
    """The events of a GPU in an epoch; none on a pretended one, which must be profiled as well."""
    events = measures.beside_kernels(contender, step)
    assert machine.real or machine.traces == 1
    return events


@pytest.mark.parametrize("ahead", [True, False])
def test_copies_that_are_made_ahead_run_beside_kernels_and_come_from_pinned_memory(ahead, step, machine):
    contender = next(each for each in contenders(8, measures.SETTLE + 10, 0.0) if (each.depth != 0) is ahead)
    events = profiled(contender, step, machine)
    if machine.real:
        assert (measures.beside(events) > 0.5) is ahead
        assert not ahead or {event["name"] for event in measures.copies(events)} == {"Memcpy HtoD (Pinned -> Device)"}


def test_pageable_batches_of_other_loaders_are_copied_from_pinned_memory_too(step, machine):
    dataset = [torch.zeros(8 * MIB, dtype=torch.uint8) for _ in range(measures.SETTLE + 10)]
    batches = [{"x": tensor} for tensor in dataset]
    contender = Contender("prefetched", lambda: lad.prefetched(batches, device="cuda"))
    events = profiled(contender, step, machine)
    if machine.real:
        assert {event["name"] for event in measures.copies(events)} == {"Memcpy HtoD (Pinned -> Device)"}


class Seeing(pl.LightningModule):
    """Checks each batch against its numbers, and what type it came in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(16, 1)
        self.types = set()
        self.seen = []

    def training_step(self, batch, number):
        x, y = batch["x"], batch["y"]
        self.types.add(x.dtype)
        assert x.device == y.device == self.device
        assert torch.equal(x, y[:, None].to(x.dtype).expand_as(x))
        self.seen += y.tolist()
        sleep(10**6)
        return self.layer(x[:, :16] / SAMPLES).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@DEPTHS
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_batches_are_converted_as_the_precision_says(depth, precision, dtype):
    with lad.AsyncLoader(numbers(SAMPLES), {"batch_size": BATCH, "shuffle": True}, device="cuda") as loader:
        model = fitted(Seeing(), loader, *prefetchers(depth), max_epochs=2, precision=precision)
    assert model.types == {dtype}
    assert sorted(model.seen) == sorted([*range(SAMPLES)] * 2)


@DEPTHS
def test_accumulated_gradients_are_those_of_batches_in_memory(depth):
    options = {"batch_size": BATCH, "shuffle": False}
    with lad.AsyncLoader(numbers(SAMPLES), options) as loader:
        batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]
    in_memory = torch.utils.data.DataLoader(Resident(batches), batch_size=None)
    plain = fitted(Seeing(), in_memory, accumulate_grad_batches=4, max_epochs=2)
    with lad.AsyncLoader(numbers(SAMPLES), options, device="cuda") as loader:
        model = fitted(Seeing(), loader, *prefetchers(depth), accumulate_grad_batches=4, max_epochs=2)
    assert model.seen == plain.seen
    torch.testing.assert_close(model.layer.weight, plain.layer.weight)
    torch.testing.assert_close(model.layer.bias, plain.layer.bias)


class Scenes(torch.utils.data.Dataset):
    """As Mask R-CNN has them: images of different sizes, and a dict of targets for each."""

    def __len__(self):
        return 24

    def __getitem__(self, number):
        image = torch.full((3, 200 + 10 * number, 300), float(number))
        masks = torch.full((number % 3, *image.shape[1:]), number, dtype=torch.uint8)
        boxes = torch.arange(4.0 * (number % 3)).reshape(-1, 4)
        return image, {"masks": masks, "boxes": boxes, "image_id": number, "file": f"{number}.jpg", "crowd": None}


def collated(batch):
    return tuple(zip(*batch))


def held_back(batches):
    """Let both streams begin what comes next some milliseconds late."""
    sleep(10**7)
    with batches._run.engine.queue.streams.on_side():
        sleep(10**7)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_nested_batches_of_images_of_different_sizes_arrive_whole(pinned, depth, machine):
    loader = torch.utils.data.DataLoader(Scenes(), 4, num_workers=1, collate_fn=collated, pin_memory=pinned)
    with lad.prefetched(loader, device_depth=depth, device="cuda") as batches:
        assert len(batches) == 6
        for _ in range(2):
            seen = []
            for images, targets in batches:
                held_back(batches)
                assert isinstance(images, tuple)
                for image, target in zip(images, targets, strict=True):
                    number = target["image_id"]
                    expected, wanted = Scenes()[number]
                    seen.append(number)
                    assert image.device.type == target["boxes"].device.type == machine.device.type
                    assert torch.equal(image.cpu(), expected)
                    assert torch.equal(target["masks"].cpu(), wanted["masks"])
                    assert torch.equal(target["boxes"].cpu(), wanted["boxes"])
                    assert (target["file"], target["crowd"]) == (f"{number}.jpg", None)
            assert seen == list(range(24))


def test_what_was_kept_of_a_batch_never_changes():
    with lad.AsyncLoader(numbers(SAMPLES), {"batch_size": BATCH, "shuffle": False}, device="cuda") as loader:
        kept = [copy.copy(batch) for _ in range(3) for batch in loader]
        torch.cuda.synchronize()
        for batch in kept:
            assert torch.equal(batch["x"], batch["y"][:, None].float().expand_as(batch["x"]))


class Late(pl.LightningModule):
    """Predicts when the GPU has slept for a while, with memory that the next batch uses again."""

    def predict_step(self, batch, number):
        sleep(round(0.02 * cycles_per_second()))
        numbers = batch["y"] + 0.5
        return {"p": numbers.bfloat16(), "mask": numbers[:, None, None].expand(-1, 64, 64).to(torch.uint8)}


def test_predictions_are_written_as_the_gpu_computed_them(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    dm = lad.AsyncDataModule(predict=ArraySource({"y": np.arange(SAMPLES)}), loader={"batch_size": BATCH})
    trainer = pl.Trainer(callbacks=[lad.DevicePrefetcher(), lad.PredictionWriter(tmp_path / "out")], **measures.QUIET)
    trainer.predict(Late(), datamodule=dm, return_predictions=False)
    table = pyarrow.read_table(tmp_path / "out/predictions.parquet")
    assert table["p"].to_pylist() == (np.arange(SAMPLES) + 0.5).tolist()
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        assert (file["mask"][:] == np.arange(SAMPLES)[:, None, None]).all()
