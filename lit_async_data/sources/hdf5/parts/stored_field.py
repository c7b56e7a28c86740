"""`StoredField`: how a part stores a field: its kind, window and conversion."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec, length_key, mask_key
from lit_async_data.errors import ConfigError, FormatError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.schema import categories, encoded
from lit_async_data.sources.hdf5.schema.categories import PACKING, Coded, Conversion, Numbering, Packing
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredRanges, StoredSequences
from lit_async_data.sources.hdf5.schema.field import ROWS, VARIABLE, Field, changed, left_out
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset
from lit_async_data.sources.hdf5.schema.patches import POINTS, StoredPatches, elements_of, inspect_patches
from lit_async_data.sources.hdf5.select import ROW, Episodes, Steps, TimedWindow, Window
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import path_of

Kind = StoredDataset | StoredRanges | StoredSequences | StoredImages | StoredPatches
# The largest size of a lookup table. One per file is kept in memory.
TABLE_BYTES = 256 * 2**20
SPARSE = {"csr": "sparse rows", "csc": "a sparse matrix"}


class Lacking(NamedTuple):  # the rows that cannot be read
    rows: Indices  # ascending
    why: Array  # a message for each row; empty if its dataset is missing


@dataclasses.dataclass(frozen=True, eq=False)
class StoredField:
    stored: Kind
    spec: FieldSpec
    window: Window = ROW
    conversion: Conversion | None = None
    mask: bool = False  # whether the field marks the rows of windows that lie inside their episode
    packed: tuple[str, ...] = ()  # NetCDF attributes of packed values that are delivered as stored
    raw: tuple[str, ...] = ()  # the same where mask_and_scale does not apply
    fill: float = 0  # padding of samples of variable length
    text: Field | None = None  # the user's field, if values are numbers of text; else None
    channels: tuple[StoredField, ...] = ()  # a field for each channel; empty if the field is one dataset

    @property
    def plain(self) -> bool:
        own = self.window.span == (0, 1) and not self.window.axis
        return own and self.conversion is None and not self.fill and self.spec.padded != "left"

    @property
    def images(self) -> StoredImages | None:
        return self.stored if isinstance(self.stored, StoredImages) else None

    @property
    def sequences(self) -> StoredSequences | None:
        return self.stored if isinstance(self.stored, StoredSequences) else None

    @property
    def texts(self) -> tuple[str, ...]:
        return self.spec.texts or self.spec.classes

    @property
    def patches(self) -> StoredPatches | None:
        return self.stored if isinstance(self.stored, StoredPatches) else None

    @property
    def located(self) -> StoredDataset | StoredRanges | StoredPatches:
        """The dataset, group or patches that count the rows, and that messages name."""
        return self.stored.values if isinstance(self.stored, StoredImages | StoredSequences) else self.stored

    @property
    def rows(self) -> int:
        return math.prod(self.steps.shape) if self.steps else self.located.rows

    @property
    def steps(self) -> Steps | None:
        return self.stored.steps if isinstance(self.stored, StoredDataset) else None

    @property
    def values(self) -> StoredDataset:
        return self.stored if isinstance(self.stored, StoredDataset) else self.stored.values

    @property
    def datasets(self) -> list[StoredDataset]:
        if self.channels:
            return [dataset for each in self.channels for dataset in each.datasets]
        columns = self.stored.columns if isinstance(self.stored, StoredRanges) else None
        return [self.values] if columns is None else [self.values, columns]

    @property
    def regular(self) -> bool:
        """Whether samples read rows at fixed distances from their anchors."""
        irregular = isinstance(self.stored, StoredRanges | StoredPatches) or isinstance(self.window, TimedWindow)
        return not (irregular or self.window.at or (self.steps and not self.steps.in_order))

    @property
    def chunks_per_sample(self) -> float:
        """The number of chunks that a sample touches, on average over places in chunks."""
        rows = self.steps.chunk[1 - self.steps.swapped] if self.steps else self.values.chunk_rows
        if isinstance(self.stored, StoredRanges):
            return 1 + float(np.maximum(self.stored.lengths - 1, 0).mean()) / rows
        steps: Any = np.diff(np.sort(self.window.offsets))
        if isinstance(self.window, TimedWindow) and len(self.window.times) > 1:  # seconds
            steps = steps / np.median(np.diff(self.window.times))
        return 1 + float(np.minimum(steps / rows, 1).sum())

    def changed(self, name: str, change: Callable[[Any], Any]) -> StoredField:
        """The field with a changed attribute, also of its channels."""
        channels = tuple(each.changed(name, change) for each in self.channels)
        return dataclasses.replace(self, channels=channels, **{name: change(getattr(self, name))})

    def extent(self, anchors: Indices) -> tuple[Indices, Indices]:
        """The first and the last row, or element, that each sample reads."""
        first, last = self.window.extent(self.window.own(anchors))
        if isinstance(self.stored, StoredRanges):
            offsets = self.stored.offsets
            first, last = offsets[first], np.maximum(offsets[first], offsets[first + 1] - 1)
        return first, last

    def chunks(self, anchors: Indices, rows: int) -> tuple[Indices, Indices]:
        """The first and the last chunk of ``rows`` rows that each sample reads."""
        first, last = self.extent(anchors)
        if not self.steps or self.steps.in_order:
            return first // rows, last // rows
        own, length = self.window.own(anchors), self.steps.length
        begins = own - own % length  # of episodes, which windows do not leave
        return self.steps.chunks(np.maximum(first, begins)), self.steps.chunks(np.minimum(last, begins + length - 1))


Fields = dict[str, StoredField]


def inspect_field(group: OpenGroup, key: str, field: Field, layout: str | None, drawn: int | None = None) -> Fields:
    """A field by its key, with a field of the lengths of padded samples, of the mask of padding, of origins."""
    name, where = group.name(field.dataset), f"fields.{key}"
    if field.stacked:
        return _stacked(key, layout, [inspect_field(group, key, each, layout, drawn) for each in field.stacked])
    if field.places:
        return _patches(group, key, field, inspect_patches(group, field, layout, where, drawn))
    if field.decode:
        return _with_window(key, field, _inspect_images(group, key, field, layout))
    node = group.node(name)
    kind = encoded.encoding(node) if isinstance(node, h5py.Group) else ""
    ranges: encoded.Delimited | np.dtype[Any] | None = encoded.delimited(group, field)
    if ranges is None and isinstance(node, h5py.Dataset):
        ranges = encoded.element_type(node, field)
    if ranges is not None or kind in SPARSE:
        return _inspect_ranges(group, key, field, kind if ranges is None else ranges, layout=layout)
    if categories.is_numbered(group, name, field):
        texts = categories.inspect_texts(group, name, field, layout, where)
        return _with_window(key, field, numbered_field(texts, field, where))
    return _with_window(key, field, _inspect_numbers(group, field, layout, where))


def _inspect_numbers(group: OpenGroup, field: Field, layout: str | None, where: str) -> StoredField:
    coded = categories.find_coded(group, group.name(field.dataset))
    if field.names and coded.names:
        raise ConfigError(f"{group.path}:{coded.name} has names of its own; leave it out", f"{where}.names")
    if field.names:
        coded = dataclasses.replace(coded, names=categories.names_of(group, field, group.split(coded.name)[0], where))
    looked_up = _looked_up(group, coded.name, field, layout, where)
    for option in changed(field, VARIABLE):
        raise ConfigError(f"{looked_up} holds no samples of variable length; leave it out", f"{where}.{option}")
    row = (looked_up.member or looked_up).spec
    column = _column_number(group, looked_up, row, field.column, where)
    if column is not None:
        row = _column_of(row, column, looked_up, where)
    stored, table = looked_up, None
    if field.lookup is not None:
        stored = _row_numbers(group, field.lookup, where)
        table = _lookup_table(group, looked_up, column, where)
    dataset = group.node(looked_up.name)
    packing = _packing(dataset, field, where) if field.mask_and_scale else None
    native = ((stored.member or stored).dtype if table is None else table.dtype).newbyteorder("=")
    columns = encoded.named_columns(group, looked_up.name, looked_up.spec.stored_shape, column)
    row = dataclasses.replace(row, dtype=packing.dtype if packing else native, columns=columns)
    numbering, spec = numbered_spec(coded, field, row, stored, where)
    own = column if table is None else None
    conversion = Conversion(stored, own, table, packing, numbering, coded.mask, field.null)
    # Windows are read in the stored type, single integers as int64.
    cast = spec.dtype != (stored.spec.dtype if field.rows is None else stored.dtype.newbyteorder("="))
    numbered = numbering is not None and bool(numbering.targets)
    steps = stored.member, table, column, packing, coded.mask
    converted = cast or numbered or any(step is not None for step in steps)
    packed = () if packing or looked_up.member or coded.names else categories.packing_of(group, looked_up.name)
    return StoredField(stored, spec, conversion=conversion if converted else None, packed=packed)


def _looked_up(group: OpenGroup, name: str, field: Field, layout: str | None, where: str) -> StoredDataset:
    group = dataclasses.replace(group, episodes=None) if field.lookup else group
    try:
        return group.inspect_dataset(*group.split(name), layout, cast=field.dtype is not None)
    except NoSamplesError as error:
        if field.lookup is None:
            raise
        raise FormatError(f"{where}.lookup: {error}", file=error.file, dataset=error.dataset) from error


def _column_number(
    group: OpenGroup, stored: StoredDataset, row: FieldSpec, column: int | str | None, where: str
) -> int | None:
    if not isinstance(column, str):
        return column
    if len(row.stored_shape) != 1:
        raise ConfigError(f"{column!r}, but {stored}, of shape {stored.shape}, has no columns", f"{where}.column")
    places, names = encoded.column_numbers(group, stored.name, row.stored_shape, column)
    if len(places) == 1:
        return places[0]
    has = f"its columns are {few(names, 20)}" if names else "no attribute names its columns"
    is_ = f"is {len(places)} columns" if places else "is no column"
    ways = "; give a number" * bool(places or not names)
    raise ConfigError(f"{column!r} {is_} of {stored}: {has}{ways}", f"{where}.column")


def _column_of(row: FieldSpec, column: int, stored: StoredDataset, where: str) -> FieldSpec:
    if len(row.stored_shape) != 1 or column >= row.stored_shape[0]:
        has = f"has {row.stored_shape[0]} columns" if len(row.stored_shape) == 1 else "has no columns"
        raise ConfigError(f"{column}, but {stored}, of shape {stored.shape}, {has}", f"{where}.column")
    return FieldSpec((), row.dtype)


def _row_numbers(group: OpenGroup, name: str, where: str) -> StoredDataset:
    stored = group.inspect_dataset(*group.split(group.name(name)))
    values = stored.member or stored
    if values.spec.shape or values.dtype.kind not in "iu":
        what = f"{stored} has dtype {values.dtype} and shape {stored.shape}; it must have one integer per row"
        raise FormatError(f"{where}.lookup: {what}", file=stored.path, dataset=stored.name)
    return stored


def _lookup_table(group: OpenGroup, stored: StoredDataset, column: int | None, where: str) -> Array:
    """A lookup table in memory. All groups of a file share it."""
    key = str(stored), column, stored.axis
    if key not in group.tables:
        if stored.nbytes > TABLE_BYTES:
            what = f"{stored} has {stored.nbytes:,} bytes, but a lookup table, in memory, has {TABLE_BYTES:,} at most"
            raise ConfigError(f"{what}; store the values of each row as a dataset", f"{where}.lookup")
        table = group.whole(f"/{stored.name.strip('/')}", "")
        values = np.moveaxis(stored.member.of(table[...]) if stored.member else table[...], stored.axis, 0)
        values = values if column is None else values[:, column]
        group.tables[key] = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return group.tables[key]


def _packing(dataset: h5py.Dataset, field: Field, where: str) -> Packing:
    path, name = path_of(dataset.file), str(dataset.name)
    context = context_of(path, name)
    if dataset.dtype.kind not in "iuf":
        raise FormatError(f"holds {dataset.dtype}, which mask_and_scale does not apply to; leave it out", **context)
    if not any(each in dataset.attrs for each in PACKING):
        cure = "leave it out, or, if only some files are not packed, give their datasets the attribute scale_factor = 1"
        raise FormatError(f"has none of {', '.join(PACKING)}, which mask_and_scale applies; {cure}", **context)
    packing = Packing.of(dataset, field.dtype)
    if np.dtype(field.dtype or float).kind in "iu" and (packing.scale % 1 or packing.offset % 1):
        has = f"{path}:{name} has scale_factor {packing.scale:g} and add_offset {packing.offset:g}"
        what = f"{field.dtype} holds no fractions, but {has}; give float32, or leave out dtype"
        raise ConfigError(what, f"{where}.dtype")
    return packing


def numbered_spec(
    coded: Coded, field: Field, row: FieldSpec, stored: StoredDataset, where: str
) -> tuple[Numbering | None, FieldSpec]:
    """The numbering of whole numbers, None for other values; and the field in a batch."""
    if row.dtype.kind not in "iub":
        if field.classes is None and field.names is None:
            return None, delivered_spec(field, row, where)
        if field.dtype is None or np.dtype(field.dtype).kind not in "iu":
            what = f"{stored} holds {row.dtype}, not classes; if these are whole numbers, give dtype='int64' too"
            raise ConfigError(what, f"{where}.{'names' if field.names else 'classes'}")
        row = dataclasses.replace(row, dtype=np.dtype(np.int64))
    if field.null != "error":
        coded = dataclasses.replace(coded, missing=(*coded.missing, *{-1, IGNORED}.difference(coded.names)))
    numbering, ignored, whole = Numbering.of(coded, field.classes, row.dtype), field.null == "ignore", row.dtype != bool
    if ignored and not whole and (field.dtype is None or np.dtype(field.dtype) == bool):
        raise ConfigError("bool has no value for ignore; set null='drop', or dtype='int64'", f"{where}.null")
    least, most = (np.iinfo(row.dtype).min, np.iinfo(row.dtype).max) if whole else (0, 1)
    largest = len(numbering.classes) - 1 if whole else max(numbering.targets.values(), default=0)
    dtype = row.dtype if largest <= most and (least < 0 or not ignored) else np.dtype(np.int64)
    meanings = () if numbering.classes else tuple(sorted(numbering.names.items()))
    row = dataclasses.replace(row, dtype=dtype, classes=numbering.classes, meanings=meanings)
    spec = delivered_spec(field, row, where)
    # On a device, −100 would not become NaN.
    return numbering, dataclasses.replace(spec, narrow=None) if ignored and spec.dtype.kind == "f" else spec


def _stacked(key: str, layout: str | None, found: list[Fields]) -> Fields:
    fields = [each[key] for each in found]
    first, axis = fields[0], int(fields[0].window.axis)
    for each in fields:
        if not isinstance(each.stored, StoredDataset | StoredPatches) or each.text:
            raise ConfigError(f"{each.located} does not hold numbers, as channels do; leave it out", f"fields.{key}")
        if each.spec.channel is not None:
            raise ConfigError(f"{layout!r} for {key}: the datasets are its channels; give C another letter", "layout")
        mine, other = (f"{one.rows} rows of {one.spec}" for one in (each, first))
        if mine != other:
            has = f"{each.located} has {mine}, but {first.located} has {other}"
            what = f"fields.{key}: {has}; channels must be alike, in type too, which dtype= chooses"
            raise FormatError(what, file=each.located.path, dataset=each.located.name)
    narrow = first.spec.narrow if len({each.spec.narrow for each in fields}) == 1 else None
    shape = (*first.spec.shape[:axis], len(fields), *first.spec.shape[axis:])
    spec = dataclasses.replace(first.spec, shape=shape, narrow=narrow, classes=(), meanings=())
    keys = {each.spec.columns: each.spec.columns.rpartition("~") for each in fields}
    if len(keys) > 1 and "" not in keys:  # a channel without names is not compared
        same, order = ("+".join(each[place] for each in keys.values()) for place in (0, 2))
        spec = dataclasses.replace(spec, columns=f"{same}~{order}" if same.strip("+") else order)
    spec = dataclasses.replace(spec, channel=0, lead=0) if first.patches else spec
    # The (compressed) field with the largest chunks stands for all channels when samples are grouped by chunks.
    most = max(fields, key=lambda each: (each.values.filtered, each.values.chunk_rows))
    return {**found[0], key: dataclasses.replace(most, spec=spec, conversion=None, packed=(), channels=tuple(fields))}


def numbered_field(stored: StoredDataset, field: Field, where: str) -> StoredField:
    spec = delivered_spec(field, stored.spec, where)
    conversion = Conversion(stored, null=field.null) if spec.dtype != stored.dtype else None
    return StoredField(stored, spec, conversion=conversion, text=field)


def _inspect_images(group: OpenGroup, key: str, field: Field, layout: str | None) -> StoredField:
    if layout is not None:
        raise ConfigError(f"{layout!r} for {key}: images have their channels first; leave it out", "layout")
    images = encoded.inspect_images(group, field)
    spec = images.decoder.spec
    if field.rows is not None:
        spec = FieldSpec((field.rows, *spec.shape), spec.dtype, channel=3, lead=1)
    return StoredField(images, spec)


def _patches(group: OpenGroup, key: str, field: Field, stored: StoredPatches) -> Fields:
    spec = delivered_spec(field, stored.spec, f"fields.{key}")
    cast = Conversion(stored) if spec.dtype != stored.spec.dtype else None
    place: Any = "points" if field.points else "origin"
    where = FieldSpec((field.points or len(stored.size),), np.dtype(np.int64))
    found = {key: StoredField(stored, spec, conversion=cast, raw=categories.packing_of(group, stored.name))}
    found[f"{key}_{place}"] = StoredField(dataclasses.replace(stored, holds=place), where)
    if field.pad:
        mask = FieldSpec(stored.size[: stored.spec.masked], np.dtype(bool))
        found[mask_key(key)] = StoredField(dataclasses.replace(stored, holds="mask"), mask)
    return found


def _with_window(key: str, field: Field, of_key: StoredField) -> Fields:
    whole, edge, backward = Episodes.whole(of_key.rows), field.per == "edge", field.direction == "backward"
    window = Window(field.steps, field.rows is not None, field.pad, whole, edge=edge)
    if field.seconds:
        window = TimedWindow(**vars(window), time=str(field.time), backward=backward, tolerance=field.tolerance)
    spec = dataclasses.replace(of_key.spec, masked=bool(field.pad))
    found = {key: dataclasses.replace(of_key, spec=spec, window=window)}
    if field.pad:
        spec = FieldSpec((len(field.steps),), np.dtype(bool))
        found[mask_key(key)] = StoredField(of_key.values, spec, window, mask=True)
    return found


def _inspect_ranges(
    group: OpenGroup, key: str, field: Field, of: encoded.Delimited | np.dtype[Any] | str, *, layout: str | None
) -> Fields:
    """A field of sparse rows, or of samples of variable length: ranges of a dataset, or elements in the global heap."""
    name, what = group.name(field.dataset), SPARSE[of] if isinstance(of, str) else "samples of variable length"
    holds = f"{group.path}:/{name.strip('/')}, which holds {what}"
    if layout is not None:
        raise ConfigError(f"{layout!r} for {key} does not apply to {holds}; leave it out", "layout")
    rows = [name for name in ROWS[:3] if not isinstance(getattr(field, name), str) or name == "time"]
    padding = VARIABLE if isinstance(of, str) else ()
    for option in changed(field, ("column", *rows, "lookup", "mask_and_scale", "classes", "names", "kind", *padding)):
        raise ConfigError(f"does not apply to {holds}; {left_out(option)}", f"fields.{key}.{option}")
    if isinstance(of, str):
        return padded_fields(key, field, encoded.inspect_sparse(group, name, of))
    packed = categories.packing_of(group, name)
    if isinstance(of, encoded.Delimited):
        cast = field.dtype is not None
        return padded_fields(key, field, encoded.inspect_variable(group, of, most=field.max_length, cast=cast), packed)
    return padded_fields(key, field, encoded.inspect_sequences(group, name, of, field.max_length), packed)


def in_memory(path: str, name: str, values: Array, *, rows: int = 0, names: Any = None) -> StoredDataset:
    """Values that are kept in memory: one for each row, or one for all ``rows``."""
    native = values.dtype.newbyteorder("=")
    shape, row = (rows or len(values), *values.shape[1:]), FieldSpec(values.shape[1:], native)
    return StoredDataset(path, name, shape, native, 0, row, kept=values, names=names)


def kept_field(
    stored: StoredDataset, field: Field, where: str, lacking: Any = (), names: Mapping[int, str] | None = None
) -> StoredField:
    """A field of values that are kept in memory. Rows in ``lacking`` have none."""
    values = stored.kept
    if values.dtype.kind == "S" or field.kind:
        codes, row = categories.numbered(values, field, stored, where)
        codes[[*lacking]] = IGNORED
        return numbered_field(dataclasses.replace(stored, dtype=codes.dtype, spec=row, kept=codes), field, where)
    coded = Coded(stored.name, names or categories.enumerated(values.dtype))
    numbering, spec = numbered_spec(coded, field, stored.spec, stored, where)
    convert = Conversion(stored, numbering=numbering)
    kept = convert(values.astype(stored.dtype), lambda: np.arange(len(values)), spec.dtype).astype(spec.dtype)
    return StoredField(dataclasses.replace(stored, dtype=kept.dtype, spec=spec, kept=kept), spec)


def padded_fields(key: str, field: Field, found: StoredRanges | StoredSequences, packed: Any = ()) -> Fields:
    spec = delivered_spec(field, found.spec, f"fields.{key}")
    of = found if isinstance(found, StoredRanges) else found.values
    conversion = Conversion(of) if spec.dtype != found.spec.dtype else None
    if isinstance(found, StoredRanges) and found.columns:
        return {key: StoredField(found, spec, conversion=conversion)}
    spec = dataclasses.replace(spec, padded=field.pad_side)
    lengths = in_memory(of.path, of.name, found.lengths, names=of.names)
    made = StoredField(found, spec, conversion=conversion, fill=field.fill, raw=packed)
    return {key: made, length_key(key): StoredField(lengths, lengths.spec)}


def delivered_spec(field: Field, row: FieldSpec, where: str) -> FieldSpec:
    """The field in a batch, given a row before windows and the cast."""
    shape, channel, dtype, lead = row.shape, row.channel, row.dtype, row.lead
    if field.rows is not None:
        # N, then C, then the rows of the window, then the rest as stored.
        shape = (field.rows, *shape) if channel is None else (shape[0], field.rows, *shape[1:])
        channel, lead = (None, 1) if channel is None else (channel + 1, 0)
    to = np.dtype(np.int64) if not shape and dtype.kind in "iu" else dtype
    if field.dtype is not None:
        to = np.dtype(field.dtype)
        if dtype.kind == "c" and to.kind != "c":
            raise ConfigError(f"{to} cannot hold complex numbers; give a complex type", f"{where}.dtype")
    if not _holds(to, field.fill):
        raise ConfigError(f"{field.fill!r} is not a value of {to}; give another dtype or value", f"{where}.fill")
    # Only if no value can be lost, since a cast on the device is not checked.
    narrows = dtype.itemsize < to.itemsize and np.can_cast(dtype, to, "safe") and _holds(dtype, field.fill)
    narrow = dtype if narrows and field.dtype is not None else None
    concat = row.ragged and field.ragged == "concat"
    return dataclasses.replace(row, shape=shape, dtype=to, channel=channel, narrow=narrow, lead=lead, concat=concat)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind in "fc":
        return not value or np.can_cast(np.min_scalar_type(float(value)), dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    return float(value).is_integer() and (limits.min <= value <= limits.max if limits else value in (0, 1))


def at_same_places(fields: Fields) -> Fields:
    """The fields, all with patches, or all with blocks of points, at the same places; or without such fields."""
    every = [(key, each.located) for key, field in fields.items() for each in field.channels or (field,)]
    first: Any = next((stored for _, stored in every if isinstance(stored, StoredPatches)), None)
    for key, stored in every if first else ():
        if not isinstance(stored, StoredPatches):
            what = "has rows, but other fields have patches of a volume; give an attribute or a column of table="
            raise ConfigError(f"{stored} {what}", f"fields.{key}")
        mine, other = (each.described for each in (stored, first))
        if mine != other:
            cure = "all fields show the same places: give one patch and stride, and resample volumes of other shapes"
            raise stored.error(FormatError, f"has {mine}, but {first} has {other}; {cure}")
    if first and first.scattered and first.drawn is not None and first.shape[0] > first.size[0]:
        filtered = [dataset.chunk_rows for each in fields.values() for dataset in each.datasets if dataset.filtered]
        with_blocks = functools.partial(dataclasses.replace, block=min(max(filtered or [POINTS]), first.shape[0]))
        return {key: field.changed("stored", with_blocks) for key, field in fields.items()}
    return fields


def with_centres(group: OpenGroup, fields: Fields, foreground: Mapping[str, Mapping[int, float]]) -> Fields:
    for key, shares in foreground.items():
        field, patches = fields[key], fields[key].patches
        if patches is None or field.channels or patches.channel is not None or patches.values.dtype.kind not in "biu":
            what = f"{field.located} holds no whole numbers, one for each element; name a field of classes"
            raise ConfigError(what, f"foreground.{key}")
        centres = tuple(zip(shares.values(), elements_of(group, patches, list(shares)), strict=True))
        at_centres = functools.partial(dataclasses.replace, centres=centres)
        fields = {name: each.changed("stored", at_centres) for name, each in fields.items()}
    return fields


def steps_of(path: str, fields: Mapping[str, StoredField], axis: int | None) -> Steps | None:
    """The episodes, and the steps of each, that all fields have, as a dataset of two axes has them."""
    if axis is None:
        return None
    every = [(field.window.edge, each) for field in fields.values() for each in field.channels or (field,)]
    found = [(edge, each.values.name, each.steps) for edge, each in every if each.steps]
    shapes = {(steps.shape[steps.swapped], steps.length - edge) for edge, _, steps in found}
    if len(shapes) > 1:
        listed = {f"{name} has {steps.shape[steps.swapped]} of {steps.length} steps": None for _, name, steps in found}
        what = f"{path}: the fields have different episodes: {', '.join(listed)}"
        cure = "a dataset with one value for each episode is Field(…, per='episode'), with a value before each step "
        cure += "and one behind the last per='edge'; if the steps are on another axis, layout= names it N"
        raise FormatError(f"{what}; {cure}", file=path)
    shape = shapes.pop()[:: -1 if axis else 1]
    return Steps(shape, shape, swapped=axis > 0)


def named_episodes(group: OpenGroup, fields: Mapping[str, Field], given: Any, rows: int) -> tuple[Episodes | None, Any]:
    """The episodes of a part, and the id of each, or its number; no ids if a field or dataset has their name."""
    if given is None:
        return None, None
    episodes, ids = encoded.episodes_of(group, given, rows)
    named = "episode" in fields or isinstance(group.node(group.name("episode")), h5py.Dataset)
    return episodes, np.arange(len(episodes.begins)) if ids is None and not named else ids


def placed(
    group: OpenGroup, given: Mapping[str, Field], fields: Fields, rows: int, episodes: Episodes | None
) -> Fields:
    """The fields with windows that keep to episodes, and know the times of rows and samples."""
    edges = (episodes or Episodes.whole(rows)).with_edges(apart=group.steps is not None)
    for located in (field.located for field in fields.values() if field.window.edge and not group.steps):
        if located.rows != (count := int(edges.ends[-1])):
            need = f"needs {count}, one more than rows in each part or episode, of {rows} rows in all"
            raise located.error(FormatError, f"has {located.rows} values, but per='edge' {need}")
    clock = _clock_of_samples([field for key, field in given.items() if key in fields])
    read = functools.cache(functools.partial(encoded.times_of, group, episodes))
    for field in given.values():
        if field.time and not field.seconds:
            read(field.time, rows)

    @functools.cache  # a mask shares its field's
    def in_episodes(window: Window) -> Window:
        if window.edge and episodes:
            anchors = np.arange(rows)
            at = anchors, anchors + (edges.begins - episodes.begins)[episodes.number(anchors)]
            return dataclasses.replace(window, episodes=edges, at=at)
        if isinstance(window, TimedWindow):
            stored = read(window.time, int(window.episodes.ends[-1])), read(clock or window.time, rows)
            return _timed(window, *stored, episodes)
        return window if episodes is None else dataclasses.replace(window, episodes=episodes)

    return {key: each.changed("window", in_episodes) for key, each in fields.items()}


def _clock_of_samples(fields: Sequence[Field]) -> str | None:
    """The dataset of the samples' times; None if each row of the fields in seconds is a sample's."""
    others, own = [each for each in fields if not each.seconds], [each.time for each in fields if each.seconds]
    clock = next((each.time for each in others if each.time), None)
    if clock is None and len(set(own)) > 1:
        if others:
            what = f"fields in seconds have the times {' and '.join(sorted(map(str, set(own))))}"
            raise ConfigError(f"{what}; name the times of the samples: {others[0]!r} needs time=NAME", "fields")
        clock = own[0]
    return clock


def _timed(window: TimedWindow, times: Array, own: Array, episodes: Episodes | None) -> Window:
    """A window with the times of its rows, and of the anchors."""
    of, count, rows = episodes or window.episodes, len(times), len(own)
    if episodes and (count != rows or (np.append(0, of.ends) != np.append(of.begins, rows)).any()):
        what = f"{window.time} has {count} times for {rows} rows; with episodes=, each row needs a time and an episode"
        raise ConfigError(f"{what}, or write a group or file for each episode", "episodes")
    # Far from 0, the times themselves are rounded, in float32 to more than a thousandth of the interval.
    rounded = max(float(np.spacing(np.abs(each).max())) for each in (times, own))
    times, own = (each.astype(np.float64, copy=False) for each in (times, own))
    number, intervals = of.number(np.arange(count)), np.diff(times)
    if (intervals <= 0).any():  # episodes that begin at 0 are put one after the other
        apart = number * (np.ptp(np.concatenate([times, own])) + 1)
        times, own = times + apart, own + apart
    within = intervals[np.diff(number) == 0]
    interval = float(np.median(within)) if len(within) else 0.0
    limit = interval / (1 if window.backward else 2) if window.tolerance is None else window.tolerance
    slack = min(max(interval / 1000, rounded), interval / 4)
    return dataclasses.replace(window, episodes=of, times=times, anchor_times=own, slack=slack, tolerance=limit)
