"""Sources of arrays in memory: `ArraySource` and `PartedArrays`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.errors import MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.places import Location, Part
from lit_async_data.sources.contract.source import Source, check_range
from lit_async_data.sources.contract.storage_layout import StorageLayout


class ArraySource(Source):
    """A source of arrays in memory. Safe to read from several threads.

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
    def chunks(self) -> StorageLayout:
        """No chunks: samples can be read one by one."""
        return StorageLayout()

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy samples; see `Source.read_into`."""
        check_range(samples, self)
        for key, array in out.items():
            np.take(self._arrays[key], samples, axis=0, out=array, mode="clip")


class PartedArrays(ArraySource):
    """An `ArraySource` that reports parts and chunks, as sources of files do. Safe to read from several threads.

    Args:
        arrays: As for `ArraySource`.
        parts: Names of the parts in order, and the number of samples of each: ``{"a.h5:/left": 10}``.
        overlap: Number of following samples with which a sample shares values, as reported to `split`.
        columns: Values that are in no batch, one per sample, by name.
        chunks: The storage layout to report.

    Example:
        >>> source = PartedArrays({"y": np.arange(5)}, parts={"a.h5": 2, "b.h5:/left": 3})
        >>> source.parts[1].name, source.parts[1].samples
        ('b.h5:/left', 3)
        >>> source.locate([3])
        [Location(file='files/b.h5', group='/left', row=1)]
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        parts: Mapping[str, int],
        overlap: int = 0,
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        chunks: StorageLayout | None = None,
    ) -> None:
        super().__init__(arrays)
        named = [(name, *name.partition(":")[::2], samples) for name, samples in parts.items()]
        self._parts = tuple(Part(f"files/{file}", group or "/", name, samples) for name, file, group, samples in named)
        self._columns = {**arrays, **(columns or {})}
        self._chunks = dataclasses.replace(chunks or StorageLayout(), overlap=overlap)

    @property
    def chunks(self) -> StorageLayout:
        """The ``chunks`` and ``overlap`` given to the constructor."""
        return self._chunks

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts given to the constructor."""
        return self._parts

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a column or an array.

        Raises:
            MissingError: There is neither.
        """
        if name not in self._columns:
            raise MissingError(
                f"memory: there is no column {name!r}; choose from {', '.join(self._columns)}", dataset=name
            )
        return self._columns[name]

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """File, group and row in the part of each sample."""
        check_range(np.asarray(ids, np.int64), self)
        ends = np.cumsum([part.samples for part in self.parts])
        which = np.searchsorted(ends, np.asarray(ids, np.int64), side="right").tolist()
        parts = [self.parts[part] for part in which]
        return [
            Location(part.file, part.group, int(sample) - int(ends[number]) + part.samples)
            for part, number, sample in zip(parts, which, ids, strict=True)
        ]
