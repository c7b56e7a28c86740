"""What was typed on the command line of ``train.py``, and what was wrong with it, in one line."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import shlex
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.options import TORCH_NAMES, LoaderOptions

# What a run leaves beside its configuration: the share of its time that training waited for data.
WAIT = "data_wait.txt"
# What people give, and the configuration and key that it belongs to.
OWN = {
    "path": ("files", "data=hdf5", "data.train.path"),
    "table": ("a table", "data=manifest", "data.source.table"),
}
# Keys that a message lists at most.
MOST_NAMED = 16
LOADER_OPTIONS = [option.name for option in dataclasses.fields(LoaderOptions)]


def check_choices(typed: list[str], config_dir: str) -> None:
    """Refuse ``loader=null``, on which Hydra fails with a traceback.

    Args:
        typed: The arguments of the command line.
        config_dir: Folder of the configuration.

    Raises:
        ConfigError: Names the choices that there are.
    """
    for argument in typed:
        group, _, choice = argument.partition("=")
        if choice in ("null", "") and "=" in argument and (Path(config_dir) / group).is_dir():
            there = ", ".join(sorted(path.stem for path in (Path(config_dir) / group).glob("*.yaml")))
            said = f"{choice or 'nothing'} is no choice; there are {there}; leave {group}= out for the usual one"
            raise ConfigError(f"{group}: {said}")


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
        if isinstance(was, DictConfig) and "_target_" in was:
            key = next((f".{name}" for name in ("path", "table") if name in set(was.keys())), ".NAME")
            raise ConfigError(
                f"{override.key_or_group}: {now!r} cannot replace all of its settings; set one of them, as in "
                f"{override.key_or_group}{key}={now}"
            )


def check_run(cfg: DictConfig) -> None:
    """Refuse what cannot be trained or tested, before anything is read.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigError: There is no checkpoint of that name; weights that nobody has trained would be tested; or there are
            no data to train on.
    """
    given = cfg.ckpt_path
    if given in ("last", "best", "hpc"):
        found = Path(cfg.paths.log_dir).glob("**/checkpoints/last.ckpt")
        newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
        raise ConfigError(
            f"ckpt_path: {given!r} is Lightning's word for a checkpoint of the same run, and each run here has a "
            f"folder of its own; give the file, as in ckpt_path={newest or 'logs/train/runs/…/checkpoints/last.ckpt'}"
        )
    if given is not None and not Path(given).is_file():
        what = "a folder; give a file in it" if Path(given).is_dir() else "not a file"
        raise ConfigError(f"ckpt_path: {given} is {what}")
    if given is not None and not zipfile.is_zipfile(given):
        raise ConfigError(f"ckpt_path: {given} is no checkpoint that Lightning has written, or not all of one")
    if given is None and cfg.test and not cfg.train:
        raise ConfigError(
            "train: false without ckpt_path would test weights that nobody has trained; give a checkpoint, as in "
            "ckpt_path=logs/train/runs/…/checkpoints/last.ckpt"
        )
    if cfg.train and OmegaConf.select(cfg, "data.train", default="elsewhere") is None:
        raise ConfigError(
            "data.train: null leaves nothing to train on; to only test a checkpoint, write train=false ckpt_path=FILE"
        )


def leave_out_unknown(model: DictConfig, typed: Iterable[str], usual: Callable[..., Any]) -> None:
    """Take out of a model's configuration what its class does not take and nobody has asked for.

    Args:
        model: With a ``_target_``, which may be a class of the user's.
        typed: Keys that were set on the command line.
        usual: The class that the other values of the configuration are for.
    """
    module, _, name = str(model["_target_"]).rpartition(".")
    try:
        taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return  # what is wrong with it is found when the model is built
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    own, asked = inspect.signature(usual).parameters, set(typed)
    with open_dict(model):
        for name in list(map(str, model)):
            if name in own and name not in taken and f"model.{name}" not in asked:
                del model[name]


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
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) and "Error in call" in str(error) else error
    said = " ".join(str(cause).partition("Config search path")[0].split()) or type(cause).__name__
    if isinstance(cause, ConfigError):
        return _as_typed(said, typed)
    unknown = re.match(r"Could not override '([^']+)'", said)
    if unknown:
        return f"{unknown[1]}: no such key; {next(_hints(unknown[1], typed, config_dir))}"
    missing = re.match(r"Missing mandatory value: (\S+)", said)
    if missing:
        return f"{missing[1]}: missing; give it, as in {missing[1]}=VALUE"
    full_key = re.search(r"full_key: (\S+)", str(error))
    return said if full_key is None else _of_key(full_key[1], error, cause, said, typed)


def _of_key(key: str, error: BaseException, cause: BaseException, said: str, typed: list[str]) -> str:
    """An error in what the configuration builds from a key."""
    unknown = re.match(r"Error locating target '([^']+)'", said)
    if unknown:
        why = str(error.__cause__ or "").strip().rpartition("\n")[2]
        return f"{key}._target_: there is no {unknown[1]} to import{f'. {why}' if why else ''}"
    by = [argument for argument in typed if argument.lstrip("+").startswith(key)]
    kind = "" if isinstance(cause, AsyncDataError) else f"{type(cause).__name__}: "
    return f"{key}: {kind}{said}{' (set by ' + ', '.join(by) + ')' if by else ''}"


def _unreadable(error: OverrideParseException) -> str:
    """An argument that Hydra's grammar does not take, and how to write it."""
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"{key}: no value; write {key}=VALUE"
    if value[:1] in ("{", "[", "'", '"'):
        why = " ".join(str(error).partition("See https")[0].split())
        return f"{key}: {value} cannot be read ({why}); are all brackets and quotes closed?"
    escaped = value.replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{escaped}"')
    return f"{key}: {value} has characters that Hydra takes only in quotes of its own; write {quoted}"


def _as_typed(said: str, typed: list[str]) -> str:
    """The message with the key at its beginning as it was typed, if it was: loader.workers or data.loader.workers."""
    key = said.partition(":")[0]
    for argument in typed:
        name = argument.partition("=")[0].lstrip("+~")
        if name == key or name.endswith("." + key) or key.endswith("." + name):
            return name + said[len(key) :]
    return said


def _hints(key: str, typed: list[str], config_dir: str) -> Iterator[str]:
    """What was probably meant by a key that there is not; the first hint is the best one."""
    parent, _, last = key.rpartition(".")
    if parent.endswith("loader") and last in TORCH_NAMES:
        yield TORCH_NAMES[last]
    above = parent.partition(".")[0]
    if above in ("", "data") and last in OWN and not any(argument.startswith("data=") for argument in typed):
        what, choice, full = OWN[last]
        yield f"for {what} of your own, {f'add {choice}' if '.' in parent else f'write {choice} {full}=…'}"
    cfg = _composed(typed, config_dir)
    known = list(_keys(cfg))
    beside = [name for name in known if name.rpartition(".")[0] == parent and not name.startswith(f"{parent}._")]
    if parent.endswith("fields") and beside:
        yield f"there are {', '.join(name.rpartition('.')[2] for name in beside)}; to add a field, write +{key}=…"
    if key in known:
        yield f"some of what is given for it is not there; to add that, write +{key}.NAME=…"
    whole = OmegaConf.select(cfg, parent, default=None) if parent in known else None
    if (
        isinstance(whole, Mapping) and f"{parent.rpartition('.')[2]}.{last}" not in known and not beside
    ):  # written as one value, which can only be replaced as a whole
        value = next((argument.partition("=")[2] for argument in typed if argument.startswith(f"{key}=")), "…")
        said = ", ".join(f"{name}: {each}" for name, each in {**whole, last: value}.items())
        yield f"give all of it at once: '{parent}={{{said}}}'"
    if parent.endswith("_loader") and last in LOADER_OPTIONS:
        yield f"to set it for this stage only, write +{key}=…"
    meant = _meant(key, known)
    if meant:
        yield f"did you mean {meant}?"
    if last in TORCH_NAMES:
        yield f"of the loader, {TORCH_NAMES[last]}"
    there = beside or [name for name in known if "." not in name]
    more = f", … ({len(there)} in all; --cfg job shows them)" if len(there) > MOST_NAMED else ""
    yield f"there are {', '.join(there[:MOST_NAMED])}{more}"


def _meant(key: str, known: list[str]) -> str | None:
    """The key of the same name elsewhere, or those that are spelled nearly alike; never one of another stage."""
    stage = _stage(key)
    allowed = [name for name in known if _stage(name) in ({stage, None} if stage else {None, "train"})]
    last = key.rpartition(".")[2]
    same = [name for name in allowed if name.rpartition(".")[2] == last]
    if same:
        return min(same, key=lambda name: (_stage(name) != stage, name.count("."), len(name)))
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.75)
    if near:
        return near[0]
    lasts = {name.rpartition(".")[2]: name for name in reversed(allowed)}
    return " or ".join(sorted(lasts[each] for each in difflib.get_close_matches(last, lasts, n=2, cutoff=0.75))) or None


def _stage(key: str) -> str | None:
    """The stage that a key is for, if it is for one."""
    parts = (part.removesuffix("_loader") for part in key.split(".")[1:])
    return next((part for part in parts if part in ("train", "val", "test", "predict")), None)


def _composed(typed: list[str], config_dir: str) -> DictConfig:
    """The configuration with the choices that were typed, and without the values."""
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
