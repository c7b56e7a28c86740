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
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, source_error
from lit_async_data.sources.hdf5.storage.index_file import Columns

# A chunk's address behind the smallest superblock there is, counted from the end of the user block.
FIRST_BYTE = 48
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
    rules, usual = _ChunkRules.of(dataset), True

    def consume(records: npt.NDArray[np.int64]) -> bool:
        nonlocal usual
        corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
        places, inside = np.divmod(corners, chunk)
        outside = (inside != 0) | (places < 0) | (places >= np.array(grid))
        if outside.any():
            raise rules.corrupt_error(corners[outside.any(axis=1).argmax()], "is listed, but no chunk begins there")
        if not rules.allow(offsets, sizes, masks):
            rules.check(corners, offsets, sizes, masks)
            usual = False  # but one of the others may be impossible
        at = np.ravel_multi_index(tuple(places.T), grid)
        twice, number = columns.offsets[at] >= 0, np.arange(at.size)
        columns.offsets[at] = number
        twice |= columns.offsets[at] != number  # another of this block has taken its place
        if twice.any():
            raise rules.corrupt_error(corners[twice.argmax()], "is listed twice")
        columns.offsets[at], columns.sizes[at], columns.masks[at] = offsets, sizes.astype(np.uint32), masks
        return True

    if not records_of(dataset, consume):
        return None
    there = np.flatnonzero(columns.offsets >= 0)

    def corner_of(number: int) -> npt.NDArray[Any]:
        corner: npt.NDArray[Any] = np.array(np.unravel_index(there[number], grid)) * chunk
        return corner

    _check_overlap(rules, columns.offsets[there], columns.sizes[there], corner_of)
    return columns if usual else None


def check_records(dataset: h5py.Dataset) -> None:
    """Make sure that the records of a dataset which h5py must read can be true, apart from where chunks belong.

    Raises:
        CorruptError: They cannot; names a chunk.
        SourceError: The system does not let libhdf5 read them.
    """
    rules, rank = _ChunkRules.of(dataset), len(dataset.shape)
    entered: list[npt.NDArray[np.int64]] = []

    def consume(records: npt.NDArray[np.int64]) -> bool:
        masks, offsets, sizes = records[:, rank:].T
        if not rules.allow(offsets, sizes, masks):
            rules.check(records[:, :rank], offsets, sizes, masks)
        entered.append(records)
        return True

    if records_of(dataset, consume) and entered:
        found = np.concatenate(entered)
        _check_overlap(rules, found[:, -2], found[:, -1], lambda number: found[number, :rank])


def records_of(dataset: h5py.Dataset, consume: Callable[[npt.NDArray[np.int64]], bool]) -> bool:
    """Have what libhdf5 says of each chunk that is there entered, a row each: its corner, filter mask, offset and size.

    About 1 µs per chunk in this way; asking for one after the other is quadratic.

    Args:
        dataset: Open.
        consume: Gets some rows at a time, and says whether to go on.

    Returns:
        Whether all were entered; not where one has an address that no integer holds, which libhdf5 refuses to read.

    Raises:
        CorruptError: libhdf5 cannot go through them.
        SourceError: The system does not let it.
    """
    records = array.array("q")
    width = len(dataset.shape) + 3

    def flushed() -> bool:
        rows = np.array(records, np.int64).reshape(-1, width)
        del records[:]
        return not len(rows) or consume(rows)

    def take(info: Any) -> bool | None:
        corner, mask, offset, size = info
        records.extend((*corner, mask, offset, size))
        return True if len(records) >= BLOCK * width and not flushed() else None  # whatever is not None ends it

    try:
        return dataset.id.chunk_iter(take) is None and flushed()
    except OverflowError:
        return False
    except SourceError:
        raise
    except LIBRARY_ERRORS as error:
        path = dataset.file.filename
        raise source_error(
            error, f"{path}:{dataset.name}", "has chunks that libhdf5 cannot list", file=path, dataset=dataset.name
        ) from error


@dataclasses.dataclass(frozen=True)
class _ChunkRules:
    """What can be true of the chunks of a dataset: their bytes undecoded, their filters, and where they may lie."""

    path: str
    name: str
    nbytes: int
    filters: tuple[Filter, ...]
    user_block: int
    end: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _ChunkRules:
        return cls(
            dataset.file.filename,
            dataset.name or "",
            math.prod(dataset.chunks or ()) * dataset.dtype.itemsize,
            filters_of(dataset),
            dataset.file.userblock_size,
            os.fstat(dataset.file.id.get_vfd_handle()).st_size,
        )

    def allow(self, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> bool:
        """Whether chunks that are there may lie so."""
        return bool(
            (sizes < 2**32).all()
            and (offsets >= self.user_block + FIRST_BYTE).all()
            and (offsets <= self.end - sizes.astype(np.int64)).all()
            and (masks < 1 << len(self.filters)).all()
            and self._sizes_fit(sizes, masks).all()
        )

    def _sizes_fit(self, sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which chunks have as many bytes as what their filters make; of a filter that packs, any."""
        fits = sizes > 0
        for mask in np.unique(masks).tolist() if masks.any() else [0]:
            applied = [which for number, which in enumerate(self.filters) if not mask >> number & 1]
            if not any(which.changes_size for which in applied):
                sums = SUM_BYTES * sum(which.number == FLETCHER32 for which in applied)
                # Without the sums where a dataset was told not to filter chunks at an edge.
                fits &= (masks != mask) | (sizes == self.nbytes + sums) | (sizes == self.nbytes)
        return fits

    def check(
        self,
        corners: npt.NDArray[Any],
        offsets: npt.NDArray[Any],
        sizes: npt.NDArray[Any],
        masks: npt.NDArray[Any],
    ) -> None:
        """Raise `CorruptError` if one of these is impossible, and not only unusual.

        Unusual are a chunk of 4 GiB and more; an address that counts from the end of the user block, as before HDF5
        1.14.4; and bits of a mask beyond the filters, of which libhdf5 takes no notice: some writers set all bits.
        """
        ends = offsets + sizes
        reasons = {
            "lies in the head of the file": offsets < FIRST_BYTE,
            f"ends behind the {self.end} bytes of the file; was it truncated?": (ends > self.end) | (ends < offsets),
            f"is no chunk: one has {self.nbytes} bytes before its filters, which are "
            f"{', '.join(str(which.number) for which in self.filters) or 'none'}": ~self._sizes_fit(sizes, masks),
        }
        for reason, wrong in reasons.items():
            if wrong.any():
                at = int(wrong.argmax())
                raise self.corrupt_error(corners[at], f"of {sizes[at]} bytes at byte {offsets[at]} {reason}")

    def corrupt_error(self, corner: npt.NDArray[Any], what: str) -> CorruptError:
        """The error that names a chunk."""
        chunk = tuple(int(n) for n in corner)
        return CorruptError(
            f"{self.path}:{self.name}, chunk {chunk} {what}; the file is damaged: restore it, or write the dataset "
            "again from what can be read of it",
            file=self.path,
            dataset=self.name.strip("/"),
        )


def plausible(dataset: h5py.Dataset, columns: Columns) -> bool:
    """Whether columns that were kept can be true, but for chunks that overlap: that takes longer than all the rest."""
    rules = _ChunkRules.of(dataset)
    for begin in range(0, len(columns.offsets), BLOCK):
        offsets, sizes, masks = (column[begin : begin + BLOCK] for column in columns[:3])
        there = offsets != -1
        if not there.all():
            offsets, sizes, masks = offsets[there], sizes[there], masks[there]
        if not rules.allow(offsets, sizes, masks):
            return False
    return True


def _check_overlap(
    rules: _ChunkRules,
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
    raise rules.corrupt_error(other, f"at byte {begins[at + 1]} lies in the bytes of chunk {tuple(one.tolist())}")


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """How many chunks there are along each axis, the last perhaps not whole."""
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks or (), strict=True))
