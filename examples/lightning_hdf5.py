"""With Lightning: a DataModule over HDF5 files and the prefetching callback. ``python examples/lightning_hdf5.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytorch_lightning as pl
import torch

from lit_async_data import AsyncDataModule, DevicePrefetcher, HDF5Source, LoaderOptions


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(128, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch["x"]).squeeze(1), batch["y"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def write(path: Path, rows: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        spectra = random.normal(size=(rows, 128)).astype(np.float32)
        file["spectra"], file["target"] = spectra, spectra[:, 0]
    return path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fields = {"x": "spectra", "y": "target"}
        dm = AsyncDataModule(
            train=HDF5Source(
                [write(Path(folder, f"train{part}.h5"), 2000, part) for part in range(3)],  # parts of one dataset
                fields,
            ),
            val=HDF5Source(write(Path(folder, "val.h5"), 500, 9), fields),
            loader=LoaderOptions(batch_size=128, shuffle=True, workers=1, queue_depth=4),
        )
        callback = DevicePrefetcher()
        trainer = pl.Trainer(
            max_epochs=2, callbacks=[callback], accelerator="auto", logger=False, enable_checkpointing=False
        )
        trainer.fit(Regression(), datamodule=dm)
        print(f"training waited {callback.waited}")
