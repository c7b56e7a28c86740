"""Compares every value of a packed file with its input."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.tools.pack.plan import Piece, Plan, read


class DifferenceError(CorruptError):
    """A packed value differs from the input."""


def packed_source(path: str, plan: Plan) -> HDF5Source:
    return HDF5Source(path, {field.key: field.source_field for field in plan.fields}, **plan.source_options)


def check_whole(source: Source, packed: HDF5Source, columns: Iterable[str]) -> None:
    """Check that batches of both look alike, and that columns are the same."""
    for key, field in source.spec.fields.items():
        other = packed.spec[key]
        if (field.shape, _delivered(field), field.classes) != (other.shape, other.dtype, other.classes):
            raise DifferenceError(f"{packed.name}: {key} is {other} instead of {field}", dataset=key)
    for name in columns:
        _check(source, name, column(source, name), column(packed, name), np.arange(len(source)))


def check_piece(piece: Piece, source: Source, packed: HDF5Source) -> None:
    """Compare all values of a piece, byte by byte, so that NaN equals the same NaN."""
    values, others = read(source, piece.samples), read(packed, piece.samples)
    for key, field in source.spec.fields.items():
        _check(source, key, values.pop(key).astype(_delivered(field), copy=False), others.pop(key), piece.samples)


def column(source: Source, name: str) -> Array:
    """A column as it is stored: texts as text, missing ones as empty."""
    values = source.column(name)
    if values.dtype.kind not in "OUS":
        return values
    return np.array(["" if value is None else str(value) for value in values.tolist()], object)


def _delivered(field: FieldSpec) -> np.dtype[np.generic]:
    """The type in which `HDF5Source` delivers the values of a field."""
    return np.dtype(np.int64) if not field.shape and field.dtype.kind in "iu" else field.dtype


def _check(source: Source, key: str, expected: Array, found: Array, samples: Indices) -> None:
    if expected.dtype != object:
        found = found.astype(expected.dtype, copy=False)
        expected, found = (
            np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(len(samples), -1)
            for each in (expected, found)
        )
    if np.array_equal(expected, found):
        return
    row = int((expected != found).reshape(len(samples), -1).any(axis=1).argmax())
    place = source.locate(source.ids(samples[row : row + 1]))[0]
    raise DifferenceError(
        f"{key}, sample {samples[row]} ({getattr(place, 'path', None) or place.file}, row {place.row}): the packed "
        "value differs from the input; did the input change meanwhile? Pack it again, and check memory and disk",
        file=place.file,
        dataset=key,
        row=place.row,
        sample_id=int(samples[row]),
    )
