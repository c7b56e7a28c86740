"""What the control groups of this process allow it: of a container, or of a job of SLURM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import PurePosixPath

ROOT = "/sys/fs/cgroup"


def memory_limit() -> int | None:
    """Bytes of memory that this process may use; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(ValueError):  # "max"
                limits.append(int(_text(f"{folder}/{name}")))
    return min(limits, default=None)


def core_limit() -> float | None:
    """Cores that this process may use at a time; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        quota, _, period = _text(f"{folder}/cpu.max").partition(" ")
        if not period:
            quota, period = (_text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # else "max", or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def out_of_memory_kills() -> int:
    """How many processes of these groups the kernel has killed for lack of memory; 0 where it does not say."""
    kills = 0
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            for event, _, count in (line.partition(" ") for line in _text(f"{folder}/{name}").splitlines()):
                kills += int(count) if event == "oom_kill" else 0
    return kills


def _folders(controller: str) -> Iterator[str]:
    """The control groups of this process, and the groups that contain them.

    A container takes its own group for the outermost. In a job of SLURM the group with the limit is farther inside.
    """
    old = f"{ROOT}/{controller}"  # as each controller had a tree of its own
    yield from (ROOT, old)
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            for path in (PurePosixPath(group), *PurePosixPath(group).parents):
                if path.name:
                    yield f"{old if controllers else ROOT}{path}"


def _text(name: str) -> str:
    try:
        with open(name) as file:
            return file.read().strip()
    except OSError:
        return ""
