"""Reads JSON lines: files with one JSON object per line."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.errors import ManifestError
from lit_async_data.sources.table.arrow import arrow
from lit_async_data.sources.table.row_origin import RowOrigin, check_columns, check_content, quoted

# Lines in which `key_names` looks for keys.
_NAMED_LINES = 1000
# How messages name a type of JSON.
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_json_lines(path: str, wanted: Sequence[str]) -> Any:
    """Read keys of the objects in a file of JSON lines, as a ``pyarrow.Table``: null where a line has no such key.

    Two types of one key, and numbers that would be rounded, are errors.
    """
    check_content(path, codec=None)
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
    """The keys of the objects in the first lines of a file, in the order in which they first occur."""
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
    except (arrow().ArrowException, ValueError, OverflowError) as error:
        message = f"cannot be read: {quoted(str(error))}; write large whole numbers as text"
        raise RowOrigin.of_file(path).error(message, column=name) from error


def _objects(path: str) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder(object_pairs_hook=_unique_keys).decode
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        try:
            for row, line in enumerate(filter(bytes.strip, file)):
                if row == 0 and line.lstrip().startswith(b"["):
                    message = "the file is a JSON array, not an object in each line; give the result of"
                    raise _error(path, row, f"{message} pandas.read_json")
                try:
                    values = decode(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise _error(path, row, f"not valid JSON in UTF-8: {quoted(str(error))}") from None
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
