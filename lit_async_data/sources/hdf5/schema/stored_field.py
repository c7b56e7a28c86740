"""`StoredField`: one field of one part of a source: what is read for it, and what is made of that."""

from __future__ import annotations

import dataclasses
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.schema.conversion import PACKING, Conversion, Packing
from lit_async_data.sources.hdf5.schema.encoded import (
    StoredRanges,
    encoding,
    inspect_sparse,
    inspect_variable,
    names_of,
)
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.schema.window_starts import Span

# A table that a field looks values up in is kept in memory, one for each file.
TABLE_BYTES = 256 * 2**20
# What groups of these kinds hold.
RANGES = {"csr": "sparse rows", "csc": "a sparse matrix", "variable": "samples of variable length"}


@dataclasses.dataclass(frozen=True, eq=False)
class StoredField:
    """One field of one part.

    Attributes:
        stored: What is read.
        spec: As it is delivered.
        span: Rows that a sample takes, relative to its anchor: the first, and one more than the last.
        conversion: What is made of them; None where they are delivered as they are read.
        windowed: Whether the rows of a sample have an axis of their own.
        lengths: Whether not the samples are wanted, but their lengths.
        packed: Attributes that say how values are packed, where they are delivered so.
    """

    stored: StoredDataset | StoredRanges
    spec: FieldSpec
    span: Span = (0, 1)
    conversion: Conversion | None = None
    windowed: bool = False
    lengths: bool = False
    packed: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether a sample is a row as it is read."""
        return self.span == (0, 1) and self.conversion is None and not self.windowed

    @property
    def values(self) -> StoredDataset:
        """The dataset that most of what is read lies in."""
        return self.stored.values if isinstance(self.stored, StoredRanges) else self.stored

    @property
    def datasets(self) -> list[StoredDataset]:
        """The datasets that are read."""
        columns = self.stored.columns if isinstance(self.stored, StoredRanges) else None
        return [self.values] if columns is None else [self.values, columns]

    def extent(self, anchors: Indices) -> tuple[Indices, Indices]:
        """The first and the last of the rows, or elements, that samples take."""
        first, last = anchors + self.span[0], anchors + self.span[1] - 1
        if isinstance(self.stored, StoredRanges):
            first, ends = self.stored.offsets[first], self.stored.offsets[last + 1]
            last = np.maximum(ends - 1, first)
        return first, last


def inspect_field(within: OpenGroup, key: str, field: Field, layout: str | None) -> dict[str, StoredField]:
    """Look at a field of one part.

    Args:
        within: Where it lies.
        key: Its batch key.
        field: What is wanted.
        layout: Letters of the axes of its dataset.

    Returns:
        It by its key; where samples are padded, their lengths too.

    Raises:
        MissingError, FormatError, ConfigError: As `inspect_dataset`, or the field asks for what there is not.
    """
    name, classes, where = within.name(field.name), field.classes, f"fields.{key}"
    node = within.node(name)
    kind = encoding(node) if isinstance(node, h5py.Group) else ""
    if kind in ("csr", "csc", "variable"):
        if layout is not None:
            raise ConfigError(f"layout: {layout!r} for {key}: {within.path}:/{name.strip('/')} holds {RANGES[kind]}")
        return _inspect_ranges(within, key, field, kind)
    if kind == "categorical":
        categories = within.whole(f"/{name.strip('/')}/categories", "")
        name, found = f"{name.rstrip('/')}/codes", names_of(categories)
        classes = classes or found
    if field.max_length is not None:
        raise ConfigError(f"{where}.max_length: {within.path}:/{name.strip('/')} is no group of values and offsets")
    file: Any = within.file  # a name in it may be a group, a dataset or a type: `inspect_dataset` says which
    if field.lookup is None:
        table, stored = None, within.inspect_dataset(name, layout)
        row = stored.spec
        classes = classes or _enum_classes(file[name].dtype)
        if field.column is not None:
            _check_column(field.column, stored, where)
            row = FieldSpec((), row.dtype)
    else:
        looked_up, table = _lookup_table(within, name, field, layout, where)
        stored = within.inspect_dataset(within.name(field.lookup))
        _check_row_numbers(stored, where)
        row = looked_up.spec if field.column is None else FieldSpec((), table.dtype)
    dataset = file[name]
    packing = _packing(dataset, field)
    conversion = Conversion(
        within.path,
        stored.name,
        column=field.column if table is None else None,
        table=table,
        packing=packing,
        classes=None if classes is None else len(classes),
        windowed=field.rows is not None,
    )
    native = (stored if table is None else table).dtype.newbyteorder("=")
    if classes is not None and (packing or native.kind not in "iub"):
        raise ConfigError(
            f"{where}.classes: {stored} holds {native}{' values, packed' if packing else ''}, not classes"
        )
    made = dataclasses.replace(row, dtype=packing.dtype if packing else native, classes=tuple(classes or ()))
    spec = _delivered_spec(field, made, where)
    windowed = field.rows is not None
    # Windows are read as they are stored, and rows of one whole number as int64.
    read = stored.dtype.newbyteorder("=") if windowed else stored.spec.dtype
    converted = table is not None or field.column is not None or packing or classes or spec.dtype != read
    packed = () if packing else tuple(name for name in PACKING if name in dataset.attrs)
    chosen = conversion if converted else None
    return {key: StoredField(stored, spec, field.span, chosen, windowed, packed=packed)}


def _inspect_ranges(within: OpenGroup, key: str, field: Field, kind: str) -> dict[str, StoredField]:
    name, where = within.name(field.name), f"fields.{key}"
    full = f"{within.path}:/{name.strip('/')}"
    for option in (
        "column",
        "window",
        "lookup",
        "mask_and_scale",
        "classes",
        *(("max_length",) if kind != "variable" else ()),
    ):
        if getattr(field, option):
            raise ConfigError(f"{where}.{option}: {full} holds {RANGES[kind]}, which it does not apply to")
    if kind == "csc":
        raise FormatError(
            f"{full} is stored by columns (csc), so that a row lies everywhere; store it by rows: "
            "adata.X = adata.X.tocsr(); adata.write('by_rows.h5ad')",
            file=within.path,
            dataset=name,
        )
    group = within.node(name)
    if kind == "csr":
        stored = inspect_sparse(group, within.path, name, within.inspect_dataset)
        return {key: _ranged_field(stored, field, where)}
    stored = inspect_variable(group, within.path, name, within.inspect_dataset, most=field.max_length)
    lengths = StoredField(stored, FieldSpec((), np.dtype(np.int64)), lengths=True)
    return {key: _ranged_field(stored, field, where), f"{key}_length": lengths}


def _ranged_field(stored: StoredRanges, field: Field, where: str) -> StoredField:
    spec = _delivered_spec(field, stored.spec, where)
    conversion = Conversion(stored.path, stored.name) if spec.dtype != stored.spec.dtype else None
    return StoredField(stored, spec, conversion=conversion)


def _delivered_spec(field: Field, row: FieldSpec, where: str) -> FieldSpec:
    """What a field looks like in a batch, from what its rows are after everything but the cast."""
    shape, channel, dtype = row.shape, row.channel, row.dtype
    if field.rows is not None:
        # N, then C, then the rest as stored, of which the rows of the window are the first.
        shape = (field.rows, *shape) if channel is None else (shape[0], field.rows, *shape[1:])
        channel = None if channel is None else channel + 1
    to = np.dtype(np.int64) if not shape and dtype.kind in "iu" else dtype
    if field.dtype is not None:
        to = np.dtype(field.dtype)
        if dtype.kind == "c" and to.kind != "c":
            raise ConfigError(f"{where}.dtype: {to} holds no complex numbers")
    # Only where no value can be lost: a cast on the device is not checked.
    narrow = (
        dtype if dtype.itemsize < to.itemsize and np.can_cast(dtype, to, "safe") and field.dtype is not None else None
    )
    return FieldSpec(shape, to, channel, row.classes, narrow)


def _lookup_table(
    within: OpenGroup, name: str, field: Field, layout: str | None, where: str
) -> tuple[StoredDataset, npt.NDArray[Any]]:
    """The values that are looked up, in memory: one row for each number; the same for all groups of a file."""
    stored = within.inspect_dataset(name, layout)
    key = name, field.column, stored.axis
    if key not in within.tables:
        if stored.nbytes > TABLE_BYTES:
            raise ConfigError(
                f"{where}.lookup: {stored} takes {stored.nbytes:,} bytes, and a table that values are looked up in "
                f"{TABLE_BYTES:,} at most, since it is kept in memory"
            )
        table: Any = within.file[name]
        values = np.moveaxis(table[...], stored.axis, 0)
        if field.column is not None:
            _check_column(field.column, stored, where)
            values = values[:, field.column]
        within.tables[key] = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return stored, within.tables[key]


def _check_row_numbers(stored: StoredDataset, where: str) -> None:
    if len(stored.shape) != 1 or stored.dtype.kind not in "iu":
        raise FormatError(
            f"{where}.lookup: {stored} is {stored.dtype} of the shape {stored.shape}; it must have one whole number "
            "per row",
            file=stored.path,
            dataset=stored.name,
        )


def _check_column(column: int, stored: StoredDataset, where: str) -> None:
    row = stored.spec.stored_shape
    if len(row) != 1 or column >= row[0]:
        has = f"has {row[0]} columns" if len(row) == 1 else "has no columns"
        raise ConfigError(f"{where}.column: {column}, but {stored}, of shape {stored.shape}, {has}")


def _packing(dataset: h5py.Dataset, field: Field) -> Packing | None:
    if not field.mask_and_scale:
        return None
    if dataset.dtype.kind not in "iuf":
        raise FormatError(
            f"{dataset.file.filename}:{dataset.name} holds {dataset.dtype}, which mask_and_scale cannot apply to"
        )
    return Packing.of(dataset, field.dtype)


def _enum_classes(dtype: np.dtype[Any]) -> tuple[str, ...] | None:
    """The names of an enumeration, if its values go from 0 to one less than there are."""
    enum = h5py.check_enum_dtype(dtype) if dtype.kind in "iu" else None
    if not enum or sorted(enum.values()) != list(range(len(enum))):
        return None
    return tuple(sorted(enum, key=enum.__getitem__))
