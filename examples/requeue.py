"""A job of SLURM that is saved between two steps of the optimizer, the same two on all ranks, and requeued.

Lightning saves inside its handler of the signal, wherever the loop is: in the middle of a step, whose batch then counts
as not trained on, or in another step on each rank. With this callback the signal is only noted, and Lightning's handler
runs before the next batch. It does nothing where Lightning does not requeue. With several ranks it exchanges one number
per step. Copy it into your project; docs/training/slurm.md has the rest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

from lit_async_data import AsyncDataModule, DevicePrefetcher
from lit_async_data.testing import ArraySource

# What `sbatch --signal` sends before the time limit; 0 on Windows, which has none.
SIGNAL: int = getattr(signal, "SIGUSR1", 0)


class RequeueBetweenBatches(Callback):
    noted = False
    requeue: Callable[..., Any] | None = None
    steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # When training has ended, Lightning restores the handler that was there before both.
        self.noted, self.requeue, self.steps = False, None, -1
        handler = signal.getsignal(SIGNAL) if SIGNAL else None
        if callable(handler) and "lightning" in type(handler).__module__:
            self.requeue = handler
            signal.signal(SIGNAL, self.note)

    def note(self, *_: Any) -> None:
        self.noted = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not while gradients are accumulated, and not at the end of the batch before: a run that is resumed from there
        # leaves out the validation that is due.
        stepped, self.steps = trainer.global_step != self.steps, trainer.global_step
        if stepped:
            self.obey(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.obey(trainer)  # the signal came in the last step; there may be a test to come

    def obey(self, trainer: Trainer) -> None:
        if self.requeue is not None and trainer.strategy.reduce_boolean_decision(self.noted, all=False):
            self.noted = False
            self.requeue(SIGNAL, None)


if __name__ == "__main__":
    samples = ArraySource({"x": np.zeros((320, 32), np.float32)})
    data = AsyncDataModule(train=samples, loader={"batch_size": 8}, device_transform=lambda batch: batch["x"])
    prefetcher = DevicePrefetcher()
    both = [prefetcher, RequeueBetweenBatches()]
    Trainer(max_epochs=1, accelerator="cpu", callbacks=both, logger=False).fit(BoringModel(), datamodule=data)
    print(f"training waited {prefetcher.waited}")  # outside of SLURM, the other callback does nothing
