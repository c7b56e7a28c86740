"""Places of the chunks of a dataset: checks the records of libhdf5, makes an index of them, and caches it.

libhdf5 does not check how many bytes a filter returns, and its scale-offset and n-bit filters do not check how many
they receive: h5py returns heap memory in place of missing bytes. So chunks are checked here before h5py reads them.
Impossible records are an error; h5py reads datasets with unusual ones, and those with an `unsupported_reason`.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources import local_files
from lit_async_data.sources.hdf5.storage import codecs
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, REMEDIES, as_source_errors, h5py
from lit_async_data.sources.hdf5.storage.handles import bytes_at, fetch, identity_of, mirrored_file, path_of
from lit_async_data.sources.local_files import changed_recently, errno_of, is_address, retry_once


class Columns(NamedTuple):
    """Where the chunks of a dataset are: 16 bytes per chunk, in grid order (last axis fastest)."""

    offsets: npt.NDArray[np.int64]  # places of the chunks in the file; -1 if a chunk was never written
    sizes: npt.NDArray[np.uint32]  # stored bytes of each chunk
    masks: npt.NDArray[np.uint32]  # bit i means that filter i was skipped


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """Identifies an index: a dataset, or a choice of groups, in one state of its file."""

    path: str = dataclasses.field(compare=False)
    name: str
    # Inode, size, time of writing and of changes. The device number differs between machines and mounts.
    state: tuple[int, ...]
    layout: tuple[Any, ...] = ()  # type, shape, shape of the chunks, and numbers of the filters

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> IndexKey:
        state = identity_of(dataset.file).state
        filters = tuple(each.number for each in codecs.filters_of(dataset))
        layout = dataset.dtype.str, dataset.shape, dataset.chunks, filters
        return cls(path_of(dataset.file), dataset.name or "", state, layout)

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


NBIT, SCALEOFFSET = 5, 6  # as in h5py.h5z
# Bytes before the values of a scale-offset chunk: bits per value, length of the minimum, and 16 for the minimum.
SCALEOFFSET_HEAD = 21


def check_chunk_lengths(
    dataset: h5py.Dataset, box: Iterable[tuple[int, slice]] = (), axis: int = 0, row: int | None = None
) -> None:
    """Check that the chunks within a range of some axes have all their bytes. Errors name a row, or that on an axis."""
    filters, shape, chunk = codecs.filters_of(dataset), dataset.shape, dataset.chunks or ()
    nbytes = math.prod(chunk) * dataset.dtype.itemsize
    corners = [range(0, n, c) for n, c in zip(shape, chunk, strict=True)]
    for each, span in box:
        corners[each] = range(span.start // chunk[each] * chunk[each], span.stop, chunk[each])
    for corner in itertools.product(*corners):
        try:
            mask, stored = codecs.read_chunk(dataset, corner)
        except LIBRARY_ERRORS:
            continue  # the chunk was never written, or h5py will raise the same error
        if len(stored) == nbytes and any(at + c > n for at, c, n in zip(corner, chunk, shape, strict=True)):
            continue  # some datasets leave edge chunks unfiltered
        try:
            check_chunk_length(filters, mask, np.frombuffer(stored, np.uint8), nbytes)
        except CorruptError as error:
            raise corrupt_error(dataset, corner, str(error), int(corner[axis]) if row is None else row) from error


def check_chunk_length(filters: tuple[codecs.Filter, ...], mask: int, data: Bytes, nbytes: int) -> None:
    """Check that a stored chunk decodes to at least ``nbytes`` bytes, as far as this package knows its filters."""
    applied = [each for number, each in enumerate(filters) if not mask >> number & 1]
    while applied:
        last = applied.pop()
        sums = int(codecs.SUM_BYTES * sum(each.number == codecs.FLETCHER32 for each in applied))
        # Bytes of the chunk after the other filters; None if they depend on the values.
        exact = None if any(each.changes_size and not _is_identity(each) for each in applied) else nbytes + sums
        if last.number in (NBIT, SCALEOFFSET) and exact is not None and not _is_identity(last):
            if len(data) < (needed := _needed_bytes(last, data, exact)):
                raise CorruptError(f"only {len(data)} of {needed} bytes for filter {last.number}")
            return  # from enough bytes, libhdf5 decodes all values
        if last.number == codecs.SHUFFLE and not applied:
            break  # shuffle keeps the size
        if last.number == codecs.FLETCHER32:
            data = data[: max(len(data) - codecs.SUM_BYTES, 0)]  # libhdf5 verifies the checksum
        elif last.number == codecs.DEFLATE and exact is None:
            try:
                data = np.frombuffer(zlib.decompress(data.data), np.uint8)
            except zlib.error as error:
                raise CorruptError(str(error)) from error
        elif not _is_identity(last):
            codec = last.codec
            if codec is None or codec.missing or (exact is None and last.changes_size):
                return
            data = codec.decode(data, len(data) if exact is None else exact, last.parameters)
    if len(data) < nbytes:
        raise CorruptError(f"{len(data)} bytes instead of {nbytes}")


def _is_identity(each: codecs.Filter) -> bool:
    """Whether n-bit or scale-offset stores values unchanged, because they need all their bits."""
    parameters = each.parameters
    if each.number == SCALEOFFSET and len(parameters) > 4:
        return parameters[0] == 2 and parameters[1] == 8 * parameters[4]
    return each.number == NBIT and len(parameters) > 1 and parameters[1] != 0


def _needed_bytes(last: codecs.Filter, data: Bytes, nbytes: int) -> int:
    """Bytes that n-bit or scale-offset reads to decode ``nbytes`` bytes."""
    parameters, head = last.parameters, SCALEOFFSET_HEAD if last.number == SCALEOFFSET else 0
    if len(data) < head or len(parameters) < 5 or (not head and (len(parameters) < 8 or parameters[3] != 1)):
        return head  # too short for its head; or n-bit of values that are not numbers
    values, size = parameters[2], parameters[4]
    # n-bit has the bits per value in its parameters, scale-offset at the beginning of each chunk.
    bits = int.from_bytes(data[:4].tobytes(), "little") if head else parameters[6]
    if values * size != nbytes:
        raise CorruptError(f"filter {last.number} decodes to {values * size} bytes instead of {nbytes}")
    if bits > 8 * size:
        raise CorruptError(f"its head claims {bits} bits per value, but a value has {size} bytes")
    return head - (-values * bits // 8)


def columns_of(dataset: h5py.Dataset, *, usual: bool = True) -> Columns | None:
    """The chunk records of a dataset, in libhdf5's order if it lists wrong corners.

    None if some are not ``usual``, so that h5py must read the dataset.
    """
    chunk, grid, file = np.array(dataset.chunks), grid_of(dataset), dataset.file
    chunks, known = math.prod(grid), corners_known(dataset)
    filters, nbytes = codecs.filters_of(dataset), math.prod(dataset.chunks or ()) * element_bytes(dataset)
    records, end = records_of(dataset), identity_of(file).size
    corners, (masks, offsets, sizes) = records[:, : len(grid)], records[:, len(grid) :].T
    ends, numbers = offsets + sizes, np.arange(len(records))
    if known:
        places, inside = np.divmod(corners, chunk)
        outside = ((inside != 0) | (places < 0) | (places >= np.array(grid))).any(axis=1)
        if outside.any():
            raise corrupt_error(dataset, corners[outside.argmax()], "is listed, but no chunk begins there")
        numbers = np.ravel_multi_index(tuple(places.T), grid)
    order, overlaps = np.argsort(offsets, kind="stable"), np.zeros(len(records), np.bool_)
    overlaps[order[1:]] = offsets[order[1:]] < np.maximum.accumulate(ends[order])[:-1]
    impossible = {
        "is listed twice, or behind a later one": (np.diff(numbers, prepend=-1) <= 0) | (numbers >= chunks),
        "lies where no file reaches": offsets < 0,
        "begins in the head of the file": offsets == 0,
        f"ends behind the {end} bytes of the file; was it truncated?": (ends > end) | (ends < offsets),
        f"has the wrong size: a chunk has {nbytes} bytes before its filters, which are "
        f"{', '.join(str(each.number) for each in filters) or 'none'}": ~_sizes_fit(filters, nbytes, sizes, masks),
        "overlaps another chunk": overlaps,
    }
    for problem, wrong in impossible.items():
        if wrong.any():
            at = int(wrong.argmax())
            place = f"{sizes[at]} bytes at byte {int(offsets[at]) % 2**64}"
            raise corrupt_error(dataset, corners[at], f"{problem} ({place})")
    columns = Columns(np.full(chunks, -1, np.int64), np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32))
    columns.offsets[numbers], columns.sizes[numbers], columns.masks[numbers] = offsets, sizes, masks
    as_usual = (sizes < 2**32) & (offsets > file.userblock_size) & (masks < 1 << len(filters))
    return None if usual and not as_usual.all() else columns


def _sizes_fit(filters: tuple[codecs.Filter, ...], nbytes: int, sizes: Array, masks: Array) -> Array:
    fits = sizes > 0
    for mask in np.unique(masks).tolist() if masks.any() else [0]:
        applied = [each for number, each in enumerate(filters) if not mask >> number & 1]
        if not any(each.changes_size for each in applied):
            sums = codecs.SUM_BYTES * sum(each.number == codecs.FLETCHER32 for each in applied)
            # Edge chunks that a dataset leaves unfiltered have no checksums.
            fits &= (masks != mask) | (sizes == nbytes + sums) | (sizes == nbytes)
    return fits


def corners_known(dataset: h5py.Dataset) -> bool:
    """Whether libhdf5 lists the right corners of chunks: 1.12 to 2.0 do not, if only a later axis is unlimited."""
    unlimited = [axis for axis, most in enumerate(dataset.maxshape or ()) if most is None]
    return len(unlimited) != 1 or unlimited == [0]


def records_of(dataset: h5py.Dataset) -> npt.NDArray[np.int64]:
    """The record of every written chunk, one row each: corner, filter mask, offset and size; 1 µs per chunk."""
    records, path, name = array.array("Q"), path_of(dataset.file), (dataset.name or "").strip("/")
    with as_source_errors(f"{path}:/{name}", "has chunks that libhdf5 cannot list", file=path, dataset=name):
        dataset.id.chunk_iter(lambda info: records.extend((*info[0], *info[1:])))
    return np.asarray(records, np.uint64).view(np.int64).reshape(-1, len(dataset.shape) + 3)


def corrupt_error(dataset: h5py.Dataset, corner: Any, problem: str, row: int | None = None) -> CorruptError:
    path, name, chunk = path_of(dataset.file), dataset.name or "", tuple(int(n) for n in corner)
    what = f"{path}:{name}, chunk {chunk}: {problem}; the file is damaged: restore it, or write the dataset again"
    return CorruptError(f"{what} from what can be read of it", file=path, dataset=name.strip("/"), row=row)


def element_bytes(dataset: h5py.Dataset) -> int:
    """Bytes of an element in the file: of its reference into the global heap if elements have variable length."""
    return stored_type(dataset, dataset.id.get_type())[1] if dataset.dtype.hasobject else int(dataset.dtype.itemsize)


def stored_type(dataset: h5py.Dataset, kind: Any) -> tuple[Any, int]:
    """The numpy type of stored values without members in the global heap, None if nothing is left; its stored bytes."""
    size, dtype, what = kind.get_size(), kind.dtype, kind.get_class()
    if not dtype.hasobject:
        return dtype, size
    if what == h5py.h5t.ARRAY:
        return None, size // kind.get_super().get_size() * stored_type(dataset, kind.get_super())[1]
    if what != h5py.h5t.COMPOUND:
        # A value of variable length is stored as its length, and the address and number of an object in the heap.
        return None, size if what == h5py.h5t.REFERENCE else 8 + dataset.file.id.get_create_plist().get_sizes()[0]
    members, grown = dict[str, tuple[Any, int]](), 0
    # h5py gives offsets in memory. There, a reference to the heap may take fewer bytes than in the file.
    for number in sorted(range(kind.get_nmembers()), key=kind.get_member_offset):
        inner, name = kind.get_member_type(number), kind.get_member_name(number).decode(errors="surrogateescape")
        member, nbytes = stored_type(dataset, inner)
        members |= {} if member is None else {name: (member, kind.get_member_offset(number) + grown)}
        grown += nbytes - inner.get_size()
    formats, offsets = zip(*members.values(), strict=True) if members else ((), ())
    record: dict[str, Any] = {"names": [*members], "formats": formats, "offsets": offsets, "itemsize": size + grown}
    return np.dtype(record), size + grown  # type: ignore[call-overload]


def grid_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    return tuple(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks or (), strict=True))


MOST_CHUNK_BYTES = 2**30
# An index takes 16 bytes per chunk, 100 and more while it is built, and 1 to 2 µs. Without a cache, each process builds
# its own. Beyond this size, that is worse than slow reading.
MOST_CHUNKS = 10**7
# Chunks that are read both by their offset and by libhdf5: the first, the last and some between.
PROBES = 5
NOT_FOUND = "is listed, but libhdf5 does not find it"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset, with `Columns` in grid order (last axis fastest)."""

    shape: tuple[int, ...]  # shape of a chunk
    grid: tuple[int, ...]  # number of chunks along each axis
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint32]
    filters: codecs.FilterPipeline
    fill: Any  # value of chunks that were never written


def unsupported_reason(dataset: h5py.Dataset) -> str | None:
    """Why h5py must read a dataset, by its layout, type and filters; None if its chunks may be indexed."""
    filters = codecs.filters_of(dataset)
    chunked = dataset.chunks is not None
    shapes = list(zip(dataset.shape, dataset.chunks or (), strict=chunked))
    reasons = {
        "its values are not stored as numpy has them": not has_numpy_layout(dataset),
        "none of its values was ever written": not chunked and dataset.id.get_storage_size() == 0,
        "its values lie elsewhere than libhdf5 says": not chunked,
        "it has filters that only libhdf5 decodes": any(each.codec is None for each in filters)
        or sum(each.changes_size for each in filters) > 1,
        # An edge chunk that was never filtered would look like one that was.
        "its filters cannot tell unfiltered edge chunks": len(filters) > 0
        and not any(each.changes_size or each.number == codecs.FLETCHER32 for each in filters)
        and any(n % c for n, c in shapes),
        "it is unlimited along one axis that is not the first": not corners_known(dataset),
        "its chunks are very large": math.prod(c for _, c in shapes) * element_bytes(dataset) > MOST_CHUNK_BYTES,
        "it has too many chunks": math.prod(-(-n // c) for n, c in shapes) > MOST_CHUNKS,
        "the file is split over several": not in_one_file(dataset),
        "the library that decodes its filters is missing: pip install 'lit-async-data[codecs]'": any(
            each.codec is not None and each.codec.missing for each in filters
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def check_unindexed(dataset: h5py.Dataset) -> None:
    """Check the records of a dataset that h5py reads, and that libhdf5 finds each chunk, not a fill value instead."""
    if dataset.chunks is None or not in_one_file(dataset) or math.prod(grid_of(dataset)) > MOST_CHUNKS:
        return
    columns: Any = columns_of(dataset, usual=False)
    grid, may_lack, written = grid_of(dataset), 0, np.flatnonzero(columns.offsets >= 0)
    if not corners_known(dataset):  # then only the number of written chunks is known
        may_lack, written = math.prod(grid) - len(written), np.arange(math.prod(grid))
    for corner in map(tuple, (np.stack(np.unravel_index(written, grid), axis=1) * dataset.chunks).tolist()):
        if not retry_once(functools.partial(codecs.is_found, dataset, corner)):
            may_lack -= 1
            if may_lack < 0:
                raise corrupt_error(dataset, corner, NOT_FOUND)


def in_one_file(dataset: h5py.Dataset) -> bool:
    """Whether HDF5 stores a file as one file of the system, so that its offsets are offsets in that file."""
    file = dataset.file
    return mirrored_file(file) is not None or bool(file.id.get_access_plist().get_driver() == h5py.h5fd.SEC2)


def has_numpy_layout(dataset: h5py.Dataset) -> bool:
    dtype = dataset.dtype
    return dtype.kind in "SVO" or as_numpy(dataset.id.get_type(), dtype)


def as_numpy(stored: Any, dtype: np.dtype[Any]) -> bool:
    # Enumerations are stored as their base integers, and h5py stores bool as an enumeration.
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype):
        stored, dtype = stored.get_super(), np.dtype(np.int8) if dtype.kind == "b" else np.dtype(dtype.str)
    return dtype.kind in "iufc" and bool(stored.equal(h5py.h5t.py_create(dtype)))


def index_of(dataset: h5py.Dataset, cache: IndexCache) -> ChunkIndex | None:
    """The index of a dataset without an `unsupported_reason`; None if it is ambiguous, so that h5py must read."""
    key = IndexKey.of(dataset)
    if (kept := cache.load(key)) is not None:
        with contextlib.suppress(CorruptError):
            if (index := _verified(dataset, Columns(**kept))) is not None:
                return index
        _log.warning("%s: the cached index of chunks is wrong; building it again", key)
    built = columns_of(dataset)
    index = None if built is None else _verified(dataset, built)
    if built is not None and index is not None:
        cache.store(key, built._asdict())  # of the state before, if the file has changed meanwhile
    return index


def _verified(dataset: h5py.Dataset, columns: Columns) -> ChunkIndex | None:
    """The index with these columns, if probed chunks match and no chunk without a fill value is missing."""
    # Without a fill value, every chunk must exist.
    fill, properties = None, dataset.id.get_create_plist()
    if dataset.dtype.hasobject:
        # Zeros are a reference to no value.
        fill = None if properties.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED else 0
    elif properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
        with contextlib.suppress(*LIBRARY_ERRORS):
            fill = dataset.fillvalue
    if fill is None and (columns.offsets < 0).any():
        return None
    chunk = dataset.chunks or ()
    pipeline = codecs.FilterPipeline(codecs.filters_of(dataset), math.prod(chunk) * element_bytes(dataset))
    index = ChunkIndex(chunk, grid_of(dataset), *columns, pipeline, fill)
    return index if _probes_match(dataset, index) and not _edges_unfiltered(dataset, index) else None


def _probes_match(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether probed chunks have the same bytes at their offsets as libhdf5 reads. If they differ, the file is damaged.

    But with a user block, offsets count from its end before HDF5 1.14.4, and from the start of the file since.
    """
    written = np.flatnonzero(index.offsets >= 0) if index.offsets.min() < 0 else range(len(index.offsets))
    if not len(written):
        return True
    probes = sorted({int(written[int(each)]) for each in np.linspace(0, len(written) - 1, PROBES)})
    fetch(dataset.file, index.offsets[probes], index.sizes[probes].astype(np.int64))
    for number in probes:
        corner = tuple(int(n) * c for n, c in zip(np.unravel_index(number, index.grid), index.shape, strict=True))
        size, offset = int(index.sizes[number]), int(index.offsets[number])
        try:
            mask, stored = retry_once(functools.partial(codecs.read_chunk, dataset, corner))
            found = bytes_at(dataset.file, size, offset)
        except LIBRARY_ERRORS as error:
            if errno_of(error) in REMEDIES:
                raise
            raise corrupt_error(dataset, corner, NOT_FOUND) from error
        if mask != index.masks[number] or found != stored:
            if dataset.file.userblock_size:
                return False
            raise corrupt_error(dataset, corner, f"libhdf5 finds it elsewhere than at byte {offset}, where it lists it")
    return True


def _edges_unfiltered(dataset: h5py.Dataset, index: ChunkIndex) -> bool:
    """Whether edge chunks were stored unfiltered: all have the size of unfiltered chunks, and one does not decode."""
    if not index.filters.filters:
        return False
    inside = np.ones(index.grid, np.bool_)
    for axis, (n, c) in enumerate(zip(dataset.shape, index.shape, strict=True)):
        if n % c:
            inside.swapaxes(0, axis)[-1] = False
    edges = np.flatnonzero(~inside.ravel() & (index.masks == 0) & (index.offsets >= 0))
    if not len(edges) or (index.sizes[edges] != index.filters.nbytes).any():
        return False
    stored = bytes_at(dataset.file, index.filters.nbytes, int(index.offsets[edges[0]]))
    try:
        index.filters.decode(np.frombuffer(stored, np.uint8), 0)
    except CorruptError:
        return True
    return False


# Indexes of fewer chunks are built in 20 to 40 ms, which is not worth a file.
FEWEST_CHUNKS = 2**14
# Raise this when the columns or their meaning change.
VERSION = 10
# Letters of the data file's name in the name of its index: few enough for any file system.
NAME_SHOWN = 50


class IndexCache:
    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else local_files.CacheFolder(folder, "index")

    def load(self, key: IndexKey) -> dict[str, Array] | None:
        if self._folder is None or (data := self._folder.load(*_place(key))) is None:
            return None
        begin, columns = data.index(b"\n") + 1, dict[str, Array]()
        for name, dtype, shape in json.loads(data[:begin]):
            columns[name] = np.frombuffer(data, dtype, math.prod(shape), begin).reshape(shape).copy()
            begin += columns[name].nbytes
        return columns

    def store(self, key: IndexKey, columns: Mapping[str, Array]) -> None:
        """Write a file for later processes. Several may write at once; a failure is logged."""
        small = key.layout and math.prod(-(-n // c) for n, c in zip(*key.layout[1:3], strict=True)) < FEWEST_CHUNKS
        if self._folder is None or small or changed_recently(*key.state[2:]):
            return
        listed = json.dumps([(name, each.dtype.str, each.shape) for name, each in columns.items()]).encode()
        self._folder.store(*_place(key), b"".join([listed, b"\n", *(each.tobytes() for each in columns.values())]))


def _place(key: IndexKey) -> tuple[str, str, bytes]:
    """The key as text, the name of its file, and the first lines of that file."""
    real = key.path if is_address(key.path) else os.path.realpath(key.path)  # all links to a file share one index
    properties = json.dumps({name: value for name, value in dataclasses.asdict(key).items() if name != "path"})
    head = f"lit_async_data: an index of chunks, version {VERSION}; may be deleted\n{properties}\n"
    digest = local_files.short_digest(f"{real}\0{key.name}")
    return str(key), f"{os.path.basename(real)[:NAME_SHOWN]}.{digest}.index", head.encode()
