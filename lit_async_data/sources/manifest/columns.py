"""`Column`: the options of a field of a table. `Rows`: the rows as samples. `Paths`: the files that a column names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, ManifestError, MissingError, SourceError
from lit_async_data.options import check_names, explains_names, one_of, whole, within
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Location, Part, Places, numbered
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.images.formats import FORMATS, ImageShape
from lit_async_data.sources.local_files import HEAD_BYTES, Exclude, StoredSamples, kept_samples, mistaken
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.table import formats
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import arrow, is_list, printable_path, quoted
from lit_async_data.sources.table.labels import Null, parsed_text
from lit_async_data.sources.table.table import Table

Kind = Literal["image", "npy", "hdf5", "class", "number", "text"]
FILES: tuple[Kind, ...] = ("image", "npy", "hdf5")
Given = str | Sequence[str] | Mapping[str, Any]
_IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))
HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4")
SUFFIXES: dict[str, Kind] = {suffix: "image" for each in FORMATS for suffix in each.suffixes}
SUFFIXES |= {".npy": "npy", **dict.fromkeys(HDF5, "hdf5")}


@explains_names()
@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table that becomes a field of a batch. In YAML, a mapping of these names and those of `ImageShape`.

    Attributes:
        name: The column; or several columns of numbers, which become one vector per sample.
        kind: Content of the column. ``"image"``, ``"npy"`` and ``"hdf5"``: paths of such files. ``"class"``: text or
            whole numbers, one class per value. ``"text"``: no class, such as ids, but text as numbers;
            `BatchSpec.names` gives it back. ``"number"``: numbers, also if the table has them as text; for ordered
            categories whose names are no numbers, their positions. None: inferred from the first value: a path if it
            ends in a known suffix or is the path of a file, else a number if it can be read as one, else a class.
        dtype: Element type of labels and of rows of HDF5 files. None: as stored.
        classes: Names of the values 0, 1, 2, … of text, or of a dataset of HDF5 files, as in `Field`. None: all
            categories of an ordered categorical column; for other text, the distinct values, sorted.
        null: What to do with rows without a value: ``"error"``, ``"ignore"`` (−100, or NaN in floats), or ``"drop"``
            the sample; with several classes per sample also ``"zero"``: it has none of them. Of HDF5 files,
            ``"ignore"`` is for values that are missing in them, ``"drop"`` for rows without a path.
        separator: Separates several values in one text cell: classes, numbers of a vector, texts, or paths of files.
        suffix: Ending that the paths lack: with ``".jpg"``, 17 is the file ``17.jpg``; a path that has it stays.
        max_length: Length to which lists of files and numbers (by zeros) and of texts (by −100) are padded. A field
            ``KEY_mask`` follows: bool, shape (max_length,), False for padding. None: the length of the longest list;
            without that field if all lists are as long. Lists of numbers then must be.
        row: For HDF5 files, the column with the row in the file, counted from 0.
        dataset: For HDF5 files, the column with the name of the dataset; if there is no such column, the dataset
            itself. None: the column ``dataset``, else the dataset ``data``.
        layout: For HDF5 files, the letters of the stored axes, as for `HDF5Source`.
        image: How images become arrays of one shape.
        given: Names of the options that the user gave.

    Raises:
        ConfigError: An option is unknown or invalid; the message begins with its name.

    Example:
        >>> Column.of("species").name
        'species'
        >>> Column.of({"name": "mask", "mode": "P"}).image.resampling
        'nearest'
        >>> Column.of({"name": "age", "null": "skip"})
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: null: 'skip' is not one of error, ignore, drop, zero
    """

    name: str | tuple[str, ...]
    kind: Kind | None = None
    dtype: npt.DTypeLike | None = None
    classes: Sequence[str] | None = None
    null: Null = "error"
    separator: str | None = None
    suffix: str | None = None
    max_length: int | None = None
    row: str = "row"
    dataset: str | None = None
    layout: str | None = None
    image: ImageShape = dataclasses.field(default_factory=ImageShape)
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _names(self.name))
        if self.kind is not None:
            one_of("kind", self.kind, get_args(Kind))
        one_of("null", self.null, get_args(Null))
        if self.max_length is not None:
            object.__setattr__(self, "max_length", whole("max_length", self.max_length, 1))
        for name in ("separator", "suffix", "dataset", "layout", "row"):
            value = getattr(self, name)
            if not ((value is None and name != "row") or (isinstance(value, str) and value)):
                raise ConfigError(f"{value!r} is not text; give text, or leave it out", name)
        if f".{self.suffix}".lower() in SUFFIXES:
            raise ConfigError(f"{self.suffix!r} begins without a dot; set suffix: .{self.suffix}", "suffix")
        # `Field` checks the options that both have.
        shared = Field("column", dtype=self.dtype, classes=self.classes)
        object.__setattr__(self, "dtype", shared.dtype)
        object.__setattr__(self, "classes", shared.classes)
        if self.several and (self.classes or self.separator or self.kind not in ("number", None)):
            what = "several columns form a vector of numbers; leave out classes, separator and kind"
            raise ConfigError(f"{', '.join(self.name)}: {what}", "name")

    @classmethod
    def of(cls, given: Any, where: str = "", image: ImageShape | None = None) -> Column:
        """A column from its name, a list of names, or a mapping of options, which can override those of ``image``."""
        image = ImageShape() if image is None else image
        with within(where):
            if isinstance(given, Column):
                return given
            if isinstance(given, Field):
                raise ConfigError(f"{given.name!r} is a Field, which is for HDF5 files; give a Column", "name")
            if not isinstance(given, Mapping):
                return cls(given, image=image)
            # YAML reads null as None.
            given = {"null" if name is None else name: value for name, value in given.items()}
            options = [field.name for field in dataclasses.fields(cls) if field.name not in ("image", "given")]
            check_names(given, [*options, *_IMAGE])
            if "name" not in given:
                raise ConfigError("missing; name a column", "name")
            image_options = {name: value for name, value in given.items() if name in _IMAGE}
            rest = {name: value for name, value in given.items() if name in options}
            return cls(**rest, image=dataclasses.replace(image, **image_options), given=tuple(given))

    @property
    def several(self) -> bool:
        """Whether the field is a vector of several columns."""
        return not isinstance(self.name, str)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the field."""
        return (self.name,) if isinstance(self.name, str) else self.name


def _names(given: Any) -> str | tuple[str, ...]:
    if isinstance(given, str) and given:
        return given
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not given or not all(isinstance(name, str) and name for name in given):
        raise ConfigError(f"{given!r} is not the name of a column, nor a list of names", "name")
    if len(set(given)) < len(given):
        raise ConfigError(f"{list(given)} names a column twice", "name")
    return tuple(given)


def kind_of_path(path: str) -> Kind | None:
    return SUFFIXES.get(os.path.splitext(path.rstrip())[1].lower())


def kind_of(key: str, column: Column, table: Table, root: RootDirectory) -> Kind | None:
    """The kind as given, else inferred from the first value; None for labels of any kind."""
    first, array = table.first(column.names[0], column.separator), table.array(column.names[0])
    embedded, kind = any(isinstance(table.array(name), EmbeddedFiles) for name in column.names), column.kind
    if embedded:
        kind = _kind_of_bytes(key, column, first, table)
    elif kind is None and not column.several and column.classes is None:
        kind = _kind_of_value(first if column.suffix is None else f"{first}{column.suffix}", root)
    if kind in FILES and not embedded:
        one = array.type.value_type if is_list(array.type) and kind != "hdf5" else array.type
        numbers = arrow("types").is_integer(one)
        if not (formats.is_text(one) or formats.is_categorical(one) or (numbers and column.suffix)):
            hint = "set suffix, such as '.jpg'" if numbers else "give text; for HDF5 files, one path in each row"
            what = f"column {column.names[0]!r} holds {array.type}, not a path in each row; {hint}"
            raise ConfigError(what, f"fields.{key}.kind")
    _check_options(key, column, kind)
    if column.max_length is not None and column.separator is None and not is_list(array.type):
        raise ConfigError("each row has one value; leave it out", f"fields.{key}.max_length")
    if kind in FILES and column.null in ("ignore", "zero")[kind == "hdf5" :]:
        raise ConfigError(f"a missing file has no value for {column.null}; set null: drop", f"fields.{key}.null")
    return kind


def _kind_of_bytes(key: str, column: Column, first: Any, table: Table) -> Kind:
    if column.several or column.classes is not None or column.kind not in (None, "image", "npy"):
        what = f"column {column.names[0]!r} holds the bytes of files; give kind: image or npy, or another column"
        raise ConfigError(what, f"fields.{key}.kind")
    for name in {"suffix", "separator"}.intersection(column.given):
        raise ConfigError("does not apply to bytes of files; leave it out", f"fields.{key}.{name}")
    head = bytes(first or b"")[:HEAD_BYTES]
    if column.kind is not None:
        return column.kind
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if not head or any(each.magic.match(head) for each in FORMATS):
        return "image"
    what = mistaken(head)
    what = f"is {what}" if what else f"begins with {head[:8]!r}, which is neither an image nor .npy; leave it out"
    raise table.origin.error(f"the first file in it {what}", column=column.names[0])


def _check_options(key: str, column: Column, kind: Kind | None) -> None:
    several = ("suffix", "separator", "max_length")
    own = {"image": (*_IMAGE, *several), "npy": several, "text": ("dtype", *several[1:])}
    own["hdf5"] = ("dtype", "classes", "row", "dataset", "layout", "suffix")
    fitting = own.get(kind or "", ("dtype", "classes", "separator", "max_length"))
    for name in column.given:
        if name not in ("name", "kind", "null", *fitting):
            what = f"{kind} files" if kind in FILES else "labels"
            hints = {"dtype": "cast on the device", "suffix": "set kind: image, npy or hdf5, or leave it out"}
            if column.classes is not None and name in own["image"]:
                hints = {name: "leave out classes, which makes the column a label, or this"}
            raise ConfigError(f"does not apply to {what}; {hints.get(name, 'leave it out')}", f"fields.{key}.{name}")


def _kind_of_value(value: Any, root: RootDirectory) -> Kind | None:
    if not isinstance(value, str) or not value:
        return None
    with contextlib.suppress(ManifestError):
        return kind_of_path(value) or ("image" if os.path.isfile(root.path_of(value)) else None)
    return None


# -- the rows of a table as samples ------------------------------------------------------------------------------------


class TableRow(Location):
    """The place of a sample; ``file`` is the table."""

    id: str | None = None  # if samples have ids
    path: str | None = None  # of the first file that the row names

    def __repr__(self) -> str:
        return f"TableRow(file={self.file!r}, row={self.row}, id={self.id!r}, path={self.path!r})"


def _similar_path(path: str) -> str:
    """A hint that names an existing file with a similar path, and the fix; empty if there is none."""
    others = {path.replace("\\", "/"): "the table has backslashes: write /"}
    others[re.sub(" */ *", "/", path.strip())] = "the table has spaces around a name"
    for form in ("NFC", "NFD"):
        fix = f"the table has another Unicode form of a name: unicodedata.normalize({form!r}, path) fixes it"
        others[unicodedata.normalize(form, path)] = fix
    others |= {path.partition(each)[0]: f"the table has several paths: set separator: {each!r}" for each in ";,|"}
    stem, end = os.path.splitext(path)
    for suffix, kind in SUFFIXES.items():
        others[path + suffix] = f"set suffix: {suffix}"
        if kind == SUFFIXES.get(end.lower()):
            others[stem + suffix] = f"it ends in {suffix}: correct suffix if you set it, else the table"
    found = (each for each in others if each != path and os.path.lexists(each))
    return next((f" {quoted(each)} exists; {others[each]}" for each in found), "")


class Rows:
    """The rows of a table as samples; ``id`` is the column of sample ids, or None."""

    def __init__(self, table: Table, id: str | None) -> None:  # noqa: A002  # the user's word
        self.table = table
        self.id = id

    def __len__(self) -> int:
        return len(self.table)

    def locations(self, samples: Indices, paths: Sequence[str | None]) -> list[Location]:
        names: Sequence[str | None] = [None] * len(samples)
        if self.id is not None:
            names = self.table.text(self.id, samples)
        found = list[Location]()
        for sample, name, path in zip(samples.tolist(), names, paths, strict=True):
            file, row = self.table.origin.place(sample)
            found.append(location := TableRow(file, "/", row))
            location.id, location.path = name, path
        return found

    def with_row(
        self, error: AsyncDataError, sample: int, path: str | None = None, hint: str = "", where: str = ""
    ) -> AsyncDataError:
        file, row = self.table.origin.place(sample)
        place = f"{self.table.origin.row} {row} of {printable_path(file)}"
        if self.id is not None:
            place += f", id {quoted(self.table.text(self.id, [sample])[0])}"
        if path is not None and isinstance(error, MissingError):
            hint += _similar_path(path)
        at: dict[str, Any] = {"file": path or error.file, "dataset": error.dataset, "row": row, "sample_id": sample}
        located = type(error)(f"{where}{error}{hint}", place=place, **at)
        located.span = error.span
        return located

    # -- how samples belong together ---------------------------------------------------------------------------------

    def parts(self) -> tuple[Part, ...]:
        files = self.table.origin.files
        if not files:
            return (Part(self.table.origin.paths[0], "/", "", len(self)),)
        counts = np.bincount(self._file_numbers(), minlength=len(files)).tolist()
        above = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
        pairs = zip(files, counts, strict=True)
        return tuple(Part(file, "/", os.path.relpath(file, above), count) for file, count in pairs if count)

    def places(self) -> Places:
        """Part and row of each sample, independent of filters."""
        origin, which = self.table.origin, self._file_numbers()
        rows = self._row_numbers() - origin.starts[which]
        # Files without samples are not parts.
        return Places(self.parts(), np.unique(which, return_inverse=True)[1], rows)

    def kept(self, exclude: Exclude, paths: Sequence[Paths]) -> npt.NDArray[np.bool_]:
        def paths_of(sample: int) -> list[str]:
            return [each.named(np.array([sample]))[0] or "" for each in paths]

        origin, rows, first = self.table.origin, self._row_numbers(), self.table.origin.starts[:-1].tolist()
        counts, own_rows = np.diff(origin.starts).tolist(), np.split(rows, np.searchsorted(rows, first[1:]))
        parts = zip(origin.paths, counts, own_rows, first, strict=True)
        stored = [StoredSamples(file, "/", count, own - start) for file, count, own, start in parts]
        return kept_samples(exclude, stored, origin.name, paths_of)

    def _row_numbers(self) -> Indices:
        kept = self.table.origin.kept
        return np.arange(len(self.table)) if kept is None else kept

    def _file_numbers(self) -> Indices:
        return np.searchsorted(self.table.origin.starts, self._row_numbers(), side="right") - 1


_BLOCK = 2**18  # most paths that are Python strings at a time


class Paths:
    """The files of a column: one in each row, or a list of files.

    ``lengths`` is the number of files in each row, −1 without a list, None if each row has one; ``embedded`` their
    bytes, if the table holds these. A row without a value has one file without a path, so that reading it is an error.
    """

    def __init__(self, rows: Rows, column: Column, root: RootDirectory) -> None:
        self.rows, self.column, self.root = rows, column.names[0], root
        array, self.lengths, self._lists = rows.table.array(self.column), None, None
        self.embedded = array if isinstance(array, EmbeddedFiles) else None
        if self.embedded is not None:
            self.lengths = self.embedded.counts() if is_list(array.type) else None
            return
        array = parsed_text(array, self.column, rows.table.origin, column.separator, kind=None)
        texts = array.flatten() if is_list(array.type) else array
        texts = texts if column.suffix is None else formats.with_suffix(texts, column.suffix)
        if is_list(array.type):
            missing, lengths = array.is_null(), formats.list_lengths(array)
            self.lengths = np.where(formats.booleans_of(missing), -1, lengths)
            self._lists = formats.lists_of(texts.fill_null(""), lengths, missing)
            firsts = arrow().array(np.cumsum(lengths) - lengths, mask=lengths == 0)
            texts = self._lists.values.take(firsts).fill_null("")
        elif texts.null_count:
            texts = texts.cast(arrow().large_string()).fill_null("")
        self._table = Table({self.column: texts}, rows.table.origin)  # the first path of each row, "" without any

    def of(self, samples: Indices) -> list[list[str]]:
        """The absolute paths of each sample, without access to files; for embedded files, names for messages."""
        if self.embedded is not None:
            counts = [1] * len(samples) if self.lengths is None else np.abs(self.lengths[samples]).tolist()
            return [[self._name(item) for item in range(count)] for count in counts]
        texts = self.texts(samples)
        with contextlib.suppress(SourceError):  # the other loop names the row
            return [list(map(self.root.path_of, each)) for each in texts]
        rows = zip(samples.tolist(), texts, strict=True)
        return [[self._path_of(text, sample, item) for item, text in enumerate(each)] for sample, each in rows]

    def texts(self, samples: Indices) -> list[list[str]]:
        """The paths of each sample, as the table has them."""
        if self._lists is None:
            return [[text] for text in self._table.text(self.column, samples)]
        lists = self._lists.take(formats.arrow_integers(samples)).to_pylist()
        return [[""] if each is None else each for each in lists]

    def named(self, samples: Indices) -> list[str | None]:
        """The first path of each sample, absolute; a path that the source refuses, as the table has it."""
        return [self.root.named(text) if text else None for text in self._table.text(self.column, samples)]

    def _name(self, item: int) -> str:
        return f"column {quoted(self.column)}" + ("" if self.lengths is None else f"[{item}]")

    def _path_of(self, text: str, sample: int, item: int = 0) -> str:
        try:
            if not text:
                raise ManifestError(f"no path; give one{self.or_drop(sample)}")
            return self.root.path_of(text)
        except SourceError as error:
            raise self.failed(error, sample, text, item) from None

    def or_drop(self, sample: int) -> str:
        """The advice to drop a row without a value; empty if only an item of a list has none."""
        return ", or set null: drop" if self.lengths is None or self.lengths[sample] < 0 else ""

    def failed(self, error: AsyncDataError, sample: int, path: str, item: int = 0) -> AsyncDataError:
        """The error with the row, and with a filter that leaves a damaged file out."""
        hint, name, listed = "", self.rows.id or self.column, self.lengths is not None
        if isinstance(error, CorruptError) and (self.rows.id or not (listed or self.embedded is not None)):
            value = self.rows.table.array(name)[sample].as_py()
            left_out = f"filters=[[{name!r}, 'not in', [{value!r}]]]"
            hint = f"; or leave it out: {left_out}; python -m lit_async_data inspect --check-all lists all such files"
        where = f"{self._name(item)}: " if self.embedded is None and (listed or not path) else ""
        return self.rows.with_row(error, sample, path if self.embedded is None else None, hint, where)

    def distinct(self) -> tuple[Indices, list[str]]:
        """The number of each sample's path, and the paths that have these numbers, which must be few."""
        codes, texts = self._table.encoded(self.column)
        present, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
        paths = []
        for code, first in zip(present.tolist(), firsts.tolist(), strict=True):
            path = self._path_of(texts[code], first)
            try:
                paths.append(self.root.checked(path))
            except SourceError as error:
                raise self.rows.with_row(error, first, path) from None
        return codes, paths

    def grouped(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        count = len(self.rows)
        blocks = (self.named(np.arange(first, min(first + _BLOCK, count))) for first in range(0, count, _BLOCK))
        return numbered(naming(self.root.within(path or "")) for paths in blocks for path in paths)

    def folders(self) -> Indices:
        array = self._table.array(self.column)
        texts = array.dictionary_decode() if formats.is_categorical(array.type) else array
        encoded = arrow("compute").replace_substring_regex(texts, r"/*[^/]*$", "").dictionary_encode()
        numbers, _ = numbered(map(os.path.normpath, encoded.dictionary.to_pylist()))  # several texts can name a folder
        codes: Indices = numbers[formats.values_of(encoded.indices)]
        return codes
