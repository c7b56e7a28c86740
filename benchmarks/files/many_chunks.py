"""A file of many chunks, and how long opening it takes."""

from __future__ import annotations

import os
import time
import zlib

import h5py
import numpy as np
from measuring.page_cache import process_memory

from lit_async_data import AsyncLoader, HDF5Source

ROW = np.arange(16, dtype=np.uint8)
BATCH = 256


def write_chunks(folder: str, chunks: int) -> str:
    """A file with ``data``, uint8 of 16 values in each chunk, gzip; returns its path.

    Chunks are packed once and written as they are: 5 to 10 µs each, and 44 bytes.
    """
    path, packed = os.path.join(folder, f"{chunks}.h5"), zlib.compress(ROW.tobytes())
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        shape = (chunks, *ROW.shape)
        data = file.create_dataset("data", shape, ROW.dtype, chunks=(1, *ROW.shape), compression="gzip")
        write = data.id.write_direct_chunk
        for number in range(chunks):
            write((number, 0), packed)
    return path


def open_chunks(path: str, little: str, cache: str) -> dict[str, float]:
    """Seconds until a source is built, and until its first batch; and MiB of private memory that this takes.

    Args:
        path: The file.
        little: Another file, opened before: imports what the first source of a process imports.
        cache: Folder that keeps indexes.
    """
    _first_batch(little, cache)
    before = process_memory()["RssAnon"]
    built, ready = _first_batch(path, cache)
    return {"built_s": built, "first_batch_s": ready, "own_mib": process_memory()["RssAnon"] - before}


def _first_batch(path: str, cache: str) -> tuple[float, float]:
    started = time.perf_counter()
    source = HDF5Source(path, ("data",), cache_dir=cache)
    built = time.perf_counter()
    options = {"batch_size": BATCH, "shuffle": "global", "workers": 1, "worker_kind": "thread"}
    with AsyncLoader(source, options) as loader:
        (batch,) = loader.next()
        ready = time.perf_counter()
        assert (batch == batch[0]).all()
    source.close()
    return built - started, ready - started
