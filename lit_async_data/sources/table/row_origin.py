"""`RowOrigin`: file and row of each row of a table, and the errors that name rows and columns."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.errors import ManifestError
from lit_async_data.order.permutation import Indices

GIVEN = "the table given"  # name of a table in memory
_MAX_QUOTED = 200  # most characters of a value in a message


def quoted(value: object) -> str:
    """Printable ASCII on one line, at most 200 characters."""
    text = ascii(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"


def printable_path(path: str) -> str:
    return path if path.isprintable() else quoted(path)


class RowOrigin(NamedTuple):
    files: Sequence[str]  # paths; empty for a table in memory
    starts: Indices  # the first row of each file, counted over all files, and the total at the end; int64
    kept: Indices | None = None  # the rows of the files that the table has; int64, ascending. None: all
    ids: Any = None  # the id of each row of the table, an Arrow array; None if rows have no ids
    folder: str | None = None  # the folder that was listed as a table, whose rows are files; None for a table
    orders: Mapping[str, str] = {}  # by column, orders of its categories that do not fit together, in words

    @classmethod
    def of_file(cls, path: str, rows: int = 0) -> RowOrigin:
        return cls([path], np.array([0, rows]))

    @property
    def untyped(self) -> bool:
        """Whether the files store no types, as CSV and TSV."""
        return any(re.search(r"\.[ct]sv(\.gz)?$", file.lower()) for file in self.files)

    @property
    def name(self) -> str:
        if not self.files:
            return GIVEN if self.folder is None else printable_path(self.folder)
        first, *others = self.files
        return printable_path(first) + (f" and {len(others)} more" if others else "")

    @property
    def row(self) -> str:
        return "row" if self.folder is None else "file"

    def place(self, row: int) -> tuple[str | None, int]:
        """File, and row in it; None and the given row for a table in memory."""
        number = row if self.kept is None else int(self.kept[row])
        if not self.files:
            return None, number
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.files[file], number - int(self.starts[file])

    def where(self, row: int) -> str:
        file, number = self.place(row)
        text = f"{self.row} {number}"
        return text if file is None or len(self.files) == 1 else f"{text} of {printable_path(file)}"

    def error(self, message: str, *, row: int | None = None, column: str | None = None) -> ManifestError:
        file, number = (None, None) if row is None else self.place(row)
        if row is None:
            file = self.files[0] if len(self.files) == 1 else None
        place = [self.name if file is None else printable_path(file)]
        if number is not None:
            place.append(f"{self.row} {number}")
        if row is not None and self.ids is not None:
            place.append(f"id {quoted(str(self.ids[row].as_py()))}")
        if column is not None:
            place.append(f"column {quoted(column)}")
        return ManifestError(message, place=", ".join(place), file=file, dataset=column, row=number)


_LISTED = 20  # most columns that a message lists


class NoColumnError(ManifestError):
    """The table has no column of the requested name."""


def check_columns(present: Sequence[object], wanted: Sequence[str], origin: RowOrigin) -> None:
    twice = [name for name, count in Counter(present).items() if count > 1 and name != ""]
    if twice:
        raise origin.error(f"has more than one column {quoted(twice[0])}; rename one")
    for name in wanted:
        if name not in present:
            texts = [each for each in present if isinstance(each, str)]
            near = difflib.get_close_matches(name.strip(), texts, 3, 0.6)
            hint = f"did you mean {' or '.join(map(quoted, near))}?" if near else f"it has {listed(present)}"
            error = origin.error(f"has no column {quoted(name)}; {hint}")
            raise NoColumnError(str(error), file=error.file, dataset=name)


def listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(map(quoted, names[:_LISTED])) or "none") + more
