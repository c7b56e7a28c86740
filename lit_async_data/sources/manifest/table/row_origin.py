"""`RowOrigin`: where the rows of a table come from, for messages."""

from __future__ import annotations

import codecs
import difflib
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ManifestError
from lit_async_data.order.permutation import Indices

# What a table given in memory is called where a file would be.
GIVEN = "the table given"
# Of a value or a foreign message, in ours.
_LONGEST = 200


def shown(value: object) -> str:
    r"""A value for a message: printable ASCII on one line, of at most 200 characters.

    Example:
        >>> print(shown("a\nb"))
        'a\nb'
    """
    text = ascii(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def named(path: str) -> str:
    """A path for a message: as it is, unless it would break the line."""
    return path if path.isprintable() else shown(path)


class RowOrigin:
    """Which row of which file each row of a table is.

    Args:
        files: Paths; none if the table was given in memory.
        starts: The first row of each file, counted over all of them, and at the end how many there are; int64.
        kept: Which of those rows the table has; int64, ascending. None: all.
        ids: What the rows of the table are called, an array of Arrow; None where they have no names.
        folder: Where there is no table: the folder that the rows were found in, each of which is a file.

    Example:
        >>> origin = RowOrigin(["a.csv", "b.csv"], np.array([0, 3, 6]), kept=np.array([1, 4]))
        >>> origin.place(1)
        ('b.csv', 1)
    """

    def __init__(
        self,
        files: Sequence[str],
        starts: Indices,
        kept: Indices | None = None,
        ids: Any = None,
        folder: str | None = None,
    ) -> None:
        self.files = tuple(files)
        self.starts = starts
        self.kept = kept
        self._ids = ids
        self.folder = folder

    def called(self, ids: Any) -> RowOrigin:
        """The same, with what rows are called."""
        return RowOrigin(self.files, self.starts, self.kept, ids, self.folder)

    def taken(self, rows: Indices) -> RowOrigin:
        """That of some of the rows.

        Args:
            rows: int64, ascending.
        """
        return RowOrigin(self.files, self.starts, rows if self.kept is None else self.kept[rows], folder=self.folder)

    @property
    def untyped(self) -> bool:
        """Whether the files say nothing of the types of their columns."""
        return any(re.search(r"\.[ct]sv(\.gz)?$", file.lower()) for file in self.files)

    @property
    def name(self) -> str:
        """What the table is called in messages."""
        if not self.files:
            return GIVEN if self.folder is None else named(self.folder)
        first, *others = self.files
        return named(first) + (f" and {len(others)} more" if others else "")

    @property
    def row(self) -> str:
        """What a row is called in messages."""
        return "row" if self.folder is None else "file"

    def place(self, row: int) -> tuple[str | None, int]:
        """File and row there of a row of the table; None and the row as it was given where there is no file."""
        number = row if self.kept is None else int(self.kept[row])
        if not self.files:
            return None, number
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.files[file], number - int(self.starts[file])

    def where(self, row: int) -> str:
        """A row, for the middle of a message."""
        file, number = self.place(row)
        found = f"{self.row} {number}"
        return found if file is None or len(self.files) == 1 else f"{found} of {named(file)}"

    def error(self, message: str, *, row: int | None = None, column: str | None = None) -> ManifestError:
        """An error that says where.

        Args:
            message: What is wrong and what to do.
            row: Of the table.
            column: Its name.
        """
        file, number = (None, None) if row is None else self.place(row)
        if row is None:
            file = self.files[0] if len(self.files) == 1 else None
        place = [self.name if file is None else named(file)]
        if number is not None:
            place.append(f"{self.row} {number}")
        if row is not None and self._ids is not None:
            place.append(f"id {shown(str(self._ids[row].as_py()))}")
        if column is not None:
            place.append(f"column {shown(column)}")
        return ManifestError(f"{', '.join(place)}: {message}", file=file, dataset=column, row=number)


# How files begin that are no text.
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
# Names of columns that a message lists.
_LISTED = 20


class NoColumnError(ManifestError):
    """A table has no column of a name."""


def check_content(path: str, origin: RowOrigin, *, codec: str | None) -> None:
    """Check that a table of text is not something else that its first bytes tell of.

    Args:
        path: Of the file.
        origin: For messages.
        codec: Its encoding; None where it must be UTF-8.

    Raises:
        ManifestError: It is.
    """
    with open(path, "rb") as file:
        first = file.read(4)
    if first.startswith(_GZIP) and not path.endswith(".gz"):
        raise origin.error(f"is compressed by gzip; name it {named(os.path.basename(path))}.gz")
    if first == _ZIP:
        raise origin.error("is a ZIP archive, or a spreadsheet: unpack it, or give what pandas.read_excel makes of it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not (codec or "").startswith("utf-16"):
        option = "" if codec is None else "say encoding=utf-16, or "
        raise origin.error(f"its first line is not UTF-8, but UTF-16: {option}save the table as UTF-8")


def check_columns(present: Sequence[object], wanted: Sequence[str], origin: RowOrigin) -> None:
    """Check that each wanted column is there, and no name stands twice.

    Args:
        present: The names in the table, in its order. Empty ones, as spreadsheets leave them, may repeat.
        wanted: Names.
        origin: For messages.

    Raises:
        ManifestError: Otherwise; near names are suggested.
    """
    twice = [name for name, count in Counter(present).items() if count > 1 and name != ""]
    if twice:
        raise origin.error(f"has more than one column {shown(twice[0])}; each name may stand once")
    for name in wanted:
        if name not in present:
            texts = [each for each in present if isinstance(each, str)]
            near = difflib.get_close_matches(name.strip(), texts, 3, 0.6)
            hint = f"did you mean {' or '.join(map(shown, near))}?" if near else f"it has {_listed(present)}"
            said = origin.error(f"has no column {shown(name)}; {hint}")
            raise NoColumnError(str(said), file=said.file, dataset=name)


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(map(shown, names[:_LISTED])) or "none") + more
