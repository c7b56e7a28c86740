"""`DeviceTransform`: calls the user's function with each batch on its device, and with random numbers for it.

A transform that the user gave once for all stages may draw random numbers by itself, also in evaluation, whose results
should not change from run to run. `EvaluatedAlike` marks such a transform; its first evaluation batch shows whether it
draws.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.device.feed import Batch
from lit_async_data.device.randomness import drawn, states
from lit_async_data.errors import AsyncDataError, ConfigError, TransformError
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)

# The user's function: takes a batch, or a batch and random numbers; returns a batch.
BatchFunction = Callable[..., Batch]
# What a queue calls with each batch.
Transform = Callable[[Batch, BatchIndex], Batch]
# The name of the parameter that gets random numbers.
RNG = "rng"


class EvaluatedAlike:
    """A training transform that evaluation uses too, because the user gave evaluation none.

    Args:
        function: The transform.

    Attributes:
        watched: Whether one evaluation batch has shown if it draws random numbers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.watched = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


class StageTransform:
    """The transform of one stage; its errors name the option and the stage.

    Args:
        function: The transform, or an `EvaluatedAlike` of it.
        where: What errors name, such as ``"device_transform.eval, stage val"``.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function = function
        self.where = where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the transform returns."""
        return self.function(*args, **kwargs)


class DeviceTransform:
    """Calls the user's function with each batch, without gradients, and with a random generator if it takes one.

    Each batch gets a new generator, seeded by the batch's own number alone. So the random numbers are the same after a
    resume, with any workers and depth, and with or without a callback.

    Args:
        function: Takes a batch, or a batch and a ``torch.Generator``: as a parameter ``rng``, or as a second required
            parameter. An ``nn.Module`` is moved to the device, once. None to cast only.
        device: Where batches lie.
        number: The seed of a batch's generator. None: a function that takes a generator gets None.
        cast: Called with the batch before the function.

    Example:
        >>> def noisy(batch, rng):
        ...     return batch if rng is None else batch + torch.rand(len(batch), generator=rng)
        >>> transform = DeviceTransform(noisy, torch.device("cpu"), number=lambda key: key.step)
        >>> one, again, other = (transform(torch.zeros(2), BatchIndex(0, step)) for step in (3, 3, 4))
        >>> torch.equal(one, again), torch.equal(one, other)
        (True, False)
    """

    def __init__(
        self,
        function: BatchFunction | None,
        device: torch.device,
        *,
        number: Callable[[BatchIndex], int] | None = None,
        cast: Callable[[Any], Any] | None = None,
    ) -> None:
        #: What errors name.
        self.where = "device_transform"
        if isinstance(function, StageTransform):
            self.where = function.where
            function = function.function
        alike = function if isinstance(function, EvaluatedAlike) else None
        function = _itself(function)
        if isinstance(function, torch.nn.Module):
            function = function.to(device)
        self._function = function
        self._device = device
        self._number = number
        self._cast = cast
        self._parameter = None if function is None else _rng_parameter(function)
        self._alike = alike

    def __call__(self, batch: Batch, key: BatchIndex) -> Batch:
        """Transform a batch.

        Raises:
            TransformError: The function failed, or returned something that is not a batch. Errors of this package are
                passed on.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = self._transformed(batch, key)
        except AsyncDataError:
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
        if self._function is None:
            return batch
        if self._alike is None or self._alike.watched:
            return self._called(self._function, batch, key)
        before = states(self._device)
        made = self._called(self._function, batch, key)
        self._alike.watched = True
        if found := drawn(before, states(self._device)):
            log.warning(
                "device_transform drew random numbers from %s on an evaluation batch, so results change from run to "
                'run; give evaluation its own transform, as in device_transform={"train": …, "eval": None}, or take '
                "the random numbers from a parameter rng, which is None in evaluation",
                " and ".join(found),
            )
        return made

    def _called(self, function: BatchFunction, batch: Batch, key: BatchIndex) -> Batch:
        if self._parameter is None:
            return function(batch)
        rng = None if self._number is None else torch.Generator(self._device).manual_seed(self._number(key))
        return function(batch, **{RNG: rng}) if self._parameter == RNG else function(batch, rng)


def check_callable(where: str, given: object) -> None:
    """Refuse what is not a transform; the message begins with ``where``.

    Raises:
        ConfigError: It cannot be called, or it is a class, which a batch would make an object of.
    """
    if isinstance(given, type):
        raise ConfigError(
            f"{where}: {given.__name__} is a class, and a transform is called with a batch; write {given.__name__}(…)"
        )
    if not (given is None or callable(given)):
        raise ConfigError(f"{where}: {given!r} cannot be called with a batch")


def takes_rng(function: BatchFunction | None) -> bool:
    """Whether a transform takes random numbers."""
    itself = _itself(function)
    return itself is not None and _rng_parameter(itself) is not None


def _itself(function: BatchFunction | None) -> Callable[..., Any] | None:
    while isinstance(function, StageTransform | EvaluatedAlike):
        function = function.function
    return function


def _rng_parameter(function: BatchFunction) -> str | None:
    """How a function takes a generator: ``"rng"`` by this name, ``""`` as second argument, None not at all."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = any(
        each.name == RNG and each.kind != each.POSITIONAL_ONLY for each in parameters if each not in by_place[:1]
    )
    if named:
        fixed = isinstance(called, functools.partial) and RNG in called.keywords
        return None if fixed else RNG
    return "" if len(by_place) > 1 and by_place[1].default is inspect.Parameter.empty else None


def widened(spec: BatchSpec) -> Callable[[Any], Any] | None:
    """Casts fields that travel to the device in a narrower type than they are delivered in; None if there are none.

    Args:
        spec: The fields of batches as they are handed out.
    """
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
