"""Calls of transforms: checks a given transform, calls it, and raises errors that name it.

`failure` puts the names of the samples in place of ``{}`` in the message of an `UnfitError` raised here.
Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, TransformError, few
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import KeyedSamples
from lit_async_data.sources.contract.checks import UnfitError, as_array
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.user_code import READING, seed_generators

# The end of the error where a host hook changes the length of a sample of a concatenated field.
FIXED = "with ragged='concat' only device_transform may change a length"


def failure(where: str, source: Source, samples: Indices, what: str) -> TransformError:
    """An error of these samples, whose names take the place of ``{}`` in ``what``."""
    ids = source.ids(samples)
    place = source.locate(ids[:1])[0]
    first = f"row {place.row} of {place.file}"
    several = f"the batch of samples {few(ids.tolist())} (the first is {first})"
    return TransformError(
        f"{where}: {what.replace('{}', several if len(ids) > 1 else f'sample {ids[0]} ({first})', 1)}",
        file=place.file,
        row=place.row,
        sample_id=int(ids[0]),
        stage="transform",
    )


def other_keys(made: Mapping[str, object], wanted: Iterable[str]) -> str:
    listed = [", ".join(map(str, keys)) or "none" for keys in (made, wanted)]
    return (
        f"returned the keys {listed[0]} for {{}}, but {listed[1]} for the first sample; return the same keys for every "
        "sample"
    )


def fitting(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The array, if it has the shape and dtype of the first sample."""
    array = named_array(key, value)
    if array.shape != shape:
        raise UnfitError(
            f"field {key!r} of {{}} has shape {array.shape}, but {shape} for the first sample; return one shape for "
            "all samples: resize, crop or pad"
        )
    if array.dtype.newbyteorder("=") != dtype:
        raise UnfitError(
            f"field {key!r} of {{}} has dtype {array.dtype}, but {dtype} for the first sample; return one dtype for "
            f"all samples, as .astype({dtype.name!r}) gives it"
        )
    return array


def fitting_rows(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array = with_rows(key, value, shape[0])
    fitting(key, array[0], shape[1:], dtype)
    return array


def with_rows(key: object, value: object, count: int) -> Array:
    array = named_array(key, value)
    if array.shape[:1] != (count,):
        raise UnfitError(
            f"field {key!r} of {{}} has shape {array.shape}, but the first axis must have one row for each of the "
            f"{count} samples; leave out arrays without a row for each sample"
        )
    return array


def named_array(key: object, value: object) -> Array:
    if not isinstance(key, str):
        raise UnfitError(f"the key {key!r} in the result for {{}} is not text; name each field by text")
    try:
        return as_array(value)
    except UnfitError as error:
        raise UnfitError(f"field {key!r} of {{}} is {error}") from None


# The user's function: takes a sample or a batch, and perhaps a random generator; returns it transformed.
Function = Callable[..., Any]
# The name of the parameter that gets a random generator.
RNG = "rng"
# Libraries whose transforms take no dict of arrays, and advice: a function that calls such a transform.
LIBRARIES = {
    "torchvision.transforms": "torchvision takes tensors, and leaves arrays as they are; give it in a function: "
    'def transformed({of}): return {{**{of}, "x": transform(torch.from_numpy({of}["x"]))}}',
    "albumentations.": "Albumentations takes an image by its name, channels last; give it in a function: "
    'def transformed({of}): return {{**{of}, "x": transform(image={of}["x"].transpose(1, 2, 0))'
    '["image"].transpose(2, 0, 1)}}',
}


class StageTransform:
    """A transform of a stage. Errors name ``where``, such as ``"device_transform.eval, stage val"``.

    ``seen`` gets the evaluation batch that has shown whether a training transform draws; None for other transforms.
    """

    def __init__(self, function: Function, where: str, seen: list[Any] | None = None) -> None:
        self.function, self.where, self.seen = function, where, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Hook:
    """A function of the user, which takes a value, and a random generator as ``rng`` or second required parameter.

    Errors name ``where``, or the ``where`` of a `StageTransform`.
    """

    def __init__(self, function: Function, where: str) -> None:
        self.where, self.seen = where, None
        if isinstance(function, StageTransform):
            self.where, self.seen, function = function.where, function.seen, function.function
        self.function = function
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
    if isinstance(given, type):
        raise ConfigError(
            f"{given.__name__} is a class, and a transform is called with {called_with}; write {given.__name__}(…)",
            where,
        )
    if not (given is None or callable(given)):
        raise ConfigError(f"{given!r} cannot be called with {called_with}", where)
    first, hook = type(first_called(given)), where.partition("_")[0]
    for library, what in LIBRARIES.items() if hook in ("sample", "batch") else ():
        if first.__module__.startswith(library):
            raise ConfigError(f"{first.__name__} of {what.format(of=hook)} (docs/data/transforms.md)", where)


def first_called(function: Any) -> Any:
    inner: Any = None
    module = type(function).__module__
    if isinstance(function, functools.partial):
        inner = function.func
    elif module == "torch.nn.modules.container":
        inner = next(iter(function), None)
    elif module.startswith("torchvision.transforms"):
        inner = getattr(function, "lambd", None) or next(iter(getattr(function, "transforms", ())), None)
    return function if inner is None else first_called(inner)


def is_module(value: object) -> bool:
    """Whether this is a module of torch; imports no torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _rng_parameter(function: Function) -> str | None:
    """``"rng"`` for a parameter of this name, ``""`` for the second parameter, None for a function that takes none."""
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


# Separate the keys of host hooks from the keys of sources, 1 and 2 in `sample_reader.py`.
SAMPLE_HOOK_KEYS, BATCH_HOOK_KEYS = 3, 4

# The key of sample numbers in a batch.
INDEX = "index"

Made = Mapping[str, Any]


class KeyedGenerator:
    """A generator that begins anew with each key. One thread at a time.

    Setting counter and key of a Philox costs 2 µs; building a generator costs 10 to 20. See docs/design/hooks.md.
    """

    def __init__(self) -> None:
        # The type is numpy's own, whose stubs do not know that a key is enough.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._key = [0, 0]
        # Lists: numpy reads them faster than arrays of four.
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": [0, 0, 0, 0], "key": self._key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def __reduce__(self) -> Any:
        return KeyedGenerator, ()

    def at(self, key: int) -> np.random.Generator:
        """The generator in the state of ``Philox(key=key)``; the key has 64 bits."""
        self._key[0] = key
        self._bits.state = self._state
        return self._generator


class HookCalls:
    """Calls the host hooks. One thread at a time.

    Without a ``seed`` they get None in place of a generator. ``indexed``: each value has the sample numbers under the
    key ``index``, which the hook need not return.
    """

    def __init__(
        self, source: Source, sample: Hook | None, batch: Hook | None, seed: int | None, *, indexed: bool = False
    ) -> None:
        self.source, self.sample, self.batch, self._seed, self._indexed = source, sample, batch, seed, indexed
        self._generator = KeyedGenerator()

    def _with_index(self, samples: Indices, values: Mapping[str, Array]) -> dict[str, Array]:
        return {**values, INDEX: self.source.ids(samples)} if self._indexed else dict(values)

    def _called(self, hook: Hook, samples: Indices, value: dict[str, Any], rng: Any) -> Made:
        given = value.get(INDEX)
        try:
            made = hook(value, rng)
        except Exception as error:
            hint = "; return_indices=True gives it" if isinstance(error, KeyError) and error.args == (INDEX,) else ""
            what = f"failed on {{}}: {type(error).__name__}: {error}{hint}"
            raise failure(hook.where, self.source, samples, what) from error
        if made is None:
            made = value
        if made.__class__ is not dict and not isinstance(made, Mapping):
            what = "return a dict with an array for each key, or None if the one that was given has been changed"
            raise failure(hook.where, self.source, samples, f"returned a {type(made).__name__} for {{}}; {what}")
        if not self._indexed or INDEX not in made:
            return made
        if given is None or not np.array_equal(made[INDEX], given):
            what = "which return_indices fills with sample numbers; return it under another key"
            raise failure(hook.where, self.source, samples, f"returned another {INDEX!r} for {{}}, {what}")
        return {key: each for key, each in made.items() if key != INDEX}

    def of_samples(self, keyed: KeyedSamples, values: Mapping[str, Array]) -> Iterator[Made]:
        """``sample_transform`` of each sample; it may write to ``values``, of shape (n, …)."""
        hook, samples, keys, seeds = self.sample, keyed.samples, None, None
        assert hook is not None
        if hook.draws and self._seed is not None:
            epoch_key = derived_key(self._seed, keyed.epoch, SAMPLE_HOOK_KEYS)
            keys = derived_keys(epoch_key, keyed.keys(self.source.ids)).tolist()
        if READING.key is not None:
            seeds = READING.keys(SAMPLE_HOOK_KEYS, keyed.keys(self.source.ids))
        values = self._with_index(samples, values)
        for place in range(len(samples)):
            sample = {key: array[place, ...] for key, array in values.items()}
            if seeds is not None:
                seed_generators(seeds[place])
            rng = None if keys is None else self._generator.at(keys[place])
            yield self._called(hook, samples[place : place + 1], sample, rng)

    def of_batch(self, keyed: KeyedSamples, values: dict[str, Array]) -> Made:
        hook, samples = self.batch, keyed.samples
        assert hook is not None
        rng, first = None, int(keyed[:1].keys(self.source.ids)[0])
        if READING.key is not None:
            seed_generators(*READING.keys(BATCH_HOOK_KEYS, np.array([first])))
        if hook.draws and self._seed is not None:
            rng = self._generator.at(derived_key(self._seed, keyed.epoch, BATCH_HOOK_KEYS, first))
        return self._called(hook, samples, self._with_index(samples, values), rng)
