"""Callbacks that iterate over the Trainer's own loaders, as kNN monitors and image loggers do, change no training."""

import itertools
import re
import warnings

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
    plan,
    rows,
    trainer,
    with_and_without,
)
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset

import lit_async_data as lad
from lit_async_data.lightning.loops import pl
from lit_async_data.testing import ArraySource

pytestmark = [NO_STAGES, pytest.mark.filterwarnings("ignore:.*(not have many workers|sampler has shuffling enabled)")]
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


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", ["datamodule", "DataLoader"])
def test_a_look_at_a_loader_changes_no_evaluation(kind, stage):
    name = {"validate": "val"}.get(stage, stage)
    hook = {"validate": "on_validation_batch_end"}.get(stage, f"on_{stage}_batch_end")
    model, walk = Recorder(), Walk(hook, name, 10**6)
    runner = trainer(lad.DevicePrefetcher(), walk)
    if kind == "datamodule":
        getattr(runner, stage)(model, datamodule=datamodule(**{name: CountingSource()}))
    else:
        getattr(runner, stage)(model, dataloader())
    assert model.seen[f"{name} 0"] == [STORED]
    assert walk.seen == [STORED] * len(STORED)


@with_and_without
def test_one_loader_serves_training_and_validation(callbacks):
    loader = lad.AsyncLoader(CountingSource(), {"batch_size": BATCH, "shuffle": True, "return_indices": True})
    model = Recorder()
    trainer(*callbacks(), max_epochs=2, num_sanity_val_steps=1, val_check_interval=0.5).fit(model, loader, loader)
    assert model.seen["train"] == [plan(0), plan(1)]
    for batches in model.seen["val 0"]:
        assert sorted(itertools.chain(*batches)) == list(range(SAMPLES))


def test_lightning_warns_of_a_shuffle_in_evaluation():
    loader = lad.AsyncLoader(ArraySource({"x": rows()}), {"batch_size": BATCH, "return_indices": True, "shuffle": True})
    with pytest.warns(UserWarning, match="predict_dataloader`'s sampler has shuffling enabled"):
        trainer().predict(Recorder(), loader)


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


class OwnBatches:
    def __iter__(self):
        return iter(dataloader())

    def __len__(self):
        return len(dataloader())


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (dataloader(sampler=OwnSampler(range(SAMPLES))), "batch 2 of 6 of epoch 1, but .* OwnSampler is not one of"),
        (OwnBatches(), "your dataloader is not resumable"),  # as Lightning says ever
    ],
)
def test_where_the_order_is_somebody_elses_it_is_said_what_will_happen(tmp_path, own, said, caplog):
    trainer(lad.DevicePrefetcher(), Save(tmp_path / "mid.ckpt", 1), max_epochs=2).fit(Batches(), own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(Batches(), own, ckpt_path=tmp_path / "mid.ckpt")
    logged = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any(re.search(said, line) for line in [*logged, *(str(each.message) for each in caught)])


@pytest.mark.parametrize(("batch_size", "more", "said"), [(2, 0, "batch_size: 4 in"), (BATCH, 1, "samples: 22 in")])
def test_a_dataloader_goes_on_with_the_same_batches_only(tmp_path, batch_size, more, said):
    path = tmp_path / "mid.ckpt"
    trainer(lad.DevicePrefetcher(), Save(path, 1), max_epochs=2).fit(Batches(), dataloader())
    dataset = dataloader().dataset
    other = DataLoader(ConcatDataset([dataset, Subset(dataset, range(more))]), batch_size=batch_size)
    with pytest.raises(lad.ResumeError, match=said):
        trainer(lad.DevicePrefetcher(), max_epochs=2).fit(Batches(), other, ckpt_path=path)


@pytest.mark.parametrize("make", [dict, dataloader], ids=["ours", "a DataLoader"])
@pytest.mark.parametrize("whole", [True, False], ids=["after an epoch", "in an epoch"])
def test_one_line_says_where_a_run_goes_on(tmp_path, caplog, make, whole):
    def data():
        return {"datamodule": datamodule(train=CountingSource())} if make is dict else {"train_dataloaders": make()}

    first = trainer(lad.DevicePrefetcher(), Save(tmp_path / "mid.ckpt", 1), max_epochs=2)
    first.fit(Batches(), **data())
    first.save_checkpoint(tmp_path / "end.ckpt")
    caplog.clear()
    path = tmp_path / ("end.ckpt" if whole else "mid.ckpt")
    trainer(lad.DevicePrefetcher(), max_epochs=3).fit(Batches(), **data(), ckpt_path=path)
    places = ("sample 0 of 22", "batch 0 of 6") if whole else ("sample 8 of 22", "batch 2 of 6")
    place = places[make is not dict]
    assert [each for each in caplog.messages if "resumed" in each] == [f"resumed at epoch {1 + whole}, {place}"]
