"""Albumentations as a sample transform: the same crops in every run, with any workers."""

from __future__ import annotations

import random

import albumentations as A  # pyright: ignore[reportMissingImports]  # noqa: N812  # its users call it so
import h5py
import numpy as np

from lit_async_data import AsyncDataModule, AsyncLoader, HDF5Source

train = A.Compose([A.RandomResizedCrop((48, 48)), A.HorizontalFlip(), A.RandomBrightnessContrast(), A.GaussNoise()])
evaluation = A.Compose([A.CenterCrop(48, 48)])


def augmented(sample, rng):
    # Albumentations has its own generators. Seeded from rng, they depend on seed, epoch and sample alone. Only one
    # thread at a time runs this function, so it may set them on the object that all threads share.
    train.set_random_state(rng, random.Random(int(rng.integers(2**63))))
    return pixels(train, sample)


def centred(sample):
    return pixels(evaluation, sample)


def pixels(transform, sample):
    image = np.ascontiguousarray(sample["x"].transpose(1, 2, 0))  # channels last; no copy if they are stored so
    return {"x": transform(image=image)["image"].transpose(2, 0, 1), "y": sample["y"]}


if __name__ == "__main__":
    with h5py.File("images.h5", "w") as file:
        file["x"] = np.random.default_rng(0).integers(0, 255, (400, 64, 64, 3), np.uint8)
        file["y"] = np.arange(400) % 10
    found = []
    for workers in ({"workers": 0}, {"worker_kind": "thread", "workers": 2}, {"worker_kind": "process", "workers": 2}):
        dm = AsyncDataModule(
            source=HDF5Source("images.h5", {"x": "x", "y": "y"}, layout={"x": "NHWC"}),
            split={"train": 0.8, "val": 0.2},
            loader={"batch_size": 64, "shuffle": True, **workers},
            sample_transform={"train": augmented, "eval": centred},
        )
        loader, val = dm.train_dataloader(), dm.val_dataloader()
        assert isinstance(loader, AsyncLoader)
        assert isinstance(val, AsyncLoader)
        found.append(np.concatenate([batch["x"].numpy() for batch in loader]))
        print(workers, dm.spec, f"the loop waited {loader.stats().wait_s:.3f} s")
        assert {tuple(batch["x"].shape[1:]) for batch in val} == {(3, 48, 48)}
        dm.close()
    assert all(np.array_equal(found[0], other) for other in found)
