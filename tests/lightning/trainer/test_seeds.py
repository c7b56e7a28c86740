"""The order under a Trainer: by which shuffle and seed, of whoever builds the loader, with the callback and without."""

import logging

import numpy as np
import pytest
import torch
from support.lightning.trainer import (
    BATCH,
    NO_STAGES,
    SAMPLES,
    STORED,
    Batches,
    CountingSource,
    Recorder,
    Save,
    lad,
    pl,
    plan,
    trainer,
    with_and_without,
)

from lit_async_data.errors import ResumeError

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:.*(has shuffling enabled|have no `val_dataloader`)")]

OPTIONS = {"batch_size": BATCH, "return_indices": True}


def given(kind, **options):
    if kind == "datamodule":
        return {"datamodule": lad.AsyncDataModule(train=CountingSource(width=1), loader=OPTIONS | options)}
    return {"train_dataloaders": lad.AsyncLoader(CountingSource(width=1), OPTIONS | {"shuffle": True} | options)}


class Samples(Batches):
    validation_step = Batches.training_step


class Counting(Samples):
    """Has Lightning build the loader before it restores the place."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def trained(model, number, loaders, *callbacks, **options):
    if number is not None:
        pl.seed_everything(number, verbose=False)
    ckpt_path = options.pop("ckpt_path", None)
    trainer(*callbacks, **options).fit(model, **loaders, ckpt_path=ckpt_path)
    return model.seen


@with_and_without
@pytest.mark.parametrize("shuffle", [None, False, True, "auto", "global"])
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_a_loader_without_a_datamodule_is_evaluated_in_the_order_of_its_options(callbacks, stage, shuffle):
    model = Recorder()
    with lad.AsyncLoader(CountingSource(width=1), OPTIONS | {"shuffle": shuffle}) as loader:
        getattr(trainer(*callbacks()), stage)(model, loader)
    assert [*model.seen.values()] == [[plan(0) if shuffle else STORED]]


@with_and_without
def test_the_callback_changes_no_random_number_of_an_evaluation(callbacks):
    def drawn(sample, rng):
        return sample | {"index": np.int64(-1 if rng is None else rng.integers(100))}

    def found(**options):
        model, source = Samples(), CountingSource(width=1)
        with lad.AsyncLoader(source, {"batch_size": SAMPLES} | options, sample_transform=drawn) as loader:
            trainer(*callbacks()).validate(model, loader, verbose=False)
        return model.seen[0]

    assert len({*found()}) > 1
    assert {*found(augment=False)} == {-1}


@with_and_without
def test_a_datamodule_shuffles_training_and_what_is_asked_for_by_name(callbacks):
    sources = {stage: CountingSource(width=1) for stage in ("train", "val", "predict")}
    asked = {"val_loader": {"shuffle": True}, "predict_loader": {"shuffle": None}}
    model, dm = Recorder(), lad.AsyncDataModule(**sources, loader=OPTIONS, **asked)
    fit = trainer(*callbacks(), max_epochs=2)
    fit.fit(model, datamodule=dm)
    fit.predict(model, datamodule=dm)
    assert model.seen["train"] == [plan(0), plan(1)]
    assert model.seen["val 0"] == [plan(0), plan(0)]
    assert model.seen["predict 0"] == [STORED]


@with_and_without
@pytest.mark.parametrize("kind", ["datamodule", "bare"])
def test_the_order_goes_by_lightnings_seed_unless_the_options_have_one(callbacks, kind):
    runs = [(None, {}, 0), (1, {}, 1), (2, {}, 2), (2, {"seed": 7}, 7)]
    for number, options, seed in runs:
        assert trained(Samples(), number, given(kind, **options), *callbacks()) == plan(0, seed=seed)


def test_each_fit_with_one_datamodule_takes_the_seed_of_that_time():
    loaders = given("datamodule")
    for seed in (1, 2):
        rebuilt = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
        assert trained(Samples(), seed, loaders, **rebuilt) == plan(0, seed=seed) + plan(1, seed=seed)
        pl.seed_everything(9, verbose=False)
        (again,) = loaders["datamodule"].replay(step=7)
        assert again.ids.tolist() == plan(1, seed=seed)[1]


def test_rank_zero_says_the_seed_of_all_ranks(monkeypatch):
    asked = []

    def of_rank_zero(self, seed, src=0):
        asked.append(seed)
        return 3

    monkeypatch.setattr(pl.strategies.SingleDeviceStrategy, "broadcast", of_rank_zero)
    assert trained(Samples(), 5, given("datamodule")) == plan(0, seed=3)
    assert 5 in asked


@with_and_without
@pytest.mark.parametrize(("kind", "model"), [("datamodule", Samples), ("datamodule", Counting), ("bare", Samples)])
def test_a_resumed_run_keeps_the_seed_of_its_checkpoint(tmp_path, callbacks, kind, model, caplog):
    path = tmp_path / "mid.ckpt"
    caplog.set_level(logging.INFO)
    trained(Samples(), 3, given(kind), *callbacks(), Save(path, 2), max_epochs=2)
    pl.seed_everything(5, verbose=False)
    loaders, resuming = given(kind), {"max_epochs": 3, "ckpt_path": path}
    seen = trained(model(), None, loaders, *callbacks(), **resuming)
    assert seen == plan(1, seed=3)[3:] + plan(2, seed=3)
    assert caplog.text.count("the seed is 3, as in the saved place, and no longer 5") == 1
    with pytest.raises(ResumeError, match="seed: 3 in the checkpoint, 5 now"):
        trained(model(), None, given(kind, seed=5), *callbacks(), **resuming)
    if kind == "datamodule":
        other = given(kind)["datamodule"]
        other.load_state_dict(torch.load(path, weights_only=False)["AsyncDataModule"])
        for dm in (loaders["datamodule"], other):
            assert dm.replay(step=8)[0].ids.tolist() == plan(1, seed=3)[2]


class OfTheFirst(Samples):
    def training_step(self, batch, number):
        return super().training_step(batch[0] if isinstance(batch, list) else batch, number)


class Rebuilt(pl.LightningDataModule):
    """Builds a loader whenever it is asked for one, as users do."""

    def train_dataloader(self):
        return given("bare")["train_dataloaders"]


class SaveAt(pl.Callback):
    def __init__(self, path, hook):
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize("kind", ["datamodule", "bare", "rebuilt", "several"])
def test_a_run_that_resumes_between_epochs_keeps_the_seed_of_its_checkpoint(tmp_path, kind, hook, reload):
    def loaders(seed):
        pl.seed_everything(seed, verbose=False)
        if kind == "several":
            return {"train_dataloaders": [given("bare")["train_dataloaders"] for _ in range(2)]}
        return {"datamodule": Rebuilt()} if kind == "rebuilt" else given(kind)

    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    saving = SaveAt(tmp_path / "between.ckpt", hook)
    whole = trained(OfTheFirst(), None, loaders(3), lad.DevicePrefetcher(), saving, **options)
    assert whole == plan(0, seed=3) + plan(1, seed=3) + plan(2, seed=3)
    rest = trained(OfTheFirst(), None, loaders(5), lad.DevicePrefetcher(), **options, ckpt_path=saving.path)
    assert rest == whole[0 if hook == "on_train_start" else len(plan(0)) :]


def test_a_second_fit_of_a_resumed_trainer_begins_by_its_own_seed(tmp_path):
    saving = SaveAt(tmp_path / "between.ckpt", "on_train_epoch_end")
    trained(OfTheFirst(), 3, given("bare"), lad.DevicePrefetcher(), saving)
    resumed, model = trainer(lad.DevicePrefetcher(), max_epochs=2), OfTheFirst()
    resumed.fit(model, **given("bare"), ckpt_path=saving.path)
    pl.seed_everything(7, verbose=False)
    resumed.fit_loop.max_epochs = 3
    again = given("datamodule")
    resumed.fit(model, **again)
    assert model.seen == plan(1, seed=3) + plan(2, seed=7)
    assert again["datamodule"].replay(step=2 * len(plan(0)))[0].ids.tolist() == plan(2, seed=7)[0]


def test_states_of_another_kind_of_loader_between_epochs_are_no_place(tmp_path):
    class Stateful(torch.utils.data.DataLoader):
        def state_dict(self):
            return {"ahead": 0}

        def load_state_dict(self, state):
            pass

    saving = SaveAt(tmp_path / "other.ckpt", "on_train_epoch_end")
    samples = [CountingSource(width=1)[number] | {"index": number} for number in range(SAMPLES)]
    trained(OfTheFirst(), 3, {"train_dataloaders": Stateful(samples, batch_size=BATCH)}, saving)
    loaders = given("bare", seed=5)
    found = trained(OfTheFirst(), None, loaders, lad.DevicePrefetcher(), max_epochs=2, ckpt_path=saving.path)
    assert found == plan(1, seed=5)
