"""This process and all that descend from it: their CPU time and memory. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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


def cpu_seconds(pids: list[int] | None = None) -> float:
    """CPU seconds of some processes, and of their children that have ended; of the whole tree by default."""
    ticks = 0
    for pid in [os.getpid(), *descendants()] if pids is None else pids:
        # User and system time, of the process and of the children that it has waited for.
        ticks += sum(map(int, _stat(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pids: list[int]) -> float:
    """MiB of some processes; pages that several map count in part in each."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024
