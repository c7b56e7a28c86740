"""Reading a table: from files or from memory, the wanted columns and rows of it."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.errors import ConfigError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.descriptors import advice_on, check_listable, listing, raise_if_none_left
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.delimited import PLAIN, TextForm, read_delimited
from lit_async_data.sources.manifest.table.filters import Filter, all_met
from lit_async_data.sources.manifest.table.header import NoColumnError, check_columns
from lit_async_data.sources.manifest.table.json_lines import read_json_lines
from lit_async_data.sources.manifest.table.parquet import read_parquet
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, named, shown

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# What to do with files that are tables, but none that are read here.
_OTHERS = {
    ".xlsx": "it is a spreadsheet: give pandas.read_excel({path!r}), or save it as CSV",
    ".json": "JSON lines end in .jsonl, with an object in each line; of an array, give pandas.read_json({path!r})",
    ".zip": "it is an archive: unpack it, and give what is in it",
    ".feather": "give pyarrow.feather.read_table({path!r})",
    ".txt": "if it is a table with a character between its cells, name it .csv and say delimiter=",
}
_OTHERS |= dict.fromkeys((".xls", ".xlsm", ".ods"), _OTHERS[".xlsx"])
_OTHERS |= dict.fromkeys((".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz"), _OTHERS[".zip"])
_OTHERS |= dict.fromkeys((".arrow", ".ipc"), _OTHERS[".feather"])
_OTHERS |= dict.fromkeys((".tab", ".dat", ".psv"), _OTHERS[".txt"])
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz")


class FolderTable(NamedTuple):
    """A table that was made from what lies in a folder.

    Attributes:
        folder: Its path.
        table: A ``pyarrow.Table``.
    """

    folder: str
    table: Any


class _Read(NamedTuple):
    """Columns of one file: how many rows it has, and which of them are here; None if all."""

    table: Any
    rows: int
    kept: Indices | None


def read_table(
    given: Any, wanted: Sequence[str], filters: Sequence[Filter], form: TextForm = PLAIN
) -> tuple[Any, RowOrigin]:
    """Columns of a table, and where its rows come from.

    Args:
        given: As for `Table.of`.
        wanted: Names of columns, all different.
        filters: That rows must meet.
        form: How tables of text are written.

    Returns:
        A ``pyarrow.Table`` of at least one row.

    Raises:
        ConfigError: It is nothing of what can be read; begins with ``table:``.
        MissingError: There is no such file.
        ManifestError: See `Table.of`.
    """
    arrow()  # says what to install, before anything else is wrong
    if isinstance(given, str | os.PathLike):
        files = files_of(os.fspath(given))
        table, origin = _joined(files, [_of_file(file, wanted, filters, form) for file in files])
    else:
        _check_form(form, "a table given in memory")
        folder, given = given if isinstance(given, FolderTable) else (None, given)
        read = _met(_of_memory(given, _all_names(wanted, filters)), wanted, filters, [])
        table, origin = read.table, RowOrigin([], np.array([0, read.rows]), read.kept, folder=folder)
    total = int(origin.starts[-1])
    if not total:
        raise origin.error("has no rows")
    if not table.num_rows:
        raise origin.error(f"the filters leave none of its {total} rows")
    return table, origin


def _all_names(wanted: Sequence[str], filters: Sequence[Filter]) -> list[str]:
    return list(dict.fromkeys([*wanted, *(each.column for each in filters)]))


def files_of(given: str) -> list[str]:
    """The files of a path, pattern or folder, in the order of their paths.

    Raises:
        MissingError: There is none.
        SourceError: No descriptor is left to list a folder with.
    """
    if os.path.isdir(given):
        with listing(given):
            found = [
                os.path.join(folder, name)
                for folder, _, names in os.walk(given, onerror=raise_if_none_left)
                for name in names
                # What writers leave beside the data begins so.
                if name.endswith(".parquet") and not name.startswith(("_", "."))
            ]
        missing = "has no .parquet files in it"
    elif os.path.exists(given) or not glob.has_magic(given):
        found, missing = [given] * os.path.exists(given), "no such file"
    else:
        check_listable(given)
        found, missing = glob.glob(given, recursive=True), "no file fits this pattern"
    if not found:
        raise MissingError(f"{named(given)}: {missing}", file=given)
    return sorted(found)


def _check_form(form: TextForm, what: str) -> None:
    if form.given:
        raise ConfigError(f"{form.given[0]}: says nothing of {what}; it is of CSV and TSV files")


def _of_file(path: str, wanted: Sequence[str], filters: Sequence[Filter], form: TextForm) -> _Read:
    suffix = next((each for each in _SUFFIXES if path.lower().endswith(each)), None)
    if suffix is None:
        hint = _OTHERS.get(os.path.splitext(path.lower())[1], "").format(path=path)
        message = f"table: {named(path)} ends in none of {', '.join(_SUFFIXES)}"
        raise ConfigError(f"{message}; {hint}" if hint else message, file=path)
    if suffix.removesuffix(".gz") not in _DELIMITERS:
        _check_form(form, f"{suffix} files")
    try:
        if suffix == ".parquet":
            return _Read(*read_parquet(path, wanted, filters))
        names = _all_names(wanted, filters)
        delimiter = _DELIMITERS.get(suffix.removesuffix(".gz"))
        if delimiter is None:
            table = read_json_lines(path, names)
        else:
            table = read_delimited(path, form.delimiter or delimiter, names, form.codec)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise MissingError(f"{named(path)}: cannot be opened: {error.strerror}", file=path) from error
    except (OSError, SourceError) as error:
        advice = advice_on(error)
        if advice is None:
            raise
        raise SourceError(f"{named(path)}: cannot be opened: {advice}", file=path) from error
    return _met(table, wanted, filters, [path])


def _met(table: Any, wanted: Sequence[str], filters: Sequence[Filter], files: list[str]) -> _Read:
    rows = table.num_rows
    if not filters:
        return _Read(table.select(list(wanted)), rows, None)
    met = all_met(filters, table, RowOrigin(files, np.array([0, rows])))
    return _Read(table.select(list(wanted)).filter(arrow().array(met)), rows, np.flatnonzero(met))


def _joined(files: list[str], read: list[_Read]) -> tuple[Any, RowOrigin]:
    starts = np.cumsum([0, *(each.rows for each in read)], dtype=np.int64)
    kept = None
    if any(each.kept is not None for each in read):
        numbers = [np.arange(each.rows) if each.kept is None else each.kept for each in read]
        kept = np.concatenate([number + start for number, start in zip(numbers, starts[:-1], strict=True)])
    origin = RowOrigin(files, starts, kept)
    if len(read) == 1:
        return read[0].table, origin
    _check_types(files, read, origin)
    return arrow().concat_tables([each.table for each in read], promote_options="default"), origin


def _check_types(files: list[str], read: list[_Read], origin: RowOrigin) -> None:
    """Check that each column has one type in all files, or no values at all."""
    for name in read[0].table.column_names:
        first: tuple[str, Any] | None = None
        for file, each in zip(files, read, strict=True):
            kind = each.table.schema.field(name).type
            if arrow("types").is_null(kind):
                continue
            if first is not None and kind != first[1]:
                message = f"is {first[1]} in {named(first[0])}, but {kind} in {named(file)}; write all files alike"
                raise origin.error(message, column=name)
            first = first or (file, kind)


def _are_paths(given: object) -> bool:
    listed = list(given) if isinstance(given, list | tuple) else []
    return bool(listed) and all(isinstance(each, str | os.PathLike) for each in listed)


def _of_memory(given: Any, names: Sequence[str]) -> Any:
    library = arrow()
    origin = RowOrigin([], np.zeros(2, np.int64))
    if _are_paths(given):
        raise ConfigError(
            f"table: {type(given).__name__} is neither a path nor a table; of several files give a pattern that fits "
            "them, such as 'part-*.csv', or join a source of each: ConcatSource([...])"
        )
    module = type(given).__module__.partition(".")[0]
    if isinstance(given, library.Table):
        check_columns(given.column_names, names, origin)
        return given.select(list(names))
    if module in ("pandas", "polars") and hasattr(given, "collect"):
        raise ConfigError("table: a LazyFrame has no rows yet; give its .collect()")
    try:
        if module in ("pandas", "polars") and hasattr(given, "columns"):
            _check_frame(given, names, origin)
            frame = given[list(names)]
            return _of_pandas(frame) if module == "pandas" else library.table(_with_text(frame))
        if hasattr(given, "__arrow_c_stream__"):
            return _of_stream(library.RecordBatchReader.from_stream(given), names, origin)
    except (library.ArrowException, TypeError) as error:
        raise origin.error(
            f"is nothing that Arrow can hold: {shown(str(error))}; give each column values of one type"
        ) from error
    raise ConfigError(
        f"table: {type(given).__name__} is neither a path, a DataFrame of pandas or polars, a pyarrow.Table, nor "
        "anything with __arrow_c_stream__"
    )


def _check_frame(frame: Any, names: Sequence[str], origin: RowOrigin) -> None:
    try:
        check_columns(list(frame.columns), names, origin)
    except NoColumnError as error:
        index = getattr(frame, "index", None)
        if index is None or error.dataset not in index.names:
            raise
        message = f"{error}; it is the index of the DataFrame: give frame.reset_index()"
        raise NoColumnError(message, dataset=error.dataset) from None


def _of_pandas(frame: Any) -> Any:
    library = arrow()
    try:
        return library.Table.from_pandas(frame, preserve_index=False)
    except (library.ArrowException, TypeError):
        changed = {}
        for name in frame.columns:
            values = frame[name].tolist() if frame[name].dtype == object else []
            if any(isinstance(value, os.PathLike) for value in values):
                changed[name] = [os.fspath(value) if isinstance(value, os.PathLike) else value for value in values]
        if not changed:
            raise
        return library.Table.from_pandas(frame.assign(**changed), preserve_index=False)


def _with_text(frame: Any) -> Any:
    """A frame of polars with text in place of path objects, which it holds as Python's."""
    changed = {
        name: [os.fspath(value) if isinstance(value, os.PathLike) else value for value in frame[name].to_list()]
        for name in frame.columns
        if str(frame[name].dtype) == "Object"
    }
    return frame.with_columns(**{name: type(frame[name])(name, values) for name, values in changed.items()})


def _of_stream(stream: Any, names: Sequence[str], origin: RowOrigin) -> Any:
    check_columns(stream.schema.names, names, origin)
    schema = arrow().schema([stream.schema.field(name) for name in names])
    return arrow().Table.from_batches([batch.select(list(names)) for batch in stream], schema)
