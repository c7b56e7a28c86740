"""What a Trainer's run says about its waits: a line per epoch, one for test and prediction, none if it is quiet."""

from __future__ import annotations

import importlib
import logging
import pickle

import pytest
import torch
from support.lightning.trainer import BATCH, NO_STAGES, SAMPLES, CountingSource, Recorder, datamodule, trainer
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource
from lit_async_data.verdict.finding import Bound, Option, Verdict
from lit_async_data.verdict.headspace import Headspace

NO_VALIDATION = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
STEPS = -(-SAMPLES // BATCH)


@pytest.fixture
def lines(caplog):
    """The lines that say how long something waited."""
    caplog.set_level("INFO")
    return lambda: [each.getMessage() for each in caplog.records if " waited " in each.getMessage()]


def all_stages():
    return datamodule(train=CountingSource(), val=CountingSource(), test=CountingSource(), predict=CountingSource())


@NO_STAGES
def test_every_stage_is_counted_and_says_how_long_it_waited(lines):
    callback, dm = lad.DevicePrefetcher(), all_stages()
    fit = trainer(callback, max_epochs=2, num_sanity_val_steps=1)
    fit.fit(Recorder(), datamodule=dm)
    assert [line.partition(":")[0] for line in lines()] == ["epoch 0", "epoch 1"]
    assert all(line.count(" % of ") == 2 and "; validation waited " in line for line in lines())
    fit.test(Recorder(), datamodule=dm)
    fit.predict(Recorder(), datamodule=dm)
    fit.validate(Recorder(), datamodule=dm)
    assert [line.partition(":")[0] for line in lines()[2:]] == ["test", "prediction", "validation"]
    # Without the sanity check, whose batches are a part of a pass.
    assert {stage: waited.steps for stage, waited in callback.evaluated.items()} == {
        "val": 3 * STEPS,
        "test": STEPS,
        "predict": STEPS,
    }
    assert all(waited.total_s > waited.waited_s > 0 for waited in callback.evaluated.values())


@NO_STAGES
def test_quiet_says_nothing_and_leaves_the_progress_bar_alone(caplog):
    caplog.set_level("INFO")
    callback = lad.DevicePrefetcher(quiet=True)
    fit = trainer(callback, enable_progress_bar=True)
    metrics = []

    def look(stage, batch):
        metrics.append(fit.progress_bar_callback.get_metrics(fit, fit.lightning_module))

    fit.fit(Recorder(look), datamodule=all_stages())
    assert "waited" not in caplog.text
    assert metrics
    assert not any("data" in each for each in metrics)
    assert callback.waited.steps == STEPS  # it measures all the same


@NO_STAGES
def test_the_level_of_the_packages_logger_silences_all_its_lines(caplog):
    caplog.set_level("INFO")
    logger = logging.getLogger("lit_async_data")
    logger.setLevel(logging.WARNING)
    try:
        trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=all_stages())
    finally:
        logger.setLevel(logging.NOTSET)
    assert "waited" not in caplog.text
    assert "memory" not in caplog.text


@NO_STAGES
def test_with_several_ranks_the_slowest_is_named_with_its_own_cure(monkeypatch, lines):
    fit, gathered = trainer(lad.DevicePrefetcher()), []
    slow = Verdict(0.5, Bound.DECODING, Option.WORKERS, 4, 0.25)

    def reduce(values, *_, reduce_op, **__):
        if reduce_op == "sum" and values.ndim == 2:
            gathered.append(values)
            assert not values[1].any()
            values[1] = torch.tensor([1.0, *slow.numbers()])
        return values

    monkeypatch.setattr(type(fit), "world_size", 2)
    monkeypatch.setattr(fit.strategy, "reduce", reduce)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert len(gathered) == 1
    (line,) = lines()
    assert "training on rank 1, the slowest of 2, waited 100.0 % of " in line
    assert "decoding-bound; loader.workers=4 should save about 25 %" in line


def test_the_same_warning_of_several_loaders_is_one_line_with_a_stage(caplog):
    source = ArraySource({"x": torch.zeros(8).numpy()})
    loaders = [lad.AsyncLoader(source, {"batch_size": 4}) for _ in range(3)]
    for loader, label in zip(loaders, ("train", "val", "test")):
        loader.label, loader.logged = label, loaders[0].logged
        loader._say(logging.WARNING, "this is slow")
    loaders[2]._say(logging.WARNING, "this, too")
    assert [each.getMessage() for each in caplog.records] == ["train: this is slow", "test: this, too"]


@NO_STAGES
def test_the_loaders_of_a_datamodule_know_their_stage_and_share_what_was_said():
    dm = lad.AsyncDataModule(train=CountingSource(), val=[CountingSource(), CountingSource()], loader={"batch_size": 4})
    train, (first, second) = dm.train_dataloader(), dm.val_dataloader()
    assert [each.label for each in (train, first, second)] == ["train", "val", "val[1]"]
    assert train.logged is first.logged is second.logged


# -- headspace ---------------------------------------------------------------------------------------------------------


@NO_STAGES
@pytest.mark.filterwarnings("ignore:DevicePrefetcher.headspace=True:UserWarning")
def test_headspace_repeats_batches_in_the_second_half_of_each_epoch(caplog):
    caplog.set_level("INFO")
    model, callback = Recorder(), lad.DevicePrefetcher(headspace=True)
    fit = trainer(callback, max_epochs=2)
    fit.fit(model, datamodule=datamodule(train=CountingSource(88), val=CountingSource()))
    assert len(model.seen["train"]) == 2
    for seen in model.seen["train"]:
        assert len(seen) == 22
        real, repeated = seen[:11], seen[11:]
        assert len({tuple(batch) for batch in real}) == 11
        kept = [batch for batch in real if batch in repeated]
        assert len(kept) == 4
        assert all(batch in kept for batch in repeated)
    assert model.seen["train"][0][:11] != model.seen["train"][1][:11]
    said = [each.getMessage() for each in caplog.records if "headspace" in each.getMessage()]
    assert [line.partition(", ")[0].split()[:3] for line in said] == [
        ["epoch", f"{n}:", "headspace:"] for n in range(2)
    ]
    assert all("steps/s with this loader" in line and "a better loader saves" in line for line in said)
    assert fit.callback_metrics["data/headspace"] >= 0


@NO_STAGES
def test_a_run_for_headspace_says_that_it_is_no_training():
    with pytest.warns(UserWarning, match="this is no training"):
        trainer(lad.DevicePrefetcher(headspace=True)).fit(Recorder(), datamodule=datamodule(train=CountingSource()))


@pytest.mark.filterwarnings("ignore:DevicePrefetcher.headspace=True:UserWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@NO_VALIDATION
def test_headspace_ends_an_epoch_of_somebody_elses_loader():
    counted = []

    class Model(Recorder):
        def training_step(self, batch, number):
            counted.append(batch)
            return self.layer(batch[:, None].float()).mean()

    callback = lad.DevicePrefetcher(headspace=True)
    trainer(callback, max_epochs=2).fit(Model(), DataLoader(list(range(40)), batch_size=4))
    assert len(counted) == 20
    assert len({tuple(batch.tolist()) for batch in counted[5:10]}) == 4


@NO_STAGES
@pytest.mark.filterwarnings("ignore:DevicePrefetcher.headspace=True:UserWarning")
def test_headspace_is_refused_where_it_makes_no_sense(tmp_path):
    with pytest.raises(ConfigError, match="headspace: repeated batches are not copied"):
        lad.DevicePrefetcher(headspace=True, verify_copies=2)
    path = str(tmp_path / "x.ckpt")
    fit = trainer(max_epochs=1)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    fit.save_checkpoint(path)
    with pytest.raises(ConfigError, match="headspace: this run resumes"):
        trainer(lad.DevicePrefetcher(headspace=True), max_epochs=2).fit(
            Recorder(), datamodule=datamodule(train=CountingSource()), ckpt_path=path
        )


def test_headspace_leaves_out_first_steps_and_what_comes_between():
    headspace = Headspace()
    headspace.begin(20)
    now = 0.0
    for step in range(20):
        if step in (3, 14):
            headspace.interrupt()
            now += 1000.0
        now += {0: 50.0, 10: 50.0}.get(step, 2.0 if step < 10 else 1.0)
        headspace.step(step, now)
    assert headspace.gain == pytest.approx(0.5)
    headspace.begin(4)
    assert headspace.gain is None
    assert "too few steps" in str(headspace)


def test_a_copy_of_the_callback_keeps_its_options():
    copied = pickle.loads(pickle.dumps(lad.DevicePrefetcher(headspace=True, quiet=True)))
    assert (copied.headspace, copied.quiet, copied.evaluated) == (True, True, {})


# -- the profiler ------------------------------------------------------------------------------------------------------


def test_torchs_profiler_shows_our_ranges():
    ranges = importlib.import_module("lit_async_data.device.profiling")
    assert not ranges.profiled()
    source = ArraySource({"x": torch.zeros(8).numpy()})
    with lad.AsyncLoader(source, {"batch_size": 4, "workers": 0}) as loader, torch.profiler.profile() as profile:
        assert ranges.profiled()
        assert len(list(loader)) == 2
    assert [event.name for event in profile.events()].count(ranges.NEXT) == 2
