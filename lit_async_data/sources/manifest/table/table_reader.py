"""`TableReader`: the table that the user gave, from which further columns can be read later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ChangedError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.delimited import DEFAULT_FORMAT, TextFormat
from lit_async_data.sources.manifest.table.reading import files_of
from lit_async_data.sources.manifest.table.row_origin import printable_path
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.manifest.table.table_cache import Identity, TableCache, TableKey


class TableReader:
    """A table and the selection of its rows. Columns that are read later have the same rows.

    Args:
        given: As for `Table.of`. A stream is read as a whole, because it can be read only once.
        filters: As for `Table.of`.
        cache: Keeps columns of files.
        text_format: How CSV and TSV are written.
    """

    def __init__(self, given: Any, filters: Any, cache: TableCache, text_format: TextFormat = DEFAULT_FORMAT) -> None:
        if isinstance(given, str | os.PathLike):
            # Absolute, because the working directory may change.
            given = os.path.abspath(os.path.expanduser(given))
        elif hasattr(given, "read_all"):
            given = arrow().table(given)
        self._given, self._filters, self._cache, self._text_format = given, filters, cache, text_format
        self._is_detached = False
        self._selected: Indices | None = None
        self._files: Mapping[str, Identity] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without the user's table in memory; the columns in use are pickled with `Fields`.
        return vars(self) if isinstance(self._given, str) else {**vars(self), "_given": None, "_is_detached": True}

    def columns(self, names: Sequence[str]) -> Table:
        """Read columns of the selected rows.

        Raises:
            ChangedError: The files have changed since the first read.
            MissingError: The table is in the memory of another process.
            ManifestError: As `Table.of`.
        """
        if self._is_detached:
            raise MissingError(
                f"column {names[0]!r}: was not read before pickling, and the table is in another process; make it a "
                "field, or give a file"
            )
        files = self._file_states()
        _check_unchanged(self._files or files, files)
        table = self._read(list(dict.fromkeys(names)), files)
        self._files = files
        return table if self._selected is None else table.taken(self._selected)

    def _read(self, names: list[str], files: Mapping[str, Identity]) -> Table:
        if not files:
            return Table.of(self._given, names, self._filters, self._text_format)
        key = TableKey(files, names, [self._filters, *self._text_format] if self._text_format.given else self._filters)
        kept = self._cache.load(key)
        if kept is not None:
            return kept
        table = Table.of(self._given, names, self._filters, self._text_format)
        # If a file changed while it was read, the columns belong to neither state.
        _check_unchanged(files, self._file_states())
        return self._cache.store(key, table)

    def _file_states(self) -> Mapping[str, Identity]:
        """The state of each file; empty for a table in memory."""
        return {file: _state_of(file) for file in files_of(self._given)} if isinstance(self._given, str) else {}

    def select(self, rows: Indices) -> None:
        """Select rows from those selected so far.

        Args:
            rows: int64, ascending.
        """
        self._selected = rows if self._selected is None else self._selected[rows]


def _check_unchanged(then: Mapping[str, Identity], now: Mapping[str, Identity]) -> None:
    # A change of mode or a new hard link changes the last time, but no row.
    changed = [file for file in {**then, **now} if then.get(file, ())[:3] != now.get(file, ())[:3]]
    if changed:
        raise ChangedError(
            f"{printable_path(changed[0])}: changed since the source was built; build the source again",
            file=changed[0],
        )


def _state_of(file: str) -> Identity:
    try:
        status = os.stat(file)
    except OSError as error:
        raise MissingError(f"{printable_path(file)}: cannot be opened: {error.strerror}", file=file) from error
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
