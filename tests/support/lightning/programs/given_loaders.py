"""Where the Trainer gets its loaders from."""

import sys

import numpy as np
import torch

from lit_async_data import AsyncLoader, LoaderOptions, prefetched
from lit_async_data.testing import ArraySource
from support.lightning.rows import WIDTH
from support.lightning.runs import BATCH, VAL, Learner, program
from support.lightning.trainer import pl

CombinedLoader = sys.modules[pl.__name__ + ".utilities"].CombinedLoader


@program
def loaders_as_arguments(run):
    run.fit(run.load(shuffle=True), run.val(), max_epochs=3)


@program
def loaders_of_the_module(run):
    model = run.model
    model.train_dataloader = lambda: run.load(shuffle=True)
    model.val_dataloader = run.val
    model.test_dataloader = lambda: run.load(5)
    model.predict_dataloader = lambda: run.load(7)
    fit = run.fit(max_epochs=2)
    fit.validate(model, verbose=False)
    fit.test(model, verbose=False)
    run.note([part.tolist() for part in fit.predict(model)])


class Theirs(pl.LightningDataModule):
    """A typical DataModule of a user."""

    def __init__(self, run, batch_size=BATCH, *, shuffle=True):
        super().__init__()
        self.run, self.batch_size, self.shuffle, self.calls = run, batch_size, shuffle, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train")
        return self.run.load(shuffle=self.shuffle, batch_size=self.batch_size)

    def val_dataloader(self):
        self.calls.append("val")
        return [self.run.val(), self.run.val(3)]

    def test_dataloader(self):
        self.calls.append("test")
        return self.run.load(5)

    def predict_dataloader(self):
        self.calls.append("predict")
        return [self.run.load(7), self.run.load(3)]


@program
def loaders_of_a_datamodule(run):
    dm = Theirs(run)
    fit = run.trainer(max_epochs=2, num_sanity_val_steps=1)
    fit.fit(run.model, datamodule=dm)
    fit.validate(run.model, datamodule=dm, verbose=False)
    fit.test(run.model, datamodule=dm, verbose=False)
    run.note([[part.tolist() for part in loader] for loader in fit.predict(run.model, datamodule=dm)], dm.calls)


class Several(Learner):
    """Trains on a dict or list of batches from several loaders."""

    def training_step(self, batch, number):
        parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
        losses = []
        for name, part in parts:
            if part is not None:
                self.see("train", part, number, name)
                losses.append(self.loss(part))
        return sum(losses)


@program(of=["a dict", "a list", "nested"])
def several_training_loaders(run, of):
    run.model = Several()
    short, long = run.load(6), run.load(first=1000)
    if of == "nested":
        run.model.training_step = lambda batch, batch_idx: sum(
            run.model.see("train", part, batch_idx) or run.model.loss(part) for part in (batch["a"], *batch["b"])
        )
    loaders = {"a dict": {"a": short, "b": long}, "a list": [short, long], "nested": {"a": short, "b": [long, short]}}
    run.fit(loaders[of], max_epochs=2)


@program(mode=["min_size", "max_size", "max_size_cycle"])
def combined_loaders(run, mode):
    run.model = Several()
    run.fit(CombinedLoader({"a": run.load(6), "b": run.load(first=1000)}, mode), max_epochs=2)


@program(mode=["sequential", "max_size"])
def combined_loaders_in_validation(run, mode):
    run.model = Several()
    if mode != "sequential":
        run.model.validation_step = lambda batch, batch_idx: [
            run.model.see("val", part, batch_idx, name) for name, part in batch.items() if part is not None
        ]
    loaders = CombinedLoader({"a": run.val(), "b": run.val(3)}, mode)
    run.trainer().validate(run.model, loaders, verbose=False)


@program
def several_loaders_in_every_evaluation(run):
    model, several = run.model, [run.val(), run.val(3), run.load(9)]
    fit = run.trainer(limit_val_batches=2)
    fit.validate(model, several, verbose=False)
    fit.test(model, several, verbose=False)
    run.note([[part.tolist() for part in loader] for loader in fit.predict(model, several)])


@program
def one_loader_for_training_and_validation(run):
    loader = run.load()
    run.fit(loader, loader, max_epochs=2, val_check_interval=2)


@program
def another_iterable_beside_a_dataloader(run):
    class Batches:
        def __iter__(self):
            return ({"x": torch.full((2, WIDTH), float(n)), "index": torch.tensor([n, n])} for n in range(len(self)))

        def __len__(self):
            return 3

    run.fit(run.load(), [run.val(), Batches()], max_epochs=2)
    run.trainer().fit(Learner(), Batches())


@program
def ours_beside_theirs(run):
    x = np.repeat(np.arange(VAL, VAL + 6, dtype=np.float32)[:, None], WIDTH, axis=1)
    source = ArraySource({"x": x, "index": np.arange(VAL, VAL + 6)})
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False)) as loader:
        run.fit(run.load(shuffle=True), [loader, run.val()], max_epochs=2)


@program
def a_loader_wrapped_by_the_user(run):
    with prefetched(run.load(), device="cpu") as batches, prefetched(run.val(), device="cpu") as val:
        run.fit(batches, [val, run.val()], max_epochs=2)
