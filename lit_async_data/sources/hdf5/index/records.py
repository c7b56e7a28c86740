"""The chunk records of libhdf5: read and checked before anything relies on them.

Records that no writer can have meant are an error: h5py would return uninitialised memory, or bytes of other chunks.
Datasets whose records are merely unusual are left to h5py.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError, SourceError
from lit_async_data.sources.hdf5.index.columns import Columns
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, SUM_BYTES, Filter, filters_of
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, source_error
from lit_async_data.sources.hdf5.storage.stored_chunk import is_found
from lit_async_data.sources.local_files.retrying import retry_once

if TYPE_CHECKING:
    import h5py

# From this many chunks on, the log reports that an index is being built, which takes seconds.
MANY_CHUNKS = 2 * 10**6
# Records handled per step while an index is built or checked: keeps temporaries small and calls few.
BLOCK = 2**16
NOT_FOUND = "is listed, but libhdf5 does not find it"

_log = logging.getLogger(__name__)


def columns_of(dataset: h5py.Dataset) -> Columns | None:
    """The chunk records of a dataset as columns; None if they are unusual, so that h5py must read."""
    chunk, grid = np.array(dataset.chunks), grid_of(dataset)
    chunks = math.prod(grid)
    if chunks >= MANY_CHUNKS:
        _log.info("indexing up to %d chunks of %s:%s, 1 to 2 µs each", chunks, dataset.file.filename, dataset.name)
    columns = Columns(np.full(chunks, -1, np.int64), np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32))
    rules, usual, last = _ChunkRules.of(dataset), True, -1

    def consume(records: npt.NDArray[np.int64]) -> bool:
        nonlocal usual, last
        corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
        at = _chunk_numbers(rules, corners, chunk, grid, last)
        last = int(at[-1])
        if not rules.allow(offsets, sizes, masks):
            rules.check(corners, offsets, sizes, masks)
            usual = False  # go on: a later record may be impossible
        columns.offsets[at], columns.sizes[at], columns.masks[at] = offsets, sizes.astype(np.uint32), masks
        return True

    if not records_of(dataset, consume):
        return None
    written = np.flatnonzero(columns.offsets >= 0)

    def corner_of(number: int) -> npt.NDArray[Any]:
        corner: npt.NDArray[Any] = np.array(np.unravel_index(written[number], grid)) * chunk
        return corner

    _check_overlap(rules, columns.offsets[written], columns.sizes[written], corner_of)
    return columns if usual else None


def check_records(dataset: h5py.Dataset) -> None:
    """Check the records of a dataset that h5py reads, and that libhdf5 finds each chunk that it lists.

    In a damaged B-tree it may not find some, and h5py then reads fill values.
    """
    rules, rank, last = _ChunkRules.of(dataset), len(dataset.shape), -1
    chunk, grid = np.array(dataset.chunks), grid_of(dataset)
    blocks: list[npt.NDArray[np.int64]] = []
    known = corners_known(dataset)

    def consume(records: npt.NDArray[np.int64]) -> bool:
        nonlocal last
        masks, offsets, sizes = records[:, rank:].T
        if not rules.allow(offsets, sizes, masks):
            rules.check(records[:, :rank], offsets, sizes, masks)
        if known:
            last = int(_chunk_numbers(rules, records[:, :rank], chunk, grid, last)[-1])
        blocks.append(records)
        return True

    if records_of(dataset, consume) and blocks:
        records = np.concatenate(blocks)
        _check_overlap(rules, records[:, -2], records[:, -1], lambda number: records[number, :rank])
        starts = (range(0, n, c) for n, c in zip(dataset.shape, chunk.tolist(), strict=True))
        corners: Iterable[Any] = map(tuple, records[:, :rank].tolist()) if known else itertools.product(*starts)
        lost = (corner for corner in corners if not retry_once(functools.partial(is_found, dataset, corner)))
        for corner in itertools.islice(lost, 0 if known else math.prod(grid) - len(records), None):
            raise rules.corrupt_error(corner, NOT_FOUND)


def corners_known(dataset: h5py.Dataset) -> bool:
    """Whether libhdf5 lists the corners of chunks correctly.

    HDF5 1.12 to 2.0 lists wrong ones, without an error, if a dataset is unlimited along one axis that is not the first.
    """
    unlimited = [axis for axis, most in enumerate(dataset.maxshape or ()) if most is None]
    return len(unlimited) != 1 or unlimited == [0]


def _chunk_numbers(
    rules: _ChunkRules, corners: npt.NDArray[np.int64], chunk: npt.NDArray[Any], grid: tuple[int, ...], last: int
) -> npt.NDArray[np.int64]:
    """The number of each chunk in the grid.

    Raises `CorruptError` if no chunk begins at one of these corners, or if they do not ascend from the ``last`` number:
    libhdf5 lists chunks as its indexes order them, and would not find those that are out of order.
    """
    places, inside = np.divmod(corners, chunk)
    outside = (inside != 0) | (places < 0) | (places >= np.array(grid))
    if outside.any():
        raise rules.corrupt_error(corners[outside.any(axis=1).argmax()], "is listed, but no chunk begins there")
    numbers = np.asarray(np.ravel_multi_index(tuple(places.T), grid), np.int64)
    falls = np.diff(numbers, prepend=last) <= 0
    if falls.any():
        raise rules.corrupt_error(corners[falls.argmax()], "is listed twice, or behind a later one")
    return numbers


def records_of(dataset: h5py.Dataset, consume: Callable[[npt.NDArray[np.int64]], bool]) -> bool:
    """Pass the record of every written chunk to ``consume``, one row each: corner, filter mask, offset and size.

    Takes about 1 µs per chunk; asking libhdf5 for one chunk after the other takes quadratic time. ``consume`` receives
    blocks of rows and returns whether to continue; returns whether all were passed on.
    """
    records, path = array.array("q"), dataset.file.filename
    width = len(dataset.shape) + 3

    def flush() -> bool:
        rows = np.array(records, np.int64).reshape(-1, width)
        del records[:]
        return not len(rows) or consume(rows)

    def add(info: Any) -> bool | None:
        corner, mask, offset, size = info
        try:
            records.extend((*corner, mask, offset, size))
        except OverflowError:
            problem = f"its {size} bytes at byte {offset} lie where no file reaches"
            raise corrupt_error(path, dataset.name or "", corner, problem) from None
        return True if len(records) >= BLOCK * width and not flush() else None  # any value but None ends the iteration

    try:
        return dataset.id.chunk_iter(add) is None and flush()
    except SourceError:
        raise
    except LIBRARY_ERRORS as error:
        raise source_error(
            error, f"{path}:{dataset.name}", "has chunks that libhdf5 cannot list", file=path, dataset=dataset.name
        ) from error


@dataclasses.dataclass(frozen=True)
class _ChunkRules:
    """What holds for the chunks of a dataset: decoded size, filters, and the range of valid addresses."""

    path: str
    name: str
    nbytes: int
    filters: tuple[Filter, ...]
    user_block: int
    superblock: int
    end: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _ChunkRules:
        return cls(
            dataset.file.filename,
            dataset.name or "",
            math.prod(dataset.chunks or ()) * element_bytes(dataset),
            filters_of(dataset),
            dataset.file.userblock_size,
            superblock_bytes(dataset.file),
            os.fstat(dataset.file.id.get_vfd_handle()).st_size,
        )

    def allow(self, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> bool:
        """Whether all of these chunks are usual and possible."""
        return bool(
            (sizes < 2**32).all()
            and (offsets >= self.user_block + self.superblock).all()
            and (offsets <= self.end - sizes.astype(np.int64)).all()
            and (masks < 1 << len(self.filters)).all()
            and self._sizes_fit(sizes, masks).all()
        )

    def _sizes_fit(self, sizes: npt.NDArray[Any], masks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which stored sizes fit the decoded size and the filters. Filters that compress allow any size."""
        fits = sizes > 0
        for mask in np.unique(masks).tolist() if masks.any() else [0]:
            applied = [each for number, each in enumerate(self.filters) if not mask >> number & 1]
            if not any(each.changes_size for each in applied):
                sums = SUM_BYTES * sum(each.number == FLETCHER32 for each in applied)
                # Without checksums if the dataset leaves edge chunks unfiltered.
                fits &= (masks != mask) | (sizes == self.nbytes + sums) | (sizes == self.nbytes)
        return fits

    def check(
        self, corners: npt.NDArray[Any], offsets: npt.NDArray[Any], sizes: npt.NDArray[Any], masks: npt.NDArray[Any]
    ) -> None:
        """Raise `CorruptError` if a chunk is impossible rather than unusual.

        Unusual are chunks of 4 GiB and more; addresses counted from the end of the user block, if libhdf5 does so; and
        mask bits beyond the filters, which libhdf5 ignores and some writers set.
        """
        ends, begin = offsets + sizes, self.superblock + self.user_block * absolute()
        reasons = {
            "begin in the head of the file": offsets < begin,
            f"end behind the {self.end} bytes of the file; was it truncated?": (ends > self.end) | (ends < offsets),
            f"have the wrong size: a chunk has {self.nbytes} bytes before its filters, which are "
            f"{', '.join(str(each.number) for each in self.filters) or 'none'}": ~self._sizes_fit(sizes, masks),
        }
        for reason, wrong in reasons.items():
            if wrong.any():
                at = int(wrong.argmax())
                raise self.corrupt_error(corners[at], f"its {sizes[at]} bytes at byte {offsets[at]} {reason}")

    def corrupt_error(self, corner: Any, problem: str) -> CorruptError:
        return corrupt_error(self.path, self.name, corner, problem)


def corrupt_error(path: str, name: str, corner: Any, problem: str) -> CorruptError:
    chunk = tuple(int(n) for n in corner)
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


def plausible(dataset: h5py.Dataset, columns: Columns) -> bool:
    """Whether columns from a cache are possible. Does not check for overlaps, which takes longer than all the rest."""
    rules = _ChunkRules.of(dataset)
    for begin in range(0, len(columns.offsets), BLOCK):
        offsets, sizes, masks = (column[begin : begin + BLOCK] for column in columns[:3])
        written = offsets != -1
        if not written.all():
            offsets, sizes, masks = offsets[written], sizes[written], masks[written]
        if not rules.allow(offsets, sizes, masks):
            return False
    return True


def _check_overlap(
    rules: _ChunkRules,
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[Any],
    corner_of: Callable[[int], npt.NDArray[Any]],
) -> None:
    begins, ends = np.sort(offsets), np.sort(offsets + sizes)
    if not (begins[1:] < ends[:-1]).any():
        return
    order = np.argsort(offsets, kind="stable")
    reached = np.maximum.accumulate((offsets + sizes)[order])
    at = int((begins[1:] < reached[:-1]).argmax())
    one, other = (corner_of(number) for number in order[at : at + 2].tolist())
    raise rules.corrupt_error(other, f"overlaps chunk {tuple(one.tolist())} at byte {begins[at + 1]}")


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Number of chunks along each axis, with a partial last one."""
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks or (), strict=True))


def absolute() -> bool:
    """Whether chunk addresses count from the start of the file; before 1.14.4, from the end of the user block."""
    import h5py

    return bool(h5py.version.hdf5_version_tuple >= (1, 14, 4))
