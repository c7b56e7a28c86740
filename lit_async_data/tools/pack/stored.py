"""What the input stores beside values: element types and attributes, which the packed file keeps."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.conversion import PACKING
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.stored_field import StoredField
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors, open_h5py

# Attributes that say how a dataset belongs to others in its file.
LINKS = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict"}


def element_types(source: Source) -> dict[str, Any]:
    """The element type to store each field in: that of the input, where sources deliver whole numbers as int64.

    Class numbers take as few bytes as their number of classes needs.
    """
    types: dict[str, Any] = {}
    for key, field in source.spec.fields.items():
        types[key] = field.dtype
        if field.classes and not field.shape:
            types[key] = np.min_scalar_type(max(len(field.classes) - 1, 1))
        elif isinstance(source, HDF5Source) and not field.shape and field.dtype.kind in "iu":
            stored = [part.fields[key] for part in source.stored_parts]
            if all(each.plain and not each.lengths for each in stored):
                types[key] = np.result_type(*(each.values.dtype.newbyteorder("=") for each in stored))
    return types


def attributes(source: Source) -> dict[str, dict[str, Any]]:
    """The attributes of the dataset of each field, by batch key, of the first file; those that HDF5 can copy.

    Raises:
        SourceError: The file cannot be read.
    """
    if not isinstance(source, HDF5Source):
        return {}
    part = source.stored_parts[0]
    with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path) as file:
        return {
            key: _plain(file[field.stored.name], field)
            for key, field in part.fields.items()
            if isinstance(field.stored, StoredDataset) and field.mask_of is None
        }


def packed_fields(source: Source) -> set[str]:
    """The fields whose values are packed, and are written as they are, with the attributes of the first file.

    Raises:
        ConfigError: Another part is packed in another way.
        SourceError: A file cannot be read.
    """
    parts = source.stored_parts if isinstance(source, HDF5Source) else ()
    keys = {key for part in parts for key, field in part.fields.items() if field.packed}
    first: dict[str, dict[str, bytes]] = {}
    for part in parts if keys else ():
        with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path) as file:
            for key in keys:
                name = part.fields[key].stored.name
                found: Any = file[name].attrs
                packing = {each: np.asarray(found[each]).tobytes() for each in PACKING if each in found}
                if packing != first.setdefault(key, packing):
                    raise ConfigError(
                        f"fields: {key} is packed in another way in {part} than in {parts[0]}; pack unpacked values, "
                        f"in Python: pack(HDF5Source(…, {{{key!r}: Field({name!r}, mask_and_scale=True)}}), OUT)"
                    )
    return keys


def _plain(dataset: Any, field: StoredField) -> dict[str, Any]:
    unpacked = field.conversion is not None and field.conversion.packing is not None
    left_out = LINKS | (set(PACKING) if unpacked else set())
    found = {}
    for name in dataset.attrs:
        if name not in left_out:
            with contextlib.suppress(*LIBRARY_ERRORS):  # of a type that h5py cannot read
                value = dataset.attrs[name]
                if _copied(np.asarray(value)):
                    found[name] = value
    return found


def _copied(value: Array) -> bool:
    """Whether h5py can write it: numbers or text, but no reference."""
    texts = value.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in value.ravel().tolist())
    return value.dtype.kind in "biufcSU" or texts
