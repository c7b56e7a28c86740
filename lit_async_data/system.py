"""The operating system: cores, files and memory of a process, forks and exit, and a gate for threads.

Functions of Linux that macOS or Windows lack have their substitutes here: other modules import them from here and not
from `os`, `mmap` or `resource`. Reader processes need a system that has all of them; see `system_refusal` in
`engine/resources.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from lit_async_data.errors import WorkerError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Lazy:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        self._module = self._module or importlib.import_module(self._name)
        return getattr(self._module, name)


fcntl = Lazy("fcntl")  # Windows has none
# Prefix of the names of this package's threads.
OURS = "lit_async_data"
# Seconds between two checks whether the other thread or process is alive.
POLL_S = 0.5

# Flags of os.open; 0 on systems without the flag. Windows needs O_BINARY, or it converts line ends.
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
NO_TERMINAL = getattr(os, "O_NOCTTY", 0)
NO_BLOCKING = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)
# Makes reads fail for pages outside the page cache (Linux only).
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)

# Most descriptors that the C library of Windows opens; assumed bytes of memory where the system does not say.
WINDOWS_DESCRIPTORS, UNKNOWN_MEMORY = 8192, 8 * 2**30

_seeking = threading.Lock()
_GROUPS = "/sys/fs/cgroup"


def usable_cores() -> int:
    """The cores that this process may use, at least 1; on macOS, which does not say, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def descriptor_limit() -> int:
    return WINDOWS_DESCRIPTORS if resource is None else int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def allow_descriptors(number: int) -> None:
    """Raise the limit of open files to this number, as far as the system lets this process."""
    if resource is not None and number > descriptor_limit():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (number if hard < 0 else min(number, hard), hard))


def lock(descriptor: int, *, alone: bool) -> None:
    """Lock a file until it is closed; ``alone``: an `OSError` if another process has locked it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)


def memory_file() -> int:
    """The descriptor of an anonymous file, on Linux in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(OURS)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def memory() -> int:
    """Bytes of this machine, or as many as its control groups leave to this process."""
    known = hasattr(os, "sysconf")
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else UNKNOWN_MEMORY]
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(ValueError):  # "max"
                limits.append(int(_text(f"{folder}/{name}")))
    return min(limits)


def core_limit() -> float | None:
    limits = []
    for folder in _folders("cpu"):
        quota, _, period = _text(f"{folder}/cpu.max").partition(" ")
        if not period:
            quota, period = (_text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # else "max", or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[str]:
    """The control groups of this process, and the groups that contain them. SLURM sets limits on inner groups."""
    old = f"{_GROUPS}/{controller}"  # version 1: each controller has a tree of its own
    yield from (_GROUPS, old)
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            for path in (PurePosixPath(group), *PurePosixPath(group).parents):
                if path.name:
                    yield f"{old if controllers else _GROUPS}{path}"


def _text(name: str) -> str:
    with contextlib.suppress(OSError), open(name) as file:
        return file.read().strip()
    return ""


def ranks_here(known: int | None = None) -> int:
    """Processes of this job on this machine: the known number, or else torchrun's, or else 1."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if known is None else known, 1)


def user_id() -> int:
    """The user id, to compare with that of a file; 0 on Windows, where all files have 0."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def private_memory(nbytes: int) -> mmap.mmap:
    """Anonymous memory, filled with zeros, that forked children do not share."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def read_at_random(mapped: mmap.mmap) -> None:
    """Tell the system not to read ahead in a memory map."""
    if hasattr(mapped, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def is_cold(descriptor: int, offset: int) -> bool | None:
    """Whether a byte of a file is outside the page cache; None if the system cannot tell."""
    if not NO_WAIT:
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], offset, NO_WAIT)
    except BlockingIOError:
        return True
    except OSError:  # not supported here, or a bad disk, which the read itself will report
        return None
    return False


def after_fork_in_child(call: Callable[[], Any]) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def _seek_and_read(descriptor: int, size: int, offset: int) -> bytes:
    """One thread at a time, since a descriptor has one position."""
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def _read_into_parts(descriptor: int, parts: Sequence[Any], offset: int) -> int:
    done = 0
    for part in parts:
        view = memoryview(part).cast("B")
        found = pread(descriptor, len(view), offset + done)
        view[: len(found)] = found
        done += len(found)
        if len(found) < len(view):
            break
    return done


pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)
preadv: Callable[[int, Sequence[Any], int], int] = getattr(os, "preadv", _read_into_parts)


def leave_at_exit() -> None:
    """Ends a daemon thread at interpreter exit, when its modules and files may be closed already."""
    if threading.current_thread() is not threading.main_thread() and not threading.main_thread().is_alive():
        raise SystemExit


class ProcessGuard:
    """Detects use in a fork of the process that built it: threads, locks and HDF5 handles do not survive a fork."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def forked(self) -> bool:
        return self.pid != os.getpid()

    def error(self, event: str, advice: str, *, file: str | None = None) -> WorkerError:
        pids = f"in process {self.pid} and cannot be used in its fork {os.getpid()}"
        return WorkerError(f"{event} {pids}: {advice}", file=file)


class Gate:
    """Opens once, for all threads that wait for it. Safe to interrupt at any point."""

    def __init__(self) -> None:
        self._opened = False
        self._closed = threading.Lock()  # held until `open`, and briefly by each thread that passes afterwards
        self._closed.acquire()

    def open(self) -> None:
        self._opened = True
        with contextlib.suppress(RuntimeError):  # the gate was open already
            self._closed.release()

    def wait(self, timeout: float) -> bool:
        """Whether the gate is open. Takes the whole timeout if an interrupt hits another thread that passes."""
        if not self._opened and self._closed.acquire(timeout=timeout):
            with contextlib.suppress(RuntimeError):  # `open` was called again meanwhile
                self._closed.release()
        return self._opened
