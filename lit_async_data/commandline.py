"""What was typed on the command line of ``train.py``, and what was wrong with it, in one line."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.options import TORCH_NAMES

# What a run leaves beside its configuration: the share of its time that training waited for data.
WAIT = "data_wait.txt"


def check_types(cfg: DictConfig) -> None:
    """Refuse text where the configuration has a number or a switch; Lightning would fail on it much later.

    Args:
        cfg: The composed configuration of the run that Hydra is in.

    Raises:
        ConfigError: Names the key as it was typed.
    """
    typed = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    chosen = {override.key_or_group: OmegaConf.select(cfg, override.key_or_group, default=None) for override in typed}
    # A choice of a group puts a node there; what was set by hand is a value.
    values = [override for override in typed if not isinstance(chosen[override.key_or_group], DictConfig | None)]
    choices = [str(override.input_line) for override in typed if override not in values]
    usual = compose(config_name=HydraConfig.get().job.config_name, overrides=choices)
    for override in values:
        was = OmegaConf.select(usual, override.key_or_group, default=None)
        now = chosen[override.key_or_group]
        if isinstance(was, bool | int | float) and isinstance(now, str) and now != "auto":
            wanted = "true or false" if isinstance(was, bool) else "a number"
            raise ConfigError(f"{override.key_or_group}: {now!r} is not {wanted} (it is {was} unless set)")


def explained(error: BaseException, typed: list[str], config_dir: str) -> str:
    """An error of the configuration as one line that names the key as it was typed.

    Args:
        error: What Hydra, OmegaConf or this package raised.
        typed: The arguments of the command line.
        config_dir: Folder of the configuration, to find names that were probably meant.

    Example:
        >>> explained(ConfigError("val_loader.workers: -1 is not …"), ["data.val_loader.workers=-1"], ".")
        'data.val_loader.workers: -1 is not …'
    """
    cause = error.__cause__ if isinstance(error.__cause__, Exception) and "Error in call" in str(error) else error
    said = " ".join(str(cause).partition("Config search path")[0].split()) or type(cause).__name__
    if isinstance(cause, ConfigError):
        return _as_typed(said, typed)
    unknown = re.match(r"Could not override '([^']+)'", said)
    if unknown:
        return f"{unknown[1]}: no such key; {_near(unknown[1], typed, config_dir)}"
    missing = re.match(r"Missing mandatory value: (\S+)", said)
    if missing:
        return f"{missing[1]}: missing; give it, as in {missing[1]}=VALUE"
    full_key = re.search(r"full_key: (\S+)", str(error))
    if full_key:
        by = [argument for argument in typed if argument.lstrip("+").startswith(full_key[1])]
        kind = "" if isinstance(cause, AsyncDataError) else f"{type(cause).__name__}: "
        return f"{full_key[1]}: {kind}{said}{' (set by ' + ', '.join(by) + ')' if by else ''}"
    return said


def _as_typed(said: str, typed: list[str]) -> str:
    """The message with the key at its beginning as it was typed, if it was: loader.workers or data.loader.workers."""
    key = said.partition(":")[0]
    for argument in typed:
        name = argument.partition("=")[0].lstrip("+~")
        if name == key or name.endswith("." + key) or key.endswith("." + name):
            return name + said[len(key) :]
    return said


def _near(key: str, typed: list[str], config_dir: str) -> str:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    parent, _, last = key.rpartition(".")
    if parent.endswith("loader") and last in TORCH_NAMES:
        return TORCH_NAMES[last]
    added = {"path": "for files of your own, add data=hdf5", "table": "for a table of your own, add data=manifest"}
    if key.startswith("data.") and last in added and not any(argument.startswith("data=") for argument in typed):
        return added[last]
    GlobalHydra.instance().clear()
    groups = {path.name for path in Path(config_dir).iterdir() if path.is_dir()}
    choices = [argument for argument in typed if argument.partition("=")[0] in groups]
    with initialize_config_dir(config_dir, version_base="1.3"):
        known = list(_keys(compose(config_name="train", overrides=choices)))
    fields = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    if parent.endswith("fields") and fields:
        return f"there are {', '.join(fields)}; to add a field, write +{key}=…"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if near == [key]:
        return f"some of what is given for it is not there; to add that, write +{key}.NAME=…"
    if near:
        return f"did you mean {near[0]}?"
    beside = [name for name in known if name.rpartition(".")[0] == parent]
    return f"there are {', '.join(beside or [name for name in known if '.' not in name])}"


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        child = None if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name) else node[name]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{name}.")


def keep_wait(folder: str, callbacks: Iterable[Any]) -> None:
    """Write down what share of its time a run waited for data, if it trained and a callback measured it."""
    for callback in callbacks:
        if hasattr(callback, "waited") and callback.waited.steps:
            Path(folder, WAIT).write_text(f"{100 * callback.waited.share:.1f} %")


class DataWait(Callback):
    """Says after a sweep how long each run waited for data, in their order: a callback of Hydra, in `configs/hydra`."""

    def __init__(self) -> None:
        self._waits: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:  # noqa: ARG002  # as Hydra calls it
        """Remember what a run has written down."""
        file = Path(job_return.hydra_cfg.hydra.runtime.output_dir, WAIT)
        self._waits.append(file.read_text() if file.exists() else "unknown")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:  # noqa: ARG002
        """Say it."""
        sys.stdout.write(f"data wait {' → '.join(self._waits)}\n")
