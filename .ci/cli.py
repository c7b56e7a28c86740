"""LightningCLI with a small network: ``python cli.py fit --data.train=lit_async_data.HDF5Source …``."""

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
from support.pages import given

from lit_async_data import AsyncDataModule

SHORT = {"max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": False}

if __name__ == "__main__":
    LightningCLI(given(pl, pl.Trainer)["Linear"], AsyncDataModule, trainer_defaults=SHORT)
