"""`Hook`: a function of the user, how it takes random numbers, and what errors call it.

The three hooks, ``sample_transform``, ``batch_transform`` and ``device_transform``, are functions under these rules.
Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lit_async_data.errors import ConfigError

# The user's function: takes a sample or a batch, or this and random numbers; returns it transformed.
Function = Callable[..., Any]
# The name of the parameter that gets random numbers.
RNG = "rng"
# Libraries whose transforms take no dict of arrays, and a function that calls one.
LIBRARIES = {
    "torchvision.transforms": "torchvision takes tensors, and leaves arrays as they are; give it in a function: "
    'def transformed({of}): return {{**{of}, "x": transform(torch.from_numpy({of}["x"]))}}',
    "albumentations.": "Albumentations takes an image by its name, channels last; give it in a function: "
    'def transformed({of}): return {{**{of}, "x": transform(image={of}["x"].transpose(1, 2, 0))'
    '["image"].transpose(2, 0, 1)}}',
}


class EvaluatedAlike:
    """A training transform that evaluation uses too, because the user gave evaluation none."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.watched = False  # whether one evaluation batch has shown if it draws random numbers

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


class StageTransform:
    """The transform of one stage; errors name ``where``, such as ``"device_transform.eval, stage val"``."""

    def __init__(self, function: Function, where: str) -> None:
        self.function = function
        self.where = where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Hook:
    """A function of the user.

    Args:
        function: Takes one value, or a value and random numbers: as a parameter ``rng``, or as a second required
            parameter. May be a `StageTransform`.
        where: What errors name, unless it is a `StageTransform`, which has a name.
    """

    def __init__(self, function: Function, where: str) -> None:
        self.where = where
        self.alike: EvaluatedAlike | None = None
        while isinstance(function, StageTransform | EvaluatedAlike):
            if isinstance(function, StageTransform):
                self.where = function.where
            else:
                self.alike = function
            function = function.function
        self.function = function  # the user's itself
        self._parameter = _rng_parameter(function)

    @property
    def draws(self) -> bool:
        return self._parameter is not None

    def __call__(self, value: Any, rng: Any) -> Any:
        if self._parameter is None:
            return self.function(value)
        return self.function(value, **{RNG: rng}) if self._parameter == RNG else self.function(value, rng)


def takes_rng(function: Function | None) -> bool:
    return function is not None and Hook(function, "").draws


def check_callable(where: str, given: object, called_with: str = "a batch") -> None:
    """Refuse what is not a transform; the message begins with ``where``."""
    if isinstance(given, type):
        raise ConfigError(
            f"{given.__name__} is a class, and a transform is called with {called_with}; write {given.__name__}(…)",
            where,
        )
    if not (given is None or callable(given)):
        raise ConfigError(f"{given!r} cannot be called with {called_with}", where)
    first, hook = type(_first_called(given)), where.partition("_")[0]
    for library, what in LIBRARIES.items() if hook in ("sample", "batch") else ():
        if first.__module__.startswith(library):
            raise ConfigError(f"{first.__name__} of {what.format(of=hook)} (docs/data/transforms.md)", where)


def _first_called(function: Any) -> Any:
    """What a transform calls first, as far as that can be seen from outside."""
    inner: Any = None
    module = type(function).__module__
    if isinstance(function, functools.partial):
        inner = function.func
    elif module == "torch.nn.modules.container":
        inner = next(iter(function), None)
    elif module.startswith("torchvision.transforms"):
        inner = getattr(function, "lambd", None) or next(iter(getattr(function, "transforms", ())), None)
    return function if inner is None else _first_called(inner)


def is_module(value: object) -> bool:
    """Whether this is a module of torch; imports no torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _rng_parameter(function: Function) -> str | None:
    """How a function takes random numbers: ``"rng"`` by this name, ``""`` as second argument, None not at all."""
    called: Any = function.forward if is_module(function) else function  # type: ignore[attr-defined]  # a module has it
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = any(
        each.name == RNG and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        for each in parameters
        if each not in by_place[:1]
    )
    if named:
        fixed = isinstance(called, functools.partial) and RNG in called.keywords
        return None if fixed else RNG
    return "" if len(by_place) > 1 and by_place[1].default is inspect.Parameter.empty else None
