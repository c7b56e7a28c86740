"""DataLoaders of every kind, and what users give them."""

import gc
import random

import torch
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from support.lightning.rows import WIDTH, Numbers, Stream
from support.lightning.runs import program


class ByEpoch(SequentialSampler):
    """Another order in each epoch, set by ``set_epoch``."""

    def __init__(self, source):
        super().__init__(source)
        self.epoch, self.calls = 0, []

    def set_epoch(self, epoch):
        self.calls.append(("set_epoch", epoch))
        self.epoch = epoch

    def __iter__(self):
        self.calls.append(("iter", self.epoch))
        order = list(range(len(self.data_source)))
        return iter(order[self.epoch :] + order[: self.epoch])


@program
def a_sampler_that_is_told_the_epoch(run):
    data = Numbers()
    sampler = ByEpoch(data)
    run.fit(run.load(dataset=data, sampler=sampler), run.val(), max_epochs=3)


@program
def a_batch_sampler_of_the_user(run):
    data = Numbers()
    run.fit(run.load(dataset=data, batch_sampler=BatchSampler(ByEpoch(data), 3, drop_last=True)), max_epochs=3)
    run.note(
        [p.tolist() for p in run.trainer().predict(run.model, run.load(batch_sampler=BatchSampler(data, 3, False)))]
    )


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


@program
def a_generator_of_the_user(run):
    run.fit(run.load(shuffle=True, generator=torch.Generator().manual_seed(3)), run.val(), max_epochs=3)


@program
def seeds_of_workers(run):
    def seeded(number):
        random.seed(torch.initial_seed())

    run.fit(run.load(shuffle=True, worker_init_fn=seeded if run.workers else None), max_epochs=2)


@program(options=[{}, {"limit_train_batches": 2}, {"val_check_interval": 2}, {"max_steps": 3}, {"overfit_batches": 2}])
def a_dataset_without_a_length(run, options):
    run.fit(run.load(dataset=Stream()), run.load(dataset=Stream(5)), **{"max_epochs": 2} | options)


@program
def evaluation_without_a_length(run):
    fit = run.trainer()
    fit.validate(run.model, run.load(dataset=Stream(5)), verbose=False)
    fit.test(run.model, [run.load(dataset=Stream(5)), run.load(3)], verbose=False)
    run.note([part.tolist() for part in fit.predict(run.model, run.load(dataset=Stream(9)))])


@program
def tensors_without_names(run):
    run.model.training_step = lambda batch, batch_idx: run.note(batch[1].tolist()) or run.model.layer(batch[0]).mean()
    data = TensorDataset(torch.arange(14.0)[:, None].expand(-1, WIDTH).contiguous(), torch.arange(14))
    run.fit(run.load(dataset=data, shuffle=True), max_epochs=2)
