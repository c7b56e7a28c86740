"""The order under a Trainer: by which shuffle and seed, of whoever builds the loader; and callbacks that iterate over
the Trainer's own loaders, as kNN monitors and image loggers do, change no training."""

import itertools
import logging
import re

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
    datamodule,
    lad,
    pl,
    plan,
    rows,
    trainer,
    with_and_without,
)
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset

from lit_async_data.errors import ResumeError

pytestmark = [
    NO_STAGES,
    pytest.mark.filterwarnings("ignore:.*(not have many workers|has shuffling enabled|have no `val_dataloader`)"),
]
KINDS = ("datamodule", "bare", "DataLoader")
HOOKS = ("train_start", "train_epoch_start", "train_batch_end", "validation_epoch_start", "train_epoch_end")
# Every kind in every hook; stages, and one batch or all, take turns, so that every two of them occur together.
LOOKS = [
    (kind, f"on_{hook}", ("train", "val")[number % 2], (1, 10**6)[number // 2 % 2])
    for number, (hook, kind) in enumerate(itertools.product(HOOKS, KINDS))
]


class Walk(pl.Callback):
    def __init__(self, hook, stage, batches):
        self.stage, self.batches, self.seen = stage, batches, []
        setattr(self, hook, self.walk)

    def walk(self, trainer, *_):
        loaders = getattr(trainer, f"{self.stage}_dataloader" + "s" * (self.stage != "train"))
        for loader in loaders if isinstance(loaders, list) else [loaders]:
            self.seen.append([])
            for batch in loader or ():
                self.seen[-1].append(batch["index"].tolist())
                if len(self.seen[-1]) == self.batches:
                    break


def dataloader(**options):
    samples = [{"x": row, "index": number} for number, row in enumerate(rows())]
    return DataLoader(samples, batch_size=BATCH, **options)


def given(kind):
    """Training and validation loaders, and the batches of each epoch."""
    if kind == "datamodule":
        return {"datamodule": datamodule(train=CountingSource(), val=CountingSource())}, plan
    if kind == "bare":
        options = {"batch_size": BATCH, "return_indices": True}
        made = [lad.AsyncLoader(CountingSource(), options | {"shuffle": shuffle}) for shuffle in (True, False)]
        return {"train_dataloaders": made[0], "val_dataloaders": made[1]}, plan
    return {"train_dataloaders": dataloader(), "val_dataloaders": dataloader()}, lambda _: STORED


@pytest.mark.parametrize(("kind", "hook", "stage", "batches"), LOOKS)
def test_a_look_at_a_loader_changes_no_epoch(kind, hook, stage, batches):
    loaders, wanted = given(kind)
    model, walk = Recorder(), Walk(hook, stage, batches)
    trainer(lad.DevicePrefetcher(), walk, max_epochs=2, val_check_interval=0.5).fit(model, **loaders)
    assert model.seen["train"] == [wanted(epoch) for epoch in range(2)]
    assert model.seen["val 0"] == [STORED] * 4
    for walked in walk.seen:
        samples = [number for batch in walked for number in batch]
        assert sorted(samples) == (sorted(set(samples)) if batches == 1 else list(range(SAMPLES)))[: len(samples)]


@with_and_without
def test_one_loader_serves_training_and_validation(callbacks):
    loader = lad.AsyncLoader(CountingSource(), {"batch_size": BATCH, "shuffle": True, "return_indices": True})
    model = Recorder()
    trainer(*callbacks(), max_epochs=2, num_sanity_val_steps=1, val_check_interval=0.5).fit(model, loader, loader)
    assert model.seen["train"] == [plan(0), plan(1)]
    for batches in model.seen["val 0"]:
        assert sorted(itertools.chain(*batches)) == list(range(SAMPLES))


def test_a_checkpoint_after_looks_resumes_exactly(tmp_path):
    path, model, looks = tmp_path / "mid.ckpt", Batches(), Walk("on_train_batch_end", "train", 1)
    data = datamodule(train=CountingSource())
    trainer(lad.DevicePrefetcher(), looks, Save(path, 2), max_epochs=2).fit(Batches(), datamodule=data)
    data = datamodule(train=CountingSource())
    trainer(lad.DevicePrefetcher(), max_epochs=3).fit(model, datamodule=data, ckpt_path=path)
    assert model.seen == plan(1)[3:] + plan(2)


@pytest.mark.parametrize(("workers", "seeded"), [(0, True), (1, False)])
def test_a_shuffled_dataloader_goes_on_in_the_middle_of_an_epoch(tmp_path, workers, seeded):
    def loader():
        generator = torch.Generator().manual_seed(5) if seeded else None
        return dataloader(shuffle=True, num_workers=workers, generator=generator)

    whole, rest, again = Batches(), Batches(), Batches()
    path, later = tmp_path / "mid.ckpt", tmp_path / "later.ckpt"
    trainer(lad.DevicePrefetcher(), Save(path, 1), max_epochs=3).fit(whole, loader())
    trainer(lad.DevicePrefetcher(), Save(later, 3), max_epochs=3).fit(rest, loader(), ckpt_path=path)
    trainer(lad.DevicePrefetcher(), max_epochs=2).fit(again, loader(), ckpt_path=later)
    assert rest.seen[:4] == whole.seen[8:12]
    assert again.seen == whole.seen[10:12]
    if seeded:
        assert rest.seen[4:] == whole.seen[12:]


class OwnSampler(RandomSampler): ...


def test_where_the_order_is_somebody_elses_it_is_said_what_will_happen(tmp_path, caplog):
    own, path = dataloader(sampler=OwnSampler(range(SAMPLES))), tmp_path / "mid.ckpt"
    trainer(lad.DevicePrefetcher(), Save(path, 1), max_epochs=2).fit(Batches(), own)
    trainer(lad.DevicePrefetcher(), max_epochs=2).fit(Batches(), own, ckpt_path=path)
    assert re.search("batch 2 of 6 of epoch 1, but .* OwnSampler is not one of", caplog.text)


@pytest.mark.parametrize(("batch_size", "more", "said"), [(2, 0, "batch_size: 4 in"), (BATCH, 1, "samples: 22 in")])
def test_a_dataloader_goes_on_with_the_same_batches_only(tmp_path, batch_size, more, said):
    path = tmp_path / "mid.ckpt"
    trainer(lad.DevicePrefetcher(), Save(path, 1), max_epochs=2).fit(Batches(), dataloader())
    dataset = dataloader().dataset
    other = DataLoader(ConcatDataset([dataset, Subset(dataset, range(more))]), batch_size=batch_size)
    with pytest.raises(lad.ResumeError, match=said):
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(Batches(), other, ckpt_path=path)


@pytest.mark.parametrize(
    ("kind", "end", "mid"),
    [
        ("datamodule", "2, sample 0 of 22", "1, sample 8 of 22"),
        ("DataLoader", "2, batch 0 of 6", "1, batch 2 of 6"),
    ],
)
def test_one_line_says_where_a_run_goes_on(tmp_path, caplog, kind, end, mid):
    first = trainer(lad.DevicePrefetcher(), Save(tmp_path / "mid", 1), max_epochs=2)
    first.fit(Samples(), **given(kind)[0])
    first.save_checkpoint(tmp_path / "end")
    for name, place in (("end", end), ("mid", mid)):
        caplog.clear()
        trainer(lad.DevicePrefetcher(), max_epochs=3).fit(Samples(), **given(kind)[0], ckpt_path=tmp_path / name)
        assert [each for each in caplog.messages if "resumed" in each] == [f"resumed at epoch {place}"]


OPTIONS = {"batch_size": BATCH, "return_indices": True}


def shuffled(kind, **options):
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
        assert trained(Samples(), number, shuffled(kind, **options), *callbacks()) == plan(0, seed=seed)


def test_each_fit_with_one_datamodule_takes_the_seed_of_that_time():
    loaders = shuffled("datamodule")
    for seed in (1, 2):
        rebuilt = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
        assert trained(Samples(), seed, loaders, **rebuilt) == plan(0, seed=seed) + plan(1, seed=seed)
        pl.seed_everything(9, verbose=False)
        (again,) = loaders["datamodule"].replay(step=7)
        assert again.ids.tolist() == plan(1, seed=seed)[1]


def test_rank_zero_says_the_seed_of_all_ranks(monkeypatch):
    asked = []
    monkeypatch.setattr(
        pl.strategies.SingleDeviceStrategy, "broadcast", lambda strategy, seed, src=0: asked.append(seed) or 3
    )
    assert trained(Samples(), 5, shuffled("datamodule")) == plan(0, seed=3)
    assert 5 in asked


@with_and_without
@pytest.mark.parametrize(("kind", "model"), [("datamodule", Samples), ("datamodule", Counting), ("bare", Samples)])
def test_a_resumed_run_keeps_the_seed_of_its_checkpoint(tmp_path, callbacks, kind, model, caplog):
    path = tmp_path / "mid.ckpt"
    caplog.set_level(logging.INFO)
    trained(Samples(), 3, shuffled(kind), *callbacks(), Save(path, 2), max_epochs=2)
    pl.seed_everything(5, verbose=False)
    loaders, resuming = shuffled(kind), {"max_epochs": 3, "ckpt_path": path}
    seen = trained(model(), None, loaders, *callbacks(), **resuming)
    assert seen == plan(1, seed=3)[3:] + plan(2, seed=3)
    assert caplog.text.count("the seed is 3, as in the saved place, and no longer 5") == 1
    with pytest.raises(ResumeError, match="seed: 3 in the checkpoint, 5 now"):
        trained(model(), None, shuffled(kind, seed=5), *callbacks(), **resuming)
    if kind == "datamodule":
        other = shuffled(kind)["datamodule"]
        other.load_state_dict(torch.load(path, weights_only=False)["AsyncDataModule"])
        for dm in (loaders["datamodule"], other):
            assert dm.replay(step=8)[0].ids.tolist() == plan(1, seed=3)[2]


class OfTheFirst(Samples):
    def training_step(self, batch, number):
        return super().training_step(batch[0] if isinstance(batch, list) else batch, number)


class Rebuilt(pl.LightningDataModule):
    """Builds a loader whenever it is asked for one, as users do."""

    def train_dataloader(self):
        return shuffled("bare")["train_dataloaders"]


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
            return {"train_dataloaders": [shuffled("bare")["train_dataloaders"] for _ in range(2)]}
        return {"datamodule": Rebuilt()} if kind == "rebuilt" else shuffled(kind)

    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    saving = SaveAt(tmp_path / "between.ckpt", hook)
    whole = trained(OfTheFirst(), None, loaders(3), lad.DevicePrefetcher(), saving, **options)
    assert whole == plan(0, seed=3) + plan(1, seed=3) + plan(2, seed=3)
    rest = trained(OfTheFirst(), None, loaders(5), lad.DevicePrefetcher(), **options, ckpt_path=saving.path)
    assert rest == whole[0 if hook == "on_train_start" else len(plan(0)) :]
