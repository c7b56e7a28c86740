"""`FilePrefetcher`: threads that read files ahead from a slow disk or network."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_async_data.errors import SourceError, WorkerError
from lit_async_data.sources.contract.reservations import Owner, Reservations
from lit_async_data.sources.manifest.files.stored_file import ANYWHERE, RootDirectory, fetched, filled
from lit_async_data.threads import Bell, Gate, ProcessGuard, ThreadWorker

# Files read at a time: a network that takes 5 ms per file then delivers 3200 files per second.
THREADS = 16
# Reading ahead begins if more than this share of about the last 16 files was not in the page cache.
_AVERAGED_FILES, _COLD_SHARE = 16, 0.1
# A file that was not read within this number of calls of `fetch` is dropped.
_STALE = 64
# Seconds to wait for threads to end, which may be blocked in a read.
_END_S = 5.0
# Seconds between two checks of a waiting thread: the call that should wake it may have been interrupted.
_POLL_S = 0.5

_log = logging.getLogger(__name__)


class File:
    """A file to read ahead. ``data`` is None until it has been read, and if it could not be read."""

    def __init__(self, path: str, most_bytes: int, turn: int) -> None:
        self.path, self.most_bytes, self.turn = path, most_bytes, turn
        self.data: bytes | None = None
        self.size = 0  # bytes counted as held
        self.wake_up = Bell()  # its turn, more room, or dropped
        self.done = Gate()


class _ThreadGroup:
    """Threads that read ahead, and their queue of files; None in the queue ends one thread."""

    def __init__(self) -> None:
        self.files: queue.SimpleQueue[File | None] = queue.SimpleQueue()
        self.workers: list[ThreadWorker] = []


class FilePrefetcher:
    """Reads files, and reads them ahead if they are not in the page cache. Thread-safe.

    Files are read in the order of `fetch`, each as soon as there is room for all its bytes. If there is room for few,
    these are the next ones. The first file that is read ahead starts the threads, which run as long as somebody holds a
    reservation.

    An interrupt (Ctrl-C) can end any method at any call. State that belongs together therefore changes in statements
    without calls between them, and no wait is unlimited.

    Args:
        root: The folder that files must be in.

    Attributes:
        files: Files to read ahead, and files that have been read and not been taken yet, by path.
        waiting: Those of them that no thread has begun, in order.
    """

    def __init__(self, root: RootDirectory = ANYWHERE) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0
        self._logged = False
        self._process = ProcessGuard()
        self._lock = threading.RLock()  # reentrant: garbage collection can close a loader inside it
        # Guarded by the lock:
        self._reservations = Reservations()
        self._turn = 0
        self._held = 0
        self.files: dict[str, File] = {}
        self.waiting: dict[str, File] = {}
        self._threads = _ThreadGroup()
        self._ending: list[_ThreadGroup] = []  # their threads must end

    def __reduce__(self) -> tuple[type[FilePrefetcher], tuple[RootDirectory]]:
        return FilePrefetcher, (self._root,)

    def read(self, path: str, most_bytes: int) -> bytes:
        """All bytes of a file; waits if a thread is reading it.

        Raises:
            SourceError: As `fetched`.
        """
        if self.files and self._mine:
            with self._lock:
                file = self.files.get(path)
                if path in self.waiting:
                    # Needed now: its turn or room for it may come late.
                    self._drop(self.files[path])
                    file = None
            if file is not None:
                # Opened by the thread in any case, and by whoever ends the threads.
                while not file.done.wait(_POLL_S):
                    pass
                with self._lock:
                    self._drop(file)
                if file.data is not None and len(file.data) <= most_bytes:
                    return file.data
        return self._read(path, most_bytes)

    def fill(self, path: str, parts: Sequence[Any], nbytes: int) -> bool:
        """Read a file into its destination if it is in the page cache and has the right size; see `filled`."""
        if self.files or not filled(path, parts, nbytes, self._root):
            return False
        self._record(cold=False)
        return True

    @property
    def wanted(self) -> bool:
        """Whether reading ahead helps: there is room, and some recent files were not in the page cache."""
        return self.room > 0 and self._cold > _COLD_SHARE and self._mine

    @property
    def held_bytes(self) -> int:
        """Bytes of the files that have been read ahead, or that a thread is reading."""
        return self._held

    def fetch(self, paths: Iterable[str], most_bytes: int) -> None:
        """Start reading files; returns at once.

        Args:
            paths: In the order in which `read` will be called.
            most_bytes: As for `read`.
        """
        # Outside of the lock, which other threads need to take files.
        listed = list(paths)
        with self._lock:
            self._turn += 1
            for file in [file for file in self.files.values() if file.turn < self._turn - _STALE]:
                self._drop(file)
            for path in listed:
                if not self.room or not self._ensure_thread():
                    return
                if path not in self.files:
                    file = File(path, most_bytes, self._turn)
                    # First queued, then registered: a thread skips unregistered files, but a registered file that is
                    # not queued would block those after it. Threads check only after this lock is free.
                    self._threads.files.put(file)
                    self.files[path] = self.waiting[path] = file

    def reserve(self, nbytes: int) -> Callable[[], None]:
        """Allow reading ahead.

        Args:
            nbytes: Bytes for files, added to other reservations.

        Returns:
            A function that ends the reservation. The last one ends the threads and drops all files.
        """
        if not self._mine:
            self._begin()  # a fork: the threads and the owner of the lock are in another process
        owner = Owner()
        release = functools.partial(self._release, owner)
        try:
            with self._lock:
                if not self._reservations:
                    self._drop_all()  # leftovers of an interrupted release
                self._reservations.set(owner, nbytes)
                self._wake()
        except BaseException:
            release()
            raise
        return release

    @property
    def room(self) -> int:
        """Bytes that all reservations allow together."""
        return self._reservations.nbytes

    @property
    def _mine(self) -> bool:
        # A fork has no threads, and a lock that one of them held would never be released.
        return not self._process.forked

    def _ensure_thread(self) -> bool:
        """Whether there is a thread; starts one more, up to `THREADS`."""
        group = self._threads
        if len(group.workers) < THREADS:
            worker = ThreadWorker(len(group.workers), functools.partial(self._work, group), "fetcher")
            group.workers.append(worker)  # before it starts, so that it will be ended
            try:
                worker.start()
            except WorkerError:  # no more threads available; fewer or none will do
                group.workers.remove(worker)
        return bool(group.workers)

    def _release(self, owner: Owner) -> None:
        """End a reservation. Call it again if it was interrupted."""
        if not self._mine:
            return
        with self._lock:
            self._reservations.set(owner, 0)
            for file in list(self.waiting.values()):
                file.wake_up.ring()  # there may no longer be room for it
            if self._reservations:
                return
            ending = self._drop_all()
        deadline = time.monotonic() + _END_S
        for group in ending:
            for _ in group.workers:
                group.files.put(None)
            for worker in group.workers:
                worker.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            self._ending = [group for group in self._ending if group not in ending]

    def _drop_all(self) -> list[_ThreadGroup]:
        """Drop all files and threads; returns the threads that must end."""
        for file in list(self.files.values()):
            file.done.open()  # first, because a reader may be waiting for it
            self._drop(file)
        fresh, ending = _ThreadGroup(), [*self._ending, self._threads]
        self._threads, self._ending = fresh, ending
        return ending

    def _work(self, group: _ThreadGroup, _: ThreadWorker) -> bool:
        """Read one file; False if the thread must end."""
        try:
            file = group.files.get(timeout=_POLL_S)
        except queue.Empty:
            return group is self._threads and bool(self._reservations)
        if file is None:
            return False
        try:
            self._fetch(file)
        except SourceError:
            pass  # `read` will raise it again
        except Exception:  # noqa: BLE001  # logged; `read` reads the file itself
            with self._lock:
                first, self._logged = not self._logged, True
            if first:
                _log.exception("%s: unexpected error while reading ahead; further ones are not logged", file.path)
        finally:
            with self._lock:
                if self.waiting.get(file.path) is file:
                    self._drop(file)  # else it would stay the next file and block all others
            file.done.open()
        return True

    def _fetch(self, file: File) -> None:
        with self._lock:
            if self.waiting.get(file.path) is not file:
                return
        # Its bytes count before they are read; otherwise the threads would read more files than there is room for.
        try:
            size = os.stat(file.path).st_size
        except OSError:
            return  # `read` will raise it
        while (begun := self._try_begin(file, size)) is None:
            file.wake_up.wait(_POLL_S)
        if not begun:
            return
        data = self._read(file.path, min(file.most_bytes, size))
        with self._lock:
            if self.files.get(file.path) is file:
                file.data = data

    def _try_begin(self, file: File, size: int) -> bool | None:
        """Begin a file if it is the next one and there is room for it.

        Returns:
            True if it was begun; None if it must wait; False if it was dropped or is too large.
        """
        path = file.path
        with self._lock:
            first = self._next()
            if path not in self.waiting or self.waiting[path] is not file or size > self.room:
                return False
            if first is not file or self._held + size > self.room:
                return None
            del self.waiting[path]
            self._held += size
            file.size = size
            self._wake()
            return True

    def _next(self) -> File | None:
        """The first file that no thread has begun."""
        for file in self.waiting.values():
            return file
        return None

    def _wake(self) -> None:
        """Wake the thread that waits with the next file."""
        file = self._next()
        if file is not None:
            file.wake_up.ring()

    def _drop(self, file: File) -> None:
        path = file.path
        if path in self.files and self.files[path] is file:
            # No calls in this block, so no interrupts.
            del self.files[path]
            if path in self.waiting:
                del self.waiting[path]
            self._held -= file.size
            file.size = 0
        file.wake_up.ring()
        self._wake()

    def _read(self, path: str, most_bytes: int) -> bytes:
        data, cold = fetched(path, most_bytes, self._root)
        self._record(cold=cold)
        return data

    def _record(self, *, cold: bool) -> None:
        # Without a lock: concurrent updates lose one file, which does not matter.
        self._cold += (cold - self._cold) / _AVERAGED_FILES
