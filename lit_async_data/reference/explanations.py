"""An error of the configuration of ``train.py`` as one line."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.reference.suggestions import groups, hints


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
        return _unreadable(error, typed, config_dir)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) and "Error in call" in str(error) else error
    message = " ".join(str(cause).partition("Config search path")[0].split()) or type(cause).__name__
    if isinstance(cause, ConfigError):
        return _as_typed(message, typed)
    several = re.match(r"Ambiguous value for argument '(.*)'\n1\. To use it as a list", str(error), re.DOTALL)
    if several:
        key, _, value = several[1].partition("=")
        return f"{key}: {value} is several values; to run once with each, add -m; if it is one, {_quoted(key, value)}"
    full_key = re.search(r"full_key: (\S+)", str(error))
    of_key = _of_key(message, typed, config_dir)
    return of_key or (message if full_key is None else _while_building(full_key[1], error, cause, message, typed))


def _of_key(message: str, typed: list[str], config_dir: str) -> str | None:
    """What Hydra and OmegaConf say about a key."""
    resolver = re.search(r"ConfigError raised while resolving interpolation: (.*) full_key: ", message)
    if resolver:
        return resolver[1]
    unknown = re.match(r"Could not override '([^']+)'", message)
    if unknown:
        return f"{unknown[1]}: no such key; {next(hints(unknown[1], typed, config_dir))}"
    missing = re.match(r"Missing mandatory value: (\S+)", message)
    return f"{missing[1]}: missing; give it, as in {missing[1]}=VALUE" if missing else None


def _while_building(key: str, error: BaseException, cause: BaseException, message: str, typed: list[str]) -> str:
    """An error that the constructor of a ``_target_`` raised."""
    unknown = re.match(r"Error locating target '([^']+)'", message)
    if unknown:
        why = str(error.__cause__ or "").strip().rpartition("\n")[2]
        return f"{key}._target_: there is no {unknown[1]} to import{f'. {why}' if why else ''}"
    settings = [argument for argument in typed if argument.lstrip("+").startswith(key)]
    kind = "" if isinstance(cause, AsyncDataError) else f"{type(cause).__name__}: "
    return f"{key}: {kind}{message}{' (set by ' + ', '.join(settings) + ')' if settings else ''}"


def _unreadable(error: OverrideParseException, typed: list[str], config_dir: str) -> str:
    """An argument that Hydra's grammar rejects, and how to write it."""
    key, equals, value = error.override.partition("=")
    if not equals:
        return _without_value(key, typed, config_dir)
    name, quoted = key.lstrip("+~"), _quoted(key, value)
    if not quoted:
        return f"{name}: not a key; a key has letters, digits and underscores, with dots between its parts"
    if value[:1] in ("{", "[", "'", '"'):
        why = " ".join(str(error).partition("See https")[0].split())
        return f"{name}: {value} cannot be read ({why}); are all brackets and quotes closed? If it is text, {quoted}"
    return f"{name}: {value} has characters that Hydra accepts only inside quotes; {quoted}"


def _without_value(word: str, typed: list[str], config_dir: str) -> str:
    """A word without =: a key, or what follows a space in a value."""
    known = {*groups(config_dir), *map(str, OmegaConf.load(Path(config_dir) / "train.yaml"))}
    place = typed.index(word) if word in typed else 0
    start = next((n for n in reversed(range(place)) if "=" in typed[n] or typed[n].startswith("-")), None)
    after = typed[place:] if start is None else typed[start + 1 :]
    words = list(itertools.takewhile(lambda each: "=" not in each and not each.startswith("-"), after))
    if all(each.lstrip("+~").partition(".")[0] in known for each in words):
        return f"{word}: no value; write {word}=VALUE"
    if start is None or typed[start].startswith("-"):
        return f"{word}: no key; write KEY=VALUE, as in loader.workers=2"
    key, _, value = " ".join([typed[start], *words]).partition("=")
    return f"{word}: no key; write KEY=VALUE, or if it belongs to {key}, {_quoted(key, value)}"


def _quoted(key: str, value: str) -> str:
    """How to type a value that is text, for Hydra and for the shell; empty if the key cannot be read either."""
    # Backslashes count only before a quote: those in front of one, and at the end, are doubled.
    inner = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), value)
    argument = f'{key}="{inner}"'
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return ""
    return f"quote it: {shlex.quote(argument)}"


def _as_typed(message: str, typed: list[str]) -> str:
    """The message, beginning with the key as typed: loader.workers or data.loader.workers."""
    key = message.partition(":")[0]
    for argument in typed:
        name = argument.partition("=")[0].lstrip("+~")
        if name == key or name.endswith("." + key) or key.endswith("." + name):
            return name + message[len(key) :]
    return message
