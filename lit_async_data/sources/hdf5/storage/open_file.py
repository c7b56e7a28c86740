"""`OpenFile`: the handles on one file; `OpenFiles`: the files of a source, with a limit on how many are open."""

from __future__ import annotations

import collections
import functools
import io
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import ChangedError, CorruptError, MissingError
from lit_async_data.sources.hdf5.storage.external_files import ExternalFiles
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py, open_raw, source_error
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.hdf5.storage.plugins import check_filters
from lit_async_data.sources.local_files.retrying import retry_once
from lit_async_data.system import ProcessGuard, is_cold

if TYPE_CHECKING:
    import h5py

# libhdf5 caches chunks of this many bytes per dataset, or two chunks if they are larger.
H5PY_CACHE_BYTES = 2**20
# Rows of this size and more are read by pread, which is about as fast as a map: 0.8 to 1.2 of its speed for 150 kB,
# 0.89 to 0.98 for 600 kB, 0.98 to 1.03 for 2.4 MB. If the file shrinks, pread fails; touching a map ends the process.
PREAD_BYTES = 512 * 1024
# The same limit for compressed chunks. Decoding takes many times as long as reading.
PREAD_CHUNK_BYTES = 32 * 1024

_log = logging.getLogger(__name__)


class OpenFile:
    """The handles on one file, opened on first use. Checks that the file is the one the source was built from."""

    def __init__(self, path: str, identity: FileIdentity, *, external: ExternalFiles = (), mapped: bool = True) -> None:
        self.path = path
        self._external = external
        self.mapped = mapped
        self._identity = identity
        self._lock = threading.RLock()  # of readers and closing; a finaliser or a signal handler may close it inside
        self._opening = threading.Lock()  # a thread may be stuck in it, on a disk that is gone
        self._readers: set[weakref.ref[Visit]] = set()
        # By path: the ctime at which the pieces of the file were last compared.
        self._compared_ctimes: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._process: ProcessGuard | None = None  # of the process that opened the handles
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._close_pending = False
        self._file: io.FileIO | None = None
        self._descriptor: int | None = None  # of that file
        self._maps: dict[bool, npt.NDArray[np.uint8]] = {}
        self._h5py: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}

    def descriptor(self) -> int:
        """The file descriptor. Only `check` verifies that it belongs to the original file."""
        self.check_process()
        if (descriptor := self._descriptor) is not None:
            return descriptor
        with self._opening:
            if self._descriptor is None:
                self._process = ProcessGuard()
                # The next call repeats every step that an interrupt prevented.
                self._file = self._file or open_raw(self.path)
                self._finalizer = self._finalizer or weakref.finalize(self, self._file.close)
                self._descriptor = self._file.fileno()
            return self._descriptor

    def check(self) -> None:
        """Check that the file has not changed.

        Call this before and after every read: from a file that shrank, h5py reads zeros and a map ends the process; a
        file that is being written yields a mix of old and new values.
        """
        # Runs for every file and batch. An open descriptor belongs to this process, or `check_process` has raised.
        descriptor = self._descriptor
        self._check_same(self.descriptor() if descriptor is None else descriptor)
        for path, was in self._external:
            try:
                self._check_external(path, was)
            except OSError as error:
                what = f"cannot be opened ({error.strerror}), and {self.path} takes values from it; restore it"
                raise MissingError(f"{path}: {what}", file=path) from error

    def _check_same(self, descriptor: int) -> None:
        was, now = self._identity, os.fstat(descriptor)
        same = now.st_mtime_ns == was.mtime_ns and now.st_size == was.size
        if not same or now.st_ino != was.inode or now.st_dev != was.device:
            _refuse_changed(self.path, was, now)
        if now.st_ctime_ns != self._compared_ctimes.get(self.path, was.ctime_ns):
            self._check_pieces(self.path, was, now, descriptor)

    def _check_external(self, path: str, was: FileIdentity) -> None:
        now = os.stat(path)
        _refuse_changed(path, was, now)
        if now.st_ctime_ns != self._compared_ctimes.get(path, was.ctime_ns):
            with open(path, "rb", buffering=0) as file:
                self._check_pieces(path, was, now, file.fileno())

    def _check_pieces(self, path: str, was: FileIdentity, now: os.stat_result, descriptor: int) -> None:
        """Compare pieces of a file if only its ctime has changed: by chmod, a new link, or a hidden write."""
        if not was.matches(descriptor):
            raise ChangedError(
                f"{path}: was written to since the source was built, and its modification time was set back; build the "
                "source again",
                file=path,
            )
        self._compared_ctimes[path] = now.st_ctime_ns

    def map(self, *, random_access: bool = True) -> npt.NDArray[np.uint8]:
        """The bytes of the whole file, read-only. The kernel reads pages when they are touched.

        ``random_access`` disables the kernel's own read-ahead, since `ReadAhead` fetches what will be read. Otherwise
        the kernel reads every missing page with up to several MiB of its neighbours.
        """
        descriptor = self.descriptor()
        mapped_before = self._maps.get(random_access)
        if mapped_before is not None:
            return mapped_before
        with self._opening:
            if random_access not in self._maps:
                with as_source_errors(self.path, "cannot be mapped", file=self.path):
                    mapped = mmap.mmap(descriptor, self._identity.size, access=mmap.ACCESS_READ)
                if random_access and is_cold(descriptor, 0) is not None:
                    system.read_at_random(mapped)
                self._maps[random_access] = np.frombuffer(mapped, np.uint8)
            return self._maps[random_access]

    def read_at(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        descriptor, view, done = self.descriptor(), out.data, 0
        while done < len(view):
            begin = offset + done
            try:
                got = retry_once(functools.partial(system.preadv, descriptor, [view[done:]], begin))
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
        if self.mapped and size < PREAD_CHUNK_BYTES:
            return self.map()[offset : offset + size]
        found = np.empty(size, np.uint8)
        self.read_at(offset, found)
        return found

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes at each of several offsets, as `bytes_at` returns them."""
        mapped = self.map() if self.mapped else None
        for offset, size in zip(offsets, sizes, strict=True):
            if mapped is not None and size < PREAD_CHUNK_BYTES:
                yield mapped[offset : offset + size]
            else:
                yield self.bytes_at(offset, size)

    def enter(self, reader: Visit) -> None:
        """Check the file and keep it open until the last reader leaves."""
        self.check_process()  # before the lock, which another thread may have held when this process was forked
        try:
            with self._lock:
                self._readers.add(weakref.ref(reader))
            self.check()
        except BaseException:
            self._end_read(reader)
            raise

    def leave(self, reader: Visit, error: BaseException | None) -> None:
        """Check the file again, unless the reader has failed, and let it be closed."""
        try:
            # A changed file may look damaged: report the change.
            if error is None or isinstance(error, CorruptError):
                self.check()
        finally:
            self._end_read(reader)

    def _end_read(self, reader: Visit) -> None:
        with self._lock:
            self._readers.discard(weakref.ref(reader))
            if self._close_pending and not self._has_readers:
                self._close()

    @property
    def _has_readers(self) -> bool:
        # An interrupted reader that never left has been freed.
        self._readers = {reader for reader in self._readers if reader() is not None}
        return bool(self._readers)

    def dataset(self, name: str, chunk_bytes: int, *, kept: bool = True) -> h5py.Dataset:
        """A dataset opened by h5py, whose chunk cache holds at least two chunks; no cache if ``chunk_bytes`` is 0.

        With ``kept``, it stays open.
        """
        import h5py

        self.check_process()
        with self._opening:
            if self._h5py is None:
                file = open_h5py(self.path)
                # h5py opens by path, which may lead to another file than the descriptor by now.
                self._check_same(file.id.get_vfd_handle())
                self._h5py, self._process = file, ProcessGuard()
            if name not in self._datasets:
                access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
                # Hash slots: a prime well above the number of cached chunks, as HDF5 advises.
                access.set_chunk_cache(12421, max(H5PY_CACHE_BYTES, 2 * chunk_bytes) if chunk_bytes else 0, 0.75)
                dataset = h5py.Dataset(h5py.h5d.open(self._h5py.id, name.encode(), access))
                check_filters(dataset, self.path, name)
                if not kept:
                    return dataset
                self._datasets[name] = dataset
            return self._datasets[name]

    def close(self) -> None:
        """Close every handle, now or when the last reader leaves. A map lives until the last array that views it."""
        with self._lock:
            if self._has_readers:
                self._close_pending = True
            else:
                self._close()

    def _close(self) -> None:
        if not self.forked:
            if self._h5py is not None:
                self._h5py.close()
            if self._finalizer is not None:
                self._finalizer()
            if self._file is not None:
                self._file.close()
        self._reset()

    @property
    def forked(self) -> bool:
        """Whether a parent process opened the file before it forked this one."""
        process = self._process
        return process is not None and process.forked

    def check_process(self) -> None:
        """Raise `WorkerError` if the file is `forked`."""
        # Read once: 1. A reader enters. 2. Another thread has opened more files than may be open, and closes this one.
        # See test_a_file_that_is_closed_while_another_thread_enters_it_is_opened_again.
        process = self._process
        if process is not None and process.forked:
            raise process.error(
                f"{self.path}: was opened",
                "HDF5 handles do not survive a fork; build the source in the child, or start the child by spawn",
                file=self.path,
            )


class Visit:
    """Keeps a file open inside ``with``, and checks it before and after.

    If an interrupt prevents the exit, the visit ends when this object is freed.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.enter(self)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._file.leave(self, error)


def _refuse_changed(path: str, was: FileIdentity, now: os.stat_result) -> None:
    change = was.difference(FileIdentity.of(now))
    if change is not None:
        raise ChangedError(f"{path}: {change} since the source was built; build the source again", file=path)


class OpenFiles:
    """The files of a source. Keeps only the most recently used ones open. Thread-safe."""

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self._files = files
        self._lock = threading.RLock()
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

    def use(self, number: int) -> Visit:
        """Return what keeps a file open inside ``with``. Closes the least recently used one if too many are open."""
        oldest = self._mark_used(number)
        if oldest is not None:
            self._files[oldest].close()
        return Visit(self._files[number])

    @property
    def forked(self) -> bool:
        """Whether a parent process opened any of the files before it forked this one."""
        return any(file.forked for file in self._files)

    def check_process(self) -> None:
        """Raise `WorkerError` if any file is `forked`."""
        for file in self._files:
            file.check_process()

    def _mark_used(self, number: int) -> int | None:
        used = self._recently_used
        with self._lock:
            used[number] = None
            used.move_to_end(number)
            return used.popitem(last=False)[0] if len(used) > self._max_open and used else None

    def close(self) -> None:
        for file in self._files:
            file.close()
        with self._lock:
            self._recently_used.clear()
