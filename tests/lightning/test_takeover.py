"""Users' DataLoaders, wrapped by the callback: their state after a run, and the device of their batches."""

from __future__ import annotations

import functools
import multiprocessing
import types
import warnings

import pytest
import torch
from support.lightning.trainer import CountingSource, Recorder, datamodule, pl, readers, trainer
from torch.utils.data import DataLoader, IterableDataset

import lit_async_data as lad
from lit_async_data.errors import TransferError
from lit_async_data.host.stats import QueueFill
from lit_async_data.lightning.takeover import Takeover
from lit_async_data.prefetch.loader import PrefetchedLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`IterableDataset` has `__len__` defined:UserWarning"),
]
BATCHES = [[0, 1], [2, 3], [4, 5]]


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def numbers(**options):
    return DataLoader(range(6), batch_size=2, **options)


# -- what is left ------------------------------------------------------------------------------------------------------


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


def test_the_strategy_is_as_it_was_also_after_several_callbacks():
    fit = trainer(lad.DevicePrefetcher(), lad.DevicePrefetcher())
    model, loader = Model(), numbers()
    for _ in range(2):
        fit.fit_loop.epoch_progress.reset()
        fit.fit(model, loader)
    assert fit.strategy.process_dataloader(loader) is loader
    assert readers() == []


class Keeping:
    """A strategy whose method other code wraps, keeping the original."""

    root_device = torch.device("cpu")

    def process_dataloader(self, loader):
        return loader


class Run(types.SimpleNamespace):
    """A Trainer, which can be weakly referred to."""


def run_of(strategy, module=None):
    state = types.SimpleNamespace(stage=None)
    return Run(strategy=strategy, lightning_module=module or Model(), datamodule=None, state=state)


def test_a_method_that_others_keep_wraps_nothing_once_the_run_is_over():
    strategy, takeover = Keeping(), Takeover()
    takeover.attach(run_of(strategy), 2)
    kept = strategy.process_dataloader
    strategy.process_dataloader = functools.partial(kept)
    assert isinstance(strategy.process_dataloader(numbers()), PrefetchedLoader)
    takeover.detach()
    assert isinstance(strategy.process_dataloader(numbers()), DataLoader)


def test_an_error_of_copy_verification_leaves_no_other_loader_open(monkeypatch):
    strategy, takeover = Keeping(), Takeover()
    takeover.attach(run_of(strategy), 2)
    loaders = [strategy.process_dataloader(numbers()) for _ in range(3)]
    for loader in loaders:
        next(loader)
    stop = PrefetchedLoader.stop

    def failing(loader):
        stop(loader)
        raise TransferError("found", stage="copy")

    monkeypatch.setattr(PrefetchedLoader, "stop", failing)
    with pytest.raises(TransferError):
        takeover.detach()
    assert [loader.fill for loader in loaders] == [QueueFill()] * 3


# -- what copy verification finds when something else has gone wrong ---------------------------------------------------


def test_what_is_found_after_an_error_does_not_take_its_place(caplog):
    """Raising would keep later callbacks from writing checkpoints."""

    def spoil_and_fail(stage, batch):
        batch["x"].numpy()[...] = 7
        raise KeyError("mine")

    class Watching(pl.callbacks.Checkpoint):
        called = False

        def on_exception(self, *_):
            self.called = True

    watching = Watching()
    with pytest.raises(KeyError, match="mine"):
        trainer(lad.DevicePrefetcher(verify_copies=5), watching, enable_checkpointing=True).fit(
            Recorder(spoil_and_fail), datamodule=datamodule(train=CountingSource())
        )
    assert watching.called
    assert "x of batch 0 of epoch 0 changed" in caplog.text
    assert readers() == []


def test_the_callback_says_what_it_finds_after_an_error(monkeypatch, caplog):
    def detach(*_, **__):
        raise TransferError("found", stage="copy")

    callback = lad.DevicePrefetcher()
    monkeypatch.setattr(Takeover, "detach", detach)
    callback.on_exception(None, None, KeyError())
    assert "found" in caplog.text
    with pytest.raises(TransferError):
        callback.teardown(None, None, "fit")


# -- where batches go --------------------------------------------------------------------------------------------------


class Moving(Model):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


@pytest.mark.parametrize(("made", "device"), [(Model, "cuda:1"), (Moving, "cpu")])
def test_the_device_is_right_from_the_first_batch(monkeypatch, made, device):
    """Lightning takes the first batch of a loader without length before any hook of training is called."""
    monkeypatch.setattr("lit_async_data.device.streams.checked_device", torch.device)
    strategy, takeover = Keeping(), Takeover()
    strategy.root_device = torch.device("cuda:1")
    takeover.attach(run_of(strategy, made()), 2, verify_copies=3)
    loader = strategy.process_dataloader(numbers())
    assert str(loader.device) == device
    assert loader.verify_copies == 3
    takeover.detach()


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_a_loader_without_length_is_served():
    model = Model()
    trainer(lad.DevicePrefetcher(), max_epochs=2).fit(model, DataLoader(Unsized(), batch_size=2))
    assert model.seen == BATCHES * 2


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


# -- what Lightning says -----------------------------------------------------------------------------------------------


class Everywhere(Model):
    def validation_step(self, batch, number, dataloader_idx=0): ...
    def test_step(self, batch, number): ...
    def predict_step(self, batch, number): ...


def said(run, *callbacks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(trainer(*callbacks), Everywhere())
    return [str(each.message) for each in caught if "DataLoader" in str(each.message)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda made, model: made.fit(model, numbers(), numbers()), ["train_dataloader", "val_dataloader"]),
        (lambda made, model: made.validate(model, [numbers(), numbers()], verbose=False), ["val_dataloader"] * 2),
        (lambda made, model: made.test(model, numbers(), verbose=False), ["test_dataloader"]),
        (lambda made, model: made.predict(model, numbers()), ["predict_dataloader"]),
    ],
)
def test_lightning_says_of_a_dataloader_what_it_says_without_the_callback(monkeypatch, run, names):
    monkeypatch.setattr(f"{pl.__name__}.trainer.connectors.data_connector.suggested_max_num_workers", lambda _: 4)
    wanted = said(run)
    assert sorted(line.split("'")[1] for line in wanted if "many workers" in line) == names
    assert sorted(said(run, lad.DevicePrefetcher())) == sorted(wanted)


def test_a_lightning_without_that_check_is_served_all_the_same(monkeypatch):
    monkeypatch.delattr(f"{pl.__name__}.trainer.connectors.data_connector._worker_check")
    strategy, takeover = Keeping(), Takeover()
    run = run_of(strategy)
    run.state.stage = "train"
    takeover.attach(run, 2)
    assert isinstance(strategy.process_dataloader(numbers()), PrefetchedLoader)
    takeover.detach()
