"""Files that a table names: checks that their paths stay inside the root folder, and reads them whole, also ahead."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_async_data import system
from lit_async_data.errors import ChangedError, FormatError, ManifestError, MissingError, SourceError, WorkerError
from lit_async_data.sources import local_files
from lit_async_data.sources.contract.source import Reservation
from lit_async_data.sources.files.files import LOCAL, MOST_WHOLE_BYTES, Files
from lit_async_data.sources.files.transport import Started, Transport
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.local_files import changed_recently, is_address, retry_once
from lit_async_data.system import ProcessGuard, is_cold

# Most paths: names below the root, without hidden ones, "." or "..", or characters for a shell. Others are examined.
_PLAIN = re.compile(r"[^./\\:\0~$][^/\\:\0]*(?:/[^./\\:\0][^/\\:\0]*)*")
# Without O_NONBLOCK, opening a pipe or a device could block before it is refused.
_FLAGS = os.O_RDONLY | system.CLOSE_ON_EXEC | system.NO_BLOCKING | system.NO_TERMINAL | system.BINARY
_LINK_ERRORS = (errno.ELOOP, errno.EMLINK)  # for a link that O_NOFOLLOW does not follow
_SLOW_S = 1e-3  # a file that takes longer counts as cold, if the system does not say
THREADS = 16  # with 5 ms per file from a network, these read 3200 files per second
# Reading ahead begins if more than this share of about the last 16 files was not in the page cache.
_AVERAGED_FILES, _COLD_SHARE = 16, 0.1
_MOST_COMING = 128  # remote files that wait for somebody who needs them
_MOST_AHEAD = 2**26  # bytes of a file; each thread holds one file for a moment


class RootDirectory:
    """A folder, and the checks that paths of a table stay inside it.

    `path_of` refuses addresses and ``..`` above the folder; `checked` and `open` also refuse links out of it. Each
    folder below is checked once: this guards against tables, not against users who can replace a folder by a link.
    """

    def __init__(self, root: str, *, allow_external: bool = False, files: Files = LOCAL) -> None:
        self.root, self.files = files.named(root).rstrip("/") or "/", files
        self.all_local = files.is_local(self.root) and not allow_external  # saves calls for each file
        self.allow_external = allow_external
        self._checked_folders: set[str] = set()

    def path_of(self, path: str) -> str:
        """The absolute path. Accesses files only if the path begins with ``~`` or ``$``."""
        if _PLAIN.fullmatch(path):  # fast path, a third of the time
            return f"{self.root}/{path}" if self.root != "/" else f"/{path}"
        if path.startswith(("~", "$", "file://")) and "\0" not in path:
            path = local_files.expanded(path, self.root)
        if not path or "\0" in path:
            raise ManifestError(f"{path!r}: not a path; give the path of a file")
        if not is_address(path) and (why := local_files.not_local(path)):
            raise ManifestError(f"{path}: {why}")
        joined = path if is_address(path) else os.path.join(self.root, path)
        if not self.allow_external and not _is_inside(_normal(joined), self.root):
            raise self._outside_error(path)
        return joined

    def named(self, path: str) -> str:
        """As `path_of`; returns a path that is refused as it is."""
        with contextlib.suppress(SourceError):
            path = self.path_of(path)
        return path

    def within(self, path: str) -> str:
        """Normalized and relative to the root; absolute if it is outside."""
        path = _normal(path)
        return path[len(self.root.rstrip(os.sep)) + 1 :] if _is_inside(path, self.root) else path

    def checked(self, path: str) -> str:
        if self.allow_external or is_address(path):
            return path
        self._check_folder(path)
        if os.path.islink(path):
            self._check(path, path)
        return path

    def open(self, path: str, opened: list[int]) -> None:
        """Check a path as `checked` does, and append its descriptor to ``opened``."""
        if not self.allow_external:
            self._check_folder(path)
            try:
                return local_files.open_into(opened, path, _FLAGS | system.NO_LINKS)
            except OSError as error:
                if error.errno not in _LINK_ERRORS:
                    raise
            self._check(path, path)
        return local_files.open_into(opened, path, _FLAGS)

    def _check_folder(self, path: str) -> None:
        folder = path[: max(path.rfind("/"), path.rfind(os.sep))]
        if folder not in self._checked_folders:
            self._check(folder or "/", path)
            self._checked_folders.add(folder)

    def _check(self, place: str, path: str) -> None:
        if not _is_inside(os.path.realpath(place), os.path.realpath(self.root)):
            raise self._outside_error(path)

    def _outside_error(self, path: str) -> ManifestError:
        parts = os.path.join(self.root, path).removeprefix(self.root).split("/")
        link = next(filter(os.path.islink, itertools.accumulate(parts, os.path.join, initial=f"{self.root}/")), None)
        by = f" through the link {link} to {os.path.realpath(link)}" if link else ""
        return ManifestError(f"{path}: leaves root {self.root}{by}; move it, or set allow_external=True")


def _normal(path: str) -> str:
    scheme, mark, rest = path.partition("://") if is_address(path) else ("", "", path)
    return f"{scheme}{mark}{os.path.normpath(rest)}"


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def filled(path: str, parts: Sequence[Any], nbytes: int, root: RootDirectory) -> bool:
    """Read a file from the page cache into buffers of ``nbytes`` together; returns whether this succeeded.

    It fails for a file of another size, or one that was modified in the last two seconds.
    """
    if not system.NO_WAIT:
        return False
    opened: list[int] = []
    try:
        root.open(path, opened)
        (number,) = opened
        # Size and time are examined after the read, to detect a change during it.
        read, found = os.preadv(number, parts, 0, system.NO_WAIT), os.fstat(number)
        return read == nbytes == found.st_size and not changed_recently(found.st_mtime_ns)
    except OSError:
        return False
    finally:
        if opened:
            os.close(opened[0])


def fetched(path: str, most_bytes: int, root: RootDirectory) -> tuple[bytes, bool]:
    """All bytes of a file, and whether they came from disk or network, not from the page cache."""
    started = time.perf_counter()
    try:
        data, cold = retry_once(functools.partial(_opened_and_read, path, most_bytes, root))
    except (FileNotFoundError, NotADirectoryError):
        what = "no such file; is the table right, the folder mounted, and root= the folder where paths begin?"
        raise MissingError(f"{path}: {what}", file=path) from None
    except OSError as error:
        raise source_error(error, path, "cannot be read", file=path) from error
    return data, time.perf_counter() - started > _SLOW_S if cold is None else cold


def _opened_and_read(path: str, most_bytes: int, root: RootDirectory) -> tuple[bytes, bool | None]:
    opened: list[int] = []
    try:
        root.open(path, opened)
        (number,) = opened
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: not a file, but a folder, pipe or device; give the path of a file", file=path)
        if status.st_size > most_bytes:
            what = f"{status.st_size} bytes, more than the limit of {most_bytes}; leave it out"
            raise FormatError(f"{path}: {what}", file=path)
        cold = is_cold(number, 0)
        data = _all_bytes(number, status.st_size)
        changed = len(data) != status.st_size or os.fstat(number).st_mtime_ns != status.st_mtime_ns
        # A write may be in progress, which updates the time only when it begins.
        if not changed and changed_recently(status.st_mtime_ns):
            os.lseek(number, 0, os.SEEK_SET)
            changed = _all_bytes(number, status.st_size) != data
        if changed:
            raise ChangedError(f"{path}: changed while it was read; do not write to it during training", file=path)
    finally:
        if opened:
            os.close(opened[0])
    return data, cold


def _all_bytes(number: int, size: int) -> bytes:
    data = os.read(number, size + 1)  # one byte more, to detect a file that grew
    while len(data) < size and (more := os.read(number, size + 1 - len(data))):
        data += more
    return data


# -- reading ahead -----------------------------------------------------------------------------------------------------


class FilePrefetcher:
    """Reads files; threads read files ahead, local ones into the page cache, while it is reserved. Thread-safe."""

    def __init__(self, root: RootDirectory) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0  # without a lock: concurrent updates lose one file, which does not matter
        self._process, self._local = ProcessGuard(), Transport(THREADS)
        self._reserved = set[object]()
        # Files to read ahead, with the bytes of remote ones; `read` and `fill` remove theirs.
        self._coming = dict[str, Started[bytes] | None]()

    def __reduce__(self) -> tuple[type[FilePrefetcher], tuple[RootDirectory]]:
        return FilePrefetcher, (self._root,)

    def read(self, path: str) -> bytes:
        root, files = self._root, self._root.files
        known, coming = path in self._coming, self._coming.pop(path, None)
        if not root.all_local and not files.is_local(path):
            return files.whole(root.checked(path), coming)
        data, cold = fetched(path, MOST_WHOLE_BYTES, root)
        if not known:
            self._cold += (cold - self._cold) / _AVERAGED_FILES
        return data

    def fill(self, path: str, parts: Sequence[Any], nbytes: int) -> bool:
        root = self._root
        if not ((root.all_local or root.files.is_local(path)) and filled(path, parts, nbytes, root)):
            return False
        if path not in self._coming:
            self._cold -= self._cold / _AVERAGED_FILES
        self._coming.pop(path, None)
        return True

    @property
    def wanted(self) -> bool:
        cold = self._cold > _COLD_SHARE or not self._root.files.is_local(self._root.root)
        return bool(self._reserved) and cold and not self._process.forked

    def fetch(self, paths: Iterable[str]) -> None:
        files = self._root.files
        with contextlib.suppress(WorkerError):  # no thread is available: `read` does without
            for path in paths if self._reserved else ():
                if path in self._coming:
                    continue
                if files.is_local(path):
                    self._coming[path] = None
                    self._local.start(functools.partial(self._warm, path), urgent=False)
                elif len(self._coming) < _MOST_COMING:
                    self._coming[path] = files.start_whole(path)

    def reserve(self) -> Callable[[], None]:
        """Allow reading ahead; returns a function that ends this, and the threads if it is the last."""
        if self._process.forked:
            self._begin()
        key = object()
        reservation = Reservation(functools.partial(self._release, key))
        self._reserved.add(key)
        return reservation

    def _release(self, key: object) -> None:
        self._reserved.discard(key)
        if not self._reserved:
            self.close()

    def close(self) -> None:
        """Drop files that nobody has read, and end the threads."""
        self._root.files.close()
        self._local.close()
        self._coming.clear()

    def _warm(self, path: str) -> None:
        if path in self._coming:  # what it raises, `read` raises again
            data, cold = fetched(path, _MOST_AHEAD, self._root)
            self._local.arrived(len(data))
            self._cold += (cold - self._cold) / _AVERAGED_FILES
