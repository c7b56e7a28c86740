"""Reads CSV and TSV files. All cells are text; an empty cell is null."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.sources.table.arrow import arrow
from lit_async_data.sources.table.row_origin import (
    NoColumnError,
    RowOrigin,
    check_columns,
    check_content,
    quoted,
)

# Block size of the parser, which also limits the size of a row.
_BLOCK = 2**24
_UTF8 = "utf-8"
# Delimiters that messages suggest.
_DELIMITERS = (",", ";", "\t", "|")
# A cell of the row that is read after the last one of the file.
_END = "\x02end"


class TextFormat(NamedTuple):
    """How CSV and TSV files are written; no delimiter is a comma in CSV, a tab in TSV."""

    delimiter: str | None = None
    encoding: str = _UTF8

    @classmethod
    def of(cls, delimiter: Any, encoding: Any) -> TextFormat:
        delimiter = "\t" if delimiter == "\\t" else delimiter  # as written on a command line
        is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
        if delimiter is not None and (not is_one or delimiter in '"\r\n\0'):
            raise ConfigError(f"{quoted(delimiter)} is not a single character; use one such as ; or |", "delimiter")
        if encoding is None:
            return cls(delimiter)
        try:
            codec = codecs.lookup(encoding)
            "a".encode(codec.name).decode(codec.name)
        except (LookupError, TypeError):
            raise ConfigError(
                f"{quoted(encoding)} is not a text encoding of Python; use one such as cp1252, latin-1, utf-16",
                "encoding",
            ) from None
        return cls(delimiter, _UTF8 if codec.name == "utf-8-sig" else codec.name)


DEFAULT_FORMAT = TextFormat()


def read_delimited(path: str, delimiter: str, wanted: Sequence[str], codec: str = _UTF8) -> Any:
    """Read columns of a CSV or TSV file as a ``pyarrow.Table`` of text, not checked to be UTF-8.

    A cell is null if it is empty, quoted or not. A row with a wrong number of cells, or an open quote, is an error;
    rows count from 0 after the header, without empty lines.
    """
    origin = RowOrigin.of_file(path)
    header = column_names(path, delimiter, codec)
    try:
        check_columns(header, wanted, origin)
    except NoColumnError as error:
        hint = "if its first line is a row, put a line of names before it, or give pandas.read_csv(…, names=[…])"
        for other in _DELIMITERS:
            if error.dataset in [name.strip(' "') for name in delimiter.join(header).split(other)]:
                hint = f"its cells seem to be separated by {quoted(other)}; set delimiter={quoted(other)}"
        raise NoColumnError(f"{error}; {hint}", file=error.file, dataset=error.dataset) from None
    library = arrow()
    last_row = delimiter.join([_END] * len(header))
    try:
        table, fault = _parsed(path, delimiter, wanted, codec, last_row)
        if fault is not None:  # only one thread counts rows
            table, fault = _parsed(path, delimiter, wanted, codec, last_row, threads=False)
    except UnicodeError:
        raise origin.error(f"is not {codec}, as encoding says; leave out encoding if it is UTF-8") from None
    except (library.ArrowInvalid, EOFError, OSError) as error:
        raise origin.error(f"cannot be read: {quoted(str(error))}; is a quote never closed?") from error
    if fault is not None:
        cells = f"{fault.actual_columns} cells, but the first line has {fault.expected_columns}"
        hint = "; is a quote never closed?" if "\n" in fault.text else ""
        raise _row_error(path, fault.number - 2, cells + hint)
    # pyarrow takes an unclosed quote for the rest of the file, without an error; then the last row is part of a cell.
    last = table.num_rows - 1
    if table.column(wanted[0])[last].as_py() != _END:
        raise _row_error(path, last, "a quote is never closed")
    return table.slice(0, last)


def _row_error(path: str, row: int, message: str) -> ManifestError:
    return RowOrigin.of_file(path, row + 1).error(message, row=row)


def _parsed(
    path: str, delimiter: str, wanted: Sequence[str], codec: str, last_row: str, *, threads: bool = True
) -> tuple[Any, Any]:
    """The table, and a row with a wrong number of cells; None if there is none."""
    library, parser = arrow(), arrow("csv")
    faults: list[Any] = []

    def skip(row: Any) -> str:
        if not faults:
            faults.append(row)
        return "skip"

    with library.input_stream(path, compression="detect") as raw:
        stream = raw if codec == _UTF8 else library.transcoding_input_stream(raw, codec, _UTF8)
        table = parser.read_csv(
            _Joined(stream, io.BytesIO(f"\n{last_row}\n".encode())),
            read_options=parser.ReadOptions(block_size=_BLOCK, use_threads=threads),
            parse_options=parser.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip),
            convert_options=parser.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(wanted, library.string()),
                include_columns=list(wanted),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    return table, faults[0] if faults else None


class _Joined(io.RawIOBase):
    """Streams, one after the other."""

    def __init__(self, *streams: Any) -> None:
        super().__init__()
        self._streams = list(streams)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while self._streams:
            if part := self._streams[0].read(size):
                return bytes(part)
            del self._streams[0]
        return b""


def column_names(path: str, delimiter: str, codec: str = _UTF8) -> list[str]:
    origin = RowOrigin.of_file(path)
    check_content(path, codec=codec)
    encoding, opener = "utf-8-sig" if codec == _UTF8 else codec, gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding=encoding, errors="replace", newline="") as file:
            names = next(filter(None, csv.reader(file, delimiter=delimiter)), None)
    except (csv.Error, EOFError, OSError, zlib.error) as error:
        raise origin.error(f"its first line cannot be parsed: {quoted(str(error))}") from error
    if names is None:
        raise origin.error("is empty; its first line must name the columns")
    if any("\ufffd" in name for name in names):
        if codec == _UTF8:
            raise origin.error(
                "its first line is not UTF-8; set encoding=cp1252 if Windows wrote it, else save the table as UTF-8"
            )
        raise origin.error(f"its first line is not {codec}, as encoding says; leave out encoding if it is UTF-8")
    names[0] = names[0].removeprefix("\ufeff")
    return names
