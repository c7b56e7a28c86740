"""The data, the model and the callbacks of ``train.py``, from its configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_async_data.errors import ConfigError


def built_data(cfg: DictConfig) -> Any:
    """The configured DataModule, without the stages that have no path and no table.

    Args:
        cfg: The composed configuration; these stages are set to None in it.
    """
    for stage in ("val", "test", "predict"):
        if None in (OmegaConf.select(cfg, f"data.{stage}.{key}", default="") for key in ("path", "table")):
            cfg.data[stage] = None
    return hydra.utils.instantiate(cfg.data)


def built_model(cfg: DictConfig) -> Any:
    """The configured model. A user's own class gets only the settings of the demo that it accepts.

    Args:
        cfg: The composed configuration of the run that Hydra is in.

    Raises:
        ConfigError: The class is no LightningModule.
    """
    import pytorch_lightning as pl

    from lit_async_data.reference.demo import ImageClassifier

    typed = [override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task]
    _drop_demo_settings(cfg.model, typed, ImageClassifier)
    model = hydra.utils.instantiate(cfg.model)
    if not isinstance(model, pl.LightningModule):
        raise ConfigError(
            f"model._target_: {cfg.model['_target_']} gives a {type(model).__name__}, not a LightningModule"
        )
    return model


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


def _drop_demo_settings(model: DictConfig, typed: Iterable[str], demo: Callable[..., Any]) -> None:
    """Delete the settings of the demo's model that the configured class does not accept, unless they were typed.

    Args:
        model: Configuration with a ``_target_``, which may be the user's own class.
        typed: Keys that were set on the command line.
        demo: The class of the demo's model.
    """
    module, _, name = str(model["_target_"]).rpartition(".")
    try:
        accepted = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return  # building the model raises the error
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    of_demo, typed = inspect.signature(demo).parameters, set(typed)
    with open_dict(model):
        for name in list(map(str, model)):
            if name in of_demo and name not in accepted and f"model.{name}" not in typed:
                del model[name]
