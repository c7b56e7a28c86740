"""`OpenFile`: an HDF5 file that is read, and checked to be the one that was inspected."""

from __future__ import annotations

import collections
import errno
import functools
import io
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import ChangedError, CorruptError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.storage.codecs import check_filters
from lit_async_data.sources.hdf5.storage.external_files import ExternalFiles, FileIdentity
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py, open_raw, source_error
from lit_async_data.sources.local_files import errno_of, retry_once
from lit_async_data.system import ProcessGuard, is_cold

if TYPE_CHECKING:
    import h5py


# Pieces that a worker probes for being in memory before it tells the kernel to fetch. A probe takes 0.8 µs; telling the
# kernel to fetch what it already has halves the speed of reading.
PROBES = 8
# The kernel may ignore what one call asks for beyond this size.
MAX_FETCH_BYTES = 128 * 1024


class ReadAhead:
    """Fetches pieces of one file, if a probe finds some of them cold. Thread-safe."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.cold = True  # whether the last probe found a piece that is not in memory
        self._lock = threading.Lock()

    def fetch(self, offsets: Indices, sizes: Indices | int) -> bool:
        """Tell the kernel to fetch pieces if some of them are not in memory; returns whether, before they are there.

        Offsets are negative for pieces that were never written.
        """
        there = offsets >= 0
        begins, ends = offsets[there], (offsets + sizes)[there]
        descriptor = self._file.descriptor()
        self.cold = any(is_cold(descriptor, at) for at in begins[:: max(len(begins) // PROBES, 1)].tolist())
        if not self.cold:
            return False
        pieces = _merged(begins, ends)
        # One thread at a time for each dataset: each call releases the GIL, and threads that do this at once pass it
        # on at each of them. With two, a cold file came at 0.4 of the rate.
        with self._lock:
            for first, end in pieces:
                for begin in range(first, end, MAX_FETCH_BYTES):
                    os.posix_fadvise(descriptor, begin, min(MAX_FETCH_BYTES, end - begin), os.POSIX_FADV_WILLNEED)
        return True


def _merged(begins: Indices, ends: Indices) -> list[tuple[int, int]]:
    """Pieces in file order, with adjacent and overlapping ones merged."""
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    return list(zip(begins[np.append(0, breaks)].tolist(), ends[np.append(breaks - 1, -1)].tolist(), strict=True))


# libhdf5 caches chunks of this many bytes per dataset, or two chunks if they are larger.
H5PY_CACHE_BYTES = 2**20
# Rows of this size and more are read by pread, which is about as fast as a map: 0.8 to 1.2 of its speed for 150 kB,
# 0.89 to 0.98 for 600 kB, 0.98 to 1.03 for 2.4 MB. If the file shrinks, pread fails; touching a map ends the process.
PREAD_BYTES = 512 * 1024
# The same limit for compressed chunks. Decoding takes many times as long as reading.
PREAD_CHUNK_BYTES = 32 * 1024

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Handles:
    """What is open of one file. It closes when nobody refers to it, so a reader holds it until it has read."""

    def __init__(self, file: io.FileIO) -> None:
        self.descriptor = file.fileno()
        self.process = ProcessGuard()
        self.maps: dict[bool, npt.NDArray[np.uint8]] = {}
        self.h5py: h5py.File | None = None
        self.datasets: dict[str, h5py.Dataset] = {}
        weakref.finalize(self, file.close)

    def keep(self, file: h5py.File) -> None:
        weakref.finalize(self, file.close).atexit = False
        self.h5py = file


class OpenFile:
    """The handles on one file, opened on first use. Checks that the file is the one the source was built from."""

    def __init__(self, path: str, identity: FileIdentity, *, external: ExternalFiles = (), mapped: bool = True) -> None:
        self.path = path
        self.mapped = mapped
        self._identity, self._external = identity, external
        self._opening = threading.Lock()  # a thread may be stuck in it, on a disk that is gone
        # The handles, if any. Closing replaces the list, so a thread that is opening the file keeps nothing open.
        self._kept: list[_Handles] = []
        self._last: Callable[[], _Handles | None] = lambda: None  # the latest, while anybody holds them

    def during(self, read: Callable[[], T]) -> T:
        """Call a function that reads the file, which stays open meanwhile, whoever closes it. Thread-safe.

        Checks the file before and after: from a file that shrank, h5py reads zeros and a map ends the process; a file
        that is being written yields a mix of old and new values. Once opened again if its server has forgotten it.
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
                    handles = _Handles(open_raw(self.path))
                    self._refuse_changed(handles.descriptor)
                    self._last = weakref.ref(handles)
                    kept.append(handles)
                return kept[0]
        if handles.process.forked:
            raise handles.process.error(
                f"{self.path}: was opened",
                "HDF5 handles do not survive a fork; build the source in the child, or start the child by spawn",
                file=self.path,
            )
        return handles

    def descriptor(self) -> int:
        """The file descriptor, of the file that the source was built from."""
        return self._opened().descriptor

    def check(self) -> None:
        """Check that the file, and others with values of it, have not changed."""
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
        """The bytes of the whole file, read-only. The kernel reads pages when they are touched.

        ``random_access`` disables the kernel's own read-ahead, since `ReadAhead` fetches what will be read. Otherwise
        the kernel reads every missing page with up to several MiB of its neighbours.
        """
        kept = self._kept
        if kept and (known := kept[0].maps.get(random_access)) is not None:
            return known
        handles = self._opened()
        with self._opening:
            if random_access not in handles.maps:
                with as_source_errors(self.path, "cannot be mapped", file=self.path):
                    mapped = mmap.mmap(handles.descriptor, self._identity.size, access=mmap.ACCESS_READ)
                if random_access and is_cold(handles.descriptor, 0) is not None:
                    system.read_at_random(mapped)
                handles.maps[random_access] = np.frombuffer(mapped, np.uint8)
            return handles.maps[random_access]

    def read_at(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        handles, view, done = self._opened(), out.data, 0
        while done < len(view):
            begin = offset + done
            try:
                got = retry_once(functools.partial(system.preadv, handles.descriptor, [view[done:]], begin))
            except OSError as error:
                where = f"{self.path}, {len(view) - done} bytes at byte {begin}"
                raise source_error(error, where, "cannot be read", file=self.path) from error
            if not got:
                raise ChangedError(
                    f"{self.path}: ends at byte {begin}, in the middle of a sample, so it shrank since the "
                    "source was built; build the source again",
                    file=self.path,
                )
            done += got

    def bytes_at(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes at an offset: a view of the map if they are few and maps are allowed, else a copy."""
        return next(self.pieces((offset,), (size,)))

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes at each of several offsets, as `bytes_at` returns them."""
        mapped = self.map() if self.mapped and min(sizes, default=0) < PREAD_CHUNK_BYTES else None
        for offset, size in zip(offsets, sizes, strict=True):
            if mapped is not None and size < PREAD_CHUNK_BYTES:
                yield mapped[offset : offset + size]
            else:
                found = np.empty(size, np.uint8)
                self.read_at(offset, found)
                yield found

    def dataset(self, name: str, chunk_bytes: int, *, kept: bool = True) -> h5py.Dataset:
        """A dataset opened by h5py, whose chunk cache holds at least two chunks; no cache if ``chunk_bytes`` is 0.

        With ``kept``, it stays open.
        """
        import h5py

        handles = self._opened()
        with self._opening:
            file = handles.h5py
            if file is None:
                file = open_h5py(self.path)
                # h5py opens by path, which may lead to another file than the descriptor by now.
                self._refuse_changed(file.id.get_vfd_handle())
                handles.keep(file)
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
        """Whether a parent process opened the file before it forked this one."""
        kept = self._kept
        return bool(kept) and kept[0].process.forked

    def check_process(self) -> None:
        """Raise `WorkerError` if the file is `forked`."""
        if self.forked:
            self._opened()


def _refuse_changed(path: str, was: FileIdentity, now: FileIdentity) -> None:
    change = was.difference(now, path)
    if change is not None:
        raise ChangedError(f"{path}: {change} since the source was built; build the source again", file=path)


class OpenFiles:
    """The files of a source. Keeps only the most recently used ones open. Thread-safe."""

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._recently_used: collections.OrderedDict[int, None] = collections.OrderedDict()
        # A file takes up to three descriptors, its map included. A quarter of the limit is left to other code.
        limit = system.descriptor_limit()
        self._max_open = max(limit // 4, 1)
        if len(files) > self._max_open:
            _log.warning(
                "only %d of %d files stay open, since this process may open %d: reading them in random order reopens "
                "them again and again; ulimit -n %d would be enough",
                self._max_open,
                len(files),
                limit,
                4 * len(files),
            )

    def __getitem__(self, number: int) -> OpenFile:
        return self._files[number]

    def use(self, number: int) -> OpenFile:
        """A file that is to be read. Closes the one that was used least recently if too many are open."""
        used = self._recently_used
        if len(self._files) > self._max_open:
            with self._lock:
                used[number] = None
                used.move_to_end(number)
                oldest = used.popitem(last=False)[0] if len(used) > self._max_open else None
            if oldest is not None:
                self._files[oldest].close()
        return self._files[number]

    @property
    def forked(self) -> bool:
        """Whether a parent process opened any of the files before it forked this one."""
        return any(file.forked for file in self._files)

    def check_process(self) -> None:
        """Raise `WorkerError` if any file is `forked`."""
        for file in self._files:
            file.check_process()

    def close(self) -> None:
        for file in self._files:
            file.close()
