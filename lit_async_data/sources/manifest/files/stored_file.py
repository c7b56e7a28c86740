"""Files that a table names: where they may lie, and all bytes of one."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from typing import Any

from lit_async_data.errors import ChangedError, FormatError, ManifestError, MissingError, SourceError
from lit_async_data.sources.descriptors import advice_on
from lit_async_data.sources.file_times import changed_recently
from lit_async_data.sources.hdf5.storage.residency import is_cold

# Most paths: names below the root, of which none is hidden, nor "." or "..". Others are looked at more closely.
_PLAIN = re.compile(r"[^./\\:\0][^/\\:\0]*(?:/[^./\\:\0][^/\\:\0]*)*")
_ELSEWHERE = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.\-]*:[/\\]|\\\\")
# With O_NONBLOCK a pipe or a device is opened at once, and refused, where it would wait for whoever writes to it.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# What systems say of a link that was not to be followed.
_IS_A_LINK = (errno.ELOOP, errno.EMLINK)
# Fails for what is not in memory. Where the system cannot say, nothing is read straight to its place.
_AT_ONCE = getattr(os, "RWF_NOWAIT", 0)
# What takes longer came from elsewhere, where the system cannot say.
_SLOW_S = 1e-3
# As much as one call of read may be asked for everywhere.
_PIECE = 2**30


class RootDirectory:
    """A folder, and which of the paths in a table lie in it. Can be pickled; may be used from any thread.

    What is promised: a path that `path_of` returns has no ``..`` above the folder and names nothing on another
    machine; and when `checked` returned it, or `open` opened it, it led to no place outside, by whatever links.
    Folders are looked at once, so one that is replaced by a link later is not noticed: this guards against tables, not
    against those who can write to the folder.

    Args:
        root: The folder; a path relative to the working directory is made absolute now.
        allow_outside_root: Whether paths may leave it.

    Example:
        >>> RootDirectory("/data").path_of("train/a.jpg")
        '/data/train/a.jpg'
        >>> RootDirectory("/data").path_of("../etc/passwd")
        Traceback (most recent call last):
        lit_async_data.errors.ManifestError: ../etc/passwd: leaves root /data; move it, or write allow_outside_root=True
    """

    def __init__(self, root: str, *, allow_outside_root: bool = False) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.allow_outside_root = allow_outside_root
        self._within: set[str] = set()

    def path_of(self, path: str) -> str:
        """The absolute path of what a table names, by its words alone: nothing is looked up.

        Raises:
            ManifestError: It is none, is an address on a network, or leaves the root.
        """
        if _PLAIN.fullmatch(path):  # a third of the time
            return f"{self.root}/{path}" if self.root != "/" else f"/{path}"
        if not path or "\0" in path:
            raise ManifestError(f"{path!r}: not a path")
        if _ELSEWHERE.match(path):
            raise ManifestError(f"{path}: an address, not a path; only files are read, so fetch it first")
        joined = os.path.join(self.root, path)
        if not self.allow_outside_root and not _lies_in(os.path.normpath(joined), self.root):
            raise self._left(path)
        return joined

    def within(self, path: str) -> str:
        """A path from `path_of` as it is called from the root on, in one way only; absolute if it lies outside."""
        path = os.path.normpath(path)
        return path[len(self.root.rstrip("/")) + 1 :] if _lies_in(path, self.root) else path

    def checked(self, path: str) -> str:
        """A path from `path_of`, once no link on it leads out of the root. Costs 2 µs in a folder seen before.

        Raises:
            ManifestError: One does.
        """
        if self.allow_outside_root:
            return path
        self._check_folder(path)
        if os.path.islink(path):
            self._check(path, path)
        return path

    def open(self, path: str, opened: list[int]) -> None:
        """Open a path from `path_of`, checked as in `checked`, at half the price.

        Args:
            path: The file.
            opened: Gets the descriptor, which the caller closes.

        Raises:
            ManifestError: It leads out of the root.
            OSError: It cannot be opened.
        """
        # `os.open` is called by C, not by Python: an interrupt (Ctrl-C) between its return and the next statement would
        # lose the descriptor. CPython delivers interrupts when a call from Python has returned; by then it is listed.
        if self.allow_outside_root:
            opened.extend(map(os.open, (path,), (_FLAGS,)))
            return
        self._check_folder(path)
        try:
            opened.extend(map(os.open, (path,), (_FLAGS | os.O_NOFOLLOW,)))
        except OSError as error:
            if error.errno not in _IS_A_LINK:
                raise
        else:
            return
        self._check(path, path)
        opened.extend(map(os.open, (path,), (_FLAGS,)))

    def _check_folder(self, path: str) -> None:
        folder = path[: path.rfind("/")]
        if folder not in self._within:
            self._check(folder or "/", path)
            self._within.add(folder)

    def _check(self, place: str, path: str) -> None:
        if not _lies_in(os.path.realpath(place), os.path.realpath(self.root)):
            raise self._left(path)

    def _left(self, path: str) -> ManifestError:
        return ManifestError(f"{path}: leaves root {self.root}; move it, or write allow_outside_root=True")


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# Of a file that was named by no table.
ANYWHERE = RootDirectory("/", allow_outside_root=True)


def read_file(path: str, most_bytes: int) -> bytes:
    """All bytes of a file; as `fetched`."""
    return fetched(path, most_bytes)[0]


def filled(path: str, parts: Sequence[Any], nbytes: int, root: RootDirectory = ANYWHERE) -> bool:
    """Read a file that is in memory straight to where it goes, if it has exactly as many bytes.

    Args:
        path: From ``root.path_of``.
        parts: What its bytes are written to, one part after the other.
        nbytes: Of all parts.
        root: Where it may lie.

    Returns:
        Whether it was, and had not been written to in the last two seconds. Else the parts hold anything, and `fetched`
        says what is wrong, if anything is.

    Raises:
        ManifestError: As `RootDirectory.open`.
    """
    if not _AT_ONCE:
        return False
    opened: list[int] = []
    try:
        root.open(path, opened)
        (number,) = opened
        # Looked at afterwards: one that grew or was written to meanwhile is not taken for whole.
        read, found = os.preadv(number, parts, 0, _AT_ONCE), os.fstat(number)
        return read == nbytes == found.st_size and not changed_recently(found.st_mtime_ns)
    except OSError:
        return False
    finally:
        if opened:
            os.close(opened[0])


def fetched(path: str, most_bytes: int, root: RootDirectory = ANYWHERE) -> tuple[bytes, bool]:
    """All bytes of a file, and whether they had to come from a disk or over a network.

    Args:
        path: Of a file, from ``root.path_of``; pipes, devices and folders are refused.
        most_bytes: More are refused before anything is read.
        root: Where it may lie.

    Raises:
        ManifestError: As `RootDirectory.open`.
        MissingError: There is none.
        FormatError: It is no file, or too large.
        ChangedError: It was written to while it was read.
        SourceError: The system does not let it be read.
    """
    started = time.perf_counter()
    opened: list[int] = []
    try:
        root.open(path, opened)
        (number,) = opened
        state = _state(number, path, most_bytes)
        cold = is_cold(number, 0)
        data = _all_bytes(number, path, state.st_size)
        if os.fstat(number).st_mtime_ns != state.st_mtime_ns:
            raise _changed(path)
        if changed_recently(state.st_mtime_ns):  # a write that goes on may have begun before, and is not told again
            os.lseek(number, 0, os.SEEK_SET)
            if _all_bytes(number, path, state.st_size) != data:
                raise _changed(path)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{path}: no such file; is the folder mounted, and the table right?", file=path) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        if opened:
            os.close(opened[0])
    return data, time.perf_counter() - started > _SLOW_S if cold is None else cold


def _changed(path: str) -> ChangedError:
    return ChangedError(f"{path}: was written to while it was read; do not do that during training", file=path)


def _unreadable(path: str, error: OSError) -> SourceError:
    advice = advice_on(error)
    return SourceError(
        f"{path}: cannot be read " + (f"({error.strerror})" if advice is None else f"({advice})"), file=path
    )


def _state(number: int, path: str, most_bytes: int) -> os.stat_result:
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(f"{path}: not a file (a folder, a pipe or a device)", file=path)
    if found.st_size > most_bytes:
        raise FormatError(f"{path}: {found.st_size} bytes, of which at most {most_bytes} are read", file=path)
    return found


def _all_bytes(number: int, path: str, size: int) -> bytes:
    pieces, left = [], size + 1  # one more, to see that it ends there
    while left > 1 and (piece := os.read(number, min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    if left != 1:
        raise _changed(path)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
