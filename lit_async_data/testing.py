"""What tests, examples and benchmarks need beside real data: `ArraySource`, data in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.permutation import Indices
from lit_async_data.sources.base import ChunkLayout, Location
from lit_async_data.spec import BatchSpec, FieldSpec


class ArraySource:
    """Samples that lie in memory. Safe to read from several threads.

    Args:
        arrays: One array per batch key, samples on axis 0.

    Example:
        >>> source = ArraySource({"x": np.zeros((10, 3, 8, 8), "u1")})
        >>> len(source), source.spec["x"].shape
        (10, (3, 8, 8))
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        self._spec = BatchSpec(
            {key: FieldSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}, as_mapping=True
        )

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def spec(self) -> BatchSpec:
        """Shapes and dtypes of the arrays."""
        return self._spec

    @property
    def chunks(self) -> ChunkLayout:
        """Each sample lies alone."""
        return ChunkLayout()

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy samples."""
        for key, array in out.items():
            np.take(self._arrays[key], samples, axis=0, out=array, mode="clip")

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Samples are their own rows."""
        return [Location("memory", "/", int(sample)) for sample in ids]

    def close(self) -> None:
        """Nothing to close."""
