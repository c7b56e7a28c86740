"""CSV and TSV files: cells are text, and an empty one is no value."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from lit_async_data.errors import ManifestError
from lit_async_data.sources.manifest.arrow import arrow
from lit_async_data.sources.manifest.header import check_columns
from lit_async_data.sources.manifest.origin import Origin, named, shown

# Bytes that are parsed together, and that a row may have; the second if the first do not do.
_BLOCKS = (2**24, 2**28)
_MARK = "\xef\xbb\xbf"  # of UTF-8, each byte as a character


class _Record(NamedTuple):
    """A row as it stands in the file, bytes as characters; the header is number -1."""

    number: int
    line: int
    cells: list[str]
    raw: str


def read_delimited(path: str, delimiter: str, wanted: Sequence[str]) -> Any:
    """Read columns of a CSV or TSV file.

    Args:
        path: Of the file; ``.gz`` is decompressed.
        delimiter: Between cells.
        wanted: Names of columns.

    Returns:
        A ``pyarrow.Table`` of text; null where a cell is empty, quoted or not.

    Raises:
        ManifestError: A column is missing or stands twice; a row has the wrong number of cells or is not UTF-8; a
            quote is never closed. Names file, row (from 0 after the header, empty lines do not count) and line.
    """
    origin = Origin([path], np.zeros(2, np.int64))
    header = _header(path, delimiter, origin)
    check_columns(header, wanted, origin)
    library = arrow()
    try:
        table, quotes = _parsed(path, delimiter, wanted)
    except (library.ArrowInvalid, UnicodeDecodeError, EOFError, OSError) as error:
        raise _fault(path, delimiter, header, wanted) or origin.error(f"cannot be read: {shown(str(error))}") from error
    # Quotes that nothing closes swallow the rest of the file, and pyarrow says nothing.
    doubtful = quotes % 2 or _ends_with_a_line(table, header[-1])
    fault = _fault(path, delimiter, header, wanted) if doubtful else None
    if fault is not None:
        raise fault
    return table


def _parsed(path: str, delimiter: str, wanted: Sequence[str]) -> tuple[Any, int]:
    """The table, and how many quotes the file holds."""
    library, parser = arrow(), arrow("csv")
    for block in _BLOCKS:
        with library.input_stream(path, compression="detect") as raw:
            stream = _Counting(raw)
            try:
                table = parser.read_csv(
                    stream,
                    read_options=parser.ReadOptions(block_size=block),
                    parse_options=parser.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                    convert_options=parser.ConvertOptions(
                        column_types=dict.fromkeys(wanted, library.string()),
                        include_columns=list(wanted),
                        null_values=[""],
                        strings_can_be_null=True,
                    ),
                )
            except library.ArrowInvalid as error:
                if "straddl" in str(error) and block != _BLOCKS[-1]:
                    continue
                raise
            return table, stream.quotes
    raise AssertionError


class _Counting(io.RawIOBase):
    """A stream that counts the quotes read from it, which is cheaper than reading the file twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self.quotes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(None if size < 0 else size)
        self.quotes += data.count(b'"')
        return data


def _ends_with_a_line(table: Any, last: str) -> bool:
    if not table.num_rows or last not in table.column_names:
        return False
    value = table.column(last)[-1].as_py()
    return value is not None and value.endswith(("\n", "\r"))


def _opened(path: str) -> IO[str]:
    """The file with its bytes as characters, so that no byte is an error."""
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="latin-1", newline="")
    return open(path, encoding="latin-1", newline="")


def _records(file: IO[str], delimiter: str) -> Iterator[_Record]:
    lines: list[str] = []

    def remembered() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    reader = csv.reader(remembered(), delimiter=delimiter)
    number, line = -1, 1
    for cells in reader:
        if cells:
            yield _Record(number, line, cells, "".join(lines))
            number += 1
        line = reader.line_num + 1
        lines.clear()


def _header(path: str, delimiter: str, origin: Origin) -> list[str]:
    with _opened(path) as file:
        try:
            record = next(_records(file, delimiter), None)
        except (csv.Error, EOFError, OSError) as error:
            raise origin.error(f"its first line cannot be read: {shown(str(error))}") from error
    if record is None:
        raise origin.error("is empty; its first line must name the columns")
    cells = [record.cells[0].removeprefix(_MARK), *record.cells[1:]]
    if cells[0].startswith('"') and len(cells[0]) > 1 and cells[0].endswith('"'):
        cells[0] = cells[0][1:-1]  # behind the mark a quote did not open the cell
    try:
        return [cell.encode("latin-1").decode("utf-8") for cell in cells]
    except UnicodeDecodeError:
        raise origin.error("its first line is not UTF-8; save the table as UTF-8") from None


def _fault(path: str, delimiter: str, header: Sequence[str], wanted: Sequence[str]) -> ManifestError | None:
    """What is wrong with a file that did not parse, found by going through it in Python; None where nothing is."""
    columns = {header.index(name): name for name in wanted}
    record = _Record(-2, 0, [], "")
    with _opened(path) as file:
        try:
            for record in _records(file, delimiter):
                message, column = _wrong(record, len(header), columns)
                if message:
                    return _error(path, record, message, column)
        except csv.Error as error:
            line = record.line + record.raw.count("\n")
            after = record._replace(number=record.number + 1, line=line)
            return _error(path, after, f"{shown(str(error))}; is a quote opened there and never closed?")
        except (EOFError, OSError):
            return None
    if _is_open(record, delimiter):
        return _error(path, record, "a quote is opened and never closed")
    return None


def _wrong(record: _Record, count: int, columns: dict[int, str]) -> tuple[str, str | None]:
    if len(record.cells) != count:
        return f"{len(record.cells)} cells instead of {count}, as the first line has", None
    for index, name in columns.items():
        try:
            record.cells[index].encode("latin-1").decode("utf-8")
        except UnicodeDecodeError:
            return "text that is not UTF-8; save the table as UTF-8", name
    return "", None


def _is_open(record: _Record, delimiter: str) -> bool:
    try:
        list(csv.reader(io.StringIO(record.raw, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "end of data" in str(error)
    return False


def _error(path: str, record: _Record, message: str, column: str | None = None) -> ManifestError:
    row = max(record.number, 0)
    where = f"row {row} (line {record.line})" if record.number >= 0 else f"line {record.line}"
    named_column = f", column {shown(column)}" if column is not None else ""
    return ManifestError(f"{named(path)}, {where}{named_column}: {message}", file=path, dataset=column, row=row)
