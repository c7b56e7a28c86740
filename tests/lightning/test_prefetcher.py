"""`DevicePrefetcher` in a real Trainer: precision, the user's batch hooks, reading ahead, and metrics."""

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import types

import numpy as np
import pytest
import torch
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
    Run,
    Watching,
    datamodule,
    on_device,
    pl,
    plan,
    readers,
    trainer,
)
from torch.utils.data import DataLoader, IterableDataset

import lit_async_data as lad
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.lightning import display
from lit_async_data.lightning.prefetcher import Takeover
from lit_async_data.testing import ArraySource

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:.*(have no `val_dataloader`|not have many workers)")]


def overriding(*hooks):
    """A module or DataModule with these hooks, each of which records its calls."""

    def hook(name):
        def called(self, batch, *rest):
            self.hooked.append(name)
            return getattr(super(made, self), name)(batch, *rest)

        return called

    made = type("Own", (Recorder,), {name: hook(name) for name in hooks} | {"hooked": []})
    return made()


@pytest.mark.parametrize(
    ("hooks", "device"),
    [
        ([], "cuda"),
        (["on_after_batch_transfer"], "cuda"),
        (["transfer_batch_to_device"], "cpu"),
        (["on_before_batch_transfer", "on_after_batch_transfer"], "cpu"),
    ],
)
def test_where_a_user_overrides_the_transfer_batches_stay_on_the_host_and_that_is_said(streams, hooks, device, caplog):
    caplog.set_level("INFO")
    model = overriding(*hooks)
    with on_device() as loader:
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(model, loader)
        assert loader.device.type == device
    assert model.seen["train"] == [plan(0), plan(1)]
    assert caplog.text.count("is your own hook: DevicePrefetcher prefetches into host memory only") == (device == "cpu")
    assert [call for call in streams.calls if call[0] == "copy"] == [] or device == "cuda"
    if device == "cpu":
        assert f"Own.{hooks[0]} is your own hook" in caplog.text
        assert len(model.hooked) == len(hooks) * 2 * len(STORED)


def test_a_datamodule_that_overrides_the_transfer_is_found_too(streams, caplog):
    class Own(lad.AsyncDataModule):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

        def train_dataloader(self):
            return loader

    caplog.set_level("INFO")
    with on_device() as loader:
        dm = Own(train=CountingSource(), loader={"batch_size": BATCH})
        trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=dm)
        assert loader.device.type == "cpu"
    assert "Own.transfer_batch_to_device is your own hook" in caplog.text


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


def test_reading_ahead_again_changes_nothing(streams):
    with on_device(Gate(after=3)) as loader:
        loader._prefetch(copy=False)
        assert loader.source.read.wait(60)
        loader._prefetch(copy=False)
        assert next(loader)["index"].tolist() == plan(0)[0]
        loader._prefetch(copy=False)  # the next one is on its way to the device
        assert [next(loader)["index"].tolist() for _ in range(5)] == plan(0)[1:]
        reads = list(loader.source.reads)
        assert reads == [*plan(0), *plan(1)][: len(reads)]


class Staged(Recorder):
    def see(self, stage, batch, number):
        self.seen[stage].append(batch)


def bytes_of(samples=14):
    x = np.repeat(np.arange(samples, dtype="u1")[:, None], 2, axis=1)
    return ArraySource({"x": x, "index": np.arange(samples)})


@pytest.mark.parametrize(
    ("depth", "precision", "dtype"),
    [(None, "bf16-true", torch.bfloat16), (2, "32-true", torch.float32), (0, "64-true", torch.float64)],
)
def test_bytes_become_floats_before_the_step(depth, precision, dtype):
    transform = {"train": lad.ToFloat("x"), "eval": lad.Normalize(0, 1, scale="type", fields="x")}
    dm = lad.AsyncDataModule(train=bytes_of(), val=bytes_of(), loader={"batch_size": 4}, device_transform=transform)
    callbacks = [] if depth is None else [lad.DevicePrefetcher(depth)]
    model = Staged()
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


@pytest.mark.parametrize(("accumulate", "steps"), [(1, range(12)), (2, range(6))])
def test_metrics_of_read_ahead_batches_are_logged_once_per_step_however_many_batches_it_takes(accumulate, steps):
    logger, options = Recording(), {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    fit = trainer(lad.DevicePrefetcher(), logger=logger, log_every_n_steps=1, **options)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert set(fit.callback_metrics) == METRICS
    assert [step for step, row in logger.rows if set(row) == METRICS] == [*steps]
    for _, row in logger.rows:
        assert 0 <= row["data/queue_fill"] <= QUEUE + 1
        assert row["data/wait_ms"] >= 0 < row["data/read_mb_s"]


def test_a_trainer_that_never_logs_is_served_too():
    callback = lad.DevicePrefetcher()
    trainer(callback, log_every_n_steps=0).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert callback.waited.steps == 6


BATCHES = [[0, 1], [2, 3], [4, 5]]


def numbers(**options):
    return DataLoader(range(6), batch_size=2, **options)


class Model(Learning):
    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()


class Everywhere(Model):
    def __init__(self):
        super().__init__()
        self.kinds = {}

    def training_step(self, batch, number):
        self.kinds["train"] = type(self.trainer.train_dataloader)
        return super().training_step(batch, number)

    def validation_step(self, batch, number, dataloader_idx=0):
        self.kinds["val"] = type(self.trainer.val_dataloaders)

    def test_step(self, batch, number):
        self.kinds["test"] = type(self.trainer.test_dataloaders)

    def predict_step(self, batch, number):
        self.kinds["predict"] = type(self.trainer.predict_dataloaders)
        return batch


def test_every_stage_reads_through_the_wrapper_and_nothing_stays_behind():
    model, callback = Everywhere(), lad.DevicePrefetcher()
    fit = trainer(callback, max_epochs=2)
    before = fit.strategy.process_dataloader
    fit.fit(model, numbers(), numbers())
    fit.test(model, numbers(), verbose=False)
    fit.predict(model, numbers())
    assert model.seen == BATCHES * 2
    assert model.kinds == dict.fromkeys(["train", "val", "test", "predict"], PrefetchedLoader)
    assert fit.strategy.process_dataloader == before
    assert "process_dataloader" not in vars(fit.strategy)
    assert callback.waited.steps == 6
    assert readers() == []


def test_after_a_run_with_several_callbacks_the_strategy_wraps_nothing():
    fit, loader = trainer(lad.DevicePrefetcher(), lad.DevicePrefetcher()), numbers()
    fit.fit(Model(), loader)
    assert fit.strategy.process_dataloader(loader) is loader
    assert readers() == []


class Copies(pl.Callback):
    """Copies the Trainer in mid-epoch, as Lightning allows without our callback. ``seen`` is not part of a pickle."""

    def __init__(self, make):
        self.make = make
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(self.make(trainer))

    def __getstate__(self):
        return {}


@pytest.mark.parametrize("make", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_trainer_can_be_copied_while_it_trains(make):
    copies = Copies(make)
    trainer(lad.DevicePrefetcher(), copies).fit(Model(), numbers())
    assert len(copies.seen) == 3
    strategy, loader = copies.seen[0].strategy, numbers()
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
    class Fails(Model):
        def training_step(self, batch, number):
            if fails and number:
                raise RuntimeError("mine")
            return super().training_step(batch, number)

    loader = numbers(num_workers=1, persistent_workers=True)
    fit = trainer(lad.DevicePrefetcher(), max_epochs=2)
    if fails:
        with pytest.raises(RuntimeError, match="mine"):
            fit.fit(Fails(), loader)
    else:
        fit.fit(Fails(), loader)
    assert multiprocessing.active_children() == []
    assert loader._iterator is None


class Sharding:
    root_device = torch.device("cpu")

    def process_dataloader(self, loader):
        return numbers() if isinstance(loader, DataLoader) else loader


def run_of(strategy, module=None):
    return Run(strategy=strategy, lightning_module=module or Model(), datamodule=None, training=False)


def test_the_loader_that_the_strategy_returns_is_wrapped_while_the_run_goes_on():
    strategy, takeover, given = Sharding(), Takeover(), numbers()
    strategy.process_dataloader = own = Sharding().process_dataloader  # in place of that of its class
    takeover.attach(run_of(strategy), 2)
    kept, wrapped = strategy.process_dataloader, strategy.process_dataloader(given)
    assert (type(wrapped), wrapped.loader is given) == (PrefetchedLoader, False)
    batches = [torch.zeros(1)]
    assert kept(batches) is batches  # which is no DataLoader
    takeover.detach()
    assert type(kept(given)) is type(strategy.process_dataloader(given)) is DataLoader
    assert strategy.process_dataloader is own


def test_a_loader_that_does_not_stop_leaves_no_other_open(monkeypatch):
    strategy, takeover = Sharding(), Takeover()
    takeover.attach(run_of(strategy), 2)
    loaders = [strategy.process_dataloader(numbers()) for _ in range(3)]
    for loader in loaders:
        next(loader)
    stop = PrefetchedLoader.stop

    def failing(loader):
        stop(loader)
        raise RuntimeError("found")

    monkeypatch.setattr(PrefetchedLoader, "stop", failing)
    with pytest.raises(RuntimeError, match="found"):
        takeover.detach()
    assert [loader.fill for loader in loaders] == ["no queue"] * 3


class Moving(Model):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


@pytest.mark.parametrize(("made", "device"), [(Model, "cuda:1"), (Moving, "cpu")])
def test_the_device_is_right_from_the_first_batch(monkeypatch, made, device):
    """Lightning takes the first batch of a loader without length before any hook of training is called."""
    monkeypatch.setattr("lit_async_data.engine.device.streams.checked_device", torch.device)
    strategy, takeover = Sharding(), Takeover()
    strategy.root_device = torch.device("cuda:1")
    takeover.attach(run_of(strategy, made()), 2)
    loader = strategy.process_dataloader(numbers())
    assert str(loader.device) == device
    takeover.detach()


@pytest.mark.parametrize("mode", ["sequential", "max_size"])
def test_all_validation_loaders_whose_turn_has_come_are_copied_ahead(monkeypatch, mode):
    asked = []

    class Evaluated(Model):
        def validation_step(self, batch, number, dataloader_idx=0):
            asked.append([])

    def prefetch(loader, *, copy=True):
        if asked:
            asked[-1].append(names[id(loader)])

    names, build = {}, Takeover.wrap

    def named(takeover, loader, *given):
        made = build(takeover, loader, *given)
        names[id(made)] = len(names)
        return made

    monkeypatch.setattr(Takeover, "wrap", named)
    monkeypatch.setattr(PrefetchedLoader, "_prefetch", prefetch)
    both = pl.utilities.CombinedLoader([numbers(), numbers()], mode)
    trainer(lad.DevicePrefetcher()).validate(Evaluated(), both, verbose=False)
    # What was asked for at the start of each batch but the first.
    assert asked[:-1] == ([[0, 1]] * 2 if mode == "max_size" else [[0], [0], [0, 1], [0, 1], [0, 1]])


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


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_training_and_evaluation_take_mixtures_that_may_repeat_there():
    model, steps = Learning(), []
    model.training_step = model.validation_step = lambda *_: steps.append(1)
    one = ArraySource({"x": np.zeros((8, 1), np.float32)})
    whole = lad.AsyncLoader(lad.MixtureSource({"a": (one, 1), "b": (one, 1)}), {"batch_size": BATCH})
    trainer(lad.DevicePrefetcher()).fit(model, repeating(), whole)
    assert len(steps) == 8


class Endless(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.zeros(1), "index": number} for number in range(4 * 24)])


def steps_of(kind):
    if kind == "no length":
        return DataLoader(Endless(), batch_size=4)
    return lad.AsyncLoader(ArraySource({"x": np.zeros((4 * 24, 1), "f4")}), {"batch_size": 4, "workers": 0})


@pytest.mark.parametrize("kind", ["no length", "loader", "datamodule"])
@pytest.mark.parametrize(
    "hooks", [["transfer_batch_to_device"], ["on_before_batch_transfer", "on_after_batch_transfer"], []]
)
def test_the_time_of_the_users_transfer_hooks_is_named_and_no_other_time(clock, caplog, monkeypatch, kind, hooks):
    caplog.set_level("INFO")
    for owner in (pl.LightningModule, pl.LightningDataModule) if not hooks else ():  # Lightning's own, not the user's

        def slow(self, batch, *rest, own=owner.transfer_batch_to_device):
            clock.s += 0.25
            return own(self, batch, *rest)

        monkeypatch.setattr(owner, "transfer_batch_to_device", slow)

    def hook(name):
        def called(self, batch, *rest):
            clock.s += 0.25
            return getattr(super(made, self), name)(batch, *rest)

        return called

    class Slow(Learning):
        def training_step(self, batch, batch_idx):
            clock.s += 0.5
            return self.layer(batch["x"]).sum()

        validation_step = None

    class Busy(pl.Callback):
        def on_train_batch_start(self, *_):
            clock.s += 0.5

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return steps_of(kind)

    base = Data if kind == "datamodule" else Slow
    made = type("Made", (base,), {name: hook(name) for name in hooks})
    callback = lad.DevicePrefetcher()
    fit = trainer(Busy(), callback)
    strategy = fit.strategy
    fit.fit(*((Slow(), made()) if kind == "datamodule" else (made(), steps_of(kind))))
    spent = 0.25 * len(hooks)
    share = 100 * 24 * spent / callback.waited.total_s
    total = f"{callback.waited.total_s:.1f} s"
    named = " and ".join(f"Made.{name}" for name in hooks)
    said = f"epoch 0: training spent {share:.1f} % of {total} in {named}"
    assert (said in caplog.text) == ("training spent" in caplog.text) == bool(hooks)
    assert ("data keep up" in caplog.text) == (not hooks)
    assert "batch_to_device" not in vars(strategy)


def test_the_time_of_transfer_hooks_in_validation_is_named_too(clock, caplog):
    caplog.set_level("INFO")

    class Slow(Learning):
        def validation_step(self, batch, batch_idx):
            clock.s += 0.5

        def on_after_batch_transfer(self, batch, dataloader_idx):
            clock.s += 0.25
            return batch

    trainer(lad.DevicePrefetcher()).validate(Slow(), steps_of("loader"), verbose=False)
    assert "validation spent 33.3 % of 18.0 s in Slow.on_after_batch_transfer; " in caplog.text
