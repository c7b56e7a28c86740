"""The program that each rank runs: ``python rank_program.py FOLDER WAY RANKS``. It writes what it saw to FOLDER.

``WAY`` names a function below. Which rank it is, a process learns from its environment, or Lightning starts it.
"""

import collections
import json
import os
import sys
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lit_async_data import AsyncDataModule, AsyncLoader, DevicePrefetcher, PredictionWriter, prefetched
from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.lightning import display
from lit_async_data.testing import ArraySource
from support.lightning.predictions import numbered, predicted_of
from support.lightning.trainer import Learning, rows
from support.lightning.trainer import trainer as quiet_trainer
from support.ranks import wrapped_loaders
from support.ranks.processes import leave_process_group

BATCH, EPOCHS = 4, 2
# Samples that leave a rest: of several samples per rank, of fewer samples than ranks, and of none.
LENGTHS = 22, 25, 24
VAL = 11
PREDICTED = 21
# Of a run that is stopped after some batches, and goes on with others.
LONG, SAVED, OTHER_BATCH = 40, 2, 3


def source(samples):
    return ArraySource({"x": rows(samples, 3)})


def datamodule(samples, statistics=None, **options):
    basic = {"batch_size": BATCH, "shuffle": True, "return_indices": True, "timeout_s": 60, "worker_kind": "thread"}
    return AsyncDataModule(
        train=source(samples),
        val=source(VAL),
        test=source(VAL),
        predict=source(VAL),
        loader=basic | options,
        statistics=statistics,
    )


class Noting(Learning):
    """Notes the samples of each batch, and means over all ranks. Writes them when a stage ends, where the stage ran.

    Args:
        folder: Where to.
        name: Of the run.
    """

    def __init__(self, folder, name):
        super().__init__()
        self.folder, self.name, self.learning_rate = folder, name, 1e-6
        self.seen = collections.defaultdict(list)

    def note(self, stage, batch, number, **logged):
        if number == 0 or not self.seen[stage]:  # a resumed epoch begins with another number
            self.seen[stage].append([])
        self.seen[stage][-1].append(batch["index"].tolist())
        normalize = self.trainer.datamodule.normalize
        x = batch["x"] if normalize is None else normalize.inverse(batch["x"]).round()
        assert torch.equal(x, batch["index"][:, None].float().expand_as(x))
        if logged:
            ids = batch["index"].double()
            self.log(stage, ids.mean(), sync_dist=True, batch_size=len(ids), **logged)
            self.log(f"{stage} sum", ids.sum(), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)

    def training_step(self, batch, number):
        self.note("train", batch, number, on_step=True, on_epoch=True)
        return self.layer(batch["x"][:, :1]).square().mean()

    def validation_step(self, batch, number):
        self.note("val", batch, number, on_step=True, on_epoch=True)

    def test_step(self, batch, number):
        self.note("test", batch, number, on_step=False, on_epoch=True)

    def predict_step(self, batch, number):
        self.note("predict", batch, number)
        return batch["index"]

    def teardown(self, stage):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        write(
            self.folder, self.name, self.global_rank, self.seen | {f"metrics of {self.trainer.state.fn.value}": metrics}
        )


class Saving(Noting):
    def on_train_batch_end(self, outputs, batch, number):
        if (self.current_epoch, number + 1) == (0, SAVED):
            self.trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


def write(folder, name, rank, found):
    path = f"{folder}/{name}-{rank}.json"
    known = {}
    if os.path.exists(path):
        with open(path) as file:
            known = json.load(file)
    with open(path, "w") as file:
        json.dump(known | found, file)


class Predictor(Noting):
    def predict_step(self, batch, number):
        return predicted_of(batch["y"])


def trainer(*callbacks, **options):
    basic = {"strategy": "ddp", "max_epochs": EPOCHS, "num_sanity_val_steps": 2}
    return quiet_trainer(DevicePrefetcher(), *callbacks, **basic | options)


def seed_each_rank(number):
    """What ``seed_everything(number + rank)`` leaves behind. The order is that of rank 0."""
    os.environ["PL_GLOBAL_SEED"] = str(number + pl.utilities.rank_zero_only.rank)


def lightning(folder, **devices):
    """Every stage, with every rest; a resumed run; then too few samples."""
    seed_each_rank(0)
    for samples in LENGTHS:
        run, dm, model = trainer(**devices), datamodule(samples), Noting(folder, f"{samples} samples")
        run.fit(model, datamodule=dm)
        if samples == LENGTHS[0]:
            run.test(model, datamodule=dm, verbose=False)
            run.predict(model, datamodule=dm)
    run, dm = trainer(**devices), datamodule(LENGTHS[0], drop_last=True, statistics="train")
    run.fit(Noting(folder, "drop_last"), datamodule=dm)
    write(folder, "drop_last", run.global_rank, {"normalize": repr(dm.normalize)})
    trainer(**devices).fit(Saving(folder, "saved"), datamodule=datamodule(LONG))
    seed_each_rank(5)  # the resumed run keeps the seed of the checkpoint
    resuming, dm = trainer(**devices, accumulate_grad_batches=2), datamodule(LONG, batch_size=OTHER_BATCH)
    resuming.fit(Noting(folder, "resumed"), datamodule=dm, ckpt_path=f"{folder}/saved.ckpt")
    predictions(folder, **devices)
    run = trainer(**devices)
    try:
        run.fit(Noting(folder, "one sample"), datamodule=datamodule(1))
    except ConfigError as error:
        write(folder, "one sample", run.global_rank, {"error": str(error)})
    del os.environ["PL_GLOBAL_SEED"]  # by which Lightning's own samplers shuffle


def predictions(folder, **devices):
    """A result of all ranks; then another, where that one is."""
    seen, error = [], ""
    for _ in range(2):
        run = trainer(PredictionWriter(f"{folder}/out"), **devices)
        dm = AsyncDataModule(predict=numbered(PREDICTED), loader={"batch_size": BATCH})
        try:
            run.predict(Predictor(folder, "predictor"), datamodule=dm, return_predictions=False)
            seen = os.listdir(folder)  # by each rank, when predict has returned
        except AsyncDataError as failed:
            error = f"{type(failed).__name__}: {failed}"
    write(folder, "predictions", run.global_rank, {"seen": seen, "error": error})


def ddp(folder, ranks):
    lightning(folder, devices=ranks)


def ddp_spawn(folder, ranks):
    trainer(devices=ranks, strategy="ddp_spawn").fit(Noting(folder, "22 samples"), datamodule=datamodule(22))


def torchrun(folder, ranks):
    """One process per node."""
    lightning(folder, devices=1, num_nodes=ranks)


def slurm(folder, ranks):
    ddp(folder, ranks)
    if ranks == 2:
        wrapped_loaders.write_all(folder)


def fabric(folder, ranks):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=ranks)
    fabric.launch()
    model = fabric.setup_module(torch.nn.Linear(1, 1))
    numbers = [{"x": torch.full((3,), float(n)), "index": n} for n in range(24)]
    theirs = fabric.setup_dataloaders(DataLoader(numbers, batch_size=BATCH, shuffle=True), move_to_device=False)
    options = {"batch_size": BATCH, "shuffle": True, "return_indices": True}
    ours = {"rank": fabric.global_rank, "world_size": fabric.world_size, "device": fabric.device}
    with AsyncLoader(source(LENGTHS[0]), options, **ours) as alone, prefetched(theirs, device=fabric.device) as loader:
        for name, batches, epochs in ((f"{LENGTHS[0]} samples", alone, EPOCHS), ("prefetched", loader, 1)):
            found = []
            for _ in range(epochs):
                found.append([])
                for batch in batches:
                    model(batch["x"][:, :1]).square().mean().backward()  # waits for the other ranks
                    found[-1].append(batch["index"].tolist())
            write(folder, name, fabric.global_rank, {"train": found})


def main(folder, way, ranks):
    display.LEAST_S, display.LEAST_STEPS = 0.0, 1  # short epochs are spoken of, too
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    globals()[way](folder, int(ranks))
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
