"""`TableCache`: the columns of large tables as they are held, kept in a folder and mapped into memory.

A process that reads 50 million rows of CSV takes 24 seconds for it, ids checked, and then holds 68 bytes for each.
Mapped, they are ready after 15, and 45 of those bytes are the page cache's, one copy for all processes of a machine.
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
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.cache_files import ForeignError, is_foreign, on_network, opened, own_name, owner
from lit_async_data.sources.manifest.table.arrow import arrow, numbered, values_of
from lit_async_data.sources.manifest.table.row_origin import RowOrigin
from lit_async_data.sources.manifest.table.table import Table

# What tells the state of a file from others: inode, bytes, and the times of the last change of what it holds, in
# nanoseconds, and of anything about it: copying can give a file the former of another.
Identity = tuple[int, int, int, int]
# Tables of fewer rows are read in less than a second.
FEWEST_ROWS = 10**6
# File systems that count in seconds cannot tell two changes within this time from one.
YOUNG_NS = 2 * 10**9
# To be counted up when what is held changes.
VERSION = 2
SUM_BYTES = 4
# Bytes whose check sum is taken at a time.
_PIECE = 2**26
# Stands before the name of each column, and alone for the rows that filters have left.
_COLUMN = "column "

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TableKey:
    """Which columns of which rows of which files.

    Attributes:
        files: The state of each file, by path, in their order.
        columns: Names.
        filters: As they were given.
    """

    files: Mapping[str, Identity]
    columns: Sequence[str]
    filters: Any

    def __str__(self) -> str:
        parts = [VERSION, arrow().__version__, list(self.files.items()), list(self.columns), self.filters]
        return json.dumps(parts, default=repr)


@dataclasses.dataclass(frozen=True)
class TableCache:
    """Where columns are kept.

    Attributes:
        folder: One that is there; None for nowhere.

    Raises:
        ConfigError: It is no folder.

    Example:
        >>> TableCache("/nowhere")
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: table_cache: '/nowhere' is no folder; make it, or give none
    """

    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        given = os.fspath(self.folder) if isinstance(self.folder, str | os.PathLike) else ""
        folder = os.path.abspath(os.path.expanduser(given))
        if not (given and os.path.isdir(folder)):
            raise ConfigError(f"table_cache: {self.folder!r} is no folder; make it, or give none")
        object.__setattr__(self, "folder", folder)  # absolute: the source may outlive the working folder

    def load(self, key: TableKey) -> Table | None:
        """What was kept of a table in the state it is in; None if nothing whole was, or nothing that is believed."""
        for path in self._paths(key):
            try:
                return _table(_content(path, key), key)
            except FileNotFoundError:
                continue
            except ForeignError as error:
                _log.info("what is kept of %s in %s is not believed: %s", _named(key), path, str(error))
                if not is_foreign(path):
                    _remove(path)
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                _log.warning(
                    "what is kept of %s in %s is of no use (%s): it is read anew", _named(key), path, str(error)
                )
                if not isinstance(error, OSError):
                    _remove(path)
        return None

    def store(self, key: TableKey, table: Table) -> Table:
        """Keep a table, if that pays. It is never an error if it cannot be kept.

        Safe in any number of processes at once: each writes a file of its own and then gives it its name.

        Returns:
            The table to be used from now on: the one that is kept, or the one that was given.
        """
        # Under a second name where somebody else's file has the first.
        path = next((path for path in self._paths(key) if not is_foreign(path)), None)
        if path is None or len(table) < FEWEST_ROWS:
            return table
        if any(abs(time.time_ns() - max(state[2:])) < YOUNG_NS for state in key.files.values()):
            _log.debug("%s was changed a moment ago: its columns are not kept yet", _named(key))
            return table
        try:
            if not os.path.exists(path):  # another process was faster, and others may have mapped that
                # Whoever may read all of the table may read its columns; nobody else may write them.
                modes = [os.stat(file).st_mode for file in key.files]
                _write(path, _held(key, table), functools.reduce(operator.and_, modes, 0o644))
            kept = _table(_content(path, key), key)
        except (OSError, ValueError) as error:
            _log.warning("the columns of %s cannot be kept in %s: %s", _named(key), path, str(error))
            return table
        _log.info("the columns of %s, %d rows, are kept in %s", _named(key), len(table), path)
        return kept

    def _paths(self, key: TableKey) -> list[str]:
        if self.folder is None:
            return []
        digest = hashlib.blake2b(str(key).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        path = os.path.join(self.folder, f"{digest}.columns")
        return [path, own_name(path)]


def _remove(path: str) -> None:
    """A file that is of no use, and would never be replaced."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _named(key: TableKey) -> str:
    return next(iter(key.files), "")


def _held(key: TableKey, table: Table) -> Any:
    """Everything as one batch of Arrow."""
    library, origin = arrow(), table.origin
    columns = {_COLUMN + name: table.array(name) for name in key.columns}
    if origin.kept is not None:
        columns[_COLUMN] = numbered(origin.kept)
    about = {"key": str(key), "starts": json.dumps(origin.starts.tolist())}
    schema = library.schema([(name, array.type) for name, array in columns.items()], metadata=about)
    return library.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _table(batch: Any, key: TableKey) -> Table:
    about = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
    if about.get("key") != str(key):
        raise ValueError("it is of another table")
    found = dict(zip(batch.schema.names, batch.columns, strict=True))
    kept: Indices | None = values_of(found.pop(_COLUMN)) if _COLUMN in found else None
    starts = np.array(json.loads(about["starts"]), np.int64)
    columns = {name.removeprefix(_COLUMN): array for name, array in found.items()}
    return Table(columns, RowOrigin(list(key.files), starts, kept))


def _content(path: str, key: TableKey) -> Any:
    """The batch in a file, whose bytes stay there; on a network file system they are copied."""
    library = arrow()
    with opened(path, {owner(os.stat(file)) for file in key.files}) as file:
        if on_network(file.fileno()):
            content = library.py_buffer(file.read())
        else:
            # By its descriptor: the path may lead to another file by now.
            with library.memory_map(f"/proc/self/fd/{file.fileno()}") as whole:
                content = whole.read_buffer()  # keeps the map, not the file
    end = content.size - SUM_BYTES
    if end < 0 or _sum(_pieces(content)) != int.from_bytes(memoryview(content)[end:], "little"):
        raise ValueError("its check sum is wrong")
    with arrow("ipc").open_file(library.BufferReader(content.slice(0, end))) as reader:
        return reader.get_batch(0)


def _pieces(content: Any) -> Iterator[memoryview]:
    view, end = memoryview(content), content.size - SUM_BYTES
    return (view[begin : min(begin + _PIECE, end)] for begin in range(0, end, _PIECE))


def _sum(pieces: Iterator[memoryview]) -> int:
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def _write(path: str, batch: Any, mode: int) -> None:
    new = f"{path}.{secrets.token_hex(8)}.new"
    try:
        with open(new, "xb", opener=functools.partial(os.open, mode=0o600)):
            pass
        with arrow().OSFile(new, "wb") as file, arrow("ipc").new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        with open(new, "r+b") as whole:
            total = _sum(iter(lambda: memoryview(whole.read(_PIECE)), b""))
            whole.write(total.to_bytes(SUM_BYTES, "little"))
        os.chmod(new, mode)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise
