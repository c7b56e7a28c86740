"""The page cache and the memory of this process, on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np

# Bytes per read when measuring the sequential rate of a disk.
PIECE = 8 * 2**20
MADV_PAGEOUT = 21
# `Pages.estimated` samples stretches of this length.
STRETCH = 2**18
# A dropped file that keeps at most this share of its pages counts as cold.
COLD = 0.01

_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


class Pages:
    """The pages of a file: how many are in memory, and how to drop them. Touches no page itself."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        self._map = np.frombuffer(mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_READ), np.uint8)

    def close(self) -> None:
        os.close(self.descriptor)
        del self._map

    def resident(self) -> int:
        """Bytes of the file that are in memory."""
        return self._resident(0, self.size)

    def estimated(self, every: int = 16) -> int:
        """An estimate of `resident` from one stretch in ``every``: the query takes 70 ns per page."""
        places = range(0, self.size, every * STRETCH)
        seen = sum(min(STRETCH, self.size - begin) for begin in places)
        resident = sum(self._resident(begin, min(STRETCH, self.size - begin)) for begin in places)
        return min(resident * self.size // seen, self.size)

    def _resident(self, begin: int, length: int) -> int:
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        found = np.zeros(-(-(begin + length - first) // mmap.PAGESIZE), np.uint8)
        address, nbytes = self._map.ctypes.data + first, begin + length - first
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(found.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return int((found & 1).sum()) * mmap.PAGESIZE

    def drop(self, begin: int = 0, length: int = 0) -> None:
        """Drop pages that no process has mapped."""
        os.posix_fadvise(self.descriptor, begin, length, os.POSIX_FADV_DONTNEED)

    def page_out(self, begin: int, length: int) -> None:
        """Drop pages, also those that this process has mapped, as the system does when memory is short.

        The next access reads them again; unlike MADV_DONTNEED this loses no data.
        """
        for address, first, size in mappings(self.path):
            low, high = max(begin, first), min(begin + length, first + size)
            if low < high:
                _libc.madvise(ctypes.c_void_p(address + low - first), ctypes.c_size_t(high - low), MADV_PAGEOUT)
        self.drop(begin, length)


def mappings(path: str) -> list[tuple[int, int, int]]:
    """The maps of a file in this process: address, offset in the file, bytes."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5] == path:
            low, high = (int(word, 16) for word in words[0].split("-"))
            maps.append((low, int(words[2], 16), high - low))
    return maps


def drop_file(path: str) -> bool:
    """Drop a file from the page cache, and return whether that worked. No process may have it mapped."""
    with contextlib.closing(Pages(path)) as pages:
        os.fsync(pages.descriptor)
        pages.drop()
        return pages.resident() <= COLD * pages.size


def cached_bytes(path: str) -> int:
    """Bytes of a file that are in memory."""
    with contextlib.closing(Pages(path)) as pages:
        return pages.resident()


def sequential_rate(path: str) -> float:
    """Bytes per second of a file that is not in memory, read in order in large pieces."""
    drop_file(path)
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        started, done = time.perf_counter(), 0
        while count := file.readinto(buffer):
            done += count
        return done / (time.perf_counter() - started)


def process_memory() -> dict[str, float]:
    """MiB of this process: private memory, and pages of mapped files, which the system can reclaim."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")}


def memory_limit() -> int | None:
    """The memory limit of this process's control group in bytes, page cache included; None without a limit."""
    least = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            file = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.max")
        elif "memory" in kinds.split(","):
            file = Path("/sys/fs/cgroup/memory", group.lstrip("/"), "memory.limit_in_bytes")
        else:
            continue
        text = file.read_text().strip() if file.exists() else "max"
        if text.isdigit() and int(text) < 2**60:
            least = min(int(text), least or 2**60)
    return least


def read_ahead(path: str) -> str:
    """The read-ahead of the file's disk, in words."""
    device = os.stat(path).st_dev
    file = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return f"{file.read_text().strip()} KiB" if file.exists() else "unknown"


class BoundedCache:
    """Bounds the pages of a file in the page cache: above the limit, a thread drops a quarter, piece by piece."""

    EVERY_S = 0.02
    PARTS = 32

    def __init__(self, path: str, most: int) -> None:
        self._pages, self._most = Pages(path), most
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._pages.close()

    def _run(self) -> None:
        part, turn = -(-self._pages.size // self.PARTS // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        while not self._left.wait(self.EVERY_S):
            if self._pages.estimated() <= self._most:
                continue
            for _ in range(self.PARTS):
                self._pages.page_out(turn * part, part)
                turn = (turn + 1) % self.PARTS
                if self._pages.estimated() <= 0.75 * self._most:
                    break
