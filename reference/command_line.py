"""Checks what is typed after ``train.py`` before Hydra composes it: each key exists, and its value has its type."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lit_async_data.conf
from lit_async_data import ConfigError
from lit_async_data.errors import ResumeError, SourceError
from lit_async_data.options import INSTEAD

PACKAGE = Path(*lit_async_data.conf.__path__)
EVALUATION = "val", "test", "predict"
FULL_ERROR = os.environ.get("HYDRA_FULL_ERROR")


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """End the program with one line about what the user can mend; with HYDRA_FULL_ERROR=1, with the traceback."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ConfigError, ResumeError, SourceError) as error:
        if FULL_ERROR:
            raise
        sys.exit(f"error: {' '.join(str(error).split())}")
    except Exception as error:
        if FULL_ERROR or not _said_by_lightning(error):
            raise
        sys.exit(f"error: {type(error).__name__}: {' '.join(str(error).split())}")


def _said_by_lightning(error: Exception) -> bool:
    """Whether Lightning refuses an option or a metric, instead of passing on what a model, a file or torch raised."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    names = [type(error).__module__]
    if isinstance(error, ValueError | RuntimeError | TypeError):
        names.append(str(frame.f_globals.get("__name__")))
    return any(name.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning") for name in names)


def own_model(typed: list[str]) -> list[str]:
    """The arguments; with ``model=own``, without the demo's settings, if ``model._target_`` names a class."""
    keys = [argument.partition("=")[0] for argument in typed]
    if "model._target_" not in keys or "model" in keys:
        return typed
    kept = (argument for argument in typed if not argument.startswith("~model."))
    return [*(f"++{each.lstrip('+')}" if each.lstrip("+").startswith("model.") else each for each in kept), "model=own"]


def check(typed: list[str], config_dir: str) -> None:
    """Refuse a key or a choice that the configuration does not have, and text in place of a number or a section."""
    if any(argument.startswith("-") and argument not in ("-m", "--multirun") for argument in typed):
        return  # another configuration is used, or shown
    try:
        overrides = OverridesParser.create().parse_overrides([each for each in typed if not each.startswith("-")])
    except OverrideParseException as error:
        key, equals, value = error.override.partition("=")
        meant = f"""for text with such signs, quote it: '{key}="{value}"'""" if equals else "write KEY=VALUE"
        if value.startswith(("{", "[")):  # the shell has split it at blanks
            meant = f"quote the whole argument for the shell: '{key}={value} …'"
        raise ConfigError(f"cannot be read; {meant}", error.override) from error
    groups = {each.key_or_group: _choices(config_dir, each.key_or_group) for each in overrides}
    chosen = {}
    for each in overrides:
        group, choices = each.key_or_group, groups[each.key_or_group]
        if choices or "/" in group:
            # In a sweep over choices, the settings must fit each of them, the first one too.
            first: Any = each.value() if not each.is_discrete_sweep() else next(each.sweep_string_iterator())
            if (
                choices
                and not each.is_delete()
                and not {*(first if isinstance(first, list) else [first])} <= {*choices}
            ):
                raise ConfigError(f"{first or 'null'} is no choice; there are {', '.join(choices)}", group)
            chosen[group] = f"{each.get_key_element()}={first}" if each.is_discrete_sweep() else str(each.input_line)
    known = _known(config_dir, chosen.values())
    named = {each.key_or_group: each.value() for each in overrides if not each.is_sweep_override()}
    known |= {key: new for key, new in named.items() if isinstance(known.get(key), str) and isinstance(new, str)}
    for each in overrides:
        if each.key_or_group not in chosen and not each.is_add() and not each.is_force_add():
            new = None if each.is_sweep_override() else each.value()
            if null := _null_in(each.key_or_group, new):
                raise ConfigError(f"in {{…}}, Hydra takes null for no name; write ++{null}=VALUE beside it", null)
            for name, given in {each.key_or_group: new, **_merged(each.key_or_group, new, known)}.items():
                if name not in known:
                    raise ConfigError(f"no such key; {_hint(name, known, chosen, config_dir)}", name)
                _check_type(name, given, known[name])


def _merged(key: str, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a mapping sets inside of a section; in place of a value it would stand as it is."""
    if not isinstance(value, dict) or not isinstance(known.get(key), dict):
        return {}
    inner = {f"{key}.{name}": each for name, each in value.items()}
    return inner | {name: each for one, two in inner.items() for name, each in _merged(one, two, known).items()}


def _null_in(key: str, value: Any) -> str:
    """The key of an option that is called null; empty if there is none."""
    if not isinstance(value, dict):
        return ""
    inner = (_null_in(f"{key}.{name}", each) for name, each in value.items())
    return f"{key}.null" if None in value else next(filter(None, inner), "")


def _check_type(key: str, value: Any, default: Any) -> None:
    if isinstance(default, bool | int | float) and isinstance(value, str) and value != "auto":
        expected = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"{value!r} is not {expected} (the default is {default})", key)
    if isinstance(default, dict) and "_target_" in default and not isinstance(value, dict | None):
        name = next((each for each in ("path", "table", "root") if each in default), "NAME")
        raise ConfigError(f"{value!r} cannot replace all of its settings; write {key}.{name}={value}", key)


def _hint(key: str, known: dict[str, Any], chosen: dict[str, str], config_dir: str) -> str:
    """What to write instead of a key that does not exist: of its own section, of another choice, or of elsewhere."""
    group, (parent, _, last) = key.partition(".")[0], key.rpartition(".")
    above = parent
    while above not in known:
        above = above.rpartition(".")[0]
    if not isinstance(known[above], dict):
        section, inner = str(known[above])[2:-1], key.removeprefix(f"{above}.")
        if section not in known:  # else of ${loader}, for which data.loader is another name
            fields = [part == "fields" for part in key.split(".")[-3:-1]]
            column = f"name: {known[above] if above == parent else '…'}, " * (fields == [True, False])
            text = f"{{{column}{last}: …}}"
            for name in reversed(inner.split(".")[:-1]):
                text = f"{{{name}: {text}}}"
            return f"{above} is set as a whole: '{above}={text}'"
        other = f"{section}.{inner}"
        return f"did you mean {other}?" if other in known else _hint(other, known, chosen, config_dir)
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    ours = [name for name in known if _stage(name) in (None, _stage(key)) and not name.startswith("hydra")]
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(ours)}
    others = {f"{group}={choice}" for choice in _choices(config_dir, group)}
    there = {other: _known(config_dir, (chosen | {group: other}).values()) for other in sorted(others)}
    has_it = [other for other in there if key in there[other]]
    if has_it := has_it or [other for other in there if parent in there[other] and parent not in known]:
        return f"it belongs to {' or '.join(has_it)}"
    similar = [beside[name] for name in beside if last in name.split("_")]
    if near := _near(last, beside) or similar or (last not in INSTEAD and len(last) > 1 and _near(last, elsewhere)):
        return f"did you mean {' or '.join(near)}?"
    adding = f"; to add it, write +{key}=…" if parent in known and parent else ""
    there_are = f"there are {', '.join(name for name in beside if name[:1] != '_')}{adding}"
    return f"for the loader, {INSTEAD[last]}" if last in INSTEAD else there_are


def _near(word: str, names: Mapping[str, str]) -> list[str]:
    return [names[each] for each in difflib.get_close_matches(word, names, n=1 if word in names else 2, cutoff=0.75)]


def _stage(key: str) -> str | None:
    parts = (part.removesuffix("_loader") for part in key.split("."))
    return next((part for part in parts if part in EVALUATION), None)


def _choices(config_dir: str, group: str) -> list[str]:
    """The choices of a group, of the package and of the project."""
    return sorted({path.stem for folder in (PACKAGE, Path(config_dir)) for path in (folder / group).glob("*.yaml")})


def _known(config_dir: str, chosen: Iterable[str]) -> dict[str, Any]:
    """Every key of the configuration with some choices, and its value; a section is a dict."""
    with initialize_config_dir(config_dir, version_base="1.3"):
        composed = OmegaConf.to_container(compose("train", overrides=list(chosen), return_hydra_config=True))
    assert isinstance(composed, dict)
    found: dict[str, Any] = {"": composed}
    for key, value in (waiting := list(composed.items())):
        found[str(key)] = value
        waiting += [(f"{key}.{name}", each) for name, each in value.items()] if isinstance(value, dict) else []
    return found
