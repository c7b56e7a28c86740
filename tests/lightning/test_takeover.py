"""Users' DataLoaders, wrapped by the callback for one run: who reads them, and what is left afterwards."""

import copy
import multiprocessing
import os
import pickle
import signal
import types
import warnings

import numpy as np
import pytest
import torch
from support.lightning.trainer import Learning, pl, readers, trainer
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.engine.stats import QueueFill
from lit_async_data.lightning.takeover import Takeover
from lit_async_data.testing import ArraySource

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]
BATCHES = [[0, 1], [2, 3], [4, 5]]


def numbers(**options):
    return DataLoader(range(6), batch_size=2, **options)


class Model(Learning):
    """Records the batches of training."""

    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()


class Everywhere(Model):
    """Records the type of loader of each stage."""

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
    """A strategy that gives a DataLoader its own sampler."""

    root_device = torch.device("cpu")

    def process_dataloader(self, loader):
        return numbers() if isinstance(loader, DataLoader) else loader


class Run(types.SimpleNamespace):
    """A Trainer, which can be weakly referred to."""


def run_of(strategy, module=None):
    state = types.SimpleNamespace(stage=None)
    return Run(strategy=strategy, lightning_module=module or Model(), datamodule=None, state=state)


def test_the_loader_that_the_strategy_returns_is_wrapped_while_the_run_goes_on():
    strategy, takeover, given = Sharding(), Takeover(), numbers()
    takeover.attach(run_of(strategy), 2)
    kept, wrapped = strategy.process_dataloader, strategy.process_dataloader(given)
    assert (type(wrapped), wrapped.loader is given) == (PrefetchedLoader, False)
    batches = [torch.zeros(1)]
    assert kept(batches) is batches  # which is no DataLoader
    takeover.detach()
    assert type(kept(given)) is type(strategy.process_dataloader(given)) is DataLoader


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
    assert [loader.fill for loader in loaders] == [QueueFill()] * 3


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
    trainer(lad.DevicePrefetcher()).validate(
        Evaluated(), pl.utilities.CombinedLoader([numbers(), numbers()], mode), verbose=False
    )
    # What was asked for at the start of each batch but the first.
    assert asked[:-1] == ([[0, 1]] * 2 if mode == "max_size" else [[0], [0], [0, 1], [0, 1], [0, 1]])


def of_ours():
    loader = {"batch_size": 2, "shuffle": False}
    return lad.AsyncDataModule(
        train=ArraySource({"x": np.arange(6)}), loader=loader, device_transform=lambda batch: batch["x"]
    )


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


# -- what Lightning says of workers ------------------------------------------------------------------------------------


def said(options, reload, *callbacks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(*callbacks, max_epochs=1, reload_dataloaders_every_n_epochs=reload)
        made.fit(Everywhere(), numbers(**options), numbers())
    return [str(each.message) for each in caught if "dataloader" in str(each.message).lower()]


@pytest.mark.processes
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("options", "start", "reload", "found"),
    [
        ({"num_workers": 1}, "spawn", 0, "persistent_workers=True` in 'train_dataloader'"),
        ({"num_workers": 2}, "spawn", 0, "persistent_workers=True` in 'train_dataloader'"),
        ({"num_workers": 1, "pin_memory": True, "persistent_workers": True}, "fork", 1, "can lead to instability"),
        ({"num_workers": 1}, "fork", 1, None),
        ({}, "spawn", 1, None),
    ],
)
def test_lightning_says_of_workers_what_it_says_without_the_callback_but_for_their_number(
    monkeypatch, options, start, reload, found
):
    connector = f"{pl.__name__}.trainer.connectors.data_connector"
    monkeypatch.setattr(f"{connector}.suggested_max_num_workers", lambda _: 4)
    monkeypatch.setattr(f"{connector}.mp.get_start_method", lambda *_: start)
    wanted = [line for line in said(options, reload) if "does not have many workers" not in line]
    lines = said(options, reload, lad.DevicePrefetcher())
    assert sorted(lines) == sorted(wanted)
    assert [line for line in lines if found and found in line] == [line for line in lines if found]
    assert bool(lines) is bool(found)


def test_a_lightning_without_that_check_is_served_all_the_same(monkeypatch):
    monkeypatch.delattr(f"{pl.__name__}.trainer.connectors.data_connector._worker_check")
    run = run_of(Sharding())
    run.state.stage = "train"
    assert isinstance(Takeover().wrap(numbers(num_workers=1), run, 2), PrefetchedLoader)
