"""Users' programs through Lightning's Trainer, checked against h5py by ids."""

import collections
import itertools
import re

import h5py
import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.lightning.trainer import NO_STAGES, Learning, trainer
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    Balanced,
    DevicePrefetcher,
    Field,
    HDF5Source,
    LoaderOptions,
)
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource

pytestmark = NO_STAGES

THREE = {"train": 0.7, "val": 0.15, "test": 0.15}


class Learner(Learning):
    """A linear layer for classes or numbers; records every batch in ``seen[stage]``, and its losses."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.seen = collections.defaultdict(list)

    def step(self, stage, batch):
        batch = batch if isinstance(batch, dict) else dict(zip(("x", "y"), batch))
        self.seen[stage].append({key: value.clone() for key, value in batch.items()})
        answer = self.layer(batch["x"].flatten(1).float())
        loss = torch.nn.functional.mse_loss if batch["y"].is_floating_point() else torch.nn.functional.cross_entropy
        return loss(answer, batch["y"])

    def training_step(self, batch, number):
        return self.step("train", batch)

    def validation_step(self, batch, number):
        self.step("val", batch)

    def test_step(self, batch, number):
        self.step("test", batch)

    def all(self, stage, key="index"):
        return torch.cat([batch[key] for batch in self.seen[stage]]).numpy()


def fitted(dm, inputs, outputs, **options):
    """Trains a model, and tests it if there is a test set."""
    model = Learner(inputs, outputs)
    fit = trainer(DevicePrefetcher(), **options)
    fit.fit(model, datamodule=dm)
    if dm.sources["test"]:
        fit.test(model, datamodule=dm, verbose=False)
    return model


def stored(source, ids, *names):
    """The arrays that h5py reads for these samples, by name, in the order of the ids."""
    rows = collections.defaultdict(list)
    for place in source.locate(ids):
        with h5py.File(place.file) as file:
            for name in names:
                rows[name].append(file[place.group][name][place.row])
    return [np.stack(rows[name]) for name in names]


def arrays(labels, **more):
    """Samples in memory whose x is their number."""
    return ArraySource({"x": np.arange(len(labels), dtype=np.float32)[:, None], "y": np.asarray(labels), **more})


@pytest.fixture
def scans(tmp_path):
    """Two gzip files of each of 24 patients: images NHWC, three columns of labels."""
    random = np.random.default_rng(0)
    (tmp_path / "scans").mkdir()
    for patient in range(24):
        for slide in range(2):
            count = 20 + patient % 3
            with h5py.File(tmp_path / f"scans/patient_{patient}_slide_{slide}.h5", "w") as file:
                data = random.integers(0, 255, (count, 8, 6, 3), dtype=np.uint8)
                file.create_dataset("data", data=data, chunks=(8, 8, 6, 3), compression="gzip")
                file["labels"] = random.integers(0, 4, (count, 3), dtype=np.uint8)
    return str(tmp_path / "scans/*.h5")


def augment(batch):
    return {**batch, "x": batch["x"].float() + 1000}


def normalize(batch):
    return {**batch, "x": batch["x"].float() / 255}


def patients(source, ids):
    return {re.search(r"patient_\d+", place.file)[0] for place in source.locate(ids)}


def by_patient(scans, loader, **options):
    src = HDF5Source(scans, fields={"x": "data", "y": Field("labels", column=0)}, layout={"x": "NHWC"})
    return src, AsyncDataModule(source=src, split=THREE, groups=r"file:(patient_\d+)", loader=loader, **options)


def test_a_microscopist_trains_on_some_patients_and_tests_on_others(scans):
    options = LoaderOptions(batch_size=256, return_indices=True)
    src, dm = by_patient(scans, options, device_transform={"train": augment, "eval": normalize})
    model = fitted(dm, 3 * 8 * 6, 4, max_epochs=2)

    whole = len(dm.sources["train"][0])
    first, second = np.split(model.all("train"), [whole])
    assert sorted(first) == sorted(second) == dm.sources["train"][0].samples.tolist()
    assert first.tolist() != second.tolist()
    by_stage = {"train": first, "val": model.all("val")[: len(dm.sources["val"][0])], "test": model.all("test")}
    assert sorted(np.concatenate(list(by_stage.values()))) == list(range(len(src)))
    whose = {stage: patients(src, ids) for stage, ids in by_stage.items()}
    assert sum(map(len, whose.values())) == len(set.union(*whose.values())) == 24

    for stage, made in {"train": lambda x: x + 1000, "val": lambda x: x / 255, "test": lambda x: x / 255}.items():
        data, labels = stored(src, model.all(stage), "data", "labels")
        got = model.all(stage, "x")
        assert (got.shape[1:], got.dtype) == ((3, 8, 6), np.float32)
        np.testing.assert_array_equal(got, made(data.transpose(0, 3, 1, 2).astype(np.float32)))
        assert model.all(stage, "y").tolist() == labels[:, 0].tolist()
        assert model.all(stage, "y").dtype == np.int64


@pytest.mark.parametrize(
    ("options", "val", "test"),
    [
        ({}, None, set()),
        ({"split": {"train": 0.5, "val": 0.2, "test": 0.3}, "groups": "dog", "balance": "y"}, None, None),
        ({"by": "fold", "groups": "dog"}, {3}, set()),
        ({"by": "fold", "split": {"train": [0, 1, 2], "val": [3, 4], "test": [7]}}, {3}, {7}),
    ],
)
def test_one_fold_is_for_validation_and_a_test_set_stays_apart(options, val, test):
    fold = np.arange(240) % 8
    source = arrays(np.arange(240) % 3, fold=fold, dog=np.arange(240) // 16 * 8 + fold)
    held = {}
    for number in (2, 3):
        dm = AsyncDataModule(source=source, fold=number, loader={"batch_size": 60}, **options)
        assert f"val is fold {number}: train" in str(dm).splitlines()[0]
        held[number] = {stage: set(each[0].ids(np.arange(len(each[0])))) for stage, each in dm.sources.items() if each}
        assert sum(map(len, held[number].values())) == len(set().union(*held[number].values()))
    assert held[2].get("test") == held[3].get("test")
    assert not held[2]["val"] & held[3]["val"]
    assert held[3]["train"] > held[2]["val"]
    for wanted, stage in ((val, "val"), (test, "test")):
        if wanted is not None:
            assert {fold[sample] for sample in held[3].get(stage, ())} == wanted


WINDOW, AHEAD, STRIDE = 512, 24, 64
LONG = {patient: 3000 + 131 * patient for patient in range(12)}


@pytest.fixture
def rec(tmp_path):
    """Recordings of twelve patients, no two values alike, in one gzip file."""
    with h5py.File(tmp_path / "rec.h5", "w") as file:
        for patient, rows in LONG.items():
            values = np.arange(rows, dtype=np.float32) + 10_000 * patient
            file.create_dataset(f"patient_{patient}/data", data=values, chunks=(256,), compression="gzip")
    fields = {"x": Field("data", window=(0, WINDOW)), "y": Field("data", window=(WINDOW, WINDOW + AHEAD))}
    return HDF5Source(tmp_path / "rec.h5", group="patient_*", stride=STRIDE, fields=fields)


def touched(source, ids):
    """Every (group, row) of the file that these samples cover."""
    return {(place.group, place.row + row) for place in source.locate(ids) for row in range(WINDOW + AHEAD)}


@pytest.mark.parametrize("groups", ["group", "time"])
def test_windows_of_recordings_never_cross_a_patient_nor_a_side(rec, groups):
    dm = AsyncDataModule(source=rec, split=THREE, groups=groups, loader={"batch_size": 32, "return_indices": True})
    model = fitted(dm, WINDOW, AHEAD)
    assert sorted(model.all("train")) == dm.sources["train"][0].samples.tolist()
    of_side = {stage: touched(rec, model.all(stage)) for stage in THREE}
    assert sum(map(len, of_side.values())) == len(set.union(*of_side.values()))
    if groups == "group":
        assert sum(len(set(model.all(stage))) for stage in THREE) == len(rec)
        whose = [{group for group, _ in side} for side in of_side.values()]
        assert sum(map(len, whose)) == len(LONG)
    else:
        assert all(len({group for group, _ in side}) == len(LONG) for side in of_side.values())
    with h5py.File(rec.locate([0])[0].file) as file:
        rows = {f"/{name}": group["data"][:] for name, group in file.items()}
    for batch in itertools.chain(*model.seen.values()):
        for x, y, place in zip(batch["x"], batch["y"], rec.locate(batch["index"].numpy()), strict=True):
            values = rows[place.group][place.row : place.row + WINDOW + AHEAD]
            np.testing.assert_array_equal(x, values[:WINDOW])
            np.testing.assert_array_equal(y, values[WINDOW:])
    assert {place.row % STRIDE for place in rec.locate(model.all("train"))} == {0}


RARE = np.arange(2000) % 20 == 7  # 95 to 5


def balanced(loader=None, **options):
    given = {"batch_size": 50, "return_indices": True, "weights": Balanced("y")}
    return AsyncDataModule(**{"train": arrays(RARE.astype(int)), "loader": given | (loader or {})} | options)


@pytest.mark.parametrize(
    ("weights", "size", "share"),
    [
        (Balanced("y"), 30, 0.5),
        (np.where(RARE, 19.0, 1.0), 5000, 0.5),
        ("w", 120, 0.5),
        ([1.0] * 2000, 120, 0.05),
    ],
    ids=["balanced", "array", "field", "list"],
)
def test_an_epoch_may_be_longer_or_shorter_than_the_data(weights, size, share):
    source = arrays(RARE.astype(int), w=np.where(RARE, 19, 1).astype(np.uint8))
    val = arrays([0] * 70)
    dm = AsyncDataModule(train=source, val=val, loader={"batch_size": 50, "epoch_size": size, "weights": weights})
    model = fitted(dm, 1, 2, max_epochs=2)
    assert len(model.all("train", "y")) == 2 * size
    assert len(model.seen["train"]) == 2 * -(-size // 50)
    assert len(model.all("val", "y")) == 2 * 70
    assert abs(model.all("train", "y").mean() - share) < 5 * 0.5 / np.sqrt(2 * size)
    drawn_by = "balanced y" if isinstance(weights, Balanced) else "weights"
    assert f"{size:,} samples drawn by {drawn_by}, " in str(dm)


def test_overfitting_takes_samples_as_stored_even_where_they_are_drawn():
    model = fitted(balanced(val=arrays([0] * 100)), 1, 2, overfit_batches=2)
    assert model.all("train").tolist() == list(range(100))


def test_weights_of_the_whole_source_point_to_those_of_the_side():
    loader = {"batch_size": 50, "weights": np.where(RARE, 19.0, 1.0)}
    dm = AsyncDataModule(source=arrays(RARE.astype(int)), split=THREE, loader=loader)
    with pytest.raises(
        ConfigError,
        match=r"^weights: there are 2000, one for each sample before the split, .*; .*weights\[sides\['train'\]",
    ):
        dm.train_dataloader()


@pytest.mark.parametrize("what", ["fit", "test"])
def test_a_checkpoint_goes_on_with_the_same_classes(h5, tmp_path, what):
    path = h5(data=np.zeros((30, 2), np.float32), labels=np.arange(30) % 3)
    source = HDF5Source(path, {"x": "data", "y": Field("labels", classes=["cat", "dog", "eel"])})
    dm, model = AsyncDataModule(train=source, test=source, loader={"batch_size": 10}), Learner(2, 3)
    first = trainer()
    first.fit(Learner(2, 3), datamodule=dm)
    first.save_checkpoint(tmp_path / "trained.ckpt")
    saved = torch.load(tmp_path / "trained.ckpt", weights_only=True)["AsyncDataModule"]
    assert saved["classes"] == {"y": ["cat", "dog", "eel"]}
    again, options = trainer(max_epochs=2), {"datamodule": dm, "ckpt_path": str(tmp_path / "trained.ckpt")}
    again.fit(model, **options) if what == "fit" else again.test(model, verbose=False, **options)
    assert len(model.all({"fit": "train"}.get(what, what), "y")) == 30


def test_bytes_travel_to_a_device_as_bytes_and_are_float32_there(images, monkeypatch):
    # The cast is torch's own and waits for no pretended copy, so copies come at once here.
    streams, copied, seen = FakeStreams("compute"), [], []
    copy = streams.copy
    monkeypatch.setattr(streams, "copy", lambda to, of: (copied.append(of.numel() * of.element_size()), copy(to, of)))
    pretend(monkeypatch, lambda device: streams)
    source = HDF5Source(images, {"x": Field("data", dtype="float32"), "y": "labels"})

    def transform(batch):
        seen.append(batch["x"])
        return batch

    with AsyncLoader(source, {"batch_size": 20, "shuffle": False}, device_transform=transform) as loader:
        for step, batch in enumerate(loader):
            streams.synchronize()
            x, y = batch["x"], batch["y"]
            assert (x.dtype, y.dtype, x.shape) == (torch.float32, torch.int64, (20, 1, 8, 8))
            assert x[:, 0, 0, 0].tolist() == list(range(20 * step, 20 * step + 20))
            assert y.tolist() == [*range(10)] * 2
        streams.synchronize()
    assert {x.dtype for x in seen} == {torch.float32}
    assert max(copied) < 20 * 64 * 4, "bytes, and not four of them for each"
    source.close()
