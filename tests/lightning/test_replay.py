"""The batches of a training step, made again."""

import numpy as np
import pytest
import torch
from support.lightning.trainer import NO_STAGES, Learning, trainer
from support.sources.reader_sources import Damaged

import lit_async_data as lad
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource

pytestmark = NO_STAGES
SAMPLES = 22


class Kept(Learning):
    """Keeps each batch under the step that loggers would write."""

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
    source = ArraySource({"x": np.arange(SAMPLES * 2.0).reshape(SAMPLES, 2), "y": np.arange(SAMPLES)})
    loader = {"batch_size": 4, "shuffle": "global", "seed": 3} | options
    return lad.AsyncDataModule(train=source, loader=loader, sample_transform=noisy, device_transform={"train": turned})


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
def test_each_rank_has_its_own_batches(rank):
    dm = module()
    options = {"batch_size": 4, "shuffle": "global", "seed": 3}
    with lad.AsyncLoader(dm.sources["train"][0], options, rank=rank, world_size=3) as loader:
        seen = [batch["y"].tolist() for epoch in range(2) for batch in loader]
    again = [dm.replay(step, rank=rank, world_size=3)[0].batch["y"].tolist() for step in range(len(seen))]
    assert again == seen


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_ids_are_those_of_what_was_read_around_bad_samples(on_error):
    options = {"batch_size": 4, "shuffle": "global", "on_error": on_error, "max_bad": 1.0}
    dm = lad.AsyncDataModule(train=Damaged({3, 50, 51}), loader=options)
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
        ({"step": 1.5}, "step: 1.5 is not"),
        ({"step": 1, "accumulate_grad_batches": 0}, "accumulate_grad_batches: 0 is not"),
        ({"step": 1, "rank": 2, "world_size": 2}, "rank: 2 is not one of 2 ranks"),
        ({"step": 1, "limit_train_batches": 0.01}, "limit_train_batches: 0.01 leaves no batch"),
    ],
)
def test_a_number_that_cannot_be_is_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        module().replay(**arguments)


def test_without_training_data_there_is_no_step():
    with pytest.raises(ConfigError, match="there is no source for training"):
        lad.AsyncDataModule(val=ArraySource({"y": np.arange(4)}), loader={"batch_size": 2}).replay(0)
