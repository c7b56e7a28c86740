"""`Fetching`: files read ahead by threads of its own, where reading them means waiting for a disk or a network."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_async_data.errors import SourceError
from lit_async_data.sources.manifest.stored_file import ANYWHERE, Root, fetched, filled

# Files that are waited for at a time: what a network answers in 5 ms each, comes at 3200 per second.
THREADS = 16
# Of about so many files read last, the share that was not in memory from which reading ahead begins.
_REMEMBERED, _SHARE = 16, 0.1
# Calls of `fetch` after which a file that nobody has asked for is dropped: something else is wanted now.
_STALE = 64
# Seconds to wait for threads that are in the middle of a read, when they are to end.
_END_S = 5.0

_log = logging.getLogger(__name__)


class _File:
    """A file that is to be read ahead. Its data are None until it has been read, and if it could not be read."""

    def __init__(self, path: str, most_bytes: int, turn: int) -> None:
        self.path, self.most_bytes, self.turn = path, most_bytes, turn
        self.claimed = False  # a thread has it, and waits for its size or for room
        self.data: bytes | None = None
        self.size = 0  # bytes that count as held
        self.done = threading.Event()


class Fetching:
    """Reads files; before it is asked for them, where they are not in memory. Safe to use from several threads.

    Files are begun in the order in which `fetch` was asked for them, each as soon as there is room for all its bytes.
    So where there is room for few, these are the next ones. Threads are started with the first file that is read ahead,
    and only while somebody keeps it.

    Args:
        root: Where files may lie.
    """

    def __init__(self, root: Root = ANYWHERE) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._cold = 0.0
        self._logged = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)  # for files
        self._freed = threading.Condition(self._lock)  # room, or a place in the order
        # Guarded by the lock:
        self._room = 0
        self._turn = 0
        self._held = 0
        self._files: dict[str, _File] = {}
        self._waiting: dict[str, _File] = {}  # those of them that are not begun yet, in their order
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
                if path in self._waiting:
                    # It is wanted now: neither its turn nor room may come soon.
                    self._drop(self._files[path])
                    file = None
            if file is not None:
                # Set by the thread, whatever happens to it, and by who ends the threads.
                file.done.wait()
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
                    self._files[path] = self._waiting[path] = _File(path, most_bytes, self._turn)
                    self._asked.notify()

    def keep(self, nbytes: int) -> Callable[[], None]:
        """Allow to read ahead. What is returned takes that back; with the last, threads end and files are dropped.

        Args:
            nbytes: Room for files, beside what others allow.
        """
        if not self._mine:
            self._begin()  # a fork: the threads, and whoever held the lock, are in another process
        with self._lock:
            self._room += nbytes
            self._freed.notify_all()
        kept = [True]

        def give_back() -> None:
            if kept and self._mine:
                kept.clear()
                self._take_back(nbytes)

        return give_back

    @property
    def _mine(self) -> bool:
        # In a fork the threads do not exist, and nobody would release a lock that one of them holds.
        return self._pid == os.getpid()

    def _started(self) -> bool:
        """Whether there is a thread; one more is started, up to so many."""
        if len(self._threads) < THREADS:
            name = f"lit_async_data fetcher {len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # the system gives no more: fewer will do, and none too
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _take_back(self, nbytes: int) -> None:
        with self._lock:
            self._room -= nbytes
            self._freed.notify_all()  # what was to begin may not fit any more
            if self._room:
                return
            threads, self._threads = self._threads, []
            for file in list(self._files.values()):
                self._drop(file)
                file.done.set()
            self._asked.notify_all()
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _work(self) -> None:
        while (file := self._next()) is not None:
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
                file.done.set()

    def _next(self) -> _File | None:
        """The first file that no thread has; None where the thread is to end."""
        me = threading.current_thread()
        with self._lock:
            while me in self._threads:
                file = next((each for each in self._waiting.values() if not each.claimed), None)
                if file is not None:
                    file.claimed = True
                    return file
                self._asked.wait()
        return None

    def _fetch(self, file: _File) -> None:
        # Its bytes count before they are there: else all that are queued would be read, whatever there is room for.
        try:
            size = os.stat(file.path).st_size
        except OSError:
            return  # an error for whoever reads it
        with self._lock:
            self._freed.wait_for(lambda: self._may_begin(file, size))
            if self._waiting.get(file.path) is not file or size > self._room:
                return
            del self._waiting[file.path]
            self._freed.notify_all()  # the next in the order
            file.size = size
            self._held += size
        data = self._read(file.path, min(file.most_bytes, size))
        with self._lock:
            if self._files.get(file.path) is file:
                file.data = data

    def _may_begin(self, file: _File, size: int) -> bool:
        """Whether a file is the next one and there is room for it, or it need not be waited for any more."""
        if self._waiting.get(file.path) is not file or size > self._room:
            return True
        return next(iter(self._waiting.values())) is file and self._held + size <= self._room

    def _drop(self, file: _File) -> None:
        if self._files.get(file.path) is file:
            del self._files[file.path]
            self._waiting.pop(file.path, None)
            self._held -= file.size
            file.size = 0
            self._freed.notify_all()

    def _read(self, path: str, most_bytes: int) -> bytes:
        data, cold = fetched(path, most_bytes, self._root)
        self._seen(cold=cold)
        return data

    def _seen(self, *, cold: bool) -> None:
        # Several threads may do so at once: one of the files is then forgotten.
        self._cold += (cold - self._cold) / _REMEMBERED
