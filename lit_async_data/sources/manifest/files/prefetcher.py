"""`FilePrefetcher`: threads that read files ahead, where reading them means waiting for a disk or a network."""

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
from lit_async_data.sources.manifest.files.stored_file import ANYWHERE, RootDirectory, fetched, filled
from lit_async_data.sources.room import Giver, Room
from lit_async_data.threads import Bell, Gate, ThreadWorker

# Files that are waited for at a time: what a network answers in 5 ms each, comes at 3200 per second.
THREADS = 16
# Of about so many files read last, the share that was not in memory from which reading ahead begins.
_REMEMBERED, _SHARE = 16, 0.1
# Calls of `fetch` after which a file that nobody has asked for is dropped: something else is wanted now.
_STALE = 64
# Seconds to wait for threads that are in the middle of a read, when they are to end.
_END_S = 5.0
# Seconds between two looks of who waits: what should wake it may have been interrupted.
_POLL_S = 0.5

_log = logging.getLogger(__name__)


class _File:
    """A file that is to be read ahead. Its data are None until it has been read, and if it could not be read."""

    def __init__(self, path: str, most_bytes: int, turn: int) -> None:
        self.path, self.most_bytes, self.turn = path, most_bytes, turn
        self.data: bytes | None = None
        self.size = 0  # bytes that count as held
        self.turn_came = Bell()  # or there is room, or it is not wanted any more
        self.done = Gate()


class _Crew:
    """Threads that read ahead, and the files that they are asked for; None ends one of them."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[_File | None] = queue.SimpleQueue()
        self.workers: list[ThreadWorker] = []


class FilePrefetcher:
    """Reads files; before it is asked for them, where they are not in memory. Safe to use from several threads.

    Files are begun in the order in which `fetch` was asked for them, each as soon as there is room for all its bytes.
    So where there is room for few, these are the next ones. Threads are started with the first file that is read ahead,
    and only while somebody keeps it.

    An interrupt (Ctrl-C) can end any method at any call. So what belongs together changes in statements between which
    nothing is called, and nobody waits for ever to be woken.

    Args:
        root: Where files may lie.
    """

    def __init__(self, root: RootDirectory = ANYWHERE) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0
        self._logged = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant, since garbage collection can close a loader inside it
        # Guarded by the lock:
        self._given = Room()
        self._turn = 0
        self._held = 0
        self._files: dict[str, _File] = {}
        self._waiting: dict[str, _File] = {}  # those of them that are not begun yet, in their order
        self._crew = _Crew()
        self._leaving: list[_Crew] = []  # their threads are to end

    def __reduce__(self) -> tuple[type[FilePrefetcher], tuple[RootDirectory]]:
        return FilePrefetcher, (self._root,)

    def read(self, path: str, most_bytes: int) -> bytes:
        """All bytes of a file; waits for it if it is being read already.

        Raises:
            SourceError: As `fetched`.
        """
        if self._files and self._mine:
            with self._lock:
                file = self._files.get(path)
                if path in self._waiting:
                    # It is wanted now: neither its turn nor room may come soon.
                    self._drop(self._files[path])
                    file = None
            if file is not None:
                # Opened by the thread, whatever happens to it, and by who ends the threads.
                while not file.done.wait(_POLL_S):
                    pass
                with self._lock:
                    self._drop(file)
                if file.data is not None and len(file.data) <= most_bytes:
                    return file.data
        return self._read(path, most_bytes)

    def fill(self, path: str, parts: Sequence[Any], nbytes: int) -> bool:
        """Read a file straight to where it goes, if it is in memory and fits; see `filled`."""
        if self._files or not filled(path, parts, nbytes, self._root):
            return False
        self._seen(cold=False)
        return True

    @property
    def wanted(self) -> bool:
        """Whether reading ahead helps: there is room for it, and of the files read last some were not in memory."""
        return self._room > 0 and self._cold > _SHARE and self._mine

    def fetch(self, paths: Iterable[str], most_bytes: int) -> None:
        """Begin to read files; returns at once.

        Args:
            paths: As `read` will be asked for them: the next one first.
            most_bytes: As for `read`.
        """
        # Not inside the lock: others want what has been read.
        listed = list(paths)
        with self._lock:
            self._turn += 1
            for file in [file for file in self._files.values() if file.turn < self._turn - _STALE]:
                self._drop(file)
            for path in listed:
                if not self._room or not self._started():
                    return
                if path not in self._files:
                    file = _File(path, most_bytes, self._turn)
                    # Before it is filed: a thread throws away what is not, and what nobody has asked for would hold up
                    # those behind it. It looks only when this lock is free.
                    self._crew.asked.put(file)
                    self._files[path] = self._waiting[path] = file

    def reserve(self, nbytes: int) -> Callable[[], None]:
        """Allow to read ahead. What is returned takes that back; with the last, threads end and files are dropped.

        Args:
            nbytes: Room for files, beside what others allow.
        """
        if not self._mine:
            self._begin()  # a fork: the threads, and whoever held the lock, are in another process
        giver = Giver()
        give_back = functools.partial(self._take_back, giver)
        try:
            with self._lock:
                if not self._given:
                    self._leave()  # what an interrupt has left of those before
                self._given.set(giver, nbytes)
                self._wake()
        except BaseException:
            give_back()
            raise
        return give_back

    @property
    def _room(self) -> int:
        return self._given.nbytes

    @property
    def _mine(self) -> bool:
        # In a fork the threads do not exist, and nobody would release a lock that one of them holds.
        return self._pid == os.getpid()

    def _started(self) -> bool:
        """Whether there is a thread; one more is started, up to so many."""
        crew = self._crew
        if len(crew.workers) < THREADS:
            worker = ThreadWorker(len(crew.workers), functools.partial(self._work, crew), "fetcher")
            crew.workers.append(worker)  # before it starts: whoever ends the threads must know of it
            try:
                worker.start()
            except WorkerError:  # the system gives no more: fewer will do, and none too
                crew.workers.remove(worker)
        return bool(crew.workers)

    def _take_back(self, giver: Giver) -> None:
        """End what `reserve` has begun. Where it was interrupted, it is to be called again."""
        if not self._mine:
            return
        with self._lock:
            self._given.set(giver, 0)
            for file in list(self._waiting.values()):
                file.turn_came.ring()  # it may not fit any more
            if self._given:
                return
            leaving = self._leave()
        deadline = time.monotonic() + _END_S
        for crew in leaving:
            for _ in crew.workers:
                crew.asked.put(None)
            for worker in crew.workers:
                worker.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            self._leaving = [crew for crew in self._leaving if crew not in leaving]

    def _leave(self) -> list[_Crew]:
        """Drop all files, and the threads; returns those that are to end."""
        for file in list(self._files.values()):
            file.done.open()  # first: who waits for it finds no other way to it
            self._drop(file)
        fresh, leaving = _Crew(), [*self._leaving, self._crew]
        self._crew, self._leaving = fresh, leaving
        return leaving

    def _work(self, crew: _Crew, _: ThreadWorker) -> bool:
        """Read one file; False where the thread is to end."""
        try:
            file = crew.asked.get(timeout=_POLL_S)
        except queue.Empty:
            return crew is self._crew and bool(self._given)
        if file is None:
            return False
        try:
            self._fetch(file)
        except SourceError:
            pass  # raised again to who reads the file
        except Exception:  # noqa: BLE001  # logged; the file is read when it is wanted, as if there were no threads
            if not self._logged:
                self._logged = True
                _log.exception("%s could not be read ahead; further errors of this kind are not logged", file.path)
        finally:
            with self._lock:
                if self._waiting.get(file.path) is file:
                    self._drop(file)  # else it would be the next one for ever, and no other one would be begun
            file.done.open()
        return True

    def _fetch(self, file: _File) -> None:
        with self._lock:
            if self._waiting.get(file.path) is not file:
                return
        # Its bytes count before they are there: else all that are queued would be read, whatever there is room for.
        try:
            size = os.stat(file.path).st_size
        except OSError:
            return  # an error for whoever reads it
        while (begun := self._begun(file, size)) is None:
            file.turn_came.wait(_POLL_S)
        if not begun:
            return
        data = self._read(file.path, min(file.most_bytes, size))
        with self._lock:
            if self._files.get(file.path) is file:
                file.data = data

    def _begun(self, file: _File, size: int) -> bool | None:
        """Begin a file if it is the next one and there is room for it.

        Returns:
            Whether it is begun; None if it must wait. One that is not wanted any more, or too large, is never begun.
        """
        path = file.path
        with self._lock:
            first = self._next()
            if path not in self._waiting or self._waiting[path] is not file or size > self._room:
                return False
            if first is not file or self._held + size > self._room:
                return None
            del self._waiting[path]
            self._held += size
            file.size = size
            self._wake()
            return True

    def _next(self) -> _File | None:
        """The first file that is not begun."""
        for file in self._waiting.values():
            return file
        return None

    def _wake(self) -> None:
        """Have the next file looked at again."""
        file = self._next()
        if file is not None:
            file.turn_came.ring()

    def _drop(self, file: _File) -> None:
        path = file.path
        if path in self._files and self._files[path] is file:
            # Up to its last line nothing is called.
            del self._files[path]
            if path in self._waiting:
                del self._waiting[path]
            self._held -= file.size
            file.size = 0
        file.turn_came.ring()
        self._wake()

    def _read(self, path: str, most_bytes: int) -> bytes:
        data, cold = fetched(path, most_bytes, self._root)
        self._seen(cold=cold)
        return data

    def _seen(self, *, cold: bool) -> None:
        # Several threads may do so at once: one of the files is then forgotten.
        self._cold += (cold - self._cold) / _REMEMBERED
