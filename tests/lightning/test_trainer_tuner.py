"""More of `test_trainer`: errors, tuners, metrics, and loaders without the DataModule."""

import importlib
import inspect
import re
import signal
import types

import pytest
import torch
import tqdm
from support.lightning.trainer import (
    BATCH,
    NAME,
    NO_STAGES,
    QUEUE,
    STORED,
    CountingSource,
    Recorder,
    Recording,
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

import lit_async_data as lad
from lit_async_data.errors import ClosedError, ReadError
from lit_async_data.lightning import verdicts

pytestmark = NO_STAGES

METRICS = {"data/wait_ms", "data/device_wait_ms", "data/queue_fill", "data/epoch_gap_ms", "data/read_mb_s"}


def loaders_of(dm):
    """The loaders that the Trainer holds now."""
    return [each for each in (dm.trainer.train_dataloader, *(dm.trainer.val_dataloaders or ())) if each is not None]


def failing(dm, loaders, wanted, error):
    """A hook for `Recorder` that keeps the loaders alive, and raises in the second batch of a stage."""
    second = (plan(0) if wanted == "train" else STORED)[1]

    def on_step(stage, batch):
        loaders.extend(loaders_of(dm))
        if stage == wanted and batch["index"].tolist() == second:
            raise error("stop")

    return on_step


@pytest.fixture
def sigint():
    """Restores SIGINT, which Lightning leaves ignored after a Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


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
@pytest.mark.usefixtures("sigint")
def test_an_error_or_a_ctrl_c_in_a_step_closes_every_loader_and_file(callbacks, stage, error, ended, h5):
    path = h5("rows.h5", rows=rows())
    source = lad.HDF5Source(path, fields={"x": "rows"})
    dm, loaders = datamodule(train=source, val=source), []
    fit = trainer(*callbacks(), num_sanity_val_steps=2, val_check_interval=0.5)
    with pytest.raises((RuntimeError, SystemExit), match=ended):
        fit.fit(Recorder(failing(dm, loaders, stage, error)), datamodule=dm)
    assert readers() == []
    assert not [file for file in open_files() if path in file]
    for loader in loaders:
        with pytest.raises(ClosedError):
            next(loader)


@with_and_without
def test_after_an_error_the_same_objects_train_again(callbacks):
    dm, again = datamodule(train=CountingSource(), val=CountingSource()), callbacks()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(*again).fit(Recorder(failing(dm, [], "train", RuntimeError)), datamodule=dm)
    model = Recorder()
    trainer(*again).fit(model, datamodule=dm)
    assert model.seen == {"train": [plan(0)], "val 0": [STORED]}


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
    stored = options | {"shuffle": False}
    model = Recorder()

    def fails(stage, batch):
        raise RuntimeError("stop")

    with lad.AsyncLoader(CountingSource(), options) as train, lad.AsyncLoader(CountingSource(), stored) as val:
        trainer(*callbacks(), max_epochs=2, limit_train_batches=3).fit(model, train, val)
        assert model.seen["train"] == [plan(0)[:3], plan(1)[:3]]
        assert next(iter(train))["index"].tolist() == plan(2)[0]
        with pytest.raises(RuntimeError, match="stop"):
            trainer(*callbacks()).fit(Recorder(fails), train, val)
        assert not train.machinery.wiring.externally_driven
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


@with_and_without
def test_the_learning_rate_finder_leaves_the_order_to_the_fit(callbacks, tmp_path, monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # else its bar leaves a thread behind
    model, dm = Recorder(), datamodule(train=CountingSource(), val=CountingSource(width=1))
    run = trainer(*callbacks(), default_root_dir=tmp_path, max_epochs=2)
    found = Tuner(run).lr_find(model, datamodule=dm, num_training=9, early_stop_threshold=None)
    assert len(found.results["lr"]) == 9
    run.fit(model, datamodule=dm)
    assert model.seen["train"][-2:] == [plan(0), plan(1)]
    assert readers() == []


@pytest.fixture
def clock(monkeypatch):
    """A fake clock that advances only when a test says so."""
    now = types.SimpleNamespace(s=0.0)
    stopped = types.SimpleNamespace(perf_counter=lambda: now.s, monotonic=lambda: now.s, thread_time=lambda: 0.0)
    for module in (
        "engine.loader.async_loader",
        "lightning.prefetcher",
        "engine.pipeline.pipeline",
        "engine.pipeline.thread_pipeline",
        "sources.contract.stage_clock",
    ):
        monkeypatch.setattr(f"lit_async_data.{module}.time", stopped)
    return now


def test_waiting_is_measured_per_step_and_per_epoch(clock, caplog, monkeypatch):
    class Slow(CountingSource):
        def read_into(self, samples, out):
            super().read_into(samples, out)
            clock.s += 0.25

    def take_time(stage, batch):
        clock.s += 0.75 if stage == "train" else 60

    caplog.set_level("INFO")
    monkeypatch.setattr(verdicts, "LEAST_STEPS", 5)
    callback, logger, source = lad.DevicePrefetcher(device_depth=0), Recording(), Slow(20)
    fit = trainer(callback, logger=logger, log_every_n_steps=2, max_epochs=2, val_check_interval=2)
    fit.fit(Recorder(take_time), datamodule=datamodule(train=source, val=CountingSource()))
    megabytes = BATCH * (source.spec.nbytes + 8) / 1e6  # eight bytes of ids
    expected = {
        "data/wait_ms": 250,
        "data/device_wait_ms": 250,
        "data/queue_fill": 0,
        "data/epoch_gap_ms": 250,
        "data/read_mb_s": megabytes / 0.25,
    }
    assert fit.callback_metrics == pytest.approx(expected)
    steps = [(step, row) for step, row in logger.rows if "epoch" not in row]
    assert [step for step, _ in steps] == [1, 3, 5, 7, 9]
    for _, row in steps:
        assert row == pytest.approx(expected)
    assert (callback.waited.steps, callback.waited.share) == (10, 0.25)
    said = "training waited 25.0 % of 5.0 s for data: it reads by itself, and nothing is read ahead"
    assert [line for line in caplog.messages if "waited" in line] == [f"epoch 0: {said}"]


def test_the_means_of_an_epoch_are_reduced_over_the_ranks_all_at_once(monkeypatch):
    fit, reduced = trainer(lad.DevicePrefetcher(), max_epochs=2), []

    def reduce(values, *args, **options):
        if values.numel() != len(METRICS):
            return values  # one of Lightning's own
        reduced.append(options)
        return torch.full_like(values, 7)

    monkeypatch.setattr(type(fit), "world_size", 2)
    monkeypatch.setattr(fit.strategy, "reduce", reduce)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert fit.callback_metrics == dict.fromkeys(METRICS, 7)
    assert reduced == [{"reduce_op": "mean"}] * 2


def test_metrics_of_read_ahead_batches_are_logged_too():
    logger = Recording()
    fit = trainer(lad.DevicePrefetcher(), logger=logger, log_every_n_steps=1, max_epochs=2)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert set(fit.callback_metrics) == METRICS
    assert [step for step, row in logger.rows if set(row) == METRICS] == list(range(12))
    for _, row in logger.rows:
        assert 0 <= row["data/queue_fill"] <= QUEUE + 1
        assert row["data/wait_ms"] >= 0 < row["data/read_mb_s"]


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2])])
def test_a_step_is_logged_once_however_many_batches_it_takes(accumulate, steps):
    logger = Recording()
    fit = trainer(lad.DevicePrefetcher(), logger=logger, log_every_n_steps=1, accumulate_grad_batches=accumulate)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert [step for step, row in logger.rows if set(row) == METRICS] == steps


def test_a_trainer_that_never_logs_is_served_too():
    callback = lad.DevicePrefetcher()
    trainer(callback, log_every_n_steps=0).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert callback.waited.steps == 6
