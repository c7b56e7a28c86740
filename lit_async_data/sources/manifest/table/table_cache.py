"""`TableCache`: columns of large tables, kept in a folder and mapped into memory.

A process that reads 50 million rows of CSV and checks their ids takes 24 seconds and then holds 68 bytes per row. A
mapped cache is ready after 15 seconds, and 45 of those bytes belong to the page cache, one copy for all processes of a
machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.local_files.cache_files import ForeignError, is_foreign, on_network, opened, own_name, owner
from lit_async_data.sources.local_files.file_times import changed_recently
from lit_async_data.sources.manifest.table.arrow import arrow, arrow_integers, values_of
from lit_async_data.sources.manifest.table.row_origin import RowOrigin
from lit_async_data.sources.manifest.table.table import Table

# Identifies the state of a file: inode, bytes, time of last modification and of last change of attributes, in
# nanoseconds. The latter is needed because a copy can get the modification time of another file.
Identity = tuple[int, int, int, int]
# Smaller tables are read in less than a second and not kept.
FEWEST_ROWS = 10**6
# Increase this when the content of cache files changes.
VERSION = 2
CHECKSUM_BYTES = 4
# Bytes per checksum step.
_PIECE = 2**26
# Prefix of column names; alone it names the rows that the filters kept.
_COLUMN = "column "

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TableKey:
    """Identifies columns of rows of files.

    Attributes:
        files: The state of each file, by path, in order.
        columns: Names.
        filters: The filters as given.
    """

    files: Mapping[str, Identity]
    columns: Sequence[str]
    filters: Any

    def __str__(self) -> str:
        parts = [VERSION, arrow().__version__, list(self.files.items()), list(self.columns), self.filters]
        return json.dumps(parts, default=repr)


@dataclasses.dataclass(frozen=True)
class TableCache:
    """Keeps columns of tables in a folder.

    Attributes:
        folder: An existing folder; None keeps nothing.

    Raises:
        ConfigError: The folder does not exist.

    Example:
        >>> TableCache("/nowhere")
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: table_cache: '/nowhere' is not a folder; create it, or leave out table_cache
    """

    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        given = os.fspath(self.folder) if isinstance(self.folder, str | os.PathLike) else ""
        folder = os.path.abspath(os.path.expanduser(given))
        if not (given and os.path.isdir(folder)):
            raise ConfigError(f"table_cache: {self.folder!r} is not a folder; create it, or leave out table_cache")
        object.__setattr__(self, "folder", folder)  # absolute: the source may outlive the working folder

    def load(self, key: TableKey) -> Table | None:
        """Load kept columns for this state of the files; None if there are none, or none that is intact and trusted."""
        for path in self._paths(key):
            try:
                return _table(read_batch(path, key), key)
            except FileNotFoundError:
                continue
            except ForeignError as error:
                _log.info(
                    "%s: the cached columns in %s are not trusted: %s; reading the table again",
                    _first_file(key),
                    path,
                    str(error),
                )
                if not is_foreign(path):
                    _remove(path)
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                _log.warning(
                    "%s: the cached columns in %s cannot be used (%s); reading the table again",
                    _first_file(key),
                    path,
                    str(error),
                )
                if not isinstance(error, OSError):
                    _remove(path)
        return None

    def store(self, key: TableKey, table: Table) -> Table:
        """Keep a table if it is large enough. A failure to keep it is logged, not raised.

        Safe in several processes at once: each writes its own file and then renames it.

        Returns:
            The table to use from now on: the mapped copy, or the given table.
        """
        # The second path is for the case that somebody else's file has the first.
        path = next((path for path in self._paths(key) if not is_foreign(path)), None)
        if path is None or len(table) < FEWEST_ROWS:
            return table
        if any(changed_recently(*state[2:]) for state in key.files.values()):
            _log.debug("%s: changed less than 2 seconds ago, so its columns are not cached yet", _first_file(key))
            return table
        try:
            if not os.path.exists(path):  # do not replace the file of another process: it may be mapped
                # Everyone who may read all files may read the cache; only the owner may write it.
                modes = [os.stat(file).st_mode for file in key.files]
                write_batch_file(path, _record_batch(key, table), functools.reduce(operator.and_, modes, 0o644))
            kept = _table(read_batch(path, key), key)
        except (OSError, ValueError) as error:
            _log.warning("%s: the columns cannot be cached in %s: %s", _first_file(key), path, str(error))
            return table
        _log.info("%s: cached the columns of %d rows in %s", _first_file(key), len(table), path)
        return kept

    def _paths(self, key: TableKey) -> list[str]:
        if self.folder is None:
            return []
        digest = hashlib.blake2b(str(key).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        path = os.path.join(self.folder, f"{digest}.columns")
        return [path, own_name(path)]


def _remove(path: str) -> None:
    """Remove a useless file, which would otherwise never be replaced."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _first_file(key: TableKey) -> str:
    return next(iter(key.files), "")


def _record_batch(key: TableKey, table: Table) -> Any:
    """All columns as one Arrow record batch."""
    library, origin = arrow(), table.origin
    columns = {_COLUMN + name: table.array(name) for name in key.columns}
    if origin.kept is not None:
        columns[_COLUMN] = arrow_integers(origin.kept)
    metadata = {"key": str(key), "starts": json.dumps(origin.starts.tolist())}
    schema = library.schema([(name, array.type) for name, array in columns.items()], metadata=metadata)
    return library.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _table(batch: Any, key: TableKey) -> Table:
    metadata = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
    if metadata.get("key") != str(key):
        raise ValueError("it belongs to another table")
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    kept: Indices | None = values_of(arrays.pop(_COLUMN)) if _COLUMN in arrays else None
    starts = np.array(json.loads(metadata["starts"]), np.int64)
    columns = {name.removeprefix(_COLUMN): array for name, array in arrays.items()}
    return Table(columns, RowOrigin(list(key.files), starts, kept))


def read_batch(path: str, key: TableKey) -> Any:
    """The record batch in a cache file, mapped; on a network file system it is copied."""
    library = arrow()
    with opened(path, {owner(os.stat(file)) for file in key.files}) as file:
        if on_network(file.fileno()):
            content = library.py_buffer(file.read())
        else:
            # Mapped by descriptor: the path may name another file by now.
            with library.memory_map(f"/proc/self/fd/{file.fileno()}") as whole:
                content = whole.read_buffer()  # keeps the mapping alive, not the descriptor
    end = content.size - CHECKSUM_BYTES
    if end < 0 or _checksum(_pieces(content)) != int.from_bytes(memoryview(content)[end:], "little"):
        raise ValueError("its checksum is wrong")
    with arrow("ipc").open_file(library.BufferReader(content.slice(0, end))) as reader:
        return reader.get_batch(0)


def _pieces(content: Any) -> Iterator[memoryview]:
    view, end = memoryview(content), content.size - CHECKSUM_BYTES
    return (view[begin : min(begin + _PIECE, end)] for begin in range(0, end, _PIECE))


def _checksum(pieces: Iterator[memoryview]) -> int:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def write_batch_file(path: str, batch: Any, mode: int) -> None:
    new = f"{path}.{secrets.token_hex(8)}.new"
    try:
        with open(new, "xb", opener=functools.partial(os.open, mode=0o600)):
            pass
        with arrow().OSFile(new, "wb") as file, arrow("ipc").new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        with open(new, "r+b") as whole:
            total = _checksum(iter(lambda: memoryview(whole.read(_PIECE)), b""))
            whole.write(total.to_bytes(CHECKSUM_BYTES, "little"))
        os.chmod(new, mode)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise
