"""Attributes as fields: one value for all rows of a part, or for each group that is a sample; kept in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import TENSOR_TYPES, FieldSpec
from lit_async_data.errors import FormatError, MissingError
from lit_async_data.sources.hdf5.parts.stored_field import StoredField, delivered_spec, numbered_field, numbered_row
from lit_async_data.sources.hdf5.schema.categories import Coded, enumerated
from lit_async_data.sources.hdf5.schema.conversion import Conversion
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.schema.texts import numbered


def value_of(node: Any, field: Field, path: str, name: str) -> npt.NDArray[Any]:
    """The value of an attribute of an object of libhdf5, as an array without axes: a number, or bytes of text."""
    import h5py

    where = f"{path}:/{name}: its attribute {field.attr!r}"
    context: dict[str, Any] = {"file": path, "dataset": name}
    try:
        stored = h5py.h5a.open(node, str(field.attr).encode())
    except KeyError:
        raise MissingError(
            f"{where} is missing; write it, or choose by their names those that have it", **context
        ) from None
    values = np.empty(stored.shape, stored.dtype)
    stored.read(values)
    value: Any = values.reshape(-1)[0] if values.size == 1 else None
    if isinstance(value, bytes | str):
        return np.array(value if isinstance(value, bytes) else value.encode(errors="surrogateescape"))
    if value is None or (values.dtype.kind, values.dtype.itemsize) not in TENSOR_TYPES:
        raise FormatError(f"{where} holds {values.dtype} {values.shape}, not one number; leave it out", **context)
    return values.reshape(())


def kept_field(
    path: str, name: str, values: npt.NDArray[Any], field: Field, *, rows: int, where: str, names: Any = None
) -> StoredField:
    """A field of values that are kept in memory: one for each row, or one for all."""
    native = values.dtype.newbyteorder("=")
    stored = StoredDataset(
        path, name, (rows,), native, 0, FieldSpec((), native), None, 1, filtered=False, kept=values, names=names
    )
    if native.kind == "S" or field.kind:
        codes, row = numbered(values, field, stored, where)
        return numbered_field(dataclasses.replace(stored, dtype=codes.dtype, spec=row, kept=codes), field, where)
    numbering, row = numbered_row(Coded(name, enumerated(values.dtype)), field, stored.spec, stored, where)
    spec = delivered_spec(field, row, where)
    convert = Conversion(path, name, numbering=numbering, names=names)
    kept = convert(values.astype(native), np.arange(len(values)), spec.dtype).astype(spec.dtype)
    return StoredField(dataclasses.replace(stored, dtype=kept.dtype, spec=spec, kept=kept), spec)


def inspect_attribute(group: OpenGroup, key: str, field: Field, rows: int) -> StoredField:
    """The attribute of the group of a part, or of a dataset in it, as a field of all rows."""
    name = group.name(field.dataset) if field.dataset else group.group
    node = group.node(name)
    if node is None:
        raise MissingError(f"{group.path}: has no {name!r}; check the name", file=group.path, dataset=name)
    value = value_of(node.id, field, group.path, name.strip("/"))
    label = f"{name.strip('/')}@{field.attr}"
    return kept_field(group.path, label, value.reshape(1), field, rows=rows, where=f"fields.{key}")
