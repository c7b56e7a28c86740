"""`TableReader`: a table as the user gave it, of which further columns can be read later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import ChangedError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.delimited import PLAIN, TextForm
from lit_async_data.sources.manifest.table.reading import files_of
from lit_async_data.sources.manifest.table.row_origin import named
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.manifest.table.table_cache import Identity, TableCache, TableKey


class TableReader:
    """A table, and which of its rows are wanted. What is read of it at another time is of the same rows.

    Args:
        given: As `Table.of` takes it. What can be read once only is held as a whole.
        filters: As there.
        cache: Where columns of files are kept.
        form: How CSV and TSV are written.
    """

    def __init__(self, given: Any, filters: Any, cache: TableCache, form: TextForm = PLAIN) -> None:
        if isinstance(given, str | os.PathLike):
            # The source may outlive the working folder.
            given = os.path.abspath(os.path.expanduser(given))
        elif hasattr(given, "read_all"):
            given = arrow().table(given)
        self._given, self._filters, self._cache, self._form = given, filters, cache, form
        self._elsewhere = False
        self._kept: Indices | None = None
        self._files: Mapping[str, Identity] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Nor the user's own frame, of which the columns that are used are held anyway.
        return vars(self) if isinstance(self._given, str) else {**vars(self), "_given": None, "_elsewhere": True}

    def columns(self, names: Sequence[str]) -> Table:
        """Some columns, of the rows that are wanted.

        Raises:
            ChangedError: The files are not those of the first time.
            MissingError: The table was in the memory of another process.
            ManifestError: As `Table.of`.
        """
        if self._elsewhere:
            raise MissingError(
                f"column {names[0]!r} has not been read, and the table is in another process; make it a field, or give "
                "a file"
            )
        files = self._states()
        _check_same(self._files or files, files)
        table = self._read(list(dict.fromkeys(names)), files)
        self._files = files
        return table if self._kept is None else table.taken(self._kept)

    def _read(self, names: list[str], files: Mapping[str, Identity]) -> Table:
        if not files:
            return Table.of(self._given, names, self._filters, self._form)
        key = TableKey(files, names, [self._filters, *self._form] if self._form.given else self._filters)
        kept = self._cache.load(key)
        if kept is not None:
            return kept
        table = Table.of(self._given, names, self._filters, self._form)
        # One that was written to meanwhile is of neither state.
        _check_same(files, self._states())
        return self._cache.store(key, table)

    def _states(self) -> Mapping[str, Identity]:
        """The state of each file; none of what is in memory."""
        return {file: _identity(file) for file in files_of(self._given)} if isinstance(self._given, str) else {}

    def keep(self, rows: Indices) -> None:
        """Want only these of the rows that were wanted until now.

        Args:
            rows: int64, ascending.
        """
        self._kept = rows if self._kept is None else self._kept[rows]


def _check_same(then: Mapping[str, Identity], now: Mapping[str, Identity]) -> None:
    # Other rights or another name beside change the last of the times, and no row.
    changed = [file for file in {**then, **now} if then.get(file, ())[:3] != now.get(file, ())[:3]]
    if changed:
        raise ChangedError(
            f"{named(changed[0])}: has been written to since the source was built; build it again", file=changed[0]
        )


def _identity(file: str) -> Identity:
    try:
        found = os.stat(file)
    except OSError as error:
        raise MissingError(f"{named(file)}: cannot be opened: {error.strerror}", file=file) from error
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
