"""Statistics of the values of a field, computed block by block.

Each block is shifted by about its mean before it is squared, so that nothing cancels, and blocks are merged in float64:
Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 37 (1983).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError

# Values per block: enough to make up for the calls, few enough for the cache that cores share.
BLOCK = 2**20
# Samples with fewer values for each place on the kept axes are counted together.
FEW = 256
# Values that are summed in float32. For bytes, the sum of the squares of so few is exact.
RUN, RUN_OF_BYTES = 1024, 256
# The mean of this many values of a row is near enough to the mean of the row.
SOME = 64
# Squares of floats outside of this range, or their sums, may leave the range of float32.
LEAST, LARGEST = 2.0**-40, 2.0**40
# Memory for the distances of a block, by thread: clearing new memory would take the system longer than the computation.
_room = threading.local()
# Results for infinite values are NaN.
_infinity = np.errstate(invalid="ignore", over="ignore")


@dataclasses.dataclass(frozen=True, eq=False)
class FieldStatistics:
    """Statistics of the values of a field; `statistics` computes them.

    Attributes:
        mean: float64; one number, or an array with the kept axes: shape (C,) per channel. NaN if all values are NaN.
        std: Standard deviation: the root of the mean squared distance from the mean. Shape and dtype as ``mean``.
        count: Number of values that are not NaN; int64, shape as ``mean``, as for the next three.
        min: The least value, in the type of the field.
        max: The largest value, in the type of the field.
        nans: Number of values that are NaN, such as those of ``mask_and_scale``; int64.
        axis: The kept axes of a sample: ``(0,)`` per channel, ``()`` for one number. With ``ragged="concat"``, the kept
            axes of an element, since the rows of a batch are elements.
        class_counts: Samples of each class 0, 1, 2, …; int64, shape (classes,). None if the field has no class names
            and is not one whole number up to 65,535 per sample.
        labels: Whether the values are classes, flags or one integer per sample.

    Example:
        >>> from lit_async_data import statistics
        >>> from lit_async_data.testing import ArraySource
        >>> found = statistics(ArraySource({"y": np.array([0, 2, 2, 1])}))["y"]
        >>> float(found.mean), int(found.max), found.class_counts.tolist()
        (1.25, 2, [1, 1, 2])
    """

    mean: Array
    std: Array
    count: Array
    min: Array
    max: Array
    nans: Array
    axis: tuple[int, ...] = ()
    class_counts: Array | None = None
    labels: bool = False


def first_measured(fields: Mapping[Any, FieldSpec | FieldStatistics]) -> tuple[Any]:
    """The key of the field to normalise by default: the first that holds no labels."""
    for key, field in fields.items():
        if not field.labels:
            return (key,)
    what = f"no field is named, and {', '.join(map(repr, fields)) or 'none'} hold classes, flags or one integer per "
    what += 'sample; name the field to normalise: fields="x", or device_transform=Normalize(fields="x") with statistics'
    raise ConfigError(what, "fields")


class Moments(NamedTuple):
    """Counts and sums: a row for each block of values, a column for each place on the kept axes."""

    number: Array  # values that are not NaN
    mean: Array
    squares: Array  # sum of the squared distances from the mean
    least: Array
    largest: Array
    nans: Array
    classes: Array = np.zeros((1, 0), np.int64)  # samples of each class

    @classmethod
    def of(cls, values: Array, kept: Sequence[int]) -> Self:
        """The moments of an array of at least one value; ``kept`` are axes of the array after the first."""
        columns = math.prod(values.shape[axis] for axis in kept)
        each, found = values[0].size // columns, []
        samples, width = max(BLOCK // values[0].size, 1), max(BLOCK // columns, 1)
        for first in range(0, len(values), samples):
            block = values[first : first + samples]
            if each < FEW:
                block = np.moveaxis(block, kept, range(len(kept))).reshape(columns, -1)
            else:
                block = np.moveaxis(block, kept, range(1, len(kept) + 1)).reshape(-1, each)
            if block.strides[1] != block.itemsize:
                block = np.ascontiguousarray(block)
            pieces = (block[:, at : at + width] for at in range(0, block.shape[1], width))
            found += [cls(*(row.reshape(-1, columns) for row in _moments(piece))) for piece in pieces]
        return cls.together(found)

    @classmethod
    @_infinity
    def together(cls, several: Sequence[Moments]) -> Self:
        numbers, means, squares, least, largest, nans, classes = map(np.concatenate, zip(*several, strict=True))
        number = numbers.sum(0)
        mean = (numbers * means).sum(0) / np.maximum(number, 1)
        squares = squares.sum(0) + (numbers * (means - mean) ** 2).sum(0)
        least, largest = np.fmin.reduce(least, 0), np.fmax.reduce(largest, 0)
        return cls(*(each[None] for each in (number, mean, squares, least, largest, nans.sum(0), classes.sum(0))))

    def statistics(self, field: FieldSpec, axis: tuple[int, ...]) -> FieldStatistics:
        shape, classes = [field.shape[each] for each in axis], self.classes[0]
        found = [self.mean, np.sqrt(self.squares / np.maximum(self.number, 1)), self.least, self.largest]
        if not self.number.all():
            found = [np.where(self.number, each, np.nan) for each in found]
        mean, std, least, largest, number, nans = (each.reshape(shape)[()] for each in (*found, self.number, self.nans))
        if field.concat:
            axis = tuple(each - 1 for each in axis)
        if not field.shape:  # the last count is that of numbers too large for a class
            used = max(len(field.classes), len(np.trim_zeros(classes, "b")))
            classes = classes[: 0 if classes[-1:].any() else used]
        return FieldStatistics(
            mean, std, number, least, largest, nans, axis, classes if classes.size else None, field.labels
        )


@_infinity
def _moments(values: Array) -> tuple[Array, ...]:
    """The attributes of `Moments` for each row of values, except classes."""
    exact, itemsize = values.dtype.kind in "biu", values.dtype.itemsize
    nans, least, largest = np.zeros(len(values), np.int64), values.min(1), values.max(1)
    some = values[:, :: values.shape[1] // SOME + 1]
    if not exact and np.isnan(least).any():  # the first number of a row replaces its NaNs
        missing = np.isnan(values)
        some = values[np.arange(len(values)), missing.argmin(1), None]
        nans, some = missing.sum(1), np.where(np.isnan(some), 0, some)
        values = np.where(missing, some, values)
        least, largest = (np.where(nans < values.shape[1], each, np.nan) for each in (values.min(1), values.max(1)))
    reach = np.zeros(0) if exact else np.maximum(np.abs(least), np.abs(largest), dtype=np.float64)
    small = itemsize <= (2 if exact else 4) and not ((reach < LEAST) & (reach > 0) | (reach > LARGEST)).any()
    count, distances = values.shape[1] - nans, _memory(values.shape, np.dtype(np.float32 if small else np.float64))
    if exact and itemsize == 1:
        shift, run = np.zeros(len(values)), RUN_OF_BYTES
        distances[...] = values
    else:
        shift, run = some.mean(1, dtype=distances.dtype), RUN
        if exact:
            shift = np.rint(shift)  # distances are whole numbers, too
        np.subtract(values, shift[:, None], out=distances, dtype=distances.dtype, casting="unsafe")
    off = _dot(distances, np.ones_like(distances[:1]), run) / np.maximum(count, 1)
    squares = _dot(distances, distances, run) - count * off**2
    return count, np.where(count, shift + off, 0), np.maximum(squares, 0), least, largest, nans


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(_room, "bytes") or len(_room.bytes) < size:
        _room.bytes = np.empty(size, np.uint8)
    array: Array = _room.bytes[:size].view(dtype).reshape(shape)
    return array


def _dot(one: Array, other: Array, run: int) -> Array:
    """The dot products of rows, summed in float64 over runs short enough for float32."""
    at = one.shape[1] // run * run
    runs = [each[:, :at].reshape(len(each), -1, run) for each in (one, other)]
    sums: Array = np.vecdot(*runs).sum(1, dtype=np.float64) + np.vecdot(one[:, at:], other[:, at:])
    return sums
