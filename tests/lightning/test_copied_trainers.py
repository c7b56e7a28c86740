"""A Trainer that somebody copies or pickles during a run, as Lightning allows without the callback."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.lightning.trainer import pl, trainer
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ClosedError


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Copies(pl.Callback):
    """Copies the Trainer in mid-epoch. ``seen`` is not part of a pickle."""

    def __init__(self, make):
        self.make = make
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(self.make(trainer))

    def __getstate__(self):
        return {}


def pickled(made):
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_trainer_can_be_copied_while_it_trains(make):
    copies = Copies(make)
    fit = trainer(lad.DevicePrefetcher(), copies)
    fit.fit(Model(), DataLoader(range(6), batch_size=2))
    assert len(copies.seen) == 3
    strategy = copies.seen[0].strategy
    loader = DataLoader(range(6))
    assert strategy.process_dataloader(loader) is loader
    assert strategy.process_dataloader.__self__ is strategy


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_a_copied_pass_says_that_it_has_no_place(make):
    with lad.prefetched(DataLoader(range(6), batch_size=2), device="cpu") as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(ClosedError, match=r"copy of a pass.*write iter\(loader\)"):
            next(make(batches))
        assert next(batches).tolist() == [2, 3]
