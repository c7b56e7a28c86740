"""The model, the callbacks and the loggers of ``train.py``, from its configuration."""

from __future__ import annotations

from typing import Any

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, open_dict

from lit_async_data.errors import ConfigError


def use_own_model(cfg: DictConfig) -> None:
    """Drop the settings of the demo's model if ``model._target_`` names another class, as if it were ``model=own``.

    What was typed stays, and so does what an experiment sets.

    Args:
        cfg: The composed configuration of the run that Hydra is in; its section ``model`` is replaced.
    """
    chosen = HydraConfig.get()
    demo = "lit_async_data.reference.demo.ImageClassifier"
    if chosen.runtime.choices["model"] != "cnn" or cfg.model["_target_"] == demo:
        return
    typed = [each for each in chosen.overrides.task if each.partition("=")[0] != "model" and each[:7] != "~model."]
    # The choice `own` has no settings, so that each typed one is an addition.
    added = [f"++{each.lstrip('+')}" if each.lstrip("+").startswith("model.") else each for each in typed]
    own = compose(config_name=chosen.job.config_name, overrides=[*added, "model=own"])
    with open_dict(cfg):
        cfg.model = own.model


def built_model(cfg: DictConfig) -> Any:
    """The configured model.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigError: The class is no LightningModule.
    """
    import pytorch_lightning as pl

    model = hydra.utils.instantiate(cfg.model)
    if not isinstance(model, pl.LightningModule):
        raise ConfigError(
            f"model._target_: {cfg.model['_target_']} gives a {type(model).__name__}, not a LightningModule"
        )
    return model


def built_loggers(cfg: DictConfig) -> list[Any]:
    """The configured loggers.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigError: The package of one is not installed.
    """
    loggers = []
    for name, logger in cfg.logger.items():
        try:
            loggers.append(hydra.utils.instantiate(logger))
        except InstantiationException as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise ConfigError(
                f"logger: {name} is not installed: pip install {name}; or choose logger=csv or logger=none"
            ) from error
    return loggers


def usable_callbacks(cfg: DictConfig, datamodule: Any) -> list[DictConfig]:
    """The configured callbacks, without those that monitor validation if there is no validation set.

    Args:
        cfg: The composed configuration.
        datamodule: The `AsyncDataModule` of the run.
    """
    from pytorch_lightning.utilities import rank_zero_info

    usable = []
    for name, callback in cfg.callbacks.items():
        if callback is None or ("ProgressBar" in callback["_target_"] and not cfg.trainer.enable_progress_bar):
            continue
        metric = callback.get("monitor") or ""
        if metric.startswith("val/") and not datamodule.sources["val"]:
            rank_zero_info(f"no validation set (data.val): callback {name} is left out, as it monitors {metric}")
        else:
            usable.append(callback)
    return usable
