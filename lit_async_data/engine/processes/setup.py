"""Sends a `ReaderSetup` to a reader process, with settings that libraries keep for a whole process."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.engine.pipeline.sample_reader import ReaderSetup
from lit_async_data.engine.processes.shared_slots import SharedFile
from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, MemoryBudgetError
from lit_async_data.sources.contract.user_code import dumps, why_not_pickled
from lit_async_data.sources.files.stores import SECRETS

# A source whose pickled arrays take more than this is copied to a reader process only on demand.
MOST_COPIED_BYTES = 2**28
# Arrays begin at multiples of this many bytes.
ALIGNMENT = 64
# Modules that register filters of HDF5 when they are imported.
REGISTERING = ("hdf5plugin", "bitshuffle.h5")
# Settings by module and name, with their defaults; h5py has them in its configuration.
SETTINGS: Mapping[tuple[str, str], Any] = {
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 2**30 // 12,
    ("h5py", "complex_names"): ("r", "i"),
}


def check(setup: ReaderSetup, *, on_demand: bool) -> None:
    """Raise a ConfigError if a setup cannot be pickled, or is large and the user has not asked for a process."""
    nbytes = sum(map(len, _pickled(setup)))
    if not on_demand and nbytes > MOST_COPIED_BYTES:
        raise ConfigError(f"a copy of it takes {readable(nbytes)}")


def _pickled(setup: ReaderSetup) -> list[memoryview]:
    """The pickle of a setup, and its arrays, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    python = setup.read.transformation is not None or setup.read.source.chunks.reading == "python"
    inherited = Inherited(filters=python)
    secrets = SECRETS.set(True)  # it never leaves memory
    try:
        # Settings first: they must be set before objects of the user are unpickled.
        data = dumps((inherited, setup), buffers.append)
        return [memoryview(data), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        why = why_not_pickled(setup.read.source) or f"cannot be pickled ({type(error).__name__}: {error})"
        raise ConfigError(f"it {why}") from error
    finally:
        SECRETS.reset(secrets)


def stored(setup: ReaderSetup) -> io.FileIO:
    """An anonymous file in memory, whose arrays reader processes map and share."""
    pieces = _pickled(setup)
    shared = SharedFile("lit_async_data setup")
    try:
        with open(shared.file.fileno(), "wb", closefd=False) as buffered:
            buffered.write(struct.pack(f"<{len(pieces) + 1}q", len(pieces), *map(len, pieces)))
            for piece in pieces:
                buffered.write(bytes(-buffered.tell() % ALIGNMENT))
                buffered.write(piece)
    except OSError as error:
        shared.file.close()
        raise MemoryBudgetError(
            f"the system refuses {readable(sum(map(len, pieces)))} for a copy of the source "
            f"({error.strerror}); {shared.advice()}",
            "memory_budget",
        ) from error
    return shared.file


def loaded(fd: int) -> ReaderSetup:
    """The setup in a file, which is closed; also applies the settings. Arrays are copied on write."""
    content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    (count,) = struct.unpack_from("<q", content)
    sizes = struct.unpack_from(f"<{count}q", content, 8)
    begin, pieces = 8 * (count + 1), []
    for size in sizes:
        begin += -begin % ALIGNMENT
        pieces.append(memoryview(content)[begin : begin + size])
        begin += size
    setup: ReaderSetup
    _, setup = pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301  # from the trainer's process
    logging.getLogger().setLevel(setup.level)
    return setup


def environment() -> dict[str, str]:
    """The environment of this process, with the folders where its h5py looks for plugins."""
    found = dict(os.environ)
    if "h5py" in sys.modules:
        h5pl: Any = importlib.import_module("h5py.h5pl")
        found["HDF5_PLUGIN_PATH"] = os.pathsep.join(os.fsdecode(h5pl.get(place)) for place in range(h5pl.size()))
    return found


class Inherited:
    """The settings of this process, which unpickling applies; for code of the user also filters of HDF5."""

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
