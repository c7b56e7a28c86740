"""What a reader process gets of settings that libraries keep for a whole process (docs/data/transforms.md)."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Modules that register filters of HDF5 when they are imported.
REGISTERING = ("hdf5plugin", "bitshuffle.h5")
# Settings by module and name, with their defaults. Those of h5py are in its configuration.
SETTINGS: Mapping[tuple[str, str], Any] = {
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 2**30 // 12,
    ("h5py", "complex_names"): ("r", "i"),
}


def environment() -> dict[str, str]:
    """The environment of this process, with the folders where its h5py looks for plugins."""
    found = dict(os.environ)
    if "h5py" in sys.modules:
        h5pl: Any = importlib.import_module("h5py.h5pl")
        found["HDF5_PLUGIN_PATH"] = os.pathsep.join(os.fsdecode(h5pl.get(place)) for place in range(h5pl.size()))
    return found


class Inherited:
    """The settings of this process, which are set where it is unpickled; for code of the user also filters of HDF5."""

    def __init__(self, *, filters: bool) -> None:
        self._filters = filters

    def __reduce__(self) -> Any:
        modules = [name for name in REGISTERING if self._filters and name in sys.modules]
        settings = {key: getattr(_holder(key[0]), key[1]) for key in SETTINGS if key[0] in sys.modules}
        return _set, (modules, settings)


def _holder(module: str) -> Any:
    found: Any = importlib.import_module(module)
    return found.get_config() if module == "h5py" else found


def _set(modules: Sequence[str], settings: Mapping[tuple[str, str], Any]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for (module, name), value in settings.items():
        if module in sys.modules or value != SETTINGS[module, name]:
            setattr(_holder(module), name, value)
