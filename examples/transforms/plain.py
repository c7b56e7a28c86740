"""Transforms of your own in numpy: each sample is cropped and flipped, each batch is mixed."""

from __future__ import annotations

import h5py
import numpy as np

from lit_async_data import AsyncLoader, HDF5Source


def cropped(sample, rng):
    """Crops an image to 48 × 48 pixels: at random in training, the middle in evaluation (rng is None)."""
    x = sample["x"]  # numpy, channels first
    top, left = (8, 8) if rng is None else rng.integers(0, 17, 2)
    x = x[:, top : top + 48, left : left + 48]
    if rng is not None and rng.random() < 0.5:
        x = x[:, :, ::-1]
    return {"x": x, "y": sample["y"]}


def mixed(batch, rng):
    """Mixup: mixes each image with another image of its batch."""
    x = batch["x"].astype(np.float32) / 255
    other, share = np.arange(len(x)), np.float32(1)
    if rng is not None:
        other, share = rng.permutation(len(x)), np.float32(rng.beta(0.2, 0.2))
    return {
        "x": share * x + (1 - share) * x[other],
        "y": batch["y"],
        "other": batch["y"][other],
        "share": np.full(len(x), share),
    }


if __name__ == "__main__":
    with h5py.File("images.h5", "w") as file:
        file["x"] = np.random.default_rng(0).integers(0, 255, (1000, 64, 64, 3), np.uint8)
        file["y"] = np.arange(1000) % 10
    source = HDF5Source("images.h5", {"x": "x", "y": "y"}, layout={"x": "NHWC"})
    options = {"batch_size": 64, "shuffle": True}
    with AsyncLoader(source, options, sample_transform=cropped, batch_transform=mixed) as loader:
        batches = list(loader)
        print(loader.spec, len(batches), "batches; the loop waited", f"{loader.stats().wait_s:.3f} s")
    source.close()
