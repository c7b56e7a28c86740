"""Programs as users write them for Lightning. `PROGRAMS` maps a sentence that describes each to its function."""

import gc
import sys

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from lit_async_data import AsyncLoader, LoaderOptions, prefetched
from lit_async_data.testing import ArraySource
from support.lightning.rows import WIDTH, Numbers, Stream
from support.lightning.runs import PROGRAMS, VAL, Learner, program
from support.lightning.trainer import pl, readers

__all__ = ["PROGRAMS", "BrokenError", "Writer", "broken_at"]

# Where the Trainer gets its loaders from.

CombinedLoader = sys.modules[pl.__name__ + ".utilities"].CombinedLoader


@program
def loaders_as_arguments(run):
    run.fit(run.load(shuffle=True), run.val(), max_epochs=3)


class Theirs(pl.LightningDataModule):
    def __init__(self, run):
        super().__init__()
        self.run, self.calls = run, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train")
        return self.run.load(shuffle=True)

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
    def training_step(self, batch, number):
        parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
        losses = []
        for name, part in parts:
            if part is not None:
                self.see("train", part, number, name)
                losses.append(self.loss(part))
        return sum(losses)


@program
def several_training_loaders(run):
    run.model = Several()
    run.fit([run.load(6), run.load(first=1000)], max_epochs=2)


@program(mode=["min_size", "max_size", "max_size_cycle"])
def combined_loaders(run, mode):
    run.model = Several()
    run.fit(CombinedLoader({"a": run.load(6), "b": run.load(first=1000)}, mode), max_epochs=2)


@program
def one_loader_for_training_and_validation(run):
    loader = run.load()
    run.fit(loader, loader, max_epochs=2, val_check_interval=2)


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


# DataLoaders of every kind, and what users give them.


class ByEpoch(SequentialSampler):
    """Another order in each epoch, set by ``set_epoch``."""

    def __init__(self, source):
        super().__init__(source)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.data_source)))
        return iter(order[self.epoch :] + order[: self.epoch])


@program
def a_batch_sampler_of_the_user(run):
    data = Numbers()
    run.fit(run.load(dataset=data, batch_sampler=BatchSampler(ByEpoch(data), 3, drop_last=True)), max_epochs=3)
    batches = run.trainer().predict(run.model, run.load(batch_sampler=BatchSampler(data, 3, False)))
    run.note([batch.tolist() for batch in batches])


@program(options=[{"drop_last": True}, {"pin_memory": True}, {"batch_size": 1}, {"batch_size": 100}, {"timeout": 30}])
def dataloaders_with(run, options):
    if "timeout" in options and not run.workers:
        return
    run.fit(run.load(shuffle=True, **options), run.val(**options), max_epochs=2)


@program
def persistent_workers(run):
    options = {"persistent_workers": bool(run.workers)}
    fit = run.fit(run.load(shuffle=True, **options), run.val(**options), max_epochs=3, val_check_interval=2)
    del fit
    gc.collect()  # drops Lightning's references to the loaders, whose workers end with them


@program(options=[{}, {"limit_train_batches": 2}, {"val_check_interval": 2}, {"max_steps": 3}, {"overfit_batches": 2}])
def a_dataset_without_a_length(run, options):
    run.fit(run.load(dataset=Stream()), run.load(dataset=Stream(5)), **{"max_epochs": 2} | options)


# Predictions, hooks of batches, and steps that do more than to return a loss.


class Writer(pl.callbacks.BasePredictionWriter):
    def __init__(self, interval, note):
        super().__init__(interval)
        self.note = note

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):  # noqa: PLR0917
        self.note("batch", loader, number, indices, prediction.tolist())

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.note("epoch", indices, [part.tolist() for part in torch.utils._pytree.tree_leaves(predictions)])


@program(interval=["batch", "epoch", "batch_and_epoch"])
def predictions_are_written_with_their_indices(run, interval):
    run.trainer(Writer(interval, run.note)).predict(run.model, [run.load(shuffle=True), run.load(3)])
    indices = [note[3] for note in run.notes if note[0] == "batch"]
    assert all(indices), "a batch without indices"


HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"


@program(hooks=[HOOKS[2:], HOOKS[1:2], HOOKS[:1], HOOKS])
def batch_hooks(run, hooks):
    def hook(name):
        def called(self, batch, *rest):
            run.note(name, sorted(batch), batch["index"].tolist(), rest[-1])
            batch = getattr(Learner, name)(self, batch, *rest)
            return batch if name == HOOKS[1] else {**batch, name: 1}

        return called

    run.model = type("Hooked", (Learner,), {name: hook(name) for name in hooks})()
    fit = run.fit(run.load(), run.val(), max_epochs=2, precision="64-true")
    fit.predict(run.model, [run.load(), run.val()])


@program
def a_step_that_takes_the_iterator(run):
    class Taking(Learner):
        def training_step(self, dataloader_iter):
            batch, number, _ = next(dataloader_iter)
            self.see("train", batch, number)
            return self.loss(batch)

        def validation_step(self, dataloader_iter):
            batch, number, _ = next(dataloader_iter)
            self.see("val", batch, number)

    run.model = Taking()
    run.fit(run.load(shuffle=True), run.val(), max_epochs=2)


@program
def a_module_reads_attributes_of_its_loaders(run):
    def note_attributes():
        loader = run.model.trainer.train_dataloader
        run.note(len(loader), len(loader.dataset), loader.batch_size, loader.num_workers, type(loader.sampler).__name__)
        run.note([len(part) for part in torch.utils._pytree.tree_leaves(run.model.trainer.val_dataloaders)])
        run.note(run.model.trainer.num_val_batches, run.model.trainer.num_training_batches)

    run.model.on_train_start = note_attributes
    run.fit(run.load(shuffle=True), [run.val(), run.val(3)], max_epochs=2)


# Which batches the Trainer takes: limits, early stopping, checkpoints.

EarlyStopping, ModelCheckpoint = pl.callbacks.EarlyStopping, pl.callbacks.ModelCheckpoint


@program(
    options=[
        {"num_sanity_val_steps": -1},
        {"val_check_interval": 0.25},
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 4},
        {"overfit_batches": 0.5},
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4, "num_sanity_val_steps": 1},
        {"accumulate_grad_batches": 2, "max_steps": 3, "max_epochs": 9},
        {"inference_mode": False, "num_sanity_val_steps": 1},
    ]
)
def the_trainer_with(run, options):
    again = options.get("reload_dataloaders_every_n_epochs", 0) > 0
    model = run.model
    model.train_dataloader, model.val_dataloader = lambda: run.load(shuffle=not again), run.val
    model.drops = not again
    run.fit(**{"max_epochs": 2} | options)


@program
def early_stopping(run):
    stop = EarlyStopping("worse", patience=0, mode="min")
    fit = run.fit(run.load(shuffle=True), run.val(), more=[stop], max_epochs=9, val_check_interval=2)
    run.note(stop.stopped_epoch)
    assert fit.global_step < 9


# Runs that are repeated, nested or resumed.


@program
def everything_twice_with_one_trainer(run):
    run.model.drops = False
    fit, train, val = run.trainer(num_sanity_val_steps=1), run.load(), run.val()
    for epochs in 1, 3:
        fit.fit_loop.max_epochs = epochs
        fit.fit(run.model, train, val)
        fit.validate(run.model, val, verbose=False)
        fit.test(run.model, train, verbose=False)
        run.note([part.tolist() for part in fit.predict(run.model, val)])


# Errors and signals, and the next run after them.


class BrokenError(Exception):
    """Raised by user code."""


def broken_at(run, where, at):
    def breaks(stage, number):
        if (stage, number) == (where, at):
            raise BrokenError(f"{stage} {number}")

    run.model.on_step = breaks


@program(stage=["train", "val", "sanity", "test", "predict"])
def an_error_in_a_step(run, stage):
    broken_at(run, stage, 1)
    model, fit = run.model, run.trainer(num_sanity_val_steps=2, val_check_interval=2)
    with run.fails(BrokenError):
        if stage in ("train", "val", "sanity"):
            fit.fit(model, run.load(), run.val())
        else:
            getattr(fit, stage)(model, run.load())
    assert readers() == []
    run.model.on_step = lambda *_: None
    run.fit(run.load(), run.val())


@program(kind=["train", "val"])
def an_error_in_a_dataset(run, kind):
    broken = run.load(dataset=Numbers(fails_at=9))
    with run.fails(KeyError):
        run.trainer().fit(run.model, *((broken, run.val()) if kind == "train" else (run.load(), broken)))
    assert readers() == []
    run.fit(run.load(), run.val())
