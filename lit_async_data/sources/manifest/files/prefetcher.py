"""`FilePrefetcher`: threads that read files ahead from a slow disk or network."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lit_async_data.sources.contract.source import Reservation
from lit_async_data.sources.manifest.files.stored_file import ANYWHERE, RootDirectory, fetched, filled
from lit_async_data.system import OURS, ProcessGuard

# Larger files are refused unread: by mistake, a table can name a film.
MOST_BYTES = 2**32
FETCHER = f"{OURS} fetcher"
# Files read at a time: a network that takes 5 ms per file then delivers 3200 files per second.
THREADS = 16
# Reading ahead begins if more than this share of about the last 16 files was not in the page cache.
_AVERAGED_FILES, _COLD_SHARE = 16, 0.1
# A file that was not read within this number of calls of `fetch` is dropped.
_STALE = 64


class FileRequest:
    """A file to read ahead. No `Future`: an interrupt in one of its methods can leave its lock locked for ever."""

    def __init__(self, path: str, turn: int) -> None:
        self.path, self.turn = path, turn
        self.size: int | None = None  # known once a thread has looked it up
        self.held_bytes = 0
        self.begun = self.unwanted = False  # each side sets its own, and then looks at the other's
        self.reading = threading.Lock()  # held until a thread that has begun is done
        self.reading.acquire()
        self.data: bytes | None = None


class FilePrefetcher:
    """Reads files, and reads them ahead if they are not in the page cache. Thread-safe.

    Files are read in the order of `fetch`, each as soon as there is room for all its bytes; one that is larger than the
    room is read alone. The threads run as long as somebody holds a reservation.

    Attributes:
        files: Files to read ahead, and files that have been read and not been taken yet, by path.
        held_bytes: Bytes of the files that have been read ahead, or that a thread is reading.
    """

    def __init__(self, root: RootDirectory = ANYWHERE) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0  # without a lock: concurrent updates lose one file, which does not matter
        self._process = ProcessGuard()
        self._lock = threading.RLock()  # reentrant: garbage collection can close a loader inside it
        # Guarded by the lock:
        self._inside = False
        self._reserved: dict[object, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._turn = 0
        self.held_bytes = 0
        self.files: dict[str, FileRequest] = {}
        self._waiting: deque[FileRequest] = deque()  # those that no thread has begun

    def __reduce__(self) -> tuple[type[FilePrefetcher], tuple[RootDirectory]]:
        return FilePrefetcher, (self._root,)

    def read(self, path: str) -> bytes:
        """All bytes of a file. Waits if a thread is reading it; a file that none has begun is read here, at once."""
        file = self.files.get(path) if self.files and self._mine else None
        if file is not None:
            file.unwanted, data = True, None
            if file.begun:
                with file.reading:
                    data = file.data
            with self._held():
                self._drop(file)
                self._read_next()
            if data is not None:
                return data
        return self._read(path, MOST_BYTES)

    def fill(self, path: str, parts: Sequence[Any], nbytes: int) -> bool:
        """Read a file into its destination if it is in the page cache and has the right size; see `filled`."""
        if self.files or not filled(path, parts, nbytes, self._root):
            return False
        self._cold -= self._cold / _AVERAGED_FILES
        return True

    @property
    def wanted(self) -> bool:
        """Whether reading ahead helps: there is room, and some recent files were not in the page cache."""
        return self.room > 0 and self._cold > _COLD_SHARE and self._mine

    def fetch(self, paths: Iterable[str]) -> None:
        with self._held():
            self._turn += 1
            for file in [file for file in self.files.values() if file.turn < self._turn - _STALE]:
                self._drop(file)
            for path in paths:
                if not self.room:
                    return
                if path not in self.files:
                    file = FileRequest(path, self._turn)
                    self._pool = self._pool or ThreadPoolExecutor(THREADS, FETCHER)
                    try:
                        self._pool.submit(self._measure, file)
                    except RuntimeError:  # no more threads are available
                        return
                    self.files[path] = file
                    self._waiting.append(file)

    def reserve(self, nbytes: int) -> Callable[[], None]:
        """Allow reading ahead of some bytes; returns a function that ends this. The last one ends the threads."""
        if not self._mine:
            self._begin()  # a fork: the threads and the owner of the lock are in another process
        key = object()
        reservation = Reservation(functools.partial(self._release, key))
        with self._lock:
            self._reserved[key] = nbytes
        return reservation

    @property
    def room(self) -> int:
        return sum(self._reserved.copy().values())  # the copy is made in one step

    @property
    def _mine(self) -> bool:
        # A fork has no threads, and a lock that one of them held would never be released.
        return not self._process.forked

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """The lock; whether this thread holds it already."""
        with self._lock:
            inside, self._inside = self._inside, True
            try:
                yield inside
            finally:
                self._inside = inside

    def _release(self, key: object) -> None:
        with self._held() as inside:
            self._reserved.pop(key, None)
            if self._reserved:
                return
            for file in list(self.files.values()):
                self._drop(file)
            self.held_bytes = 0  # an interrupt can have lost count
            pool, self._pool = self._pool, None
        if pool is not None:
            # Garbage collection can come here in one of the threads, or in one that holds the lock they wait for.
            mine = threading.current_thread().name.startswith(FETCHER)
            pool.shutdown(wait=not inside and not mine, cancel_futures=True)

    def _drop(self, file: FileRequest) -> None:
        if self.files.get(file.path) is file:
            del self.files[file.path]
            file.unwanted = True
            self.held_bytes -= file.held_bytes

    def _measure(self, file: FileRequest) -> None:
        """Its bytes count before they are read; otherwise the threads would read more files than there is room for."""
        try:
            size = os.stat(file.path).st_size
        except OSError:
            size = 0  # `read` will raise it
        with self._held():
            file.size = size
            self._read_next()

    def _read_next(self) -> None:
        """Begin the next files that there is room for; with the lock."""
        while self._waiting and self._pool is not None:
            file = self._waiting[0]
            if file.size is not None and file.size > self.room:
                self._drop(file)  # whoever needs it reads it
            if not file.unwanted:
                if file.size is None or (self.held_bytes and self.held_bytes + file.size > self.room):
                    return
                file.held_bytes = file.size
                self.held_bytes += file.size
                with contextlib.suppress(RuntimeError):  # the interpreter ends
                    self._pool.submit(self._load, file)
            self._waiting.popleft()

    def _load(self, file: FileRequest) -> None:
        file.begun = True
        with contextlib.suppress(Exception):  # `read` reads the file again, which raises
            file.data = None if file.unwanted else self._read(file.path, min(file.held_bytes, MOST_BYTES))
        file.reading.release()

    def _read(self, path: str, most_bytes: int) -> bytes:
        data, cold = fetched(path, most_bytes, self._root)
        self._cold += (cold - self._cold) / _AVERAGED_FILES
        return data
