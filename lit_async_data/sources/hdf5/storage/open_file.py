"""Files that are read, and checked to be those that were inspected; values in other files, and in the global heap.

The heap is after the HDF5 file format specification 3.0, III.E, and references to it after IV.A.2.d.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import io
import logging
import math
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import ChangedError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.files.files import LOCAL, Files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import MirroredFile
from lit_async_data.sources.hdf5.storage import failures
from lit_async_data.sources.hdf5.storage.codecs import check_filters
from lit_async_data.sources.hdf5.storage.failures import context_of, h5py, open_raw
from lit_async_data.sources.hdf5.storage.handles import identity_of, open_h5py, path_of
from lit_async_data.sources.local_files import errno_of, retry_once
from lit_async_data.system import ProcessGuard, is_cold

ExternalFiles = tuple[tuple[str, FileIdentity], ...]
MOST_LINKS = 64  # libhdf5 follows 16
_HARD = 0  # H5L_TYPE_HARD


def refuse_external_link(file: h5py.File, name: str) -> None:
    """Refuse a name that leads into another file, before libhdf5 opens that: a pipe would block it for ever."""
    here, context = path_of(file), context_of(path_of(file), name)
    folder, place, left, links = os.path.dirname(here), "", name.split("/"), 0
    while left and links < MOST_LINKS:
        part, *left = left
        if part in ("", "."):
            continue
        at = f"{place}/{part}"
        try:
            hard = file.id.links.get_info(at.encode(errors="surrogateescape")).type == _HARD
            link: Any = None if hard else file.get(at, getlink=True)  # takes 20 times as long
        except failures.LIBRARY_ERRORS:
            return  # opening it will say why
        outside = isinstance(link, h5py.ExternalLink)
        if outside and os.path.realpath(other := os.path.join(folder, link.filename)) != os.path.realpath(here):
            what = f"is a link into another file, {other}; give that file as path, or allow it with allow_external=True"
            raise FormatError(f"{what}, which sample='group' and 'dataset' do not", **context)
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            place = place if isinstance(link, h5py.SoftLink) and link.path[:1] != "/" else ""
            left, links = [*link.path.split("/"), *left], links + 1
        else:
            place = at
    if left:
        raise FormatError("cannot be opened, since its links lead in a circle; correct them", **context)


def external_files(dataset: h5py.Dataset, file: h5py.File, name: str, *, allowed: bool) -> ExternalFiles:
    """The other files that hold values of a dataset, with their identities.

    They must be allowed, hold all values when the source is built, and are checked by every read: where one is missing
    or too short, libhdf5 silently reads other values.
    """
    context, what = context_of(path_of(file), name), ""
    if dataset.is_virtual:
        what = "is a virtual dataset, and a missing part would be read as fill values; give the files it is made of "
        what += "as path, write its values to a dataset of their own"
    elif dataset.external:
        what = f"stores its values in another file, {dataset.external[0][0]}; write them to a dataset of this file"
    if what and not allowed:
        raise FormatError(f"{what}, or allow it with allow_external=True", **context)
    if not allowed:
        return ()
    found = {os.path.abspath(dataset.file.filename)}
    _follow(dataset, context, found, frozenset())
    found.discard(os.path.abspath(file.filename))
    return tuple((path, FileIdentity.of(os.stat(path))) for path in sorted(found))


def _follow(dataset: h5py.Dataset, context: dict[str, Any], found: set[str], above: frozenset[tuple[str, str]]) -> None:
    """Collect the external files of a dataset, and those of the datasets it refers to, recursively."""
    path = os.path.abspath(dataset.file.filename)
    me = (path, dataset.name or "")
    if me in above:
        raise FormatError(f"takes values from itself, by {path}:{dataset.name}; correct the links", **context)
    access: Any = dataset.id.get_access_plist()  # knows the prefixes that HDF5_EXTFILE_PREFIX and HDF5_VDS_PREFIX set
    left = math.prod(dataset.shape or ()) * dataset.id.get_type().get_size()
    for stored, offset, size in dataset.external or ():
        folder = os.fsdecode(access.get_efile_prefix()) or os.getcwd()  # the only one that libhdf5 searches
        other = _resolved(os.fsdecode(stored), [folder], context)
        found.add(other)
        taken, there = min(size, left), os.stat(other).st_size
        end, left = offset + taken, left - taken
        if taken and there < end:
            what = f"takes bytes {offset} to {end} of {other}, which has {there}, and libhdf5 would read zeros; "
            raise CorruptError(f"{what}restore that file, or if zeros are right: truncate -s {end} {other}", **context)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for part in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%b" in part.file_name or "%b" in part.dset_name:
            raise FormatError(f"takes values from files named by a pattern, {part.file_name}; list them", **context)
        other = path
        if part.file_name != ".":
            folders = [os.fsdecode(access.get_virtual_prefix()), os.path.dirname(path), os.getcwd()]
            other = _resolved(part.file_name, [*filter(None, folders)], context)
        key = other, part.dset_name
        if key not in shapes:
            found.add(os.path.abspath(other))
            try:
                with h5py.File(other, "r", locking="best-effort") as file:
                    source = file.get(part.dset_name)
                    if not isinstance(source, h5py.Dataset):
                        raise _absent(*key, context)
                    check_filters(source, *key)
                    _follow(source, context, found, above | {me})
                    shapes[key] = source.shape or ()
            except OSError as error:
                raise _absent(*key, context) from error
        if _is_short(part, shapes[key], dataset.shape):
            what = f"takes values from {other}:/{part.dset_name.strip('/')} that its shape {shapes[key]} does not have"
            cure = "restore that file, or write the virtual dataset again"
            raise CorruptError(f"{what}, and libhdf5 would read others; {cure}", **context)


def _is_short(part: Any, source: tuple[int, ...], virtual: tuple[int, ...]) -> bool:
    taken = part.src_space
    if taken.get_select_type() == h5py.h5s.SEL_ALL:
        points = part.vspace.get_select_npoints()
        if math.prod(source) <= points or not points:
            return bool(math.prod(source) < points)
        # It has grown: along its first axis only, or libhdf5 takes other values.
        block = [end - begin + 1 for begin, end in zip(*part.vspace.get_select_bounds(), strict=True)]
        return list(source[1:]) != block[len(block) - len(source) + 1 :]
    if taken.is_regular_hyperslab() and h5py.h5s.UNLIMITED in taken.get_regular_hyperslab()[2]:
        return _selected(taken, source) < _selected(part.vspace, virtual)
    _, last = taken.get_select_bounds()
    return len(last) != len(source) or any(at >= size for at, size in zip(last, source, strict=True))


def _selected(space: Any, shape: tuple[int, ...]) -> int:
    number = 1
    for start, stride, count, block, size in zip(*space.get_regular_hyperslab(), shape, strict=True):
        whole, rest = divmod(max(size - start, 0), stride if count > 1 else max(stride, block))
        number *= min(whole * block + min(rest, block), count * block)
    return number


def _resolved(name: str, folders: list[str], context: dict[str, Any]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    among = " or ".join(dict.fromkeys(folders))
    raise MissingError(f"takes values from {name}, which is not in {among}; restore that file", **context)


def _absent(path: str, name: str, context: dict[str, Any]) -> MissingError:
    return MissingError(f"takes values from {path}:/{name.strip('/')}, which cannot be opened; restore it", **context)


HEAD = 16  # bytes before the objects of a collection, and before the values of each object
SIGNATURE = b"GCOL\x01"
MOST_SHARED = 2**16  # bytes of a collection of several objects
_INTEGERS = {2: "H", 4: "I", 8: "Q"}  # by their bytes, as struct calls them


@dataclasses.dataclass(frozen=True)
class GlobalHeap:
    length_bytes: int  # of each length in it
    begin: int  # bytes of the user block, from whose end addresses count
    end: int  # bytes of the file

    @classmethod
    def of(cls, file: Any) -> GlobalHeap:
        return cls(file.id.get_create_plist().get_sizes()[1], file.userblock_size, identity_of(file).size)

    def references(self, stored: Bytes) -> Indices:
        """Bytes of a value, offset of its collection (−1: outside of the file), and number in that; int64, (n, 3)."""
        fields = np.zeros((len(stored), 3, 8), np.uint8)
        for number, part in enumerate((stored[:, :4], stored[:, 4:-4], stored[:, -4:])):
            fields[:, number, : part.shape[1]] = part
        found: Indices = fields.view("<i8")[..., 0].astype(np.int64)
        outside = (found[:, 1] < 0) | (found[:, 1] > self.end - self.begin - 2 * HEAD)
        found[:, 1] = np.where(outside, -1, found[:, 1] + self.begin)
        return found

    @staticmethod
    def pieces(references: Indices, *, remote: bool) -> tuple[Indices, Indices]:
        """Where to read the values of references, and how many bytes: if ``remote``, with all that is read for them."""
        lengths, addresses, numbers = references.T
        sizes = lengths + 2 * HEAD
        # To find another than the first object, all before it are read.
        return addresses, np.where(numbers > 1, np.maximum(sizes, MOST_SHARED), sizes) if remote else sizes

    def value(self, reference: list[int], read: Callable[[int, int], Bytes], where: str) -> Bytes:
        """The bytes that a reference leads to, or a `CorruptError` that begins with ``where``."""
        length, address, number = reference
        there = f"{where}: refers to object {number} at byte {address} of the file, in its global heap, "
        if not length:
            return np.empty(0, np.uint8)
        if address < 0:
            raise CorruptError(f"{where}: refers to a place outside of the file; restore the file")
        # Often it is the first object, and this is all of it; if the length is wrong, not too much.
        data = read(address, min(2 * HEAD + length, 2**20, self.end - address))
        # In the head of a collection and of an object, the length is in the same place.
        head = struct.Struct(f"<H6x{_INTEGERS[self.length_bytes]}").unpack_from
        most, place, found = head(data.data)[1], HEAD, 1
        if data[: len(SIGNATURE)].tobytes() != SIGNATURE or most > self.end - address:
            raise CorruptError(f"{there}but no collection of objects begins there; restore the file")
        while found and place + HEAD <= most:  # object 0 is the space that is left
            data = data if place + HEAD <= len(data) else read(address, most)
            (found, size), begin = head(data.data, place), place + HEAD
            if found == number and number:
                if size != length or begin + size > most:
                    raise CorruptError(f"{there}for {length} bytes, but it has {size}; restore the file")
                data = data if begin + size <= len(data) else read(address, most)
                return data[begin : begin + size]
            place = begin + -(-size // 8) * 8
        raise CorruptError(f"{there}where it is missing; restore the file")


# Pieces that are probed for being in memory: telling the kernel to fetch what it already has halves the speed.
PROBES = 8
MAX_FETCH_BYTES = 128 * 1024  # the kernel may ignore what one call asks for beyond


def _merged(begins: Indices, ends: Indices) -> list[tuple[int, int]]:
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    return list(zip(begins[np.append(0, breaks)].tolist(), ends[np.append(breaks - 1, -1)].tolist(), strict=True))


# libhdf5 caches chunks of this many bytes per dataset, or two chunks if they are larger.
H5PY_CACHE_BYTES = 2**20
# Rows of this size and more are read by pread, which is about as fast as a map, and fails if the file shrinks.
PREAD_BYTES = 512 * 1024
# The same for compressed chunks, whose decoding takes many times as long.
PREAD_CHUNK_BYTES = 32 * 1024

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Handles:
    """What is open of one file. It closes when nobody refers to it, so a reader holds it until it has read."""

    def __init__(self, file: io.FileIO | MirroredFile) -> None:
        self.mirrored = file if isinstance(file, MirroredFile) else None
        self.descriptor = file.mirror.descriptor if isinstance(file, MirroredFile) else file.fileno()
        self.process = ProcessGuard()
        self.maps: dict[bool, npt.NDArray[np.uint8]] = {}
        self.h5py: h5py.File | None = None
        self.datasets: dict[str, h5py.Dataset] = {}
        if isinstance(file, MirroredFile):
            self.maps = dict.fromkeys((False, True), file.mirror.map)
        else:
            weakref.finalize(self, file.close)


class OpenFile:
    """The handles on one file, opened on first use.

    Attributes:
        path: Path or address.
        mapped: Whether small pieces are read by a map.
        remote: Whether bytes come from a mirror, which must `need` them before they are read by a map.
        cold: Whether the last probe for samples found a piece that is not in memory.
    """

    def __init__(
        self,
        path: str,
        identity: FileIdentity,
        files: Files = LOCAL,
        *,
        external: ExternalFiles = (),
        mapped: bool = True,
    ) -> None:
        self.path = path
        self.mapped = mapped
        self.remote, self._files = not files.is_local(path), files
        self._identity, self._external = identity, external
        self.cold = True
        self._opening, self._fetching = threading.Lock(), threading.Lock()  # a thread may be stuck in them
        # The handles, if any. Closing replaces the list, so a thread that is opening the file keeps nothing open.
        self._kept: list[_Handles] = []
        self._last: Callable[[], _Handles | None] = lambda: None  # the latest, while anybody holds them

    def during(self, read: Callable[[], T]) -> T:
        """Call a function that reads the file, which stays open meanwhile, whoever closes it. Thread-safe.

        Checks the file before and after: from one that shrank, h5py reads zeros and a map ends the process; one that is
        being written yields a mix of old and new values. Opened again, once, if its server has forgotten it.
        """
        try:
            return self._checked(read)
        except (SourceError, OSError) as error:
            if errno_of(error.__cause__ or error) != errno.ESTALE:
                raise
        self._kept, self._last = [], lambda: None
        return self._checked(read)

    def _checked(self, read: Callable[[], T]) -> T:
        handles = self._opened()
        try:
            if handles.mirrored is not None:  # its answers are checked
                with handles.mirrored.mirror.reading():
                    return read()
            self.check()
            try:
                found = read()
            except CorruptError:
                self.check()  # a changed file may look damaged: report the change
                raise
            self.check()
            return found
        finally:
            del handles  # else an error would keep the file open by its traceback

    def _opened(self) -> _Handles:
        kept = self._kept  # read once: another thread may close the file
        handles = kept[0] if kept else self._last()
        if handles is None:
            with self._opening:
                kept = self._kept
                if not kept:
                    mirrored = self._files.opened(self.path)
                    handles = _Handles(mirrored or open_raw(self.path))
                    if mirrored is None:
                        self._refuse_changed(handles.descriptor)
                    else:
                        _refuse_changed(self.path, self._identity, mirrored.identity)
                    self._last = weakref.ref(handles)
                    kept.append(handles)
                return kept[0]
        if handles.process.forked:
            cure = "HDF5 handles do not survive a fork; build the source in the child, or start the child by spawn"
            raise handles.process.error(f"{self.path}: was opened", cure, file=self.path)
        return handles

    def check(self) -> None:
        self._refuse_changed(self._opened().descriptor)
        for path, was in self._external:
            try:
                now = FileIdentity.of(os.stat(path))
            except OSError as error:
                what = f"cannot be opened ({error.strerror}), and {self.path} takes values from it; restore it"
                raise MissingError(f"{path}: {what}", file=path) from error
            _refuse_changed(path, was, now)

    def _refuse_changed(self, descriptor: int) -> None:
        now = FileIdentity.of(os.fstat(descriptor))
        if now != self._identity:
            _refuse_changed(self.path, self._identity, now)
            self._identity = now

    def map(self, *, random_access: bool = True) -> npt.NDArray[np.uint8]:
        """The bytes of the file; with ``random_access`` the kernel reads nothing ahead but what `fetch` names."""
        kept = self._kept
        if kept and (known := kept[0].maps.get(random_access)) is not None:
            return known
        handles = self._opened()
        with self._opening:
            if random_access not in handles.maps:
                with failures.as_source_errors(self.path, "cannot be mapped", file=self.path):
                    mapped = mmap.mmap(handles.descriptor, self._identity.size, access=mmap.ACCESS_READ)
                if random_access and is_cold(handles.descriptor, 0) is not None:
                    system.read_at_random(mapped)
                handles.maps[random_access] = np.frombuffer(mapped, np.uint8)
            return handles.maps[random_access]

    def fetch(self, offsets: Indices, sizes: Indices | int) -> bool:
        """Tell the kernel to fetch pieces if some are not in memory; returns whether, before they are there.

        Offsets are negative for pieces that were never written.
        """
        handles, there = self._opened(), offsets >= 0
        begins, ends = offsets[there], (offsets + sizes)[there]
        if handles.mirrored is not None:
            return handles.mirrored.fetch(begins, ends)
        descriptor = handles.descriptor
        if not any(is_cold(descriptor, at) for at in begins[:: max(len(begins) // PROBES, 1)].tolist()):
            return False
        pieces = _merged(begins, ends)
        # One thread at a time: each call releases the GIL, and a cold file came at 0.4 of the rate with two.
        with self._fetching:
            for first, end in pieces:
                for begin in range(first, end, MAX_FETCH_BYTES):
                    os.posix_fadvise(descriptor, begin, min(MAX_FETCH_BYTES, end - begin), os.POSIX_FADV_WILLNEED)
        return True

    def need(self, offsets: Indices, sizes: Indices | int) -> None:
        """Wait until pieces are in the mirror; those of other files are always there. As for `fetch`."""
        mirrored, there = self._opened().mirrored, offsets >= 0
        if mirrored is not None:
            mirrored.need(offsets[there], (offsets + sizes)[there])

    def read_at(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        if self.remote:
            self._need_one(offset, out.nbytes)
        handles, view, done = self._opened(), out.data, 0
        while done < len(view):
            begin = offset + done
            try:
                got = retry_once(functools.partial(system.preadv, handles.descriptor, [view[done:]], begin))
            except OSError as error:
                where = f"{self.path}, {len(view) - done} bytes at byte {begin}"
                raise failures.source_error(error, where, "cannot be read", file=self.path) from error
            if not got:
                what = f"ends at byte {begin}, in the middle of a sample, so it shrank since the source was built"
                raise ChangedError(f"{self.path}: {what}; build the source again", file=self.path)
            done += got

    def _need_one(self, offset: int, size: int) -> None:  # in a tenth of the time of `need` if the piece is there
        mirrored = self._opened().mirrored
        if mirrored is not None and not mirrored.mirror.holds(offset, offset + size):
            self.need(np.array([offset]), size)

    def bytes_at(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes at an offset: a view of the map if they are few and maps are allowed, else a copy."""
        return next(self.pieces((offset,), (size,)))

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes at each of several offsets, as `bytes_at` returns them."""
        mapped = self.map() if self.mapped and min(sizes, default=0) < PREAD_CHUNK_BYTES else None
        if self.remote and len(offsets) == 1:
            self._need_one(offsets[0], sizes[0])
        elif self.remote:
            self.need(np.array(offsets, np.int64), np.array(sizes, np.int64))
        for offset, size in zip(offsets, sizes, strict=True):
            if mapped is not None and size < PREAD_CHUNK_BYTES:
                piece = mapped[offset : offset + size]
                yield piece.copy() if self.remote else piece  # a cached chunk may keep it, and a mirror frees its bytes
            else:
                found = np.empty(size, np.uint8)
                self.read_at(offset, found)
                yield found

    def dataset(self, name: str, chunk_bytes: int, *, kept: bool = True) -> h5py.Dataset:
        """A dataset opened by h5py, with a cache of at least two chunks; none if ``chunk_bytes`` is 0."""
        handles = self._opened()
        with self._opening:
            file = handles.h5py
            if file is None:
                file = open_h5py(self.path, self._files)
                # h5py opens by path, which may lead to another file than the descriptor by now.
                _refuse_changed(self.path, self._identity, identity_of(file))
                weakref.finalize(handles, file.close).atexit = False
                handles.h5py = file
            if name in handles.datasets:
                return handles.datasets[name]
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            # Hash slots: a prime well above the number of cached chunks, as HDF5 advises.
            access.set_chunk_cache(12421, max(H5PY_CACHE_BYTES, 2 * chunk_bytes) if chunk_bytes else 0, 0.75)
            dataset = h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
            check_filters(dataset, self.path, name)
            if kept:
                handles.datasets[name] = dataset
            return dataset

    def close(self) -> None:
        """Close every handle, or have the last reader close them. A map lives until the last array that views it."""
        self._kept = []

    @property
    def forked(self) -> bool:
        kept = self._kept
        return bool(kept) and kept[0].process.forked

    def check_process(self) -> None:
        if self.forked:
            self._opened()


def _refuse_changed(path: str, was: FileIdentity, now: FileIdentity) -> None:
    change = was.difference(now, path)
    if change is not None:
        ways = "build the source again, when nobody has the file open for writing"
        raise ChangedError(f"{path}: {change} since the source was built; {ways}", file=path)


class OpenFiles:
    """The files of a source. Keeps only the most recently used ones open. Thread-safe."""

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._recently_used: collections.OrderedDict[int, None] = collections.OrderedDict()
        # A file takes up to three descriptors, its map included. A quarter of the limit is left to other code.
        limit = system.descriptor_limit()
        self._max_open = max(limit // 4, 1)
        if len(files) > self._max_open:
            what = f"only {self._max_open} of {len(files)} files stay open, since this process may open {limit}, and"
            _log.warning("%s are opened again and again in random order; ulimit -n %d is enough", what, 4 * len(files))

    def use(self, number: int) -> OpenFile:
        """A file that is to be read. Closes the one that was used least recently if too many are open."""
        used = self._recently_used
        if len(self.files) > self._max_open:
            with self._lock:
                used[number] = None
                used.move_to_end(number)
                oldest = used.popitem(last=False)[0] if len(used) > self._max_open else None
            if oldest is not None:
                self.files[oldest].close()
        return self.files[number]
