"""With Hydra, in a separate project that takes `data` and `callbacks` from the package: ``python train.py``.

Loaders: ``data.loader.workers=2``. Other files: ``data.train.path=x.h5 'data.train.fields={x: data, y: weight}'
model.features=64``.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import hydra
import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig


class Regression(pl.LightningModule):
    def __init__(self, features: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(features, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch["x"]).squeeze(1), batch["y"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def write_waves() -> None:
    """Writes the files that ``conf/config.yaml`` names, to have something to train on."""
    random = np.random.default_rng(0)
    for name, rows in {"waves_train.h5": 2000, "waves_val.h5": 500}.items():
        if not Path(name).exists():
            with h5py.File(name, "w") as file:
                signal = random.normal(size=(rows, 128)).astype(np.float32)
                file["signal"], file["target"] = signal, signal[:, 0]


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    write_waves()
    pl.seed_everything(0)
    callbacks = [hydra.utils.instantiate(callback) for callback in cfg.callbacks.values()]
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks)
    trainer.fit(hydra.utils.instantiate(cfg.model), datamodule=hydra.utils.instantiate(cfg.data))
    print(f"training waited {callbacks[0].waited}")


if __name__ == "__main__":
    main()
