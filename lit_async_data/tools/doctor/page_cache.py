"""The page cache: which files it could hold, and how to empty it of some of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lit_async_data.host.memory import machine_memory
from lit_async_data.sources.hdf5.storage.residency import is_cold

# Places of a file that are looked at to see whether it is in memory.
PLACES = 16
# The share of these that may be in memory still, in a file that was dropped.
LEFT = 0.1


def dropped(paths: Iterable[str]) -> bool:
    """Drop files from the page cache, and return whether that worked. No process may have them mapped."""
    if not hasattr(os, "posix_fadvise"):
        return False
    warm = seen = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            os.fsync(descriptor)  # what was written just now stays otherwise
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            cold = [is_cold(descriptor, size * place // PLACES) for place in range(PLACES if size else 0)]
        finally:
            os.close(descriptor)
        warm += cold.count(False) + cold.count(None)
        seen += len(cold)
    return bool(seen) and warm <= LEFT * seen


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
