"""Files that caches keep for later: whose are believed, where they are kept, and how many there may be.

A cache says where the bytes of a sample lie, or what stands in a table. Whoever can write it decides which values are
trained on. So a file is believed only if it belongs to this user, to root, or to the owner of the data, who all can
change those values anyway, and if nobody else may write to it. The folder does not matter: in one that all may write
to, others can remove a file or put their own in its place, but that one is theirs, and not believed.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import time
from collections.abc import Iterable

from lit_async_data.sources.opening import opening

# Of the user's folder, all files together.
MOST_BYTES = 2**30
# What is older and has no name of its own yet was left behind by a process that was killed.
LEFT_BEHIND_S = 24 * 3600
# A file counts as used now only if it did not within this time: one write per opening would be too many.
USED_S = 3600
# Where a map is no copy of its own: another machine can truncate the file, which ends the process.
NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs"),
        *("pvfs2", "orangefs", "panfs", "wekafs", "gfs2", "ocfs2", "fuse"),
    )
)


class ForeignError(ValueError):
    """A file that is there, and whole perhaps, but that somebody else has made or may write to."""


def opened(path: str, owners: Iterable[int]) -> io.FileIO:
    """A file that is believed, open for reading; not through a link, nor waiting for the other end of a pipe.

    Args:
        path: The file.
        owners: The numbers of the users whom the data belong to; where they are several, none of them may speak for
            the others, and none is believed.

    Raises:
        OSError: It cannot be opened, or is a folder.
        ForeignError: It belongs to somebody else, or others may write to it.
        ValueError: It is no file.
    """
    file = opening(path, os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check_believed(os.fstat(file.fileno()), set(owners))
    except BaseException:
        file.close()
        raise
    return file


def _check_believed(status: os.stat_result, owners: set[int]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if owner(status) not in {os.geteuid(), 0} | (owners if len(owners) == 1 else set()):
        raise ForeignError(f"it belongs to user {owner(status)}, who is neither you, nor root, nor the data's owner")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(f"others may write to it: its mode is {stat.S_IMODE(status.st_mode):#o}")


def owner(status: os.stat_result) -> int:
    """The number of the user whom a file belongs to."""
    return status.st_uid


def is_foreign(path: str) -> bool:
    """Whether somebody else's file has this name, which is left alone."""
    try:
        return owner(os.lstat(path)) != os.geteuid()
    except OSError:
        return False


def own_name(path: str) -> str:
    """The name to take where somebody else's file has the first."""
    base, extension = os.path.splitext(path)
    return f"{base}.{os.geteuid()}{extension}"


def on_network(descriptor: int) -> bool:
    """Whether a file lies on a network file system, or on one of which that is not known."""
    kind = file_system(descriptor)
    return kind is None or kind in NETWORK or kind.startswith("fuse.")


def file_system(descriptor: int) -> str | None:
    """The kind of the file system that a file lies on, as Linux names it; None where the system does not say."""
    with contextlib.suppress(OSError, StopIteration, IndexError):
        with open(f"/proc/self/fdinfo/{descriptor}") as info:
            mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", errors="surrogateescape") as mounts:
            found = next(line for line in mounts if line.split(maxsplit=1)[0] == mount)
        return found.partition(" - ")[2].split()[0]
    return None


def user_folder() -> str | None:
    """The user's cache folder, for this package; None if there is none."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    folders = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser(default))
    chosen = next((folder for folder in folders if os.path.isabs(folder)), None)
    return None if chosen is None else os.path.join(chosen, "lit_async_data")


def used(path: str) -> None:
    """Mark a file of the user's folder as used now: file systems often do not."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > USED_S:
            os.utime(path)


def trim(folder: str, extension: str, most: int | None = None) -> None:
    """Remove the files that were used longest ago, until all together have at most so many bytes.

    Several processes may do it at once. Who has opened or mapped a file keeps it.

    Args:
        folder: The user's own.
        extension: What the names end with; those that end with ``-new`` too are written just now, or left behind.
        most: Bytes; `MOST_BYTES` unless given.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(extension):
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
                elif entry.name.endswith(f"{extension}-new") and time.time() - status.st_mtime > LEFT_BEHIND_S:
                    os.unlink(entry.path)
    left = sum(size for _, size, _ in found) - (MOST_BYTES if most is None else most)
    for _, size, path in sorted(found):
        if left <= 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        left -= size
