"""What was probably meant by a key that the configuration of ``train.py`` does not have."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import lit_async_data.conf
from lit_async_data.options import TORCH_NAMES, LoaderOptions

# Settings for a user's own data: what they name, and the configuration and key that they belong to.
OWN_DATA = {
    "path": ("files", "data=hdf5", "data.train.path"),
    "table": ("a table", "data=manifest", "data.source.table"),
}
# A message lists at most this many keys.
MOST_KEYS = 16
LOADER_OPTIONS = [option.name for option in dataclasses.fields(LoaderOptions)]
PACKAGE = Path(*lit_async_data.conf.__path__)


def groups(config_dir: str) -> set[str]:
    """The names of the groups, of the project and of the package.

    Args:
        config_dir: Folder of the configuration.
    """
    return {path.name for folder in (PACKAGE, Path(config_dir)) for path in folder.glob("[a-z]*") if path.is_dir()}


def choices(config_dir: str, group: str) -> dict[str, Path]:
    """The files of a group, by name, in the project's own folder and in that of the package.

    Args:
        config_dir: Folder of the configuration.
        group: Name of the group.

    Example:
        >>> list(choices(".", "data"))
        ['hdf5', 'hdf5_split', 'manifest', 'manifest_stages']
    """
    found = {path.stem: path for folder in (PACKAGE, Path(config_dir)) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def hints(key: str, typed: list[str], config_dir: str) -> Iterator[str]:
    """What to write instead of a key that does not exist; the best hint comes first.

    Args:
        key: The key.
        typed: The arguments of the command line.
        config_dir: Folder of the configuration.
    """
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
    yield from _elsewhere(key, typed, known, config_dir)
    section = OmegaConf.select(cfg, parent, default=None) if parent in known else None
    if section is None and parent in known and parent.endswith(".layout"):
        section = {}
    if isinstance(section, Mapping) and f"{parent.rpartition('.')[2]}.{last}" not in known and not beside:
        # The configuration holds this section as one value, which can only be replaced as a whole.
        value = next((argument.partition("=")[2] for argument in typed if argument.startswith(f"{key}=")), "…")
        items = ", ".join(f"{name}: {each}" for name, each in {**section, last: value}.items())
        yield f"set the whole section: '{parent}={{{items}}}'"
    group, _, rest = key.partition(".")
    files = choices(config_dir, group)
    others = [choice for choice, file in files.items() if _holds(file, rest)]
    name = next((name for name in _with_parents(rest) if f"{group}.{name}" not in known), "")
    one_source = f"{group}.source.{rest.partition('.')[2]}"
    if one_source in known and _stage(key):
        yield f"its stages share one source; did you mean {one_source}?"
    if 0 < len(others) < len(files) and isinstance(
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


def _elsewhere(key: str, typed: list[str], known: list[str], config_dir: str) -> Iterator[str]:
    """Hints for the loader, of which ``data.loader`` is another name, and for a model of the user's own."""
    parent, _, last = key.rpartition(".")
    if parent == "data.loader" and f"loader.{last}" not in known:
        yield from hints(f"loader.{last}", typed, config_dir)
    if parent == "model" and any(argument.startswith("model._target_=") for argument in typed):
        yield f"to give it to a model of your own, write +{key}=…"


def _holds(file: Path, key: str) -> bool:
    """Whether a choice of a group has a key, or a value that may hold it: ``fields`` holds ``fields.x``."""
    section = OmegaConf.load(file)
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
    chosen = [argument for argument in typed if argument.partition("=")[0] in groups(config_dir)]
    with initialize_config_dir(config_dir, version_base="1.3"):
        return compose(config_name="train", overrides=chosen)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        child = None if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name) else node[name]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{name}.")
