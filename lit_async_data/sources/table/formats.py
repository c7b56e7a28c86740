"""Formats of tables: Parquet and Arrow, delimited text, JSON lines; `RowOrigin`, and the errors that name rows."""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import gzip
import importlib
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, ManifestError, MissingError, redact
from lit_async_data.order.permutation import Indices
from lit_async_data.system import OURS

GIVEN = "the table given"  # name of a table in memory
_MAX_QUOTED = 200  # most characters of a value in a message
_LISTED = 20  # most columns that a message lists
_MAX_INT32_TEXT = 2**31 - 1  # bytes that int32 offsets can address
_COPY = re.compile(rf".*/{OURS}-[^/]*/([^/:]+):/")  # below its temporary folder, a copy has its address as path


def quoted(value: object) -> str:
    """A value for a message: printable ASCII on one line, at most 200 characters, without secrets of addresses."""
    text = redact(ascii(value))
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"


def named(path: str) -> str:
    """The address of a remote table whose copy this is; the path of another file."""
    return _COPY.sub(r"\1://", path)


def printable_path(path: str) -> str:
    path = named(path)
    return path if path.isprintable() else quoted(path)


class RowOrigin(NamedTuple):
    files: Sequence[str]  # paths, or addresses; empty for a table in memory
    starts: Indices  # the first row of each file, counted over all files, and the total at the end; int64
    kept: Indices | None = None  # the rows of the files that the table has; int64, ascending. None: all
    ids: Any = None  # the id of each row of the table, an Arrow array; None if rows have no ids
    folder: str | None = None  # the folder that was listed as a table, whose rows are files; None for a table
    opened: Sequence[str] = ()  # the files, or the copies of remote ones
    orders: Mapping[str, str] = {}  # by column, the contradictory orders of its categories, in words

    @classmethod
    def of_file(cls, path: str, rows: int = 0) -> RowOrigin:
        return cls([named(path)], np.array([0, rows]), opened=[path])

    @property
    def untyped(self) -> bool:
        """Whether the files are CSV or TSV, which store no types."""
        return any(re.search(r"\.[ct]sv(\.gz)?$", file.lower()) for file in self.files)

    @property
    def name(self) -> str:
        first, *others = self.paths
        return printable_path(first) + (f" and {len(others)} more" if others else "")

    @property
    def row(self) -> str:
        return "row" if self.folder is None else "file"

    @property
    def paths(self) -> Sequence[str]:
        """The files; for a table in memory, its folder or `GIVEN`."""
        return self.files or [self.folder or GIVEN]

    def place(self, row: int) -> tuple[str, int]:
        """One of `paths`, and the row in it."""
        number = row if self.kept is None else int(self.kept[row])
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.paths[file], number - int(self.starts[file])

    def where(self, row: int) -> str:
        file, number = self.place(row)
        text = f"{self.row} {number}"
        return f"{text} of {printable_path(file)}" if len(self.files) > 1 else text

    def error(self, message: str, *, row: int | None = None, column: str | None = None) -> ManifestError:
        place, file, number = [self.name], self.paths[0] if len(self.paths) == 1 else None, None
        if row is not None:
            file, number = self.place(row)
            place = [printable_path(file), f"{self.row} {number}"]
            if self.ids is not None:
                place.append(f"id {quoted(str(self.ids[row].as_py()))}")
        if column is not None:
            place.append(f"column {quoted(column)}")
        file = file if self.files else self.folder
        return ManifestError(message, place=", ".join(place), file=file, dataset=column, row=number)


class NoColumnError(ManifestError, MissingError):
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


# -- columns and files -------------------------------------------------------------------------------------------------


def arrow(module: str = "") -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        how = "install it by pip install pyarrow, or as part of 'lit_async_data[manifest]'"
        raise ConfigError(f"pyarrow is missing ({error}); {how}", "table") from error


def is_text(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_categorical(kind: Any) -> bool:
    return bool(arrow("types").is_dictionary(kind)) and is_text(kind.value_type)


def is_list(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(value: Any) -> bool:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_single_array(column: Any) -> Any:
    """Text, categorical text, lists or plain values; decimals as int64 if all are whole and fit, else as float64."""
    types, library, kind = arrow("types"), arrow(), column.type
    if isinstance(kind, library.BaseExtensionType):
        return as_single_array(library.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type))
    if types.is_decimal(kind):
        with contextlib.suppress(library.ArrowInvalid):
            if kind.scale == 0:
                return _concatenated(column.cast(library.int64()))
        # Arrow's own cast rounds twice: it makes 1.15 of two places 1.1500000000000001.
        return _concatenated(column.cast(library.string()).cast(library.float64()))
    if types.is_dictionary(kind):
        return _single_dictionary(column)
    if is_list(kind) and types.is_dictionary(kind.value_type):
        return _lists_of_categories(column)
    if is_text(kind) and (types.is_string_view(kind) or column.nbytes >= _MAX_INT32_TEXT):
        column = column.cast(library.large_string())
    if is_list(kind) and not types.is_fixed_size_list(kind):
        value = library.large_string() if is_text(kind.value_type) else kind.value_type
        if types.is_decimal(value):
            value, column = library.float64(), column.cast(library.large_list(library.string()))
        column = column.cast(library.large_list(value))
    return _concatenated(column)


def _lists_of_categories(column: Any) -> Any:
    """Lists of text; of categorical text if the categories are ordered."""
    texts = as_single_array(arrow().chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type))
    if is_categorical(texts.type) and not texts.type.ordered:
        texts = texts.dictionary_decode()
    lengths = np.concatenate([list_lengths(chunk) for chunk in column.chunks])
    return lists_of(texts, lengths, _concatenated(column.is_null()))


def _single_dictionary(column: Any) -> Any:
    """Categories of text stay categories; other dictionaries become plain values."""
    library, kind, text = arrow(), column.type.value_type, arrow().large_string()
    if not is_text(kind):
        return as_single_array(library.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], kind))
    texts = [chunk.dictionary.cast(text).take(chunk.indices) for chunk in column.chunks]
    plain = _concatenated(library.chunked_array(texts, text))
    if len(orders := orders_of(column)) != 1:
        return plain.dictionary_encode()
    order = library.array(orders[0], text)
    return library.DictionaryArray.from_arrays(arrow("compute").index_in(plain, order), order, ordered=True)


def orders_of(column: Any) -> list[list[str]]:
    """The longest order of categories in any chunk of a column, and another order that contradicts it, if any."""
    if not (is_categorical(column.type) and column.type.ordered):
        return []
    orders = [chunk.dictionary.to_pylist() for chunk in column.chunks]
    longest: list[str] = max(orders, key=len, default=[])
    return [longest, *(order for order in orders if order != [name for name in longest if name in order])][:2]


def is_ordered(kind: Any) -> bool:
    return is_ordered(kind.value_type) if is_list(kind) else is_categorical(kind) and bool(kind.ordered)


def is_text_list(kind: Any) -> bool:
    return is_list(kind) and (is_text(kind.value_type) or is_categorical(kind.value_type))


def list_lengths(array: Any) -> Indices:
    return values_of(arrow("compute").list_value_length(array)).astype(np.int64)


def lists_of(values: Any, lengths: Indices, missing: Any) -> Any:
    """Lists from their joined values and lengths; null where ``missing`` is true."""
    return arrow().LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), values, mask=missing)


def with_suffix(array: Any, suffix: str) -> Any:
    """Text, or whole numbers as digits, with ``suffix`` where it is missing."""
    compute, text = arrow("compute"), array.cast(arrow().large_string())
    ending, nothing = (arrow().scalar(each, arrow().large_string()) for each in (suffix, ""))
    ended = compute.ends_with(text, suffix, ignore_case=True)
    return compute.if_else(ended, text, compute.binary_join_element_wise(text, ending, nothing))


def _concatenated(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def values_of(array: Any, fill: float = 0) -> npt.NDArray[Any]:
    """Whole numbers or floats as a numpy array, which may share memory: do not write to it. ``fill`` replaces nulls.

    Avoids `to_numpy` and Arrow scalars: each imports pandas if installed, which takes 0.17 seconds at the first batch.
    """
    if not array.null_count:
        values: npt.NDArray[Any] = np.from_dlpack(array)
        return values
    missing = booleans_of(array.is_null())
    without_nulls = arrow().Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)
    values = np.from_dlpack(without_nulls).copy()
    values[missing] = fill
    return values


def booleans_of(array: Any) -> npt.NDArray[np.bool_]:
    """As `values_of`; nulls become False."""
    return values_of(array.cast(arrow().uint8())).view(np.bool_)


def first_true_row(array: Any) -> int:
    values = booleans_of(array)
    row = int(values.argmax()) if values.size else 0
    return row if values.size and values[row] else -1


def arrow_integers(rows: Indices) -> Any:
    """An Arrow array that shares the memory of int64 values."""
    library = arrow()
    return library.Array.from_buffers(library.int64(), len(rows), [None, library.py_buffer(np.ascontiguousarray(rows))])


def numpy_values(array: Any) -> npt.NDArray[Any]:
    """Numbers, or an object array in which rows of equal text share one object."""
    if is_text(array.type):
        array = array.dictionary_encode()
    if not is_categorical(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return numbers
    values = np.array([*array.dictionary.to_pylist(), None], object)
    codes = arrow("compute").fill_null(array.indices, len(values) - 1)
    shared: npt.NDArray[Any] = values[codes.to_numpy()]
    return shared


_BLOCK = 2**24  # bytes that the parser reads at a time; also the largest size of a row
_UTF8 = "utf-8"
_END = "\x02end"  # the cells of a row that is appended to the file


class TextFormat(NamedTuple):
    delimiter: str | None = None  # None: a comma in CSV, a tab in TSV
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
            what = f"{quoted(encoding)} is not a text encoding of Python; use one such as cp1252, latin-1, utf-16"
            raise ConfigError(what, "encoding") from None
        return cls(delimiter, _UTF8 if codec.name == "utf-8-sig" else codec.name)


DEFAULT_FORMAT = TextFormat()


def read_delimited(path: str, delimiter: str, wanted: Sequence[str], codec: str = _UTF8) -> Any:
    """Columns of text, not yet checked to be UTF-8. Empty cells are null, also quoted ones.

    Rows count from 0 after the header, without empty lines.
    """
    origin = RowOrigin.of_file(path)
    header = column_names(path, delimiter, codec)
    check_columns(header, wanted, origin)
    library = arrow()
    last_row = delimiter.join([_END] * len(header))
    try:
        table, fault = _parsed(path, delimiter, wanted, codec, last_row)
        if fault is not None:  # several threads do not count rows
            table, fault = _parsed(path, delimiter, wanted, codec, last_row, threads=False)
    except UnicodeError:
        raise origin.error(f"is not {codec}, as encoding says; leave out encoding if it is UTF-8") from None
    except (library.ArrowInvalid, EOFError, OSError) as error:
        raise origin.error(f"cannot be read: {quoted(str(error))}; is a quote never closed?") from error
    if fault is not None:
        cells = f"{fault.actual_columns} cells, but the first line has {fault.expected_columns}"
        hint = "; is a quote never closed?" if "\n" in fault.text else ""
        raise _error(path, fault.number - 2, cells + hint)
    # pyarrow reports no unclosed quote: the cell contains the rest of the file, with the appended row.
    last = table.num_rows - 1
    if table.column(wanted[0])[last].as_py() != _END:
        raise _error(path, last, "a quote is never closed")
    return table.slice(0, last)


def _parsed(
    path: str, delimiter: str, wanted: Sequence[str], codec: str, last_row: str, *, threads: bool = True
) -> tuple[Any, Any]:
    """The table, and the first row with a wrong number of cells, or None."""
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
    encoding, opener = "utf-8-sig" if codec == _UTF8 else codec, gzip.open if path.endswith(".gz") else open
    try:
        errors = "replace" if codec == _UTF8 else "strict"  # an error in UTF-8 need not be in the first line
        with opener(path, "rt", encoding=encoding, errors=errors, newline="") as file:
            names = next(filter(None, csv.reader(file, delimiter=delimiter)), None)
    except UnicodeError:
        raise origin.error(f"is not {codec}, as encoding says; leave out encoding if it is UTF-8") from None
    except (csv.Error, EOFError, OSError, zlib.error) as error:
        raise origin.error(f"its first line cannot be parsed: {quoted(str(error))}") from error
    if names is None:
        raise origin.error("is empty; its first line must name the columns")
    if codec == _UTF8 and any("\ufffd" in name for name in names):
        what = "its first line is not UTF-8; is it compressed, a spreadsheet, or in another encoding?"
        raise origin.error(f"{what} set encoding=cp1252 or utf-16, or save it as UTF-8")
    names[0] = names[0].removeprefix("\ufeff")
    return names


_NAMED_LINES = 1000  # lines in which `key_names` looks for keys
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_json_lines(path: str, wanted: Sequence[str]) -> Any:
    """Columns by key; null where a line lacks the key. Values of two types, or numbers that would round, are errors."""
    origin, columns = RowOrigin.of_file(path), dict[str, list[Any]]((name, []) for name in wanted)
    for values in _objects(path):
        for name, listed in columns.items():
            listed.append(values.get(name))
    if absent := [name for name, listed in columns.items() if not any(value is not None for value in listed)]:
        names = key_names(path)
        if not names:
            raise origin.error("is empty; it needs a JSON object in each line")
        check_columns(names, absent, origin)
    return arrow().table({name: _array(path, name, listed) for name, listed in columns.items()})


def key_names(path: str) -> list[str]:
    """The keys in the first lines, in order of appearance."""
    return list(dict.fromkeys(name for values in itertools.islice(_objects(path), _NAMED_LINES) for name in values))


def _array(path: str, name: str, listed: list[Any]) -> Any:
    kinds = [_KINDS.get(kind, "") for kind in map(type, listed)]
    if len({*kinds} - {""}) > 1:
        first = next(row for row, kind in enumerate(kinds) if kind)
        row = next(row for row, kind in enumerate(kinds) if kind not in ("", kinds[first]))
        message = f"{quoted(listed[row])} is {kinds[row]}, but row {first} has {kinds[first]}"
        raise _error(path, row, f"{message}; write all values as one type", name)
    try:
        return arrow().array(listed)
    except UnicodeEncodeError:
        raise _error(path, surrogate_row(listed) or 0, "half of a surrogate pair, which is not UTF-8", name) from None
    except (arrow().ArrowException, ValueError, OverflowError) as error:
        message = f"cannot be read: {quoted(str(error))}; write large whole numbers as text"
        raise RowOrigin.of_file(path).error(message, column=name) from error


def surrogate_row(values: Iterable[Any]) -> int | None:
    """The first row with text, also in a list, that UTF-8 cannot encode."""
    encode = json.JSONEncoder(ensure_ascii=False, default=lambda one: getattr(one, "tolist", one.__str__)()).encode
    return next((row for row, each in enumerate(values) if re.search("[\ud800-\udfff]", encode(each))), None)


def _objects(path: str) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder(object_pairs_hook=_unique_keys).decode
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        try:
            for row, line in enumerate(filter(bytes.strip, file)):
                if row == 0 and line.lstrip().startswith(b"["):
                    message = "the file is a JSON array, not an object in each line; give the result of"
                    raise _error(path, row, f"{message} pandas.read_json")
                try:
                    values = decode(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    what = f"not valid JSON in UTF-8: {quoted(str(error))}; correct it, or save the file as UTF-8"
                    raise _error(path, row, what) from None
                if not isinstance(values, dict):
                    raise _error(path, row, f"{quoted(values)} is not a JSON object")
                yield values
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RowOrigin.of_file(path).error(f"cannot be read: {quoted(str(error))}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _error(path: str, row: int, message: str, column: str | None = None) -> ManifestError:
    return RowOrigin.of_file(path, row + 1).error(message, row=row, column=column)
