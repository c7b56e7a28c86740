"""Copies to a simulated device beside steps on it, in the Trainer."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from measuring.trainer_steps import Contender, Marks, fitted
from torch.utils.data import DataLoader, Dataset

import lit_async_data as lad
from lit_async_data import AsyncLoader
from lit_async_data.testing import ArraySource
from waiting.on_device.fake_streams import raw
from waiting.on_device.simulated import SimulatedDevice, replaced_streams

DEVICE_STEP_S = 0.050
# Seconds of loading and of copying a batch.
DEVICE = {"copies of 30 ms": (0.0, 0.030), "loading of 40 ms, copies of 30 ms": (0.040, 0.030)}
DEVICE_BATCH, WIDTH = 4, 20_000
# Reads and copies each batch when the loop asks for it; the previous step is enqueued by then.
BEFORE = "AsyncLoader, depth 0"


class Numbered(ArraySource):
    """Samples that hold their own number; each batch takes a given time to load."""

    def __init__(self, length: int, seconds: float) -> None:
        numbers = np.arange(length, dtype=np.float32)
        super().__init__({"x": np.repeat(numbers[:, None], WIDTH, axis=1), "y": numbers})
        self._seconds = seconds

    def read_into(self, samples: Any, out: Any) -> None:
        time.sleep(self._seconds)
        super().read_into(samples, out)


class DeviceSteps(pl.LightningModule):
    """Enqueues steps on a simulated device without waiting for them, as on a GPU.

    Attributes:
        wrong: Steps that saw another batch than their own.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.marks = Marks()
        self.wrong = 0
        self._clocked = device

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        content = raw(batch["x"])
        wanted = np.arange(DEVICE_BATCH) + batch_idx * DEVICE_BATCH

        def kernel() -> None:
            with self.marks.step():
                time.sleep(DEVICE_STEP_S)
                rows = content().view(np.float32).reshape(DEVICE_BATCH, -1)
                self.wrong += int((rows != wanted[:, None]).any())

        self._clocked.launch("step", kernel)

    def on_train_end(self) -> None:
        self._clocked.synchronize()

    def configure_optimizers(self) -> None:
        return None


class NumberedBatches(Dataset[Any]):
    """`Numbered` for a DataLoader: whole batches."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        time.sleep(self._seconds)
        numbers = torch.arange(DEVICE_BATCH, dtype=torch.float32) + step * DEVICE_BATCH
        return {"x": numbers[:, None].repeat(1, WIDTH)}


def device_ways(steps: int, seconds: float) -> list[Contender]:
    """The loaders and callbacks to compare on a device."""
    options = {"batch_size": DEVICE_BATCH, "workers": 1, "worker_kind": "thread", "shuffle": False}

    def ours() -> AsyncLoader:
        return AsyncLoader(Numbered(DEVICE_BATCH * steps, seconds), options)

    def wrapped() -> Any:
        own = DataLoader(NumberedBatches(steps, seconds), batch_size=None, num_workers=1)
        return lad.prefetched(own, device="cpu:0")  # with a number, or torch would look up the current device

    return [
        Contender("AsyncLoader, callback", ours, 2),
        Contender("AsyncLoader", ours),
        Contender("DataLoader, prefetched", wrapped),
        Contender(BEFORE, ours, 0),
    ]


def on_device(contender: Contender, load_s: float, copy_s: float, steps: int) -> dict[str, float]:
    """One run on a simulated device; seconds per step."""
    clocked = SimulatedDevice(copy_s)
    model = DeviceSteps(clocked)
    with contextlib.closing(clocked), replaced_streams(lambda device: clocked, simulated=True):
        marks, means = fitted(model, contender)
    assert not model.wrong, f"{model.wrong} of {steps} steps saw another batch"
    return {
        "training": marks.alone,
        "asynchronous": marks.per_step,
        "idle": marks.between,
        "logged": float(means.get("data/device_wait_ms", math.nan)) / 1000,  # as the callback logged it
        "ratio": max(load_s, copy_s, marks.alone) / marks.per_step,
    }
