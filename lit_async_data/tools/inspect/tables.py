"""The report on tables: what each column would be as a field, and the lines that read the rows."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.manifest.fields.column import Column, kind_of
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.table.arrow import arrow, is_number, is_text
from lit_async_data.sources.manifest.table.delimited import TextFormat
from lit_async_data.sources.manifest.table.reading import column_names
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.tools.inspect.guesses.columns import table_guesses
from lit_async_data.tools.inspect.hdf5_files import path_of
from lit_async_data.tools.inspect.report.report import ColumnReport, Report
from lit_async_data.tools.inspect.report.verified import first_that_works

# Of a larger file, the first lines or the first row group are inspected.
MOST_BYTES = 64 * 2**20
HEAD_LINES = 100_000
_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 24


class Peek(NamedTuple):
    """The rows that are inspected.

    Attributes:
        table: All columns.
        whole: Whether these are all rows.
        root: The folder that its paths start from.
        options: Options that the source needs to read the file.
    """

    table: Table
    names: list[str]
    whole: bool
    root: RootDirectory
    options: dict[str, Any]


def table_report(paths: Sequence[str]) -> Report:
    """Inspect tables.

    Args:
        paths: The files, one or more; the first that can be read is described, the others are compared with it.

    Raises:
        AsyncDataError: No file can be read; the error of the first.
    """
    arrow()  # raises if it is missing
    names: dict[str, list[str]] = {}
    errors: dict[str, AsyncDataError] = {}
    for path in paths:
        try:
            names[path] = column_names(path, _format(path))
        except AsyncDataError as error:
            errors[path] = error
    if not names:
        raise next(iter(errors.values()))
    first = next(iter(names))
    peek = _peek(first, names[first])
    columns = [_column(name, peek) for name in peek.names]
    notes = [] if peek.whole else [f"only the first {len(peek.table):,} rows were looked at"]
    suggestions = []
    for alternatives in table_guesses(columns, peek.table, path_of(list(names)), peek.root, peek.options):
        found = first_that_works(alternatives)
        if isinstance(found, AsyncDataError):
            notes.append(f"{alternatives[0].python().splitlines()[-1]} does not fit: {found}")
        else:
            suggestions.append(found)
    if not suggestions and not notes:
        notes.append('no column looks like what a network learns from: name yours in fields={"x": COLUMN, "y": COLUMN}')
    return Report(
        "table",
        [{"path": path, "bytes": os.path.getsize(path)} for path in names],
        columns=columns,
        rows=len(peek.table),
        differences={path: unlike for path, listed in names.items() if (unlike := _differences(names[first], listed))},
        unreadable={path: " ".join(str(error).split()) for path, error in errors.items()},
        suggestions=suggestions,
        notes=notes,
    )


def _format(path: str) -> TextFormat:
    """The delimiter, if the first line has one of another kind."""
    if not path.lower().removesuffix(".gz").endswith((".csv", ".tsv")):
        return TextFormat()
    names = column_names(path)
    found = [each for each in (",", ";", "\t", "|") if len(names) == 1 and each in names[0]]
    return TextFormat(found[0]) if found else TextFormat()


def _peek(path: str, names: list[str]) -> Peek:
    text_format, whole = _format(path), os.path.getsize(path) <= MOST_BYTES
    root = RootDirectory(os.path.dirname(os.path.abspath(path)))
    options = {} if text_format.delimiter is None else {"delimiter": text_format.delimiter}
    wanted = [name for name in names if name]
    if whole:
        return Peek(Table.of(path, wanted, text_format=text_format), wanted, True, root, options)
    if path.lower().endswith(".parquet"):
        with arrow("parquet").ParquetFile(path) as file:
            table = Table.of(file.read_row_group(0), wanted)
            return Peek(table, wanted, file.num_row_groups == 1, root, options)
    with _head(path) as head:
        return Peek(Table.of(head, wanted, text_format=text_format), wanted, False, root, options)


@contextlib.contextmanager
def _head(path: str) -> Iterator[str]:
    """A file with the first lines of another."""
    opened = gzip.open if path.endswith(".gz") else open
    with tempfile.TemporaryDirectory() as folder, opened(path, "rb") as file:
        head = os.path.join(folder, os.path.basename(path).removesuffix(".gz"))
        with open(head, "wb") as out:
            out.writelines(itertools.islice(file, HEAD_LINES))
        yield head


def _column(name: str, peek: Peek) -> ColumnReport:
    array = peek.table.array(name)
    kind, why = _kind(name, peek)
    try:
        distinct: int | None = int(arrow("compute").count_distinct(array).as_py())
    except arrow().ArrowException:  # lists have no such count
        distinct = None
    examples = dict.fromkeys(_shown(value) for value in array.slice(0, 1000).drop_null().to_pylist())
    return ColumnReport(
        name,
        "text" if is_text(array.type) else str(array.type),
        kind,
        distinct,
        int(array.null_count),
        tuple(itertools.islice(examples, _EXAMPLES)),
        why,
    )


def _kind(name: str, peek: Peek) -> tuple[str | None, str | None]:
    """What a field would take a column for, as the source decides it; and why it cannot be a field."""
    try:
        kind = kind_of("x", Column(name), peek.table, peek.root)
        if kind is not None:
            return kind, None
        peek.table.labels(name)
    except AsyncDataError as error:
        return None, str(error).removeprefix("fields.x.kind: ")
    first = peek.table.first(name)
    return ("class" if isinstance(first, str) and not is_number(first) else "number"), None


def _shown(value: object) -> str:
    """A value, shortened: a path loses its beginning, which is the same in all rows."""
    text, most = str(value), _EXAMPLE_CHARACTERS
    return text if len(text) <= most else f"…{text[1 - most :]}" if "/" in text else f"{text[: most - 1]}…"


def _differences(first: Sequence[str], other: Sequence[str]) -> list[str]:
    missing = [f"has no column {name}" for name in first if name not in other]
    return missing + [f"has also the column {name}" for name in other if name not in first]
