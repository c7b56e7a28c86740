"""Transforms of a batch on its device: `ToFloat`, `Normalize`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lit_async_data.errors import ConfigError

Fields = str | int | Sequence[str | int]
_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


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
            raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(_TYPES)}")
        self.dtype = _TYPES[dtype]

    def __repr__(self) -> str:
        return f"ToFloat({self.fields and list(self.fields)}, dtype={_name(self.dtype)!r})"

    def __call__(self, batch: Any) -> Any:
        """Returns a new dict or tuple with these fields converted. Tensors keep their memory format.

        Args:
            batch: A dict or a tuple of tensors of any shape.

        Raises:
            ConfigError: The batch lacks a field.
        """
        return _with_replaced(batch, self.fields, self._convert)

    def _convert(self, values: Tensor) -> Tensor:
        return (values.to(_compute_dtype(self.dtype, values)) / largest(values)).to(self.dtype)


class Normalize:
    """Converts fields to floats, subtracts a mean and divides by a standard deviation, per channel.

    Use it as ``device_transform``. Safe to call from any thread.

    Args:
        mean: One number, or one per channel.
        std: One number, or one per channel; above 0.
        scale: What ``mean`` and ``std`` of integers refer to. ``"stored"``: to the stored values; nothing is divided
            first. ``"type"``: to values from 0 to 1; integers are first divided by the largest value of their type, so
            that ``mean=0.5, std=0.5`` maps bytes to the range from −1 to 1: 2 (x / 255 − 0.5). None: ``"stored"``, but
            an error if the field holds integers and every mean is from 0 to 1. Floats are never divided.
        fields: Keys of a dict batch, or indices into a tuple batch. None: its first field.
        dtype: As in `ToFloat`.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> Normalize(256, 128)((torch.tensor([128, 256, 320], dtype=torch.int16), 1))[0].tolist()
        [-1.0, 0.0, 0.5]
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
        >>> Normalize(0.5, 0.5, scale="type")((images, 1))[0].flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        *,
        scale: Literal["stored", "type"] | None = None,
        fields: Fields | None = None,
        dtype: str = "float32",
    ) -> None:
        self.mean, self.std = _checked_numbers("mean", mean), _checked_numbers("std", std)
        if len({len(self.mean), len(self.std)} - {1}) > 1:
            raise ConfigError(
                f"std: {len(self.std)} for {len(self.mean)} channels of mean; give one number, or one for each channel"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"std: {std!r} is not above 0")
        if scale not in ("stored", "type", None):
            raise ConfigError(f"scale: {scale!r} is not one of stored, type")
        self.scale = scale
        self._float = ToFloat(fields, dtype=dtype)
        self._constants_by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        mean, std = (each[0] if len(each) == 1 else each for each in (self.mean, self.std))
        fields, dtype = self.fields and list(self.fields), _name(self._float.dtype)
        return f"Normalize(mean={mean}, std={std}, scale={self.scale!r}, fields={fields}, dtype={dtype!r})"

    @property
    def fields(self) -> tuple[str | int, ...] | None:
        """The fields to normalise; None for the first."""
        return self._float.fields

    def __call__(self, batch: Any) -> Any:
        """Returns a new dict or tuple with these fields normalised. Tensors keep their memory format.

        Args:
            batch: A dict or a tuple; its fields of shape (N, C, …), or of any shape if mean and std are one number.

        Raises:
            ConfigError: The batch lacks a field, a field has another number of channels, or it holds integers and
                ``scale`` must be given.
        """
        return _with_replaced(batch, self.fields, self._normalize)

    def _normalize(self, values: Tensor) -> Tensor:
        channels = max(len(self.mean), len(self.std))
        if channels > 1 and (values.ndim < 2 or values.shape[1] != channels):
            there = f"{values.shape[1]} on axis 1" if values.ndim > 1 else "no axis 1"
            letters = {3: '"NWC", or "NC" for windows of rows', 4: '"NHWC"', 5: '"NDHWC"'}
            layout = f'layout={{"x": {letters[values.ndim]}}}' if values.ndim in letters else "layout"
            raise ConfigError(
                f"mean, std: {channels} channels, but a batch of the field has {there}: its shape is "
                f"{tuple(values.shape)}; give one number, or one for each channel. If another axis holds the "
                f"channels, name the axes with the source's {layout}"
            )
        if self.scale is None and largest(values) > 1 and min(self.mean) >= 0 and max(self.mean) <= 1:
            raise ConfigError(
                f'scale: means from 0 to 1, but the field holds {values.dtype}: write scale="type" to divide '
                f'them by {largest(values)} first, or scale="stored" if mean and std are those of the stored values'
            )
        # x · (1 / (largest · std)) − mean / std: two passes over the pixels.
        scale, shift = self._constants(values.device)
        if channels > 1:
            scale, shift = (each.reshape(-1, *[1] * (values.ndim - 2)) for each in (scale, shift))
        if self.scale == "type":
            scale = scale / largest(values)
        result: Tensor = values.to(_compute_dtype(self._float.dtype, values)) * scale - shift
        return result.to(self._float.dtype)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """1 / std and mean / std of each channel, on a device."""
        if device not in self._constants_by_device:
            mean, std = torch.broadcast_tensors(  # type: ignore[no-untyped-call]  # torch has no types for it
                *(torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
            )
            # The copies are complete when `to` returns, so other streams may use them too.
            scale, shift = (
                each.to(torch.float32 if self._float.dtype != torch.float64 else torch.float64).to(device)
                for each in (1 / std, mean / std)
            )
            self._constants_by_device[device] = scale, shift
        return self._constants_by_device[device]


def _name(dtype: torch.dtype) -> str:
    return next(name for name, each in _TYPES.items() if each == dtype)


def _compute_dtype(dtype: torch.dtype, values: Tensor) -> torch.dtype:
    """The type to compute in: half precision has no numbers above 65504, and only some integers above 2048."""
    return (
        dtype if dtype.itemsize > 2 else torch.promote_types(torch.float32, dtype) if largest(values) > 255 else dtype
    )


def largest(values: Tensor) -> int:
    """The value that becomes 1.0: the largest integer of the type; 1 for floats and bools."""
    return 1 if values.is_floating_point() or values.dtype == torch.bool else torch.iinfo(values.dtype).max


def _with_replaced(batch: Any, fields: Sequence[str | int] | None, convert: Callable[[Tensor], Tensor]) -> Any:
    values: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    for field in fields if fields is not None else list(values)[:1]:
        if field not in values:
            raise ConfigError(f"fields: {field!r} is not in the batch; choose from {', '.join(map(repr, values))}")
        values[field] = convert(values[field])
    return values if isinstance(batch, Mapping) else tuple(values.values())


def _checked_fields(fields: Any) -> tuple[str | int, ...] | None:
    if fields is None:
        return None
    listed = tuple(fields) if isinstance(fields, Sequence) and not isinstance(fields, str) else (fields,)
    if not listed or not all(isinstance(field, str | int) and not isinstance(field, bool) for field in listed):
        raise ConfigError(f"fields: {fields!r} is neither a key, nor an index, nor a list of these")
    return listed


def _checked_numbers(name: str, values: Any) -> tuple[float, ...]:
    listed: tuple[Any, ...] = (
        tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
    )
    real = all(isinstance(each, numbers.Real) and not isinstance(each, bool) for each in listed)
    if not listed or not real or not all(map(math.isfinite, listed)):
        raise ConfigError(f"{name}: {values!r} is neither a finite number nor a list of one for each channel")
    return tuple(map(float, listed))
