"""Reads JSON lines: files with one JSON object per line."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ManifestError
from lit_async_data.sources.manifest.table.arrow import arrow, is_list
from lit_async_data.sources.manifest.table.numeric import INEXACT
from lit_async_data.sources.manifest.table.row_origin import (
    RowOrigin,
    check_columns,
    check_content,
    printable_path,
    quoted,
)

# Block sizes of the parser, which also limit the size of a line; the second is used if a line exceeds the first.
_BLOCKS = (2**24, 2**28)
# Lines in which `key_names` looks for keys.
_NAMED_LINES = 1000


def read_json_lines(path: str, wanted: Sequence[str]) -> Any:
    """Read keys of the objects in a file of JSON lines.

    Types come from the first lines. If later lines do not fit, the file is read again to find types that fit all lines.
    If a key that is not requested has values of several types, Python removes it and the rest is parsed again.

    Args:
        path: The file; ``.gz`` is decompressed.
        wanted: Keys to read. A key that is missing in a line is null there.

    Returns:
        A ``pyarrow.Table``; text stays text even if it looks like a date.

    Raises:
        ManifestError: A line is not a JSON object, a key has values of two types, or whole numbers would be rounded.
            Names file, row and line.
    """
    origin = RowOrigin([path], np.zeros(2, np.int64))
    library = arrow()
    check_content(path, origin, codec=None)

    def opened() -> Any:
        return library.input_stream(path, compression="detect")

    try:
        table = _with_types_of_first_lines(opened, wanted)
        if table is None:
            table = _with_types_of_all_lines(opened, wanted, origin)
    except (library.ArrowInvalid, UnicodeDecodeError, EOFError, OSError) as error:
        if isinstance(error, library.ArrowInvalid) and "Empty JSON" in str(error):
            raise origin.error("is empty; it needs a JSON object in each line") from None
        fault = _fault(path, wanted)
        if fault is not None:
            raise fault from error
        table = _from_requested_keys(path, wanted, origin, error)
    if any(_may_be_rounded(table.column(name)) for name in wanted) and (fault := _rounded(path, table, wanted)):
        raise fault
    return table


def key_names(path: str) -> list[str]:
    """The keys of the objects in the first lines of a file, in the order in which they first occur.

    Raises:
        ManifestError: A line is not a JSON object.
    """
    names: dict[str, None] = {}
    try:
        for row, line, content in itertools.islice(_objects(path), _NAMED_LINES):
            values = json.loads(content)
            if not isinstance(values, dict):
                raise _error(path, row, line, f"is {_kind(values)}, not an object")
            names |= dict.fromkeys(values)
    except (ValueError, EOFError, OSError) as error:
        fault = _fault(path, [])
        raise fault or RowOrigin([path], np.zeros(2, np.int64)).error(
            f"cannot be read: {quoted(str(error))}"
        ) from error
    return list(names)


def _with_types_of_first_lines(opened: Callable[[], Any], wanted: Sequence[str]) -> Any:
    """The table, if the first lines determine its types; else None."""
    library, parser = arrow(), arrow("json")
    try:
        with opened() as stream:
            head = stream.read(_BLOCKS[0])
        first_lines = library.py_buffer(head[: head.rfind(b"\n") + 1] or head)
        schema = parser.read_json(first_lines, read_options=parser.ReadOptions(block_size=_BLOCKS[0])).schema
        kinds = {name: _without_dates(schema.field(name).type) for name in wanted if name in schema.names}
        if len(kinds) < len(wanted) or any(map(_is_unknown, kinds.values())):
            return None
        return _parsed(opened, kinds)
    except (library.ArrowInvalid, UnicodeDecodeError):
        return None


def _with_types_of_all_lines(opened: Callable[[], Any], wanted: Sequence[str], origin: RowOrigin) -> Any:
    table = _parsed(opened, None)
    check_columns(table.column_names, wanted, origin)
    kinds = {name: table.schema.field(name).type for name in wanted}
    types = {name: _without_dates(kind) for name, kind in kinds.items()}
    return table.select(list(wanted)) if kinds == types else _parsed(opened, types)


def _from_requested_keys(path: str, wanted: Sequence[str], origin: RowOrigin, cause: Exception) -> Any:
    """The table, parsed from lines without other keys: another key may have values of several types."""
    kept = io.BytesIO()
    try:
        for _, _, content in _objects(path):
            values = json.loads(content)
            kept.write(json.dumps({name: values[name] for name in wanted if name in values}).encode() + b"\n")
        lines = kept.getbuffer()
        return _with_types_of_all_lines(lambda: arrow().BufferReader(lines), wanted, origin)
    except (arrow().ArrowInvalid, EOFError, OSError, ValueError):
        raise origin.error(f"cannot be read: {quoted(str(cause))}") from cause


def _parsed(opened: Callable[[], Any], kinds: dict[str, Any] | None) -> Any:
    library, parser = arrow(), arrow("json")
    options = {}
    if kinds is not None:
        options = {"explicit_schema": library.schema(list(kinds.items())), "unexpected_field_behavior": "ignore"}
    for block in _BLOCKS:
        with opened() as stream:
            try:
                return parser.read_json(
                    stream,
                    read_options=parser.ReadOptions(block_size=block),
                    parse_options=parser.ParseOptions(**options),
                )
            except library.ArrowInvalid as error:
                if "straddl" not in str(error) or block == _BLOCKS[-1]:
                    raise
    raise AssertionError


def _without_dates(kind: Any) -> Any:
    """The type with text in place of dates and times, which pyarrow infers from text."""
    types, library = arrow("types"), arrow()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return library.string()
    return library.list_(_without_dates(kind.value_type)) if is_list(kind) else kind


def _is_unknown(kind: Any) -> bool:
    return bool(arrow("types").is_null(kind)) or (is_list(kind) and _is_unknown(kind.value_type))


def _may_be_rounded(column: Any) -> bool:
    """Whether a float column has values so large that the file may hold whole numbers there."""
    types, compute = arrow("types"), arrow("compute")
    if is_list(column.type):
        return _may_be_rounded(compute.list_flatten(column))
    if not types.is_floating(column.type):
        return False
    return bool(compute.any(compute.greater_equal(compute.abs(column), float(INEXACT))).as_py())


def _objects(path: str) -> Iterator[tuple[int, int, bytes]]:
    """Row, line and bytes of each line that is not empty."""
    row = 0
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        for line, content in enumerate(file, 1):
            if content.strip():
                yield row, line, content
                row += 1


def _rounded(path: str, table: Any, wanted: Sequence[str]) -> ManifestError | None:
    names = [name for name in wanted if _may_be_rounded(table.column(name))]
    for row, line, content in _objects(path):
        values = json.loads(content)
        for name in names:
            for value in _flat(values.get(name)):
                if isinstance(value, int) and abs(value) >= INEXACT and int(float(value)) != value:
                    message = f"{quoted(value)} does not fit into int64, or would be rounded in a column with fractions"
                    return _error(path, row, line, f"{message}; write it as text", name)
    return None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _fault(path: str, wanted: Sequence[str]) -> ManifestError | None:
    """The error of a file that pyarrow does not parse, found by parsing it in Python; None if there is none."""
    kinds: dict[str, tuple[str, int]] = {}
    try:
        for row, line, content in _objects(path):
            if row == 0 and content.lstrip().startswith(b"["):
                message = "the file is a JSON array, not an object in each line; give the result of pandas.read_json"
                return _error(path, row, line, message)
            try:
                values = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
                json.dumps(values, ensure_ascii=False).encode("utf-8")
            except (ValueError, RecursionError) as error:
                return _error(path, row, line, f"not valid JSON in UTF-8: {quoted(str(error))}")
            if not isinstance(values, dict):
                return _error(path, row, line, f"{quoted(values)} is not a JSON object")
            for name in wanted:
                value = values.get(name)
                kind, first = kinds.setdefault(name, (_kind(value), row)) if value is not None else ("", 0)
                if value is not None and kind != _kind(value):
                    message = (
                        f"{quoted(value)} is {_kind(value)}, but row {first} has {kind}; write all values as one type"
                    )
                    return _error(path, row, line, message, name)
    except (EOFError, OSError):
        return None
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"


def _error(path: str, row: int, line: int, message: str, column: str | None = None) -> ManifestError:
    named_column = f", column {quoted(column)}" if column is not None else ""
    return ManifestError(
        f"{printable_path(path)}, row {row} (line {line}){named_column}: {message}", file=path, dataset=column, row=row
    )
