"""`StoredField`: the dataset, windows and conversion of a field of a part; `WindowStarts`: the row of each sample."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec, length_key, mask_key
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.schema import encoded
from lit_async_data.sources.hdf5.schema.categories import (
    PACKING,
    Coded,
    Conversion,
    Numbering,
    Packing,
    find_coded,
    inspect_texts,
    is_numbered,
)
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredRanges, StoredSequences
from lit_async_data.sources.hdf5.schema.field import VARIABLE, Field, changed
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import path_of

Span = tuple[int, int]
# The largest size of a lookup table. One per file is kept in memory.
TABLE_BYTES = 256 * 2**20
LENGTH = FieldSpec((), np.dtype(np.int64))  # the field of lengths
RANGES = {"csr": "sparse rows", "csc": "a sparse matrix", "variable": "samples of variable length"}


@dataclasses.dataclass(frozen=True, eq=False)
class WindowStarts:
    """The anchors of samples: at equal steps, or chosen by the user."""

    first: int
    stride: int
    count: int
    chosen: Indices | None = None

    @classmethod
    def within(cls, rows: int, spans: Sequence[Span], stride: int) -> WindowStarts:
        """The anchors whose windows, one span for each field, lie inside a part."""
        first, last = anchor_range(rows, spans)
        return cls(first, stride, max((last - first) // stride + 1, 0))

    @classmethod
    def at(cls, chosen: Indices) -> WindowStarts:
        return cls(0, 1, len(chosen), chosen)

    def rows(self, samples: Indices) -> Indices:
        if self.chosen is not None:
            return self.chosen[samples]
        if self.first == 0 and self.stride == 1:
            return samples
        return self.first + samples * self.stride

    def fingerprint(self, rows: int) -> int:
        """Differs between choices of anchors; 0 if every row is an anchor."""
        if self.chosen is not None:
            return zlib.crc32(self.chosen.tobytes()) + 1
        whole = (self.first, self.stride, self.count) == (0, 1, rows)
        return 0 if whole else zlib.crc32(f"{self.first} {self.stride} {self.count}".encode()) + 1

    def overlap(self, length: int) -> int:
        """The largest number of later samples that share rows with a sample, if each reads ``length`` rows."""
        if self.chosen is None:
            return min(-(-length // self.stride), self.count) - 1
        if (np.diff(self.chosen) >= length).all():
            return 0  # the usual case; this test is much faster than the next lines
        ordered = np.sort(self.chosen)
        nearest = np.searchsorted(ordered, ordered + length) - np.arange(self.count)
        most = int(nearest.max()) - 1
        # Unordered, any two samples may share rows.
        return self.count - 1 if most and (np.diff(self.chosen) < 0).any() else most


def anchor_range(rows: int, spans: Sequence[Span]) -> Span:
    """The first and the last anchor whose windows lie inside a part. If no anchor does, the last is smaller."""
    return max(0, *(-begin for begin, _ in spans)), rows - max(1, *(end for _, end in spans))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredField:
    stored: StoredDataset | StoredRanges
    spec: FieldSpec
    span: Span = (0, 1)  # first row of a sample and the end, relative to its anchor
    conversion: Conversion | None = None
    windowed: bool = False  # whether the rows of a sample have an axis of their own
    # How windows that reach beyond the part are filled; None if there are none.
    pad: Literal["last", "zero"] | None = None
    lengths: Indices | None = None  # the values of a field of lengths; None for other fields
    mask_of: Span | None = None  # the window whose real rows a mask marks; None for other fields
    packed: tuple[str, ...] = ()  # NetCDF attributes of packed values that are delivered as stored
    step: int = 1  # rows from one row of a window to the next
    images: StoredImages | None = None  # None if rows are no encoded images
    # Rows of variable length that are no ranges of one dataset; None for other rows.
    sequences: StoredSequences | None = None
    fill: float = 0  # padding of samples of variable length
    text: Field | None = None  # the user's field, if values are numbers of text; else None
    channels: tuple[StoredField, ...] = ()  # a field for each channel; empty if the field is one dataset
    # If the field has a value for each anchor: the anchors, ascending, and the row of each value; else None.
    at: tuple[Indices, Indices] | None = None
    left: bool = False  # whether samples of variable length are padded on the left

    @property
    def plain(self) -> bool:
        return self.span == (0, 1) and self.conversion is None and not (self.windowed or self.fill or self.left)

    def lengths_of(self, rows: Indices) -> Indices:
        if self.sequences is not None:
            return self.sequences.lengths[rows]
        assert isinstance(self.stored, StoredRanges)
        return self.stored.places(rows)[1]

    @property
    def texts(self) -> tuple[str, ...]:
        return self.spec.texts or self.spec.classes

    @property
    def values(self) -> StoredDataset:
        return self.stored.values if isinstance(self.stored, StoredRanges) else self.stored

    @property
    def datasets(self) -> list[StoredDataset]:
        if self.channels:
            return [dataset for each in self.channels for dataset in each.datasets]
        columns = self.stored.columns if isinstance(self.stored, StoredRanges) else None
        return [self.values] if columns is None else [self.values, columns]

    @property
    def inside(self) -> Span:
        return (0, 1) if self.pad else self.span

    @property
    def reach(self) -> Span:
        """The rows that are read around an anchor. With ``pad``, a window may be moved into the part."""
        begin, end = self.span
        return (min(begin, 1 + begin - end), max(end, end - begin)) if self.pad else self.span

    @property
    def length(self) -> int:
        length = self.span[1] - self.span[0]
        return min(length, self.stored.rows) if self.pad else length

    def own(self, anchors: Indices) -> Indices:
        return anchors if self.at is None else self.at[1][np.searchsorted(self.at[0], anchors)]

    def begins(self, anchors: Indices) -> Indices:
        """The first row that is read for each sample. Windows that reach beyond the part are moved into it."""
        begins = anchors + self.span[0]
        return np.clip(begins, 0, self.stored.rows - self.length) if self.pad else begins

    def window_rows(self, anchors: Indices) -> Indices:
        """The rows of the windows of samples, shape (n, window). Beyond the part, the nearest row repeats."""
        rows: Indices = np.clip(anchors[:, None] + np.arange(*self.span, self.step), 0, self.stored.rows - 1)
        return rows

    def extent(self, anchors: Indices) -> tuple[Indices, Indices]:
        """The first and the last row, or element, that each sample reads."""
        first = self.begins(self.own(anchors))
        last = first + self.length - 1
        if isinstance(self.stored, StoredRanges):
            first, counts = self.stored.places(first)
            last = first + np.maximum(counts - 1, 0)
        return first, last


def inspect_field(group: OpenGroup, key: str, field: Field, layout: str | None) -> dict[str, StoredField]:
    """A field by its key. Padded samples add a field of their lengths, padded windows a field of their mask."""
    name, where = group.name(field.dataset), f"fields.{key}"
    if field.stacked:
        return _stacked(key, layout, [inspect_field(group, key, each, layout) for each in field.stacked])
    if field.decode:
        return _with_window(key, field, _inspect_images(group, key, field, layout))
    node = group.node(name)
    kind = encoded.encoding(node) if isinstance(node, h5py.Group) else ""
    parts = encoded.delimited(group, field)
    elements = encoded.element_type(node, field) if isinstance(node, h5py.Dataset) and not parts else None
    if parts or elements is not None or kind in RANGES:
        if layout is not None:
            holds = RANGES.get(kind, RANGES["variable"])
            raise ConfigError(f"{layout!r} for {key}: {group.path}:/{name.strip('/')} holds {holds}", "layout")
        return _inspect_ranges(group, key, field, kind, parts or elements)
    if is_numbered(group, name, field):
        return _with_window(key, field, numbered_field(inspect_texts(group, name, field, layout, where), field, where))
    return _with_window(key, field, _inspect_numbers(group, field, layout, where))


def _inspect_numbers(group: OpenGroup, field: Field, layout: str | None, where: str) -> StoredField:
    coded = find_coded(group, group.name(field.dataset))
    _check_applicable(group, coded, field, where)
    looked_up = _looked_up(group, coded.name, field, layout, where)
    row = (looked_up.member or looked_up).spec
    if field.column is not None:
        row = _column_of(row, field.column, looked_up, where)
    stored, table = looked_up, None
    if field.lookup is not None:
        stored = _row_numbers(group, field.lookup, where)
        table = _lookup_table(group, looked_up, field.column, where)
    dataset = group.node(looked_up.name)
    packing = _packing(dataset, field, where) if field.mask_and_scale else None
    native = ((stored.member or stored).dtype if table is None else table.dtype).newbyteorder("=")
    row = dataclasses.replace(row, dtype=packing.dtype if packing else native)
    numbering, row = numbered_row(coded, field, row, stored, where)
    conversion = Conversion(
        stored,
        column=field.column if table is None else None,
        table=table,
        packing=packing,
        numbering=numbering,
        mask=coded.mask,
        null=field.null,
        last_row=None if field.rows is None else stored.rows - 1,
        step=field.steps.step,
    )
    spec = delivered_spec(field, row, where)
    # Windows are read in the stored type, single integers as int64.
    cast = spec.dtype != (stored.spec.dtype if field.rows is None else stored.dtype.newbyteorder("="))
    numbered = numbering is not None and bool(numbering.targets)
    steps = stored.member, table, field.column, packing, coded.mask
    converted = cast or numbered or any(step is not None for step in steps)
    as_stored = not (packing or looked_up.member or coded.names)
    packed = tuple(name for name in PACKING if as_stored and name in dataset.attrs)
    return StoredField(stored, spec, conversion=conversion if converted else None, packed=packed)


def _check_applicable(group: OpenGroup, coded: Coded, field: Field, where: str) -> None:
    """Refuse options of samples of variable length for other samples."""
    for option in changed(field, VARIABLE):
        group.inspect_dataset(*group.split(coded.name))  # raises if the dataset is missing
        what = f"{group.path}:/{coded.name.strip('/')} holds no samples of variable length; leave it out"
        raise ConfigError(what, f"{where}.{option}")


def _looked_up(group: OpenGroup, name: str, field: Field, layout: str | None, where: str) -> StoredDataset:
    try:
        return group.inspect_dataset(*group.split(name), layout, cast=field.dtype is not None)
    except NoSamplesError as error:
        if field.lookup is None:
            raise
        raise FormatError(f"{where}.lookup: {error}", file=error.file, dataset=error.dataset) from error


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


def _lookup_table(group: OpenGroup, stored: StoredDataset, column: int | None, where: str) -> npt.NDArray[Any]:
    """A lookup table in memory. All groups of a file share it."""
    key = str(stored), column, stored.axis
    if key not in group.tables:
        if stored.nbytes > TABLE_BYTES:
            what = f"{stored} takes {stored.nbytes:,} bytes, but a lookup table is kept in memory and may take"
            cure = "store the values of each row as a dataset"
            raise ConfigError(f"{what} {TABLE_BYTES:,} at most; {cure}", f"{where}.lookup")
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


def numbered_row(
    coded: Coded, field: Field, row: FieldSpec, stored: StoredDataset, where: str
) -> tuple[Numbering | None, FieldSpec]:
    """The numbering of whole numbers, None for other values; and the delivered row."""
    if row.dtype.kind not in "iub":
        if field.classes is None:
            return None, row
        raise ConfigError(f"{stored} holds {row.dtype}, not classes; leave it out", f"{where}.classes")
    numbering, ignored, whole = Numbering.of(coded, field.classes, row.dtype), field.null == "ignore", row.dtype != bool
    if ignored and not whole and field.dtype in (None, bool):
        raise ConfigError("bool has no value for ignore; set null='drop', or dtype='int64'", f"{where}.null")
    least, most = (np.iinfo(row.dtype).min, np.iinfo(row.dtype).max) if whole else (0, 1)
    largest = len(numbering.classes) - 1 if whole else max(numbering.targets.values(), default=0)
    dtype = row.dtype if largest <= most and (least < 0 or not ignored) else np.dtype(np.int64)
    meanings = () if numbering.classes else tuple(sorted(numbering.names.items()))
    return numbering, dataclasses.replace(row, dtype=dtype, classes=numbering.classes, meanings=meanings)


def _stacked(key: str, layout: str | None, found: list[dict[str, StoredField]]) -> dict[str, StoredField]:
    fields = [each[key] for each in found]
    first, axis = fields[0], int(fields[0].windowed)
    for each in fields:
        if isinstance(each.stored, StoredRanges) or each.sequences or each.text:
            raise ConfigError(f"{each.stored} does not hold numbers, as channels do; leave it out", f"fields.{key}")
        if each.spec.channel is not None:
            raise ConfigError(f"{layout!r} for {key}: the datasets are its channels; give C another letter", "layout")
        mine, other = (f"{one.stored.rows} rows of {one.spec}" for one in (each, first))
        if mine != other:
            has = f"{each.stored} has {mine}, but {first.stored} has {other}"
            what = f"fields.{key}: {has}; channels must be alike, in type too, which dtype= chooses"
            raise FormatError(what, file=each.stored.path, dataset=each.stored.name)
    shape = first.spec.shape
    narrow = first.spec.narrow if len({each.spec.narrow for each in fields}) == 1 else None
    shape = (*shape[:axis], len(fields), *shape[axis:])
    spec = dataclasses.replace(first.spec, shape=shape, narrow=narrow, classes=(), meanings=())
    # The (compressed) field with the largest chunks stands for all channels when samples are grouped by chunks.
    most = max(fields, key=lambda each: (each.values.filtered, each.values.chunk_rows))
    stacked = dataclasses.replace(most, spec=spec, conversion=None, packed=(), channels=tuple(fields))
    return {**found[0], key: stacked}


def numbered_field(stored: StoredDataset, field: Field, where: str) -> StoredField:
    spec = delivered_spec(field, stored.spec, where)
    return StoredField(stored, spec, conversion=Conversion(stored) if spec.dtype != stored.dtype else None, text=field)


def _inspect_images(group: OpenGroup, key: str, field: Field, layout: str | None) -> StoredField:
    if layout is not None:
        raise ConfigError(f"{layout!r} for {key}: images have their channels first; leave it out", "layout")
    images = encoded.inspect_images(group, field)
    spec = images.decoder.spec
    if field.rows is not None:
        spec = FieldSpec((field.rows, *spec.shape), spec.dtype, channel=3, lead=1)
    return StoredField(images.rows, spec, images=images)


def _with_window(key: str, field: Field, of_key: StoredField) -> dict[str, StoredField]:
    windowed, step = field.rows is not None, field.steps.step
    spec = dataclasses.replace(of_key.spec, masked=windowed and bool(field.pad))
    window: dict[str, Any] = {"span": field.span, "windowed": windowed, "pad": field.pad, "step": step}
    found = {key: dataclasses.replace(of_key, spec=spec, **window)}
    if field.rows is not None and field.pad:
        spec = FieldSpec((field.rows,), np.dtype(bool))
        found[mask_key(key)] = StoredField(of_key.stored, spec, mask_of=field.span, step=step)
    return found


def _inspect_ranges(
    group: OpenGroup, key: str, field: Field, kind: str, of: encoded.Delimited | np.dtype[Any] | None
) -> dict[str, StoredField]:
    """A field of sparse rows, or of samples of variable length: ranges of a dataset, or elements in the global heap."""
    name, of_kind = group.name(field.dataset), RANGES.get(kind, RANGES["variable"])
    full = f"{group.path}:/{name.strip('/')}"
    padding = VARIABLE if kind in ("csr", "csc") else ()
    for option in changed(field, ("column", "window", "lookup", "mask_and_scale", "classes", "kind", *padding)):
        what = f"does not apply to {full}, which holds {of_kind}; leave it out"
        raise ConfigError(what, f"fields.{key}.{option}")
    if of is None:
        return padded_fields(key, field, encoded.inspect_sparse(group, name, kind))
    if isinstance(of, encoded.Delimited):
        return padded_fields(key, field, encoded.inspect_variable(group, of, most=field.max_length))
    return padded_fields(key, field, encoded.inspect_sequences(group, name, of, field.max_length))


def padded_fields(key: str, field: Field, found: StoredRanges | StoredSequences) -> dict[str, StoredField]:
    sequences = found if isinstance(found, StoredSequences) else None
    stored = found.rows if isinstance(found, StoredSequences) else found
    lengths = None if isinstance(found, StoredRanges) and found.columns else found.lengths
    spec = delivered_spec(field, found.spec, f"fields.{key}")
    if lengths is not None:
        spec = dataclasses.replace(spec, padded=field.pad_side)
    conversion = Conversion(stored) if spec.dtype != found.spec.dtype else None
    left = field.pad_side == "left"
    of_key = StoredField(stored, spec, conversion=conversion, sequences=sequences, fill=field.fill, left=left)
    return {key: of_key} | ({} if lengths is None else {length_key(key): StoredField(stored, LENGTH, lengths=lengths)})


def delivered_spec(field: Field, row: FieldSpec, where: str) -> FieldSpec:
    """The field in a batch, given a row before windows and the cast."""
    shape, channel, dtype, lead = row.shape, row.channel, row.dtype, 0
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
        what = f"{field.fill!r} is not a value of {to}; give another dtype, or another value"
        raise ConfigError(what, f"{where}.fill")
    # Only if no value can be lost, since a cast on the device is not checked.
    narrows = dtype.itemsize < to.itemsize and np.can_cast(dtype, to, "safe") and _holds(dtype, field.fill)
    narrow = dtype if narrows and field.dtype is not None else None
    concat = row.ragged and field.ragged == "concat"
    shaped = dataclasses.replace(row, shape=shape, dtype=to, channel=channel, narrow=narrow)
    return dataclasses.replace(shaped, lead=lead, concat=concat)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind in "fc":
        return not value or np.can_cast(np.min_scalar_type(float(value)), dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    return float(value).is_integer() and (limits.min <= value <= limits.max if limits else value in (0, 1))
