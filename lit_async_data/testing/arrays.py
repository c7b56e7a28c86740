"""`ArraySource`: arrays in memory as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.places import Part
from lit_async_data.sources.contract.source import Source, check_range
from lit_async_data.sources.contract.storage_layout import StorageLayout


class ArraySource(Source):
    """A source of arrays in memory, which says of where they lie what a test wants. Safe to read from several threads.

    Args:
        arrays: One array per batch key, samples on axis 0.
        parts: Names of the parts in order, and the number of samples of each: ``{"a.h5:/left": 10}``. None: one part.
        columns: Values that are in no batch, one per sample, by name.
        chunks: The storage layout to report. None: samples are read one by one, under a lock.

    Example:
        >>> source = ArraySource({"x": np.zeros((10, 3, 8, 8), "u1")}, parts={"a.h5": 2, "b.h5:/left": 8})
        >>> len(source), source.spec["x"].shape
        (10, (3, 8, 8))
        >>> source.locate([3])
        [Location(file='files/b.h5', group='/left', row=1)]
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        parts: Mapping[str, int] | None = None,
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        chunks: StorageLayout | None = None,
    ) -> None:
        self._arrays, self._columns, self._chunks = dict(arrays), dict(columns or {}), chunks or StorageLayout()
        self._spec = BatchSpec(
            {key: FieldSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}, as_mapping=True
        )
        named = [(name, *name.partition(":")[::2], samples) for name, samples in (parts or {}).items()]
        self._parts = tuple(Part(f"files/{file}", group or "/", name, samples) for name, file, group, samples in named)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def spec(self) -> BatchSpec:
        """Shapes and dtypes of the arrays."""
        return self._spec

    @property
    def chunks(self) -> StorageLayout:
        """The ``chunks`` given to the constructor."""
        return self._chunks

    @property
    def parts(self) -> Sequence[Part]:
        """The parts given to the constructor."""
        return self._parts or super().parts

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy samples; see `Source.read_into`."""
        check_range(samples, self)
        for key, array in out.items():
            np.take(self._arrays[key], samples, axis=0, out=array, mode="clip")

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column given to the constructor, or an array; see `Source.column`."""
        return self._columns[name] if name in self._columns else super().column(name)
