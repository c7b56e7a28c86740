"""Compares every value of a packed file with its input."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.tools.pack.pieces import read
from lit_async_data.tools.pack.planning.plan import PARTS, Piece, Plan


class DifferenceError(CorruptError):
    """A packed value differs from the input."""


def packed_source(path: str, plan: Plan) -> HDF5Source:
    """The source that reads a packed file."""
    return HDF5Source(
        path,
        {field.key: field.field for field in plan.fields},
        layout={field.key: field.layout for field in plan.fields if field.layout is not None},
        group=f"{PARTS}/*" if plan.sections[0].group else None,
        index_cache=False,
    )


def check_fields(source: Source, packed: HDF5Source) -> None:
    """Check that batches of both look alike.

    Raises:
        DifferenceError: A field differs.
    """
    if len(source) != len(packed):
        raise DifferenceError(f"{packed.name}: has {len(packed)} samples instead of {len(source)}")
    for key, field in source.spec.fields.items():
        other = packed.spec[key]
        if (field.shape, _delivered(field), field.classes) != (other.shape, other.dtype, other.classes):
            raise DifferenceError(f"{packed.name}: {key} is {other} instead of {field}", dataset=key)


def compare(piece: Piece, source: Source, packed: HDF5Source) -> None:
    """Compare all values of a piece, byte by byte, so that NaN equals the same NaN.

    Raises:
        DifferenceError: A value differs; names the dataset and the sample.
        SourceError: A sample of either cannot be read.
    """
    samples, values = read(source, piece)
    _, others = read(packed, piece)
    for key, field in source.spec.fields.items():
        expected = values.pop(key).astype(_delivered(field), copy=False)
        wrong = _differing(expected, others.pop(key))
        if len(wrong):
            raise _difference(source, key, samples[wrong])


def check_columns(source: Source, packed: HDF5Source, columns: Iterable[str]) -> None:
    """Compare columns.

    Raises:
        DifferenceError: A value differs; names the column and the sample.
    """
    for name in columns:
        expected, found = source.column(name), packed.column(name)
        if expected.dtype.kind in "OUS":
            expected = np.array(["" if value is None else str(value) for value in expected.tolist()], object)
            wrong = np.flatnonzero(expected != found)
        else:
            wrong = _differing(expected, found.astype(expected.dtype, copy=False))
        if len(wrong):
            raise _difference(source, name, wrong)


def _delivered(field: FieldSpec) -> np.dtype[np.generic]:
    """The type in which `HDF5Source` delivers the values of a field."""
    return np.dtype(np.int64) if not field.shape and field.dtype.kind in "iu" else field.dtype


def _differing(one: Array, other: Array) -> Indices:
    """The rows in which two arrays differ in any bit."""
    rows = len(one)
    first, second = (np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(rows, -1) for each in (one, other))
    if first.shape != second.shape:
        return np.arange(rows)
    return np.flatnonzero((first != second).any(axis=1)) if not np.array_equal(first, second) else np.arange(0)


def _difference(source: Source, key: str, samples: Indices) -> DifferenceError:
    place = source.locate(source.ids(samples[:1]))[0]
    more = f", and {len(samples) - 1} more near it" if len(samples) > 1 else ""
    return DifferenceError(
        f"{key}, sample {samples[0]} ({getattr(place, 'path', None) or place.file}, row {place.row}){more}: the packed "
        "value differs from the input; did the input change while it was packed? Pack it again; if it happens again, "
        "check the memory and the disk",
        file=place.file,
        dataset=key,
        row=place.row,
        sample_id=int(samples[0]),
    )
