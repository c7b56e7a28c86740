"""Users' programs through Lightning's Trainer, checked against h5py by ids."""

import collections
import itertools

import h5py
import numpy as np
import pytest
import torch
from support.lightning.trainer import NO_STAGES, Learning, trainer

from lit_async_data import AsyncDataModule, Balanced, DevicePrefetcher, Field, HDF5Source
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
    model = Learner(inputs, outputs)
    fit = trainer(DevicePrefetcher(), **options)
    fit.fit(model, datamodule=dm)
    if dm.sources["test"]:
        fit.test(model, datamodule=dm, verbose=False)
    return model


def arrays(labels, **more):
    return ArraySource({"x": np.arange(len(labels), dtype=np.float32)[:, None], "y": np.asarray(labels), **more})


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


def test_overfitting_takes_samples_as_stored_even_where_they_are_drawn():
    model = fitted(balanced(val=arrays([0] * 100)), 1, 2, overfit_batches=2)
    assert model.all("train").tolist() == list(range(100))
