"""`Rows`: the rows of a table as samples, and what they are called."""

from __future__ import annotations

import functools
import os
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from lit_async_data.errors import AsyncDataError, ManifestError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Location, Part
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.table.arrow import folders_of
from lit_async_data.sources.manifest.table.row_origin import GIVEN, named, shown
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.places import Places

# How a name in a table may differ from that of a file.
_FORMS: dict[str, Callable[[str], str]] = {
    "": str,
    "space around a name": str.strip,
    "another Unicode form of a name: unicodedata.normalize('NFC', path) makes it that of the file": functools.partial(
        unicodedata.normalize, "NFC"
    ),
    "another Unicode form of a name: unicodedata.normalize('NFD', path) makes it that of the file": functools.partial(
        unicodedata.normalize, "NFD"
    ),
}


class TableRow(Location):
    """Where a sample of a table lies: a `Location` whose file is the table, and what the row says.

    Attributes:
        id: What the sample is called; None where samples have no names.
        path: Of the first file that the row names; None where it names none.

    Example:
        >>> TableRow("birds.csv", 7, "007", "/data/owl.jpg").id
        '007'
    """

    id: str | None
    path: str | None

    def __new__(cls, file: str, row: int, id: str | None = None, path: str | None = None) -> Self:  # noqa: A002
        made = super().__new__(cls, file, "/", row)
        made.id, made.path = id, path
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.file, self.row, self.id, self.path

    def __repr__(self) -> str:
        return f"TableRow(file={self.file!r}, row={self.row}, id={self.id!r}, path={self.path!r})"


def _meant(path: str) -> str:
    """Which file a path that leads to none seems to mean, and what is to be changed in the table; empty if unknown."""
    found, wrong = "/", ["backslashes"] if "\\" in path else []
    for name in path.replace("\\", "/").split("/"):
        forms = [(what, form(name)) for what, form in _FORMS.items()]
        for what, other in forms:
            if os.path.lexists(os.path.join(found, other)):
                wrong += [what] if other != name else []
                found = os.path.join(found, other)
                break
        else:
            return ""
    return f" There is {shown(found)}; the table has {' and '.join(dict.fromkeys(wrong))}" if wrong else ""


class Rows:
    """The rows of a table as samples. Nothing in it changes; safe to use from any thread.

    Args:
        table: With the column of ids, if there is one.
        id: Name of the column with what samples are called; None where they have no names.

    Example:
        >>> import pyarrow
        >>> table = Table.of(pyarrow.table({"id": ["007", "008", "009"]}), ["id"]).taken(np.array([0, 2]))
        >>> entries = Rows(table, "id")
        >>> len(entries), entries.ids([1]), entries.where(1)
        (2, ['009'], "row 2 of the table given, id '009'")
    """

    def __init__(self, table: Table, id: str | None) -> None:  # noqa: A002  # the user's word
        self.table = table
        self._id = id

    def __len__(self) -> int:
        return len(self.table)

    def ids(self, samples: Sequence[int]) -> list[str | None]:
        """What samples are called; None for each where they have no names."""
        if self._id is None:
            return [None] * len(samples)
        return list(self.table.text(self._id, samples))

    def place(self, sample: int) -> tuple[str, int]:
        """File of the table and row there."""
        file, row = self.table.origin.place(sample)
        return self.table.origin.folder or GIVEN if file is None else file, row

    def locations(self, samples: Indices, paths: Sequence[str | None]) -> list[Location]:
        """Where samples lie, whose first files have these paths."""
        places = map(self.place, samples.tolist())
        return [
            TableRow(file, row, name, path)
            for (file, row), name, path in zip(places, self.ids(samples.tolist()), paths, strict=True)
        ]

    def where(self, sample: int) -> str:
        """Row and id of a sample, for messages."""
        file, row = self.place(sample)
        (name,) = self.ids([sample])
        return f"{self.table.origin.row} {row} of {named(file)}" + ("" if name is None else f", id {shown(name)}")

    def blamed(self, error: AsyncDataError, sample: int, path: str | None = None) -> AsyncDataError:
        """An error of what a row names, as one that says which row that is.

        Args:
            error: Its message says what is wrong with the file.
            sample: Which sample it was read for.
            path: Of the file.
        """
        _, row = self.place(sample)
        kind = type(error)
        hint = _meant(path) if path is not None and isinstance(error, MissingError) else ""
        found = kind(
            f"{self.where(sample)}: {error}{hint}",
            file=path or error.file,
            dataset=error.dataset,
            row=row,
            sample_id=sample,
        )
        found.__cause__ = error.__cause__
        return found

    def error(self, sample: int, message: str, *, column: str | None = None) -> ManifestError:
        """An error that says which row is wrong."""
        file, row = self.place(sample)
        return ManifestError(f"{self.where(sample)}: {message}", file=file, dataset=column, row=row, sample_id=sample)

    # -- how samples belong together ---------------------------------------------------------------------------------

    def parts(self) -> tuple[Part, ...]:
        """The files of the table."""
        files = self.table.origin.files
        if not files:
            return (Part(self.table.origin.folder or GIVEN, "/", "", len(self)),)
        counts = np.bincount(self._files(), minlength=len(files)).tolist()
        above = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
        return tuple(
            Part(file, "/", os.path.relpath(file, above), count)
            for file, count in zip(files, counts, strict=True)
            if count
        )

    def places(self) -> Places:
        """File of the table and row there of each sample: they stay the same under other filters."""
        origin, which = self.table.origin, self._files()
        rows = self._numbers() - origin.starts[which]
        # A file of which nothing is left is no part.
        return Places(self.parts(), np.unique(which, return_inverse=True)[1], rows)

    def _numbers(self) -> Indices:
        """The row of each sample, over all files, before any filter."""
        kept = self.table.origin.kept
        return np.arange(len(self.table)) if kept is None else kept

    def _files(self) -> Indices:
        return np.searchsorted(self.table.origin.starts, self._numbers(), side="right") - 1


# Rows whose paths are text at the same time where all are looked at.
_BLOCK = 2**18


class Paths:
    """The files that a column names, a path for each sample. Nothing in it changes; safe to use from any thread.

    Args:
        entries: The samples.
        column: Of the paths.
        root: The folder that they lie in.
    """

    def __init__(self, entries: Rows, column: str, root: RootDirectory) -> None:
        self.entries, self.column, self.root = entries, column, root

    def of(self, samples: Indices) -> list[str]:
        """The absolute paths of samples' files, by the table alone.

        Raises:
            ManifestError: A row names no file, or one that leaves the root; names it.
        """
        texts = self.entries.table.text(self.column, samples)
        return [self._path_of(text, sample) for sample, text in zip(samples.tolist(), texts, strict=True)]

    def _path_of(self, text: str, sample: int) -> str:
        try:
            return self.root.path_of(text)
        except SourceError as error:
            raise self.entries.blamed(error, sample, text) from None

    def distinct(self) -> tuple[Indices, list[str]]:
        """A number for each sample's path, and the paths; for columns in which few paths stand often.

        Raises:
            ManifestError: As `of`.
            MissingError: A link leads out of the root.
        """
        codes, texts = self.entries.table.coded(self.column)
        present, codes = np.unique(codes, return_inverse=True)
        firsts = np.unique(codes, return_index=True)[1].tolist()
        paths = []
        for code, first in zip(present.tolist(), firsts, strict=True):
            path = self._path_of(texts[code], first)
            try:
                paths.append(self.root.checked(path))
            except SourceError as error:
                raise self.entries.blamed(error, first, path) from None
            if not os.path.exists(path):
                missing = MissingError(f"{path}: no such file; is the folder mounted, and the table right?", file=path)
                raise self.entries.blamed(missing, first, path)
        return codes, paths

    def grouped(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        """A number for each sample, by what a function makes of its path, and what that is.

        Args:
            naming: Gets a path from the root on, so that the folder may be moved; called once for each sample, block
                by block, so that no more paths are held.
        """
        numbers: dict[str, int] = {}
        codes = np.empty(len(self.entries), np.int64)
        for first in range(0, len(codes), _BLOCK):
            samples = np.arange(first, min(first + _BLOCK, len(codes)))
            found = (naming(self.root.within(path)) for path in self.of(samples))
            codes[samples] = [numbers.setdefault(name, len(numbers)) for name in found]
        return codes, list(numbers)

    def folders(self) -> Indices:
        """A number for each sample, by the folder that its file is in."""
        codes, texts = folders_of(self.entries.table.array(self.column))
        # One folder can be named in several ways.
        numbers: dict[str, int] = {}
        of_each = [numbers.setdefault(os.path.normpath(text), len(numbers)) for text in texts]
        return np.array(of_each, np.int64)[codes]
