"""A plugin of pytest that plays macOS or Windows: what ``PLAYED_SYSTEM`` lacks is taken away when the package loads.

The libraries that the tests use have been imported before, and keep it.
"""

import importlib
import mmap
import os
import sys
import types

MACOS = {"os": ("RWF_NOWAIT", "sched_getaffinity", "memfd_create", "posix_fadvise"), "mmap": ("MAP_NORESERVE",)}
WINDOWS = {
    "os": (
        *MACOS["os"],
        *("O_CLOEXEC", "O_NOFOLLOW", "O_NOCTTY", "O_NONBLOCK", "O_DIRECTORY", "geteuid", "getuid", "fchown", "sysconf"),
        *("pread", "preadv", "register_at_fork", "fork"),
    ),
    "mmap": ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_RANDOM", "MAP_NORESERVE"),
}


def without(module: types.ModuleType, names: tuple[str, ...]) -> types.ModuleType:
    """A copy of a module without some of its names."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update({name: value for name, value in vars(module).items() if name not in names})
    return copy


def pytest_configure() -> None:
    played = os.environ["PLAYED_SYSTEM"]
    lacking = {"macos": MACOS, "windows": WINDOWS}[played]
    originals = {name: sys.modules.get(name) for name in ("os", "mmap", "resource", "fcntl")}
    sys.modules |= {module.__name__: without(module, lacking[module.__name__]) for module in (os, mmap)}
    if played == "windows":
        sys.modules |= {"resource": None, "fcntl": None}  # type: ignore[dict-item]  # as if they did not exist
    importlib.import_module("lit_async_data.system")
    for name, module in originals.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module
    workers = importlib.import_module("lit_async_data.engine.resources")
    workers.system_refusal = lambda: "this plays another system"
