"""`check_chunk_lengths`: refuses chunks with too few bytes, which libhdf5 would decode.

libhdf5 does not check how many bytes a filter returns, and its scale-offset and n-bit filters do not check how many
bytes they receive. h5py returns heap memory in place of the missing bytes. So chunks are checked here before h5py
reads them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.index.records import corners_known
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE, FLETCHER32, SHUFFLE, SUM_BYTES, Filter, filters_of
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS
from lit_async_data.sources.hdf5.storage.stored_chunk import read_chunk

if TYPE_CHECKING:
    import h5py

NBIT, SCALEOFFSET = 5, 6  # as in h5py.h5z
# Bytes before the values of a scale-offset chunk: bits per value, length of the minimum, and 16 for the minimum.
SCALEOFFSET_HEAD = 21


def check_chunk_lengths(dataset: h5py.Dataset, axis: int, first: int, end: int) -> None:
    """Check that the chunks of a range of rows along an axis have all their bytes."""
    filters, shape, chunk = filters_of(dataset), dataset.shape, dataset.chunks or ()
    nbytes = math.prod(chunk) * dataset.dtype.itemsize
    corners = [range(0, n, c) for n, c in zip(shape, chunk, strict=True)]
    corners[axis] = range(first // chunk[axis] * chunk[axis], end, chunk[axis])
    for corner in itertools.product(*corners):
        try:
            mask, stored = read_chunk(dataset, corner)
        except LIBRARY_ERRORS:
            continue  # the chunk was never written, or h5py will raise the same error
        at_edge = any(at + c > n for at, c, n in zip(corner, chunk, shape, strict=True))
        if at_edge and len(stored) == nbytes:
            continue  # some datasets leave edge chunks unfiltered
        try:
            check_chunk_length(filters, mask, np.frombuffer(stored, np.uint8), nbytes)
        except CorruptError as error:
            raise _corrupt_error(dataset, axis, corner, len(stored), error) from error


def check_chunk_length(filters: tuple[Filter, ...], mask: int, data: Bytes, nbytes: int) -> None:
    """Check that a stored chunk decodes to ``nbytes`` at least. Accepts a chunk whose filters are unknown here.

    Bit i of ``mask`` means that filter i was skipped.
    """
    applied = [each for number, each in enumerate(filters) if not mask >> number & 1]
    while applied:
        last = applied.pop()
        exact = _exact_size(applied, nbytes)
        if last.number in (NBIT, SCALEOFFSET) and exact is not None and not _is_identity(last):
            needed = _nbit_size(last, exact) if last.number == NBIT else _scaleoffset_size(last, data, exact)
            if len(data) < needed:
                raise CorruptError(f"only {len(data)} of {needed} bytes for filter {last.number}")
            return  # from enough bytes, libhdf5 decodes all values
        if last.number == SHUFFLE and not applied:
            break  # shuffle keeps the size
        if last.number == FLETCHER32:
            data = data[: max(len(data) - SUM_BYTES, 0)]  # libhdf5 verifies the checksum
        elif last.number == DEFLATE and exact is None:
            limit = _size_limit(applied, nbytes)
            if limit is None:
                return
            data = _inflate(data, limit)
        elif not _is_identity(last):
            codec = last.codec
            if codec is None or codec.missing or (exact is None and last.changes_size):
                return
            data = codec.decode(data, len(data) if exact is None else exact, last.parameters)
    if len(data) < nbytes:
        raise CorruptError(f"{len(data)} bytes instead of {nbytes}")


def _is_identity(each: Filter) -> bool:
    """Whether n-bit or scale-offset stores values unchanged, because they need all their bits."""
    parameters = each.parameters
    if each.number == NBIT:
        return len(parameters) > 1 and parameters[1] != 0
    if each.number != SCALEOFFSET or len(parameters) < 5:
        return False
    return parameters[0] == 2 and parameters[1] == 8 * parameters[4]


def _exact_size(applied: list[Filter], nbytes: int) -> int | None:
    """Size of a chunk after these filters; None if it depends on the values."""
    if any(each.changes_size and not _is_identity(each) for each in applied):
        return None
    return nbytes + int(SUM_BYTES * sum(each.number == FLETCHER32 for each in applied))


def _size_limit(applied: list[Filter], nbytes: int) -> int | None:
    """Largest size of a chunk after these filters; None if unknown."""
    packing = [each for each in applied if each.changes_size and not _is_identity(each)]
    if any(each.number not in (NBIT, SCALEOFFSET) for each in packing):
        return None
    # Both filters write one byte more than they need.
    return nbytes + SUM_BYTES * len(applied) + (SCALEOFFSET_HEAD + 1) * len(packing)


def _inflate(data: Any, limit: int) -> Bytes:
    try:
        inflated = np.frombuffer(zlib.decompressobj().decompress(data, limit + 1), np.uint8)
    except zlib.error as error:
        raise CorruptError(str(error)) from error
    if len(inflated) > limit:  # libhdf5 would inflate all of it
        raise CorruptError(f"inflates beyond the {limit} bytes that a chunk may have")
    return inflated


def _nbit_size(nbit: Filter, nbytes: int) -> int:
    """Bytes that n-bit reads. For numbers, its parameters end with: class, size, byte order, precision, offset."""
    if len(nbit.parameters) < 8 or nbit.parameters[3] != 1:
        return 0  # values are not numbers
    values, size, bits = nbit.parameters[2], nbit.parameters[4], nbit.parameters[6]
    if values * size != nbytes:
        raise CorruptError(f"filter {NBIT} decodes to {values * size} bytes instead of {nbytes}")
    return -(-values * bits // 8)


def _scaleoffset_size(scaleoffset: Filter, data: Bytes, nbytes: int) -> int:
    """Bytes that scale-offset reads. A chunk begins with the number of bits per value."""
    parameters = scaleoffset.parameters
    if len(parameters) < 5 or len(data) < SCALEOFFSET_HEAD:
        return SCALEOFFSET_HEAD
    values, size, bits = parameters[2], parameters[4], int.from_bytes(data[:4].tobytes(), "little")
    if values * size != nbytes:
        raise CorruptError(f"filter {SCALEOFFSET} decodes to {values * size} bytes instead of {nbytes}")
    if bits > 8 * size:
        raise CorruptError(f"its head claims {bits} bits per value, but a value has {size} bytes")
    return SCALEOFFSET_HEAD - (-values * bits // 8)


def _corrupt_error(dataset: h5py.Dataset, axis: int, corner: Any, size: int, error: CorruptError) -> CorruptError:
    path, name = dataset.file.filename, (dataset.name or "").strip("/")
    offset = ""
    if corners_known(dataset):  # otherwise libhdf5 returns the offset of another chunk
        with contextlib.suppress(*LIBRARY_ERRORS):
            offset = f" at byte {dataset.id.get_chunk_info_by_coord(corner).byte_offset}"
    return CorruptError(
        f"{path}:/{name}, chunk {tuple(corner)} of {size} bytes{offset}: {error}; the file is damaged: restore it, or "
        "copy what can be read of it",
        file=path,
        dataset=name,
        row=int(corner[axis]),
    )
