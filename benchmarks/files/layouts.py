"""The HDF5 files: one per layout, with data that compresses about as well as measured images.

| layout | samples | stored |
| --- | --- | --- |
| A | uint8 3×64×64 | contiguous |
| B | the same | gzip, one sample per chunk |
| C | the same | gzip, 64 samples per chunk |
| D, D chunked | float32 rows of 128 | contiguous; raw chunks of 1024 rows |
| F | uint8 224×224×3 | contiguous |
| G | float32 64×64 | shuffle and gzip, one sample per chunk |
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import deflate
import h5py
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Samples generated and written at a time.
BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a file is stored, and how many samples it has.

    Attributes:
        rows: Samples in the file.
        batch: Samples per batch.
        chunk: Samples per chunk; None if contiguous.
        packed: Chunks are compressed by gzip.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    batch: int = 256
    chunk: int | None = None
    packed: bool = False

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        stored = "contiguous" if self.chunk is None else f"{self.chunk} per chunk"
        packed = f", {'shuffle and ' if self.dtype == 'f4' else ''}gzip" if self.packed else ""
        return f"{self.name}: {np.dtype(self.dtype)} {'×'.join(map(str, self.shape))}, {stored}{packed}"


FULL = (
    Layout("A", (3, 64, 64), "u1", 20_480),
    Layout("B", (3, 64, 64), "u1", 20_000, chunk=1, packed=True),
    Layout("C", (3, 64, 64), "u1", 20_480, chunk=64, packed=True),
    Layout("D", (128,), "f4", 1_024_000),
    Layout("D chunked", (128,), "f4", 1_024_000, chunk=1024),
    Layout("F", (224, 224, 3), "u1", 3_072, batch=64),
    Layout("G", (64, 64), "f4", 10_240, chunk=1, packed=True),
)
# A fifth or a tenth of the samples, in small batches, so that slow contenders finish some batches.
QUICK = tuple(
    dataclasses.replace(layout, rows=4_096 if layout.packed or layout.name == "A" else layout.rows // 10, batch=32)
    for layout in FULL
)


def blocks(layout: Layout) -> Iterator[tuple[int, Array]]:
    """Smooth pictures, each with different noise, which gzip about halves; rows of 128 are only noise."""
    rng = np.random.default_rng(0)
    size = math.prod(layout.shape)
    phases = rng.random((32, 1)) * 6 + np.linspace(0, 20, size)
    smooth = np.sin(phases) * 100 + 128
    for first in range(0, layout.rows, BLOCK):
        count = min(BLOCK, layout.rows - first)
        if len(layout.shape) == 1:
            yield first, rng.standard_normal((count, size), np.float32)
            continue
        noise = rng.integers(0, 2, (count, size), np.uint8)
        bank = smooth.astype(layout.dtype)[rng.integers(0, len(smooth), count)]
        # Few bits of the floats carry information, as in most measured data.
        values = bank + noise if layout.dtype == "u1" else np.round(bank * 16 + noise) / 16
        yield first, values.astype(layout.dtype).reshape(count, *layout.shape)


def write_layout(layout: Layout, folder: str, name: str) -> str:
    """A file with ``data`` and ``labels``; returns its path."""
    path = os.path.join(folder, f"{name}.h5")
    filters: dict[str, Any] = {}
    if layout.packed:
        filters = {"compression": "gzip", "shuffle": layout.dtype == "f4"}
    chunks = None if layout.chunk is None else (layout.chunk, *layout.shape)
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        data = file.create_dataset("data", (layout.rows, *layout.shape), layout.dtype, chunks=chunks, **filters)
        for first, values in blocks(layout):
            data[first : first + len(values)] = values
        file["labels"] = np.arange(layout.rows) % 10
        add_h5torch_names(file)
    return path


def compression(path: str) -> float:
    """Bytes of the data over bytes in the file."""
    with h5py.File(path) as file:
        return float(file["data"].nbytes / file["data"].id.get_storage_size())


def add_h5torch_names(file: h5py.File) -> None:
    """Link the data under the names, and with the attributes, that h5torch needs."""
    file["central"], file["0/labels"] = file["data"], file["labels"]
    for name in ("data", "labels"):
        dtype = str(file[name].dtype)
        file[name].attrs.update(
            {"shape": file[name].shape, "mode": "N-D", "dtypes": [dtype, dtype], "filled_to": len(file[name])}
        )


# -- limits ------------------------------------------------------------------------------------------------------------


def limit_of(layout: Layout, path: str, slot_bytes: int) -> Callable[[float], float]:
    """The limit of a reader on one thread: a function that measures it for some seconds, in samples/s.

    Raw data: copies the file in order, from a memory map to a buffer as large as a slot. Compressed data: decodes each
    chunk once with libdeflate, and unshuffles it with numpy.
    """
    with h5py.File(path) as file:
        data = file["data"]
        rows, shape = len(data), data.chunks
        offset = data.id.get_offset()
        places: list[tuple[int, int]] = []
        if shape is not None:
            data.id.chunk_iter(lambda info: places.append((info.byte_offset, info.size)))
    raw = np.memmap(path, np.uint8, "r")
    if not layout.packed:
        begin = places[0][0] if offset is None else offset
        pieces: Array = np.asarray(raw[begin : begin + rows * layout.sample_bytes])
        one = functools.partial(copy_once, pieces, np.empty(slot_bytes, np.uint8))
    else:
        itemsize = np.dtype(layout.dtype).itemsize
        nbytes = (layout.chunk or 1) * layout.sample_bytes
        stored = [np.asarray(raw[begin : begin + size]) for begin, size in places]
        one = functools.partial(decode_once, stored, nbytes, itemsize)
    return functools.partial(rate_of, one, rows)


def rate_of(one: Callable[[], None], rows: int, seconds: float) -> float:
    one()
    started, done = time.perf_counter(), 0
    while not done or time.perf_counter() - started < seconds:
        one()
        done += rows
    return done / (time.perf_counter() - started)


def copy_once(source: Array, slot: Array) -> None:
    for begin in range(0, len(source), len(slot)):
        piece = source[begin : begin + len(slot)]
        np.copyto(slot[: len(piece)], piece)


def decode_once(stored: list[Array], nbytes: int, itemsize: int) -> None:
    out = np.empty(nbytes, np.uint8)
    for chunk in stored:
        inflated = np.frombuffer(deflate.zlib_decompress(chunk, nbytes), np.uint8)
        if itemsize > 1:
            planes, values = inflated.reshape(itemsize, -1), out.reshape(-1, itemsize)
            for byte in range(itemsize):
                values[:, byte] = planes[byte]
