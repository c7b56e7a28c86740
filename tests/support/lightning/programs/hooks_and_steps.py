"""Predictions, hooks of batches, and steps that do more than to return a loss."""

import os
import sys

import torch

from support.lightning.programs.given_loaders import Theirs
from support.lightning.runs import Learner, program
from support.lightning.trainer import pl


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
def batch_hooks_of_a_datamodule(run):
    class Moving(Theirs):
        def transfer_batch_to_device(self, batch, device, loader):
            run.note("transfer", batch["index"].tolist(), str(device), loader)
            return super().transfer_batch_to_device(batch, device, loader)

        def on_after_batch_transfer(self, batch, loader):
            run.note("after", batch["index"].tolist(), loader)
            return batch

    run.trainer(max_epochs=2).fit(run.model, datamodule=Moving(run))


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
def manual_optimization(run):
    class Manual(Learner):
        automatic_optimization = False

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            optimizer.step()

    run.model = Manual()
    run.model.automatic_optimization = False
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


@program
def the_batch_size_finder(run):
    tuner, cwd = sys.modules[pl.__name__ + ".tuner"].Tuner, os.getcwd()
    os.chdir(run.folder)
    try:
        dm, fit = Theirs(run, 1, shuffle=False), run.trainer()
        run.model.drops = False
        run.note(tuner(fit).scale_batch_size(run.model, datamodule=dm, max_trials=2, steps_per_trial=2))
        fit.fit(run.model, datamodule=dm)
    finally:
        os.chdir(cwd)
