"""A model that records its batches, a quiet Trainer, and the expected batches of an epoch."""

import collections
import importlib
import os
import threading
import types

import numpy as np
import pytest
import torch

import lit_async_data as lad  # does not import Lightning: NAME chooses which of the two packages
from lit_async_data.testing import ArraySource
from support.plans import plan_of

NAME = os.environ.get("LIT_ASYNC_DATA_LIGHTNING", "pytorch_lightning")
pl = importlib.import_module(NAME)
SAMPLES, BATCH, QUEUE = 22, 4, 3  # six batches, the last of two samples: more batches than slots
WIDTH = 4200  # a batch takes more than 64 KiB, so the loader hands it out on a lease


def rows(samples=SAMPLES, width=WIDTH):
    return np.repeat(np.arange(samples, dtype=np.float32)[:, None], width, axis=1)


# A DataModule has all four hooks, so Lightning also asks for stages without a source, and warns about the empty list.
NO_STAGES = pytest.mark.filterwarnings("ignore:Total length of `(list|CombinedLoader)` across ranks is zero")


class CountingSource(ArraySource):
    def __init__(self, samples=SAMPLES, width=WIDTH):
        super().__init__({"x": rows(samples, width)})
        self.reads = []

    def read_into(self, samples, out):
        self.reads.append(samples.tolist())
        super().read_into(samples, out)


class Stateful:
    """Somebody else's loader, with a state as that of torchdata's StatefulDataLoader: batches taken by `next`."""

    def __init__(self, batches):
        self.batches, self.taken, self.load = batches, 0, 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.taken, self.load = self.load % self.batches, 0  # a state of the end begins anew
        return self.rest()

    def rest(self):
        for batch in range(self.taken, self.batches):
            self.taken = batch + 1
            index = torch.tensor([batch])
            yield {"index": index, "x": index[:, None].float()}

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.load = state["taken"]


class Learning(pl.LightningModule):
    """Has one layer to train, and a list for what a test wants to see."""

    def __init__(self, inputs=1, outputs=1):
        super().__init__()
        self.layer, self.learning_rate, self.seen = torch.nn.Linear(inputs, outputs), 1e-3, []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Recorder(Learning):
    """Records samples as ``seen[stage][pass][batch]``, and asserts that the values of each batch match its indices."""

    def __init__(self, on_step=lambda stage, batch: None):
        super().__init__()
        self.seen = collections.defaultdict(list)
        self.on_step = on_step

    def see(self, stage, batch, number):
        if number == 0:
            self.seen[stage].append([])
        self.seen[stage][-1].append(batch["index"].tolist())
        assert torch.equal(batch["x"], batch["index"][:, None].float().expand_as(batch["x"]))
        self.on_step(stage, batch)

    def training_step(self, batch, number):
        self.see("train", batch, number)
        return self.layer(batch["x"][:, :1]).square().mean()

    def validation_step(self, batch, number, dataloader_idx=0):
        stage = "sanity" if self.trainer.sanity_checking else "val"
        self.see(f"{stage} {dataloader_idx}", batch, number)

    def test_step(self, batch, number, dataloader_idx=0):
        self.see(f"test {dataloader_idx}", batch, number)

    def predict_step(self, batch, number, dataloader_idx=0):
        self.see(f"predict {dataloader_idx}", batch, number)
        return batch["index"]


class Batches(Learning):
    def training_step(self, batch, number):
        self.seen.append(batch["index"].tolist())
        return self.layer(batch["x"][:, :1]).square().mean()


class Save(pl.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, self.step):
            trainer.save_checkpoint(self.path)


class Run(types.SimpleNamespace):
    """A Trainer, which can be weakly referred to."""


class Recording(pl.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


class Watching(pl.Callback):
    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module))


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    basic = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return pl.Trainer(**quiet | basic | options, callbacks=list(callbacks))


def datamodule(loader=None, **options):
    basic = {"batch_size": BATCH, "shuffle": True, "queue_depth": QUEUE, "return_indices": True, "timeout_s": 60}
    return lad.AsyncDataModule(**options, loader=basic | (loader or {}))


def source(length=1000, **arrays):
    return ArraySource({"x": np.zeros((length, 3), np.float32), **arrays})


def dm_of(**options):
    return lad.AsyncDataModule(**{"train": source(), "val": source(100), "loader": {"batch_size": 10}} | options)


def on_device(source=None, **options):
    chosen = {"batch_size": BATCH, "shuffle": True, "return_indices": True, "queue_depth": 3}
    return lad.AsyncLoader(source or CountingSource(), chosen, device="cuda:0", **options)


def plan(epoch, **options):
    """The expected batches of an epoch."""
    basic = {"length": SAMPLES, "batch_size": BATCH, "shuffle": "global", "seed": 0}
    order = plan_of(**basic | options, epoch=epoch)
    return [order.batch(step).tolist() for step in range(len(order))]


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lit_async_data")]


STORED = plan(0, shuffle="none")
CALLBACKS = {"no callback": list, "device_depth=2": lambda: [lad.DevicePrefetcher()]}
CALLBACKS["device_depth=0"] = lambda: [lad.DevicePrefetcher(device_depth=0)]
at_every_depth = pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
with_and_without = pytest.mark.parametrize("callbacks", list(CALLBACKS.values())[:2], ids=list(CALLBACKS)[:2])
