"""What a process holds: open files, shared memory, threads, children."""

import multiprocessing
import os
import re
import threading
from pathlib import Path
from typing import Any

from tqdm import TMonitor

# Files that libraries open once and keep open.
KEPT = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/", "/dev/nvidia", "anon_inode:")


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
    return set(re.findall(r"(?:/dev/shm/(?!sem\.)|/memfd:)\S*", Path("/proc/self/maps").read_text()))


class SharedMemory:
    """Finds what tests leave mapped."""

    def __init__(self) -> None:
        self._known = shared_memory()

    def new(self) -> set[str]:
        """What is mapped since the last call."""
        before, self._known = self._known, shared_memory()
        return self._known - before


def alive() -> dict[str, set[Any]]:
    return {
        # Lightning 2.5 leaves the thread running that tqdm redraws its bars from.
        "threads": {thread.name for thread in threading.enumerate() if not isinstance(thread, TMonitor)},
        "processes": {child.pid for child in multiprocessing.active_children()},
        "open files": open_files(),
    }
