"""This process and all that descend from it: their CPU time, their memory, and what they leave behind. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")


def _stat(pid: int) -> list[str]:
    """The words of ``/proc/PID/stat`` after the name; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(root: int | None = None) -> list[int]:
    """Ids of the processes below a process (this one), including those that have ended and are not waited for."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (words := _stat(int(entry))):
            parents[int(entry)] = int(words[1])
    found, unseen = [], [root or os.getpid()]
    while unseen:
        parent = unseen.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        found += children
        unseen += children
    return found


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    words = _stat(pid)
    return bool(words) and words[0] not in "ZX"


def name_of(pid: int) -> str:
    """The name that a process gave itself; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def cpu_seconds(pids: list[int] | None = None) -> float:
    """CPU seconds of some processes, and of their children that have ended; of the whole tree by default."""
    ticks = 0
    for pid in [os.getpid(), *descendants()] if pids is None else pids:
        # User and system time, of the process and of the children that it has waited for.
        ticks += sum(map(int, _stat(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def shared_out_memory() -> float:
    """MiB of the whole tree (PSS): a page that several processes map counts for each of them in part."""
    kib = 0
    for pid in [os.getpid(), *descendants()]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib * 1024 / MIB


def memory_files() -> int:
    """Descriptors of this process on files in memory."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            count += "memfd:" in target or str(SHARED_MEMORY) in target
    return count


def shared_memory_names() -> set[str]:
    """What lies in ``/dev/shm``."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
