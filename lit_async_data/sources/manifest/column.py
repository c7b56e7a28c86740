"""`Column`: what of a table becomes a field of a batch, as a frozen dataclass that validates itself."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.options import check_names
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.table.arrow import is_number, numbered
from lit_async_data.sources.manifest.table.labels import Null
from lit_async_data.sources.manifest.table.row_origin import shown
from lit_async_data.sources.manifest.table.table import Table

Kind = Literal["image", "npy", "hdf5", "class", "number"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FILES: tuple[Kind, ...] = ("image", "npy", "hdf5")

# What a field may be given as.
Given = str | Sequence[str] | Field | Mapping[str, Any]
_IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))
# What of a field of a table a `Field` can say too.
_SHARED = ("name", "dtype", "classes")
IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".tif", ".tiff", ".webp", ".bmp", ".gif")
HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4")
NPY = (".npy",)
SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(HDF5, "hdf5"),
    **dict.fromkeys(NPY, "npy"),
}
# Rows whose text is compared where it is no path at first sight, and those of them whose files are looked up.
_COMPARED, _LOOKED_UP = 1024, 16
# How a file ends that is none of those which can be read.
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,4}")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Column:
    """What of a table becomes a field of a batch. In YAML a mapping of the same names, and of those of `ImageShape`.

    Attributes:
        name: The column; or several of numbers, which become one vector per sample.
        kind: What stands in it. ``"image"``, ``"npy"`` and ``"hdf5"``: paths of such files. ``"class"``: text, one
            class each. ``"number"``: numbers, also where the table has them as text. None: found from its first value:
            a path if it ends as such files do or is the path of a file, else a number if it is one, else a class.
        dtype: Element type to be delivered, of labels and of rows of HDF5 files. None: as it is.
        classes: Names of the values 0, 1, 2, … of text; None: the categories of an ordered categorical column (also
            those that do not occur), and of other text what occurs, sorted.
        null: Of rows without a value: ``"error"``, ``"ignore"`` (−100, or NaN in floats), or ``"drop"`` the sample.
        separator: What stands between several values of one cell of text: classes, or numbers of a vector.
        row: Of HDF5 files, the column with the row, counted from 0.
        dataset: Of HDF5 files, the column with the name of the dataset; or, where there is none of this name, the
            dataset itself. None: the column ``dataset``, or else the dataset ``data``.
        layout: Of HDF5 files, the letters of the stored axes, as for `HDF5Source`.
        image: How images become arrays of one shape.
        given: Names of the options that were given for this column.

    Raises:
        ConfigError: A name is unknown or a value is wrong; the message begins with the name.

    Example:
        >>> Column.of("species").name
        'species'
        >>> Column.of({"name": "mask", "mode": "P"}).image.resampling
        'nearest'
        >>> Column.of({"name": "age", "null": "skip"})
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: null: 'skip' is not one of error, ignore, drop
    """

    name: str | tuple[str, ...]
    kind: Kind | None = None
    dtype: npt.DTypeLike | None = None
    classes: Sequence[str] | None = None
    null: Null = "error"
    separator: str | None = None
    row: str = "row"
    dataset: str | None = None
    layout: str | None = None
    image: ImageShape = dataclasses.field(default_factory=ImageShape)
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _names(self.name))
        if self.kind not in (*KINDS, None):
            raise ConfigError(f"kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.null not in get_args(Null):
            raise ConfigError(f"null: {self.null!r} is not one of {', '.join(get_args(Null))}")
        for name in ("separator", "dataset", "layout"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, str) and value)):
                raise ConfigError(f"{name}: {value!r} is not text")
        if not (isinstance(self.row, str) and self.row):
            raise ConfigError(f"row: {self.row!r} is not the name of a column")
        # What the two have in common is checked where it is at home.
        shared = Field("column", dtype=self.dtype, classes=self.classes)
        object.__setattr__(self, "dtype", shared.dtype)
        object.__setattr__(self, "classes", shared.classes)
        if self.several and (self.classes or self.separator or self.kind not in ("number", None)):
            raise ConfigError(f"name: {', '.join(self.name)}: several columns stand together as numbers only")

    @classmethod
    def of(cls, given: Given, where: str = "", image: ImageShape | None = None) -> Column:
        """A column from its name, a list of names, a mapping of the attributes' names, or a `Field`.

        Args:
            given: Any of these; of a `Field`, name, dtype and classes.
            where: Put before the names in messages: ``"fields.x."``.
            image: What holds for images unless the mapping says otherwise.

        Raises:
            ConfigError: As in the constructor.
        """
        try:
            return cls._of(given, ImageShape() if image is None else image)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None

    @classmethod
    def _of(cls, given: Any, image: ImageShape) -> Column:
        if isinstance(given, Column):
            return given
        if isinstance(given, Field):
            given = _shared(given)
        if not isinstance(given, Mapping):
            return cls(given, image=image)
        own = [field.name for field in dataclasses.fields(cls) if field.name not in ("image", "given")]
        check_names(given, [*own, *_IMAGE])
        if "name" not in given:
            raise ConfigError("name: missing; which column is it?")
        of_image = {name: value for name, value in given.items() if name in _IMAGE}
        rest = {name: value for name, value in given.items() if name in own}
        return cls(**rest, image=dataclasses.replace(image, **of_image), given=tuple(given))

    @property
    def several(self) -> bool:
        """Whether several columns stand together."""
        return not isinstance(self.name, str)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that hold its values."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def element(self) -> np.dtype[Any] | None:
        """``dtype``, as numpy has it."""
        return None if self.dtype is None else np.dtype(self.dtype)


def _names(given: Any) -> str | tuple[str, ...]:
    if isinstance(given, str) and given:
        return given
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not given or not all(isinstance(name, str) and name for name in given):
        raise ConfigError(f"name: {given!r} is not the name of a column, nor a list of names")
    if len(set(given)) < len(given):
        raise ConfigError(f"name: {list(given)} holds a column twice")
    return tuple(given)


def _shared(given: Field) -> dict[str, Any]:
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(Field)}
    for field in dataclasses.fields(Field):
        if field.name not in _SHARED and values[field.name] != field.default:
            raise ConfigError(f"{field.name}: of HDF5 files only; of a field of a table: {', '.join(_SHARED)}")
    return {name: values[name] for name in _SHARED if values[name] is not None}


def kind_of_path(path: str) -> Kind | None:
    """What a path names, by how it ends; None for what is not known."""
    return SUFFIXES.get(os.path.splitext(path.rstrip())[1].lower())


def kind_of(key: str, column: Column, table: Table, root: RootDirectory) -> Kind | None:
    """What stands in a column: by what the user says, else by its first value. None for values of any kind."""
    if column.kind is not None or column.several or column.classes is not None:
        kind = column.kind
    else:
        first = table.first(column.names[0])
        kind = _kind_of_value(first, root)
        if kind is None and isinstance(first, str) and column.separator is None and not is_number(first):
            _check_not_paths(key, column.names[0], table, root, first)
    if kind in FILES and not table.is_text(column.names[0]):
        raise ConfigError(f"fields.{key}.kind: column {column.names[0]!r} holds no paths")
    _check_options(key, column, kind)
    if kind in FILES and column.null == "ignore":
        raise ConfigError(f"fields.{key}.null: nothing stands for a file that there is not; drop such samples")
    return kind


def _check_options(key: str, column: Column, kind: Kind | None) -> None:
    """Refuse what says nothing of such a column."""
    own = {"image": _IMAGE, "npy": (), "hdf5": ("dtype", "row", "dataset", "layout")}
    fitting = own.get(kind or "", ("dtype", "classes", "separator"))
    for name in column.given:
        if name not in ("name", "kind", "null", *fitting):
            what = f"{kind} files" if kind in FILES else "labels"
            hint = "; cast on the device" if name == "dtype" else ""
            raise ConfigError(f"fields.{key}.{name}: says nothing of {what}{hint}")


def _kind_of_value(value: Any, root: RootDirectory) -> Kind | None:
    if not isinstance(value, str) or not value:
        return None
    known = kind_of_path(value)
    if known is not None:
        return known
    try:
        return "image" if os.path.isfile(root.path_of(value)) else None
    except ManifestError:
        return None


def _check_not_paths(key: str, name: str, table: Table, root: RootDirectory, first: str) -> None:
    """Refuse to make classes of what seems to be paths: without an error, training would go on with their numbers.

    Raises:
        ConfigError: Other values are paths, or all end alike, as files do.
    """
    rows = np.unique(np.linspace(0, len(table) - 1, min(_COMPARED, len(table))).astype(np.int64))
    texts = list(dict.fromkeys(table.array(name).take(numbered(rows)).drop_null().to_pylist()))
    begins = f"fields.{key}.kind: column {shown(name)} begins with {shown(first)}"
    ways = "say kind: image, npy or hdf5 if these are paths, or kind: class if they are classes"
    known = next((text for text in texts if kind_of_path(text)), None)
    known = known or next((text for text in texts[:_LOOKED_UP] if _kind_of_value(text, root)), None)
    if known is not None:
        raise ConfigError(
            f"{begins}, which is no file and does not end as one that can be read, but also holds {shown(known)}; mend "
            f"the first path, or {ways}"
        )
    ends = {os.path.splitext(text)[1] for text in texts}
    if len(texts) > 1 and len(ends) == 1 and _SUFFIX.fullmatch(next(iter(ends))):
        raise ConfigError(
            f"{begins}, and all end in {next(iter(ends))}, but there is no such file in {root.root}; {ways}"
        )
    if all("/" in text for text in texts):
        _log.warning(
            "column %s: %s and others like it are taken for classes, since there are no such files in %s; %s",
            shown(name),
            shown(first),
            root.root,
            ways,
        )


def missing_of(columns: Iterable[Column], table: Table) -> list[Indices]:
    """The rows without a value in columns of which such rows are dropped."""
    return [table.missing(name) for column in columns if column.null == "drop" for name in column.names]


def check_paths(key: str, column: Column, table: Table) -> None:
    """Make sure that each row names a file.

    Raises:
        ManifestError: One does not.
    """
    name = column.names[0]
    missing = table.missing(name)
    if missing.size:
        more = f", nor in {missing.size - 1} other rows" if missing.size > 1 else ""
        raise table.origin.error(
            f"no path{more}; give one, or say null: drop in fields.{key}", row=int(missing[0]), column=name
        )
