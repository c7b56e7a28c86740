"""Records of chunks, checked against the file that they describe.

libhdf5 does not check how many bytes a filter returns, and its scale-offset and n-bit filters do not check how many
bytes they receive. h5py returns heap memory in place of the missing bytes. So chunks are checked here before h5py
reads them.

Records that no writer can have meant are an error: h5py would return uninitialised memory, or bytes of other chunks.
Datasets whose records are merely unusual are left to h5py.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.sources.hdf5.storage.codecs import (
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    SUM_BYTES,
    Filter,
    filters_of,
    read_chunk,
)
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, source_error

if TYPE_CHECKING:
    import h5py


class Columns(NamedTuple):
    """Where the chunks of a dataset are: 16 bytes per chunk, in grid order (last axis fastest)."""

    offsets: npt.NDArray[np.int64]  # of each chunk in the file; -1 if it was never written
    sizes: npt.NDArray[np.uint32]  # stored bytes of each chunk
    masks: npt.NDArray[np.uint32]  # bit i means that filter i was skipped


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """Identifies an index: a dataset (or the choice of groups, without shapes), and the state of its file."""

    path: str = dataclasses.field(compare=False)
    name: str
    inode: int  # the device number differs between machines and mounts, so it is left out
    size: int
    mtime_ns: int
    ctime_ns: int
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    filters: tuple[int, ...]  # by number, in the order of the mask bits

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> IndexKey:
        """The key of an open chunked dataset, with the current state of its file."""
        now = os.fstat(dataset.file.id.get_vfd_handle())
        properties = dataset.id.get_create_plist()
        return cls(
            dataset.file.filename,
            dataset.name or "",
            now.st_ino,
            now.st_size,
            now.st_mtime_ns,
            now.st_ctime_ns,
            dataset.dtype.str,
            tuple(int(n) for n in dataset.shape),
            tuple(int(n) for n in dataset.chunks or ()),
            tuple(int(properties.get_filter(number)[0]) for number in range(properties.get_nfilters())),
        )

    @property
    def chunks(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


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


# From this many chunks on, the log reports that an index is being built, which takes seconds.
MANY_CHUNKS = 2 * 10**6
# Records handled per step while an index is built: keeps temporaries small and calls few.
BLOCK = 2**16

_log = logging.getLogger(__name__)


def columns_of(dataset: h5py.Dataset) -> Columns | None:
    """The chunk records of a dataset as columns; None if they are unusual, so that h5py must read."""
    columns, usual = checked_columns(dataset)
    return columns if usual else None


def checked_columns(dataset: h5py.Dataset) -> tuple[Columns, bool]:
    """The chunk records of a dataset as columns, and whether all of them are usual.

    Unusual are chunks of 4 GiB and more; addresses counted from the end of the user block, as before HDF5 1.14.4; and
    mask bits beyond the filters, which libhdf5 ignores and some writers set. If libhdf5 lists wrong corners, the
    columns have the order of the list. Raises `CorruptError` for a chunk that is impossible.
    """
    chunk, grid, file = np.array(dataset.chunks), grid_of(dataset), dataset.file
    chunks, known = math.prod(grid), corners_known(dataset)
    if chunks >= MANY_CHUNKS:
        _log.info("indexing up to %d chunks of %s:%s, 1 to 2 µs each", chunks, file.filename, dataset.name)
    columns = Columns(np.full(chunks, -1, np.int64), np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32))
    filters, nbytes = filters_of(dataset), math.prod(dataset.chunks or ()) * element_bytes(dataset)
    begin, end = superblock_bytes(file), os.fstat(file.id.get_vfd_handle()).st_size
    usual, last = True, -1

    def consume(records: npt.NDArray[np.int64]) -> None:
        nonlocal usual, last
        corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
        numbers = _chunk_numbers(dataset, corners, chunk, grid) if known else last + 1 + np.arange(len(records))
        ends = offsets + sizes
        impossible = {
            "is listed twice, or behind a later one": (np.diff(numbers, prepend=last) <= 0) | (numbers >= chunks),
            "begins in the head of the file": offsets < begin,
            f"ends behind the {end} bytes of the file; was it truncated?": (ends > end) | (ends < offsets),
            f"has the wrong size: a chunk has {nbytes} bytes before its filters, which are "
            f"{', '.join(str(each.number) for each in filters) or 'none'}": ~_sizes_fit(filters, nbytes, sizes, masks),
        }
        for problem, wrong in impossible.items():
            if wrong.any():
                at = int(wrong.argmax())
                raise corrupt_error(dataset, corners[at], f"{problem} ({sizes[at]} bytes at byte {offsets[at]})")
        usual &= bool(
            (sizes < 2**32).all()
            and (offsets >= file.userblock_size + begin).all()
            and (masks < 1 << len(filters)).all()
        )
        last = int(numbers[-1])
        columns.offsets[numbers], columns.sizes[numbers], columns.masks[numbers] = offsets, sizes, masks

    records_of(dataset, consume)
    _check_overlap(dataset, columns, chunk, grid)
    return columns, usual


def _sizes_fit(
    filters: tuple[Filter, ...], nbytes: int, sizes: npt.NDArray[Any], masks: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Which stored sizes fit the decoded size and the filters. Filters that compress allow any size."""
    fits = sizes > 0
    for mask in np.unique(masks).tolist() if masks.any() else [0]:
        applied = [each for number, each in enumerate(filters) if not mask >> number & 1]
        if not any(each.changes_size for each in applied):
            sums = SUM_BYTES * sum(each.number == FLETCHER32 for each in applied)
            # Without checksums if the dataset leaves edge chunks unfiltered.
            fits &= (masks != mask) | (sizes == nbytes + sums) | (sizes == nbytes)
    return fits


def corners_known(dataset: h5py.Dataset) -> bool:
    """Whether libhdf5 lists the corners of chunks correctly.

    HDF5 1.12 to 2.0 lists wrong ones, without an error, if a dataset is unlimited along one axis that is not the first.
    """
    unlimited = [axis for axis, most in enumerate(dataset.maxshape or ()) if most is None]
    return len(unlimited) != 1 or unlimited == [0]


def _chunk_numbers(
    dataset: h5py.Dataset, corners: npt.NDArray[np.int64], chunk: npt.NDArray[Any], grid: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """The number of each chunk in the grid.

    libhdf5 lists chunks as its indexes order them, and would not find those that are out of order.
    """
    places, inside = np.divmod(corners, chunk)
    outside = (inside != 0) | (places < 0) | (places >= np.array(grid))
    if outside.any():
        raise corrupt_error(dataset, corners[outside.any(axis=1).argmax()], "is listed, but no chunk begins there")
    return np.asarray(np.ravel_multi_index(tuple(places.T), grid), np.int64)


def records_of(dataset: h5py.Dataset, consume: Callable[[npt.NDArray[np.int64]], None]) -> None:
    """Pass the record of every written chunk to ``consume``, one row each: corner, filter mask, offset and size.

    Takes about 1 µs per chunk; asking libhdf5 for one chunk after the other takes quadratic time.
    """
    records, path = array.array("q"), dataset.file.filename
    width = len(dataset.shape) + 3

    def flush() -> None:
        if records:
            rows = np.array(records, np.int64).reshape(-1, width)
            del records[:]
            consume(rows)

    def add(info: Any) -> None:
        corner, mask, offset, size = info
        try:
            records.extend((*corner, mask, offset, size))
        except OverflowError:
            problem = f"lies where no file reaches ({size} bytes at byte {offset})"
            raise corrupt_error(dataset, corner, problem) from None
        if len(records) >= BLOCK * width:
            flush()

    try:
        dataset.id.chunk_iter(add)
        flush()
    except SourceError:
        raise
    except LIBRARY_ERRORS as error:
        raise source_error(
            error, f"{path}:{dataset.name}", "has chunks that libhdf5 cannot list", file=path, dataset=dataset.name
        ) from error


def corrupt_error(dataset: h5py.Dataset, corner: Any, problem: str) -> CorruptError:
    path, name, chunk = dataset.file.filename, dataset.name or "", tuple(int(n) for n in corner)
    return CorruptError(
        f"{path}:{name}, chunk {chunk}: {problem}; the file is damaged: restore it, or write the dataset "
        "again from what can be read of it",
        file=path,
        dataset=name.strip("/"),
    )


def element_bytes(dataset: h5py.Dataset) -> int:
    """Bytes of an element in the file: of one of variable length, those of its reference into the global heap."""
    return stored_type(dataset, dataset.id.get_type())[1] if dataset.dtype.hasobject else int(dataset.dtype.itemsize)


def stored_type(dataset: h5py.Dataset, kind: Any) -> tuple[Any, int]:
    """A type of a dataset as its values lie in the file, without what lies in the global heap; and its bytes."""
    import h5py

    size, dtype, what = kind.get_size(), kind.dtype, kind.get_class()
    if not dtype.hasobject:
        return dtype, size
    if what == h5py.h5t.ARRAY:
        return None, size // kind.get_super().get_size() * stored_type(dataset, kind.get_super())[1]
    if what != h5py.h5t.COMPOUND:
        # Length, address and number.
        return None, size if what == h5py.h5t.REFERENCE else 8 + dataset.file.id.get_create_plist().get_sizes()[0]
    members, grown = dict[str, tuple[Any, int]](), 0
    # As if in memory: there, what refers to the heap may take fewer bytes, and what follows is moved.
    for number in sorted(range(kind.get_nmembers()), key=kind.get_member_offset):
        inner, name = kind.get_member_type(number), kind.get_member_name(number).decode(errors="surrogateescape")
        member, nbytes = stored_type(dataset, inner)
        members |= {} if member is None else {name: (member, kind.get_member_offset(number) + grown)}
        grown += nbytes - inner.get_size()
    formats, offsets = zip(*members.values(), strict=True) if members else ((), ())
    record: dict[str, Any] = {"names": [*members], "formats": formats, "offsets": offsets, "itemsize": size + grown}
    return np.dtype(record), size + grown  # type: ignore[call-overload]


def superblock_bytes(file: h5py.File) -> int:
    """Bytes of the superblock, which follows the user block. Neither holds values."""
    properties = file.id.get_create_plist()
    version, address = properties.get_version()[0], properties.get_sizes()[0]
    return int(16 + 4 * address if version >= 2 else 48 + 4 * (version == 1) + 6 * address)


def _check_overlap(dataset: h5py.Dataset, columns: Columns, chunk: npt.NDArray[Any], grid: tuple[int, ...]) -> None:
    written = np.flatnonzero(columns.offsets >= 0)
    order = written[np.argsort(columns.offsets[written], kind="stable")]
    begins = columns.offsets[order]
    overlaps = begins[1:] < np.maximum.accumulate(begins + columns.sizes[order])[:-1]
    if overlaps.any():
        at = int(overlaps.argmax())
        one, other = ((np.array(np.unravel_index(n, grid)) * chunk).tolist() for n in order[at : at + 2].tolist())
        raise corrupt_error(dataset, other, f"overlaps chunk {tuple(one)} at byte {begins[at + 1]}")


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Number of chunks along each axis, with a partial last one."""
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks or (), strict=True))
