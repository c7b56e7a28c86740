"""`FileIdentity`: distinguishes one state of a file from another."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import NamedTuple

from lit_async_data import system
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.local_files.opening import opening

# Pieces of a file that are compared if only its ctime has changed, and their largest size.
PIECES = 8
PIECE_BYTES = 4096


class Piece(NamedTuple):
    """Some bytes of a file, as a digest."""

    offset: int
    size: int
    digest: bytes


@dataclasses.dataclass(frozen=True)
class FileIdentity:
    """The state of a file: device, inode, size and times, with digests of a few pieces.

    Programs such as rsync, touch and tar set the mtime, so it can hide a write. Nobody can set the ctime, but chmod, a
    new hard link or a backup changes it too. So the ctime is not compared; if it alone differs, pieces of the file
    decide.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int  # time of the last write, unless a program has set it
    # Time of the last change to the content or the metadata.
    ctime_ns: int = dataclasses.field(default=0, compare=False)
    pieces: tuple[Piece, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity in a result of ``os.stat`` or ``os.fstat``, without pieces."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def difference(self, now: FileIdentity) -> str | None:
        """What happened to the file since, for messages; None if nothing did."""
        if now == self:
            return None
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file"
        if now.size != self.size:
            return f"{'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        return "was written to"

    def with_pieces(self, path: str, places: Sequence[tuple[int, int]] = ()) -> FileIdentity:
        """A copy with digests of pieces of the file, at these offsets and sizes, or at random ones."""
        places = places or [random_piece(0, self.size) for _ in range(PIECES if self.size else 0)]
        try:
            with opening(path, system.NO_BLOCKING) as file:
                pieces = tuple(Piece(at, size, _digest(file.fileno(), at, size)) for at, size in places)
        except OSError as error:
            raise source_error(error, path, "cannot be opened", file=path) from error
        return dataclasses.replace(self, pieces=pieces)

    def matches(self, descriptor: int) -> bool:
        """Whether an open file still has the same pieces; False if no piece is known."""
        same = (_digest(descriptor, piece.offset, piece.size) == piece.digest for piece in self.pieces)
        return bool(self.pieces) and all(same)


def random_piece(begin: int, nbytes: int) -> tuple[int, int]:
    """Offset and size of a random piece of a range of bytes."""
    import secrets

    size = min(nbytes, PIECE_BYTES)
    return begin + secrets.randbelow(nbytes - size + 1), size


def _digest(descriptor: int, offset: int, size: int) -> bytes:
    import hashlib

    return hashlib.blake2b(system.pread(descriptor, size, offset), digest_size=16).digest()
