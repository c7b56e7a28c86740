"""The page cache: which files it could hold, and how to empty it of some of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from lit_async_data import system
from lit_async_data.host.resources.memory import machine_memory
from lit_async_data.sources.hdf5.storage.residency import is_cold

# To see whether files have left memory, about FILES of them are probed, each at up to PLACES places that are at least
# APART bytes apart.
FILES, PLACES, APART = 64, 16, 2**20
# The share of these places that may still be in memory.
LEFT = 0.1


def dropped(paths: Sequence[str]) -> bool:
    """Drop files from the page cache, and return whether that worked. No process may have them mapped."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # what was written just now stays otherwise
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seen = [cold for path in paths[:: max(len(paths) // FILES, 1)] for cold in _probed(path)]
    return bool(seen) and seen.count(False) <= LEFT * len(seen)


def _probed(path: str) -> list[bool]:
    """For each probed place of a dropped file, whether it is known not to be in memory."""
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        places = range(0, size, max(size // PLACES, APART))
        try:
            cold = [not each for each in _resident(descriptor, places)]
        except OSError:  # some file systems cannot map files
            cold = []
        if any(cold):
            return cold
        # All seems to be in memory. Linux also says so of files that this user neither owns nor may write, so try to
        # read without waiting. That is less certain: Linux begins to read ahead, and a fast disk is done at once.
        cold = [is_cold(descriptor, place) is True for place in places]
        # What is read ahead includes the whole of a small file. Wait until it is there, and drop it again.
        for place in places:
            system.pread(descriptor, 1, place)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return cold


def _resident(descriptor: int, places: Sequence[int]) -> list[bool]:
    """For each place of a file, whether the system says that its page is in memory. Reads nothing."""
    if not places:
        return []
    mapped = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
    return [bool(system.resident(mapped, place, 1)[0]) for place in places]


def free_memory() -> int:
    """Bytes that the page cache may take, as far as the system says: what is free, and what it takes already."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        available = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return machine_memory()
    return min(available, machine_memory())


def stored_bytes(paths: Sequence[str]) -> int:
    """Bytes of files, together."""
    return sum(os.path.getsize(path) for path in paths)
