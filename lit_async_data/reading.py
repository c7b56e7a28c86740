"""Rows of any HDF5 dataset as numpy arrays, decoded in threads outside h5py's lock, without torch."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ClosedError, ConfigError
from lit_async_data.options import explains_names, whole
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import refuse_flags
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.hdf5.index.index import IndexCache, in_one_file
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache, ChunkedReader
from lit_async_data.sources.hdf5.readers.part_reader import RECENT_BYTES, fastest_reader
from lit_async_data.sources.hdf5.readers.readers import Reader
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset, member_of
from lit_async_data.sources.hdf5.select import Select
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, h5py
from lit_async_data.sources.hdf5.storage.handles import identity_of, open_h5py, refuse_external
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.system import OURS, usable_cores

Rows = slice | npt.ArrayLike | None
# Smaller requests are decoded in the calling thread. Larger ones are cut into several blocks per thread, since some
# blocks take longer. Only decoding uses several threads: two threads that copy uncompressed rows are slower than one,
# by half for random rows.
BLOCK_BYTES, BLOCKS_PER_THREAD = 2**18, 4


@explains_names()
def read(
    dataset: str | h5py.Dataset,
    rows: Rows = None,
    out: Array | None = None,
    *,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Any = None,
) -> Array:
    """Read rows of one dataset. Each call inspects the file; for several calls use `open_reader`, which does so once.

    Args:
        dataset: ``"FILE:/DATASET"``, also of an address, or a dataset of a file that h5py has open for reading.
        rows: As in `FileReader.read`, which also describes the result and the errors.
        out: As in `FileReader.read`.
        threads: As in `open_reader`.
        storage_options: As in `open_reader`.
        storage: As in `open_reader`.

    Example:
        >>> import h5py, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(folder + "/scan.h5", "w") as file:
        ...         data = file.create_dataset("data", data=np.arange(10), chunks=(5,), compression="gzip")
        ...     read(folder + "/scan.h5:/data", [7, 0, -1])
        array([7, 0, 9])
    """
    if isinstance(dataset, str):
        path, found, name = dataset.rpartition(":/")
        if not found or dataset.startswith(f"{path}://"):  # the colon is that of an address
            raise ConfigError(f"{dataset!r} is not FILE:/DATASET, such as scan.h5:/data", "dataset")
    elif not isinstance(dataset, h5py.Dataset) or not dataset:
        raise ConfigError(f"{dataset!r} is not an open dataset; give one, or FILE:/DATASET", "dataset")
    elif dataset.file.mode != "r" or not in_one_file(dataset):
        what = "in memory or in a file that is open for writing; close it, and give FILE:/DATASET"
        raise ConfigError(f"{dataset!r} is {what}", "dataset")
    else:
        path, name = dataset.file.filename, dataset.name or ""
    with open_reader(path, threads=threads, storage_options=storage_options, storage=storage) as reader:
        return reader.read(name, rows, out)


@explains_names()
def open_reader(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Any = None,
    allow_external: bool = False,
) -> FileReader:
    """Open a file to read rows of its datasets; close the reader, or use it in ``with``.

    Args:
        path: The file, or its address. If a program writes to it afterwards, reading raises a `ChangedError`.
        threads: Threads that decode large requests; None: one for each core that this process may use.
        cache_dir: As in `HDF5Source`.
        cache: As in `HDF5Source`.
        cache_limit: As in `HDF5Source`.
        storage_options: As in `HDF5Source`.
        storage: As in `HDF5Source`.
        allow_external: As in `HDF5Source`.

    Raises:
        ConfigError: ``threads`` is not a whole number from 1 on.
        MissingError: The file does not exist.
        FormatError: The file is not HDF5.
        StoreError: The store cannot be reached, or refuses these credentials.

    Example:
        >>> import h5py, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(folder + "/scan.h5", "w") as file:
        ...         file["data"], file["labels"] = np.zeros((10, 8, 8), "f4"), np.arange(10)
        ...     with open_reader(folder + "/scan.h5") as reader:
        ...         reader.read("data", slice(0, 4)).shape, reader.read("labels", [-1, 3])
        ((4, 8, 8), array([9, 3]))
    """
    count = usable_cores() if threads is None else whole("threads", threads, 1)
    files = Files(cache, cache_limit, storage_options, storage)
    index = IndexCache(cache if cache_dir is None else cache_dir)
    with files.closed_after_an_error():
        return FileReader(files.named(path), count, index, allow_external=allow_external, files=files)


class FileReader(contextlib.AbstractContextManager["FileReader"]):
    """Reads rows of the datasets of one file. Thread-safe. Keeps file handles, indexes and recently decoded chunks."""

    def __init__(self, path: str, threads: int, cache: IndexCache, *, allow_external: bool, files: Files) -> None:
        self.path, self._files = path, files
        if allow_external:
            refuse_external([path], files)
        file = open_h5py(path, files)
        self._group = OpenGroup(file, path, "/", cache, allow_external)
        self._identity = identity_of(file)
        self._main = OpenFile(path, self._identity, files)
        self._main.during(lambda: None)  # the same file as h5py's
        self._slabs, self._room = ChunkCache(), list[object]()
        self._readers: dict[str, tuple[StoredDataset, OpenFile, Reader, tuple[str, ...]]] = {}
        self._lock, self._threads = threading.Lock(), threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, OURS)

    def read(self, dataset: str, rows: Rows = None, out: Array | None = None) -> Array:
        """Read rows of a dataset. Datasets without a fast reader are read by h5py, under its lock.

        Args:
            dataset: Its name, from the root of the file. For records, also the name of a member: ``"events.label"``.
            rows: Row numbers in any order, also repeated; negative numbers count from the end. Or a mask over all rows,
                a slice, or None for all rows. A dataset without axes takes None only.
            out: A C-contiguous array to fill, of the shape and dtype that would be returned.

        Returns:
            The values, shape ``(n, *row shape)``, of the stored dtype in native byte order.

        Raises:
            ConfigError: ``rows`` or ``out`` do not fit the dataset.
            IndexError: A row number is out of range.
            SourceError: The dataset does not exist, is damaged or has changed, or no reader supports it.
            ClosedError: The reader is closed.
        """
        self._main.check_process()  # before a lock that a thread may have held when this process was forked
        with self._lock:
            if not self._group.file:
                raise ClosedError(f"{self.path}: its reader is closed; open another", file=self.path, dataset=dataset)
            if dataset not in self._readers:
                self._readers[dataset] = self._opened(dataset)
        stored, file, reader, member = self._readers[dataset]
        if member and out is not None:
            raise ConfigError(f"{dataset!r} is a member of records, which are read whole; leave it out", "out")
        chosen: Any = _chosen(rows, stored)
        shape, dtype = (*(len(chosen),) * bool(stored.shape), *stored.shape[1:]), stored.dtype.newbyteorder("=")
        if out is None:
            out = np.empty(shape, dtype)
        elif not (isinstance(out, np.ndarray) and (out.shape, out.dtype) == (shape, dtype) and out.flags.carray):
            raise ConfigError(f"give an array of {dtype} {shape} that is C-contiguous and can be written to", "out")
        work = len(chosen) * max(reader.slab_bytes, out.nbytes // max(len(chosen), 1)) // BLOCK_BYTES
        most = BLOCKS_PER_THREAD * self._threads if reader.reading == "decoded" else 1
        blocks = _blocks(chosen, reader.rows, min(work, most)) if out.size else []

        def fill(places: slice | Indices) -> None:
            with as_source_errors(str(stored), "cannot be read", file=self.path, dataset=dataset):
                if not out.ndim:
                    out[()] = file.dataset(stored.name, 0)[()]
                    return
                own = chosen[places]
                part = Select(np.array([own.start]), np.array([len(own)])) if isinstance(own, range) else Select(own)
                file.cold = file.cold and reader.fetch(part)
                if isinstance(places, slice):
                    reader.read(part, out[places])
                else:
                    assert isinstance(reader, ChunkedReader)  # it has the chunks by which `_blocks` divides rows
                    reader.read_places(chosen, places, out)

        several = len(blocks) > 1 and self._threads > 1
        each = (functools.partial(fill, places) for places in blocks)
        collections.deque((self._pool.map if several else map)(file.during, each), maxlen=0)
        return member_of(out, member).copy() if member else out

    def _opened(self, name: str) -> tuple[StoredDataset, OpenFile, Reader, tuple[str, ...]]:
        if not isinstance(name, str) or not name.strip("/"):
            raise ConfigError(f"{name!r} names no dataset; give a name in {self.path}", "dataset")
        where = f"{self.path}:/{name.strip('/')}"

        def inspected() -> tuple[StoredDataset, tuple[str, ...]]:
            of, member = self._group.split(name)
            return self._group.inspect_any(of), self._group.whole_member(name, "")[1] if member else ()

        with as_source_errors(where, "cannot be read", file=self.path, dataset=name):
            stored, path = self._main.during(inspected)
        file = OpenFile(self.path, self._identity, external=stored.external) if stored.external else self._main
        reader = fastest_reader(stored, file, self._slabs, name)
        self._room.append(self._slabs.reserve({name: max(2 * reader.slab_bytes, RECENT_BYTES)}, 0))
        return stored, file, reader, path

    def close(self) -> None:
        """Close every handle. Idempotent."""
        self._files.close()  # so that nobody waits for a store
        self._pool.shutdown()
        with self._lock:
            self._group.file.close()
            for _, file, *_ in self._readers.values():
                file.close()
            self._main.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _chosen(rows: Rows, stored: StoredDataset) -> range | Indices:
    if not stored.shape and rows is not None:
        raise ConfigError(f"{stored} is a single value, which has no rows; leave them out", "rows")
    count = stored.rows if stored.shape else 1
    if rows is None or isinstance(rows, slice):
        found = range(count)[slice(None) if rows is None else rows]
        return found if found.step == 1 else np.array(found, np.int64)
    given = np.asarray(rows)
    if given.dtype == bool and given.shape == (count,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(f"{given.dtype} {given.shape} are not rows of {stored}: numbers, a mask or a slice", "rows")
    refuse_flags(given, count, "it", "rows")
    wrong = (given < -count) | (given >= count)
    if wrong.any():
        raise IndexError(f"row {given[wrong.argmax()]} of {count} in {stored}")
    return given.astype(np.int64) % max(count, 1)  # negative numbers count from the end


def _blocks(rows: range | Indices, chunk: int, count: int) -> list[slice | Indices]:
    """Divide the places of rows into about ``count`` blocks. No two blocks read the same chunk of ``chunk`` rows."""
    cuts = np.arange(1, count) * len(rows) // max(count, 1)
    if isinstance(rows, range):
        cuts -= (rows.start + cuts) % chunk
    elif chunk > 1:
        places = np.argsort(rows // chunk, kind="stable")
        chunks = rows[places] // chunk
        return [each for each in np.split(places, np.unique(np.searchsorted(chunks, chunks[cuts]))) if each.size]
    edges = np.unique([0, *cuts[cuts > 0].tolist(), len(rows)]).tolist()
    return [slice(first, end) for first, end in itertools.pairwise(edges)]
