"""The pieces of the programs in `programs.py`: data, a model, a Trainer, and facts to compare."""

import contextlib
import functools
import random
import tempfile
import weakref
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

from support.lightning.rows import SAMPLES, WIDTH, Numbers
from support.lightning.trainer import pl, trainer

WARNINGS = [  # of Lightning and torch about plain DataLoaders, with the callback or without
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "The '.*dataloader' does not have many workers",
        "Your `.*_dataloader`'s sampler has shuffling enabled",
        "You are overfitting with a non-zero `val_check_interval`",
        "You requested to overfit but enabled",
        "Total length of `.*` across ranks is zero",
        "'pin_memory' argument is set as true but no accelerator is found",
        "You're resuming from a checkpoint that ended before the epoch ended",
        "You have overridden `.*` in `LightningModule`",
        "You called `self.log",
        "The number of training batches",
        "This process .* is multi-threaded, use of fork",
        "You defined a `validation_step` but have no `val_dataloader`",
        "Found .* module.* in eval mode",
        "Detected KeyboardInterrupt",
        "Trying to infer the `batch_size`",
        "Checkpoint directory .* exists and is not empty",
        "You are using the `dataloader_iter` step flavor",
        "Found `dataloader_iter` argument",
        "'set_vital' is deprecated",  # torchdata reads every attribute of torch
    )
]

BATCH = 4  # four batches, the last of two samples
VAL = 100  # value of the first validation sample


class Learner(pl.LightningModule):
    """Draws random numbers in each step, and records each batch in ``journal``."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 1)
        self.journal = []
        self.losses = []
        self.drops = True
        self.on_step = lambda stage, number: None

    def see(self, stage, batch, number, loader=0):
        if self.trainer.sanity_checking:
            stage = "sanity"
        assert torch.equal(batch["x"], batch["index"][:, None].to(batch["x"]).expand_as(batch["x"]))
        self.journal.append((stage, loader, number, batch["index"].tolist()))
        self.on_step(stage, number)

    def loss(self, batch):
        return torch.nn.functional.dropout(self.layer(batch["x"] / 100), 0.5, training=self.drops).square().mean()

    def training_step(self, batch, number):
        self.see("train", batch, number)
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch, number, dataloader_idx=0):
        self.see("val", batch, number, dataloader_idx)
        self.log("worse", float(len(self.journal)), batch_size=1)

    def test_step(self, batch, number, dataloader_idx=0):
        self.see("test", batch, number, dataloader_idx)

    def predict_step(self, batch, number, dataloader_idx=0):
        self.see("predict", batch, number, dataloader_idx)
        return batch["index"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Loader(DataLoader):
    """A DataLoader whose workers can be ended at once. During garbage collection torch waits five seconds for each."""

    iterators: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def _get_iterator(self):
        iterator = super()._get_iterator()
        Loader.iterators.add(iterator)
        return iterator

    @classmethod
    def end(cls):
        for iterator in list(cls.iterators):
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()


class Run:
    """The argument of a program: builds a model, DataLoaders, and Trainers with the tested callbacks."""

    def __init__(self, workers, folder, callbacks=()):
        random.seed(7)
        torch.manual_seed(7)
        self.workers, self.folder, self.callbacks = workers, folder, callbacks
        self.model = Learner()
        self.notes = []

    def load(self, samples=SAMPLES, *, first=0, dataset=None, **options):
        dataset = Numbers(samples, first) if dataset is None else dataset
        if "batch_sampler" not in options:
            options = {"batch_size": BATCH} | options
        return Loader(dataset, **{"num_workers": self.workers} | options)

    def val(self, samples=6, **options):
        return self.load(samples, first=VAL, **options)

    def trainer(self, *more, **options):
        return trainer(*more, *self.callbacks, **options)

    def fit(self, *loaders, more=(), **options):
        fit = self.trainer(*more, **options)
        fit.fit(self.model, *loaders)
        self.note(step=fit.global_step, epoch=fit.current_epoch, batches=fit.num_training_batches)
        return fit

    def note(self, *facts, **named):
        self.notes.append((*facts, named))

    @contextlib.contextmanager
    def fails(self, kind):
        """Asserts that the block raises, and notes class and first line of the message."""
        with pytest.raises(kind) as caught:
            yield
        Loader.end()
        self.note(type(caught.value).__name__, str(caught.value).partition("\n")[0])

    def facts(self):
        model = self.model
        weights = [p.detach().double().numpy().tobytes() for p in model.parameters()]
        grads = [p.grad.double().numpy().tobytes() for p in model.parameters() if p.grad is not None]
        seen = {"batches": model.journal, "notes": self.notes, "losses": model.losses}
        return seen | {"weights": weights, "gradients": grads}


def outcome(program, workers, *callbacks):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(workers, folder, callbacks)
        try:
            program(run)
        finally:
            Loader.end()
        return run.facts()


@functools.cache
def without_callback(program, workers):
    return outcome(program, workers)


PROGRAMS = {}  # all programs, by a sentence that describes each


def program(function=None, /, **variants):
    """Registers a program; with variants, once for each value of its argument."""

    def enter(function):
        sentence = function.__name__.replace("_", " ")
        ((name, values),) = variants.items()
        for value in values:
            label = getattr(value, "__name__", None) or str(value)
            PROGRAMS[f"{sentence} {name}={label}"] = functools.partial(function, **{name: value})
        return function

    if function is None:
        return enter
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function
