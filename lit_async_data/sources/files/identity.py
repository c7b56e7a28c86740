"""`FileIdentity`: which file or object was inspected, and in which state."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple


class FileIdentity(NamedTuple):
    device: int
    inode: int  # of an object: a number made of its address, version and size
    size: int
    mtime_ns: int  # time of the last write, unless a program (rsync, touch, tar) has set it
    ctime_ns: int  # time of the last change to content, permissions or names, which no program can set
    links: int  # names of the file

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink
        )

    @classmethod
    def of_object(cls, name: str, size: int, tag: str) -> FileIdentity:
        return cls(0, int.from_bytes(hashlib.blake2b(f"{name}\0{tag}".encode(), digest_size=7).digest()), size, 0, 0, 1)

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What tells whether the file has changed, on any machine."""
        return self.inode, self.size, self.mtime_ns, self.ctime_ns

    def difference(self, now: FileIdentity, path: str) -> str | None:
        """What happened to the file since, for messages; None if only its names have changed, or nothing.

        A new or a removed name sets the ctime, and so does renaming, after which ``path`` does not lead to the file.
        """
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file"
        if now.size != self.size:
            return f"{'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        if now.mtime_ns != self.mtime_ns:
            return "was written to"
        if now.ctime_ns == self.ctime_ns or now.links != self.links or not now._is_at(path):
            return None
        return "was written to and its modification time set back, or its permissions or owner were changed,"

    def _is_at(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)
