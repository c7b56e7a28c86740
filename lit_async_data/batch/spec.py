"""What a batch looks like: `FieldSpec` and `BatchSpec`, and `BatchLayout`, its place in raw memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

# cudaMalloc and the pinned allocator of torch align to this; a field that starts here can be copied as it is.
ALIGNMENT = 512
# What a tensor can hold: (kind, itemsize) of numpy.
TENSOR_TYPES = {("b", 1), *((k, n) for k in "iu" for n in (1, 2, 4, 8)), *(("f", n) for n in (2, 4, 8))}
TENSOR_TYPES |= {("c", 8), ("c", 16)}
# A field of at most this many bytes per batch is handed out as a copy: collecting labels then holds no images.
SMALL_BYTES = 64 * 1024

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One field of a sample.

    Attributes:
        shape: Shape of one sample as it is delivered, without N; channels first where there are any.
        dtype: Element type as it is delivered, in native byte order.
        channel: Which of the stored sample axes holds the channels; None where no axis moves.
        classes: Names of the values 0, 1, 2, …, where they have any.
        narrow: Element type as stored, where that takes fewer bytes than ``dtype``: a source can fill arrays of either,
            and values on their way to a device are cast there.

    Example:
        >>> image = FieldSpec((3, 64, 48), np.dtype(np.uint8), channel=2)     # stored as NHWC
        >>> image.stored_shape, image.nbytes
        ((64, 48, 3), 9216)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    channel: int | None = None
    classes: tuple[str, ...] = ()
    narrow: np.dtype[Any] | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one sample as it lies in the slot: the file's order of axes, so that no byte moves."""
        if self.channel is None:
            return self.shape
        rest = list(self.shape[1:])
        rest.insert(self.channel, self.shape[0])
        return tuple(rest)

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize

    def delivered(self, stored: Any) -> Any:
        """The view N, C, … of an array or tensor of shape ``(n, *stored_shape)``."""
        if self.channel in (None, 0):
            return stored
        moved = self.channel + 1
        order = (0, moved, *(axis for axis in range(1, stored.ndim) if axis != moved))
        return stored.transpose(order) if isinstance(stored, np.ndarray) else stored.permute(order)


class BatchSpec(Mapping[str, FieldSpec]):
    """The fields of a batch in their order, and whether batches are dicts or tuples. A mapping of keys to fields.

    Args:
        fields: What each batch key holds.
        as_mapping: Batches are dicts if True, else tuples in the order of ``fields``.

    Example:
        >>> spec = BatchSpec({"x": FieldSpec((3, 8, 8), np.dtype("u1"))}, as_mapping=True)
        >>> spec["x"].shape, list(spec), "y" in spec
        ((3, 8, 8), ['x'], False)
        >>> spec
        <BatchSpec of dicts: x uint8 (3, 8, 8)>
    """

    def __init__(self, fields: Mapping[str, FieldSpec], *, as_mapping: bool) -> None:
        self.fields: Mapping[str, FieldSpec] = MappingProxyType(dict(fields))
        self.as_mapping = as_mapping

    def __getitem__(self, key: str) -> FieldSpec:
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        return ", ".join(f"{key} {field}" for key, field in self.fields.items())

    def __repr__(self) -> str:
        return f"<BatchSpec of {'dicts' if self.as_mapping else 'tuples'}: {self}>"

    def __reduce__(self) -> Any:
        return functools.partial(BatchSpec, as_mapping=self.as_mapping), (dict(self.fields),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchSpec):
            return NotImplemented
        return self.as_mapping == other.as_mapping and list(self.fields.items()) == list(other.fields.items())

    __hash__ = None  # type: ignore[assignment]  # equality is by content

    @property
    def nbytes(self) -> int:
        """Bytes of one sample over all fields."""
        return sum(field.nbytes for field in self.fields.values())

    def narrowed(self) -> BatchSpec:
        """This spec with each field in the type that takes the fewest bytes: for the way to a device."""
        fields = {
            key: field if field.narrow is None else dataclasses.replace(field, dtype=field.narrow, narrow=None)
            for key, field in self.fields.items()
        }
        return BatchSpec(fields, as_mapping=self.as_mapping)

    def packed(self, values: Mapping[str, Any]) -> dict[str, Any] | tuple[Any, ...]:
        """Values by key as the user gets them: a dict or a tuple."""
        return dict(values) if self.as_mapping else tuple(values[key] for key in self.fields)

    def with_field(self, key: str, field: FieldSpec) -> BatchSpec:
        """This spec with one more field at the end."""
        return BatchSpec({**self.fields, key: field}, as_mapping=self.as_mapping)


class BatchLayout:
    """Where each field of a batch lies in a slot of bytes. Immutable.

    Large fields come first, each aligned, and each is copied to the device by itself. The small ones follow in one
    block, which travels in one copy.

    Args:
        spec: The fields.
        capacity: Samples of one batch that must fit.
        batches: Batches that must fit; a field's values lie together over all of them.
    """

    def __init__(self, spec: BatchSpec, capacity: int, batches: int = 1) -> None:
        self.spec = spec
        self.batches = batches
        self.small = tuple(key for key, field in spec.fields.items() if field.nbytes * capacity <= SMALL_BYTES)
        self.large = tuple(key for key in spec.fields if key not in self.small)
        sizes = {key: field.nbytes * capacity * batches for key, field in spec.fields.items()}
        self.offsets: dict[str, int] = {}
        end = self._place(self.large, sizes, 0)
        self.small_start = end
        self.nbytes = max(self._place(self.small, sizes, end), ALIGNMENT)
        # Asked for with every batch: computed once.
        self._fields = [
            (key, self.offsets[key], field.nbytes, field.dtype, field.stored_shape)
            for key, field in spec.fields.items()
        ]

    def _place(self, keys: tuple[str, ...], sizes: dict[str, int], end: int) -> int:
        for key in keys:
            self.offsets[key] = end
            end += -(-sizes[key] // ALIGNMENT) * ALIGNMENT
        return end

    def views(self, memory: Bytes, count: int, first: int = 0) -> dict[str, Array]:
        """Every field of ``count`` samples as a view of a slot, in the order of the spec.

        Args:
            memory: uint8 array over the slot.
            count: Samples wanted.
            first: Row at which they begin.

        Returns:
            Arrays of shape ``(count, *stored_shape)``.
        """
        views = {}
        for key, offset, nbytes, dtype, shape in self._fields:
            begin = offset + first * nbytes
            views[key] = memory[begin : begin + count * nbytes].view(dtype).reshape((count, *shape))
        return views
