"""`FileIdentity`: what tells one state of a file from another; and `external_files`, which a dataset takes values from."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from lit_async_data.errors import MissingError

# Pieces of a file that are compared when only the time of its last change of any kind differs, and their bytes at most.
PIECES = 8
PIECE_BYTES = 4096


class Piece(NamedTuple):
    """Some bytes of a file, as they were."""

    offset: int
    size: int
    digest: bytes


@dataclasses.dataclass(frozen=True)
class FileIdentity:
    """What tells one state of a file from another.

    Programs set the time of writing (rsync, touch, tar), and so can hide that a file was written to. The time of any
    change cannot be set, but other rights, one more link or a backup change it too. So it is no part of what is
    compared: where it alone differs, pieces of the file decide.

    Attributes:
        device: Where it lies.
        inode: Its number there.
        size: In bytes.
        mtime_ns: When it was written to, as far as programs tell the truth.
        ctime_ns: When anything about it changed.
        pieces: Some of its bytes.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int = dataclasses.field(default=0, compare=False)
    pieces: tuple[Piece, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The state that ``os.stat`` or ``os.fstat`` found, without pieces."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def difference(self, now: FileIdentity) -> str | None:
        """What has happened to the file since, in words; None if nothing has."""
        if now == self:
            return None
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file"
        if now.size != self.size:
            return f"{'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        return "was written to"

    def with_pieces(self, path: str, places: Sequence[tuple[int, int]] = ()) -> FileIdentity:
        """The same with pieces.

        Args:
            path: The file.
            places: First byte and bytes of each; none for some drawn from anywhere in the file.

        Raises:
            MissingError: It cannot be opened any more.
        """
        places = places or [random_piece(0, self.size) for _ in range(PIECES if self.size else 0)]
        try:
            with open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
                pieces = tuple(Piece(at, size, _digest(file.fileno(), at, size)) for at, size in places)
        except OSError as error:
            raise MissingError(f"{path} cannot be opened: {error}", file=path) from error
        return dataclasses.replace(self, pieces=pieces)

    def matches(self, descriptor: int) -> bool:
        """Whether the pieces of a file are what they were; False if none is known."""
        same = (_digest(descriptor, piece.offset, piece.size) == piece.digest for piece in self.pieces)
        return bool(self.pieces) and all(same)


def random_piece(begin: int, nbytes: int) -> tuple[int, int]:
    """Place and size of a piece somewhere in a part of a file; another one each time."""
    size = min(nbytes, PIECE_BYTES)
    return begin + secrets.randbelow(nbytes - size + 1), size


def _digest(descriptor: int, offset: int, size: int) -> bytes:
    return hashlib.blake2b(os.pread(descriptor, size, offset), digest_size=16).digest()


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
