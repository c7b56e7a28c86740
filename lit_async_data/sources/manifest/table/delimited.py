"""Reads CSV and TSV files. All cells are text; an empty cell is null."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.row_origin import (
    NoColumnError,
    RowOrigin,
    check_columns,
    check_content,
    printable_path,
    quoted,
)

# Block sizes of the parser, which also limit the size of a row; the second is used if a row exceeds the first.
_BLOCKS = (2**24, 2**28)
_BOM = "\xef\xbb\xbf"  # the byte order mark of UTF-8, each byte as a character
_UTF8 = "utf-8"
# Delimiters that messages suggest.
_DELIMITERS = (",", ";", "\t", "|")


class TextFormat(NamedTuple):
    """How CSV and TSV files are written.

    Attributes:
        delimiter: Separates cells; None: a comma in CSV, a tab in TSV.
        encoding: Encoding of the text; None: UTF-8.
    """

    delimiter: str | None = None
    encoding: str | None = None

    @classmethod
    def of(cls, delimiter: Any, encoding: Any) -> TextFormat:
        r"""Check the options of a user.

        Raises:
            ConfigError: An option is invalid; begins with its name.

        Example:
            >>> TextFormat.of(";", "latin-1")
            TextFormat(delimiter=';', encoding='iso8859-1')
            >>> TextFormat.of(";;", None)
            Traceback (most recent call last):
            lit_async_data.errors.ConfigError: delimiter: ';;' is not a single character; use one such as ; or |
        """
        delimiter = "\t" if delimiter == "\\t" else delimiter  # as written on a command line
        is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
        if delimiter is not None and (not is_one or delimiter in '"\r\n\0'):
            raise ConfigError(f"delimiter: {quoted(delimiter)} is not a single character; use one such as ; or |")
        if encoding is None:
            return cls(delimiter)
        try:
            codec = codecs.lookup(encoding)
            "a".encode(codec.name).decode(codec.name)
        except (LookupError, TypeError):
            raise ConfigError(
                f"encoding: {quoted(encoding)} is not a text encoding of Python; use one such as cp1252, latin-1, "
                "utf-16"
            ) from None
        return cls(delimiter, None if codec.name in (_UTF8, "utf-8-sig") else codec.name)

    @property
    def codec(self) -> str:
        """The encoding that is used."""
        return self.encoding or _UTF8

    @property
    def given(self) -> list[str]:
        """Names of the options that are set."""
        return [name for name, value in self._asdict().items() if value is not None]


class _Record(NamedTuple):
    """A row of the file, with bytes as characters; the header is number -1."""

    number: int
    line: int
    cells: list[str]
    raw: str


DEFAULT_FORMAT = TextFormat()


def read_delimited(path: str, delimiter: str, wanted: Sequence[str], codec: str = _UTF8) -> Any:
    """Read columns of a CSV or TSV file.

    Args:
        path: The file; ``.gz`` is decompressed.
        delimiter: Separates cells.
        wanted: Names of the columns to read.
        codec: Encoding of the file.

    Returns:
        A ``pyarrow.Table`` of text; null where a cell is empty, quoted or not.

    Raises:
        ManifestError: A column is missing or occurs twice; a row has the wrong number of cells or text in another
            encoding; a quote is not closed. Names file, row (from 0 after the header, without empty lines) and line.
    """
    origin = RowOrigin([path], np.zeros(2, np.int64))
    file = _File(path, delimiter, codec)
    header = _header(file, origin)
    try:
        check_columns(header, wanted, origin)
    except NoColumnError as error:
        raise _delimiter_error(file, header, error, origin) or error from None
    library = arrow()
    try:
        table, quotes = _parsed(file, wanted)
    except (library.ArrowInvalid, UnicodeError, EOFError, OSError) as error:
        raise _fault(file, header, wanted) or origin.error(f"cannot be read: {quoted(str(error))}") from error
    # pyarrow takes an unclosed quote for the rest of the file, without an error.
    doubtful = quotes % 2 or _ends_with_a_line(table, header[-1])
    fault = _fault(file, header, wanted) if doubtful else None
    if fault is not None:
        raise fault
    return table


def column_names(path: str, delimiter: str, codec: str = _UTF8) -> list[str]:
    """The names in the first line of a CSV or TSV file.

    Raises:
        ManifestError: The file is empty, or its first line is no text in this encoding.
    """
    return _header(_File(path, delimiter, codec), RowOrigin([path], np.zeros(2, np.int64)))


class _File(NamedTuple):
    """A file and its format."""

    path: str
    delimiter: str
    codec: str

    def opened(self) -> IO[str]:
        """Open the file as text. UTF-8 keeps its bytes as characters, which are never invalid; see `text`."""
        encoding, errors = ("latin-1", "strict") if self.codec == _UTF8 else (self.codec, "replace")
        if self.path.endswith(".gz"):
            return gzip.open(self.path, "rt", encoding=encoding, errors=errors, newline="")
        return open(self.path, encoding=encoding, errors=errors, newline="")

    def text(self, cell: str) -> str:
        """Decode a cell.

        Raises:
            UnicodeError: The cell is not in this encoding.
        """
        if self.codec == _UTF8:
            return cell.encode("latin-1").decode(_UTF8)
        if "\ufffd" in cell:
            raise UnicodeError(cell)
        return cell

    @property
    def other_encoding(self) -> str:
        """What is wrong with text in another encoding, and what to do."""
        if self.codec == _UTF8:
            return "not UTF-8; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8"
        return f"not {self.codec}, as encoding says; leave out encoding if it is UTF-8"


def _delimiter_error(file: _File, header: list[str], error: NoColumnError, origin: RowOrigin) -> ManifestError | None:
    """The error of a header that uses another delimiter; None if none seems to fit."""
    line = file.delimiter.join(header)
    if line[:4].lower() == "sep=" and len(line) <= len("sep=,") + 1:
        excel_delimiter = quoted(line[4:5])
        return origin.error(
            f"begins with a line {quoted(line[:5])}, which only Excel reads; remove it, and set "
            f"delimiter={excel_delimiter}"
        )
    for other in _DELIMITERS:
        names = [name.strip(' "') for name in line.split(other)]
        if other != file.delimiter and len(names) > 1 and (error.dataset in names or len(header) == 1):
            return origin.error(
                f"has no column {quoted(error.dataset)}; its cells seem to be separated by {quoted(other)}, not "
                f"{quoted(file.delimiter)}; set delimiter={quoted(other)}",
                column=error.dataset,
            )
    return None


def _parsed(file: _File, wanted: Sequence[str]) -> tuple[Any, int]:
    """The table, and the number of quotes in the file."""
    library, parser = arrow(), arrow("csv")
    for block in _BLOCKS:
        with library.input_stream(file.path, compression="detect") as raw:
            stream = _QuoteCounter(raw)
            try:
                table = parser.read_csv(
                    stream,
                    read_options=parser.ReadOptions(
                        block_size=block, encoding="utf8" if file.codec == _UTF8 else file.codec
                    ),
                    parse_options=parser.ParseOptions(delimiter=file.delimiter, newlines_in_values=True),
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


class _QuoteCounter(io.RawIOBase):
    """A stream that counts the quotes read from it; cheaper than reading the file twice."""

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


def _records(file: IO[str], delimiter: str) -> Iterator[_Record]:
    lines: list[str] = []

    def keep_lines() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    reader = csv.reader(keep_lines(), delimiter=delimiter)
    number, line = -1, 1
    for cells in reader:
        if cells:
            yield _Record(number, line, cells, "".join(lines))
            number += 1
        line = reader.line_num + 1
        lines.clear()


def _header(file: _File, origin: RowOrigin) -> list[str]:
    check_content(file.path, origin, codec=file.codec)
    with file.opened() as opened:
        try:
            record = next(_records(opened, file.delimiter), None)
        except (csv.Error, UnicodeError, EOFError, OSError) as error:
            raise origin.error(f"its first line cannot be parsed: {quoted(str(error))}") from error
    if record is None:
        raise origin.error("is empty; its first line must name the columns")
    cells = [record.cells[0].removeprefix(_BOM if file.codec == _UTF8 else "\ufeff"), *record.cells[1:]]
    if cells[0].startswith('"') and len(cells[0]) > 1 and cells[0].endswith('"'):
        cells[0] = cells[0][1:-1]  # after the byte order mark, the csv module took the quote as text
    try:
        return [file.text(cell) for cell in cells]
    except UnicodeError:
        raise origin.error(f"its first line is {file.other_encoding}") from None


def _fault(file: _File, header: Sequence[str], wanted: Sequence[str]) -> ManifestError | None:
    """The error of a file that pyarrow does not parse, found by parsing it in Python; None if there is none."""
    columns = {header.index(name): name for name in wanted}
    record = _Record(-2, 0, [], "")
    path = file.path
    with file.opened() as opened:
        try:
            for record in _records(opened, file.delimiter):
                message, column = _row_fault(file, record, len(header), columns)
                if message:
                    return _error(path, record, message, column)
        except csv.Error as error:
            line = record.line + record.raw.count("\n")
            after = record._replace(number=record.number + 1, line=line)
            return _error(path, after, f"{quoted(str(error))}; is a quote never closed?")
        except (UnicodeError, EOFError, OSError):
            return None
    if _is_open(record, file.delimiter):
        return _error(path, record, "a quote is never closed")
    return None


def _row_fault(file: _File, record: _Record, count: int, columns: dict[int, str]) -> tuple[str, str | None]:
    if len(record.cells) != count:
        return f"{len(record.cells)} cells, but the first line has {count}", None
    for index, name in columns.items():
        try:
            file.text(record.cells[index])
        except UnicodeError:
            return f"text that is {file.other_encoding}", name
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
    named_column = f", column {quoted(column)}" if column is not None else ""
    return ManifestError(
        f"{printable_path(path)}, {where}{named_column}: {message}", file=path, dataset=column, row=row
    )
