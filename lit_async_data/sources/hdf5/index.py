"""Where the chunks of a dataset lie: `ChunkIndex`, built once through h5py and believed only after many checks.

With it chunks are read and decoded without libhdf5. Whatever is not known to come out right is left to h5py: `admitted`
says why.
"""

from __future__ import annotations

import array
import dataclasses
import math
import os
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.codecs import FLETCHER32, FilterPipeline, filters_of

# A chunk's address behind the smallest superblock there is.
FIRST_BYTE = 48
# Larger chunks are no unit of reading ahead.
MOST_CHUNK_BYTES = 2**30
# An index is built whenever a file is opened, 1 µs per chunk; beyond this that is no longer a matter of a second.
MOST_CHUNKS = 10**6
# Chunks read both ways before the index is believed: the first, the last and some between.
PROBES = 5
# The one `refusal` that an installation lifts.
MISSING = "what decodes its filters is not installed"


@dataclasses.dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset, one column each, in the order of their places (last axis fastest).

    Attributes:
        shape: Of one chunk.
        grid: Chunks along each axis.
        offsets: int64: byte of the file at which a chunk begins; -1 where none was ever written.
        sizes: int64: bytes of it as stored.
        masks: uint32: bit i says that filter i was left out.
        filters: How to decode one.
        fill: The value of what was never written.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    masks: npt.NDArray[np.uint32]
    filters: FilterPipeline
    fill: Any


def refusal(dataset: h5py.Dataset) -> str | None:
    """Why h5py must read a chunked dataset; None if its chunks may be indexed.

    Before the index is built: what is known to be wrong or unknown about layout, type and filters.
    """
    filters = filters_of(dataset)
    unlimited = [axis for axis, most in enumerate(dataset.maxshape) if most is None]
    reasons = {
        "it is not chunked": dataset.chunks is None,
        "its type is not a plain number": dataset.dtype.kind not in "iuf"
        or not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype)),
        "it has filters that only libhdf5 decodes": any(which.codec is None for which in filters)
        or sum(which.packs for which in filters) > 1,
        # They would take a chunk at an edge that was never filtered for one that was.
        "its filters fit whatever lies there": dataset.chunks is not None
        and len(filters) > 0
        and not any(which.packs or which.number == FLETCHER32 for which in filters)
        and any(n % c for n, c in zip(dataset.shape, dataset.chunks, strict=True)),
        # HDF5 1.12 to 2.0 gives wrong places of chunks for these, without an error.
        "it is unlimited along one axis that is not the first": len(unlimited) == 1 and unlimited != [0],
        "its chunks are very large": dataset.chunks is not None
        and math.prod(dataset.chunks) * dataset.dtype.itemsize > MOST_CHUNK_BYTES,
        "it has too many chunks": dataset.chunks is not None
        and math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)) > MOST_CHUNKS,
        "the file is spread over several": dataset.file.id.get_access_plist().get_driver() != h5py.h5fd.SEC2,
        MISSING: any(which.codec is not None and which.codec.missing for which in filters),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def built(dataset: h5py.Dataset) -> ChunkIndex | None:
    """The index of a dataset, or None where it cannot be believed and h5py must read.

    Args:
        dataset: Open, and without a `refusal`.
    """
    chunk, shape = dataset.chunks, dataset.shape
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    try:
        fill = dataset.fillvalue
    except (RuntimeError, ValueError):
        fill = None  # undefined: then every chunk must be there
    records = records_of(dataset)
    corners, (masks, offsets, sizes) = records[:, : len(shape)], records[:, len(shape) :].T
    nbytes = math.prod(chunk) * dataset.dtype.itemsize
    index = ChunkIndex(
        chunk,
        grid,
        np.full(math.prod(grid), -1, np.int64),
        np.zeros(math.prod(grid), np.int64),
        np.zeros(math.prod(grid), np.uint32),
        FilterPipeline(filters_of(dataset), nbytes),
        fill,
    )
    if not _plausible(
        dataset, corners, np.array(offsets, np.int64), np.array(sizes, np.int64), np.array(masks, np.int64)
    ):
        return None
    at = np.ravel_multi_index(tuple((corners // chunk).T), grid) if len(corners) else np.empty(0, np.int64)
    if len(np.unique(at)) < len(at) or (fill is None and len(at) < len(index.offsets)):
        return None
    index.offsets[at], index.sizes[at], index.masks[at] = offsets, sizes, masks
    return index if _proved(dataset, index) else None


def records_of(dataset: h5py.Dataset) -> npt.NDArray[np.int64]:
    """What libhdf5 says of each chunk that is there, a row each: its corner, filter mask, offset and size.

    About 1 µs per chunk in this way; asking for one after the other is quadratic.
    """
    records = array.array("q")
    dataset.id.chunk_iter(
        lambda info: records.extend((*info.chunk_offset, info.filter_mask, info.byte_offset, info.size))
    )
    return np.array(records, np.int64).reshape(-1, len(dataset.shape) + 3)


def _plausible(
    dataset: h5py.Dataset,
    corners: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
) -> bool:
    chunk, nbytes = np.array(dataset.chunks), math.prod(dataset.chunks) * dataset.dtype.itemsize
    filters = dataset.id.get_create_plist().get_nfilters()
    end = os.stat(dataset.file.filename).st_size
    order = np.argsort(offsets)
    whole = (1 << filters) - 1  # the mask of a chunk that no filter touched
    return bool(
        (corners % chunk == 0).all()
        and (corners < np.array(dataset.shape)).all()
        and (corners >= 0).all()
        and (sizes > 0).all()
        and (offsets >= FIRST_BYTE).all()
        and (offsets + sizes <= end).all()
        and (masks >> filters == 0).all()
        and ((sizes == nbytes) | (masks != whole)).all()
        and (offsets[order][1:] >= (offsets + sizes)[order][:-1]).all()  # no two overlap
    )


def _proved(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether some chunks are the same read by offset and by libhdf5, and one at an edge decodes.

    Of files with a user block, offsets count from it before HDF5 1.14.4 and from the file's start since. And a dataset
    may have been told not to filter chunks at an edge, of which the index says nothing.
    """
    there = np.flatnonzero(index.offsets >= 0)
    if not len(there):
        return True
    chosen = np.random.default_rng(0).choice(there, PROBES - 2)
    with open(dataset.file.filename, "rb", buffering=0) as raw:
        for number in {int(there[0]), int(there[-1]), *chosen.tolist(), *_edges(dataset, index)}:
            corner = tuple(int(n) * c for n, c in zip(np.unravel_index(number, index.grid), index.shape, strict=True))
            mask, stored = dataset.id.read_direct_chunk(corner)
            found = os.pread(raw.fileno(), int(index.sizes[number]), int(index.offsets[number]))
            if mask != index.masks[number] or found != stored:
                return False
            try:
                index.filters.decoded(np.frombuffer(found, np.uint8), mask)
            except CorruptError:
                if number in _edges(dataset, index):
                    return False  # stored as it is, perhaps; a chunk that is damaged is for the reader to say
    return True


def _edges(dataset: h5py.Dataset, index: ChunkIndex) -> set[int]:
    """For each axis that ends within a chunk, the first chunk at that edge that is there."""
    found = set()
    for axis, (n, c) in enumerate(zip(dataset.shape, index.shape, strict=True)):
        if n % c and index.filters.filters:
            places = np.arange(len(index.offsets)).reshape(index.grid).take(-1, axis=axis).ravel()
            there = places[index.offsets[places] >= 0]
            found |= set(there[:1].tolist())
    return found
