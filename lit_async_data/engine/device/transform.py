"""`DeviceTransform`: calls the user's function with each batch on its device, and with a random generator."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.engine.device.feeds import Batch
from lit_async_data.engine.hooks.calls import Function, Hook, first_called, is_module
from lit_async_data.errors import AsyncDataError, ConfigError, TransformError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.user_code import drawn, states

log = logging.getLogger(__name__)

# Transforms a batch on its device.
Transform = Callable[[Batch, BatchIndex], Batch]


class DeviceTransform:
    """Calls the user's function with each batch, without gradients, and with a random generator if it takes one.

    The number of a batch alone seeds its generator. So draws are the same after a resume, with any workers and depth,
    and with or without a callback. The first batch of evaluation shows whether a transform of all stages draws from
    global generators, which would make results vary.

    Args:
        function: As a `Hook`. An ``nn.Module`` is moved to the device, once. None to cast only.
        number: The seed of a batch's generator. None: a function that takes a generator gets None.
        cast: Called with the batch before the function.
    """

    def __init__(
        self,
        function: Function | None,
        device: torch.device,
        *,
        number: Callable[[BatchIndex], int] | None = None,
        cast: Callable[[Any], Any] | None = None,
    ) -> None:
        self._hook = None if function is None else Hook(function, "device_transform")
        #: The name in errors.
        self.where = "device_transform" if self._hook is None else self._hook.where
        if self._hook is not None and is_module(self._hook.function):
            self._hook.function = self._hook.function.to(device)  # type: ignore[attr-defined]  # a module has it
        called = type(first_called(self._hook and self._hook.function))
        self._unchecked = called.__name__ if called.__module__.startswith("torchvision.transforms.v2") else ""
        self._device = device
        self._number = number
        self._cast = cast

    def __call__(self, batch: Batch, key: BatchIndex) -> Batch:
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = self._transformed(batch, key)
        except AsyncDataError:
            raise
        except torch.OutOfMemoryError as error:  # unchanged: Lightning finds the largest batch size by it
            error.add_note(f"{self.where}: no memory for batch {key.step} of epoch {key.epoch}")
            raise
        except Exception as error:
            raise TransformError(
                f"{self.where}: failed on batch {key.step} of epoch {key.epoch}: {type(error).__name__}: {error}",
                stage="transform",
            ) from error
        if (made is None and batch is not None) or inspect.iscoroutine(made) or inspect.isgenerator(made):
            # Lightning skips a batch that is None without a word: nothing would be trained.
            what = "None" if made is None else f"a {type(made).__name__}"
            raise TransformError(
                f"{self.where}: returned {what} for batch {key.step} of epoch {key.epoch}; return the batch "
                "to hand out",
                stage="transform",
            )
        return made

    def _transformed(self, batch: Batch, key: BatchIndex) -> Batch:
        if self._cast is not None:
            batch = self._cast(batch)
        hook = self._hook
        if hook is None:
            return batch
        if self._unchecked:
            self._check_images(batch)
        rng = None
        if hook.draws and self._number is not None:
            rng = torch.Generator(self._device).manual_seed(self._number(key))
        if hook.seen is None or hook.seen:
            return hook(batch, rng)
        before = states(self._device)
        made = hook(batch, rng)
        hook.seen.append(key)
        if found := drawn(before, states(self._device)):
            log.warning(
                "device_transform drew random numbers from %s on an evaluation batch, so results change from run to "
                'run; give evaluation its own transform, as in device_transform={"train": …, "eval": None}, or take '
                "the random numbers from a parameter rng, which is None in evaluation",
                " and ".join(found),
            )
        return made

    def _check_images(self, batch: Any) -> None:
        """Refuse a transform of torchvision's v2, which takes only the first plain tensor, if others are images."""
        values = dict(
            batch if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else ())
        )
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        first, images = [*tensors][:1], [key for key, value in tensors.items() if value.ndim > 2]
        if images not in ([], first) and all(type(value) is torch.Tensor for value in tensors.values()):
            what = f"{self._unchecked} of torchvision transforms the first tensor alone, {first[0]!r}; images are "
            ways = 'transform one field, {**batch, "x": transform(batch["x"])}, or tv_tensors (docs/data/transforms.md)'
            raise ConfigError(f"{what}{', '.join(map(repr, images))}; {ways}", self.where)
        self._unchecked = ""


def widened(spec: BatchSpec) -> Callable[[Any], Any] | None:
    """Casts fields that travel to the device in a narrower type to the type of the batch; None without such fields."""
    types = {
        key: torch.from_numpy(np.empty(0, field.dtype)).dtype
        for key, field in spec.fields.items()
        if field.narrow is not None
    }
    if not types:
        return None

    def cast(batch: Any) -> Any:
        values = batch if spec.as_mapping else dict(zip(spec.fields, batch, strict=True))
        return spec.packed({key: value.to(types.get(key, value.dtype)) for key, value in values.items()})

    return cast
