"""`logger=tensorboard|wandb|csv|none`, with stand-ins for the packages that may be missing."""

from __future__ import annotations

import sys
import types

import pytest
from hydra.errors import InstantiationException
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lit_async_data.errors import ConfigError
from lit_async_data.reference.objects import built_loggers

PRESENT = {
    "tensorboard": "lightning_fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE",
    "wandb": "pytorch_lightning.loggers.wandb._WANDB_AVAILABLE",
}


class Written:
    """Stands in for TensorBoard's writer and for a run of Weights & Biases."""

    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values[name, step] = value

    def log(self, values):
        self.values |= {(name, values["trainer/global_step"]): value for name, value in values.items()}

    def flush(self):
        pass

    def define_metric(self, *_, **__):
        pass


@pytest.fixture
def written(monkeypatch):
    """Pretends that both packages are installed; what is logged ends in here."""
    run, asked = Written(), {}
    for flag in PRESENT.values():
        monkeypatch.setattr(flag, True)
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda log_dir, **_: (asked.update(log_dir=log_dir), run)[1]
    wandb = types.ModuleType("wandb")
    wandb.run, wandb.init = None, lambda **settings: (asked.update(settings), run)[1]
    disabled = types.ModuleType("wandb.sdk.lib")
    disabled.RunDisabled = type("RunDisabled", (), {})
    runs = types.ModuleType("wandb.wandb_run")
    runs.Run = Written
    for name, module in {
        "torch.utils.tensorboard": board,
        "wandb": wandb,
        disabled.__name__: disabled,
        runs.__name__: runs,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return run, asked


@pytest.mark.parametrize(("choice", "kind"), [("tensorboard", TensorBoardLogger), ("wandb", WandbLogger)])
def test_a_logger_is_built_and_written_to(composed, written, tmp_path, choice, kind):
    run, asked = written
    (logger,) = built_loggers(composed(f"logger={choice}", "run_id=job7", "tags=[a]"))
    assert type(logger) is kind
    logger.log_metrics({"train/loss": 0.5}, step=3)
    assert run.values["train/loss", 3] == 0.5
    if choice == "wandb":
        assert (asked["id"], asked["project"], asked["tags"], asked["dir"]) == (
            "job7",
            "train",
            ["a"],
            str(tmp_path / "out"),
        )
    else:
        assert asked["log_dir"] == str(tmp_path / "out/tensorboard/job7")


def test_a_table_or_nothing_needs_no_package(composed):
    assert built_loggers(composed("logger=none")) == []
    assert [type(logger) for logger in built_loggers(composed("logger=csv"))] == [CSVLogger]


@pytest.mark.parametrize("choice", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_says_what_to_install(composed, monkeypatch, choice):
    monkeypatch.setattr(PRESENT[choice], False)
    if choice == "tensorboard":
        monkeypatch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
    said = f"^logger: {choice} is not installed: pip install {choice}; or choose logger=csv or logger=none$"
    with pytest.raises(ConfigError, match=said):
        built_loggers(composed(f"logger={choice}"))


def test_another_error_of_a_logger_is_not_hidden(composed, written):
    with pytest.raises(InstantiationException, match="colour"):
        built_loggers(composed("logger=csv", "+logger.csv.colour=red"))
