"""Chunks with too few bytes, which libhdf5 decodes all the same: `refuse_short`.

libhdf5 does not check how many bytes a filter yields, and scale-offset and n-bit do not check how many they are given.
What is missing comes out as heap memory. So whoever reads chunks through h5py checks them here first.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from typing import Any

import h5py
import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE, FLETCHER32, SHUFFLE, SUM_BYTES, Filter, filters_of
from lit_async_data.sources.hdf5.storage.failures import FOREIGN
from lit_async_data.sources.hdf5.storage.records import corners_known

NBIT, SCALEOFFSET = h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET
# What scale-offset puts before the values: bits per value, the length of the minimum, and 16 bytes for the minimum.
SCALEOFFSET_HEAD = 21


def refuse_short(dataset: h5py.Dataset, axis: int, first: int, end: int) -> None:
    """Make sure that the chunks of some rows hold all their bytes.

    Args:
        dataset: Open, chunked and filtered.
        axis: Which axis counts the rows.
        first: The first row.
        end: One more than the last.

    Raises:
        CorruptError: One does not; names the chunk and its place.
    """
    filters, shape, chunk = filters_of(dataset), dataset.shape, dataset.chunks
    nbytes = math.prod(chunk) * dataset.dtype.itemsize
    corners = [range(0, n, c) for n, c in zip(shape, chunk, strict=True)]
    corners[axis] = range(first // chunk[axis] * chunk[axis], end, chunk[axis])
    for corner in itertools.product(*corners):
        try:
            mask, stored = dataset.id.read_direct_chunk(corner)
        except FOREIGN:
            continue  # it was never written; or it cannot be read, and h5py will raise the same
        at_edge = any(at + c > n for at, c, n in zip(corner, chunk, shape, strict=True))
        if at_edge and len(stored) == nbytes:
            continue  # a dataset may have been told not to filter these
        try:
            check_length(filters, mask, np.frombuffer(stored, np.uint8), nbytes)
        except CorruptError as error:
            raise _corrupt(dataset, axis, corner, len(stored), error) from error


def check_length(filters: tuple[Filter, ...], mask: int, data: Bytes, nbytes: int) -> None:
    """Make sure that filters make a whole chunk of its stored bytes, as far as these filters are known here.

    Args:
        filters: In the order in which they were applied.
        mask: Bit i says that filter i was left out.
        data: The bytes as stored.
        nbytes: Of the decoded chunk.

    Raises:
        CorruptError: They make fewer.
    """
    applied = [which for number, which in enumerate(filters) if not mask >> number & 1]
    while applied:
        which = applied.pop()
        exact = _exact_bytes(applied, nbytes)
        if which.number in (NBIT, SCALEOFFSET) and exact is not None and not _leaves_alone(which):
            needed = _nbit_bytes(which, exact) if which.number == NBIT else _scaleoffset_bytes(which, data, exact)
            if len(data) < needed:
                raise CorruptError(f"only {len(data)} of {needed} bytes for filter {which.number}")
            return  # libhdf5 makes all bytes of these
        if which.number == SHUFFLE and not applied:
            break  # it changes no length
        if which.number == FLETCHER32:
            data = data[: max(len(data) - SUM_BYTES, 0)]  # libhdf5 checks the sum itself
        elif which.number == DEFLATE and exact is None:
            most = _most_bytes(applied, nbytes)
            if most is None:
                return
            data = _inflated(data, most)
        elif not _leaves_alone(which):
            codec = which.codec
            if codec is None or codec.missing or (exact is None and which.packs):
                return
            data = codec.decode(data, len(data) if exact is None else exact, which.parameters)
    if len(data) < nbytes:
        raise CorruptError(f"{len(data)} bytes instead of {nbytes}")


def _leaves_alone(which: Filter) -> bool:
    """Whether n-bit or scale-offset has nothing to do, all bits of a value being needed."""
    values = which.parameters
    if which.number == NBIT:
        return len(values) > 1 and values[1] != 0
    return which.number == SCALEOFFSET and len(values) > 4 and values[0] == 2 and values[1] == 8 * values[4]


def _exact_bytes(applied: list[Filter], nbytes: int) -> int | None:
    """How many bytes these filters make of a chunk; None where that depends on its values."""
    if any(which.packs and not _leaves_alone(which) for which in applied):
        return None
    return nbytes + int(SUM_BYTES * sum(which.number == FLETCHER32 for which in applied))


def _most_bytes(applied: list[Filter], nbytes: int) -> int | None:
    """How many bytes these filters make at most; None where that is not known."""
    packing = [which for which in applied if which.packs and not _leaves_alone(which)]
    if any(which.number not in (NBIT, SCALEOFFSET) for which in packing):
        return None
    # Both put one byte more than they need behind the values.
    return nbytes + SUM_BYTES * len(applied) + (SCALEOFFSET_HEAD + 1) * len(packing)


def _inflated(data: Any, most: int) -> Bytes:
    try:
        return np.frombuffer(zlib.decompressobj().decompress(data, most), np.uint8)
    except zlib.error as error:
        raise CorruptError(str(error)) from error


def _nbit_bytes(which: Filter, nbytes: int) -> int:
    """The bytes that n-bit reads. Its parameters of numbers end with: class, size, byte order, precision, offset."""
    if len(which.parameters) < 8 or which.parameters[3] != 1:
        return 0  # not the parameters of a number
    values, size, bits = which.parameters[2], which.parameters[4], which.parameters[6]
    if values * size != nbytes:
        raise CorruptError(f"its filter {NBIT} is said to make {values * size} bytes instead of {nbytes}")
    return -(-values * bits // 8)


def _scaleoffset_bytes(which: Filter, data: Bytes, nbytes: int) -> int:
    """The bytes that scale-offset reads. A chunk begins with how many bits a value has."""
    if len(which.parameters) < 5 or len(data) < SCALEOFFSET_HEAD:
        return SCALEOFFSET_HEAD
    values, size, bits = which.parameters[2], which.parameters[4], int.from_bytes(data[:4].tobytes(), "little")
    if values * size != nbytes:
        raise CorruptError(f"its filter {SCALEOFFSET} is said to make {values * size} bytes instead of {nbytes}")
    if bits > 8 * size:
        raise CorruptError(f"it says that values of {size} bytes have {bits} bits")
    return SCALEOFFSET_HEAD - (-values * bits // 8)


def _corrupt(dataset: h5py.Dataset, axis: int, corner: Any, size: int, error: CorruptError) -> CorruptError:
    path, name = dataset.file.filename, (dataset.name or "").strip("/")
    place = ""
    if corners_known(dataset):  # else that of another chunk comes out
        with contextlib.suppress(*FOREIGN):
            place = f" at byte {dataset.id.get_chunk_info_by_coord(corner).byte_offset}"
    return CorruptError(
        f"{path}:/{name}, chunk {tuple(corner)} of {size} bytes{place}: {error}; restore the file, or copy what can be "
        "read of it",
        file=path,
        dataset=name,
        row=int(corner[axis]),
    )
