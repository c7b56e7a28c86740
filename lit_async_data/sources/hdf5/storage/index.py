"""Where the chunks of a dataset lie: `ChunkIndex`, built once through h5py and believed only after many checks.

With it chunks are read and decoded without libhdf5. Whatever is not known to come out right is left to h5py: `refusal`
says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import secrets
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ChangedError, CorruptError, FormatError, MissingError
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, FilterPipeline, filters_of
from lit_async_data.sources.hdf5.storage.failures import FOREIGN, REMEDIES, errno_of, opened, retried
from lit_async_data.sources.hdf5.storage.index_cache import IndexCache
from lit_async_data.sources.hdf5.storage.index_file import Columns, IndexKey, read
from lit_async_data.sources.hdf5.storage.records import check_records, columns_of, corners_known, grid_of, plausible

# Larger chunks are no unit of reading ahead.
MOST_CHUNK_BYTES = 2**30
# An index takes 16 bytes per chunk, three times as many while it is built, and 1 to 2 µs. Beyond this it would take
# more than 2.4 GB and a minute, in every process if it cannot be kept: worse than reading slowly.
MOST_CHUNKS = 5 * 10**7
# Chunks read both ways before the index is believed: the first, the last and some between.
PROBES = 5
# The one `refusal` that an installation lifts.
MISSING = "what decodes its filters is not installed"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset, one column each, in the order of their places (last axis fastest).

    Attributes:
        shape: Of one chunk.
        grid: Chunks along each axis.
        offsets: int64: byte of the file at which a chunk begins; -1 where none was ever written.
        sizes: uint32: bytes of it as stored.
        masks: uint32: bit i says that filter i was left out.
        filters: How to decode one.
        fill: The value of what was never written.
        kept: What it is of, and the file that the columns are mapped from; None if they are in memory of their own.
            Pickled are columns in memory; of those in a file its name, and they are mapped again.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint32]
    filters: FilterPipeline
    fill: Any
    kept: tuple[IndexKey, str] | None = None

    def __reduce__(self) -> Any:
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        if self.kept is None:
            return ChunkIndex, tuple(values)
        nothing = Columns(self.offsets[:0].copy(), self.sizes[:0].copy(), self.masks[:0].copy())
        return _unpickled, (self.with_columns(nothing, self.kept[0]), *self.kept)

    def with_columns(self, columns: Columns, key: IndexKey) -> ChunkIndex:
        """The same with the same columns elsewhere."""
        kept = None if columns.kept_in is None else (key, columns.kept_in)
        offsets, sizes, masks, _ = columns
        return dataclasses.replace(self, offsets=offsets, sizes=sizes, masks=masks, kept=kept)


def refusal(dataset: h5py.Dataset) -> str | None:
    """Why h5py must read a chunked dataset; None if its chunks may be indexed.

    Before the index is built: what is known to be wrong or unknown about layout, type and filters.
    """
    filters = filters_of(dataset)
    reasons = {
        "it is not chunked": dataset.chunks is None,
        "its values do not lie there as numpy has them": not lies_as_numpy(dataset),
        "it has filters that only libhdf5 decodes": any(which.codec is None for which in filters)
        or sum(which.packs for which in filters) > 1,
        # They would take a chunk at an edge that was never filtered for one that was.
        "its filters fit whatever lies there": dataset.chunks is not None
        and len(filters) > 0
        and not any(which.packs or which.number == FLETCHER32 for which in filters)
        and any(n % c for n, c in zip(dataset.shape, dataset.chunks, strict=True)),
        "it is unlimited along one axis that is not the first": not corners_known(dataset),
        "its chunks are very large": dataset.chunks is not None
        and math.prod(dataset.chunks) * dataset.dtype.itemsize > MOST_CHUNK_BYTES,
        "it has too many chunks": dataset.chunks is not None
        and math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)) > MOST_CHUNKS,
        "the file is spread over several": not in_one_file(dataset),
        MISSING: any(which.codec is not None and which.codec.missing for which in filters),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def check_refused(dataset: h5py.Dataset) -> None:
    """Make sure that the index of a dataset with a `refusal` is possible: h5py would read wherever it leads.

    Raises:
        CorruptError: It cannot be true; names a chunk.
        SourceError: The system does not let libhdf5 read it.
    """
    if dataset.chunks is None or not in_one_file(dataset):
        return
    if math.prod(grid_of(dataset)) <= MOST_CHUNKS:
        check_records(dataset)


def in_one_file(dataset: h5py.Dataset) -> bool:
    """Whether its file is read as one file of the system, so that bytes of it can be read by their offset."""
    return bool(dataset.file.id.get_access_plist().get_driver() == h5py.h5fd.SEC2)


def lies_as_numpy(dataset: h5py.Dataset) -> bool:
    """Whether the bytes of its values in the file are those that numpy has in memory.

    An enumeration, and what h5py makes of bool is one, lies there as the integers that it is based on.
    """
    stored, dtype = dataset.id.get_type(), dataset.dtype
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype):
        stored, dtype = stored.get_super(), np.dtype(np.int8) if dtype.kind == "b" else np.dtype(dtype.str)
    return dtype.kind in "iufc" and bool(stored.equal(h5py.h5t.py_create(dtype)))


def index_of(dataset: h5py.Dataset, cache: IndexCache) -> ChunkIndex | None:
    """The index of a dataset, or None where it cannot be believed and h5py must read.

    Args:
        dataset: Open, and without a `refusal`.
        cache: Where it may have been kept, and is kept.

    Raises:
        CorruptError: It cannot be true; names a chunk.
        SourceError: The system does not let libhdf5 read it.
    """
    key = IndexKey.of(dataset)
    kept = cache.load(key)
    if kept is not None:
        index = _believed(dataset, kept, key) if plausible(dataset, kept) else None
        if index is not None:
            return index
        _log.warning("the kept index of %s is not true: it is built anew", key)
    built = columns_of(dataset)
    index = None if built is None else _believed(dataset, built, key)
    if built is None or index is None or IndexKey.of(dataset) != key:
        return index  # of a file that changed meanwhile: reading it is an error; or one that is not believed
    return index.with_columns(cache.store(key, built), key)


def _unpickled(bare: ChunkIndex, key: IndexKey, path: str) -> ChunkIndex:
    """An index whose columns are in a file: mapped again, or built again if that is gone."""
    columns = None
    with contextlib.suppress(OSError, ValueError):
        columns = read(path, key)
    if columns is None:
        with contextlib.suppress(*FOREIGN, MissingError, FormatError), opened(key.path) as file:
            dataset: Any = file[key.name]
            columns = columns_of(dataset) if IndexKey.of(dataset) == key else None
    if columns is None:
        raise ChangedError(f"{key} is not what it was when the source was built; build it again", file=key.path)
    return bare.with_columns(columns, key)


def _believed(dataset: h5py.Dataset, columns: Columns, key: IndexKey) -> ChunkIndex | None:
    """The index that has these columns, if some chunks prove it and none is missing that must be there."""
    fill = None  # undefined, or never written by whoever made it: then every chunk must be there
    if dataset.id.get_create_plist().get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
        with contextlib.suppress(*FOREIGN):
            fill = dataset.fillvalue
    if fill is None and (columns.offsets < 0).any():
        return None
    chunk = dataset.chunks or ()
    nbytes = math.prod(chunk) * dataset.dtype.itemsize
    pipeline = FilterPipeline(filters_of(dataset), nbytes)
    index = ChunkIndex(chunk, grid_of(dataset), *columns[:3], pipeline, fill)
    return index.with_columns(columns, key) if _proved(dataset, index) else None


def _proved(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether some chunks are the same read by offset and by libhdf5, and those at an edge decode to the same values.

    Of files with a user block, offsets count from it before HDF5 1.14.4 and from the file's start since. And a dataset
    may have been told not to filter chunks at an edge, of which the index says nothing.
    """
    some_missing = index.offsets.min() < 0
    there = np.flatnonzero(index.offsets >= 0) if some_missing else range(len(index.offsets))
    if not len(there):
        return True
    # Drawn anew each time: who makes a false index must not know which chunks to leave alone.
    between = np.random.default_rng(secrets.randbits(128)).integers(len(there), size=PROBES - 2).tolist()
    edges = _edges(dataset, index)
    for number in {*(int(there[which]) for which in (0, -1, *between)), *edges}:
        corner = tuple(int(n) * c for n, c in zip(np.unravel_index(number, index.grid), index.shape, strict=True))
        handle, size, offset = dataset.file.id.get_vfd_handle(), int(index.sizes[number]), int(index.offsets[number])
        try:
            mask, stored = retried(functools.partial(dataset.id.read_direct_chunk, corner))
            found = retried(functools.partial(os.pread, handle, size, offset))
        except FOREIGN as error:
            if errno_of(error) in REMEDIES:
                raise
            return False
        if mask != index.masks[number] or found != stored:
            return False
        if number in edges and not _decodes(dataset, index, corner, found):
            return False
    return True


def _edges(dataset: h5py.Dataset, index: ChunkIndex) -> set[int]:
    """For each axis that ends within a chunk, the first chunk at that edge that is there and is said to be filtered."""
    found = set()
    for axis, (n, c) in enumerate(zip(dataset.shape, index.shape, strict=True)):
        if n % c and index.filters.filters:
            there = (index.offsets.reshape(index.grid).take(-1, axis) >= 0) & (
                index.masks.reshape(index.grid).take(-1, axis) == 0
            )
            first = np.unravel_index(int(there.argmax()), there.shape) if there.any() else None
            if first is not None:
                place = [int(n) for n in first]
                place.insert(axis, index.grid[axis] - 1)
                found.add(int(np.ravel_multi_index(place, index.grid)))
    return found


def _decodes(dataset: h5py.Dataset, index: ChunkIndex, corner: tuple[int, ...], stored: bytes) -> bool:
    """Whether a chunk at an edge went through the filters.

    It did if it has not the size of one that was left unfiltered; then, if it is damaged, that shall be an error when
    it is read, and libhdf5, which notices less, is not asked. Else it must decode to what libhdf5 reads there. One that
    decodes to itself is no proof: shuffled, all its values being equal, it looks like one left unfiltered.
    """
    if len(stored) != math.prod(index.shape) * dataset.dtype.itemsize:
        return True
    inside = tuple(slice(at, min(at + c, n)) for at, c, n in zip(corner, index.shape, dataset.shape, strict=True))
    try:
        values = index.filters.decoded(np.frombuffer(stored, np.uint8), 0)
        read_by_h5py = dataset[inside]
    except (CorruptError, *FOREIGN):
        return False  # stored as it is, perhaps, or damaged
    mine = values.view(dataset.dtype).reshape(index.shape)[tuple(slice(s.stop - s.start) for s in inside)]
    # Of single bytes, shuffle changes nothing in any case.
    proof = dataset.dtype.itemsize == 1 or values.tobytes() != stored
    return proof and mine.tobytes() == read_by_h5py.tobytes()
