"""`Fetching`: files read ahead by threads of its own, where reading them means waiting for a disk or a network."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_async_data.sources.manifest.stored_file import ANYWHERE, Root, fetched, filled

# Files that are waited for at a time: what a network answers in 5 ms each, comes at 3200 per second.
THREADS = 16
# Bytes of files that are held until their samples are decoded.
HELD_BYTES = 32 * 2**20
# Of about so many files read last, the share that was not in memory from which reading ahead begins.
_REMEMBERED, _SHARE = 16, 0.1
# Calls of `fetch` after which a file that nobody has asked for is let go: something else is wanted now.
_STALE = 64
# Seconds to wait for threads that are in the middle of a read, when they are to end.
_END_S = 5.0


class _File:
    """A file that is being read ahead. Its data are None until it has been read, and if it could not be read."""

    def __init__(self, path: str, most_bytes: int, turn: int) -> None:
        self.path, self.most_bytes, self.turn = path, most_bytes, turn
        self.data: bytes | None = None
        self.size = 0  # bytes that count as held
        self.done = threading.Event()


class Fetching:
    """Reads files; before it is asked for them, where they are not in memory. Safe to use from several threads.

    Threads are started with the first file that is read ahead, and only while somebody keeps it.

    Args:
        root: Where files may lie.
    """

    def __init__(self, root: Root = ANYWHERE) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._users = 0
        self._turn = 0
        self._held = 0
        self._files: dict[str, _File] = {}
        self._queue: queue.SimpleQueue[_File | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __reduce__(self) -> tuple[type[Fetching], tuple[Root]]:
        return Fetching, (self._root,)

    def read(self, path: str, most_bytes: int) -> bytes:
        """All bytes of a file; waits for it if it is being read already.

        Raises:
            SourceError: As `fetched`.
        """
        if self._files and self._mine:
            with self._lock:
                file = self._files.get(path)
            if file is not None:
                # Set by the thread, whatever happens to it, and by who ends the threads.
                file.done.wait()
                with self._lock:
                    self._let_go(file)
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
        """Whether reading ahead would help: somebody keeps it, and of the files read last some were not in memory."""
        return self._users > 0 and self._cold > _SHARE and self._mine

    def fetch(self, paths: Iterable[str], most_bytes: int) -> None:
        """Begin to read files; returns at once.

        Args:
            paths: As `read` will be asked for them.
            most_bytes: As for `read`.
        """
        # Not inside the lock: others want what has been read.
        listed = list(paths)
        with self._lock:
            self._turn += 1
            for file in [file for file in self._files.values() if file.turn < self._turn - _STALE]:
                self._let_go(file)
            for path in listed:
                if self._held >= HELD_BYTES or not self._users or not self._started():
                    return
                if path not in self._files:
                    file = self._files[path] = _File(path, most_bytes, self._turn)
                    self._queue.put(file)

    def keep(self) -> Callable[[], None]:
        """Allow to read ahead. What is returned takes that back; with the last, threads end and files are let go."""
        if not self._mine:
            self._begin()  # a fork: the threads, and whoever held the lock, are in another process
        with self._lock:
            self._users += 1
        kept = [True]

        def give_back() -> None:
            if kept and self._mine:
                kept.clear()
                self._end()

        return give_back

    @property
    def _mine(self) -> bool:
        # In a fork the threads do not exist, and nobody would let go of a lock that one of them holds.
        return self._pid == os.getpid()

    def _started(self) -> bool:
        """Whether there is a thread; one more is started, up to so many."""
        if len(self._threads) < THREADS:
            name = f"lit_async_data fetcher {len(self._threads)}"
            thread = threading.Thread(target=self._work, args=(self._queue,), name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # the system gives no more: fewer will do, and none too
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            threads, self._threads = self._threads, []
            waiting, self._queue = self._queue, queue.SimpleQueue()
            for file in list(self._files.values()):
                self._let_go(file)
                file.done.set()
        for _ in threads:
            waiting.put(None)
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _work(self, waiting: queue.SimpleQueue[_File | None]) -> None:
        while (file := waiting.get()) is not None:
            try:
                # What is wrong with it is said to who reads it: that one will try again.
                with contextlib.suppress(Exception):
                    self._fetch(file)
            finally:
                file.done.set()

    def _fetch(self, file: _File) -> None:
        # Its bytes count before they are there: else all that are queued would be read, whatever there is room for.
        size = os.stat(file.path).st_size
        with self._lock:
            if self._files.get(file.path) is not file:
                return  # let go before its turn came
            if self._held + size > HELD_BYTES:
                del self._files[file.path]
                return
            file.size = size
            self._held += size
        data = self._read(file.path, min(file.most_bytes, size))
        with self._lock:
            if self._files.get(file.path) is file:
                file.data = data

    def _let_go(self, file: _File) -> None:
        if self._files.get(file.path) is file:
            del self._files[file.path]
            self._held -= file.size
            file.size = 0

    def _read(self, path: str, most_bytes: int) -> bytes:
        data, cold = fetched(path, most_bytes, self._root)
        self._seen(cold=cold)
        return data

    def _seen(self, *, cold: bool) -> None:
        # Several threads may do so at once: one of the files is then forgotten.
        self._cold += (cold - self._cold) / _REMEMBERED
