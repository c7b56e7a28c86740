"""`Index`: where the chunks of a dataset lie in its file, kept in a cache.

With an index, chunks are read and decoded without libhdf5. Datasets that this might read wrongly are left to h5py:
`unsupported_reason` says why.

The head of a file describes the index; its body is a list of columns in plain text, and their values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.index.records import (
    Columns,
    IndexKey,
    checked_columns,
    columns_of,
    corners_known,
    corrupt_error,
    element_bytes,
    grid_of,
)
from lit_async_data.sources.hdf5.storage.codecs import FLETCHER32, FilterPipeline, filters_of, is_found, read_chunk
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, REMEDIES
from lit_async_data.sources.local_files import CacheFolder, changed_recently, errno_of, retry_once

if TYPE_CHECKING:
    import h5py


# Larger chunks are too large to be read ahead.
MOST_CHUNK_BYTES = 2**30
# An index takes 16 bytes per chunk (three times as many while it is built) and 1 to 2 µs. With more chunks it would
# take more than 2.4 GB and a minute, in every process if it cannot be cached: worse than slow reading.
MOST_CHUNKS = 5 * 10**7
# Chunks that are compared with what libhdf5 reads: the first, the last and random ones.
PROBES = 5
NOT_FOUND = "is listed, but libhdf5 does not find it"
# The one `unsupported_reason` that installing a library removes.
NOT_INSTALLED = "the library that decodes its filters is not installed"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset, with `Columns` in grid order (last axis fastest)."""

    shape: tuple[int, ...]  # shape of a chunk
    grid: tuple[int, ...]  # number of chunks along each axis
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint32]
    filters: FilterPipeline
    fill: Any  # value of chunks that were never written


def unsupported_reason(dataset: h5py.Dataset) -> str | None:
    """Why h5py must read a dataset; None if its chunks may be indexed.

    Looks at layout, type and filters only, before the index is built.
    """
    filters = filters_of(dataset)
    chunked = dataset.chunks is not None
    shapes = list(zip(dataset.shape, dataset.chunks or (), strict=chunked))
    reasons = {
        "it is not chunked": not chunked,
        "its values are not stored as numpy has them": not has_numpy_layout(dataset),
        "it has filters that only libhdf5 decodes": any(each.codec is None for each in filters)
        or sum(each.changes_size for each in filters) > 1,
        # An edge chunk that was never filtered would look like one that was.
        "its filters cannot tell unfiltered edge chunks": len(filters) > 0
        and not any(each.changes_size or each.number == FLETCHER32 for each in filters)
        and any(n % c for n, c in shapes),
        "it is unlimited along one axis that is not the first": not corners_known(dataset),
        "its chunks are very large": math.prod(c for _, c in shapes) * element_bytes(dataset) > MOST_CHUNK_BYTES,
        "it has too many chunks": math.prod(-(-n // c) for n, c in shapes) > MOST_CHUNKS,
        "the file is split over several": not in_one_file(dataset),
        NOT_INSTALLED: any(each.codec is not None and each.codec.missing for each in filters),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def check_unindexed(dataset: h5py.Dataset) -> None:
    """Check the records of a dataset that h5py reads, and that libhdf5 finds each chunk that it lists.

    In a damaged B-tree it may not find some, and h5py then reads fill values.
    """
    if dataset.chunks is None or not in_one_file(dataset) or math.prod(grid_of(dataset)) > MOST_CHUNKS:
        return
    written = np.flatnonzero(checked_columns(dataset)[0].offsets >= 0)
    grid, may_lack = grid_of(dataset), 0
    if not corners_known(dataset):  # only how many are written
        may_lack, written = math.prod(grid) - len(written), np.arange(math.prod(grid))
    for corner in map(tuple, (np.stack(np.unravel_index(written, grid), axis=1) * dataset.chunks).tolist()):
        if not retry_once(functools.partial(is_found, dataset, corner)):
            may_lack -= 1
            if may_lack < 0:
                raise corrupt_error(dataset, corner, NOT_FOUND)


def _corner(number: int, grid: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(n) * c for n, c in zip(np.unravel_index(number, grid), chunk, strict=True))


def in_one_file(dataset: h5py.Dataset) -> bool:
    """Whether HDF5 stores everything in one file of the system, so that its offsets are offsets in that file."""
    import h5py

    return bool(dataset.file.id.get_access_plist().get_driver() == h5py.h5fd.SEC2)


def has_numpy_layout(dataset: h5py.Dataset) -> bool:
    """Whether values are stored with the bytes that numpy has in memory."""
    dtype = dataset.dtype
    return dtype.kind in "SVO" or as_numpy(dataset.id.get_type(), dtype)


def as_numpy(stored: Any, dtype: np.dtype[Any]) -> bool:
    """Whether values of a type of libhdf5 have the bytes of this type of numpy."""
    import h5py

    # Enumerations are stored as their base integers, and h5py stores bool as an enumeration.
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype):
        stored, dtype = stored.get_super(), np.dtype(np.int8) if dtype.kind == "b" else np.dtype(dtype.str)
    return dtype.kind in "iufc" and bool(stored.equal(h5py.h5t.py_create(dtype)))


def index_of(dataset: h5py.Dataset, cache: IndexCache) -> ChunkIndex | None:
    """The index of a dataset without an `unsupported_reason`; None if it is ambiguous and h5py must read.

    Raises `CorruptError` if libhdf5 does not find chunks where it lists them.
    """
    key = IndexKey.of(dataset)
    if (kept := cache.load(key)) is not None:
        with contextlib.suppress(CorruptError):
            if (index := _verified(dataset, Columns(**kept))) is not None:
                return index
        _log.warning("%s: the cached index of chunks is wrong; building it again", key)
    built = columns_of(dataset)
    index = None if built is None else _verified(dataset, built)
    if built is not None and index is not None and IndexKey.of(dataset) == key:
        cache.store(key, built._asdict())  # if the file changed meanwhile, reading it will raise
    return index


def _verified(dataset: h5py.Dataset, columns: Columns) -> ChunkIndex | None:
    """The index with these columns, if probed chunks match and no chunk without a fill value is missing."""
    import h5py

    fill, properties = None, dataset.id.get_create_plist()  # undefined, or never written: then every chunk must exist
    if dataset.dtype.hasobject:
        fill = None if properties.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED else 0  # refers to nothing
    elif properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
        with contextlib.suppress(*LIBRARY_ERRORS):
            fill = dataset.fillvalue
    if fill is None and (columns.offsets < 0).any():
        return None
    chunk = dataset.chunks or ()
    nbytes = math.prod(chunk) * element_bytes(dataset)
    pipeline = FilterPipeline(filters_of(dataset), nbytes)
    index = ChunkIndex(chunk, grid_of(dataset), *columns, pipeline, fill)
    return index if _probes_match(dataset, index) and not _edges_unfiltered(dataset, index) else None


def _probes_match(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether probed chunks read the same by offset and by libhdf5. Else a `CorruptError` is raised.

    But in files with a user block, offsets count from its end before HDF5 1.14.4, and from the start of the file since.
    """
    import secrets

    some_missing = index.offsets.min() < 0
    written = np.flatnonzero(index.offsets >= 0) if some_missing else range(len(index.offsets))
    if not len(written):
        return True
    # Random, so that a forged index cannot leave the probed chunks intact.
    between = np.random.default_rng(secrets.randbits(128)).integers(len(written), size=PROBES - 2).tolist()
    for number in {int(written[each]) for each in (0, -1, *between)}:
        corner = _corner(number, index.grid, index.shape)
        handle, size, offset = dataset.file.id.get_vfd_handle(), int(index.sizes[number]), int(index.offsets[number])
        try:
            mask, stored = retry_once(functools.partial(read_chunk, dataset, corner))
            found = retry_once(functools.partial(system.pread, handle, size, offset))
        except LIBRARY_ERRORS as error:
            if errno_of(error) in REMEDIES:
                raise
            raise corrupt_error(dataset, corner, NOT_FOUND) from error
        if mask != index.masks[number] or found != stored:
            if dataset.file.userblock_size:
                return False
            problem = f"libhdf5 finds it elsewhere than at byte {offset}, where it lists it"
            raise corrupt_error(dataset, corner, problem)
    return True


def _edges_unfiltered(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether the chunks at the edges did not go through the filters, though their records say that they did.

    A dataset may leave all of them unfiltered. They then have the size of unfiltered chunks, and do not decode.
    """
    if not index.filters.filters:
        return False
    inside = np.ones(index.grid, np.bool_)
    for axis, (n, c) in enumerate(zip(dataset.shape, index.shape, strict=True)):
        if n % c:
            inside.swapaxes(0, axis)[-1] = False
    edges = np.flatnonzero(~inside.ravel() & (index.masks == 0) & (index.offsets >= 0))
    if not len(edges) or (index.sizes[edges] != index.filters.nbytes).any():
        return False
    handle, offset = dataset.file.id.get_vfd_handle(), int(index.offsets[edges[0]])
    stored = retry_once(functools.partial(system.pread, handle, index.filters.nbytes, offset))
    try:
        index.filters.decode(np.frombuffer(stored, np.uint8), 0)
    except CorruptError:
        return True
    return False


# Smaller indexes are built in 20 to 40 ms; they are not worth a file.
FEWEST_CHUNKS = 2**14
# Raise this when the columns or their meaning change.
VERSION = 8
# Letters of the data file's name in the name of its index: few enough for any file system.
NAME_SHOWN = 50

Array = npt.NDArray[Any]


class IndexCache:
    """The cache in a folder, which is made if it does not exist; or no cache."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else CacheFolder(folder, "index")

    def load(self, key: IndexKey) -> dict[str, Array] | None:
        """The kept columns of a dataset in its current state, by name; None if no file holds them."""
        if self._folder is None:
            return None
        data = self._folder.load(str(key), _name(key), _head(key))
        if data is None:
            return None
        begin, columns = data.index(b"\n") + 1, dict[str, Array]()
        for name, dtype, count in json.loads(data[:begin]):
            columns[name] = np.frombuffer(data, dtype, count, begin).copy()
            begin += columns[name].nbytes
        return columns

    def store(self, key: IndexKey, columns: Mapping[str, Array]) -> None:
        """Keep the columns of a dataset. Processes may do so at once, and failing to do so is no error."""
        small = key.chunk and key.chunks < FEWEST_CHUNKS
        if self._folder is None or small or changed_recently(key.mtime_ns, key.ctime_ns):
            return
        listed = json.dumps([(name, each.dtype.str, len(each)) for name, each in columns.items()]).encode()
        body = b"".join([listed, b"\n", *(each.tobytes() for each in columns.values())])
        self._folder.store(str(key), _name(key), _head(key), body)


def _name(key: IndexKey) -> str:
    import hashlib

    real = os.path.realpath(key.path)  # all links to the data share one index
    digest = hashlib.blake2b(f"{real}\0{key.name}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{os.path.basename(real)[:NAME_SHOWN]}.{digest}.index"


def _head(key: IndexKey) -> bytes:
    properties = {name: value for name, value in dataclasses.asdict(key).items() if name != "path"}
    return f"lit_async_data: an index of chunks, version {VERSION}; may be deleted\n{json.dumps(properties)}\n".encode()
