"""What libhdf5 says of the chunks of a dataset: records, believed only if all of them can be true together."""

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

from lit_async_data.sources.hdf5.index_file import Columns

# A chunk's address behind the smallest superblock there is, counted from the end of the user block.
FIRST_BYTE = 48
# From so many chunks on, the log says that an index is being built: it takes seconds.
MANY_CHUNKS = 2 * 10**6
# Records looked at together while an index is built or checked: few temporaries, few calls.
BLOCK = 2**16

_log = logging.getLogger(__name__)


def columns_of(dataset: h5py.Dataset) -> Columns | None:
    """The columns as libhdf5 has them, if they can be true."""
    chunk, grid = np.array(dataset.chunks), grid_of(dataset)
    chunks = math.prod(grid)
    if chunks >= MANY_CHUNKS:
        _log.info("indexing up to %d chunks of %s:%s, 1 to 2 µs each", chunks, dataset.file.filename, dataset.name)
    columns = Columns(np.full(chunks, -1, np.int64), np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32))
    possible = _Possible.of(dataset)
    entered = 0

    def enter(records: npt.NDArray[np.int64]) -> bool:
        nonlocal entered
        corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
        places, inside = np.divmod(corners, chunk)
        if inside.any() or (places < 0).any() or (places >= np.array(grid)).any():
            return False
        at = np.ravel_multi_index(tuple(places.T), grid)
        if not possible.all_of(offsets, sizes, masks):
            return False
        columns.offsets[at], columns.sizes[at], columns.masks[at] = offsets, sizes, masks
        entered += len(at)
        return True

    if not records_of(dataset, enter) or np.count_nonzero(columns.offsets >= 0) < entered:
        return None  # damaged, or a chunk is there twice
    return None if _overlap(columns) else columns


def records_of(dataset: h5py.Dataset, enter: Callable[[npt.NDArray[np.int64]], bool]) -> bool:
    """Have what libhdf5 says of each chunk that is there entered, a row each: its corner, filter mask, offset and size.

    About 1 µs per chunk in this way; asking for one after the other is quadratic.

    Args:
        dataset: Open.
        enter: Gets some rows at a time, and says whether to go on.

    Returns:
        Whether all were entered.
    """
    records = array.array("q")
    width = len(dataset.shape) + 3

    def flushed() -> bool:
        rows = np.array(records, np.int64).reshape(-1, width)
        del records[:]
        return not len(rows) or enter(rows)

    def take(info: Any) -> bool | None:
        corner, mask, offset, size = info
        records.extend((*corner, mask, offset, size))
        return True if len(records) >= BLOCK * width and not flushed() else None  # whatever is not None ends it

    try:
        return dataset.id.chunk_iter(take) is None and flushed()
    except (OSError, RuntimeError, ValueError, OverflowError):
        return False  # a damaged file


@dataclasses.dataclass(frozen=True)
class _Possible:
    """What can be true of the chunks of a dataset: their bytes undecoded, their filters, and where they may lie."""

    nbytes: int
    filters: int
    first: int
    end: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _Possible:
        return cls(
            math.prod(dataset.chunks) * dataset.dtype.itemsize,
            dataset.id.get_create_plist().get_nfilters(),
            dataset.file.userblock_size + FIRST_BYTE,
            os.fstat(dataset.file.id.get_vfd_handle()).st_size,
        )

    def all_of(self, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> bool:
        """Whether chunks that are there may lie so."""
        untouched = (1 << self.filters) - 1  # the mask of a chunk that no filter touched
        return bool(
            (sizes > 0).all()
            and (sizes < 2**32).all()
            and (offsets >= self.first).all()
            and (offsets <= self.end - sizes.astype(np.int64)).all()
            and (masks <= untouched).all()
            and ((sizes == self.nbytes) | (masks != untouched)).all()
        )


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


def _overlap(columns: Columns) -> bool:
    """Whether any two chunks share a byte: then one ends behind the beginning of that which begins next."""
    there = columns.offsets >= 0
    begins = columns.offsets[there]
    ends = begins + columns.sizes[there]
    begins.sort()
    ends.sort()
    return bool((begins[1:] < ends[:-1]).any())


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """How many chunks there are along each axis, the last perhaps not whole."""
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
