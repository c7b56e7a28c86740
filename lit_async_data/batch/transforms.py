"""Transforms of a batch on its device: `ToFloat`, `Normalize`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_async_data.errors import ConfigError

Fields = str | int | Sequence[str | int]
_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class ToFloat:
    """Makes fields of a batch floats: whole numbers as shares of the largest of their type, others as they are.

    A ``device_transform``: images travel as bytes, and become four times as large on the device. Immutable; safe to
    call from any thread.

    Args:
        fields: Keys of a batch that is a dict, or places in one that is a tuple. None: its first field.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.

    Raises:
        ConfigError: ``fields`` or ``dtype`` is wrong.

    Example:
        >>> ToFloat("x")({"x": torch.tensor([[0, 51, 255]], dtype=torch.uint8), "y": 1})["x"]
        tensor([[0.0000, 0.2000, 1.0000]])
    """

    def __init__(self, fields: Fields | None = None, *, dtype: str = "float32") -> None:
        self.fields = _fields(fields)
        if dtype not in _TYPES:
            raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(_TYPES)}")
        self.dtype = _TYPES[dtype]

    def __repr__(self) -> str:
        return f"ToFloat({None if self.fields is None else list(self.fields)}, dtype={_name(self.dtype)!r})"

    def __call__(self, batch: Any) -> Any:
        """The batch with these fields changed: a new dict or tuple; tensors keep their memory format.

        Args:
            batch: A dict or a tuple of tensors of any shape.

        Raises:
            ConfigError: It has no such field.
        """
        return _replaced(batch, self.fields, self._changed)

    def _changed(self, values: Tensor) -> Tensor:
        return (values.to(_wide(self.dtype, values)) / largest(values)).to(self.dtype)


class Normalize:
    """Makes fields of images floats, and subtracts a mean and divides by a deviation, for each channel.

    Whole numbers are taken as shares of the largest of their type, so that ``mean=0.5, std=0.5`` makes −1 to 1 of
    bytes: 2 (x / 255 − 0.5). A ``device_transform``. Safe to call from any thread.

    Args:
        mean: One number, or one for each channel, of values from 0 to 1.
        std: Likewise; above 0.
        fields: Keys of a batch that is a dict, or places in one that is a tuple. None: its first field.
        dtype: As in `ToFloat`.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
        >>> Normalize(0.5, 0.5)((images, 1))[0].flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        *,
        fields: Fields | None = None,
        dtype: str = "float32",
    ) -> None:
        self.mean, self.std = _numbers("mean", mean), _numbers("std", std)
        if len({len(self.mean), len(self.std)} - {1}) > 1:
            raise ConfigError(f"std: {len(self.std)} for {len(self.mean)} channels of mean")
        if min(self.std) <= 0:
            raise ConfigError(f"std: {std!r} is not above 0")
        self._float = ToFloat(fields, dtype=dtype)
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        mean, std = (each[0] if len(each) == 1 else each for each in (self.mean, self.std))
        fields = None if self.fields is None else list(self.fields)
        return f"Normalize(mean={mean}, std={std}, fields={fields}, dtype={_name(self._float.dtype)!r})"

    @property
    def fields(self) -> tuple[str | int, ...] | None:
        """Those that are normalised; None for the first."""
        return self._float.fields

    def __call__(self, batch: Any) -> Any:
        """The batch with these fields normalised: a new dict or tuple; tensors keep their memory format.

        Args:
            batch: A dict or a tuple; its fields of shape (N, C, …), or of any shape where mean and std are one number.

        Raises:
            ConfigError: It has no such field, or that has another number of channels.
        """
        return _replaced(batch, self.fields, self._changed)

    def _changed(self, values: Tensor) -> Tensor:
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
        # x · (1 / (largest · std)) − mean / std: two passes over the pixels.
        scale, shift = self._constants(values.device)
        if channels > 1:
            scale, shift = (each.reshape(-1, *[1] * (values.ndim - 2)) for each in (scale, shift))
        found: Tensor = values.to(_wide(self._float.dtype, values)) * (scale / largest(values)) - shift
        return found.to(self._float.dtype)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """1 / std and mean / std of each channel, on a device."""
        if device not in self._made:
            mean, std = torch.broadcast_tensors(  # type: ignore[no-untyped-call]  # torch has no types for it
                *(torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
            )
            made = [
                each.to(torch.float32 if self._float.dtype != torch.float64 else torch.float64).to(device)
                for each in (1 / std, mean / std)
            ]
            # Copied before this returns, so that other streams may use them too.
            self._made[device] = made[0], made[1]
        return self._made[device]


def _name(dtype: torch.dtype) -> str:
    return next(name for name, each in _TYPES.items() if each == dtype)


def _wide(dtype: torch.dtype, values: Tensor) -> torch.dtype:
    """The type to compute in: half precision holds no number above 65504, and few whole ones above 2048."""
    return (
        dtype if dtype.itemsize > 2 else torch.promote_types(torch.float32, dtype) if largest(values) > 255 else dtype
    )


def largest(values: Tensor) -> int:
    """What counts as 1: the largest whole number of a type; 1 for floats and bools."""
    return 1 if values.is_floating_point() or values.dtype == torch.bool else torch.iinfo(values.dtype).max


def _replaced(batch: Any, fields: Sequence[str | int] | None, change: Any) -> Any:
    """A batch with some fields changed."""
    found: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    for field in fields if fields is not None else list(found)[:1]:
        if field not in found:
            raise ConfigError(f"fields: {field!r} is not in the batch; there are {', '.join(map(repr, found))}")
        found[field] = change(found[field])
    return found if isinstance(batch, Mapping) else tuple(found.values())


def _fields(given: Any) -> tuple[str | int, ...] | None:
    if given is None:
        return None
    listed = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not listed or not all(isinstance(field, str | int) and not isinstance(field, bool) for field in listed):
        raise ConfigError(f"fields: {given!r} is neither a key, nor a place, nor a list of these")
    return listed


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    listed: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    real = all(isinstance(each, numbers.Real) and not isinstance(each, bool) for each in listed)
    if not listed or not real or not all(map(math.isfinite, listed)):
        raise ConfigError(f"{name}: {given!r} is neither a number nor one for each channel")
    return tuple(map(float, listed))
