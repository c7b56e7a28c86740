"""`AsyncDataModule` and `DevicePrefetcher` in a real Trainer: samples, their order, and leftovers.

``LIT_ASYNC_DATA_LIGHTNING=lightning.pytorch`` runs this file under Lightning's other name.
"""

from __future__ import annotations

import itertools

import pytest
from support.lightning.trainer import (
    BATCH,
    NO_STAGES,
    QUEUE,
    SAMPLES,
    STORED,
    CountingSource,
    Recorder,
    at_every_depth,
    datamodule,
    plan,
    readers,
    rows,
    trainer,
    with_and_without,
)
from support.threads.leaks import open_files

import lit_async_data as lad  # loads no Lightning by itself: that is for the next line to choose

pytestmark = NO_STAGES


@at_every_depth
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_epoch_sees_every_sample_once_in_the_new_order_of_the_plan(callbacks, workers):
    model = Recorder()
    dm = datamodule({"workers": workers}, train=CountingSource())
    trainer(*callbacks(), max_epochs=3).fit(model, datamodule=dm)
    first, second, third = model.seen["train"]
    assert [first, second, third] == [plan(0), plan(1), plan(2)]
    assert sorted(itertools.chain(*first)) == list(range(SAMPLES))
    assert first != second != third != first


@with_and_without
def test_a_file_is_read_in_the_same_order_and_closed_afterwards(callbacks, h5):
    path = h5("rows.h5", rows=rows())
    model, source = Recorder(), lad.HDF5Source(path, fields={"x": "rows"})
    dm = datamodule(train=source, val=source)
    trainer(*callbacks(), max_epochs=2).fit(model, datamodule=dm)
    assert model.seen == {"train": [plan(0), plan(1)], "val 0": [STORED] * 2}
    assert not [file for file in open_files() if path in file]


@with_and_without
@pytest.mark.parametrize(("steps", "expected"), [(0, []), (2, [STORED[:2]]), (-1, [STORED])])
def test_the_sanity_check_takes_its_batches_and_leaves_validation_whole(callbacks, steps, expected):
    model = Recorder()
    dm = datamodule(train=CountingSource(), val=CountingSource())
    trainer(*callbacks(), num_sanity_val_steps=steps).fit(model, datamodule=dm)
    assert model.seen["sanity 0"] == expected
    assert model.seen["train"] == [plan(0)]
    assert model.seen["val 0"] == [STORED]


@at_every_depth
def test_validation_in_mid_epoch_drops_nothing_and_rereads_nothing(callbacks):
    model, train, val = Recorder(), CountingSource(), CountingSource()
    fit = trainer(*callbacks(), max_epochs=3, val_check_interval=0.5)
    fit.fit(model, datamodule=datamodule(train=train, val=val))
    assert model.seen["train"] == [plan(0), plan(1), plan(2)]
    assert model.seen["val 0"] == [STORED] * 6
    for source, endless, used in (train, plan(0) + plan(1) + plan(2) + plan(3), 18), (val, STORED * 7, 36):
        assert source.reads == endless[: len(source.reads)]
        assert used <= len(source.reads) <= used + QUEUE + 1


@at_every_depth
@pytest.mark.parametrize("limit", [2, 0.4])
def test_a_limit_takes_and_reads_the_first_batches_of_each_epoch_only(callbacks, limit):
    model, train, val = Recorder(), CountingSource(), CountingSource(width=1)
    fit = trainer(*callbacks(), max_epochs=3, limit_train_batches=limit, limit_val_batches=limit)
    fit.fit(model, datamodule=datamodule(train=train, val=val))
    assert model.seen["train"] == [plan(0)[:2], plan(1)[:2], plan(2)[:2]]
    assert model.seen["val 0"] == [STORED[:2]] * 3
    endless = list(itertools.chain.from_iterable(plan(epoch)[:2] for epoch in range(6)))
    assert train.reads == endless[: len(train.reads)]
    assert len(train.reads) <= 6 + QUEUE + 1


@at_every_depth
def test_max_steps_ends_training_in_mid_epoch(callbacks):
    model = Recorder()
    fit = trainer(*callbacks(), max_epochs=-1, max_steps=8)
    fit.fit(model, datamodule=datamodule(train=CountingSource()))
    assert model.seen["train"] == [plan(0), plan(1)[:2]]


@with_and_without
@pytest.mark.parametrize("batches", [1, 2])
def test_fast_dev_run_takes_a_few_batches_of_each(callbacks, batches):
    model = Recorder()
    dm = datamodule(train=CountingSource(), val=CountingSource(width=1))
    trainer(*callbacks(), fast_dev_run=batches).fit(model, datamodule=dm)
    assert model.seen == {"train": [plan(0)[:batches]], "val 0": [STORED[:batches]]}


@with_and_without
@pytest.mark.parametrize("overfit", [2, 0.4])
def test_overfit_batches_takes_the_same_batches_in_every_epoch(callbacks, overfit):
    model = Recorder()
    dm = datamodule(train=CountingSource(width=1), val=CountingSource(width=1))
    trainer(*callbacks(), max_epochs=3, overfit_batches=overfit).fit(model, datamodule=dm)
    assert model.seen["train"] == [STORED[:2]] * 3


@with_and_without
def test_loaders_that_are_rebuilt_each_epoch_go_on_in_the_order_and_close_the_old_ones(callbacks):
    threads = []
    model = Recorder(lambda stage, batch: threads.append(len(readers())))
    dm = datamodule(train=CountingSource(), val=CountingSource())
    fit = trainer(*callbacks(), max_epochs=5, reload_dataloaders_every_n_epochs=1)
    fit.fit(model, datamodule=dm)
    assert model.seen["train"] == [plan(epoch) for epoch in range(5)]
    assert model.seen["val 0"] == [STORED] * 5
    assert max(threads) <= 2


@with_and_without
def test_an_epoch_that_a_hook_cuts_short_is_followed_by_the_whole_next_one(callbacks):
    class Impatient(Recorder):
        def on_train_batch_start(self, batch, number):
            return -1 if (self.current_epoch, number) == (0, 2) else None

    model = Impatient()
    trainer(*callbacks(), max_epochs=2).fit(model, datamodule=datamodule(train=CountingSource()))
    assert model.seen["train"] == [plan(0)[:2], plan(1)]


@with_and_without
def test_an_optimizer_that_asks_for_the_number_of_steps_changes_nothing(callbacks):
    class Estimating(Recorder):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 2 * len(STORED)
            return super().configure_optimizers()

    model = Estimating()
    fit = trainer(*callbacks(), max_epochs=2)
    fit.fit(model, datamodule=datamodule(train=CountingSource()))
    assert model.seen["train"] == [plan(0), plan(1)]


@with_and_without
def test_predict_gives_each_sample_once_and_in_order(callbacks):
    batches = trainer(*callbacks()).predict(Recorder(), datamodule=datamodule(predict=CountingSource()))
    assert [batch.tolist() for batch in batches] == STORED


@with_and_without
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_with_two_sources_goes_through_one_after_the_other(callbacks, stage):
    model, name = Recorder(), stage.replace("validate", "val")
    dm = datamodule(**{name: [CountingSource(), CountingSource(10)]})
    getattr(trainer(*callbacks()), stage)(model, datamodule=dm)
    assert model.seen == {f"{name} 0": [STORED], f"{name} 1": [plan(0, length=10, shuffle="none")]}


@with_and_without
def test_two_validation_sources_are_both_read_whole_in_every_epoch(callbacks):
    model = Recorder()
    dm = datamodule(train=CountingSource(), val=[CountingSource(), CountingSource(26)])
    trainer(*callbacks(), max_epochs=2, limit_val_batches=1.0).fit(model, datamodule=dm)
    assert model.seen["train"] == [plan(0), plan(1)]
    assert model.seen["val 0"] == [STORED] * 2
    assert model.seen["val 1"] == [plan(0, length=26, shuffle="none")] * 2


@with_and_without
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_stage_without_a_source_does_nothing(callbacks, stage):
    model = Recorder()
    dm = datamodule(**{"test" if stage == "fit" else "train": CountingSource()})
    getattr(trainer(*callbacks()), stage)(model, datamodule=dm)
    assert model.seen == {}


@with_and_without
def test_the_same_objects_fit_validate_and_fit_again(callbacks):
    model, dm, same = Recorder(), datamodule(train=CountingSource(), val=CountingSource()), callbacks()
    fit = trainer(*same)
    fit.fit(model, datamodule=dm)
    fit.validate(model, datamodule=dm, verbose=False)
    fit.fit_loop.max_epochs = 2
    fit.fit(model, datamodule=dm)
    trainer(*same).fit(model, datamodule=dm)
    assert model.seen["train"] == [plan(0), plan(1), plan(0)]
    assert model.seen["val 0"] == [STORED] * 4
    assert readers() == []


@pytest.mark.parametrize("attached", [False, True], ids=["alone", "after a fit"])
def test_a_datamodule_as_a_string_tells_what_will_happen_and_reads_nothing(attached):
    sources = [CountingSource() for _ in range(3)]
    dm = datamodule(train=sources[0], val=sources[1:])
    if attached:
        trainer(limit_train_batches=0, limit_val_batches=0).fit(Recorder(), datamodule=dm)
    assert f"{SAMPLES} samples" in str(dm)
    assert f"batch {BATCH}, 6 steps, shuffle global" in str(dm)
    assert [source.reads for source in sources] == [[], [], []]
    assert readers() == []
