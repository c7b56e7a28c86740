"""`OpenFiles`: the files of a source, of which only so many are open at once."""

from __future__ import annotations

import collections
import logging
import resource
import threading
from collections.abc import Sequence

from lit_async_data.sources.hdf5.storage.open_file import OpenFile, Reading

_log = logging.getLogger(__name__)


class OpenFiles:
    """The files of a source, of which only so many are open at once: those used last. Safe from several threads.

    Args:
        files: All of them.
    """

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._used: collections.OrderedDict[int, None] = collections.OrderedDict()
        # A file takes up to three descriptors (its map has one too); a quarter of those there may be is left to others.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(limit // 4, 1)
        if len(files) > self._most:
            _log.warning(
                "only %d of %d files are kept open, since this process may open %d: in random order they are opened "
                "again and again; ulimit -n %d would be enough",
                self._most,
                len(files),
                limit,
                4 * len(files),
            )

    def __getitem__(self, number: int) -> OpenFile:
        return self._files[number]

    def used(self, number: int) -> Reading:
        """One of them, to be read inside ``with``; the one used longest ago is closed if there are too many."""
        oldest = self._use(number)
        if oldest is not None:
            self._files[oldest].close()
        return Reading(self._files[number])

    @property
    def forked(self) -> bool:
        """Whether files are open in the process that this one was forked from."""
        return any(file.forked for file in self._files)

    def check_process(self) -> None:
        """Raise `WorkerError` if that is so."""
        for file in self._files:
            file.check_process()

    def _use(self, number: int) -> int | None:
        with self._lock:
            self._used[number] = None
            self._used.move_to_end(number)
            return self._used.popitem(last=False)[0] if len(self._used) > self._most else None

    def close(self) -> None:
        """Close them all."""
        for file in self._files:
            file.close()
        with self._lock:
            self._used.clear()
