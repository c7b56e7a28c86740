"""`DevicePrefetcher` in a real Trainer: precision, the user's batch hooks, reading ahead, and metrics."""

import contextlib
import copy
import multiprocessing
import os
import signal
import threading
import types

import numpy as np
import pytest
import torch
from support.failures import raising
from support.lightning.rows import Stream
from support.lightning.trainer import (
    BATCH,
    NO_STAGES,
    QUEUE,
    SAMPLES,
    STORED,
    CountingSource,
    Learning,
    Recorder,
    Recording,
    Watching,
    datamodule,
    on_device,
    pl,
    plan,
    readers,
    trainer,
)
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.lightning import display
from lit_async_data.testing import ArraySource

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:.*(have no `val_dataloader`|not have many workers)")]


def overriding(base, *hooks):
    """A module or DataModule with these hooks, each of which records its calls."""

    def hook(name):
        def called(self, batch, *rest):
            self.hooked.append(name)
            return getattr(super(made, self), name)(batch, *rest)

        return called

    made = type("Own", (base,), {name: hook(name) for name in hooks} | {"hooked": []})
    return made()


@pytest.mark.parametrize("owner", ["model", "datamodule"])
@pytest.mark.parametrize(
    ("hooks", "device"),
    [
        ([], "cuda"),
        (["on_after_batch_transfer"], "cuda"),
        (["transfer_batch_to_device"], "cpu"),
        (["on_before_batch_transfer", "on_after_batch_transfer"], "cpu"),
    ],
)
def test_where_a_user_overrides_the_transfer_batches_stay_on_the_host_and_that_is_said(
    streams, hooks, device, owner, caplog
):
    caplog.set_level("INFO")
    own = overriding(Recorder if owner == "model" else pl.LightningDataModule, *hooks)
    model = own if owner == "model" else Recorder()
    with on_device() as loader:
        own.train_dataloader = lambda: loader
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(model, datamodule=None if model is own else own)
        assert loader.device.type == device
    assert model.seen["train"] == [plan(0), plan(1)]
    assert caplog.text.count("is your own hook: DevicePrefetcher prefetches into host memory only") == (device == "cpu")
    assert [call for call in streams.calls if call[0] == "copy"] == [] or device == "cuda"
    if device == "cpu":
        assert f"Own.{hooks[0]} is your own hook" in caplog.text
        assert len(own.hooked) == len(hooks) * 2 * len(STORED)


def test_what_the_callback_was_not_given_is_that_of_the_loader(streams):
    with on_device(device_depth=3) as loader:
        trainer(lad.DevicePrefetcher()).fit(Recorder(), loader)
        assert loader.device_depth == 3


def test_where_no_loader_of_ours_trains_nothing_is_shown_and_that_is_said(caplog):
    callback, shown = lad.DevicePrefetcher(), Watching()

    class Theirs:
        def __len__(self):
            return 1

        def __iter__(self):
            return iter([{"x": torch.zeros(1, 1), "index": torch.tensor([0])}])

    fit = trainer(callback, shown, enable_progress_bar=True, log_every_n_steps=1)
    fit.fit(Recorder(), Theirs())
    assert caplog.text.count("training uses neither an AsyncLoader") == 1
    assert str(callback.waited).startswith("for an unknown time")
    assert [set(items) & {"data"} for items in shown.shown] == [set()]


class Gate(CountingSource):
    def __init__(self, samples=SAMPLES, after=1):
        super().__init__(samples)
        self.after, self.read = after, threading.Event()

    def read_into(self, samples, out):
        super().read_into(samples, out)
        if len(self.reads) >= self.after:
            self.read.set()


@pytest.mark.parametrize(
    ("options", "passes"),
    [({"val_check_interval": 0.5}, 6), ({"num_sanity_val_steps": 2}, 3), ({"limit_val_batches": 2}, 3)],
)
def test_validation_finds_its_first_batches_read_and_nothing_is_read_twice(options, passes):
    """1. Training is in its first step. 2. The step waits until the first batches of validation are read."""
    train, val = CountingSource(), Gate(after=3)

    def on_step(stage, batch):
        assert stage != "train" or val.read.wait(60)

    model = Recorder(on_step)
    trainer(lad.DevicePrefetcher(), max_epochs=3, **options).fit(model, datamodule=datamodule(train=train, val=val))
    sanity, each = STORED[: options.get("num_sanity_val_steps", 0)], STORED[: options.get("limit_val_batches")]
    assert model.seen["train"] == [plan(0), plan(1), plan(2)]
    assert model.seen["val 0"] == [each] * passes
    for source, endless in (train, [*plan(0), *plan(1), *plan(2), *plan(3)]), (val, sanity + each * (passes + 4)):
        assert source.reads == endless[: len(source.reads)]


def test_without_prefetching_nothing_is_read_before():
    reads = []
    val = CountingSource()
    model = Recorder(lambda stage, batch: reads.append(len(val.reads)) if stage == "train" else None)
    trainer(lad.DevicePrefetcher(device_depth=0)).fit(model, datamodule=datamodule(train=CountingSource(), val=val))
    assert reads == [0] * len(STORED)


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_the_next_loader_is_read_while_the_one_before_it_runs(stage):
    first, second = CountingSource(), Gate(after=2)
    name = {"fit": "val"}.get(stage, stage)
    waited = []

    def on_step(at, batch):
        if at == f"{name} 0":
            waited.append(second.read.wait(60))

    model = Recorder(on_step)
    dm = datamodule(**{name: [first, second]} | ({"train": CountingSource()} if stage == "fit" else {}))
    getattr(trainer(lad.DevicePrefetcher()), stage)(model, datamodule=dm)
    # Lightning takes the first batch before any hook, and starts with the second loader after that.
    assert waited == [True] * len(STORED)
    assert model.seen[f"{name} 0"] == model.seen[f"{name} 1"] == [STORED]
    assert second.reads == (STORED * 2)[: len(second.reads)]


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
def test_what_is_read_ahead_is_not_copied_to_the_device(streams):
    train, val = on_device(), on_device(Gate(after=3))
    copies = []

    def on_step(stage, batch):
        if stage == "train":
            assert val.source.read.wait(60)
            copies.append(val.fill)

    with train, val:
        trainer(lad.DevicePrefetcher()).fit(Recorder(on_step), train, val)
        assert {fill.partition(" device ")[2] for fill in copies} == {"0/2"}
        assert max(copies) >= "host 2/"
        assert val.stats().batches == len(STORED)


@pytest.mark.parametrize(
    ("depth", "precision", "dtype"),
    [(None, "bf16-true", torch.bfloat16), (2, "32-true", torch.float32), (0, "64-true", torch.float64)],
)
def test_bytes_become_floats_before_the_step(depth, precision, dtype):
    class Bytes(Recorder):
        def see(self, stage, batch, number):
            self.seen[stage].append(batch)

    transform = {"train": lad.ToFloat("x"), "eval": lad.Normalize(0, 1, scale="type", fields="x")}
    source = ArraySource({"x": np.repeat(np.arange(14, dtype="u1")[:, None], 2, axis=1), "index": np.arange(14)})
    dm = lad.AsyncDataModule(train=source, val=source, loader={"batch_size": 4}, device_transform=transform)
    callbacks = [] if depth is None else [lad.DevicePrefetcher(depth)]
    model = Bytes()
    trainer(*callbacks, precision=precision).fit(model, datamodule=dm)
    for stage in ("train", "val 0"):
        for batch in model.seen[stage]:
            assert (batch["x"].dtype, batch["index"].dtype) == (dtype, torch.int64)
            assert torch.allclose(batch["x"][:, 0].float(), batch["index"] / 255, rtol=0.01)
        assert sorted(n for batch in model.seen[stage] for n in batch["index"].tolist()) == list(range(14))


METRICS = {"data/wait_ms", "data/device_wait_ms", "data/queue_fill", "data/epoch_gap_ms", "data/read_mb_s"}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves, by its seconds ``s``."""
    now = types.SimpleNamespace(s=1.0)
    stopped = types.SimpleNamespace(perf_counter=lambda: now.s, monotonic=lambda: now.s, thread_time=lambda: 0.0)
    for module in (
        *("engine.loader.async_loader", "engine.loader.base_loader", "engine.pipeline.pipeline", "engine.stats"),
        *("engine.pipeline.thread_pipeline", "engine.prefetch.loader", "lightning.prefetcher"),
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
    monkeypatch.setattr(display, "LEAST_STEPS", 5)
    callback, logger, source = lad.DevicePrefetcher(device_depth=0), Recording(), Slow(20)
    fit = trainer(callback, logger=logger, log_every_n_steps=2, max_epochs=2, val_check_interval=2)
    fit.fit(Recorder(take_time), datamodule=datamodule(train=source, val=CountingSource()))
    megabytes = BATCH * (source.spec.nbytes + 8) / 1e6  # eight bytes of ids
    expected = dict.fromkeys(("data/wait_ms", "data/device_wait_ms", "data/epoch_gap_ms"), 250)
    expected |= {"data/queue_fill": 0, "data/read_mb_s": megabytes / 0.25}
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


@pytest.mark.parametrize(("every", "accumulate", "steps"), [(1, 1, range(12)), (1, 2, range(6)), (0, 1, ())])
def test_metrics_of_read_ahead_batches_are_logged_once_per_step_however_many_batches_it_takes(every, accumulate, steps):
    logger, options = Recording(), {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    fit = trainer(lad.DevicePrefetcher(), logger=logger, log_every_n_steps=every, **options)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert set(fit.callback_metrics) == METRICS
    assert [step for step, row in logger.rows if set(row) == METRICS] == [*steps]
    for _, row in logger.rows:
        assert 0 <= row["data/queue_fill"] <= QUEUE + 1
        assert row["data/wait_ms"] >= 0 < row["data/read_mb_s"]


BATCHES = [[0, 1], [2, 3], [4, 5]]


def numbers(**options):
    return DataLoader(range(6), batch_size=2, **options)


class Model(Learning):
    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()


def test_every_stage_reads_through_the_wrapper_and_nothing_stays_behind():
    model, callback, kinds = Model(), lad.DevicePrefetcher(), []
    model.validation_step = model.test_step = model.predict_step = lambda batch, *_: batch

    def noting(name):
        return lambda trainer, *_: kinds.append((name, type(getattr(trainer, name))))

    ends = {"on_train_end": "train_dataloader", "on_validation_end": "val_dataloaders"}
    ends |= {"on_test_end": "test_dataloaders", "on_predict_end": "predict_dataloaders"}
    fit = trainer(callback, pl.callbacks.LambdaCallback(**{hook: noting(name) for hook, name in ends.items()}))
    before = fit.strategy.process_dataloader
    fit.fit(model, numbers(), numbers())
    fit.test(model, numbers(), verbose=False)
    fit.predict(model, numbers())
    assert model.seen == BATCHES
    assert dict(kinds) == dict.fromkeys(ends.values(), PrefetchedLoader)
    assert fit.strategy.process_dataloader == before
    assert "process_dataloader" not in vars(fit.strategy)
    assert callback.waited.steps == 3
    assert readers() == []


def test_after_a_run_with_several_callbacks_the_strategy_wraps_nothing():
    fit, loader = trainer(lad.DevicePrefetcher(), lad.DevicePrefetcher()), numbers()
    fit.fit(Model(), loader)
    assert fit.strategy.process_dataloader(loader) is loader
    assert readers() == []


def test_a_trainer_can_be_copied_while_it_trains():
    """As Lightning allows without our callback."""
    copies = []
    copying = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: copies.append(copy.deepcopy(trainer)))
    trainer(lad.DevicePrefetcher(), copying).fit(Model(), numbers())
    strategy, loader = copies[0].strategy, numbers()
    assert strategy.process_dataloader(loader) is loader
    assert strategy.process_dataloader.__self__ is strategy


def test_the_loaders_of_somebodys_combined_loader_serve_after_the_run_too():
    """Lightning puts the processed loader into the user's own object."""
    combined = pl.utilities.CombinedLoader(numbers(), "max_size_cycle")
    first, second = Model(), Model()
    trainer(lad.DevicePrefetcher()).fit(first, combined)
    assert isinstance(combined.flattened[0], PrefetchedLoader)
    assert [batch.tolist() for batch in combined.flattened[0]] == BATCHES
    trainer(max_epochs=2).fit(second, combined)
    trainer(lad.DevicePrefetcher()).fit(second, combined)
    assert first.seen == BATCHES
    assert second.seen == BATCHES * 3
    assert readers() == []


@pytest.mark.parametrize("fails", [False, True])
def test_workers_that_a_dataloader_keeps_end_with_the_run(fails):
    model, loader = Model(), numbers(num_workers=1, persistent_workers=True)
    if fails:
        model.on_train_batch_start = raising(RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine") if fails else contextlib.nullcontext():
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(model, loader)
    assert multiprocessing.active_children() == []
    assert loader._iterator is None


def of_ours():
    loader = {"batch_size": 2, "shuffle": False}
    train = ArraySource({"x": np.arange(6)})
    return lad.AsyncDataModule(train=train, loader=loader, device_transform=lambda batch: batch["x"])


@pytest.mark.usefixtures("process_as_before")
@pytest.mark.filterwarnings("ignore:Total length of `(list|CombinedLoader)` across ranks is zero:UserWarning")
@pytest.mark.parametrize(
    ("name", "made", "number"),
    [("train_dataloaders", lambda: numbers(num_workers=1), signal.SIGINT), ("datamodule", of_ours, signal.SIGTERM)],
)
def test_a_signal_ends_the_run_and_everything_that_was_started(name, made, number, tmp_path):
    """Leftover threads, processes and files fail the test by themselves; the loader keeps its state."""

    class Signalled(Model):
        def training_step(self, batch, step):
            loss = super().training_step(batch, step)
            if step == 1:
                os.kill(os.getpid(), number)
            return loss

    model, kept = Signalled(), pl.callbacks.ModelCheckpoint(tmp_path, save_on_exception=True)
    fit = trainer(lad.DevicePrefetcher(), kept, enable_checkpointing=True)
    with pytest.raises(SystemExit):
        fit.fit(model, **{name: made()})
    assert model.seen == BATCHES[:2]
    assert "process_dataloader" not in vars(fit.strategy)
    (checkpoint,) = tmp_path.iterdir()
    progress = torch.load(checkpoint)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert progress["ready"] == 2


def repeating():
    parts = [ArraySource({"x": np.zeros((size, 1), np.float32)}) for size in (8, 4)]
    return lad.AsyncLoader(lad.MixtureSource({"a": (parts[0], 1), "b": (parts[1], 1)}), {"batch_size": BATCH})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_evaluation_refuses_a_mixture_that_repeats_samples(stage, nested):
    model, steps = Learning(), []
    model.training_step = model.validation_step = model.test_step = model.predict_step = lambda *_: steps.append(1)
    evaluated = [repeating()] if nested else repeating()
    given = [repeating(), evaluated] if stage == "fit" else [evaluated]
    with pytest.raises(lad.ConfigError, match=r"8 of b \(2 × its 4\): samples come again"):
        getattr(trainer(lad.DevicePrefetcher()), stage)(model, *given)
    assert not steps  # nor is an epoch of training lost


def drawn_patches(h5):
    path = h5(ct=np.zeros((8, 8, 8), "f4"))
    source = lad.HDF5Source(path, {"x": lad.Field("ct", patch=(4, 4, 4))}, patches_per_volume=4)
    return lad.AsyncLoader(source, {"batch_size": 2})


def test_prediction_refuses_patches_that_are_drawn(h5, tmp_path):
    model, steps = Learning(), []
    model.predict_step = model.test_step = lambda *_: steps.append(1)
    for callback in (lad.DevicePrefetcher(), lad.PredictionWriter(tmp_path / "predictions")):
        with pytest.raises(lad.ConfigError, match="patches_per_volume draws"):
            trainer(callback).predict(model, drawn_patches(h5))
    assert not steps
    trainer(lad.DevicePrefetcher()).test(model, drawn_patches(h5))
    assert len(steps) == 2


@pytest.mark.parametrize("kind", ["no length", "loader", "datamodule"])
@pytest.mark.parametrize(
    "hooks", [["transfer_batch_to_device"], ["on_before_batch_transfer", "on_after_batch_transfer"], []]
)
def test_the_time_of_the_users_transfer_hooks_is_named_and_no_other_time(clock, caplog, kind, hooks):
    caplog.set_level("INFO")

    def hook(name):
        def called(self, batch, *rest):
            clock.s += 0.25
            return getattr(super(type(owner), self), name)(batch, *rest)

        return called

    class Slow(Learning):
        def training_step(self, batch, batch_idx):
            clock.s += 0.5
            return self.layer(batch["x"][:, :1]).sum()

        def validation_step(self, batch, batch_idx):
            clock.s += 0.5

    class Busy(pl.Callback):
        def on_train_batch_start(self, *_):
            clock.s += 0.5

    def ours():
        return lad.AsyncLoader(CountingSource(4 * 24, width=1), {"batch_size": 4, "shuffle": False, "workers": 0})

    with ours() as train, ours() as val:
        base = Slow if kind != "datamodule" else pl.LightningDataModule
        owner = type("Made", (base,), {name: hook(name) for name in hooks})()
        owner.train_dataloader = lambda: DataLoader(Stream(4 * 24), batch_size=4) if kind == "no length" else train
        owner.val_dataloader = lambda: val
        callback = lad.DevicePrefetcher()
        fit = trainer(Busy(), callback)
        fit.fit(*((Slow(), None, None, owner) if kind == "datamodule" else (owner,)))
    spent = 0.25 * len(hooks)
    share = 100 * 24 * spent / callback.waited.total_s
    named = " and ".join(f"Made.{name}" for name in hooks)
    said = f"epoch 0: training spent {share:.1f} % of {callback.waited.total_s:.1f} s in {named}"
    assert (said in caplog.text) == ("training spent" in caplog.text) == bool(hooks)
    assert (f"validation spent {100 * spent / (0.5 + spent):.1f} % of" in caplog.text) == bool(hooks)
    assert ("data keep up" in caplog.text) == (not hooks)
    assert "batch_to_device" not in vars(fit.strategy)
