"""`of_configuration`: what a Hydra configuration trains on."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.tools.doctor.examined import Examined

# Arguments of the DataModule that say where samples come from.
_SOURCES = ("source", "split", "groups", "train", "val", "test", "predict")
# Lines of Hydra's messages that begin with these describe only Hydra's internals.
_INSIDES = ("full_key:", "object_type=", "Config search path:")


def is_configuration(path: str) -> bool:
    """Whether a file is a configuration, or a program that reads one, by its suffix."""
    return path.lower().endswith((".yaml", ".yml", ".py"))


def of_configuration(path: str, overrides: Sequence[str]) -> Examined:
    """The training set of a configuration, with the transforms and options that it has there.

    Args:
        path: The configuration.
        overrides: As on the command line of its program.

    Raises:
        ConfigError: It cannot be composed, or has no `AsyncDataModule` with a training set.
        AsyncDataError: Its data cannot be read.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if path.endswith(".py"):
        raise ConfigError(f"{path}: is a program; give the configuration that it reads, as in configs/train.yaml")
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such configuration")
    folder, name = os.path.split(os.path.abspath(path))
    os.environ.setdefault("PROJECT_ROOT", os.path.dirname(folder))
    sys.path += {os.getcwd(), os.path.dirname(folder)} - {*sys.path}  # where the classes of the project are found
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(folder, version_base="1.3"):
            cfg = hydra.compose(os.path.splitext(name)[0], overrides=list(overrides))
            at, node = _datamodule(cfg, path)
            made: functools.partial[Any] = hydra.utils.instantiate(node, _partial_=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{path}: {error.full_key} is missing; give it, as in {error.full_key}=VALUE") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_message(error.__cause__ or error)}") from error
    datamodule = made()
    if not datamodule.sources["train"]:
        raise ConfigError(f"{path}: {at} has no training set; give one, for example {at}.train.path=FILE")
    source = datamodule.sources["train"][0]
    without = dict.fromkeys(_SOURCES)

    def build(options: LoaderOptions) -> Any:
        return made(**(without | {"train": source, "loader": options})).train_dataloader()

    options = datamodule.train_dataloader().options
    return Examined(source, options, build, prefix=_prefix(node, at))


def _message(error: BaseException) -> str:
    """The message of an error of Hydra, without the lines on Hydra's internals."""
    lines = itertools.takewhile(lambda line: not line.strip().startswith(_INSIDES), str(error).splitlines())
    return " ".join(" ".join(lines).split())


def _datamodule(cfg: Any, path: str) -> tuple[str, Any]:
    """Where the DataModule is in a configuration, and its node."""
    from omegaconf import OmegaConf

    at = next(_places(OmegaConf.to_container(cfg, resolve=False), ""), None)
    if at is None:
        raise ConfigError(
            f"{path}: has no AsyncDataModule, so there is nothing to examine; give its data files instead"
        )
    return at, OmegaConf.select(cfg, at)


def _places(values: Any, at: str) -> Iterator[str]:
    if not isinstance(values, dict):
        return
    if str(values.get("_target_", "")).endswith(".AsyncDataModule"):
        yield at
    for key, below in values.items():
        yield from _places(below, f"{at}.{key}" if at else str(key))


def _prefix(node: Any, at: str) -> str:
    """What the loader's options begin with: those of an own section that the DataModule's refers to."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(node, resolve=False)
    loader = raw.get("loader") if isinstance(raw, dict) else None
    if isinstance(loader, str) and loader.startswith("${") and ":" not in loader:
        return loader.strip("${}").lstrip(".") + "."
    return f"{at}.loader."
