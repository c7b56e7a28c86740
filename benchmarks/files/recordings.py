"""A recording, many files of images, and the sparse matrix of an h5ad file.

Values differ from row to row and from file to file, so that a check notices a value from the wrong place. They compress
about as well as measured data.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CHANNELS, IMAGE, GENES = 32, (3, 32, 32), 5_000
# Rows in a chunk.
RECORDED, IMAGES = 4_096, 64
# How a recording is stored.
RECORDING: dict[str, dict[str, Any]] = {
    "raw": {},
    "raw, chunked": {"chunks": (RECORDED, CHANNELS)},
    "gzip": {"chunks": (RECORDED, CHANNELS), "compression": "gzip"},
}
CONTIGUOUS, GZIP = "raw", "gzip"
# The default of h5py and anndata.
LEVEL = 4


def recording(folder: str, stored: str, rows: int) -> str:
    """A file with ``data``, float32 of shape (rows, 32), and a label for each row; returns its path."""
    path = os.path.join(folder, "recording.h5")
    rng = np.random.default_rng(0)
    slow = np.sin(np.arange(rows)[:, None] / rng.uniform(5, 50, CHANNELS)) * 50
    # Steps of one sixteenth, as from an analogue converter.
    values = np.round((slow + rng.standard_normal((rows, CHANNELS), np.float32)) * 16) / 16
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values.astype(np.float32), **RECORDING[stored])
        file["labels"] = np.arange(rows)
    return path


def images(folder: str, stored: str, files: int, rows: int, chunks: int) -> str:
    """Files with ``data``, uint8 of shape (rows, 3, 32, 32), and a class for each row; returns a glob.

    Args:
        folder: Where they go.
        stored: ``"raw"`` or ``"gzip"``.
        files: How many.
        rows: Of each.
        chunks: Chunks of 64 images to generate; each file takes them in a different order.
    """
    rng = np.random.default_rng(0)
    smooth = np.sin(rng.random((32, 1)) * 6 + np.linspace(0, 20, int(np.prod(IMAGE)))) * 100 + 128
    pool = smooth.astype(np.uint8)[rng.integers(0, len(smooth), (chunks, IMAGES))]
    pool += rng.integers(0, 2, pool.shape, np.uint8)
    packed = [zlib.compress(chunk, LEVEL) for chunk in pool] if stored == GZIP else []
    for number in range(files):
        which = rng.integers(0, chunks, -(-rows // IMAGES))
        with h5py.File(os.path.join(folder, f"images_{number:03}.h5"), "w") as file:
            if stored == GZIP:
                write_compressed(file, rows, [packed[one] for one in which.tolist()])
            else:
                file["data"] = pool[which].reshape(-1, *IMAGE)[:rows]
            file["labels"] = draw_classes(rng, rows)
    return os.path.join(folder, "images_*.h5")


def write_compressed(file: h5py.File, rows: int, packed: list[bytes]) -> None:
    """Write chunks that are already compressed, since compressing gigabytes would take minutes."""
    options = {"chunks": (IMAGES, *IMAGE), "compression": "gzip", "compression_opts": LEVEL}
    data = file.create_dataset("data", (rows, *IMAGE), np.uint8, **options)
    for number, chunk in enumerate(packed):
        data.id.write_direct_chunk((number * IMAGES, 0, 0, 0), chunk)


def draw_classes(rng: np.random.Generator, rows: int) -> Array:
    """Ten classes, int64, each half as frequent as the one before it."""
    share = 0.5 ** np.arange(10)
    return rng.choice(10, rows, p=share / share.sum())


def cells(folder: str, stored: str, rows: int) -> str:
    """A file with the group ``X``, as AnnData stores counts of 5 000 genes in sparse rows, 5 % filled; its path."""
    path = os.path.join(folder, "cells.h5ad")
    rng = np.random.default_rng(0)
    columns = [np.flatnonzero(rng.random(GENES, np.float32) < 0.05) for _ in range(rows)]
    indptr = np.concatenate([[0], np.cumsum([len(each) for each in columns])])
    counts = 1 + rng.poisson(1, indptr[-1])
    options = {"compression": "gzip"} if stored == GZIP else {}
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, GENES)})
        group.create_dataset("data", data=counts.astype(np.float32), **options)
        group.create_dataset("indices", data=np.concatenate(columns).astype(np.int32), **options)
        group["indptr"] = indptr.astype(np.int32)
        file["y"] = np.arange(rows)
    return path
