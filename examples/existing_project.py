"""A Lightning project with its own Dataset and DataLoader: first with one added line, then with a source.

    python examples/existing_project.py

Both trainings end with a line that says what they waited for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lit_async_data import AsyncDataModule, DevicePrefetcher, HDF5Source

SAMPLES = 2048


# -- the project ------------------------------------------------------------------------------------------------------


class Cells(Dataset[dict[str, Any]]):
    """Reads one row of the file at a time, as most projects do."""

    def __init__(self, path: str) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> dict[str, Any]:
        file: Any = self.file or h5py.File(self.path)
        self.file = file
        return {"x": torch.from_numpy(file["images"][row]).permute(2, 0, 1), "y": int(file["labels"][row])}


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:  # Lightning's
        return torch.nn.functional.cross_entropy(self.net(batch["x"].float() / 255), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def trainer(callback: DevicePrefetcher) -> Trainer:
    return Trainer(
        max_epochs=2,
        callbacks=[callback],  # the added line
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


# -- both ways --------------------------------------------------------------------------------------------------------


def as_it_is(path: str) -> DevicePrefetcher:
    callback = DevicePrefetcher()
    trainer(callback).fit(Classifier(), DataLoader(Cells(path), batch_size=64, shuffle=True))
    return callback


def with_a_source(path: str) -> DevicePrefetcher:
    source = HDF5Source(path, {"x": "images", "y": "labels"}, layout={"x": "NHWC"})
    callback = DevicePrefetcher()
    trainer(callback).fit(Classifier(), AsyncDataModule(train=source, loader={"batch_size": 64, "shuffle": True}))
    return callback


def write(path: str) -> None:
    """Images that gzip makes a fifth smaller, one per chunk."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, SAMPLES)
    images = rng.normal(0, 12, (SAMPLES, 96, 96, 3)).cumsum(1) / 4 + 110 + 20 * labels[:, None, None, None]
    with h5py.File(path, "w") as file:
        file["labels"] = labels
        file.create_dataset(
            "images", data=images.clip(0, 255).astype(np.uint8), chunks=(1, 96, 96, 3), compression="gzip"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "cells.h5"))
        write(path)
        print(f"with its own DataLoader, training waited {as_it_is(path).waited}")
        print(f"with a source, training waited {with_a_source(path).waited}")


if __name__ == "__main__":
    main()
