"""`DeviceTransform`: what is done with a batch on its device, and what is drawn at random for it.

A transform that was given once for all stages may draw at random by itself, in evaluation too, where results should be
the same each time. `EvaluatedAlike` marks it, and the first batch that it changes in evaluation shows whether it draws.
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
from lit_async_data.device.randomness import drawn, states
from lit_async_data.errors import ConfigError
from lit_async_data.order.plan import BatchIndex

log = logging.getLogger(__name__)

# The name of the argument that gets what is drawn.
RNG = "rng"


class EvaluatedAlike:
    """A transform of training that evaluation uses too, because nobody gave evaluation one of its own.

    Args:
        function: The transform.

    Attributes:
        watched: Whether a batch of evaluation has shown whether it draws: one is enough.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.watched = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the transform returns."""
        return self.function(*given, **named)


class StageTransform:
    """The transform of one stage, whose errors name the option and the stage.

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
    """Calls a function of the user's with each batch, and with a generator of random numbers if it takes one.

    The generator is made anew for each batch, on its device, from the batch's own number alone: so what is drawn is the
    same after a resume, with any workers and depth, with and without a callback.

    Args:
        function: Takes a batch, or a batch and a ``torch.Generator``: as a parameter ``rng``, or as a second one that
            must be given. An ``nn.Module`` is moved to the device, once. None to cast only.
        device: Where batches lie.
        number: The number that a batch's generator begins with; None where nothing is to be drawn, and a function that
            takes a generator gets None.
        cast: Called with the batch before.

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
        function: Callable[..., Any] | None,
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
        self._passed = None if function is None else _passed(function)
        self._alike = alike

    def __call__(self, batch: Any, key: BatchIndex) -> Any:
        """What becomes of a batch."""
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
                "device_transform drew random numbers from %s on a batch of evaluation, so results change from run to "
                'run; give evaluation a transform of its own, as in device_transform={"train": …, "eval": None}, or '
                "take the random numbers from a parameter rng, which is None in evaluation",
                " and ".join(found),
            )
        return made

    def _called(self, function: Callable[..., Any], batch: Any, key: BatchIndex) -> Any:
        if self._passed is None:
            return function(batch)
        rng = None if self._number is None else torch.Generator(self._device).manual_seed(self._number(key))
        return function(batch, **{RNG: rng}) if self._passed == RNG else function(batch, rng)


def check_callable(where: str, given: object) -> None:
    """Refuse what is no transform; the message begins with ``where``.

    Raises:
        ConfigError: It is none, or a class: called with a batch, that would make an object of it.
    """
    if isinstance(given, type):
        raise ConfigError(
            f"{where}: {given.__name__} is a class, and a transform is called with a batch; build one: "
            f"{given.__name__}(…)"
        )
    if not (given is None or callable(given)):
        raise ConfigError(f"{where}: {given!r} cannot be called with a batch")


def takes_rng(function: Callable[..., Any] | None) -> bool:
    """Whether a transform is one that is given random numbers."""
    itself = _itself(function)
    return itself is not None and _passed(itself) is not None


def _itself(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    while isinstance(function, StageTransform | EvaluatedAlike):
        function = function.function
    return function


def _passed(function: Callable[..., Any]) -> str | None:
    """How a generator is passed: ``"rng"`` by this name, ``""`` as the second argument, None not at all."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # of functions that are not written in Python, not all say
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
    """A cast of fields that travel to the device in fewer bytes than they are delivered in; None if there are none.

    Args:
        spec: What batches look like when they are handed out.
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
