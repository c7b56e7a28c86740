"""`Rows`: the rows of a table as samples. `Paths`: the files that a column names."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, CorruptError, ManifestError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Location, Part, Places, numbered
from lit_async_data.sources.local_files import Exclude, StoredSamples, kept_samples
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.table.formats import split_folders
from lit_async_data.sources.table.row_origin import GIVEN, printable_path, quoted
from lit_async_data.sources.table.table import Table


class TableRow(Location):
    """``file`` is the table."""

    id: str | None  # None if samples have none
    path: str | None  # of the first file that the row names; None if it names none

    def __new__(cls, file: str, row: int, id: str | None = None, path: str | None = None) -> Self:  # noqa: A002
        location = super().__new__(cls, file, "/", row)
        location.id, location.path = id, path
        return location

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.file, self.row, self.id, self.path

    def __repr__(self) -> str:
        return f"TableRow(file={self.file!r}, row={self.row}, id={self.id!r}, path={self.path!r})"


def _similar_path(path: str) -> str:
    """A hint: an existing file with a similar path, and the difference; empty if unknown."""
    others = {"backslashes": path.replace("\\", "/"), "spaces around a name": re.sub(" */ *", "/", path.strip())}
    for form in ("NFC", "NFD"):
        fix = f"another Unicode form of a name: unicodedata.normalize({form!r}, path) fixes it"
        others[fix] = unicodedata.normalize(form, path)
    for difference, other in others.items():
        if os.path.lexists(other):
            return f" {quoted(other)} exists; the table has {difference}"
    return ""


class Rows:
    """The rows of a table as samples; ``id`` is the column of their ids, or None."""

    def __init__(self, table: Table, id: str | None) -> None:  # noqa: A002  # the user's word
        self.table = table
        self.id = id

    def __len__(self) -> int:
        return len(self.table)

    def ids(self, samples: Sequence[int]) -> list[str | None]:
        if self.id is None:
            return [None] * len(samples)
        return list(self.table.text(self.id, samples))

    def place(self, sample: int) -> tuple[str, int]:
        file, row = self.table.origin.place(sample)
        return self.table.origin.folder or GIVEN if file is None else file, row

    def locations(self, samples: Indices, paths: Sequence[str | None]) -> list[Location]:
        places = map(self.place, samples.tolist())
        return [
            TableRow(file, row, name, path)
            for (file, row), name, path in zip(places, self.ids(samples.tolist()), paths, strict=True)
        ]

    def where(self, sample: int) -> str:
        file, row = self.place(sample)
        (name,) = self.ids([sample])
        return f"{self.table.origin.row} {row} of {printable_path(file)}" + (
            "" if name is None else f", id {quoted(name)}"
        )

    def with_row(self, error: AsyncDataError, sample: int, path: str | None = None, hint: str = "") -> AsyncDataError:
        _, row = self.place(sample)
        kind = type(error)
        if path is not None and isinstance(error, MissingError):
            hint += _similar_path(path)
        located = kind(
            f"{self.where(sample)}: {error}{hint}",
            file=path or error.file,
            dataset=error.dataset,
            row=row,
            sample_id=sample,
        )
        located.__cause__ = error.__cause__
        return located

    def error(self, sample: int, message: str, *, column: str | None = None) -> ManifestError:
        file, row = self.place(sample)
        return ManifestError(f"{self.where(sample)}: {message}", file=file, dataset=column, row=row, sample_id=sample)

    # -- how samples belong together ---------------------------------------------------------------------------------

    def parts(self) -> tuple[Part, ...]:
        files = self.table.origin.files
        if not files:
            return (Part(self.table.origin.folder or GIVEN, "/", "", len(self)),)
        counts = np.bincount(self._file_numbers(), minlength=len(files)).tolist()
        above = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
        return tuple(
            Part(file, "/", os.path.relpath(file, above), count)
            for file, count in zip(files, counts, strict=True)
            if count
        )

    def places(self) -> Places:
        """They do not depend on filters."""
        origin, which = self.table.origin, self._file_numbers()
        rows = self._row_numbers() - origin.starts[which]
        # Files without samples are not parts.
        return Places(self.parts(), np.unique(which, return_inverse=True)[1], rows)

    def kept(self, exclude: Exclude, path_columns: Sequence[str]) -> npt.NDArray[np.bool_]:

        def paths_of(sample: int) -> list[str]:
            return [self.table.text(column, [sample])[0] for column in path_columns]

        origin, rows, first = self.table.origin, self._row_numbers(), self.table.origin.starts[:-1].tolist()
        files, counts = origin.files or [origin.folder or GIVEN], np.diff(origin.starts).tolist()
        parts = zip(files, counts, np.split(rows, np.searchsorted(rows, first[1:])), first, strict=True)
        stored = [StoredSamples(file, "/", count, own - start) for file, count, own, start in parts]
        return kept_samples(exclude, stored, origin.name, paths_of)

    def _row_numbers(self) -> Indices:
        kept = self.table.origin.kept
        return np.arange(len(self.table)) if kept is None else kept

    def _file_numbers(self) -> Indices:
        return np.searchsorted(self.table.origin.starts, self._row_numbers(), side="right") - 1


_BLOCK = 2**18  # rows whose paths are Python strings at a time


class Paths:
    def __init__(self, rows: Rows, column: str, root: RootDirectory) -> None:
        self.rows, self.column, self.root = rows, column, root

    def of(self, samples: Indices) -> list[str]:
        """Absolute; does not access the files."""
        texts = self.rows.table.text(self.column, samples)
        try:
            return list(map(self.root.path_of, texts))
        except SourceError:  # names the row
            return [self._path_of(text, sample) for sample, text in zip(samples.tolist(), texts, strict=True)]

    def named(self, samples: Indices) -> list[str]:
        """As `of`, but paths that the source refuses come as they stand in the table."""
        paths: list[str] = self.rows.table.text(self.column, samples)
        for place, text in enumerate(paths):
            with contextlib.suppress(SourceError):
                paths[place] = self.root.path_of(text)
        return paths

    def _path_of(self, text: str, sample: int) -> str:
        try:
            return self.root.path_of(text)
        except SourceError as error:
            raise self.rows.with_row(error, sample, text) from None

    def failed(self, error: AsyncDataError, sample: int, path: str) -> AsyncDataError:
        """With the row, and with a filter that leaves a damaged file out."""
        hint = ""
        if isinstance(error, CorruptError):
            name = self.rows.id or self.column
            value = self.rows.table.array(name)[sample].as_py()
            left_out = f"filters=[[{name!r}, 'not in', [{value!r}]]]"
            hint = f"; or leave it out: {left_out}; python -m lit_async_data inspect --check-all lists all such files"
        return self.rows.with_row(error, sample, path, hint)

    def distinct(self) -> tuple[Indices, list[str]]:
        """A number for each sample, and the distinct paths; for columns with few distinct paths."""
        codes, texts = self.rows.table.encoded(self.column)
        present, codes = np.unique(codes, return_inverse=True)
        firsts = np.unique(codes, return_index=True)[1].tolist()
        paths = []
        for code, first in zip(present.tolist(), firsts, strict=True):
            path = self._path_of(texts[code], first)
            try:
                paths.append(self.root.checked(path))
            except SourceError as error:
                raise self.rows.with_row(error, first, path) from None
        return codes, paths

    def grouped(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        count = len(self.rows)
        blocks = (self.of(np.arange(first, min(first + _BLOCK, count))) for first in range(0, count, _BLOCK))
        return numbered(naming(self.root.within(path)) for paths in blocks for path in paths)

    def folders(self) -> Indices:
        codes, texts = split_folders(self.rows.table.array(self.column))
        return numbered(map(os.path.normpath, texts))[0][codes]  # several texts can name the same folder
