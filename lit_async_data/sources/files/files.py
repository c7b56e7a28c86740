"""`Files`: how a source reaches its files: local ones by their paths, others by mirrors, in a cache or in memory."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from lit_async_data import system
from lit_async_data.errors import ConfigError, FormatError, StoreError
from lit_async_data.sources import local_files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import BLOCK, Mirror, MirroredFile, Ring
from lit_async_data.sources.files.stores import SECRETS, Store, Version, parts_of, public, store_of
from lit_async_data.sources.files.transport import Started, Transport
from lit_async_data.sources.local_files import CacheFolder, is_address, is_pattern, local_path, short_digest

# An object of at most this size comes whole when it is opened; of a larger one, this many bytes come first.
WHOLE_BYTES, HEAD_BYTES = 2**26, 2**20
# A table can name a film by mistake: larger files are refused. A table is copied in pieces of this size.
MOST_WHOLE_BYTES, _COPIED = 2**32, 2**23
# The most seconds without any bytes.
SILENT_S = 180.0
# Seconds from one line of the log to the next while files are opened.
PROGRESS_S = 10.0
# Without a cache folder, mirrors take this share of a rank's memory at most, and not more than this.
MEMORY_SHARE, MOST_MEMORY = 1 / 8, 4 * 2**30
# Of a mirror and its maps; other files of the process have room beside them.
_DESCRIPTORS = 4
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"TIB": 2**40}

_log = logging.getLogger(__name__)
T = TypeVar("T")


def bytes_given(name: str, given: Any) -> int | None:
    """A size such as ``"400GB"``, or a number of bytes."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise ConfigError(f"{given!r} is no size; give a number of bytes, or a text such as '400GB'", name)
    return int(float(found[1]) * _UNITS[found[2].upper()])


class MirrorFolder(CacheFolder):
    """Mirrors that all processes of a machine share. Thread-safe."""

    _lock = threading.Lock()  # one for all folders, since pickles have none

    def __init__(self, folder: str | os.PathLike[str], limit: int | None) -> None:
        super().__init__(folder, "copy", "cache")
        self._limit = limit
        self._versions, self._oldest = dict[str, list[str]](), list[str]()  # mirrors, by object and by time
        self._room: int | None = None  # None before they were listed
        self._warned = False  # that whole files have no room

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": {}, "_oldest": [], "_room": None}

    def scan(self) -> None:
        """Look which mirrors there are, and how many bytes have room, for all files that are opened next."""
        times, taken, to_come = dict[str, float](), 0, 0
        self._versions = {}
        for each in os.scandir(self.path):
            if each.name.endswith((_ENDS[0], _WHOLE)):
                with contextlib.suppress(OSError):  # another process may have removed it
                    status = each.stat()
                    taken += status.st_size
                    to_come += max(status.st_size - status.st_blocks * 512, 0)  # once all mirrors are filled
                    if each.name.endswith(_ENDS[0]):
                        times[path := each.path.removesuffix(_ENDS[0])] = status.st_mtime
                        self._versions.setdefault(each.name.partition(".")[0], []).append(path)
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize - to_come
        self._oldest = sorted(times, key=times.__getitem__, reverse=True)  # used longest ago: the last
        self._room = free if self._limit is None else min(free, self._limit - taken)

    def open(self, name: str, identity: FileIdentity) -> Mirror | None:
        """The mirror of an object; None if it has no room."""
        of = short_digest(name)
        path = os.path.join(self.path, f"{of}.{short_digest(repr(identity.state))}")
        try:
            if not os.path.exists(path + _ENDS[0]):
                with self._lock:
                    for old in self._versions.pop(of, ()):
                        self._remove(old)
                    if not self._has_room(identity.size, evict=True):
                        return None
            return Mirror(*self._descriptors(path), identity.size)
        except OSError as error:
            what = f"its mirror in {self.path} cannot be made: {error.strerror}; make room, or give another folder"
            raise StoreError(f"{name}: {what}", file=path) from error

    @staticmethod
    def _descriptors(path: str) -> tuple[int, int]:
        opened = list[int]()
        try:
            for end in _ENDS:
                opened.append(os.open(path + end, os.O_RDWR | os.O_CREAT | system.CLOSE_ON_EXEC, 0o600))
            system.lock(opened[0], alone=False)
            os.utime(path + _ENDS[0])
        except BaseException:
            for each in opened:
                os.close(each)
            raise
        return opened[0], opened[1]

    def has(self, name: str) -> bool:
        """Whether there was a mirror of some version of an object when the folder was listed."""
        return short_digest(name) in self._versions

    def _has_room(self, nbytes: int, *, evict: bool) -> bool:
        """Take room, which mirrors that nobody uses may make; returns whether there is enough."""
        if self._room is None:
            self.scan()
        room = self._room or 0
        while evict and nbytes > room and self._oldest:
            room += self._remove(self._oldest.pop())
        fits = nbytes <= room
        self._room = room - nbytes if fits else room
        return fits

    @staticmethod
    def _remove(path: str) -> int:
        """Unless a process uses it. Returns its bytes."""
        with contextlib.suppress(OSError):
            file = os.open(path + _ENDS[0], os.O_RDWR | system.CLOSE_ON_EXEC)
            try:
                system.lock(file, alone=True)
                for end in _ENDS:
                    os.unlink(path + end)
                return os.fstat(file).st_size
            finally:
                os.close(file)
        return 0

    def keep(self, path: str, state: str, data: bytes) -> None:
        """Keep a whole file, if it still fits."""
        with self._lock:
            fits, warned = self._has_room(len(data), evict=False), self._warned
            self._warned = warned or not fits
        if fits:
            name, head = _kept_as(path)
            self.store(path, name, head, f"{state}\n".encode() + data)
        elif not warned:
            what = "%s has no room for %s; such files are fetched again in each epoch: raise cache_limit"
            _log.warning(what, self.path, path)

    def kept(self, path: str) -> tuple[str, bytes]:
        """The state and the bytes of a file that came whole; an empty state if there is none."""
        state, _, data = (self.load(path, *_kept_as(path)) or b"").partition(b"\n")
        return state.decode(), data


_ENDS, _WHOLE = (".data", ".crc"), ".whole"  # the two files of a mirror; a file that came whole


def _kept_as(path: str) -> tuple[str, bytes]:
    """The name and the head of a file that came whole."""
    head = f"{system.OURS}: all of {path}, behind its state; may be deleted\n"
    return f"{short_digest(path)}{_WHOLE}", head.encode("utf-8", "surrogateescape")


_LEFT_OUT = "not in pickles, which others may read: build the source here, or set the environment of the store"


class NotPickled:
    """In place of a store that the user made, in a pickle without secrets."""


class Files:
    """Thread-safe. Its pickles have no secrets, but for those that go to a reader process.

    The arguments are those of `HDF5Source`. Without ``cache``, mirrors are in memory, and local files are read as they
    are.
    """

    def __init__(
        self, cache: Any = None, cache_limit: Any = None, storage_options: Any = None, storage: Any = None
    ) -> None:
        limit = bytes_given("cache_limit", cache_limit)
        if not isinstance(storage_options, Mapping | None):
            raise ConfigError(f"{type(storage_options).__name__} is not a mapping of options", "storage_options")
        self.folder = None if cache is None else MirrorFolder(cache, limit)
        self._options, self._storage = dict(storage_options or {}), storage
        self._limit, self._left_out = limit, list[str]()
        # The versions of whole files, by the store: another source may keep another store's file of that name.
        self._whole_states = dict[str, str]()
        self.versions = dict[str, Version]()
        self._begin()

    def _begin(self) -> None:
        retry = self._options.get("retry_config")
        tried = retry.get("retry_timeout") if isinstance(retry, Mapping) else None
        tried_s = tried.total_seconds() if isinstance(tried, dt.timedelta) else 0.0
        # A store that tries for longer is waited for until it has given up, a minute after its last try at most.
        self._transport, self._lock = Transport(timeout_s=max(SILENT_S, tried_s + 60)), threading.Lock()
        share = min(int(system.memory() * MEMORY_SHARE / system.ranks_here()), MOST_MEMORY)
        self._ring = Ring(self._limit if self._limit and self.folder is None else share)
        self._stores, self._opened, self._in_memory = dict[str, Store](), dict[str, MirroredFile](), self.folder is None

    def __getstate__(self) -> dict[str, Any]:
        kept = "folder", "_options", "_storage", "_limit", "_left_out", "_whole_states", "versions"
        state = {name: vars(self)[name] for name in kept}
        if not SECRETS.get():
            state["_options"] = public(self._options)
            state["_left_out"] = [*self._left_out, *(self._options.keys() - state["_options"].keys())]
            state["_storage"] = None if self._storage is None else NotPickled()
        return state

    def __deepcopy__(self, _: Any) -> Files:
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def options(self) -> dict[str, Any]:
        """As arguments, for another source of the same files."""
        options = {"storage_options": self._options, "storage": self._storage, "cache_limit": self._limit}
        return {"cache": self.folder and self.folder.path, **options}

    @property
    def room(self) -> int | None:
        """The bytes of files that stay in memory; None if the folder has room for every file so far."""
        return self._ring.nbytes if self._in_memory else None

    def is_local(self, path: str) -> bool:
        """Whether a file is read as it is."""
        return self.folder is None and self._storage is None and not is_address(path)

    def _store(self, path: str) -> Store:
        root = "" if hasattr(self._storage, "cat_file") else parts_of(path)[0]
        if isinstance(self._storage, NotPickled):
            raise StoreError(f"{path}: storage is {_LEFT_OUT}", file=path)
        own = getattr(self._storage, "config", {}) if root else {}  # of a store of obstore
        own = own.get("bucket") or own.get("container_name") or ""
        if own and own not in re.split("[/@]", root):
            raise ConfigError(f"{path}: the store is that of {own}; give one of its bucket", "storage")
        if root not in self._stores:
            note = f"; {', '.join(sorted(self._left_out))} of storage_options are {_LEFT_OUT}" if self._left_out else ""
            store = self._stores[root] = store_of(root, self._options, self._storage, note)
            store.arrived = self._transport.arrived
        return self._stores[root]

    def named(self, given: str | os.PathLike[str]) -> str:
        """The address or the absolute path that a user means."""
        path = os.fspath(given)
        return path if is_address(path) or self._storage is not None else local_path(path)

    def matching(self, pattern: str) -> list[str]:
        """The files that match, in natural order."""
        if self.is_local(pattern):
            return local_files.files_matching(pattern)
        with self.closed_after_an_error():
            return self._store(pattern).matching(pattern, functools.partial(self._got, pattern))

    def opened(self, path: str) -> MirroredFile | None:
        """A file that is read by a mirror; None if it is read as it is."""
        if self.is_local(path):
            return None
        while (found := self._opened.get(path)) is None:  # closed in between
            self.open_all([path])
        return found

    def open_all(self, paths: Iterable[str]) -> None:
        """Open remote files at once; the log tells how far that is, if it takes long."""
        paths = list(paths)
        system.allow_descriptors(_DESCRIPTORS * (len(paths) + len(self._opened)))
        self._transport.check_process()  # before the lock, which a thread may have held when this process forked
        with self._lock:
            opened = self._opened
            if self.folder is not None and not self.versions.keys() >= {*paths}:
                with contextlib.suppress(OSError):  # opening tells
                    self.folder.scan()
            coming = {
                path: self._transport.start(functools.partial(self._open, path))
                for path in paths
                if not self.is_local(path) and path not in opened
            }
            shown = time.monotonic()
            for number, (path, future) in enumerate(coming.items(), 1):
                opened[path] = self._transport.result_of(future, path)
                if time.monotonic() > shown + PROGRESS_S:
                    shown = time.monotonic()
                    _log.info("%d of %d remote files are open", number, len(coming))

    def _open(self, path: str) -> MirroredFile:
        store = self._store(path)
        head = memoryview(b"")
        if path not in self.versions:
            kept = self.folder is not None and self.folder.has(path)
            version, head = store.head(path, 1 if kept else HEAD_BYTES)
            if not version.size:
                raise FormatError(f"{path}: is empty; check the address", file=path)
            self.versions[path] = version
        version = self.versions[path]
        identity = version.identity or FileIdentity.of_object(path, version.size, version.tag)
        mirror = None if self.folder is None else self.folder.open(path, identity)
        if mirror is None:
            if self.folder is not None:
                self._in_memory = True
                _log.warning("%s has no room in %s, and stays in memory in part", path, self.folder.path)
            mirror = Mirror(system.memory_file(), system.memory_file(), version.size, self._ring)

        def get(begin: int, end: int) -> memoryview:
            return store.get(path, begin, end, version)

        file = MirroredFile(path, identity, mirror, get, self._transport)
        whole = len(head) if len(head) == version.size else len(head) // BLOCK * BLOCK
        if whole:
            file.store(0, head[:whole])
        return file

    def copied(self, given: Any) -> Any:
        """The path of a copy of a remote file, or of the files that match a pattern; anything else as it is."""
        if not isinstance(given, str) or not is_address(given):
            return given
        folder = tempfile.mkdtemp(prefix=f"{system.OURS}-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for address in self.matching(given) if is_pattern(given) else [given]:
            path = os.path.join(folder, address.replace("://", ":/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            store = self._store(address)
            with self.closed_after_an_error(), open(path, "wb") as out:
                version, data = self._got(address, functools.partial(store.head, address, _COPIED))
                out.write(data)
                for begin in range(_COPIED, version.size, _COPIED):
                    end = min(begin + _COPIED, version.size)
                    out.write(self._got(address, functools.partial(store.get, address, begin, end, version)))
        return os.path.join(folder, given.replace("://", ":/"))

    def _got(self, path: str, function: Callable[[], T]) -> T:
        return self._transport.result_of(self._transport.start(function), path)

    def start_whole(self, path: str) -> Started[bytes] | None:
        """Start to read a small file whole; None if `keeps` it."""
        return None if self.keeps(path) else self._transport.start(functools.partial(self._whole, path), urgent=False)

    def whole(self, path: str, coming: Started[bytes] | None) -> bytes:
        """A small file whole, which may be in the cache folder, or on its way."""
        if coming is not None:
            return self._transport.result_of(coming, path)
        state, data = self.folder.kept(path) if self.folder is not None and self.keeps(path) else ("", b"")
        same = state == self._whole_states.get(path)
        return data if same else self._got(path, functools.partial(self._whole, path))

    def keeps(self, path: str) -> bool:
        """Whether the cache folder has a whole file, which this source has compared with its store."""
        folder = self.folder if path in self._whole_states else None
        return folder is not None and os.path.exists(os.path.join(folder.path, _kept_as(path)[0]))

    def _whole(self, path: str) -> bytes:
        store, folder = self._store(path), self.folder
        state, data = ("", b"") if folder is None else folder.kept(path)
        if folder is not None and state and str(store.head(path, 1)[0][:2]) == state:
            self._whole_states[path] = state
            return data
        version, head = store.head(path, MOST_WHOLE_BYTES)
        if version.size > MOST_WHOLE_BYTES:
            what = f"{version.size} bytes, more than the limit of {MOST_WHOLE_BYTES}; leave it out"
            raise FormatError(f"{path}: {what}", file=path)
        data = bytes(head)
        if folder is not None:
            self._whole_states[path] = str(version[:2])
            folder.keep(path, self._whole_states[path], data)
        return data

    def fetch_small(self, file: MirroredFile) -> None:
        """Start to fetch all of an object that is to be opened, if it is small."""
        if file.mirror.size <= WHOLE_BYTES and (file.mirror.ring is None or file.mirror.ring.holds(file.mirror.size)):
            file.fetch(np.array([0]), np.array([file.mirror.size]))

    @contextlib.contextmanager
    def closed_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop mirrors in memory, and end the threads. Opening begins anew."""
        self._transport.close()
        # Without the lock, which a thread may hold that waits for a store.
        self._stores, self._opened, self._ring = {}, {}, Ring(self._ring.nbytes)


# Of sources that are given no options.
LOCAL = Files()
