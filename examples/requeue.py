"""A SLURM job that saves between two optimizer steps, the same two on all ranks, and is requeued.

Lightning saves inside its signal handler, wherever the loop is: in the middle of a step, whose batch then counts as not
trained on, or in different steps on the ranks. With this callback the signal only sets a flag, and Lightning's handler
runs before the next batch. If Lightning does not requeue, the callback does nothing. With several ranks it exchanges
one number per step. Copy it into your project; see docs/training/slurm.md.
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

# The signal of `sbatch --signal` before the time limit; 0 on Windows, which has none.
SIGNAL: int = getattr(signal, "SIGUSR1", 0)


class RequeueBetweenBatches(Callback):
    noted = False
    requeue: Callable[..., Any] | None = None
    steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After training, Lightning restores the handler from before Lightning's own and this one.
        self.noted, self.requeue, self.steps = False, None, -1
        handler = signal.getsignal(SIGNAL) if SIGNAL else None
        if callable(handler) and "lightning" in type(handler).__module__:
            self.requeue = handler
            signal.signal(SIGNAL, self.note)

    def note(self, *_: Any) -> None:
        self.noted = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not while gradients are accumulated, and not at the end of the previous batch: a run resumed from there would
        # leave out a validation that is due.
        stepped, self.steps = trainer.global_step != self.steps, trainer.global_step
        if stepped:
            self.obey(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.obey(trainer)  # for a signal in the last step; a test may follow

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
