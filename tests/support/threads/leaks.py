"""What a process holds: open files, shared memory, threads, children."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

from tqdm import TMonitor

# Files that libraries open once and keep open.
KEPT = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/", "anon_inode:")


def open_files() -> set[str]:
    files = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not target.startswith(KEPT):
            files.add(f"{number} -> {target}")
    return files


def shared_memory() -> set[str]:
    """Shared memory that this process has mapped; the folder /dev/shm also shows that of other processes.

    Semaphores do not count: tqdm keeps one for its lock.
    """
    maps = Path("/proc/self/maps").read_text().split()
    return {part for part in maps if part.startswith(("/dev/shm/", "/memfd:")) and "/sem." not in part}


def alive() -> dict[str, set[Any]]:
    return {
        # Lightning 2.5 leaves the thread running that tqdm redraws its bars from.
        "threads": {thread.name for thread in threading.enumerate() if not isinstance(thread, TMonitor)},
        "processes": {child.pid for child in multiprocessing.active_children()},
        "open files": open_files(),
        "shared memory": shared_memory(),
    }
