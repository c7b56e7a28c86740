"""Bugs of the past in corners of the Trainer."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from support.lightning.trainer import BATCH, NO_STAGES, SAMPLES, CountingSource, Recorder, datamodule, pl, plan, trainer

import lit_async_data as lad
from lit_async_data.testing import ArraySource

pytestmark = NO_STAGES


@pytest.mark.parametrize("samples", [4, 8, 12, 22])
@pytest.mark.parametrize("sanity", [1, 2])
def test_no_slot_is_lost_in_validation_that_keeps_its_batches(samples, sanity):
    """Unshuffled epochs shorter than the queue once claimed the same batch twice, and training stalled."""
    kept = []
    model = Recorder(lambda stage, batch: kept.append(batch) if stage != "train" else None)
    dm = datamodule(train=CountingSource(), val=CountingSource(samples))
    trainer(lad.DevicePrefetcher(), max_epochs=4, num_sanity_val_steps=sanity).fit(model, datamodule=dm)
    assert len(model.seen["val 0"]) == 4
    for batch in kept:
        assert torch.equal(batch["x"][:, 0].long(), batch["index"])


class Rows(pl.loggers.logger.DummyLogger):
    """Keeps the logged metrics."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step=None):
        if "data/wait_ms" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2])])
def test_a_step_is_logged_once_however_many_batches_it_takes(accumulate, steps):
    rows = Rows()
    fit = trainer(lad.DevicePrefetcher(), logger=rows, log_every_n_steps=1, accumulate_grad_batches=accumulate)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert rows.steps == steps


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning")
def test_a_callback_that_finds_nothing_to_do_says_so():
    class Theirs:
        def __len__(self):
            return 1

        def __iter__(self):
            return iter([{"x": torch.zeros(1, 1), "index": torch.tensor([0])}])

    callback = lad.DevicePrefetcher()
    with pytest.warns(UserWarning, match="training uses neither an AsyncLoader"):
        trainer(callback, limit_val_batches=0, log_every_n_steps=1).fit(Recorder(), Theirs())
    assert str(callback.waited).startswith("for an unknown time")


def test_a_trainer_that_never_logs_is_served_too():
    callback = lad.DevicePrefetcher()
    trainer(callback, log_every_n_steps=0).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert callback.waited.steps == 6


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning")
def test_after_an_error_a_loader_is_on_its_own_again():
    def fails(stage, batch):
        raise RuntimeError("mine")

    with lad.AsyncLoader(CountingSource(), {"batch_size": BATCH, "return_indices": True}) as loader:
        with pytest.raises(RuntimeError, match="mine"):
            trainer(lad.DevicePrefetcher()).fit(Recorder(fails), loader)
        assert not loader.machinery.wiring.externally_driven


@pytest.mark.parametrize("loader", [{"drop_last": True, "batch_size": 100}, {"memory_budget": 10}])
def test_a_datamodule_that_cannot_work_says_so_as_a_string(loader):
    assert "AsyncDataModule: " in str(datamodule(train=CountingSource(), loader=loader))


def test_the_batch_size_cannot_be_set_beyond_the_data():
    dm = datamodule(train=CountingSource())
    dm.batch_size = 1000
    assert dm.batch_size == SAMPLES


class Run(types.SimpleNamespace):
    """A Trainer, which can be weakly referred to."""


@pytest.mark.parametrize("fitted", [False, True])
def test_datamodule_and_callback_can_be_pickled(fitted):
    dm, callback = datamodule(train=ArraySource({"y": torch.arange(10).numpy()})), lad.DevicePrefetcher(1)
    loader = dm.train_dataloader()
    if fitted:
        run = Run(train_dataloader=None, test_dataloaders=loader, strategy=trainer().strategy)
        callback.on_test_start(run, Recorder())
    again = pickle.loads(pickle.dumps(dm))
    assert len(again.train_dataloader()) == len(loader)
    assert pickle.loads(pickle.dumps(callback)).device_depth == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda dm: pickle.loads(pickle.dumps(dm))], ids=["deepcopy", "pickle"]
)
def test_a_datamodule_can_be_copied_after_a_fit_and_fitted_again(copied):
    dm = datamodule(train=CountingSource())
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=dm)
    again, recorder = copied(dm), Recorder()
    trainer(lad.DevicePrefetcher()).fit(recorder, datamodule=again)
    assert recorder.seen["train"] == [plan(0)]
    assert dm.trainer is not None


def test_a_loader_iterated_by_hand_after_a_limited_fit_reads_each_batch_once():
    source = CountingSource()
    dm = datamodule(train=source)
    trainer(limit_train_batches=2).fit(Recorder(), datamodule=dm)
    source.reads.clear()
    loader = dm.train_dataloader()
    assert [batch["index"].tolist() for batch in loader] == plan(0)
    loader.close()
    assert len(source.reads) <= len(plan(0)) + loader.footprint.budget.slots


def test_a_path_where_a_source_should_be_is_quoted_whole():
    with pytest.raises(lad.errors.ConfigError, match=r"val: 'x.h5' is not a source or a list of sources"):
        lad.AsyncDataModule(val="x.h5", loader={"batch_size": 1})
