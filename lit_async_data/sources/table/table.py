"""`Table`: columns of a table, of the rows that filters keep; `TableReader` reads further columns of these rows."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ChangedError, ConfigError, CorruptError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources import local_files
from lit_async_data.sources.contract.source import starts
from lit_async_data.sources.local_files import local_path, opening_errors
from lit_async_data.sources.table import embedded, formats, labels
from lit_async_data.sources.table.embedded import EmbeddedFiles, holds_bytes, parquet_file
from lit_async_data.sources.table.formats import RowOrigin, TextFormat, arrow, is_text, quoted
from lit_async_data.sources.table.labels import Labels, Null

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
_NO_TABLE = "HDF5 files are read by HDF5Source, and images are a column of paths, as {{'path': [...]}}"
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz")
_COMPARE = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
_OPERATORS = (*_COMPARE, "in", "not in")


class Filter(NamedTuple):
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
        what = f"is not [column, operator, value]; operators are {', '.join(_OPERATORS)}"
        raise ConfigError(f"{quoted(list(given))} {what}", "filters")
    if given.operator not in _COMPARE and (not _is_list(given.value) or not given.value):
        raise ConfigError(f"{given.operator!r} needs a list of values, not {quoted(given.value)}", "filters")
    if any(one is None or one != one or _is_list(one) or isinstance(one, dict) for one in given.values):  # noqa: PLR0124
        what = "cannot be compared with; rows without a value never meet a filter"
        raise ConfigError(f"{quoted(given.value)} {what}", "filters")
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _met(given: Filter, array: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    library, compute, values = arrow(), arrow("compute"), given.values
    if holds_bytes(array.type):
        what = f"column {quoted(given.column)} holds {array.type}, the bytes of files; filter by another column"
        raise ConfigError(what, "filters")
    if arrow("types").is_dictionary(array.type):
        array = array.dictionary_decode()
    labels.check_text(array, given.column, origin)
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    if is_text(array.type) and numbers and origin.untyped:
        array = labels.as_numbers(array, given.column, origin)
    if is_text(array.type):
        array = compute.utf8_trim_whitespace(array)
        values = [one.strip() if isinstance(one, str) else one for one in values]
    what = f"column {quoted(given.column)} holds {array.type}, which cannot be compared by {given.operator}"
    such = f", such as {str(values[0])!r}" * (numbers and is_text(array.type))
    unfit = ConfigError(f"{what} {quoted(given.value)}; give a value of that type{such}", "filters")
    if any(isinstance(value, bool) != bool(arrow("types").is_boolean(array.type)) for value in values):
        raise unfit
    compare = getattr(compute, _COMPARE.get(given.operator, "equal"))
    try:
        if arrow("types").is_temporal(array.type):  # YAML has text for dates
            values = [library.scalar(each).cast(array.type) if isinstance(each, str) else each for each in values]
        mask = functools.reduce(compute.or_kleene, (compare(array, value) for value in values))
    except (library.ArrowException, TypeError, OverflowError) as error:
        raise unfit from error
    return formats.booleans_of(compute.invert(mask) if given.operator == "not in" else mask)


def column_names(path: str, text_format: TextFormat = formats.DEFAULT_FORMAT) -> list[str]:
    suffix, delimiter = _format_of(path)
    with opening_errors(path):
        if suffix == ".parquet":
            with parquet_file(path) as file:
                return list(file.schema_arrow.names)
        if delimiter is None:
            return formats.key_names(path)
        return formats.column_names(path, text_format.delimiter or delimiter, text_format.encoding)


def is_table(path: str) -> bool:
    lower = path.lower()
    return lower.endswith(_SUFFIXES) or os.path.splitext(lower)[1] in _OTHER_FORMATS


class FolderTable(NamedTuple):
    folder: str
    table: Any


def read_table(
    given: Any, wanted: Sequence[str], filters: Sequence[Filter], text_format: TextFormat = formats.DEFAULT_FORMAT
) -> tuple[Any, RowOrigin]:
    """A ``pyarrow.Table`` with at least one row, and the origin of its rows; see `Table.of`."""
    arrow()  # an error about pyarrow comes before errors about files
    if isinstance(given, str | os.PathLike):
        files = files_of(os.fspath(given))
        table, origin = _concatenated([_from_file(file, wanted, filters, text_format) for file in files])
    else:
        folder, given = given if isinstance(given, FolderTable) else (None, given)
        _check_no_text_format(text_format, "a table in memory" if folder is None else "a folder")
        origin = RowOrigin([], np.zeros(1, np.int64), folder=folder)
        read = _from_memory(given, _all_names(wanted, filters), origin)
        table, origin = _filtered(read, wanted, filters, origin._replace(starts=np.array([0, read.num_rows])))
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
                for folder, _, names in os.walk(given, onerror=local_files.raise_if_none_left)
                for name in names
                # Writers leave metadata files with these prefixes.
                if name.endswith(".parquet") and not name.startswith(("_", "."))
            ]
        missing = "has no .parquet files in it; one folder per class is read by from_folder, or data=folder in train.py"
    elif local_files.is_pattern(given):
        return local_files.files_matching(given)
    else:
        found, missing = [given] * os.path.exists(given), f"no such file{local_files.SEPARATORS * (chr(92) in given)}"
    if not found:
        raise MissingError(f"{formats.printable_path(given)}: {missing}", file=given)
    return sorted(found, key=local_files.natural)


def _check_no_text_format(text_format: TextFormat, what: str) -> None:
    for name, value, default in zip(text_format._fields, text_format, formats.DEFAULT_FORMAT, strict=True):
        if value != default:
            raise ConfigError(f"does not apply to {what}, only to CSV and TSV files; leave it out", name)


def _from_file(
    path: str, wanted: Sequence[str], filters: Sequence[Filter], text_format: TextFormat
) -> tuple[Any, RowOrigin]:
    suffix, delimiter = _format_of(path)
    if delimiter is None:
        _check_no_text_format(text_format, f"{suffix} files")
    names = _all_names(wanted, filters)
    with opening_errors(path):
        with open(path, "rb") as file:
            head = file.read(local_files.HEAD_BYTES)
        own = b"PAR1" if suffix == ".parquet" else b"\x1f\x8b" if suffix.endswith(".gz") else None
        if (what := local_files.mistaken(head)) and not (own and head.startswith(own)):
            raise RowOrigin.of_file(path).error(f"is {what}")
        if suffix == ".parquet":
            table = _read_parquet(path, names)
        elif delimiter is None:
            table = formats.read_json_lines(path, names)
        else:
            table = formats.read_delimited(path, text_format.delimiter or delimiter, names, text_format.encoding)
    return _filtered(table, wanted, filters, RowOrigin.of_file(path, table.num_rows))


def _format_of(path: str) -> tuple[str, str | None]:
    """The suffix, and the usual delimiter; None if the file has no text cells."""
    suffix = next((each for each in _SUFFIXES if path.lower().endswith(each)), None)
    if suffix is None:
        hint = _OTHER_FORMATS.get(os.path.splitext(path.lower())[1], _NO_TABLE)
        message = f"{formats.printable_path(path)} does not end in one of {', '.join(_SUFFIXES)}"
        raise ConfigError(f"{message}; {hint.format(path=path)}", "table", file=formats.named(path))
    return suffix, _DELIMITERS.get(suffix.removesuffix(".gz"))


def _filtered(table: Any, wanted: Sequence[str], filters: Sequence[Filter], origin: RowOrigin) -> tuple[Any, RowOrigin]:
    selected = _with_class_names(table.select(list(wanted)))
    if not filters:
        return selected, origin
    mask = np.ones(table.num_rows, np.bool_)
    for each in filters:
        mask &= _met(each, formats.as_single_array(table.column(each.column)), origin)
    return selected.filter(arrow().array(mask)), origin._replace(kept=np.flatnonzero(mask))


def _with_class_names(table: Any) -> Any:
    """Numbers of a Hugging Face ``ClassLabel`` as categories, −1 as missing; not if `trim` makes two names equal."""
    library, compute = arrow(), arrow("compute")
    for place, name in enumerate(table.column_names):
        names, column = _class_names(table.schema, name), table.column(name)
        with contextlib.suppress(ValueError, LookupError, AttributeError):  # also of names that are no text
            if names and not formats.is_list(column.type) and len({*map(labels.trim, names)}) == len(names):
                codes = compute.if_else(compute.equal(column, -1), None, column).cast(library.int32())
                texts = library.array(names, library.string())
                named = library.DictionaryArray.from_arrays(codes.combine_chunks(), texts, ordered=True)
                table = table.set_column(place, name, named)
    return table


def _class_names(schema: Any, name: str) -> tuple[str, ...]:
    """The names of a Hugging Face ``ClassLabel``, also of one in lists; empty for other columns."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # not as Hugging Face writes it
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][name]
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        return tuple(feature["names"]) if feature["_type"] == "ClassLabel" else ()
    return ()


def _concatenated(read: Sequence[tuple[Any, RowOrigin]]) -> tuple[Any, RowOrigin]:
    if len(read) == 1:
        return read[0]
    tables, origins = zip(*read, strict=True)
    firsts = starts([each.starts[-1] for each in origins])
    kept = [first + each.kept for first, each in zip(firsts, origins, strict=False) if each.kept is not None]
    files, opened = [each.files[0] for each in origins], [each.opened[0] for each in origins]
    origin = RowOrigin(files, firsts, np.concatenate(kept) if kept else None, opened=opened)
    _check_types(read, origin)
    return arrow().concat_tables(tables, promote_options="default"), origin


def _check_types(read: Sequence[tuple[Any, RowOrigin]], origin: RowOrigin) -> None:
    for name in read[0][0].column_names:
        found: dict[Any, str] = {}  # the first file with each type
        for table, own in read:
            found.setdefault(table.schema.field(name).type, own.name)
        found.pop(arrow().null(), None)
        if len(found) > 1:
            (kind, file), (other, another), *_ = found.items()
            message = f"is {kind} in {file}, but {other} in {another}; write all files with one type"
            raise origin.error(message, column=name)
        # Of numbers; categories bring their names.
        numbers = not any(map(arrow("types").is_dictionary, found))
        if numbers and len({_class_names(table.schema, name) for table, _ in read}) > 1:
            message = "has ClassLabels whose names differ between the files; write all files with one order"
            raise origin.error(message, column=name)


def _from_memory(given: Any, names: Sequence[str], origin: RowOrigin) -> Any:
    library, module = arrow(), type(given).__module__.partition(".")[0]
    if module == "polars" and hasattr(given, "collect"):
        raise ConfigError("a LazyFrame has no rows yet; give frame.collect()", "table")
    try:
        given = library.table(dict(given)) if isinstance(given, Mapping) else given
        if module == "pandas" and hasattr(given, "columns"):
            return _from_pandas(given, names, origin)
        if hasattr(given, "__arrow_c_stream__"):
            stream = library.RecordBatchReader.from_stream(given)
            formats.check_columns(stream.schema.names, names, origin)
            schema = library.schema([stream.schema.field(name) for name in names], stream.schema.metadata)
            return library.Table.from_batches([batch.select(list(names)) for batch in stream], schema)
    except UnicodeEncodeError:
        rows = {name: formats.surrogate_row(given[name]) for name in names}
        name = next((name for name in names if rows[name] is not None), names[0])
        what = "text that is not UTF-8; read it with the encoding that it has"
        raise origin.error(what, row=rows[name], column=name) from None
    except (library.ArrowException, TypeError) as error:
        what = f"cannot be converted to Arrow: {quoted(str(error))}; give each column values of one type"
        raise origin.error(what) from error
    advice = "convert it by pyarrow.table"
    if isinstance(given, list | tuple):
        advice = "give a pattern, such as 'part-*.csv', or concatenate a source for each file: ConcatSource([...]); "
        advice += "images are a column: {'path': [...]}"
    what = "is neither a path, a dict of columns, a DataFrame, a pyarrow.Table, nor anything with __arrow_c_stream__"
    raise ConfigError(f"{type(given).__name__} {what}; {advice}", "table")


def _from_pandas(frame: Any, names: Sequence[str], origin: RowOrigin) -> Any:
    library = arrow()
    formats.check_columns(list(frame.columns), names, origin)
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
    with parquet_file(path) as file:
        formats.check_columns(file.schema_arrow.names, names, RowOrigin.of_file(path))
        kinds = {name: file.schema_arrow.field(name).type for name in names}
        plain = [name for name, kind in kinds.items() if not holds_bytes(kind)]
        try:
            # By groups of rows: Arrow reads no list of categories in several chunks.
            read = [file.read_row_group(number, columns=plain) for number in range(file.num_row_groups)]
        except (arrow().ArrowException, OSError) as error:
            what = f"{formats.printable_path(path)}: does not decode: {quoted(str(error))}; write it again"
            raise CorruptError(what, file=formats.named(path)) from error
        table = arrow().concat_tables(read or [file.schema_arrow.empty_table().select(plain)])
        # `Table.of` replaces these nulls by `EmbeddedFiles`.
        nulls = functools.partial(arrow().nulls, file.metadata.num_rows)
        columns = [table.column(n) if n in plain else nulls(embedded.storage_type(kind)) for n, kind in kinds.items()]
        return arrow().table(columns, names=list(kinds), metadata=file.schema_arrow.metadata)


# -- columns in memory -------------------------------------------------------------------------------------------------


class Table:
    """Columns, each an array as `as_single_array` returns it, or `EmbeddedFiles`. Immutable, thread-safe, picklable."""

    def __init__(self, columns: Mapping[str, Any], origin: RowOrigin) -> None:
        self._columns = dict(columns)
        self.origin = origin

    @classmethod
    def of(
        cls, given: Any, columns: Sequence[str], filters: Any = None, text_format: TextFormat = formats.DEFAULT_FORMAT
    ) -> Table:
        """Read columns of a table; the arguments are as for `ManifestSource`.

        Files are read in natural order of their paths. All columns of CSV and TSV are text; an empty cell is null. A
        filter leaves out rows without a value, and reads cells of CSV and TSV as numbers to compare them with a number.
        """
        names = list(dict.fromkeys(columns))
        remaining: Any
        remaining, origin = read_table(given, names, filters_of(filters), text_format)
        arrays = {}
        for name in names:
            column = remaining.column(name)
            # Drop the chunks of this column, so that memory does not hold it twice.
            remaining = remaining.drop_columns(name) if remaining.num_columns > 1 else None
            if len(orders := formats.orders_of(column)) > 1:
                origin = origin._replace(orders={**origin.orders, name: " and ".join(map(quoted, orders))})
            if holds_bytes(column.type):
                arrays[name] = embedded.files_in(column, name, origin)
                continue
            arrays[name] = formats.as_single_array(column)
            del column
            labels.check_text(arrays[name], name, origin)
        return cls(arrays, origin)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def text(self, name: str, rows: Sequence[int] | Indices) -> list[str]:
        """The text of rows, in any order; whole numbers as digits. The column has no nulls."""
        taken = self._text_column(name).take(formats.arrow_integers(np.asarray(rows, np.int64)))
        texts = taken.dictionary_decode() if formats.is_categorical(taken.type) else taken
        return list(map(str, texts.to_pylist()))

    def labels(
        self,
        name: str | Sequence[str],
        *,
        classes: Sequence[str] | None = None,
        null: Null = "error",
        kind: str | None = None,
        separator: str | None = None,
        max_length: int | None = None,
    ) -> Labels:
        """One value per row; the other arguments are as for `Column`.

        Whole numbers become int64; floats and bools keep their type; text becomes the number of its class. Lists of
        numbers become vectors, padded to ``max_length``; lists of text become 1 for each class in the list, else 0.
        Several columns of numbers become the columns of one array.
        """
        if kind == "text" and isinstance(name, str):
            texts = labels.parsed_text(self.array(name), name, self.origin, separator, kind=None)
            return labels.texts_of(texts, name, self.origin, null, max_length)
        several, columns, lists = not isinstance(name, str), list[tuple[str, Any]](), False
        for each in [name] if isinstance(name, str) else name:
            array = self.array(each)
            if kind == "class" or classes is not None:
                array = labels.digits_of(array)  # whole numbers can be names of classes
            array = labels.parsed_text(array, each, self.origin, separator, kind=kind)
            text = labels.holds_text(array.type)
            if kind == "class" and not text:
                what = f"column {quoted(each)} holds {array.type}, neither text nor whole numbers"
                raise ConfigError(f"{what}; leave out kind to use its numbers as labels", "kind")
            if text and kind is None and classes is None and not several:
                labels.check_notation(array, each, self.origin)
            lists = formats.is_text_list(array.type)
            columns.append((each, labels.column_of(array, each, self.origin, classes, null, most=max_length)))
        if several:
            return labels.side_by_side(columns, self.origin, null)
        return labels.with_null(columns[0][1], null, self.origin, columns[0][0], lists=lists)

    def first(self, name: str, separator: str | None = None) -> Any:
        """The first value in a column, also inside a list or a cell with a separator; None if there is none."""
        array = self.array(name)
        if isinstance(array, EmbeddedFiles):
            filled = np.flatnonzero(array.counts() > 0)
            return array.file(int(filled[0]))[0] if filled.size else None
        if formats.is_list(array.type):
            array = array.flatten()
        row = formats.first_true_row(array.is_valid())
        if row < 0:
            return None
        value = array[row].as_py()
        return value.split(separator)[0] if separator is not None and isinstance(value, str) else value

    def encoded(self, name: str) -> tuple[Indices, list[str]]:
        """A number for each row of a column of text or whole numbers, and the distinct values."""
        array, missing = self._text_column(name), self.missing(name)
        if missing.size:
            raise self.origin.error("no value; give one, or leave the row out", row=int(missing[0]), column=name)
        encoded = array if formats.is_categorical(array.type) else array.dictionary_encode()
        return formats.values_of(encoded.indices).astype(np.int64), list(map(str, encoded.dictionary.to_pylist()))

    def array(self, name: str) -> Any:
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def with_columns_of(self, other: Table) -> Table:
        if len(other) != len(self):
            what = f"had {len(self)} rows, and now has {len(other)}; build the source again"
            raise ChangedError(f"{self.origin.name}: {what}")
        return Table(self._columns | other._columns, self.origin)

    def taken(self, rows: Indices) -> Table:
        numbers, origin = formats.arrow_integers(rows), self.origin
        kept = rows if origin.kept is None else origin.kept[rows]
        ids = None if origin.ids is None else origin.ids.take(numbers)
        columns = {name: array.take(numbers) for name, array in self._columns.items()}
        return Table(columns, origin._replace(kept=kept, ids=ids))

    def missing(self, name: str, separator: str | None = None, classes: Sequence[str] | None = None) -> Indices:
        """The rows without a value; text of blanks is none, unless a class is blank."""
        array = self.array(name)
        if separator is not None and self.is_text(name):
            array = labels.parsed_text(array, name, self.origin, separator, kind=None)
        missing = formats.booleans_of(array.is_null())
        if self.is_text(name) and not formats.is_list(array.type) and all(map(str.strip, classes or ())):
            texts = array.dictionary_decode() if formats.is_categorical(array.type) else array
            lengths = arrow("compute").binary_length(arrow("compute").utf8_trim_whitespace(texts))
            missing = missing | (formats.values_of(lengths) == 0)
        return np.flatnonzero(missing)

    def is_text(self, name: str) -> bool:
        kind = self.array(name).type
        return is_text(kind) or formats.is_categorical(kind)

    def with_ids(self, name: str) -> Table:
        """With a column as the ids of the rows, which must be unique."""
        array = self._text_column(name)
        if len(missing := self.missing(name)):
            what = f"no id, as in {len(missing)} rows in all; give each row one"
            raise self.origin.error(what, row=int(missing[0]), column=name)
        texts = array.dictionary_decode() if formats.is_categorical(array.type) else array
        values, counts = arrow("compute").value_counts(texts).flatten()
        repeated = np.flatnonzero(formats.values_of(counts) > 1)
        if repeated.size:
            value = values[int(repeated[0])].as_py()
            first, again = np.flatnonzero(formats.booleans_of(arrow("compute").equal(texts, value)))[:2].tolist()
            where = f"{quoted(value)} in {self.origin.where(again)} and {self.origin.where(first)}"
            message = f"{repeated.size} ids occur more than once, as {where}; give each row another id"
            raise self.origin.error(message, row=again, column=name)
        return Table(self._columns, self.origin._replace(ids=array))

    def _text_column(self, name: str) -> Any:
        array = self.array(name)
        if not (is_text(array.type) or formats.is_categorical(array.type) or arrow("types").is_integer(array.type)):
            raise self.origin.error(f"holds {array.type}; give text or whole numbers", column=name)
        return array


class TableReader:
    """Reads columns of the selected rows of a table, at any time; the arguments are as for `Table.of`."""

    def __init__(self, given: Any, filters: Any, text_format: TextFormat = formats.DEFAULT_FORMAT) -> None:
        if isinstance(given, str | os.PathLike):
            # Absolute, because the working directory may change.
            given = local_path(given)
        elif hasattr(given, "read_all"):
            given = arrow().table(given)  # a stream, which can be read only once
        self._given, self._filters, self._text_format = given, filters, text_format
        self._is_detached = False
        self._selected: Indices | None = None
        self._states: dict[str, tuple[int, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without a table in memory, since `Fields` holds the columns in use.
        return vars(self) if isinstance(self._given, str) else {**vars(self), "_given": None, "_is_detached": True}

    def columns(self, names: Sequence[str]) -> Table:
        if self._is_detached:
            what = "was not read before pickling, and the table is in another process; make it a field, or give a file"
            raise MissingError(f"column {names[0]!r}: {what}")
        before = self._states or self._file_states()
        table = Table.of(self._given, names, self._filters, self._text_format)
        after = self._file_states()
        for file in {**before, **after}:
            if before.get(file) != after.get(file):
                raise local_files.changed_error(file)
        self._states = after
        return table if self._selected is None else table.taken(self._selected)

    def unfiltered(self, name: str) -> set[str]:
        """The texts of a column in all rows, also in those that the filters leave out."""
        array = Table.of(self._given, [name], None, self._text_format).array(name)
        return set(map(str, array.unique().drop_null().to_pylist()))

    def _file_states(self) -> dict[str, tuple[int, ...]]:
        files = files_of(self._given) if isinstance(self._given, str) else []
        return {file: local_files.file_state(file) for file in files}

    def select(self, rows: Indices) -> None:
        self._selected = rows if self._selected is None else self._selected[rows]
