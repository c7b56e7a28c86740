"""`FileIdentity`: what tells one state of a file from another; and `other_files`, which a dataset takes values from."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py

from lit_async_data.errors import FormatError, MissingError
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.opening import opening

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
            MissingError: It is not there any more.
            SourceError: The system does not open it; says what to do.
        """
        places = places or [drawn(0, self.size) for _ in range(PIECES if self.size else 0)]
        try:
            with opening(path, os.O_NONBLOCK) as file:
                pieces = tuple(Piece(at, size, _digest(file.fileno(), at, size)) for at, size in places)
        except OSError as error:
            raise source_error(error, path, "cannot be opened", file=path) from error
        return dataclasses.replace(self, pieces=pieces)

    def holds(self, descriptor: int) -> bool:
        """Whether the pieces of a file are what they were; False if none is known."""
        same = (_digest(descriptor, piece.offset, piece.size) == piece.digest for piece in self.pieces)
        return bool(self.pieces) and all(same)


def drawn(begin: int, nbytes: int) -> tuple[int, int]:
    """Place and size of a piece somewhere in a part of a file; another one each time."""
    size = min(nbytes, PIECE_BYTES)
    return begin + secrets.randbelow(nbytes - size + 1), size


def _digest(descriptor: int, offset: int, size: int) -> bytes:
    return hashlib.blake2b(os.pread(descriptor, size, offset), digest_size=16).digest()


Others = tuple[tuple[str, FileIdentity], ...]


def other_files(dataset: h5py.Dataset, file: h5py.File, name: str, *, allowed: bool) -> Others:
    """The other files that a dataset takes values from, with their states.

    What is missing there comes out of libhdf5 as fill values, without a word. So they are refused unless the user
    allows them, must be there when the source is built, and are checked like any other file when they are read.

    Args:
        dataset: Open.
        file: The file that it was opened in.
        name: Its name.
        allowed: Whether the user allows them.

    Raises:
        FormatError: There are some, and they are not allowed; or they are named by a pattern.
        MissingError: One is not there, or has not the dataset that is taken from it.
    """
    where: dict[str, Any] = {"file": file.filename, "dataset": name}
    here = os.path.abspath(file.filename)
    full = f"{file.filename}:/{name.strip('/')}"
    linked = dataset.file.filename != file.filename
    if not allowed:
        _refuse(dataset, full, linked=linked, where=where)
    found: set[str] = set()
    _follow(dataset, full, where, found, frozenset())
    if linked:
        found.add(os.path.abspath(dataset.file.filename))
    found.discard(here)
    return tuple((path, FileIdentity.of(os.stat(path)).with_pieces(path)) for path in sorted(found))


def _follow(
    dataset: h5py.Dataset, full: str, where: dict[str, Any], found: set[str], above: frozenset[tuple[str, str]]
) -> None:
    """Add the files that a dataset takes values from, those of the datasets there, and so on."""
    path = os.path.abspath(dataset.file.filename)
    me = (path, dataset.name or "")
    if me in above:
        raise FormatError(f"{full} takes values from itself, by {path}:{dataset.name}", **where)
    for stored, _, _ in dataset.external or ():
        found.add(_resolved(os.fsdecode(stored), [os.getcwd()], full, where))  # libhdf5 looks nowhere else
    seen: set[tuple[str, str]] = set()
    for part in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%b" in part.file_name or "%b" in part.dset_name:
            raise FormatError(f"{full} takes values from files by a pattern, {part.file_name}; list them", **where)
        other = path
        if part.file_name != ".":
            other = _resolved(part.file_name, [os.path.dirname(path), os.getcwd()], full, where)
        if (other, part.dset_name) in seen:
            continue
        seen.add((other, part.dset_name))
        found.add(os.path.abspath(other))
        try:
            with h5py.File(other, "r", locking="best-effort") as file:
                source = file.get(part.dset_name)
                if not isinstance(source, h5py.Dataset):
                    raise _absent(other, part.dset_name, full, where)
                _follow(source, full, where, found, above | {me})
        except OSError as error:
            raise _absent(other, part.dset_name, full, where) from error


def _refuse(dataset: h5py.Dataset, full: str, *, linked: bool, where: dict[str, Any]) -> None:
    allow = "or allow it with allow_external=True"
    if linked:
        raise FormatError(
            f"{full} is a link into another file, {dataset.file.filename}; give that file as path, {allow}", **where
        )
    if dataset.is_virtual:
        raise FormatError(
            f"{full} is a virtual dataset: a missing part would come out as fill values; give the files it is made of "
            f"as path, write its values to a dataset of their own, {allow}",
            **where,
        )
    if dataset.external:
        raise FormatError(
            f"{full} keeps its values in another file, {dataset.external[0][0]}; write them to a dataset of this one, "
            f"{allow}",
            **where,
        )


def _resolved(name: str, folders: list[str], full: str, where: dict[str, Any]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    raise MissingError(f"{full} takes values from {name}, which is not in {' or '.join(folders)}", **where)


def _absent(path: str, name: str, full: str, where: dict[str, Any]) -> MissingError:
    return MissingError(f"{full} takes values from {path}:/{name.strip('/')}, which cannot be opened", **where)
