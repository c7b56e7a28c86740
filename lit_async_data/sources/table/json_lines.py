"""Reads JSON lines: files with one JSON object per line."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.errors import ManifestError
from lit_async_data.sources.table.arrow import arrow, is_list
from lit_async_data.sources.table.row_origin import RowOrigin, check_columns, check_content, quoted
from lit_async_data.sources.table.text import INEXACT

# Block size of the parser, which also limits the size of a line; longer ones are read one by one.
_BLOCK = 2**24
# Lines in which `key_names` looks for keys.
_NAMED_LINES = 1000
# How messages name a type of JSON.
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_json_lines(path: str, wanted: Sequence[str]) -> Any:
    """Read keys of the objects in a file of JSON lines, as a ``pyarrow.Table``: null where a line has no such key.

    Text stays text even if it looks like a date. Two types of one key, and numbers that would be rounded, are errors.
    """
    origin = RowOrigin.of_file(path)
    check_content(path, codec=None)
    try:
        table = _parsed(path, None)
        check_columns(table.column_names, wanted, origin)
        kinds = {name: table.schema.field(name).type for name in wanted}
        types = {name: _without_dates(kind) for name, kind in kinds.items()}
        table = table.select(list(wanted)) if kinds == types else _parsed(path, types)
    except (arrow().ArrowInvalid, UnicodeDecodeError, EOFError, OSError):
        return _line_by_line(path, wanted, origin)
    return _line_by_line(path, wanted, origin) if any(map(_may_be_rounded, table.columns)) else table


def key_names(path: str) -> list[str]:
    """The keys of the objects in the first lines of a file, in the order in which they first occur."""
    return list(dict.fromkeys(name for values in itertools.islice(_objects(path), _NAMED_LINES) for name in values))


def _parsed(path: str, kinds: dict[str, Any] | None) -> Any:
    library, parser, options = arrow(), arrow("json"), {}
    if kinds is not None:
        options = {"explicit_schema": library.schema(list(kinds.items())), "unexpected_field_behavior": "ignore"}
    with library.input_stream(path, compression="detect") as stream:
        return parser.read_json(
            stream,
            read_options=parser.ReadOptions(block_size=_BLOCK),
            parse_options=parser.ParseOptions(**options),
        )


def _without_dates(kind: Any) -> Any:
    """The type with text in place of dates and times, which pyarrow infers from text."""
    types, library = arrow("types"), arrow()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return library.string()
    return library.list_(_without_dates(kind.value_type)) if is_list(kind) else kind


def _may_be_rounded(column: Any) -> bool:
    """Whether a float column has values so large that the file may hold whole numbers there."""
    types, compute = arrow("types"), arrow("compute")
    if is_list(column.type):
        return _may_be_rounded(compute.list_flatten(column))
    if not types.is_floating(column.type):
        return False
    return bool(compute.any(compute.greater_equal(compute.abs(column), float(INEXACT))).as_py())


def _line_by_line(path: str, wanted: Sequence[str], origin: RowOrigin) -> Any:
    """The table of a file that pyarrow does not parse, such as one with other keys of several types; or its error."""
    values: dict[str, list[Any]] = {name: [] for name in wanted}
    firsts: dict[str, tuple[str, int]] = {}
    keys: dict[str, None] = {}
    for row, parsed in enumerate(_objects(path)):
        keys |= dict.fromkeys(parsed)
        for name, listed in values.items():
            value = parsed.get(name)
            listed.append(value)
            if value is None:
                continue
            kind, first = firsts.setdefault(name, (_KINDS[type(value)], row))
            if kind != _KINDS[type(value)]:
                message = f"{quoted(value)} is {_KINDS[type(value)]}, but row {first} has {kind}"
                raise _error(path, row, f"{message}; write all values as one type", name)
    if not keys:
        raise origin.error("is empty; it needs a JSON object in each line")
    check_columns(list(keys), wanted, origin)
    arrays, name = {}, ""
    try:
        for name, listed in values.items():
            arrays[name] = arrow().array(listed)
    except (arrow().ArrowException, ValueError, OverflowError) as error:
        message = f"cannot be read: {quoted(str(error))}; write large whole numbers as text"
        raise origin.error(message, column=name) from error
    return arrow().table(arrays)


def _objects(path: str) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        try:
            for row, line in enumerate(filter(bytes.strip, file)):
                yield _object(path, row, line)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RowOrigin.of_file(path).error(f"cannot be read: {quoted(str(error))}") from error


def _object(path: str, row: int, line: bytes) -> dict[str, Any]:
    if row == 0 and line.lstrip().startswith(b"["):
        message = "the file is a JSON array, not an object in each line; give the result of pandas.read_json"
        raise _error(path, row, message)
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _error(path, row, f"not valid JSON in UTF-8: {quoted(str(error))}") from None
    if not isinstance(values, dict):
        raise _error(path, row, f"{quoted(values)} is not a JSON object")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _error(path: str, row: int, message: str, column: str | None = None) -> ManifestError:
    return RowOrigin.of_file(path, row + 1).error(message, row=row, column=column)
