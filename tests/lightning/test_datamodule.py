"""`AsyncDataModule`: how it describes, hands out and closes loaders, and makes the batches of a training step again."""

import contextlib

import numpy as np
import pytest
import torch
from support.lightning.trainer import NO_STAGES, Learning, dm_of, pl, source, trainer
from support.sources.reader_sources import Damaged

from lit_async_data import AsyncDataModule, AsyncLoader, Balanced, HDF5Source
from lit_async_data.engine.resources import ResourcePlan
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


def test_close_closes_loaders_and_files(h5):
    path = h5(data=np.zeros((30, 2)), labels=np.zeros(30, int))
    dm = dm_of(train=HDF5Source(path), val=None)
    loader = dm.train_dataloader()
    next(loader)
    dm.close()
    dm.close()
    assert len(list(dm.train_dataloader())) == 3
    dm.close()


def balanced():
    train = ArraySource({"x": np.zeros((1000, 3)), "y": np.arange(1000) % 5})
    return AsyncDataModule(train=train, val=source(100), loader={"batch_size": 10, "weights": Balanced("y")})


def test_what_is_described_is_what_is_handed_out_and_its_footprint_is_computed_once(monkeypatch):
    computed, of = [], ResourcePlan.of
    monkeypatch.setattr(ResourcePlan, "of", lambda *given, **named: computed.append(given) or of(*given, **named))
    dm = balanced()
    described = dm.describe()
    first = dm.train_dataloader()
    assert len(computed) == 2  # of training and validation
    assert dm.describe() == described
    assert dm.train_dataloader() is not first
    dm.close()


@pytest.mark.parametrize("change", ["batch_size", "source", "close"])
def test_a_described_loader_that_no_longer_fits_is_built_anew(change):
    dm = balanced()
    dm.describe()
    if change == "batch_size":
        dm.batch_size = 20
    elif change == "source":
        dm.sources["train"] = [ArraySource({"x": np.zeros((50, 3)), "y": np.arange(50) % 5})]
    else:
        dm.close()
    loader = dm.train_dataloader()
    next(loader)
    assert len(loader) == {"batch_size": 50, "source": 5, "close": 100}[change]
    dm.close()


def test_a_described_loader_is_built_anew_in_a_process_of_another_rank(monkeypatch):
    """As in a strategy that forks: its processes have the Trainer that `describe` has seen."""
    dm = balanced()
    dm.trainer = trainer()
    dm.describe()
    for name, value in (("global_rank", 1), ("world_size", 2)):
        monkeypatch.setattr(pl.Trainer, name, property(lambda _, value=value: value))
    loader = dm.train_dataloader()
    assert (loader.order.rank, loader.order.world_size) == (1, 2)
    dm.close()


class Kept(Learning):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def training_step(self, batch, batch_idx):
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        self.kept.setdefault(step, []).append((self.current_epoch, batch_idx, batch))
        return self.layer(torch.ones(1, 1)).sum()


def noisy(sample, rng):
    return {**sample, "noise": rng.random(3)}


def turned(batch, generator):
    return batch | {"turn": torch.rand(len(batch["y"]), generator=generator)}


def module(**options):
    source = ArraySource({"x": np.arange(44.0).reshape(22, 2), "y": np.arange(22)})
    loader = {"batch_size": 4, "shuffle": "global", "seed": 3} | options
    return AsyncDataModule(train=source, loader=loader, sample_transform=noisy, device_transform={"train": turned})


@NO_STAGES
@pytest.mark.parametrize(
    ("accumulated", "limit"), [(1, None), (4, None), (2, 3), (1, 0.5)], ids=["plain", "accumulated", "limited", "share"]
)
def test_every_step_of_a_run_comes_again_bit_for_bit(accumulated, limit):
    model = Kept()
    fit = trainer(max_epochs=3, accumulate_grad_batches=accumulated, limit_train_batches=limit)
    fit.fit(model, datamodule=module(workers=2))
    assert len({epoch for each in model.kept.values() for epoch, _, _ in each}) == 3
    dm = module()
    for step, batches in model.kept.items():
        again = dm.replay(step, accumulate_grad_batches=accumulated, limit_train_batches=limit)
        assert [(each.epoch, each.batch_idx) for each in again] == [(epoch, number) for epoch, number, _ in batches]
        for each, (_, _, batch) in zip(again, batches, strict=True):
            assert each.batch.keys() == batch.keys()
            assert all(torch.equal(each.batch[key], batch[key]) for key in batch)
            assert each.ids.tolist() == batch["y"].tolist() == [place.row for place in each.places]


@pytest.mark.parametrize("rank", range(3))
def test_each_rank_replays_its_own_batches(rank):
    dm = module()
    options = {"batch_size": 4, "shuffle": "global", "seed": 3}
    with AsyncLoader(dm.sources["train"][0], options, rank=rank, world_size=3) as loader:
        seen = [batch["y"].tolist() for epoch in range(2) for batch in loader]
    again = [dm.replay(step, rank=rank, world_size=3)[0].batch["y"].tolist() for step in range(len(seen))]
    assert again == seen


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_ids_are_those_of_what_was_read_around_bad_samples(on_error):
    options = {"batch_size": 4, "shuffle": "global", "on_error": on_error, "max_bad": 1.0}
    dm = AsyncDataModule(train=Damaged({3, 50, 51}), loader=options)
    for step in range(25):
        (again,) = dm.replay(step)
        assert again.ids.tolist() == again.batch["y"].tolist()


def test_a_replay_leaves_training_where_it_is():
    dm = module()
    loader = dm.train_dataloader()
    first = next(loader)["y"].tolist()
    assert dm.replay(0)[0].batch["y"].tolist() == first
    assert loader.state_dict()["position"] == 4
    assert next(loader)["y"].tolist() == dm.replay(1)[0].batch["y"].tolist()
    dm.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": -1}, "step: -1 is not a whole number from 0 on"),
        ({"step": 1, "accumulate_grad_batches": 0}, "accumulate_grad_batches: 0 is not"),
        ({"step": 1, "rank": 2, "world_size": 2}, "rank: 2 is not one of 2 ranks"),
        ({"step": 1, "limit_train_batches": 0.01}, "limit_train_batches: 0.01 leaves no batch"),
    ],
)
def test_a_step_that_cannot_be_is_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        module().replay(**arguments)


def test_one_source_has_one_loader_and_a_list_a_list():
    source = ArraySource({"x": np.zeros(8)})
    dm = AsyncDataModule(train=source, val=source, test=[source], predict=[source, source], loader={"batch_size": 4})
    with contextlib.closing(dm):
        assert len(dm.val_dataloader()) == 2
        assert [len(each) for each in dm.test_dataloader()] == [2]
        assert [len(each) for each in dm.predict_dataloader()] == [2, 2]
        assert AsyncDataModule(train=source, loader={"batch_size": 4}).val_dataloader() == []
