"""What a callback sets on a dataset or a transform holds in the epoch that it is set for, and not before."""

import pytest
import torch
from support.lightning.trainer import NO_STAGES, Learning, pl, trainer
from torch.utils.data import Dataset

from lit_async_data import AsyncDataModule, DatasetSource, DevicePrefetcher


class Staged(Dataset):
    def __init__(self):
        self.strength, self.epoch = 0, -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return {"strength": self.strength, "epoch": self.epoch}


class Marks:
    mark = 0

    def __call__(self, batch):
        return batch | {"mark": torch.full_like(batch["epoch"], self.mark)}


class Model(Learning):
    def __init__(self):
        super().__init__()
        self.seen = {"train": set(), "val": set()}

    def training_step(self, batch, _):
        self.note("train", batch)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, _):
        self.note("val", batch)

    def note(self, stage, batch):
        values = zip(*(batch[key].tolist() for key in sorted(batch)))
        self.seen[stage] |= {(self.current_epoch, *each) for each in values}


class Sets(pl.Callback):
    """Sets what epoch ``n`` is to have: before it begins, or when the one before has ended."""

    def __init__(self, objects, at_end):
        self.objects, self.at_end = objects, at_end

    def set(self, number):
        for each in self.objects:
            vars(each)["mark" if isinstance(each, Marks) else "strength"] = number

    def on_train_epoch_start(self, trainer, module):
        if not self.at_end:
            self.set(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, module):
        if self.at_end:
            self.set(trainer.current_epoch + 1)


@NO_STAGES
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("callbacks", [[], [DevicePrefetcher]])
def test_each_epoch_sees_what_was_set_for_it(callbacks, at_end):
    train, val, marks, model = Staged(), Staged(), Marks(), Model()
    loader = {"batch_size": 4, "shuffle": True, "worker_kind": "thread"}
    sources = {"train": DatasetSource(train), "val": DatasetSource(val)}
    dm = AsyncDataModule(**sources, loader=loader, device_transform=marks)
    given = [Sets([train, val, marks], at_end), *(each() for each in callbacks)]
    trainer(*given, max_epochs=3).fit(model, dm)
    assert model.seen["train"] == {(epoch, epoch, epoch, epoch) for epoch in range(3)}
    assert model.seen["val"] == {(epoch, -1, epoch, epoch) for epoch in range(3)}  # evaluation has no epoch
