"""Indexes of chunks kept on disk for the next opening: `IndexCache`.

Building one takes 1 to 2 µs per chunk each time a file is opened, in every rank and worker. One that was kept is read
in a hundredth of that, and a large one is mapped, so that all processes of a machine share its pages.

It is kept in the user's cache folder, of which the files used longest ago are removed, or where the user says: in a
folder, or beside the data, where every user and machine that reads them finds it, and goes with them when the folder is
moved or deleted. Beside the data its name begins with a dot: else ``"scans/*"`` would take it for data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os

from lit_async_data.errors import ConfigError
from lit_async_data.sources.cache_files import MOST_BYTES, ForeignError, is_foreign, own_name, trim, used, user_folder
from lit_async_data.sources.file_times import changed_recently
from lit_async_data.sources.hdf5.storage.index_file import Columns, IndexKey, StaleError, read_columns, write_columns

# Indexes of fewer chunks are built in less time than anyone notices (20 to 40 ms), and leave no files behind.
FEWEST_CHUNKS = 2**14
# Letters of the data file's name in that of its index: what fits into a file name whatever the letters.
NAME_SHOWN = 50
EXTENSION = ".chunks"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IndexCache:
    """Where indexes are kept.

    Attributes:
        where: ``"auto"`` for the user's cache folder, ``$XDG_CACHE_HOME/lit_async_data`` (``~/.cache``), which keeps at
            most `MOST_BYTES`; ``"beside"`` for a hidden file beside the data; a folder that is there; or False for
            nowhere.

    Raises:
        ConfigError: ``where`` is none of these.

    Example:
        >>> IndexCache("/nowhere")
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: index_cache: '/nowhere' is no folder; make it, or give auto, beside or False
    """

    where: str | os.PathLike[str] | bool = "auto"
    # Why an index could not be kept: logged once for a source, which may have a thousand files.
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
        """The columns kept for a dataset in the state it is in; None if there are none that are whole and believed."""
        for path in self._paths(key):
            try:
                columns = read_columns(path, key)
            except (FileNotFoundError, NotADirectoryError):
                continue
            # The reason as text: the log would keep the error, and with it the frames that hold a map.
            except ForeignError as error:
                _log.info("the index of %s in %s is not believed: %s", key, path, str(error))
            except (OSError, ValueError) as error:
                level = logging.INFO if isinstance(error, StaleError) else logging.WARNING
                _log.log(level, "the index of %s in %s is of no use (%s): it is built anew", key, path, str(error))
            else:
                if self.where == "auto":
                    used(path)
                return columns
        return None

    def store(self, key: IndexKey, columns: Columns) -> Columns:
        """Keep columns, if that pays and there is a place for them. It is never an error if there is none.

        Safe in any number of processes at once: each writes a file of its own and then gives it its name, unless one
        that holds the same has that name by now, which others may have mapped.

        Returns:
            The columns to be used from now on: those kept, or those given.
        """
        if not self._is_cacheable(key):
            return columns
        if changed_recently(key.mtime_ns, key.ctime_ns):
            _log.debug("%s was changed a moment ago: its index is not kept yet", key)
            return columns
        if self.where == "auto" and key.file_bytes > MOST_BYTES:
            self._report_failure(
                f"that of {key} has {key.file_bytes} bytes, and the user's cache folder takes {MOST_BYTES}"
            )
            return columns
        paths = self._paths(key)
        if not paths:
            self._report_failure("there is no cache folder of the user")
        for path in paths:
            if is_foreign(path):
                continue
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                write_columns(path, key, columns)
                kept = read_columns(path, key)
            except (OSError, ValueError) as error:
                self._report_failure(f"{path}: {error}")
                return columns
            _log.info("the index of %s, %d chunks, is kept in %s", key, key.chunks, path)
            if self.where == "auto":
                trim(os.path.dirname(path), EXTENSION)
            return kept
        return columns

    def _report_failure(self, reason: str) -> None:
        if not self._reasons:
            _log.info(
                "an index of chunks cannot be kept, and is built at each opening (%s); index_cache takes another "
                "folder, or false",
                reason,
            )
        self._reasons.append(reason)

    def _is_cacheable(self, key: IndexKey) -> bool:
        return self.where is not False and key.chunks >= FEWEST_CHUNKS

    def _paths(self, key: IndexKey) -> list[str]:
        """Where an index may be kept; where others can write too, a second name in case that they have the first."""
        if not self._is_cacheable(key):
            return []
        # Where the data lie and not a link to them, so that all links share one.
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
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
