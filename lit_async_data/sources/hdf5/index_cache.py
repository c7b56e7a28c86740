"""Indexes of chunks kept on disk for the next opening: `IndexCache`.

Building one takes 1 to 2 µs per chunk each time a file is opened, in every rank and worker. One that was kept is read
in a hundredth of that, and a large one is mapped, so that all processes of a machine share its pages.

It is kept beside the data, where every user and machine that reads them finds it, and goes with them when the folder
is moved or deleted; where that folder cannot be written to, in the user's cache folder. Beside the data its name begins
with a dot: else ``"scans/*"`` would take it for data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Iterator

from lit_async_data.errors import ConfigError
from lit_async_data.sources.hdf5.index_file import Columns, IndexKey, read, write

# Indexes of fewer chunks are built in less time than anyone notices (20 to 40 ms), and leave no files behind.
FEWEST_CHUNKS = 2**14
# File systems that count in seconds cannot tell two changes within this time from one.
YOUNG_NS = 2 * 10**9
# Letters of the data file's name in that of its index: what fits into a file name whatever the letters.
NAME_SHOWN = 50

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IndexCache:
    """Where indexes are kept.

    Attributes:
        where: ``"auto"`` for beside the data, or else in ``$XDG_CACHE_HOME/lit_async_data`` (``~/.cache``); a folder
            that is there; or False for nowhere.

    Raises:
        ConfigError: ``where`` is none of these.

    Example:
        >>> IndexCache("/nowhere")
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: index_cache: '/nowhere' is no folder; make it, or give "auto" or False
    """

    where: str | os.PathLike[str] | bool = "auto"

    def __post_init__(self) -> None:
        if self.where is False or self.where == "auto":
            return
        if not isinstance(self.where, str | os.PathLike):
            raise ConfigError(f'index_cache: {self.where!r} is neither "auto", nor a folder, nor False')
        folder = os.path.abspath(os.path.expanduser(self.where))
        if not os.path.isdir(folder):
            raise ConfigError(f'index_cache: {self.where!r} is no folder; make it, or give "auto" or False')
        object.__setattr__(self, "where", folder)  # absolute: the source may outlive the working folder

    def load(self, key: IndexKey) -> Columns | None:
        """The columns kept for a dataset in the state it is in; None if there are none that are whole."""
        unusable: list[tuple[str, str]] = []
        for path in self._paths(key):
            try:
                return read(path, key)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as error:
                unusable.append((path, str(error)))
        for path, reason in unusable:
            _log.warning("the index of %s in %s is of no use (%s): it is built anew", key, path, reason)
        return None

    def store(self, key: IndexKey, columns: Columns) -> Columns:
        """Keep columns, if that pays and there is a place for them. It is never an error if there is none.

        Safe in any number of processes at once: each writes a file of its own and then gives it its name, unless one
        that holds the same has that name by now, which others may have mapped.

        Returns:
            The columns to be used from now on: those kept, or those given.
        """
        if abs(time.time_ns() - key.mtime_ns) < YOUNG_NS:
            _log.debug("%s was changed a moment ago: its index is not kept yet", key)
            return columns
        for path in self._paths(key):
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                write(path, key, columns)
                kept = read(path, key)
            except (OSError, ValueError) as error:
                _log.debug("the index of %s cannot be kept in %s: %s", key, path, error)
                continue
            _log.info("the index of %s, %d chunks, is kept in %s", key, key.chunks, path)
            return kept
        return columns

    def _paths(self, key: IndexKey) -> Iterator[str]:
        """Where an index may be kept, the best place first."""
        if self.where is False or key.chunks < FEWEST_CHUNKS:
            return
        # Where the data lie and not a link to them, so that all links share one.
        folder, file = os.path.split(os.path.realpath(key.path))
        if self.where == "auto":
            yield os.path.join(folder, f".{file[:NAME_SHOWN]}.{_digest(file, key.name)}.chunks")
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            if not os.path.isabs(cache):
                return
            elsewhere = os.path.join(cache, "lit_async_data")
        else:
            elsewhere = os.fspath(self.where)  # type: ignore[arg-type] # not False, and no other truth passes
        yield os.path.join(elsewhere, f"{file[:NAME_SHOWN]}.{_digest(folder, file, key.name)}.chunks")


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
