"""LightningCLI: the YAML in the docs runs, and so does the configuration that it saves."""

import re
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.lightning.trainer import Learning

from lit_async_data import AsyncDataModule

pytest.importorskip("jsonargparse", reason="pip install 'jsonargparse[signatures]'")
# jsonargparse only warns of what it cannot save, and where warnings are errors it tries another type.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[3] / "docs/training/command_line.md"
FLIP = """
class Flip:
    def __init__(self, p: float):
        self.p = p
    def __call__(self, sample):
        return {**sample, "x": -sample["x"] * self.p}
"""


class Summing(Learning):
    total = 0.0

    def training_step(self, batch):
        Summing.total += batch["x"].sum().item()
        return self.layer(batch["y"][:, None]).sum()


@pytest.mark.parametrize("stage", ["train", ""])
def test_the_configuration_in_the_docs_runs_and_is_saved_so_that_it_runs_again(tmp_path, monkeypatch, stage):
    from pytorch_lightning.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("transforms.py").write_text(FLIP)
    with h5py.File("waves_train.h5", "w") as file:
        file["signal"], file["target"] = np.ones((64, 8), np.float32), np.zeros(64, np.float32)
    text = re.search(r"^```yaml\n(# cli.yaml.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    if not stage:  # a class for all stages
        text = re.sub(r"sample_transform:.*\n +train: ", "sample_transform: ", text)
    Path("cli.yaml").write_text(text)
    quiet = [
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
    ]
    for config in ("cli.yaml", "config.yaml"):
        Summing.total = 0.0
        monkeypatch.setattr(sys, "argv", ["main.py", "fit", "--config", config, "--seed_everything=1", *quiet])
        LightningCLI(Summing, AsyncDataModule, save_config_kwargs={"overwrite": True})
        assert Summing.total == -64 * 8 * 0.5
