"""Checks the command line of ``train.py`` before anything is read; and what it writes after a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lit_async_data.errors import ConfigError
from lit_async_data.reference.suggestions import choices

# The file beside a run's configuration with the share of time that training waited for data.
WAIT_FILE = "data_wait.txt"


def check_choices(typed: list[str], config_dir: str) -> None:
    """Refuse choices such as ``loader=null``, on which Hydra fails with a traceback.

    Args:
        typed: The arguments of the command line.
        config_dir: Folder of the configuration.

    Raises:
        ConfigError: A choice is empty; the message names the valid choices.
    """
    for argument in typed:
        group, _, choice = argument.partition("=")
        if choice in ("null", "") and "=" in argument and (found := choices(config_dir, group)):
            names = ", ".join(found)
            raise ConfigError(
                f"{group}: {choice or 'nothing'} is no choice; there are {names}; leave {group}= out for the default"
            )


def check_types(cfg: DictConfig) -> None:
    """Refuse text in place of a number, a switch or a section; Lightning would fail on it much later.

    Args:
        cfg: The composed configuration of the run that Hydra is in.

    Raises:
        ConfigError: A value has the wrong type; the message names its key as typed.
    """
    typed = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    chosen = {override.key_or_group: OmegaConf.select(cfg, override.key_or_group, default=None) for override in typed}
    # The choice of a group composes a section; any other override sets a value.
    values = [override for override in typed if not isinstance(chosen[override.key_or_group], DictConfig | None)]
    sections = [str(override.input_line) for override in typed if override not in values]
    default = compose(config_name=HydraConfig.get().job.config_name, overrides=sections)
    own_model = cfg.model.get("_target_") != default.model.get("_target_")
    for override in values:
        if own_model and override.key_or_group.startswith("model."):
            continue  # the demo's settings say nothing about those of another class
        was = OmegaConf.select(default, override.key_or_group, default=None)
        now = chosen[override.key_or_group]
        if isinstance(was, bool | int | float) and isinstance(now, str) and now != "auto":
            expected = "true or false" if isinstance(was, bool) else "a number"
            raise ConfigError(f"{override.key_or_group}: {now!r} is not {expected} (the default is {was})")
        if isinstance(was, DictConfig) and "_target_" in was:
            key = next((f".{name}" for name in ("path", "table") if name in set(was.keys())), ".NAME")
            raise ConfigError(
                f"{override.key_or_group}: {now!r} cannot replace all of its settings; set one of them, as in "
                f"{override.key_or_group}{key}={now}"
            )


def check_sweep(cfg: DictConfig) -> None:
    """Refuse a sweep whose runs would disturb each other.

    Args:
        cfg: The composed configuration of the run that Hydra is in.

    Raises:
        ConfigError: This is a sweep over several processes, or in a job of SLURM.
    """
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    several = cfg.trainer.devices not in (1, "1") or cfg.trainer.num_nodes > 1
    if several and "spawn" not in str(cfg.trainer.strategy):
        raise ConfigError(
            f"trainer.devices: {cfg.trainer.devices} with --multirun: each process would repeat the whole sweep; "
            "use trainer.devices=1, trainer.strategy=ddp_spawn, or one call per setting"
        )
    if HydraConfig.get().runtime.choices["hydra"] == "slurm":
        raise ConfigError("hydra: slurm with --multirun: a job has one run; start an array, one task per setting")


def check_run(cfg: DictConfig) -> None:
    """Refuse a run that cannot train or test, before it reads any data.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigError: The run would test untrained weights; or there is no data to train on.
    """
    if cfg.ckpt_path is None and cfg.test and not cfg.train:
        raise ConfigError(
            "train: false without ckpt_path would test untrained weights; give a checkpoint: ckpt_path=best, "
            "ckpt_path=last or a file"
        )
    if cfg.train and OmegaConf.select(cfg, "data.train", default="elsewhere") is None:
        raise ConfigError(
            "data.train: null leaves no data to train on; to only test a checkpoint, write train=false ckpt_path=best"
        )


def write_wait(folder: str, callbacks: Iterable[Any]) -> None:
    """Write the share of time that a run waited for data into its folder, if a callback measured it in training."""
    for callback in callbacks:
        if hasattr(callback, "waited") and callback.waited.steps:
            Path(folder, WAIT_FILE).write_text(f"{100 * callback.waited.share:.1f} %")


class DataWait(Callback):
    """A callback of Hydra that prints after a sweep how long each run waited for data; see `configs/hydra`."""

    def __init__(self) -> None:
        self._waits: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:  # noqa: ARG002  # as Hydra calls it
        """Read what the run wrote."""
        file = Path(job_return.hydra_cfg.hydra.runtime.output_dir, WAIT_FILE)
        self._waits.append(file.read_text() if file.exists() else "unknown")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:  # noqa: ARG002
        """Print the wait of each run, in the order of the runs."""
        sys.stdout.write(f"data wait {' → '.join(self._waits)}\n")
