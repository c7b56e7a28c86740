"""Cache files on disk: which of them are trusted, where they are kept, and how much space they may take.

A cache says where the bytes of a sample are, or what a table holds. Whoever can write it decides which values a model
is trained on. A file is therefore trusted only if it belongs to this user, to root, or to the owner of the data, who
can all change those values anyway, and if nobody else may write to it. The folder does not matter: in a shared folder
others can remove a file or replace it by their own, but their own is not trusted.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import time
from collections.abc import Iterable

from lit_async_data import system
from lit_async_data.sources.local_files.opening import opening

# Most bytes of all files in the user's cache folder.
MOST_BYTES = 2**30
# An older temporary file was left behind by a process that was killed.
LEFT_BEHIND_S = 24 * 3600
# Least time between two updates of a file's time of use; an update at every opening would be too many.
USED_S = 3600
# File systems on which files are not mapped: another machine can truncate a file, which kills the process with SIGBUS.
NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs"),
        *("pvfs2", "orangefs", "panfs", "wekafs", "gfs2", "ocfs2", "fuse"),
    )
)


class ForeignError(ValueError):
    """A cache file that somebody else wrote or may write to."""


def opened(path: str, owners: Iterable[int]) -> io.FileIO:
    """Open a trusted file for reading. Follows no link and does not block on a pipe.

    Args:
        path: The file.
        owners: User ids of the owners of the data. If there are several, none of them is trusted, because none may
            speak for the others.

    Returns:
        The open file.

    Raises:
        OSError: The file cannot be opened, or is a folder.
        ForeignError: Somebody else owns the file, or others may write to it.
        ValueError: The path is not a regular file.
    """
    file = opening(path, system.NO_LINKS | system.NO_BLOCKING)
    try:
        _check_believed(os.fstat(file.fileno()), set(owners))
    except BaseException:
        file.close()
        raise
    return file


def _check_believed(status: os.stat_result, owners: set[int]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if owner(status) not in {system.user_id(), 0} | (owners if len(owners) == 1 else set()):
        raise ForeignError(f"it belongs to user {owner(status)}, who is neither you, nor root, nor the data's owner")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(f"others may write to it: its mode is {stat.S_IMODE(status.st_mode):#o}")


def owner(status: os.stat_result) -> int:
    """The user id of the owner of a file."""
    return status.st_uid


def is_foreign(path: str) -> bool:
    """Whether the path is somebody else's file, which must stay as it is."""
    try:
        return owner(os.lstat(path)) != system.user_id()
    except OSError:
        return False


def own_name(path: str) -> str:
    """The path to use if somebody else's file has the original path."""
    base, extension = os.path.splitext(path)
    return f"{base}.{system.user_id()}{extension}"


def on_network(descriptor: int) -> bool:
    """Whether a file is on a network file system, or on one that cannot be determined."""
    kind = file_system(descriptor)
    return kind is None or kind in NETWORK or kind.startswith("fuse.")


def file_system(descriptor: int) -> str | None:
    """The type of the file system of a file, as Linux names it; None if unknown."""
    with contextlib.suppress(OSError, StopIteration, IndexError):
        with open(f"/proc/self/fdinfo/{descriptor}") as info:
            mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", errors="surrogateescape") as mounts:
            entry = next(line for line in mounts if line.split(maxsplit=1)[0] == mount)
        return entry.partition(" - ")[2].split()[0]
    return None


def user_folder() -> str | None:
    """This package's folder in the user's cache folder; None if the user has none."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    folders = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser(default))
    chosen = next((folder for folder in folders if os.path.isabs(folder)), None)
    return None if chosen is None else os.path.join(chosen, "lit_async_data")


def used(path: str) -> None:
    """Record that a file is in use now; many file systems do not update access times."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > USED_S:
            os.utime(path)


def trim(folder: str, extension: str, most: int | None = None) -> None:
    """Remove the least recently used files until the rest takes at most ``most`` bytes.

    Several processes may do this at once. A process that has opened or mapped a file keeps it.

    Args:
        folder: The user's cache folder.
        extension: Suffix of the file names. Names that end in ``-new`` after it are temporary files.
        most: Bytes; `MOST_BYTES` unless given.
    """
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(extension):
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
                elif entry.name.endswith(f"{extension}-new") and time.time() - status.st_mtime > LEFT_BEHIND_S:
                    os.unlink(entry.path)
    excess = sum(size for _, size, _ in files) - (MOST_BYTES if most is None else most)
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        excess -= size
