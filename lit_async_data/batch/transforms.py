"""`ToFloat` and `Normalize`, which transform a batch on its device; statistics of a field, computed block by block.

Each block is shifted by about its mean before it is squared, so that nothing cancels, and blocks are merged in float64:
Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 37 (1983).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError
from lit_async_data.options import ArrayLike, explains_names

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
        ndim: Number of axes of a sample, or of an element, that ``axis`` refers to. None: any.

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
    ndim: int | None = None


def first_measured(fields: Mapping[Any, FieldSpec | FieldStatistics]) -> tuple[Any]:
    """The key of the field to normalise by default: the first that holds no labels."""
    for key, field in fields.items():
        if not field.labels:
            return (key,)
    what = f"no field is named, and {', '.join(map(repr, fields)) or 'none'} hold classes, flags or one integer per "
    raise ConfigError(f'{what}sample; name the field to normalise, as in Normalize(fields="x")', "fields")


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
        ndim = len(field.shape) - field.concat
        axis = tuple(each - field.concat for each in axis)
        if not field.shape:  # the last count is that of numbers too large for a class
            used = max(len(field.classes), len(np.trim_zeros(classes, "b")))
            classes = classes[: 0 if classes[-1:].any() else used]
        return FieldStatistics(
            mean, std, number, least, largest, nans, axis, classes if classes.size else None, field.labels, ndim
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


Fields = str | int | Sequence[str | int]
Measured = Mapping[Any, FieldStatistics]
AxisByKey = int | Sequence[int] | Mapping[Any, int | Sequence[int]] | None


def _by_key(axis: Any, keys: Collection[Any]) -> dict[Any, int | Sequence[int] | None]:
    if not isinstance(axis, Mapping):
        return dict.fromkeys(keys, axis)
    if unknown := [key for key in axis if key not in keys]:
        raise ConfigError(f"{unknown[0]!r} is not one of the fields {', '.join(map(str, keys))}", "axis")
    return {key: axis.get(key) for key in keys}


_TYPES = ("float16", "bfloat16", "float32", "float64")
_FAR = 1000  # standard deviations from 0 to the mean from which on float32 would lose digits that show


@explains_names()
class ToFloat:
    """Converts fields of a batch to floats; divides integers by the largest value of their type.

    Use it as ``device_transform``: images are copied as bytes and grow to four times the size only on the device.
    Immutable; safe to call from any thread.

    Args:
        fields: Keys of a dict batch, or indices into a tuple batch. None: its first field.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.

    Raises:
        ConfigError: ``fields`` or ``dtype`` is wrong.

    Example:
        >>> ToFloat("x")({"x": torch.tensor([[0, 51, 255]], dtype=torch.uint8), "y": 1})["x"]
        tensor([[0.0000, 0.2000, 1.0000]])
        >>> ToFloat("x")
        ToFloat(['x'], dtype='float32')
    """

    def __init__(self, fields: Fields | None = None, *, dtype: str = "float32") -> None:
        self.fields = _checked_fields(fields)
        if dtype not in _TYPES:
            raise ConfigError(f"{dtype!r} is not one of {', '.join(_TYPES)}", "dtype")
        self.dtype: torch.dtype = getattr(torch, dtype)

    def __repr__(self) -> str:
        return f"ToFloat({self.fields and list(self.fields)}, dtype={str(self.dtype).removeprefix('torch.')!r})"

    def __call__(self, batch: Any) -> Any:
        """Returns a new dict or tuple with these fields, of any shape, converted; a `ConfigError` if one is missing.

        Tensors keep their memory format.
        """
        return _with_replaced(batch, self.fields, self._convert)

    def _convert(self, values: Tensor, _: Any) -> Tensor:
        # Half precision has no numbers above 65504, and only some integers above 2048.
        wide = self.dtype.itemsize <= 2 and largest(values) > 255
        compute = torch.promote_types(torch.float32, self.dtype) if wide else self.dtype
        return (values.to(compute) / largest(values)).to(self.dtype)


@explains_names()
class Normalize:
    """Converts fields to floats, subtracts a mean and divides by a standard deviation, per channel.

    Use it as ``device_transform``. Safe to call from any thread. `of` takes mean and std from `statistics`.

    Args:
        mean: One number, or one per channel; or an array with the axes ``axis``. None: 0.5, for integers only.
        std: As ``mean``; above 0. None: 0.5, for integers only.
        scale: The values that ``mean`` and ``std`` of integers refer to. ``"stored"``: the stored values. ``"type"``:
            values from 0 to 1: integers are first divided by the largest value of their type, so that ``mean=0.5,
            std=0.5`` maps bytes to the range from −1 to 1: 2 (x / 255 − 0.5). None: ``"stored"``, but an error if the
            field holds integers and every mean is from 0 to 1. Floats are never divided.
        fields: Keys of a dict batch, or indices into a tuple batch. None: its first field, or those of ``axis``.
        dtype: As in `ToFloat`.
        axis: The axes of a sample, without N, along which ``mean`` and ``std`` vary: 0 for channels, −1 for the last
            axis, ``(0, 1)`` for means of shape (T, C), ``()`` for one number; or these by field. None: 0, unless they
            are single numbers.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> Normalize(256, 128)((torch.tensor([128, 256, 320], dtype=torch.int16), 1))[0].tolist()
        [-1.0, 0.0, 0.5]
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
        >>> Normalize(0.5, 0.5, scale="type")((images, 1))[0].flatten().tolist()
        [-1.0, 1.0]
    """

    _usual = False  # whether mean or std was not given

    def __init__(
        self,
        mean: ArrayLike | None = None,
        std: ArrayLike | None = None,
        *,
        scale: Literal["stored", "type"] | None = None,
        fields: Fields | None = None,
        dtype: str = "float32",
        axis: AxisByKey = None,
    ) -> None:
        if scale not in ("stored", "type", None):
            raise ConfigError(f"{scale!r} is not one of stored, type", "scale")
        self.scale, self.dtype = scale, dtype
        self._float = ToFloat(list(axis) if fields is None and isinstance(axis, Mapping) else fields, dtype=dtype)
        self._usual = mean is None or std is None
        mean, std = (0.5 if each is None else each for each in (mean, std))
        named = _by_key(axis, self.fields or (None,))
        self._scalings = {key: _Scaling(mean, std, each) for key, each in named.items()}

    @classmethod
    def of(
        cls, statistics: Measured, fields: Fields | None = None, *, dtype: str = "float32", axis: AxisByKey = None
    ) -> Self:
        """Normalises each field by its own mean and standard deviation, along the axes that `statistics` kept.

        Args:
            statistics: The result of `statistics`.
            fields: Keys of ``statistics``. None: those of ``axis``, or the first field without classes, flags or one
                integer per sample.
            dtype: As in `ToFloat`.
            axis: As in `Normalize`, or by key, if samples have more or fewer axes than those of ``statistics``.

        Raises:
            ConfigError: A field has no statistics, no values, or a standard deviation of 0.

        Example:
            >>> from lit_async_data import statistics
            >>> from lit_async_data.testing import ArraySource
            >>> normalize = Normalize.of(statistics(ArraySource({"x": np.array([1.0, 3.0])})))
            >>> made = normalize({"x": torch.tensor([1.0, 2.0, 3.0])})["x"]
            >>> made.tolist(), normalize.inverse(made).tolist()
            ([-1.0, 0.0, 1.0], [1.0, 2.0, 3.0])
        """
        fields = list(axis) if fields is None and isinstance(axis, Mapping) else fields
        made = cls(scale="stored", fields=first_measured(statistics) if fields is None else fields, dtype=dtype)
        made._usual = False
        for key, given in _by_key(axis, made._scalings).items():
            if key not in statistics:
                raise ConfigError(f"no statistics of {key!r}; choose from {', '.join(map(repr, statistics))}", "fields")
            found = statistics[key]
            _check_spread(key, found)
            own = (found.axis, found.ndim) if given is None else (given, None)
            made._scalings[key] = _Scaling(found.mean, found.std, *own)
        return made

    def kept(self, key: Any, field: FieldSpec) -> Literal["channels"] | tuple[int, ...]:
        """The axes that `statistics` keeps for a field, to replace the mean and std of this transform."""
        scaling = self._scalings[key if self.fields else None]
        if scaling.axis is None:
            return "channels"
        # Raises an error if the axes do not fit the field.
        scaling.constants(torch.empty(1, *field.shape[field.concat :], device="meta"), torch.float32)
        return tuple(axis + int(field.concat and axis >= 0) for axis in scaling.axis)

    def __repr__(self) -> str:
        fields = self.fields and list(self.fields)
        shown = ", ".join(dict.fromkeys(map(str, self._scalings.values())))
        return f"Normalize({shown}, scale={self.scale!r}, fields={fields}, dtype={self.dtype!r})"

    @property
    def fields(self) -> tuple[str | int, ...] | None:
        """The fields to normalise; None for the first field."""
        return self._float.fields

    @property
    def inverse(self) -> Normalize:
        """The inverse transform; it returns float32 or float64, from 0 to 1 after ``scale="type"``."""
        dtype = self.dtype if self.dtype == "float64" else "float32"
        made = Normalize(0, 1, scale="stored", fields=self.fields, dtype=dtype)
        for key, each in self._scalings.items():
            made._scalings[key] = _Scaling(-each.mean / each.std, 1 / each.std, each.axis, each.ndim)
        return made

    def __call__(self, batch: Any) -> Any:
        """Returns a new dict or tuple with these fields normalised. Tensors keep their memory format.

        Args:
            batch: A dict or a tuple with fields of shape (N, C, …), or of any shape if mean and std are one number. Or
                a tensor of values, such as predictions, if a single field is normalised.

        Raises:
            ConfigError: The batch lacks a field, or is a tensor although several fields are normalised; a field has
                another number of channels, or it holds integers and ``scale`` must be given.
        """
        if isinstance(batch, Tensor):
            if len({*map(str, self._scalings.values())}) > 1:
                listed, last = ", ".join(map(repr, self._scalings)), next(reversed(self._scalings))
                what = f"{listed} are each normalised by their own numbers, and a tensor does not name its field"
                raise ConfigError(f"{what}; give a batch: inverse({{**batch, {last!r}: values}})[{last!r}]", "fields")
            return self._normalize(batch, next(iter(self._scalings)))
        return _with_replaced(batch, self.fields, self._normalize)

    def _normalize(self, values: Tensor, field: Any) -> Tensor:
        scaling = self._scalings[field if self.fields else None]
        means = scaling.mean
        if self._usual and values.is_floating_point():
            what = "one is missing, and floats have no usual range; give both, or Normalize.of(statistics(source))"
            raise ConfigError(what, "mean, std")
        if self.scale is None and largest(values) > 1 and means.min() >= 0 and means.max() <= 1:
            what = f'means from 0 to 1, but the field holds {values.dtype}: write scale="type" to divide them by '
            what += f'{largest(values)} first, or scale="stored" if mean and std are those of the stored values'
            raise ConfigError(what, "scale")
        # x · (1 / (largest · std)) − mean / std: two passes over the pixels. Large values may hardly differ, such as
        # seconds since 1970. float32 would round these before the mean is subtracted.
        wide = values.element_size() > 4 or values.dtype in (torch.int32, torch.uint32) or scaling.far
        wide &= values.device.type != "mps"  # MPS has no float64
        compute = torch.float64 if wide else torch.promote_types(self._float.dtype, torch.float32)
        scale, shift = scaling.constants(values, compute)
        if self.scale == "type":
            scale = scale / largest(values)
        result: Tensor = values.to(compute) * scale - shift
        return result.to(self._float.dtype)


class _Scaling:
    """Mean and standard deviation, and the axes of a sample of ``ndim`` along which they vary: None for one number."""

    def __init__(self, mean: Any, std: Any, axis: int | Sequence[int] | None, ndim: int | None = None) -> None:
        self.mean, self.std = _checked_numbers("mean", mean), _checked_numbers("std", std)
        if len({self.mean.shape, self.std.shape} - {()}) > 1:
            raise ConfigError(f"{self.std.size} for {self.mean.size} channels of mean; give one for each", "std")
        if self.std.min() <= 0:
            raise ConfigError(f"{std!r} is not above 0", "std")
        arrays = np.broadcast_arrays(1 / self.std, self.mean / self.std)
        self.count, self.far = arrays[0].size, bool(np.abs(arrays[1]).max() > _FAR)
        axis = 0 if axis is None and self.count > 1 else axis  # a single number may have axes, for `statistics`
        self.axis = tuple(axis) if isinstance(axis, Sequence) else None if axis is None else (axis,)
        if self.count > 1 and len(self.axis or ()) != arrays[0].ndim:
            raise ConfigError(f"{axis!r} does not name the {arrays[0].ndim} axes of mean and std", "axis")
        self.ndim = ndim
        self._arrays, self._by_device = arrays, dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_by_device": {}}

    def __str__(self) -> str:
        mean, std = (tuple(each.tolist()) if each.ndim else each for each in (self.mean, self.std))
        axis = self.axis[0] if self.axis and len(self.axis) == 1 else self.axis
        return f"mean={mean}, std={std}" + f", axis={axis}" * bool(self.axis)

    def constants(self, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """1 / std and mean / std on the device of a batch, with its axes."""
        key = values.device, dtype
        if key not in self._by_device:  # one copy that the host waits for, so that other streams need no event
            with torch.inference_mode(mode=False):  # a later batch may need a gradient through them
                scale, shift = (torch.tensor(each).to(dtype).to(values.device) for each in self._arrays)
            self._by_device[key] = scale, shift
        scale, shift = self._by_device[key]
        if scale.numel() == 1:
            return scale.reshape(()), shift.reshape(())
        axes = [axis + 1 if axis >= 0 else axis + values.ndim for axis in self.axis or ()]
        sizes = [values.shape[axis] if 0 < axis < values.ndim else None for axis in axes]
        other = self.ndim not in (None, values.ndim - 1)
        if other or sizes != list(scale.shape) or len({*axes}) < len(axes):
            there = f"{' × '.join(str(size or 'none') for size in sizes)} on axis {', '.join(map(str, axes))}"
            there += f", and {values.ndim} axes, while the samples of the statistics have {self.ndim} and N" * other
            letters = {3: '"NWC", or "NC" for windows of rows', 4: '"NHWC"', 5: '"NDHWC"'}
            layout = f'layout={{"x": {letters[values.ndim]}}}' if values.ndim in letters and not other else "layout"
            what = f"{' × '.join(map(str, scale.shape))} channels, but a batch of the field has {there}: its shape is "
            what += f"{tuple(values.shape)}; give one number, or one for each channel. If another axis holds the "
            what += f"channels, name it with axis (1 behind the rows of a window), or by the source's {layout}"
            raise ConfigError(what, "mean, std")
        shape = [size if axis in axes else 1 for axis, size in enumerate(values.shape)]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        return scale.permute(order).reshape(shape), shift.permute(order).reshape(shape)


def _check_spread(key: Any, found: FieldStatistics) -> None:
    for wrong, what, advice in (
        (found.count == 0, "no values but NaN", "leave the field out, or correct its fill values"),
        (~np.isfinite(found.std), "infinite values", "mask them where they are stored"),
        (found.std == 0, "only one value", "write Normalize(mean, np.where(std, std, 1), scale='stored', axis=AXIS)"),
    ):
        if np.any(wrong):
            where = f" at {tuple(np.argwhere(wrong)[0].tolist())} of axis {found.axis}" if found.axis else ""
            raise ConfigError(f"{key!r} has {what}{where}, so it cannot be normalised; {advice}", "statistics")


def largest(values: Tensor) -> int:
    """The value that becomes 1.0; 1 for floats and bools."""
    return 1 if values.is_floating_point() or values.dtype == torch.bool else torch.iinfo(values.dtype).max


def _with_replaced(batch: Any, fields: Sequence[str | int] | None, convert: Callable[[Tensor, Any], Tensor]) -> Any:
    values: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    for field in fields if fields is not None else list(values)[:1]:
        if field not in values:
            raise ConfigError(f"{field!r} is not in the batch; choose from {', '.join(map(repr, values))}", "fields")
        if not isinstance(values[field], Tensor):
            what = f"{field!r} is no tensor but {type(values[field]).__name__}; pass this as device_transform"
            raise ConfigError(f"{what}. A batch_transform gets arrays: write (x - mean) / std", "fields")
        values[field] = convert(values[field], field)
    return values if isinstance(batch, Mapping) else tuple(values.values())


def _checked_fields(fields: Any) -> tuple[str | int, ...] | None:
    if fields is None:
        return None
    listed = tuple(fields) if isinstance(fields, Sequence) and not isinstance(fields, str) else (fields,)
    if not listed or not all(isinstance(field, str | int) and not isinstance(field, bool) for field in listed):
        raise ConfigError(f"{fields!r} is neither a key, nor an index, nor a list of these", "fields")
    return listed


def _checked_numbers(name: str, values: Any) -> Array:
    try:
        numbers = np.asarray(values)
    except (ValueError, TypeError):  # lists of several lengths; a tensor on another device
        numbers = np.asarray(None)
    if numbers.dtype.kind not in "iuf" or not numbers.size or not np.isfinite(numbers).all():
        raise ConfigError(f"{values!r} is neither a finite number nor a list of one for each channel", name)
    return numbers.astype(np.float64)
