"""What libhdf5 says of the chunks of a dataset: records, believed only if all of them can be true together.

Records that no writer can have meant are damage, and an error: h5py takes them as they are, and delivers memory that
was never written, or the bytes of other chunks. What is only unusual is left to h5py.
"""

from __future__ import annotations

import array
import dataclasses
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, SUM_BYTES, Filter, filters_of
from lit_async_data.sources.hdf5.storage.failures import FOREIGN, source_error
from lit_async_data.sources.hdf5.storage.index_file import Columns

# Whether libhdf5 counts addresses of chunks from the beginning of the file; before, from the end of the user block.
ABSOLUTE = h5py.version.hdf5_version_tuple >= (1, 14, 4)
# From this many chunks on, the log reports that an index is being built: it takes seconds.
MANY_CHUNKS = 2 * 10**6
# Records looked at together while an index is built or checked: few temporaries, few calls.
BLOCK = 2**16

_log = logging.getLogger(__name__)


def columns_of(dataset: h5py.Dataset) -> Columns | None:
    """The columns as libhdf5 has them; None if they are unusual, so that h5py must read.

    Raises:
        CorruptError: They cannot be true; names a chunk.
        SourceError: The system does not let libhdf5 read them.
    """
    chunk, grid = np.array(dataset.chunks), grid_of(dataset)
    chunks = math.prod(grid)
    if chunks >= MANY_CHUNKS:
        _log.info("indexing up to %d chunks of %s:%s, 1 to 2 µs each", chunks, dataset.file.filename, dataset.name)
    columns = Columns(np.full(chunks, -1, np.int64), np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32))
    possible, usual = _Possible.of(dataset), True

    def enter(records: npt.NDArray[np.int64]) -> bool:
        nonlocal usual
        corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
        at = _numbers(possible, corners, chunk, grid)
        if not possible.all_of(offsets, sizes, masks):
            possible.refuse_impossible(corners, offsets, sizes, masks)
            usual = False  # but one of the others may be impossible
        twice, number = columns.offsets[at] >= 0, np.arange(at.size)
        columns.offsets[at] = number
        twice |= columns.offsets[at] != number  # another of this block has taken its place
        if twice.any():
            raise possible.corrupt(corners[twice.argmax()], "is listed twice")
        columns.offsets[at], columns.sizes[at], columns.masks[at] = offsets, sizes.astype(np.uint32), masks
        return True

    if not records_of(dataset, enter):
        return None
    there = np.flatnonzero(columns.offsets >= 0)

    def corner_of(number: int) -> npt.NDArray[Any]:
        corner: npt.NDArray[Any] = np.array(np.unravel_index(there[number], grid)) * chunk
        return corner

    _refuse_overlap(possible, columns.offsets[there], columns.sizes[there], corner_of)
    return columns if usual else None


def check_records(dataset: h5py.Dataset) -> None:
    """Make sure that the records of a dataset which h5py must read can be true.

    Raises:
        CorruptError: They cannot; names a chunk.
        SourceError: The system does not let libhdf5 read them.
    """
    possible, rank = _Possible.of(dataset), len(dataset.shape)
    chunk, grid = np.array(dataset.chunks), grid_of(dataset)
    entered: list[npt.NDArray[np.int64]] = []
    numbers: list[npt.NDArray[np.int64]] = []
    known = corners_known(dataset)

    def enter(records: npt.NDArray[np.int64]) -> bool:
        masks, offsets, sizes = records[:, rank:].T
        if not possible.all_of(offsets, sizes, masks):
            possible.refuse_impossible(records[:, :rank], offsets, sizes, masks)
        if known:
            numbers.append(_numbers(possible, records[:, :rank], chunk, grid))
        entered.append(records)
        return True

    if records_of(dataset, enter) and entered:
        found = np.concatenate(entered)
        if known:
            _refuse_twice(possible, found[:, :rank], np.concatenate(numbers))
        _refuse_overlap(possible, found[:, -2], found[:, -1], lambda number: found[number, :rank])


def corners_known(dataset: h5py.Dataset) -> bool:
    """Whether libhdf5 lists the corners of chunks right.

    HDF5 1.12 to 2.0 gives wrong ones, without an error, where a dataset is unlimited along one axis that is not the
    first.
    """
    unlimited = [axis for axis, most in enumerate(dataset.maxshape or ()) if most is None]
    return len(unlimited) != 1 or unlimited == [0]


def _numbers(
    possible: _Possible, corners: npt.NDArray[np.int64], chunk: npt.NDArray[Any], grid: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """The number of each chunk in the grid; raises `CorruptError` if no chunk begins at one of these corners."""
    places, inside = np.divmod(corners, chunk)
    outside = (inside != 0) | (places < 0) | (places >= np.array(grid))
    if outside.any():
        raise possible.corrupt(corners[outside.any(axis=1).argmax()], "is listed, but no chunk begins there")
    numbers: npt.NDArray[Any] = np.ravel_multi_index(tuple(places.T), grid)
    return numbers


def _refuse_twice(possible: _Possible, corners: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> None:
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if len(twice):
        raise possible.corrupt(corners[order[twice[0]]], "is listed twice")


def records_of(dataset: h5py.Dataset, enter: Callable[[npt.NDArray[np.int64]], bool]) -> bool:
    """Have what libhdf5 says of each chunk that is there entered, a row each: its corner, filter mask, offset and size.

    About 1 µs per chunk in this way; asking for one after the other is quadratic.

    Args:
        dataset: Open.
        enter: Gets some rows at a time, and says whether to go on.

    Returns:
        Whether all were entered.

    Raises:
        CorruptError: libhdf5 cannot go through them, or one has a corner, an address or a size that no file reaches.
        SourceError: The system does not let it.
    """
    records, path = array.array("q"), dataset.file.filename
    width = len(dataset.shape) + 3

    def flushed() -> bool:
        rows = np.array(records, np.int64).reshape(-1, width)
        del records[:]
        return not len(rows) or enter(rows)

    def take(info: Any) -> bool | None:
        corner, mask, offset, size = info
        try:
            records.extend((*corner, mask, offset, size))
        except OverflowError:
            raise _corrupt(
                path, dataset.name, corner, f"of {size} bytes at byte {offset} lies where no file reaches"
            ) from None
        return True if len(records) >= BLOCK * width and not flushed() else None  # whatever is not None ends it

    try:
        return dataset.id.chunk_iter(take) is None and flushed()
    except SourceError:
        raise
    except FOREIGN as error:
        raise source_error(
            error, f"{path}:{dataset.name}", "has chunks that libhdf5 cannot list", file=path, dataset=dataset.name
        ) from error


@dataclasses.dataclass(frozen=True)
class _Possible:
    """What can be true of the chunks of a dataset: their bytes undecoded, their filters, and where they may lie."""

    path: str
    name: str
    nbytes: int
    filters: tuple[Filter, ...]
    user_block: int
    superblock: int
    end: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _Possible:
        return cls(
            dataset.file.filename,
            dataset.name or "",
            math.prod(dataset.chunks or ()) * dataset.dtype.itemsize,
            filters_of(dataset),
            dataset.file.userblock_size,
            superblock_bytes(dataset.file),
            os.fstat(dataset.file.id.get_vfd_handle()).st_size,
        )

    def all_of(self, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> bool:
        """Whether chunks that are there may lie so."""
        return bool(
            (sizes < 2**32).all()
            and (offsets >= self.user_block + self.superblock).all()
            and (offsets <= self.end - sizes.astype(np.int64)).all()
            and (masks < 1 << len(self.filters)).all()
            and self._sizes_fit(sizes, masks).all()
        )

    def _sizes_fit(self, sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which chunks have as many bytes as what their filters make; of a filter that packs, any."""
        fits = sizes > 0
        for mask in np.unique(masks).tolist() if masks.any() else [0]:
            applied = [which for number, which in enumerate(self.filters) if not mask >> number & 1]
            if not any(which.packs for which in applied):
                sums = SUM_BYTES * sum(which.number == FLETCHER32 for which in applied)
                # Without the sums where a dataset was told not to filter chunks at an edge.
                fits &= (masks != mask) | (sizes == self.nbytes + sums) | (sizes == self.nbytes)
        return fits

    def refuse_impossible(
        self,
        corners: npt.NDArray[Any],
        offsets: npt.NDArray[Any],
        sizes: npt.NDArray[Any],
        masks: npt.NDArray[Any],
    ) -> None:
        """Raise `CorruptError` if one of these is impossible, and not only unusual.

        Unusual are a chunk of 4 GiB and more; an address that counts from the end of the user block, where libhdf5 does
        so; and bits of a mask beyond the filters, of which libhdf5 takes no notice: some writers set all bits.
        """
        ends, begin = offsets + sizes, self.superblock + self.user_block * ABSOLUTE
        reasons = {
            "lies in the head of the file": offsets < begin,
            f"ends behind the {self.end} bytes of the file; was it truncated?": (ends > self.end) | (ends < offsets),
            f"is no chunk: one has {self.nbytes} bytes before its filters, which are "
            f"{', '.join(str(which.number) for which in self.filters) or 'none'}": ~self._sizes_fit(sizes, masks),
        }
        for reason, wrong in reasons.items():
            if wrong.any():
                at = int(wrong.argmax())
                raise self.corrupt(corners[at], f"of {sizes[at]} bytes at byte {offsets[at]} {reason}")

    def corrupt(self, corner: npt.NDArray[Any], what: str) -> CorruptError:
        """The error that names a chunk."""
        return _corrupt(self.path, self.name, corner, what)


def _corrupt(path: str, name: str | None, corner: Any, what: str) -> CorruptError:
    chunk, name = tuple(int(n) for n in corner), name or ""
    return CorruptError(
        f"{path}:{name}, chunk {chunk} {what}; the file is damaged: restore it, or write the dataset "
        "again from what can be read of it",
        file=path,
        dataset=name.strip("/"),
    )


def superblock_bytes(file: h5py.File) -> int:
    """Bytes of the superblock, which follows the user block: no values lie in either."""
    properties = file.id.get_create_plist()
    version, address = properties.get_version()[0], properties.get_sizes()[0]
    return int(16 + 4 * address if version >= 2 else 48 + 4 * (version == 1) + 6 * address)


def plausible(dataset: h5py.Dataset, columns: Columns) -> bool:
    """Whether columns that were kept can be true, but for chunks that overlap: that takes longer than all the rest."""
    possible = _Possible.of(dataset)
    for begin in range(0, len(columns.offsets), BLOCK):
        offsets, sizes, masks = (column[begin : begin + BLOCK] for column in columns[:3])
        there = offsets != -1
        if not there.all():
            offsets, sizes, masks = offsets[there], sizes[there], masks[there]
        if not possible.all_of(offsets, sizes, masks):
            return False
    return True


def _refuse_overlap(
    possible: _Possible,
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[Any],
    corner_of: Callable[[int], npt.NDArray[Any]],
) -> None:
    """Raise `CorruptError` if two chunks share a byte: then one ends behind the beginning of that which begins next."""
    begins, ends = np.sort(offsets), np.sort(offsets + sizes)
    if not (begins[1:] < ends[:-1]).any():
        return
    order = np.argsort(offsets, kind="stable")
    reached = np.maximum.accumulate((offsets + sizes)[order])
    at = int((begins[1:] < reached[:-1]).argmax())
    one, other = (corner_of(number) for number in order[at : at + 2].tolist())
    raise possible.corrupt(other, f"at byte {begins[at + 1]} lies in the bytes of chunk {tuple(one.tolist())}")


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """How many chunks there are along each axis, the last perhaps not whole."""
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks or (), strict=True))
