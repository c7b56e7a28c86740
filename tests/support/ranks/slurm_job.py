"""What a job of SLURM trains in tests: a model that remembers its samples, and what sends it the signal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytorch_lightning as pl
import torch

MOST_IN_A_BATCH = 16


def reader_processes():
    """The ids of the reader processes of this process. multiprocessing has one too, which SIGUSR1 would end."""
    children = [pid for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()]
    return [int(pid) for pid in children if b"lit_async_data" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Remembering(pl.LightningModule):
    """What it has learned is which samples came, on all ranks, in order: in a checkpoint ``seen`` is what weights are.

    It signals the end of its job's time once, as `sbatch --signal` makes SLURM do. ``SIGNAL_AT`` is JSON, for each rank
    a place: ``["train", 3]`` is the step of training that comes after three steps of the optimizer, likewise ``"val"``.

    Args:
        most: Samples that it can remember.
    """

    def __init__(self, most=1000):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("seen", torch.full((most,), -1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        places = json.loads(os.environ.get("SIGNAL_AT", "[]"))
        self.place = places[int(os.environ["SLURM_PROCID"])] if places else None

    def reach(self, *place):
        if self.place == list(place):
            self.place = None
            for process in (*reader_processes(), os.getpid()):  # SLURM signals all processes of a job
                os.kill(process, signal.SIGUSR1)

    def training_step(self, batch, number):
        own = torch.full((MOST_IN_A_BATCH,), -1)
        own[: len(batch["index"])] = batch["index"]
        ids = self.all_gather(own).reshape(-1, MOST_IN_A_BATCH).T.flatten()
        ids = ids[ids >= 0]
        self.seen[self.count : self.count + len(ids)] = ids
        self.count += len(ids)
        self.reach("train", self.global_step)
        return self.layer(torch.ones(1, 1)).square().mean()

    def validation_step(self, batch, number):
        self.reach("val", self.global_step)
        self.log("val/acc", float(self.global_step))  # ModelCheckpoint saves what is better

    def test_step(self, batch, number):
        with open(f"{self.trainer.default_root_dir}/tested.json", "w") as file:
            json.dump(self.seen[: self.count].tolist(), file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
