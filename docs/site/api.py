"""The reference pages: each public name by its docstring, and each option with its type, unit and default."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import griffe
import yaml

ROOT = Path(__file__).resolve().parents[2]
# Pages of the API, by the room of the public names, or by the public module.
ROOMS = {
    "sources": "Sources",
    "engine": "Loaders",
    "options": "Options of loaders",
    "lightning": "Lightning",
    "batch": "Batches and transforms",
    "errors": "Errors",
}
MODULES = {"reading": "Rows without a loader", "testing": "Testing a source", "order.weights": "Weights of classes"}


class Configured(NamedTuple):
    """An object with options: its configuration in the package, the section there, and a key of ``train.py``."""

    name: str
    file: str = ""
    section: str = ""
    key: str = ""
    said: str = ""


CONFIGURED = (
    Configured("options.LoaderOptions", "loader/threads.yaml", "", "loader.NAME"),
    Configured("lightning.datamodule.AsyncDataModule", "data/*.yaml", "", "data.NAME"),
    Configured(
        "lightning.prefetcher.DevicePrefetcher",
        "callbacks/device_prefetcher.yaml",
        "device_prefetcher",
        "callbacks.device_prefetcher.NAME",
    ),
    Configured(
        "sources.hdf5.source.HDF5Source",
        "data/hdf5.yaml",
        "train",
        "data.train.NAME",
        "With `data=hdf5_split` the prefix is `data.source`.",
    ),
    Configured(
        "sources.hdf5.schema.field.Field", said="A field of `HDF5Source`; in a configuration, a mapping under `fields`."
    ),
    Configured(
        "sources.manifest.source.ManifestSource",
        "data/manifest.yaml",
        "source",
        "data.source.NAME",
        "With `data=manifest_stages` the prefix is `data.train`.",
    ),
    Configured(
        "sources.images.formats.ImageOptions",
        "data/manifest.yaml",
        "source",
        "data.source.NAME",
        "Options of images, for `ManifestSource`, its `Column`s and the `image` of a `Field`.",
    ),
    Configured(
        "sources.manifest.columns.Column",
        said="A field of `ManifestSource`; in a configuration, a mapping under `fields`.",
    ),
    Configured(
        "batch.transforms.Normalize",
        said="In a configuration, `data.device_transform={_target_: lit_async_data.Normalize, …}`.",
    ),
)
# The unit of each option that may be a number; "" where it has none.
UNITS = {
    "batch_size": "samples",
    "shuffle_chunks": "chunks",
    "workers": "threads or processes",
    "queue_depth": "batches",
    "cache_bytes": "bytes",
    "memory_budget": "bytes",
    "timeout_s": "seconds",
    "warn_after_s": "seconds",
    "restarts": "new processes",
    "max_bad": "samples, or a share of them",
    "epoch_size": "samples",
    "batch_elements": "elements",
    "buckets": "buckets, or their lengths",
    "batch_by": "lengths",
    "seed": "",
    "weights": "",
    "fold": "",
    "groups": "group numbers",
    "by": "",
    "balance": "class numbers",
    "folds": "folds",
    "split": "shares",
    "device_depth": "batches",
    "rate": "rows per second",
    "stride": "rows, or elements along each axis with `patch`",
    "patch": "elements along each axis",
    "points": "points",
    "patches_per_volume": "patches",
    "foreground": "shares",
    "rows": "row numbers",
    "episodes": "",
    "cache_limit": "bytes",
    "column": "",
    "window": "rows",
    "max_length": "rows",
    "offsets": "rows, or seconds with `time`",
    "tolerance": "seconds, as `time`",
    "fill": "",
    "image_size": "pixels",
    "scale": "shares of the area",
    "ratio": "width / height",
    "max_pixels": "pixels",
    "mean": "stored values",
    "std": "stored values",
    "axis": "",
}
# Objects, or options that only a program needs.
PYTHON_ONLY = {"storage", "force_resume", "draw", "loader"}


class RunnableExamples(griffe.Extension):
    """Google's section is called Examples; the house's docstrings say Example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def write(folder: Path) -> list[dict[str, str]]:
    """Writes the pages into a folder, and returns their places in the navigation."""
    folder.mkdir(parents=True)
    pages = {"Every option": every_option()}
    pages |= {title: f"# {title}\n\n{names(room)}" for room, title in ROOMS.items()}
    pages |= {title: f"# {title}\n\n::: lit_async_data.{module}\n" for module, title in MODULES.items()}
    nav = []
    for title, text in pages.items():
        name = title.lower().replace(" ", "_")
        (folder / f"{name}.md").write_text(text)
        nav.append({title: f"reference/{name}.md"})
    return nav


def names(room: str) -> str:
    """The public names of a room, each with its docstring."""
    (homes,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "lit_async_data/__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
    )
    known = [name for home, names in homes.items() if home.split(".")[0] == room for name in names.split()]
    return "".join(f"::: lit_async_data.{name}\n\n" for name in sorted(known))


def every_option() -> str:
    """A page with a heading for each option of each configured object."""
    extensions = griffe.load_extensions(RunnableExamples)
    package = griffe.load("lit_async_data", search_paths=[str(ROOT)], docstring_parser="google", extensions=extensions)
    return INTRODUCTION + "".join(options_of(each, package[each.name]) for each in CONFIGURED)


INTRODUCTION = """---
toc_depth: 2
---

# Every option

In Python, options are arguments. In YAML and on the command line they are keys of the package's configurations, for
[`train.py`](../docs/training/command_line.md) or a
[Hydra project of yours](../docs/training/command_line.md#in-your-own-hydra-project), which has the loader at
`data.loader`.

"""


def options_of(configured: Configured, public: Any) -> str:
    """The section of a page about one object: each of its options, and how to write it."""
    kind = configured.name.rpartition(".")[2]
    keys = configuration(configured)
    defaults = {each.name: each.default for each in public.parameters}
    text = [f"## {kind}\n\n{configured.said}\n"]
    for option in [each for each in documented(public) if each.name in defaults]:
        name, default = option.name, str(defaults[option.name])
        annotation = re.sub(r"\w+", lambda word: spelled(public, word[0]), str(option.annotation))
        is_number = re.search(r"\b(int|float|ArrayLike)\b", annotation)
        if is_number and name not in UNITS:
            sys.exit(f"docs/site/api.py: UNITS lacks {name} of {kind}")
        if keys and name not in {*keys, *PYTHON_ONLY}:
            sys.exit(f"lit_async_data/conf/{configured.file}: no key for the option {name} of {kind}")
        about = [
            f"`{annotation}`",
            UNITS[name] if is_number else "",
            "required" if default == "None" and "None" not in annotation else f"default `{default}`",
        ]
        text.append(f"### `{name}` {{ #{kind}.{name} }}\n\n{' · '.join(filter(None, about))}\n")
        text.append(f"{' '.join(option.description.split())}\n")
        text.append(f"- Python: `{kind}({name}={'…' if default == 'None' else default})`")
        if keys and name not in PYTHON_ONLY:
            key = configured.key.replace("NAME", name)
            text += typed(key, keys[name])
        text.append("")
    return "\n".join(text) + "\n"


def spelled(public: Any, word: str) -> str:
    """The values of a type such as ``Shuffle``, or the word itself."""
    found = public.module.members.get(word)
    if found is None or (found.is_alias and not found.target_path.startswith("lit_async_data.")):
        return word
    value = str(getattr(found, "value", ""))
    return value if value.startswith("Literal[") else word


def typed(key: str, value: object) -> list[str]:
    """The lines that show an option in YAML and on the command line."""
    if decoded := re.fullmatch(r"\$\{oc\.decode:\"(.*)\"\}", str(value)):
        value = decoded[1]
    elif value is None or isinstance(value, dict) or str(value).startswith(("???", "${")):
        value = "…"
    value = value if isinstance(value, str) else json.dumps(value)
    *path, last = key.split(".")
    override = f"{key}={value}"
    override = override if re.fullmatch(r"[\w.…-]+", value) else f"'{override}'"
    opened = "".join(f"{part}: {{ " for part in path)
    return [f"- YAML: `{opened}{last}: {value}{' }' * len(path)}`", f"- Command line: `{override}`"]


def configuration(configured: Configured) -> dict[str, Any]:
    """The keys of the configurations of an object, with their values."""
    keys: dict[str, Any] = {}
    for path in sorted((ROOT / "lit_async_data/conf").glob(configured.file)) if configured.file else []:
        section = yaml.safe_load(path.read_text())
        keys |= section.get(configured.section, {}) if configured.section else section
    return keys


def documented(public: griffe.Object) -> list[Any]:
    sections = public.docstring.parsed
    return [each for part in sections if part.kind.value in ("parameters", "attributes") for each in part.value]
