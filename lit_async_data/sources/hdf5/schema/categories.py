"""Stored numbers that stand for names or for no value, and the conversion of stored values into delivered ones.

Numbers are named by AnnData since 0.7, HDF5 enumerations, flags of NetCDF (CF conventions, 3.5) and tables of pandas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.schema import inspect
from lit_async_data.sources.hdf5.schema.encoded import encoding, whole_numbers
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import Located, OpenGroup, StoredDataset
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import path_of
from lit_async_data.sources.table.labels import MOST_CLASSES

RowsOf = Callable[[], Indices]

# Marks of a `Numbering` until values are checked: a missing value, a name that is no class, a number without a name.
MISSING, UNLISTED, UNNAMED = (int(np.iinfo(np.int64).min) + each for each in range(3))
CODES = np.dtype(np.int64)  # the type of the numbers of text
_FALSE_TRUE = ("FALSE", "TRUE")  # as h5py stores booleans


@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    name: str  # the dataset, and the member of its values
    names: Mapping[int, str] = dataclasses.field(default_factory=dict)  # names of numbers; empty if the file has none
    missing: tuple[int, ...] = ()  # numbers that stand for no value
    mask: npt.NDArray[np.bool_] | None = None  # which rows have no value; None if all have one
    place: str = ""  # the dataset of categories, which must name every number; empty for other names
    is_open: bool = False  # whether numbers without a name are valid, as beside NetCDF's flags

    def texts(self, numbers: Array, file: str, missing: str | None = None) -> Array:
        """The name of each number; ``missing`` where there is no value."""
        known = {**self.names, **dict.fromkeys(self.missing, missing)}
        if self.place and (wrong := np.isin(numbers, list(known), invert=True)).any():
            what = f"has {len(self.names)} names, but there is code {numbers[wrong.argmax()]}; write the column again"
            raise CorruptError(f"{file}:{self.place}: {what}", file=file, dataset=self.place)
        found = np.array([known.get(number, number) for number in numbers.tolist()], object)
        if self.mask is not None:
            found[self.mask] = missing
        return found


def find_coded(group: OpenGroup, name: str) -> Coded:
    """The dataset of a field's numbers, and their names in the file."""
    of, member = group.split(name)
    node, full = group.node(of), f"/{name.strip('/')}"
    above = None if member else group.node(full.rpartition("/")[0] or "/")
    for end, kind in (("/codes", "categorical"), ("/values", "nullable")):
        if full.endswith(end) and isinstance(above, h5py.Group) and encoding(above) == kind:
            node, full = above, full.removesuffix(end)
    kind = encoding(node) if isinstance(node, h5py.Group) else ""
    if kind == "categorical":
        return _categories(group, f"{full}/codes", f"{full}/categories")
    if kind == "nullable":
        return Coded(f"{full}/values", mask=_mask(group, full))
    dtype = np.dtype(object)
    if not isinstance(node, h5py.Dataset):
        return Coded(name)
    with contextlib.suppress(*LIBRARY_ERRORS):  # `inspect_dataset` refuses a type that numpy lacks
        dtype = inspect.find_member(node, member, context_of(group.path, of))[1].dtype
    if names := enumerated(dtype):
        return Coded(name, names, _fills(node, names))
    place = _place(group, of, member, node) if dtype.kind in "iu" else ""
    flags = dtype.kind in "iu" and not (place or member) and len(node.attrs)
    return _categories(group, name, place) if place else _flags(node, name) if flags else Coded(name)


def names_of(group: OpenGroup, field: Field, name: str, where: str) -> dict[int, str]:
    """The names of 0, 1, 2, … in an attribute or a dataset; ``name`` is that of the field."""
    of, at, attribute = str(field.names).partition("@")
    full = name if not of else of if of == "/" else group.name(of)
    node = group.node(full or "/")
    found = node.attrs.get(attribute) if at and node is not None else node
    if found is None:
        what = f"{full or '/'} has no attribute {attribute!r}" if at else f"there is no dataset {full}"
        raise MissingError(f"{where}.names: {group.path}: {what}; give classes=[…]", file=group.path, dataset=full)
    listed: Any = np.asarray(found[...] if isinstance(found, h5py.Dataset) else found, object)
    texts = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in listed.ravel().tolist()]
    if listed.ndim != 1 or not texts or not all(isinstance(each, str) for each in texts):
        what = f"{field.names!r} of {group.path}:{full} is no list of names; give classes=[…]"
        raise FormatError(f"{where}.names: {what}", file=group.path, dataset=full)
    return dict(enumerate(texts))


def _place(group: OpenGroup, name: str, member: str, node: h5py.Dataset) -> str:
    """The dataset that names the codes of a dataset outside of a ``categorical`` group; empty if there is none."""
    parent, _, last = f"/{name.strip('/')}".rpartition("/")
    if len(node.attrs) and isinstance(reference := node.attrs.get("categories"), h5py.Reference) and reference:
        named: Any = group.file[reference]
        return str(named.name)
    places = [f"{parent}/__categories/{last}"]  # AnnData 0.7
    if member:
        places = [f"/uns/{member}_categories", f"{parent}/meta/{member}/meta/table.values"]  # AnnData 0.6, pandas
    elif group.node(f"{parent}/__categories") is None:
        return ""
    return next((each for each in places if group.node(group.split(each)[0]) is not None), "")


def enumerated(dtype: np.dtype[Any]) -> dict[int, str]:
    found = h5py.check_enum_dtype(dtype) if dtype.kind in "iu" else None
    return {number: text for text, number in (found or {}).items()}


def _categories(group: OpenGroup, name: str, place: str) -> Coded:
    node = group.node(place)
    nullable = isinstance(node, h5py.Group) and encoding(node) == "nullable"
    dataset, path = group.whole_member(f"{place}/values" if nullable else place, "")
    values = inspect.member_of(dataset[...], path).reshape(-1)
    stored = StoredDataset(group.path, place, values.shape, values.dtype, 0, FieldSpec((), values.dtype))
    texts = as_texts(values.tolist(), stored)
    return Coded(name, dict(enumerate(texts)), (-1,), place=f"/{place.strip('/')}")


def _mask(group: OpenGroup, name: str) -> npt.NDArray[np.bool_]:
    mask = group.whole(f"{name}/mask", "")
    if mask.dtype != bool or mask.shape != group.whole(f"{name}/values", "").shape or mask.ndim != 1:
        what = f"{mask.dtype} {mask.shape} is no mask of its values; write the column again"
        raise FormatError(f"{group.path}:{mask.name}: {what}", file=group.path, dataset=name)
    return np.asarray(mask[...])


def _flags(dataset: h5py.Dataset, name: str) -> Coded:
    numbers: Any = np.ravel(dataset.attrs.get("flag_values", ()))
    given = np.ravel(dataset.attrs.get("flag_meanings", "")).tolist()
    texts = " ".join(each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in given).split()
    # With masks, flags are bits, and a number may have several flags.
    if numbers.dtype.kind not in "iu" or not len(numbers) == len(texts) > 0 or "flag_masks" in dataset.attrs:
        return Coded(name)
    names = dict(zip(numbers.tolist(), texts, strict=True))
    return Coded(name, names, _fills(dataset, names), is_open=True)


def _fills(dataset: h5py.Dataset, numbers: Any) -> tuple[int, ...]:
    """NetCDF's fill values, without the numbers that have a name."""
    found = [np.ravel(dataset.attrs.get(each, ())) for each in ("_FillValue", "missing_value")]
    return tuple({int(each[0]) for each in found if each.size == 1 and each.dtype.kind in "iu"}.difference(numbers))


@dataclasses.dataclass(frozen=True, eq=False)
class Numbering:
    """The number to deliver for each stored one: the place of its name among the classes, or the number itself."""

    targets: Mapping[int, int]  # the delivered number, `MISSING` or `UNLISTED`, by stored number
    classes: tuple[str, ...]  # names of the delivered numbers 0, 1, 2, …; empty if numbers are delivered as stored
    names: Mapping[int, str]  # names of stored numbers
    unnamed: int | None = UNNAMED  # delivered for all other numbers; None: the number itself

    @classmethod
    def of(cls, coded: Coded, classes: Sequence[str] | None, dtype: np.dtype[Any]) -> Numbering:
        names, places = coded.names, {text: number for number, text in enumerate(classes or ())}
        if dtype.kind == "b" and not {each.upper() for each in places}.isdisjoint(_FALSE_TRUE):
            names = dict(enumerate(next((c for c in places if c.upper() == each), each) for each in _FALSE_TRUE))
        if classes is None:
            listed = tuple(names[number] for number in sorted(names))
            counted = sorted(names) == list(range(len(names))) and (coded.place or len({*listed}) == len(listed))
            classes = listed if counted else ()
        # Without names, or with the file's own classes, a number is the place of its name.
        targets = {number: places.get(text, UNLISTED) for number, text in names.items()} if places else {}
        targets = targets or {number: number for number in range(len(classes))}
        unnamed = UNNAMED if classes and not coded.is_open else MISSING if places else None
        return cls(targets | dict.fromkeys(coded.missing, MISSING), tuple(classes), names, unnamed)

    @functools.cached_property
    def _plain(self) -> int:
        """The numbers 0, 1, 2, … up to this one stay as they are."""
        return next(number for number in range(len(self.targets) + 1) if self.targets.get(number) != number)

    @functools.cached_property
    def _table(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        stored = np.array(sorted(self.targets), np.int64)
        return stored, np.array([self.targets[number] for number in stored.tolist()], np.int64)

    def __call__(self, values: Array) -> Array:
        """The numbers to deliver; int64 with `MISSING`, `UNLISTED` and `UNNAMED` if any differs from its value."""
        if not (self.targets and values.size) or (values.min() >= 0 and values.max() < self._plain):
            return values
        if values.itemsize > 1 or values.size <= 256:
            return self._found(values)
        return self._found(np.arange(256, dtype=np.uint8).view(values.dtype))[values.view(np.uint8)]

    def _found(self, values: Array) -> Array:
        (stored, numbers), given = self._table, values.astype(np.int64)
        low, span = int(stored[0]) - 1, int(stored[-1] - stored[0]) + 3
        if span < 2**16:  # a table, whose first and last entry are for all numbers outside of it
            table = np.full(span, UNNAMED)
            table[stored - low] = numbers
            found = table[(given - low).clip(0, span - 1)]
        else:
            places = np.searchsorted(stored, given).clip(max=len(stored) - 1)
            found = np.where(stored[places] == given, numbers[places], UNNAMED)
        delivered: Array = np.where(found == UNNAMED, given if self.unnamed is None else self.unnamed, found)
        return delivered


_SURROGATES = re.compile("[\ud800-\udfff]")  # the result of decoding bytes that are not UTF-8


def as_texts(values: Iterable[Any], stored: Located, row_of: Callable[[int], int] = int) -> list[str]:
    """Values as text. A value that is not UTF-8 is an error, which names its row."""
    texts = [each.decode(errors="surrogateescape") if isinstance(each, bytes) else str(each) for each in values]
    for number, text in enumerate(texts):
        if not text.isascii() and _SURROGATES.search(text):
            row, given = row_of(number), text.encode(errors="surrogateescape")
            raise stored.error(FormatError, f"{given!r} is not UTF-8; write Latin-1 as text.decode('latin-1')", row)
    return texts


def is_numbered(group: OpenGroup, name: str, field: Field) -> bool:
    """Whether a field is delivered as numbers of text. Images are not; categories are if the user chose a kind."""
    of, member = group.split(name)
    node = group.node(of)
    if isinstance(node, h5py.Group) and encoding(node) in ("categorical", "nullable"):
        values = group.node(f"/{name.strip('/')}/values")
        is_text = isinstance(values, h5py.Dataset) and h5py.check_string_dtype(values.dtype) is not None
        return is_text or field.kind == "text"
    if field.lookup is not None or not isinstance(node, h5py.Dataset):
        return False
    kind: Any = inspect.find_member(node, member, context_of(group.path, of))[1]
    if not isinstance(kind, h5py.h5t.TypeStringID):
        return field.kind in ("class", "text") and isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID)
    return bool(member) or not inspect.image_format(node)


def inspect_texts(group: OpenGroup, name: str, field: Field, layout: str | None, where: str) -> StoredDataset:
    """A dataset with one text, or whole number, per row. The numbers of its texts are kept in memory."""
    coded = find_coded(group, name)
    dataset, path = group.whole_member(f"/{coded.name.strip('/')}", "")
    vector = dataset.ndim == 2 and dataset.size == max(dataset.shape) and field.column in (None, 0)  # as MATLAB's
    if field.mask_and_scale or not (vector or (layout is None and field.column is None)):
        raise ConfigError("layout, column and mask_and_scale do not apply to text or classes; leave them out", where)
    stored = group.inspect_dataset(group.split(coded.name)[0], holds="heap")
    values = inspect.member_of(dataset[...], path).reshape(-1)
    if coded.names or coded.mask is not None:
        values = coded.texts(values, group.path, "")
    codes, row = numbered(values, field, stored, where)
    return StoredDataset(group.path, name, codes.shape, CODES, 0, row, external=stored.external, kept=codes)


def numbered(
    values: npt.NDArray[Any], field: Field, stored: StoredDataset, where: str
) -> tuple[npt.NDArray[np.int64], FieldSpec]:
    """A number for each text, `IGNORED` for empty text that is no class; and the field with the names of numbers."""
    if field.names:
        what = f"{stored} is text, or made classes by kind=, which needs no names; leave it out"
        raise ConfigError(what, f"{where}.names")
    numeric = field.kind in ("text", "class")
    values = whole_numbers(values) if numeric else values
    if values.dtype.kind not in "SO" + "iu" * numeric or field.kind == "number" or values.ndim > 1:
        holds = f"{values.dtype}{' arrays' * (values.ndim > 1)}{', with fractions or NaN' * (values.dtype.kind == 'f')}"
        what = f"{stored} holds {holds}, which is not {field.kind}"
        if where == "fields.(on)":
            raise ConfigError(f"{what}; ids are text or whole numbers: name a dataset of ids", "on")
        raise ConfigError(f"{what}; leave kind out", f"{where}.kind")
    numbers: dict[Any, int] = {}
    codes = np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], np.int64)
    texts = as_texts(numbers, stored, lambda number: int((codes == number).argmax()))
    names = tuple(field.classes or filter(str.strip, texts))
    if not field.classes and field.kind != "text" and len(names) > MOST_CLASSES:
        what = f"{stored} holds {len(names)} distinct texts, which seem to be ids; write kind='text'"
        raise ConfigError(what, f"{where}.kind")
    places = {name: number for number, name in enumerate(names)}
    found = np.array([places.get(text, -1 if text.strip() else IGNORED) for text in texts], np.int64)[codes]
    unknown = np.flatnonzero(found == -1)
    if unknown.size:
        row = int(unknown[0])
        raise unknown_text(stored, row, texts[codes[row]], names, f"{where}.classes names all of them")
    return found, named(FieldSpec((), CODES), field, names)


def named(spec: FieldSpec, field: Field | None, names: tuple[str, ...]) -> FieldSpec:
    if field and field.kind == "text":
        return dataclasses.replace(spec, texts=names)
    return dataclasses.replace(spec, classes=names)


def unknown_text(stored: StoredDataset, row: int, text: str, names: tuple[str, ...], cure: str) -> SourceError:
    return stored.error(FormatError, f"{text!r} is not one of {few(names, 20)}; {cure}", row)


# NetCDF attributes of packed values.
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


def packing_of(group: OpenGroup, name: str) -> tuple[str, ...]:
    """The attributes that mask_and_scale would apply to values that come as stored. NaN is no marker."""
    found = getattr(group.node(name), "attrs", {})
    return tuple(each for each in PACKING if each in found and np.array_equal(found[each], found[each]))


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """How NetCDF packs values: ``stored · scale + offset``, with markers for missing values."""

    scale: float
    offset: float
    missing: tuple[Any, ...]  # markers for missing values, in the stored type
    unsigned: bool  # whether signed storage holds unsigned integers
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset, dtype: npt.DTypeLike | None = None) -> Packing:
        """The packing in the attributes of a dataset (NetCDF users' guide), for the wanted element type."""
        stored = dataset.dtype.newbyteorder("=")
        wide = (stored.kind in "iu" and stored.itemsize > 2) or stored == np.float64
        requested = np.dtype(dtype or bool)
        missing = [attribute(dataset, name) for name in ("_FillValue", "missing_value") if name in dataset.attrs]
        return cls(
            scale=float(attribute(dataset, "scale_factor", 1.0)),
            offset=float(attribute(dataset, "add_offset", 0.0)),
            missing=tuple(value for value in (_as_stored(each, stored) for each in missing) if value is not None),
            unsigned=stored.kind == "i" and str(attribute(dataset, "_Unsigned", "")).lower() == "true",
            dtype=requested if requested.kind == "f" else np.dtype(np.float64 if wide else np.float32),
        )

    def unpack(self, values: Array) -> Array:
        missing = np.zeros(values.shape, np.bool_)
        for value in self.missing:  # one by one, in the stored type: an array of markers could become floats
            missing |= values == value
        if self.unsigned:
            values = values.view(values.dtype.str.replace("i", "u"))
        if (self.scale, self.offset) != (1.0, 0.0):  # else a detour through float64 could round twice
            values = values.astype(np.float64) * self.scale + self.offset
        unpacked = values.astype(self.dtype)
        unpacked[missing] = np.nan
        return unpacked


def _as_stored(value: Any, stored: np.dtype[Any]) -> Any:
    """A value in the stored type; None if no stored value can equal it, as for NaN, which needs no marker."""
    given = np.asarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        if stored.kind == "i" and value > np.iinfo(stored).max:
            unsigned = given.astype(stored.str.replace("i", "u"))
            return unsigned.view(stored)[()] if unsigned == value else None
        cast = given.astype(stored)
    return cast[()] if cast == value else None


def attribute(dataset: h5py.Dataset, name: str, default: Any = None) -> Any:
    if name not in dataset.attrs:
        return default
    value = np.asarray(dataset.attrs[name]).reshape(-1)
    if value.size != 1 or (name != "_Unsigned" and value.dtype.kind not in "iuf"):
        path, what = path_of(dataset.file), f"its attribute {name} is {dataset.attrs[name]!r}, not one number"
        what = f"{path}:{dataset.name}: {what}; correct it, or leave out mask_and_scale"
        raise FormatError(what, file=path, dataset=dataset.name)
    single = value[0]
    return single.decode() if isinstance(single, bytes) else single


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """Turns stored values into delivered ones. Thread-safe."""

    stored: Located  # the dataset, or the member of compound values
    column: int | None = None  # the column to deliver; None for whole rows
    table: Array | None = None  # the lookup table; None if the values themselves are delivered
    packing: Packing | None = None  # how values are packed; None to deliver them as stored
    numbering: Numbering | None = None  # numbers of classes and missing values; None for values that are not numbered
    mask: npt.NDArray[np.bool_] | None = None  # which rows (of the table) have no value; None if all have one
    # For missing values, "ignore" delivers −100, of floats NaN, and "mark" the marks of `Numbering`; others are errors.
    null: str = "error"

    @property
    def doubtful(self) -> bool:
        """Whether a value may be missing without −100 to stand for it, or have a name that is no class."""
        found = {self.numbering.unnamed, *self.numbering.targets.values()} if self.numbering else set[int | None]()
        masked = self.mask is not None and bool(self.mask.any())
        return UNLISTED in found or (self.null != "ignore" and (masked or MISSING in found))

    def __call__(self, values: Array, rows: RowsOf, dtype: np.dtype[Any]) -> Array:
        """Convert values, shape (n, …), native byte order; ``rows`` gives their rows, shape (n,) or (n, window)."""
        places: Array | None = None
        if self.stored.member is not None:
            values = self.stored.member.of(values)
        if self.column is not None:
            values = values[..., self.column]
        if self.table is not None:
            count = len(self.table)
            self._check((values < 0) | (values >= count), values, rows, f"is not a row of a table of {count}")
            places, values = values, self.table[values]
        if self.packing is not None:
            values = self.packing.unpack(values)
        if self.numbering is not None:
            values = values if values.dtype.kind in "iub" else self._cast(values, rows, np.dtype(np.int64))
            values = self._numbered(self.numbering, values, rows, places)
        if self.null == "ignore" and (dtype.kind, values.dtype.kind) == ("f", "i"):
            values = np.where(values == IGNORED, np.nan, values)
        return self._cast(values, rows, dtype)

    def _numbered(self, numbering: Numbering, values: Array, rows: RowsOf, places: Array | None) -> Array:
        found = numbering(values)
        if self.mask is not None:
            lost = self.mask[rows() if places is None else places]
            found = np.where(lost, MISSING, found.astype(np.int64)) if lost.any() else found
        if found is values or self.null == "mark" or found.min() > UNNAMED:
            return found
        unnamed, cure = found == UNNAMED, "if −1 marks a missing value, set null='ignore' (−100) or 'drop', "
        self._check(unnamed, values, rows, f"is not one of its {len(numbering.classes)} classes", cure)
        if (unlisted := found == UNLISTED).any():
            name = numbering.names[values[unlisted][0].item()]
            what = f"is {name!r}, not one of {few(numbering.classes, 20)}"
            self._check(unlisted, values, rows, what, "add it to classes, ")
        missing = found == MISSING
        if self.null != "ignore":
            ways = "set null='ignore' (−100), or leave such samples out (null='drop'; for rows of a table: filters=), "
            self._check(missing, values, rows, "is a missing value", ways)
        found[missing] = IGNORED
        return found

    def _cast(self, values: Array, rows: RowsOf, dtype: np.dtype[Any]) -> Array:
        if values.dtype == dtype or np.can_cast(values.dtype, dtype, "safe"):
            return values
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
            if dtype.kind in "fc":
                wrong, problem = np.isinf(cast) & ~np.isinf(values), f"is beyond the range of {dtype}"
            else:
                wrong, problem = cast.astype(values.dtype) != values, f"is not a value of {dtype}"  # NaN included
                if values.dtype.kind in "iu" and dtype.kind in "iu":
                    wrong |= (values < 0) != (cast < 0)  # −1 survives a cast to unsigned and back
                elif dtype.kind in "iu":
                    limits = np.iinfo(dtype)  # beyond them the result depends on the processor
                    wrong |= ~((values >= float(limits.min)) & (values < float(limits.max) + 1))
        self._check(wrong, values, rows, problem, "choose another dtype, ")
        return cast

    def _check(self, wrong: Array, values: Array, rows: RowsOf, problem: str, cure: str = "") -> None:
        if not wrong.any():
            return
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        found = rows()
        row = int(found[place[: found.ndim]])
        what = f"{values[place]!s} {problem}; {cure}correct the file, or leave such rows out with rows="
        raise self.stored.error(FormatError, what, row)
