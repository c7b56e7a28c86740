"""Checks the command line of ``train.py``, and turns an error in it into one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.options import TORCH_NAMES, LoaderOptions

# The file beside a run's configuration with the share of time that training waited for data.
WAIT_FILE = "data_wait.txt"
# Settings for a user's own data: what they name, and the configuration and key that they belong to.
OWN_DATA = {
    "path": ("files", "data=hdf5", "data.train.path"),
    "table": ("a table", "data=manifest", "data.source.table"),
}
# A message lists at most this many keys.
MOST_KEYS = 16
LOADER_OPTIONS = [option.name for option in dataclasses.fields(LoaderOptions)]


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
        if choice in ("null", "") and "=" in argument and (Path(config_dir) / group).is_dir():
            choices = ", ".join(_choices(config_dir, group))
            raise ConfigError(
                f"{group}: {choice or 'nothing'} is no choice; there are {choices}; leave {group}= out for the default"
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
    choices = [str(override.input_line) for override in typed if override not in values]
    default = compose(config_name=HydraConfig.get().job.config_name, overrides=choices)
    for override in values:
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
        ConfigError: ``ckpt_path`` is no checkpoint; the run would test untrained weights; or there is no data to train
            on.
    """
    checkpoint = cfg.ckpt_path
    if checkpoint in ("last", "best", "hpc"):
        candidates = Path(cfg.paths.log_dir).glob("**/checkpoints/last.ckpt")
        newest = max(candidates, key=lambda path: path.stat().st_mtime_ns, default=None)
        raise ConfigError(
            f"ckpt_path: {checkpoint!r} is Lightning's word for a checkpoint of the same run, but here each run has "
            f"its own folder; give the file, as in ckpt_path={newest or 'logs/train/runs/…/checkpoints/last.ckpt'}"
        )
    if checkpoint is not None and not Path(checkpoint).is_file():
        problem = "a folder; give a file in it" if Path(checkpoint).is_dir() else "not a file; check the path"
        raise ConfigError(f"ckpt_path: {checkpoint} is {problem}")
    if checkpoint is not None and not zipfile.is_zipfile(checkpoint):
        raise ConfigError(f"ckpt_path: {checkpoint} is not a complete checkpoint of Lightning; give another file")
    if checkpoint is None and cfg.test and not cfg.train:
        raise ConfigError(
            "train: false without ckpt_path would test untrained weights; give a checkpoint, as in "
            "ckpt_path=logs/train/runs/…/checkpoints/last.ckpt"
        )
    if cfg.train and OmegaConf.select(cfg, "data.train", default="elsewhere") is None:
        raise ConfigError(
            "data.train: null leaves no data to train on; to only test a checkpoint, write train=false ckpt_path=FILE"
        )


def explained(error: BaseException, typed: list[str], config_dir: str) -> str:
    """An error of the configuration as one line that names the key as typed.

    Args:
        error: Raised by Hydra, OmegaConf or this package.
        typed: The arguments of the command line.
        config_dir: Folder of the configuration, searched for the key that was probably meant.

    Example:
        >>> explained(ConfigError("val_loader.workers: -1 is not …"), ["data.val_loader.workers=-1"], ".")
        'data.val_loader.workers: -1 is not …'
    """
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) and "Error in call" in str(error) else error
    message = " ".join(str(cause).partition("Config search path")[0].split()) or type(cause).__name__
    if isinstance(cause, ConfigError):
        return _as_typed(message, typed)
    resolver = re.search(r"ConfigError raised while resolving interpolation: (.*) full_key: ", message)
    if resolver:
        return resolver[1]
    unknown = re.match(r"Could not override '([^']+)'", message)
    if unknown:
        return f"{unknown[1]}: no such key; {next(_hints(unknown[1], typed, config_dir))}"
    missing = re.match(r"Missing mandatory value: (\S+)", message)
    if missing:
        return f"{missing[1]}: missing; give it, as in {missing[1]}=VALUE"
    full_key = re.search(r"full_key: (\S+)", str(error))
    return message if full_key is None else _while_building(full_key[1], error, cause, message, typed)


def _while_building(key: str, error: BaseException, cause: BaseException, message: str, typed: list[str]) -> str:
    """An error that the constructor of a ``_target_`` raised."""
    unknown = re.match(r"Error locating target '([^']+)'", message)
    if unknown:
        why = str(error.__cause__ or "").strip().rpartition("\n")[2]
        return f"{key}._target_: there is no {unknown[1]} to import{f'. {why}' if why else ''}"
    settings = [argument for argument in typed if argument.lstrip("+").startswith(key)]
    kind = "" if isinstance(cause, AsyncDataError) else f"{type(cause).__name__}: "
    return f"{key}: {kind}{message}{' (set by ' + ', '.join(settings) + ')' if settings else ''}"


def _unreadable(error: OverrideParseException) -> str:
    """An argument that Hydra's grammar rejects, and how to write it."""
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"{key}: no value; write {key}=VALUE"
    if value[:1] in ("{", "[", "'", '"'):
        why = " ".join(str(error).partition("See https")[0].split())
        return f"{key}: {value} cannot be read ({why}); are all brackets and quotes closed?"
    escaped = value.replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{escaped}"')
    return f"{key}: {value} has characters that Hydra accepts only inside quotes; write {quoted}"


def _as_typed(message: str, typed: list[str]) -> str:
    """The message, beginning with the key as typed: loader.workers or data.loader.workers."""
    key = message.partition(":")[0]
    for argument in typed:
        name = argument.partition("=")[0].lstrip("+~")
        if name == key or name.endswith("." + key) or key.endswith("." + name):
            return name + message[len(key) :]
    return message


def _hints(key: str, typed: list[str], config_dir: str) -> Iterator[str]:
    """What to write instead of a key that does not exist; the best hint comes first."""
    parent, _, last = key.rpartition(".")
    if parent.endswith("loader") and last in TORCH_NAMES:
        yield TORCH_NAMES[last]
    above = parent.partition(".")[0]
    if above in ("", "data") and last in OWN_DATA and not any(argument.startswith("data=") for argument in typed):
        what, choice, full = OWN_DATA[last]
        yield f"for {what} of your own, {f'add {choice}' if '.' in parent else f'write {choice} {full}=…'}"
    cfg = _composed(typed, config_dir)
    known = list(_keys(cfg))
    beside = [name for name in known if name.rpartition(".")[0] == parent and not name.startswith(f"{parent}._")]
    if parent.endswith("fields") and beside:
        yield f"there are {', '.join(name.rpartition('.')[2] for name in beside)}; to add a field, write +{key}=…"
    if key in known:
        yield f"the value has names that the configuration does not; to add one, write +{key}.NAME=…"
    section = OmegaConf.select(cfg, parent, default=None) if parent in known else None
    if section is None and parent in known and parent.endswith(".layout"):
        section = {}
    if isinstance(section, Mapping) and f"{parent.rpartition('.')[2]}.{last}" not in known and not beside:
        # The configuration holds this section as one value, which can only be replaced as a whole.
        value = next((argument.partition("=")[2] for argument in typed if argument.startswith(f"{key}=")), "…")
        items = ", ".join(f"{name}: {each}" for name, each in {**section, last: value}.items())
        yield f"set the whole section: '{parent}={{{items}}}'"
    group, _, rest = key.partition(".")
    choices = _choices(config_dir, group)
    others = [choice for choice in choices if _holds(config_dir, group, choice, rest)]
    name = next((name for name in _with_parents(rest) if f"{group}.{name}" not in known), "")
    one_source = f"{group}.source.{rest.partition('.')[2]}"
    if one_source in known and _stage(key):
        yield f"its stages share one source; did you mean {one_source}?"
    if 0 < len(others) < len(choices) and isinstance(
        OmegaConf.select(cfg, f"{group}.{name}".rpartition(".")[0]), DictConfig
    ):
        current = next((each for each in typed if each.startswith(f"{group}=")), f"the default {group}")
        yield f"{current} has no {name}; one that has it: {', '.join(f'{group}={each}' for each in others)}"
    if parent in known and parent.endswith("_loader") and last in LOADER_OPTIONS:
        yield f"to set it for this stage only, write +{key}=…"
    closest = _closest_key(key, known)
    if closest:
        yield f"did you mean {closest}?"
    if last in TORCH_NAMES:
        yield f"for the loader, {TORCH_NAMES[last]}"
    valid = beside or [name for name in known if "." not in name]
    more = f", … ({len(valid)} in all; --cfg job shows them)" if len(valid) > MOST_KEYS else ""
    yield f"there are {', '.join(valid[:MOST_KEYS])}{more}"


def _choices(config_dir: str, group: str) -> list[str]:
    return sorted(path.stem for path in (Path(config_dir) / group).glob("*.yaml"))


def _holds(config_dir: str, group: str, choice: str, key: str) -> bool:
    """Whether a choice of a group has a key, or a value that may hold it: ``fields`` holds ``fields.x``."""
    section = OmegaConf.load(Path(config_dir) / group / f"{choice}.yaml")
    for name in _with_parents(key):
        node, _, last = name.rpartition(".")
        parent = OmegaConf.select(section, node) if node else section
        if not isinstance(parent, DictConfig) or last not in parent:
            return False
        if OmegaConf.is_interpolation(parent, last) or OmegaConf.is_missing(parent, last) or parent[last] is None:
            return True
    return True


def _with_parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _closest_key(key: str, known: list[str]) -> str | None:
    """A key with the same last name, or keys with a similar spelling; never a key of another stage."""
    stage = _stage(key)
    allowed = [name for name in known if _stage(name) in ({stage, None} if stage else {None, "train"})]
    last = key.rpartition(".")[2]
    same = [name for name in allowed if name.rpartition(".")[2] == last]
    if len(last) == 1 and "." in key:
        return None  # a batch key, such as x, is no hint at a setting of that name elsewhere
    if same:
        return min(same, key=lambda name: (_stage(name) != stage, name.count("."), len(name)))
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.75)
    if near and difflib.SequenceMatcher(None, last, near[0].rpartition(".")[2]).ratio() > 0.6:
        return near[0]
    lasts = {name.rpartition(".")[2]: name for name in reversed(allowed)}
    return " or ".join(sorted(lasts[each] for each in difflib.get_close_matches(last, lasts, n=2, cutoff=0.75))) or None


def _stage(key: str) -> str | None:
    """The stage of a key, or None."""
    parts = (part.removesuffix("_loader") for part in key.split(".")[1:])
    return next((part for part in parts if part in ("train", "val", "test", "predict")), None)


def _composed(typed: list[str], config_dir: str) -> DictConfig:
    """The configuration with the typed choices of groups, without the typed values."""
    GlobalHydra.instance().clear()
    groups = {path.name for path in Path(config_dir).iterdir() if path.is_dir()}
    choices = [argument for argument in typed if argument.partition("=")[0] in groups]
    with initialize_config_dir(config_dir, version_base="1.3"):
        return compose(config_name="train", overrides=choices)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        child = None if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name) else node[name]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{name}.")


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
