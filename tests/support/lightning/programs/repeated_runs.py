"""Runs that are repeated, nested or resumed."""

import functools

import torch
from torch.utils.data import DataLoader

from lit_async_data import DevicePrefetcher
from support.lightning.rows import Numbers
from support.lightning.runs import BATCH, Learner, Run, program
from support.lightning.trainer import pl


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


@program
def loaders_and_callbacks_of_one_trainer_in_another(run):
    train, val = run.load(shuffle=True), run.val()
    run.fit(train, val, max_epochs=2)
    run.fit(train, val)
    run.trainer().test(run.model, train, verbose=False)
    run.note(iterated=[batch["index"].tolist() for batch in val])


@program
def validation_inside_a_training_callback(run):
    class Other(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            inner, state = (
                Run(run.workers, run.folder, [DevicePrefetcher()] if run.callbacks else []),
                torch.get_rng_state(),
            )
            inner.trainer().validate(inner.model, inner.val(3), verbose=False)
            torch.set_rng_state(state)
            run.note(inner.model.journal)

    run.fit(run.load(), run.val(), more=[Other()], max_epochs=2)


class Saver(pl.Callback):
    """Saves a checkpoint in a hook, after this many steps."""

    def __init__(self, folder, step, hook="on_train_batch_end"):
        self.path = f"{folder}/at.ckpt"
        setattr(self, hook, functools.partial(self.save, step))

    def save(self, step, trainer, *_):
        if trainer.global_step == step:
            trainer.save_checkpoint(self.path)


class Stateful(DataLoader):
    """Resumes from its state."""

    start = done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.start = state["done"]

    def __iter__(self):
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.done = number + 1
                yield batch


def resumed(run, new_loader, step, **options):
    saver = Saver(run.folder, step)
    run.fit(new_loader(), run.val(), more=[saver], **options)
    run.note(torch.load(saver.path)["loops"]["fit_loop"]["state_dict"])
    run.model = Learner()
    run.model.drops = step % 4 > 0
    fit = run.trainer(**options)
    fit.fit(run.model, new_loader(), run.val(), ckpt_path=saver.path)
    run.note(step=fit.global_step)


@program(step=[3, 6])
def a_loader_with_a_state_goes_on_from_a_checkpoint(run, step):
    resumed(run, lambda: Stateful(Numbers(), BATCH, num_workers=run.workers), step, max_epochs=3)
    trained = [ids for stage, _, _, ids in run.model.journal if stage == "train"]
    assert len(trained) == 12 - step, "a batch was lost, or came twice"
