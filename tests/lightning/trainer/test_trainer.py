"""`AsyncDataModule` and `DevicePrefetcher` in a real Trainer: samples, their order, and leftovers.

``LIT_ASYNC_DATA_LIGHTNING=lightning.pytorch`` runs this file under Lightning's other name.
"""

import copy
import importlib
import inspect
import itertools
import pickle
import re

import pytest
import torch
from support.device.training_loop import Small, pretend
from support.failures import raising
from support.lightning.trainer import (
    BATCH,
    NAME,
    NO_STAGES,
    QUEUE,
    STORED,
    CountingSource,
    Recorder,
    at_every_depth,
    datamodule,
    pl,
    plan,
    readers,
    rows,
    trainer,
    with_and_without,
)
from support.threads.leaks import open_files

import lit_async_data as lad  # loads no Lightning by itself: that is for the next line to choose
from lit_async_data.errors import ClosedError, ReadError

pytestmark = NO_STAGES
EPOCHS = [plan(0), plan(1), plan(2)]
CUT = [epoch[:2] for epoch in EPOCHS]


@pytest.mark.parametrize(
    ("options", "train", "val", "sanity"),
    [
        ({"num_sanity_val_steps": 2}, EPOCHS, [STORED] * 3, [STORED[:2]]),
        ({"num_sanity_val_steps": -1}, EPOCHS, [STORED] * 3, [STORED]),
        ({"limit_train_batches": 2, "limit_val_batches": 0.4}, CUT, [STORED[:2]] * 3, []),
        ({"limit_train_batches": 0.4, "limit_val_batches": 2}, CUT, [STORED[:2]] * 3, []),
    ],
    ids=str,
)
@at_every_depth
def test_every_epoch_takes_the_batches_of_its_plan(callbacks, options, train, val, sanity):
    model, source = Recorder(), CountingSource()
    workers = {} if train is CUT else {"workers": 2}
    dm = datamodule(workers, train=source, val=CountingSource(width=1))
    trainer(*callbacks(), max_epochs=3, **options).fit(model, datamodule=dm)
    assert (model.seen["train"], model.seen["val 0"], model.seen["sanity 0"]) == (train, val, sanity)
    if train is CUT:
        endless = list(itertools.chain.from_iterable(plan(epoch)[:2] for epoch in range(6)))
        assert source.reads == endless[: len(source.reads)]
        assert len(source.reads) <= 6 + QUEUE + 1


@at_every_depth
def test_validation_in_mid_epoch_drops_nothing_and_rereads_nothing(callbacks):
    model, train, val = Recorder(), CountingSource(), CountingSource()
    fit = trainer(*callbacks(), max_epochs=3, val_check_interval=0.5)
    fit.fit(model, datamodule=datamodule(train=train, val=val))
    assert model.seen["train"] == EPOCHS
    assert model.seen["val 0"] == [STORED] * 6
    for source, endless, used in (train, plan(0) + plan(1) + plan(2) + plan(3), 18), (val, STORED * 7, 36):
        assert source.reads == endless[: len(source.reads)]
        assert used <= len(source.reads) <= used + QUEUE + 1


@with_and_without
@pytest.mark.parametrize("kind", ["datamodule", "bare", "bare, shuffled"])
def test_overfit_batches_takes_the_same_batches_with_and_without_the_callback(callbacks, kind, caplog):
    model, fit, shuffled = Recorder(), trainer(*callbacks(), max_epochs=3, overfit_batches=0.4), "shuffled" in kind
    train, val = CountingSource(width=1), CountingSource(width=1)
    if kind == "datamodule":
        fit.fit(model, datamodule=datamodule(train=train, val=val))
    else:
        options = {"batch_size": BATCH, "return_indices": True}
        fit.fit(
            model,
            lad.AsyncLoader(train, options | {"shuffle": shuffled or None}),
            lad.AsyncLoader(val, options | {"shuffle": False}),
        )
        assert ("other batches in each epoch" in caplog.text) == (shuffled and bool(callbacks()))
    assert model.seen["train"] == [plan(epoch)[:2] if shuffled else STORED[:2] for epoch in range(3)]


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
@pytest.mark.parametrize("stage", ["fit", "predict"])
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


def test_a_datamodule_can_be_copied_after_a_fit_and_fitted_again():
    dm = datamodule(train=CountingSource())
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=dm)
    for again in (copy.deepcopy(dm), pickle.loads(pickle.dumps(dm))):
        recorder = Recorder()
        trainer(lad.DevicePrefetcher()).fit(recorder, datamodule=again)
        assert recorder.seen["train"] == [plan(0)]


def failing(dm, loaders, wanted, error):
    """A hook for `Recorder` that keeps the loaders alive, and raises in the second batch of a stage."""
    second = (plan(0) if wanted == "train" else STORED)[1]

    def on_step(stage, batch):
        every = dm.trainer.train_dataloader, dm.trainer.val_dataloaders
        loaders.extend(each for each in every if isinstance(each, lad.AsyncLoader))
        if stage == wanted and batch["index"].tolist() == second:
            raise error("stop")

    return on_step


@with_and_without
@pytest.mark.parametrize(
    ("stage", "error", "ended"),
    [
        ("train", RuntimeError, "stop"),
        ("train", KeyboardInterrupt, "^1$"),
        ("val 0", KeyboardInterrupt, "^1$"),
        ("sanity 0", RuntimeError, "stop"),
    ],
)
@pytest.mark.usefixtures("process_as_before")
def test_an_error_or_ctrl_c_in_a_step_closes_loaders_and_files_and_all_train_again(callbacks, stage, error, ended, h5):
    path = h5("rows.h5", rows=rows())
    source = lad.HDF5Source(path, fields={"x": "rows"})
    dm, loaders, same = datamodule(train=source, val=source), [], callbacks()
    fit = trainer(*same, num_sanity_val_steps=2, val_check_interval=0.5)
    with pytest.raises((RuntimeError, SystemExit), match=ended):
        fit.fit(Recorder(failing(dm, loaders, stage, error)), datamodule=dm)
    assert readers() == []
    assert not [file for file in open_files() if path in file]
    for loader in loaders:
        with pytest.raises(ClosedError):
            next(loader)
    model = Recorder()
    trainer(*same).fit(model, datamodule=dm)
    assert model.seen == {"train": [plan(0)], "val 0": [STORED]}
    dm.close()


@with_and_without
@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_batch_that_cannot_be_read_ends_training_with_its_samples_named(callbacks, stage):
    class Broken(CountingSource):
        def read_into(self, samples, out):
            super().read_into(samples, out)
            if len(self.reads) == 3:
                raise OSError("bad sector")

    model = Recorder()
    dm = datamodule(**{"train": CountingSource(), "val": CountingSource(), stage: Broken()})
    third = (plan(0) if stage == "train" else STORED)[2]
    with pytest.raises(ReadError, match=re.escape(", ".join(map(str, third[:3]))) + ".*bad sector"):
        trainer(*callbacks()).fit(model, datamodule=dm)
    assert list(model.seen.values())[-1] == [(plan(0) if stage == "train" else STORED)[:2]]
    assert readers() == []


@with_and_without
def test_loaders_without_the_datamodule_stay_open_for_their_owner(callbacks):
    options = {"batch_size": BATCH, "shuffle": True, "return_indices": True}
    model, failing = Recorder(), Recorder(raising(RuntimeError("stop")))
    val = lad.AsyncLoader(CountingSource(), options | {"shuffle": False})
    with lad.AsyncLoader(CountingSource(), options) as train, val:
        trainer(*callbacks(), max_epochs=2, limit_train_batches=3).fit(model, train, val)
        assert model.seen["train"] == [plan(0)[:3], plan(1)[:3]]
        assert next(iter(train))["index"].tolist() == plan(2)[0]
        with pytest.raises(RuntimeError, match="stop"):
            trainer(*callbacks()).fit(failing, train, val)
        assert not train._wiring.externally_driven
    assert readers() == []


@with_and_without
def test_batches_can_be_differentiated_even_if_they_were_read_while_lightning_forbade_it(callbacks):
    kinds = set()
    model = Recorder(lambda stage, batch: kinds.update((stage, field, x.is_inference()) for field, x in batch.items()))
    dm, run = datamodule(train=CountingSource(), val=CountingSource()), trainer(*callbacks(), val_check_interval=1)
    run.validate(model, datamodule=dm, verbose=False)
    run.fit(model, datamodule=dm)
    assert kinds == {(stage, field, False) for stage in ("train", "val 0") for field in ("x", "index")}


@at_every_depth
def test_each_stage_has_its_transform_applied_once_to_each_batch_and_draws_in_training_only(callbacks):
    def marked(by):
        def mark(batch, rng):
            before = batch.get("mark", torch.zeros(len(batch["index"])))
            return batch | {"mark": before + by, "drawn": torch.tensor(rng is not None)}

        return mark

    marks = []
    model = Recorder(lambda stage, batch: marks.append((stage, set(batch["mark"].tolist()), batch["drawn"].item())))
    sources = {stage: CountingSource() for stage in ("train", "val", "test", "predict")}
    dm = datamodule(**sources, device_transform={"train": marked(1), "val": marked(10), "eval": marked(100)})
    run = trainer(*callbacks())
    run.fit(model, datamodule=dm)
    run.test(model, datamodule=dm, verbose=False)
    run.predict(model, datamodule=dm)
    expected = {"train": 1.0, "val 0": 10.0, "test 0": 100.0, "predict 0": 100.0}
    assert marks == [(stage, {mark}, stage == "train") for stage, mark in expected.items() for _ in STORED]


Tuner = importlib.import_module(f"{NAME}.tuner").Tuner
# Since version 2.6, the finder of batch sizes keeps a margin. Before, it found the size after the last that fitted.
FOUND = 8 if "margin" in inspect.signature(Tuner.scale_batch_size).parameters else 16


@with_and_without
def test_the_batch_size_finder_leaves_the_best_size_to_the_fit(callbacks, tmp_path):
    model, dm = Recorder(), datamodule(train=CountingSource(), val=CountingSource(width=1))
    finder = pl.callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=3)
    trainer(*callbacks(), finder, default_root_dir=tmp_path, max_epochs=2).fit(model, datamodule=dm)
    assert dm.batch_size == FOUND
    assert model.seen["train"][-2:] == [plan(0, batch_size=FOUND), plan(1, batch_size=FOUND)]


def test_the_batch_size_finder_sees_that_a_device_has_no_memory(monkeypatch, tmp_path, caplog):
    """It has room for 13 samples, and a batch of 8 takes the place of those that would be copied ahead."""
    streams = Small("compute", 13 * rows(1).nbytes)
    pretend(monkeypatch, lambda device: streams)
    model, dm = Recorder(), datamodule(train=CountingSource(), device_transform=lambda batch: batch)
    finder = pl.callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=5)
    trainer(lad.DevicePrefetcher(), finder, default_root_dir=tmp_path, max_epochs=2).fit(model, datamodule=dm)
    assert dm.batch_size == 8
    assert model.seen["train"][-2:] == [plan(0, batch_size=8), plan(1, batch_size=8)]
    assert "This is a bug" not in caplog.text


class Staged(torch.utils.data.Dataset):
    strength, epoch = 0, -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return {"index": number, "x": torch.tensor([float(number)]), "strength": self.strength, "epoch": self.epoch}


class Marks:
    strength = 0

    def __call__(self, batch):
        return batch | {"mark": torch.full_like(batch["epoch"], self.strength)}


class Sets(pl.Callback):
    """Sets what epoch ``n`` is to have: before it begins, or when the one before has ended."""

    def __init__(self, objects, at_end):
        self.objects, self.at_end = objects, at_end
        setattr(self, "on_train_epoch_end" if at_end else "on_train_epoch_start", self.set)

    def set(self, trainer, _):
        for each in self.objects:
            each.strength = trainer.current_epoch + self.at_end


@pytest.mark.parametrize("at_end", [False, True])
@with_and_without
def test_what_a_callback_sets_on_a_dataset_or_a_transform_holds_in_its_epoch_alone(callbacks, at_end):
    def on_step(stage, batch):
        values = zip(*(batch[key].tolist() for key in ("epoch", "mark", "strength")), strict=True)
        seen.update((stage, model.current_epoch, *each) for each in values)

    train, val, marks, model, seen = Staged(), Staged(), Marks(), Recorder(on_step), set()
    options = {"batch_size": 4, "shuffle": True, "worker_kind": "thread"}
    sources = {"train": lad.DatasetSource(train), "val": lad.DatasetSource(val)}
    dm = lad.AsyncDataModule(**sources, loader=options, device_transform=marks)
    trainer(Sets([train, val, marks], at_end), *callbacks(), max_epochs=3).fit(model, dm)
    of_training = {("train", epoch, epoch, epoch, epoch) for epoch in range(3)}
    assert seen == of_training | {("val 0", epoch, -1, epoch, epoch) for epoch in range(3)}  # evaluation has no epoch
