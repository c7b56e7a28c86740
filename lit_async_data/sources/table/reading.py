"""Reads the requested columns of the rows that filters keep, from files of any format or from memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, CorruptError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.local_files import (
    files_matching,
    is_pattern,
    natural,
    opening_errors,
    raise_if_none_left,
)
from lit_async_data.sources.table import formats
from lit_async_data.sources.table.formats import (
    DEFAULT_FORMAT,
    TextFormat,
    arrow,
    as_single_array,
    booleans_of,
    is_text,
)
from lit_async_data.sources.table.row_origin import (
    NoColumnError,
    RowOrigin,
    check_columns,
    printable_path,
    quoted,
)
from lit_async_data.sources.table.text import as_numbers, check_text

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHER_FORMATS = {
    ".xlsx": "it is a spreadsheet; give pandas.read_excel({path!r}), or save it as CSV",
    ".json": "name a file of JSON lines .jsonl; for a JSON array, give pandas.read_json({path!r})",
    ".zip": "it is an archive; unpack it, and give the table inside",
    ".feather": "give pyarrow.feather.read_table({path!r})",
    ".txt": "if a character separates its cells, name it .csv and set delimiter=",
}
_OTHER_FORMATS |= dict.fromkeys((".xls", ".xlsm", ".ods"), _OTHER_FORMATS[".xlsx"])
_OTHER_FORMATS |= dict.fromkeys((".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz"), _OTHER_FORMATS[".zip"])
_OTHER_FORMATS |= dict.fromkeys((".arrow", ".ipc"), _OTHER_FORMATS[".feather"])
_OTHER_FORMATS |= dict.fromkeys((".tab", ".dat", ".psv"), _OTHER_FORMATS[".txt"])
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz")
_COMPARE = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_OPERATORS = (*_COMPARE, "in", "not in")


class Filter(NamedTuple):
    """A row without a value meets none."""

    column: str
    operator: str
    value: Any

    @property
    def values(self) -> list[Any]:
        return [self.value] if self.operator in _COMPARE else list(self.value)


def filters_of(given: Any) -> tuple[Filter, ...]:
    if given is None:
        return ()
    if not _is_list(given) or not all(_is_list(each) and len(each) == 3 for each in given):
        raise ConfigError(f"{quoted(given)} is not a list of [column, operator, value]", "filters")
    return tuple(_checked(Filter(*each)) for each in given)


def _checked(given: Filter) -> Filter:
    if not isinstance(given.column, str) or given.operator not in _OPERATORS:
        raise ConfigError(
            f"{quoted(list(given))} is not [column, operator, value]; operators are {', '.join(_OPERATORS)}", "filters"
        )
    if given.operator not in _COMPARE and (not _is_list(given.value) or not given.value):
        raise ConfigError(f"{given.operator!r} needs a list of values, not {quoted(given.value)}", "filters")
    if any(one is None or one != one or _is_list(one) or isinstance(one, dict) for one in given.values):  # noqa: PLR0124
        raise ConfigError(
            f"{quoted(given.value)} cannot be compared with; rows without a value never meet a filter", "filters"
        )
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def rows_meeting(filters: Sequence[Filter], table: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    mask = np.ones(table.num_rows, np.bool_)
    for each in filters:
        mask &= _met(each, as_single_array(table.column(each.column)), origin)
    return mask


def _met(given: Filter, array: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    library, compute, values = arrow(), arrow("compute"), given.values
    if arrow("types").is_dictionary(array.type):
        array = array.dictionary_decode()
    check_text(array, given.column, origin)
    if is_text(array.type) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        array = as_numbers(array, given.column, origin)
    unfit = ConfigError(
        f"column {quoted(given.column)} holds {array.type}, which cannot be compared by "
        f"{given.operator} {quoted(given.value)}; give a value of that type",
        "filters",
    )
    if any(isinstance(value, bool) != bool(arrow("types").is_boolean(array.type)) for value in values):
        raise unfit
    compare = getattr(compute, _COMPARE.get(given.operator, "equal"))
    try:
        mask = functools.reduce(compute.or_kleene, (compare(array, value) for value in values))
    except (library.ArrowException, TypeError, OverflowError) as error:
        raise unfit from error
    return booleans_of(compute.invert(mask) if given.operator == "not in" else mask)


def column_names(path: str, text_format: TextFormat = DEFAULT_FORMAT) -> list[str]:
    suffix = _suffix_of(path)
    with opening_errors(path):
        if suffix == ".parquet":
            with _parquet_file(path) as file:
                return list(file.schema_arrow.names)
        delimiter = _DELIMITERS.get(suffix.removesuffix(".gz"))
        if delimiter is None:
            return formats.key_names(path)
        return formats.column_names(path, text_format.delimiter or delimiter, text_format.encoding)


def is_table(path: str) -> bool:
    lower = path.lower()
    return lower.endswith(_SUFFIXES) or os.path.splitext(lower)[1] in _OTHER_FORMATS


class FolderTable(NamedTuple):
    folder: str
    table: Any


class _Read(NamedTuple):
    table: Any
    rows: int
    kept: Indices | None


def read_table(
    given: Any, wanted: Sequence[str], filters: Sequence[Filter], text_format: TextFormat = DEFAULT_FORMAT
) -> tuple[Any, RowOrigin]:
    """A ``pyarrow.Table`` with at least one row, and the origin of its rows; see `Table.of`."""
    arrow()  # raises first if pyarrow is missing
    if isinstance(given, str | os.PathLike):
        files = files_of(os.fspath(given))
        table, origin = _concatenated(files, [_from_file(file, wanted, filters, text_format) for file in files])
    else:
        _check_no_text_format(text_format, "a table in memory")
        folder, given = given if isinstance(given, FolderTable) else (None, given)
        read = _filtered_table(_from_memory(given, _all_names(wanted, filters)), wanted, filters, [])
        table, origin = read.table, RowOrigin([], np.array([0, read.rows]), read.kept, folder=folder)
    total = int(origin.starts[-1])
    if not total:
        raise origin.error("has no rows; a source needs at least one sample")
    if not table.num_rows:
        listed = ", ".join(quoted(list(each)) for each in filters)
        raise origin.error(f"the filters match none of its {total} rows: {listed}; change filters")
    return table, origin


def _all_names(wanted: Sequence[str], filters: Sequence[Filter]) -> list[str]:
    return list(dict.fromkeys([*wanted, *(each.column for each in filters)]))


def files_of(given: str) -> list[str]:
    if os.path.isdir(given):
        with opening_errors(given, "listed"):
            found = [
                os.path.join(folder, name)
                for folder, _, names in os.walk(given, onerror=raise_if_none_left)
                for name in names
                # Writers leave metadata files with these prefixes.
                if name.endswith(".parquet") and not name.startswith(("_", "."))
            ]
        missing = "has no .parquet files in it; one folder per class is read by from_folder, or data=folder in train.py"
    elif is_pattern(given):
        return files_matching(given)
    else:
        found, missing = [given] * os.path.exists(given), "no such file"
    if not found:
        raise MissingError(f"{printable_path(given)}: {missing}", file=given)
    return sorted(found, key=natural)


def _check_no_text_format(text_format: TextFormat, what: str) -> None:
    for name, value, default in zip(text_format._fields, text_format, DEFAULT_FORMAT, strict=True):
        if value != default:
            raise ConfigError(f"does not apply to {what}, only to CSV and TSV files; leave it out", name)


def _from_file(path: str, wanted: Sequence[str], filters: Sequence[Filter], text_format: TextFormat) -> _Read:
    suffix = _suffix_of(path)
    if suffix.removesuffix(".gz") not in _DELIMITERS:
        _check_no_text_format(text_format, f"{suffix} files")
    names, delimiter = _all_names(wanted, filters), _DELIMITERS.get(suffix.removesuffix(".gz"))
    with opening_errors(path):
        if suffix == ".parquet":
            table = _read_parquet(path, names)
        elif delimiter is None:
            table = formats.read_json_lines(path, names)
        else:
            table = formats.read_delimited(path, text_format.delimiter or delimiter, names, text_format.encoding)
    return _filtered_table(table, wanted, filters, [path])


def _suffix_of(path: str) -> str:
    suffix = next((each for each in _SUFFIXES if path.lower().endswith(each)), None)
    if suffix is None:
        hint = _OTHER_FORMATS.get(os.path.splitext(path.lower())[1], "").format(path=path)
        message = f"{printable_path(path)} does not end in one of {', '.join(_SUFFIXES)}"
        raise ConfigError(f"{message}; {hint}" if hint else message, "table", file=path)
    return suffix


def _filtered_table(table: Any, wanted: Sequence[str], filters: Sequence[Filter], files: list[str]) -> _Read:
    rows = table.num_rows
    if not filters:
        return _Read(table.select(list(wanted)), rows, None)
    mask = rows_meeting(filters, table, RowOrigin(files, np.array([0, rows])))
    return _Read(table.select(list(wanted)).filter(arrow().array(mask)), rows, np.flatnonzero(mask))


def _concatenated(files: list[str], read: list[_Read]) -> tuple[Any, RowOrigin]:
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
    for name in read[0].table.column_names:
        firsts: dict[Any, str] = {}  # the first file with each type
        for file, each in zip(files, read, strict=True):
            firsts.setdefault(each.table.schema.field(name).type, printable_path(file))
        firsts.pop(arrow().null(), None)
        if len(firsts) > 1:
            (kind, file), (other, another), *_ = firsts.items()
            message = f"is {kind} in {file}, but {other} in {another}; write all files with one type"
            raise origin.error(message, column=name)


def _from_memory(given: Any, names: Sequence[str]) -> Any:
    library = arrow()
    origin = RowOrigin([], np.zeros(2, np.int64))
    if isinstance(given, library.Table):
        check_columns(given.column_names, names, origin)
        return given.select(list(names))
    module = type(given).__module__.partition(".")[0]
    if module == "polars" and hasattr(given, "collect"):
        raise ConfigError("a LazyFrame has no rows yet; give frame.collect()", "table")
    try:
        if module == "pandas" and hasattr(given, "columns"):
            return _from_pandas(given, names, origin)
        if hasattr(given, "__arrow_c_stream__"):
            stream = library.RecordBatchReader.from_stream(given)
            check_columns(stream.schema.names, names, origin)
            schema = library.schema([stream.schema.field(name) for name in names])
            return library.Table.from_batches([batch.select(list(names)) for batch in stream], schema)
    except (library.ArrowException, TypeError) as error:
        raise origin.error(
            f"cannot be converted to Arrow: {quoted(str(error))}; give each column values of one type"
        ) from error
    advice = "convert it by pyarrow.table"
    if isinstance(given, list | tuple):
        advice = "give a pattern, such as 'part-*.csv', or concatenate a source for each file: ConcatSource([...])"
    raise ConfigError(
        f"{type(given).__name__} is neither a path, a DataFrame of pandas or polars, a pyarrow.Table, nor "
        f"anything with __arrow_c_stream__; {advice}",
        "table",
    )


def _from_pandas(frame: Any, names: Sequence[str], origin: RowOrigin) -> Any:
    library = arrow()
    try:
        check_columns(list(frame.columns), names, origin)
    except NoColumnError as error:
        if error.dataset not in frame.index.names:
            raise
        message = f"{error}; it is the index of the DataFrame; give frame.reset_index()"
        raise NoColumnError(message, dataset=error.dataset) from None
    frame = frame[list(names)]
    try:
        return library.Table.from_pandas(frame, preserve_index=False)
    except (library.ArrowException, TypeError):
        with_paths = [name for name in frame if any(isinstance(value, os.PathLike) for value in frame[name])]
        if not with_paths:
            raise
        texts = {name: frame[name].map(os.fspath, na_action="ignore") for name in with_paths}
        return library.Table.from_pandas(frame.assign(**texts), preserve_index=False)


def _read_parquet(path: str, names: Sequence[str]) -> Any:
    with _parquet_file(path) as file:
        check_columns(file.schema_arrow.names, names, RowOrigin.of_file(path))
        try:
            # By groups of rows: Arrow reads no list of categories in several chunks.
            read = [file.read_row_group(number, columns=names) for number in range(file.num_row_groups)]
        except (arrow().ArrowException, OSError) as error:
            raise CorruptError(
                f"{printable_path(path)}: does not decode: {quoted(str(error))}; write it again", file=path
            ) from error
        return arrow().concat_tables(read or [file.schema_arrow.empty_table().select(names)])


def _parquet_file(path: str) -> Any:
    try:
        return arrow("parquet").ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (arrow().ArrowException, OSError) as error:
        origin = RowOrigin.of_file(path)
        raise origin.error(f"is not a readable Parquet file: {quoted(str(error))}; write it again") from error
