"""`Column`: what of a table becomes a field of a batch, as a frozen dataclass that validates itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.options import check_names
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.table.labels import Null

Kind = Literal["image", "npy", "hdf5", "class", "number"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FILES: tuple[Kind, ...] = ("image", "npy", "hdf5")

# What a field may be given as.
Given = str | Sequence[str] | Field | Mapping[str, Any]
_IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))
# What of a field of a table a `Field` can say too.
_SHARED = ("name", "dtype", "classes")


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
