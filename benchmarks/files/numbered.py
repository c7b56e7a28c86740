"""Samples that are their own numbers, in HDF5 files and computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import StorageLayout

# Rows in a chunk: a stored one, and a computed one.
ROWS, COMPUTED_ROWS = 7, 64
STORED: dict[str, dict[str, Any]] = {"contiguous": {}, "gzip": {"chunks": (ROWS,), "compression": "gzip"}}


def write_numbers(folder: str, stored: str, length: int) -> str:
    """A file with ``y``, int64 from 0 on; returns its path."""
    path = os.path.join(folder, f"{stored}_{length}.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("y", data=np.arange(length), **STORED[stored])
    return path


def write_bytes(folder: str, length: int) -> str:
    """A contiguous file with ``y``, uint8: the low byte of each sample's number; returns its path."""
    path, block = os.path.join(folder, f"bytes_{length}.h5"), np.arange(2**20, dtype=np.uint8)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("y", (length,), np.uint8)
        for begin in range(0, length, len(block)):
            data[begin : begin + len(block)] = block[: length - begin]
    return path


class Computed(Source):
    """Samples that are computed, as if they were stored in compressed chunks. Any thread may read.

    Args:
        length: Number of samples.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @property
    def spec(self) -> BatchSpec:
        """The number of the sample."""
        return BatchSpec({"y": FieldSpec((), np.dtype(np.int64))}, as_mapping=False)

    @property
    def chunks(self) -> StorageLayout:
        """Chunks, so that samples can be shuffled by them."""
        return StorageLayout((ChunkRun(self._length, COMPUTED_ROWS),), compressed=True, reading="decoded")

    def read_into(self, samples: npt.NDArray[np.int64], out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the numbers; see `Source.read_into`."""
        out["y"][...] = samples
