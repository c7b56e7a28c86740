"""Reading one stored dataset: straight from a map of the file where its values lie in one piece, else by h5py.

An `OpenFile` is shared by the readers of a file. Readers are safe to call from several threads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ChangedError, CorruptError, FormatError, MissingError, WorkerError
from lit_async_data.permutation import Indices
from lit_async_data.sources.hdf5.dataset import FileIdentity, StoredDataset

Array = npt.NDArray[Any]
# Seconds that `close` waits for a thread that is opening the file.
LOCK_S = 1.0


class OpenFile:
    """The handles on one file, opened on first use and checked to be the file that was looked at.

    Args:
        path: The file.
        identity: What it was when the source was built.
    """

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path = path
        self._identity = identity
        self._lock = threading.Lock()
        self._reading = 0
        self._reset()

    def _reset(self) -> None:
        self._pid: int | None = None  # of the process that opened the handles
        self._closer: weakref.finalize[Any, Any] | None = None
        self._leaving = False
        self._descriptor: int | None = None
        self._map: npt.NDArray[np.uint8] | None = None
        self._h5py: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}

    def __reduce__(self) -> Any:
        return OpenFile, (self.path, self._identity)

    def descriptor(self) -> int:
        """A file descriptor; `check` tells whether it is on the file that was looked at.

        Raises:
            MissingError: The file is gone.
            WorkerError: This process is a fork of the one that opened it.
        """
        self._check_process()
        if self._descriptor is not None:
            return self._descriptor
        with self._lock:
            if self._descriptor is None:
                self._pid = os.getpid()
                try:
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise MissingError(f"{self.path} cannot be opened: {error}", file=self.path) from error
                self._closer = weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor

    def check(self) -> None:
        """Make sure that the file is what it was.

        To be called before and after every read: a file that shrinks gives zeros through h5py and kills the process
        through a map, and one that is written to gives a mixture.

        Raises:
            ChangedError: It is not; says what differs.
        """
        self._check_same(self.descriptor())

    def _check_same(self, descriptor: int) -> None:
        now, was = os.fstat(descriptor), self._identity
        if (now.st_size, now.st_mtime_ns, now.st_ino, now.st_dev) == (was.size, was.mtime_ns, was.inode, was.device):
            return
        if (now.st_dev, now.st_ino) != (was.device, was.inode):
            what = "was replaced by another file"
        elif now.st_size != was.size:
            what = f"{'shrank' if now.st_size < was.size else 'grew'} from {was.size} to {now.st_size} bytes"
        else:
            what = "was written to"
        raise ChangedError(f"{self.path} {what} since the source was built; build it again", file=self.path)

    def map(self) -> npt.NDArray[np.uint8]:
        """The bytes of the whole file, read-only; pages are read as they are touched."""
        descriptor = self.descriptor()
        with self._lock:
            if self._map is None:
                mapped = mmap.mmap(descriptor, self._identity.size, access=mmap.ACCESS_READ)
                self._map = np.frombuffer(mapped, np.uint8)
            return self._map

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read inside: the file is checked before and after, and stays open until the last reader has left."""
        self._check_process()  # before the lock, which another thread may have held when this process was forked
        with self._lock:
            self._reading += 1
        try:
            self.check()
            yield
            self.check()
        finally:
            with self._lock:
                self._reading -= 1
                if self._leaving and not self._reading:
                    self._close()

    def dataset(self, name: str, chunk_bytes: int) -> h5py.Dataset:
        """A dataset through h5py, with a chunk cache that holds at least two of its chunks."""
        self._check_process()
        with self._lock:
            if self._h5py is None:
                opened = h5py.File(self.path, "r", locking="best-effort")
                # By path, unlike the descriptor: it may be another file by now.
                self._check_same(opened.id.get_vfd_handle())
                self._h5py, self._pid = opened, os.getpid()
            if name not in self._datasets:
                access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
                # Slots of the cache's table: a prime well above the chunks it can hold, as HDF5 advises.
                access.set_chunk_cache(12421, max(16 * 2**20, 2 * chunk_bytes), 0.75)
                self._datasets[name] = h5py.Dataset(h5py.h5d.open(self._h5py.id, name.encode(), access))
            return self._datasets[name]

    def close(self) -> None:
        """Close every handle, now or when the last reader has left. The map goes with the last array made from it."""
        # With a time-out: a thread may be stuck while it opens the file, on a disk that is gone.
        if not self._lock.acquire(timeout=LOCK_S):
            return
        try:
            if self._reading:
                self._leaving = True
            else:
                self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        if self._pid in (os.getpid(), None):
            if self._h5py is not None:
                self._h5py.close()
            if self._closer is not None:
                self._closer()
        self._reset()

    def _check_process(self) -> None:
        if self._pid not in (os.getpid(), None):
            raise WorkerError(
                f"{self.path} was opened in process {self._pid} and cannot be read in its fork {os.getpid()}: HDF5 "
                "handles do not survive a fork; build the source in the child, or start it by spawn",
                file=self.path,
            )


class Reader(Protocol):
    """Reads rows of one dataset into an array. The caller checks the file before and after."""

    def read(self, rows: Indices, out: Array) -> None:
        """Fill ``out`` of shape ``(n, *stored_shape)`` with rows; int64, in range, in any order."""
        ...


class ContiguousReader:
    """Gathers rows from a map of the file; holds no lock meanwhile, neither Python's nor libhdf5's."""

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file

    @functools.cached_property
    def _raw(self) -> npt.NDArray[np.uint8]:
        assert self._stored.offset is not None
        return self._file.map()[self._stored.offset : self._stored.offset + self._stored.nbytes]

    @functools.cached_property
    def _table(self) -> Array:
        values = self._raw.view(self._stored.dtype).reshape(self._stored.shape)
        return np.moveaxis(values, self._stored.axis, 0)

    def read(self, rows: Indices, out: Array) -> None:
        stored = self._stored
        if out.dtype != stored.dtype.newbyteorder("="):
            out[...] = labels(self._table[rows], stored)  # they become int64
        elif stored.axis == 0:
            # As bytes, since numpy copies a whole table that is not aligned in the file before it takes from it; and
            # with mode="clip", since "raise" gathers into a buffer of its own. The rows have been checked.
            taken = out.view(np.uint8).reshape(len(rows), -1)
            self._raw.reshape(stored.rows, -1).take(rows, axis=0, out=taken, mode="clip")
            if not stored.dtype.isnative:
                out.byteswap(inplace=True)
        else:
            for first, end, where in runs(rows):
                out[where] = self._table[first:end]


class H5pyReader:
    """Reads rows one by one, or in slices where they follow each other, through h5py and under its lock.

    Never by its fancy selection, which is 2 to 30 times slower than rows.
    """

    def __init__(self, stored: StoredDataset, file: OpenFile) -> None:
        self._stored = stored
        self._file = file

    def read(self, rows: Indices, out: Array) -> None:
        stored = self._stored
        chunk_bytes = stored.chunk_rows * stored.spec.nbytes
        dataset = self._file.dataset(stored.name, chunk_bytes)
        before = (slice(None),) * stored.axis
        for first, end, where in runs(rows):
            try:
                block = dataset[(*before, slice(first, end))]
            except (OSError, RuntimeError) as error:
                raise CorruptError(
                    f"{stored}, rows {first} to {end - 1}: {error}", file=stored.path, dataset=stored.name, row=first
                ) from error
            out[where] = np.moveaxis(labels(block, stored), stored.axis, 0)


def labels(values: Array, stored: StoredDataset) -> Array:
    """Values as they are, after a look at whether those of uint64 that are delivered as int64 can be."""
    if stored.spec.dtype == np.int64 and values.dtype.kind == "u" and int(values.max()) > np.iinfo(np.int64).max:
        raise FormatError(f"{stored} holds the label {values.max()}, which no int64 holds", file=stored.path)
    return values


def runs(rows: Indices) -> list[tuple[int, int, Indices]]:
    """Rows as pieces that follow each other in storage, in storage order, each with its places in the batch.

    Storage order, so that a chunk which several rows share is decoded once.

    Example:
        >>> [(first, end, where.tolist()) for first, end, where in runs(np.array([7, 3, 8]))]
        [(3, 4, [1]), (7, 9, [0, 2])]
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [
        (int(ordered[begin]), int(ordered[end - 1]) + 1, order[begin:end]) for begin, end in itertools.pairwise(edges)
    ]
