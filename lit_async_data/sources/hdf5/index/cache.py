"""`IndexCache`: keeps indexes of chunks on disk for the next opening.

Building an index takes 1 to 2 µs per chunk at every opening, in every rank and worker. Reading a cached one takes a
hundredth of that, and a large one is mapped, so that all processes of a machine share its pages.

Indexes are kept in the user's cache folder, which drops the least recently used ones, in a folder of the user's choice,
or beside the data, where every user and machine finds them. Names beside the data begin with a dot, so that a glob such
as ``"scans/*"`` does not match them.
"""

from __future__ import annotations

import dataclasses
import logging
import os

from lit_async_data.errors import ConfigError
from lit_async_data.sources.hdf5.index.format import Columns, IndexKey, StaleError, read_columns, write_columns
from lit_async_data.sources.local_files.cache_files import (
    MOST_BYTES,
    ForeignError,
    is_foreign,
    own_name,
    trim,
    used,
    user_folder,
)
from lit_async_data.sources.local_files.file_times import changed_recently

# Smaller indexes are built in 20 to 40 ms; they are not worth a file.
FEWEST_CHUNKS = 2**14
# Letters of the data file's name in the name of its index: few enough for any file system.
NAME_SHOWN = 50
EXTENSION = ".chunks"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IndexCache:
    """Where indexes of chunks are kept.

    Attributes:
        where: ``"auto"`` for the user's cache folder, ``$XDG_CACHE_HOME/lit_async_data`` (``~/.cache``), which keeps at
            most `MOST_BYTES`; ``"beside"`` for a hidden file beside the data; an existing folder; or False for nowhere.

    Raises:
        ConfigError: ``where`` is none of these.

    Example:
        >>> IndexCache("/nowhere")
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: index_cache: '/nowhere' is no folder; make it, or give auto, beside or False
    """

    where: str | os.PathLike[str] | bool = "auto"
    # Why indexes could not be kept. Only the first reason is logged: a source may have a thousand files.
    _reasons: list[str] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.where is False or self.where in ("auto", "beside"):
            return
        if not isinstance(self.where, str | os.PathLike):
            raise ConfigError(f"index_cache: {self.where!r} is neither auto, beside, a folder, nor False")
        folder = os.path.abspath(os.path.expanduser(self.where))
        if not os.path.isdir(folder):
            raise ConfigError(f"index_cache: {self.where!r} is no folder; make it, or give auto, beside or False")
        object.__setattr__(self, "where", folder)  # absolute: the source may outlive the working folder

    def load(self, key: IndexKey) -> Columns | None:
        """The cached columns of a dataset in its current state; None if no valid file holds them."""
        for path in self._paths(key):
            try:
                columns = read_columns(path, key)
            except (FileNotFoundError, NotADirectoryError):
                continue
            # Errors are logged as text: the log would keep an error's frames alive, and with them a map.
            except ForeignError as error:
                _log.info("%s: the cached index in %s is not trusted: %s; building it again", key, path, str(error))
            except (OSError, ValueError) as error:
                level = logging.INFO if isinstance(error, StaleError) else logging.WARNING
                _log.log(level, "%s: the cached index in %s is unusable (%s); building it again", key, path, str(error))
            else:
                if self.where == "auto":
                    used(path)
                return columns
        return None

    def store(self, key: IndexKey, columns: Columns) -> Columns:
        """Keep columns, if there are enough of them and a folder to keep them in. Failing to do so is no error.

        Any number of processes may store at once: each writes a temporary file and renames it, unless a file with the
        same columns has the name by then, which others may have mapped.

        Returns:
            The columns to use from now on: those in the cache file, or those given.
        """
        if not self._is_cacheable(key):
            return columns
        if changed_recently(key.mtime_ns, key.ctime_ns):
            _log.debug("%s: has just changed, so its index is not cached yet", key)
            return columns
        if self.where == "auto" and key.file_bytes > MOST_BYTES:
            self._report_failure(
                f"the one of {key} takes {key.file_bytes} bytes, but the user's cache folder may hold {MOST_BYTES}"
            )
            return columns
        paths = self._paths(key)
        if not paths:
            self._report_failure("this user has no cache folder")
        for path in paths:
            if is_foreign(path):
                continue
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                write_columns(path, key, columns)
                cached = read_columns(path, key)
            except (OSError, ValueError) as error:
                self._report_failure(f"{path}: {error}")
                return columns
            _log.info("%s: the index of its %d chunks is cached in %s", key, key.chunks, path)
            if self.where == "auto":
                trim(os.path.dirname(path), EXTENSION)
            return cached
        return columns

    def _report_failure(self, reason: str) -> None:
        if not self._reasons:
            _log.info(
                "index_cache: an index of chunks cannot be kept (%s), so it is built at every opening; give another "
                "folder, or False",
                reason,
            )
        self._reasons.append(reason)

    def _is_cacheable(self, key: IndexKey) -> bool:
        return self.where is not False and key.chunks >= FEWEST_CHUNKS

    def _paths(self, key: IndexKey) -> list[str]:
        """Possible paths of an index: in shared folders a second one, in case another user's file has the first."""
        if not self._is_cacheable(key):
            return []
        # The real path, so that all links to the data share one index.
        folder, file = os.path.split(os.path.realpath(key.path))
        if self.where == "beside":
            path = os.path.join(folder, f".{file[:NAME_SHOWN]}.{_digest(file, key.name)}{EXTENSION}")
            return [path, own_name(path)]
        place = user_folder() if self.where == "auto" else os.fspath(self.where)  # type: ignore[arg-type] # no bool
        if place is None:
            return []
        path = os.path.join(place, f"{file[:NAME_SHOWN]}.{_digest(folder, file, key.name)}{EXTENSION}")
        return [path] if self.where == "auto" else [path, own_name(path)]


def _digest(*parts: str) -> str:
    import hashlib

    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
