"""`OpenFile`: the handles on one file, which is checked to be the one that was looked at."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ChangedError, CorruptError, MissingError, WorkerError
from lit_async_data.sources.hdf5.storage.failures import (
    as_source_errors,
    errno_of,
    opened,
    opened_raw,
    source_error,
)
from lit_async_data.sources.hdf5.storage.identity import FileIdentity, Others
from lit_async_data.sources.hdf5.storage.residency import is_cold

# Seconds that `close` waits for a thread that is opening the file.
LOCK_S = 1.0
# libhdf5 keeps chunks of this many bytes, or two if they are larger, for each dataset that it reads.
H5PY_CACHE_BYTES = 2**20
# From this size on, pread is about as fast as a map: 0.89 to 0.98 of its speed for 600 kB, 0.98 to 1.03 for 2.4 MB, 0.8
# to 1.2 for 150 kB. And a file that shrinks is then an error, while touching a map of it ends the process.
PREAD_BYTES = 512 * 1024
# The same for what is decoded then, which takes many times as long as reading it.
PREAD_CHUNK_BYTES = 32 * 1024


class OpenFile:
    """The handles on one file, opened on first use and checked to be the file that was looked at.

    Args:
        path: The file.
        identity: What it was when the source was built.
        others: Other files that its values lie in, and what they were.
        mapped: Whether a map of it may be used.
    """

    def __init__(self, path: str, identity: FileIdentity, *, others: Others = (), mapped: bool = True) -> None:
        self.path = path
        self._others = others
        self.mapped = mapped
        self._identity = identity
        self._lock = threading.Lock()
        self._readers: set[weakref.ref[Reading]] = set()
        # The time of the last change of any kind at which pieces of a file were compared, by path.
        self._seen: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._pid: int | None = None  # of the process that opened the handles
        self._closer: weakref.finalize[Any, Any] | None = None
        self._leaving = False
        self._file: io.FileIO | None = None
        self._descriptor: int | None = None  # of that file
        self._maps: dict[bool, npt.NDArray[np.uint8]] = {}
        self._h5py: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}

    def descriptor(self) -> int:
        """A file descriptor; `check` tells whether it is on the file that was looked at.

        Raises:
            MissingError: The file is gone.
            FormatError: There is a pipe or a folder in its place.
            SourceError: The system does not open it; says what to do.
            WorkerError: This process is a fork of the one that opened it.
        """
        self.check_process()
        if self._descriptor is not None:
            return self._descriptor
        with self._lock:
            if self._descriptor is None:
                self._pid = os.getpid()
                # Each step that an interrupt has kept from being done is done when it is asked for again.
                self._file = self._file or opened_raw(self.path)
                self._closer = self._closer or weakref.finalize(self, self._file.close)
                self._descriptor = self._file.fileno()
            return self._descriptor

    def check(self) -> None:
        """Make sure that the file is what it was.

        To be called before and after every read: a file that shrinks gives zeros through h5py and kills the process
        through a map, and one that is written to gives a mixture.

        Raises:
            ChangedError: It is not; says what differs.
        """
        # Once per file and batch: a descriptor that is there belongs to this process, or `check_process` has failed.
        self._check_same(self.descriptor() if self._descriptor is None else self._descriptor)
        for path, was in self._others:
            try:
                self._check_other(path, was)
            except OSError as error:
                raise MissingError(
                    f"{path}, which {self.path} takes values from, is gone: {error}", file=path
                ) from error

    def _check_same(self, descriptor: int) -> None:
        was, now = self._identity, os.fstat(descriptor)
        same = now.st_mtime_ns == was.mtime_ns and now.st_size == was.size
        if not same or now.st_ino != was.inode or now.st_dev != was.device:
            _refuse_changed(self.path, was, now)
        if now.st_ctime_ns != self._seen.get(self.path, was.ctime_ns):
            self._check_pieces(self.path, was, now, descriptor)

    def _check_other(self, path: str, was: FileIdentity) -> None:
        now = os.stat(path)
        _refuse_changed(path, was, now)
        if now.st_ctime_ns != self._seen.get(path, was.ctime_ns):
            with open(path, "rb", buffering=0) as file:
                self._check_pieces(path, was, now, file.fileno())

    def _check_pieces(self, path: str, was: FileIdentity, now: os.stat_result, descriptor: int) -> None:
        """Of a file of which something has changed, but nothing else shows what: rights, links, or its values."""
        if not was.holds(descriptor):
            raise ChangedError(
                f"{path} was written to since the source was built, and its time of writing set back; build it again",
                file=path,
            )
        self._seen[path] = now.st_ctime_ns

    def map(self, *, at_random: bool = True) -> npt.NDArray[np.uint8]:
        """The bytes of the whole file, read-only; pages are read as they are touched.

        Args:
            at_random: Whether what is wanted is fetched by name (`ReadAhead`); else every page that is missing is read
                with its neighbours, up to several MiB of them.
        """
        descriptor = self.descriptor()
        mapped_before = self._maps.get(at_random)
        if mapped_before is not None:
            return mapped_before
        with self._lock:
            if at_random not in self._maps:
                with as_source_errors(self.path, "cannot be mapped", file=self.path):
                    mapped = mmap.mmap(descriptor, self._identity.size, access=mmap.ACCESS_READ)
                if at_random and is_cold(descriptor, 0) is not None:
                    mapped.madvise(mmap.MADV_RANDOM)
                self._maps[at_random] = np.frombuffer(mapped, np.uint8)
            return self._maps[at_random]

    def read_at(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out`` with the bytes from an offset on.

        Raises:
            ChangedError: The file ends before that.
            SourceError: The system does not read them, tried twice; names the byte.
        """
        descriptor, view, done = self.descriptor(), out.data, 0
        while done < len(view):
            try:
                got = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                got = self._read_again(error, descriptor, view[done:], offset + done)
            if not got:
                raise ChangedError(
                    f"{self.path} ends at byte {offset + done}, in the middle of a sample: it shrank since the source "
                    "was built; build it again",
                    file=self.path,
                )
            done += got

    def _read_again(self, error: OSError, descriptor: int, view: memoryview, offset: int) -> int:
        """Read once more after an error of input or output, which may pass."""
        try:
            if errno_of(error) != errno.EIO:
                raise error
            return os.preadv(descriptor, [view], offset)
        except OSError as again:
            where = f"{self.path}, {len(view)} bytes at byte {offset}"
            raise source_error(again, where, "cannot be read", file=self.path) from again

    def bytes_at(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Some bytes: of the map, if they are few and there may be one, else a copy.

        Raises:
            ChangedError: As `read_at`.
        """
        if self.mapped and size < PREAD_CHUNK_BYTES:
            return self.map()[offset : offset + size]
        found = np.empty(size, np.uint8)
        self.read_at(offset, found)
        return found

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes at each of several places, one after the other; as `bytes_at`."""
        mapped = self.map() if self.mapped else None
        for offset, size in zip(offsets, sizes, strict=True):
            if mapped is not None and size < PREAD_CHUNK_BYTES:
                yield mapped[offset : offset + size]
            else:
                yield self.bytes_at(offset, size)

    def enter(self, reader: Reading) -> None:
        """Check the file, and keep it open until all readers have left."""
        self.check_process()  # before the lock, which another thread may have held when this process was forked
        try:
            with self._lock:
                self._readers.add(weakref.ref(reader))
            self.check()
        except BaseException:
            self._leave(reader)
            raise

    def leave(self, reader: Reading, error: BaseException | None) -> None:
        """Check the file again, where nothing has gone wrong yet, and let it be closed."""
        try:
            # A file that is written to is no damaged one: that is looked at first.
            if error is None or isinstance(error, CorruptError):
                self.check()
        finally:
            self._leave(reader)

    def _leave(self, reader: Reading) -> None:
        with self._lock:
            self._readers.discard(weakref.ref(reader))
            if self._leaving and not self._read:
                self._close()

    @property
    def _read(self) -> bool:
        """Whether anybody reads it. Who was interrupted before it could leave is no more."""
        self._readers = {reader for reader in self._readers if reader() is not None}
        return bool(self._readers)

    def dataset(self, name: str, chunk_bytes: int) -> h5py.Dataset:
        """A dataset through h5py, with a chunk cache that holds at least two of its chunks; none where they are 0."""
        self.check_process()
        with self._lock:
            if self._h5py is None:
                found = opened(self.path)
                # By path, unlike the descriptor: it may be another file by now.
                self._check_same(found.id.get_vfd_handle())
                self._h5py, self._pid = found, os.getpid()
            if name not in self._datasets:
                access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
                # Slots of the cache's table: a prime well above the chunks it can hold, as HDF5 advises.
                access.set_chunk_cache(12421, max(H5PY_CACHE_BYTES, 2 * chunk_bytes) if chunk_bytes else 0, 0.75)
                self._datasets[name] = h5py.Dataset(h5py.h5d.open(self._h5py.id, name.encode(), access))
            return self._datasets[name]

    def close(self) -> None:
        """Close every handle, now or when the last reader has left. The map goes with the last array made from it."""
        locked: list[bool] = []
        try:
            # With a time-out: a thread may be stuck while it opens the file, on a disk that is gone. Called by C: an
            # interrupt (Ctrl-C) that comes when it has returned finds the lock noted, and releases it.
            locked.extend(map(self._lock.acquire, (True,), (LOCK_S,)))
            if not locked[0]:
                return
            if self._read:
                self._leaving = True
            else:
                self._close()
        finally:
            if locked and locked[0]:
                self._lock.release()

    def _close(self) -> None:
        if self._pid in (os.getpid(), None):
            if self._h5py is not None:
                self._h5py.close()
            if self._closer is not None:
                self._closer()
            if self._file is not None:
                self._file.close()
        self._reset()

    @property
    def forked(self) -> bool:
        """Whether the file is open in the process that this one was forked from."""
        return self._pid not in (os.getpid(), None)

    def check_process(self) -> None:
        """Raise `WorkerError` if that is so."""
        if self.forked:
            raise WorkerError(
                f"{self.path} was opened in process {self._pid} and cannot be read in its fork {os.getpid()}: HDF5 "
                "handles do not survive a fork; build the source in the child, or start it by spawn",
                file=self.path,
            )


class Reading:
    """Somebody who reads a file inside ``with``, for as long as this lives.

    Args:
        file: The file, which is checked before and after, and stays open.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.enter(self)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._file.leave(self, error)


def _refuse_changed(path: str, was: FileIdentity, now: os.stat_result) -> None:
    what = was.difference(FileIdentity.of(now))
    if what is not None:
        raise ChangedError(f"{path} {what} since the source was built; build it again", file=path)
