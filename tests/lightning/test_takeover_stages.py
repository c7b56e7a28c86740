"""`DevicePrefetcher` over plain DataLoaders: wrapped for one run of a Trainer."""

from __future__ import annotations

import functools
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_async_data import AsyncDataModule, DevicePrefetcher
from lit_async_data.lightning.compat import pl
from lit_async_data.lightning.takeover import Takeover
from lit_async_data.prefetch.loader import PrefetchedLoader
from lit_async_data.testing import ArraySource

# Of machines with more than two cores.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loader(count=12, **options):
    return DataLoader(TensorDataset(torch.arange(float(count))[:, None]), batch_size=4, **options)


class Recording(pl.LightningModule):
    """Records the samples of each stage, and the type of its loader."""

    def __init__(self, stages=("fit", "val", "test", "predict")):
        super().__init__()
        self.layer, self.automatic_optimization = torch.nn.Linear(1, 1), False
        self.seen, self.kinds = {stage: [] for stage in stages}, {}

    def _see(self, stage, batch, loaders):
        self.seen[stage].append(batch[0].flatten().tolist())
        self.kinds[stage] = type(loaders).__name__

    def training_step(self, batch, _):
        self._see("fit", batch, self.trainer.train_dataloader)

    def validation_step(self, batch, _):
        self._see("val", batch, self.trainer.val_dataloaders)

    def test_step(self, batch, _):  # noqa: PT019  # a step of a module
        self._see("test", batch, self.trainer.test_dataloaders)

    def predict_step(self, batch, _):
        self._see("predict", batch, self.trainer.predict_dataloaders)
        return batch[0]

    def train_dataloader(self):
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


ROWS = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]


@pytest.mark.parametrize("depth", [0, 2])
def test_every_stage_reads_through_the_wrapper_and_nothing_stays_behind(depth):
    model, callback = Recording(), DevicePrefetcher(depth)
    trainer = pl.Trainer(callbacks=[callback], num_sanity_val_steps=1, **QUIET)
    before = trainer.strategy.process_dataloader
    trainer.fit(model)
    assert model.seen["fit"] == 2 * ROWS
    assert model.seen["val"] == ROWS[:1] + 2 * ROWS
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    assert [batch.flatten().tolist() for batch in trainer.predict(model)] == ROWS
    assert model.seen["test"] == model.seen["predict"] == ROWS
    assert set(model.kinds.values()) == {"PrefetchedLoader"}
    assert trainer.strategy.process_dataloader == before
    assert "process_dataloader" not in vars(trainer.strategy)
    assert callback.waited.steps == 6


def test_what_somebody_else_has_composed_is_kept():
    trainer, takeover = pl.Trainer(**QUIET), Takeover()
    strategy, asked = trainer.strategy, []

    def theirs(dataloader):
        asked.append(dataloader)
        return dataloader

    strategy.process_dataloader = theirs
    takeover.attach(trainer, 2)
    given = loader()
    assert isinstance(strategy.process_dataloader(given), PrefetchedLoader)
    assert asked == [given]
    takeover.detach()
    assert strategy.process_dataloader is theirs
    takeover.attach(trainer, 2)
    ours = strategy.process_dataloader
    strategy.process_dataloader = over = functools.partial(ours)
    takeover.detach()  # composed since: it is not ours to take away
    assert strategy.process_dataloader is over


def test_what_is_no_dataloader_is_left_as_it_is():
    trainer, takeover = pl.Trainer(**QUIET), Takeover()
    takeover.attach(trainer, 2)
    batches = [torch.zeros(1)]
    assert trainer.strategy.process_dataloader(batches) is batches
    takeover.detach()


def test_a_combined_loader_that_the_user_keeps_can_be_fitted_twice():
    combined = pl.utilities.CombinedLoader({"a": loader(), "b": loader()}, "min_size")
    seen = []

    class Both(Recording):
        def training_step(self, batch, _):
            seen.append({key: value[0].flatten().tolist() for key, value in batch.items()})

    for _ in range(2):
        trainer = pl.Trainer(callbacks=[DevicePrefetcher()], **(QUIET | {"max_epochs": 1, "limit_val_batches": 0}))
        trainer.fit(Both(), combined)
        assert all(isinstance(each, PrefetchedLoader) for each in combined.flattened)
        assert all(isinstance(each.loader, DataLoader) for each in combined.flattened)
    assert seen == 2 * [{"a": row, "b": row} for row in ROWS]


def test_after_an_error_the_strategy_is_as_it_was_and_threads_have_ended():
    class Failing(Recording):
        def training_step(self, batch, number):
            super().training_step(batch, number)
            if number == 1:
                raise ZeroDivisionError

    model = Failing()
    trainer = pl.Trainer(callbacks=[DevicePrefetcher()], num_sanity_val_steps=0, **QUIET)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader(num_workers=1))
    assert model.seen["fit"] == ROWS[:2]
    assert "process_dataloader" not in vars(trainer.strategy)


@pytest.fixture
def signals_as_before():
    """Restores the signal handlers: after a Ctrl-C Lightning leaves SIGINT ignored."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def of_ours():
    numbers = ArraySource({"x": np.arange(12.0, dtype=np.float32)[:, None]})
    fields = {"batch_size": 4, "shuffle": False}
    return AsyncDataModule(train=numbers, loader=fields, device_transform=lambda batch: [batch["x"]])


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("made", [lambda: loader(num_workers=1), of_ours], ids=["DataLoader", "AsyncDataModule"])
def test_a_signal_ends_the_run_and_everything_that_was_started(made, number, tmp_path):
    """Leftover threads, processes and files fail the test by themselves; the loader keeps its state."""

    class Signalled(Recording):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch, step):
            super().training_step(batch, step)
            if step == 1:
                os.kill(os.getpid(), number)
            return self.layer(batch[0]).mean()

    model = Signalled()
    kept = pl.callbacks.ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = pl.Trainer(
        callbacks=[DevicePrefetcher(), kept], num_sanity_val_steps=0, **(QUIET | {"enable_checkpointing": True})
    )
    data = {"datamodule": given} if isinstance(given := made(), AsyncDataModule) else {"train_dataloaders": given}
    with pytest.raises(SystemExit):
        trainer.fit(model, **data)
    assert model.seen["fit"] == ROWS[:2]
    assert "process_dataloader" not in vars(trainer.strategy)
    (checkpoint,) = tmp_path.iterdir()
    progress = torch.load(checkpoint)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert progress["ready"] == 2
