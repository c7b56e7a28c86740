"""The user's transforms of samples and batches on the host: checks them, calls them, and raises errors that name them.

`failure` puts the names of the samples in place of ``{}`` in the message of an `UnfitError` raised here.
Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from lit_async_data.batch.spec import Array, BatchLayout, BatchSpec, Bytes, FieldSpec, length_key
from lit_async_data.errors import ConfigError, TransformError, few
from lit_async_data.options import LoaderOptions
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import KeyedSamples
from lit_async_data.sources.contract.checks import UnfitError, as_array
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.contract.user_code import READING, put_back, seed_generators, values_in, why_not_pickled

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


def check_keys(made: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    if made.keys() != wanted.keys():
        others, first = (", ".join(map(str, keys)) or "none" for keys in (made, wanted))
        what = f"returned the keys {others} for {{}}, but {first} for the first sample"
        raise UnfitError(f"{what}; return the same keys for every sample")


def fitting(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The array, if it has the shape and dtype of the first sample."""
    array = named_array(key, value)
    if array.shape != shape:
        what = f"field {key!r} of {{}} has shape {array.shape}, but {shape} for the first sample"
        raise UnfitError(f"{what}; return one shape for all samples: resize, crop or pad")
    if array.dtype.newbyteorder("=") != dtype:
        what = f"field {key!r} of {{}} has dtype {array.dtype}, but {dtype} for the first sample"
        raise UnfitError(f"{what}; return one dtype for all samples, as .astype({dtype.name!r}) gives it")
    return array


def with_rows(key: object, value: object, count: int) -> Array:
    array = named_array(key, value)
    if array.shape[:1] != (count,):
        what = f"has shape {array.shape}, but the first axis must have one row for each of the {count} samples"
        raise UnfitError(f"field {key!r} of {{}} {what}; leave out arrays without a row for each sample")
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


def check_callable(where: str, given: object) -> None:
    hook = where.partition("_")[0]
    called_with = "a sample" if hook == "sample" else "a batch"
    if isinstance(given, type):
        what = f"{given.__name__} is a class, and a transform is called with {called_with}"
        raise ConfigError(f"{what}; write {given.__name__}(…)", where)
    if not (given is None or callable(given)):
        raise ConfigError(f"{given!r} cannot be called with {called_with}", where)
    first = type(first_called(given))
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
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    if RNG in named - {each.name for each in by_place[:1]}:
        fixed = isinstance(called, functools.partial) and RNG in called.keywords
        return None if fixed else RNG
    return "" if len(by_place) > 1 and by_place[1].default is inspect.Parameter.empty else None


# Separate the keys of host hooks from the keys of sources, 1 and 2 in `sample_reader.py`.
SAMPLE_HOOK_KEYS, BATCH_HOOK_KEYS = 3, 4

# The key of sample numbers in a batch.
INDEX = "index"

Made = Mapping[str, Any]


class KeyedGenerator:
    """A generator that begins anew with each key, in 2 µs: see docs/design/hooks.md. One thread at a time."""

    def __init__(self) -> None:
        # The type is numpy's own, whose stubs do not know that a key is enough.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._key = [0, 0]
        # Lists: numpy reads them faster than arrays of four.
        self._state: Any = {**self._bits.state, "state": {"counter": [0] * 4, "key": self._key}, "buffer": [0] * 4}

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

    def put_samples(
        self,
        keyed: KeyedSamples,
        values: Mapping[str, Array],
        out: Mapping[str, Array],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Put what `of_samples` makes into these rows of ``out``, or the first ones."""
        assert self.sample is not None
        targets = [(key, array, array.shape[1:], array.dtype) for key, array in out.items()]
        plain, places, keys = np.ndarray, range(len(keyed.samples)), out.keys()
        for place, row, made in zip(places, rows or places, self.of_samples(keyed, values), strict=True):
            try:
                if made.keys() != keys:
                    check_keys(made, out)
                for key, array, shape, dtype in targets:
                    value = made[key]
                    if value.__class__ is not plain or value.shape != shape or value.dtype != dtype:
                        value = fitting(key, value, shape, dtype)
                    array[row] = value
            except UnfitError as error:
                samples = keyed.samples[place : place + 1]
                raise failure(self.sample.where, self.source, samples, str(error)) from None

    def put_batch(self, keyed: KeyedSamples, values: dict[str, Array], out: Mapping[str, Array]) -> None:
        """Put what `of_batch` makes into ``out``."""
        assert self.batch is not None
        made = self.of_batch(keyed, values)
        try:
            check_keys(made, out)
            for key, array in out.items():
                rows = with_rows(key, made[key], array.shape[0])
                fitting(key, rows[0], array.shape[1:], array.dtype)
                array[...] = rows
        except UnfitError as error:
            raise failure(self.batch.where, self.source, keyed.samples, str(error)) from None


log = logging.getLogger(__name__)

# Samples of the batch with which the probe calls ``batch_transform``.
ROWS = 2
# Samples that the probe tries where bad ones are no errors.
TRIED = 16
Kinds = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]  # shape and dtype of each field


@dataclasses.dataclass(frozen=True)
class HostHooks:
    """The host hooks of a loader; false if there are none."""

    sample: Hook | None  # ``sample_transform``
    batch: Hook | None  # ``batch_transform``
    # Held by the thread that calls the hooks; a copy has another one.
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return type(self), (self.sample, self.batch)

    @classmethod
    def of(cls, sample_transform: Function | None, batch_transform: Function | None) -> Self:
        given = {"sample_transform": sample_transform, "batch_transform": batch_transform}
        for name, function in given.items():
            check_callable(name, function)
        return cls(*(None if function is None else Hook(function, name) for name, function in given.items()))

    def __bool__(self) -> bool:
        return self.sample is not None or self.batch is not None

    def outcome(self, source: Source, options: LoaderOptions, *, by_length: bool = False) -> Outcome:
        """The fields that the hooks return; calls them with the first samples of a source.

        For batches by length it calls them again, with samples that are one element shorter: fields that follow their
        length are shorter, too. It restores the global random generators, and passes over bad samples if ``on_error``
        reads around them.
        """
        seed = (options.seed or 0) if options.augment else None
        probed = [hook and _ProbedHook(hook.function, hook.where) for hook in (self.sample, self.batch)]
        calls = HookCalls(source, probed[0], probed[1], seed, indexed=options.return_indices)
        around = options.on_error != "raise"
        with put_back() as drawn:
            for sample in range(min(TRIED, len(source)) if around else 0):
                with contextlib.suppress(Exception):
                    found = _Probe(calls, range(sample, sample + 1), by_length=by_length).outcome()
                    break
            else:
                samples = range(min(1 if around or self.batch is None else ROWS, len(source)))
                try:
                    found = _Probe(calls, samples, by_length=by_length).outcome()
                except TransformError as error:
                    error.add_note("The first samples are transformed early, to learn the fields of a batch.")
                    raise
        return dataclasses.replace(found, drawn=drawn)

    @property
    def unpicklable(self) -> str:
        for hook in (self.sample, self.batch):
            if hook is not None and (why := why_not_pickled(hook.function)):
                return f"{hook.where} {why}"
        return ""


def _cut(field: FieldSpec, cut: int) -> tuple[int, ...]:
    return (field.shape[0] - cut, *field.shape[1:]) if field.ragged else field.shape


class _ProbedHook(Hook):
    """Warns of a function that names torchvision and returns another dict with the very same arrays."""

    def __call__(self, value: Any, rng: Any) -> Any:
        before = {key: (array, array.tobytes()) for key, array in value.items()}
        made = super().__call__(value, rng)
        if isinstance(made, Mapping) and made is not value and made.keys() == before.keys():
            same = all(made[key] is array and array.tobytes() == was for key, (array, was) in before.items())
            named = (getattr(part, "__module__", None) or getattr(part, "__name__", "") for _, part in values_in(self))
            if same and any(str(name).startswith("torchvision") for name in named):
                log.warning("%s: arrays came back unchanged; give torchvision tensors (see transforms.md)", self.where)
        return made


class _Probe:
    def __init__(self, calls: HookCalls, samples: range, *, by_length: bool) -> None:
        self._calls, self._spec = calls, calls.source.spec
        ragged = [field.shape[0] for field in self._spec.fields.values() if field.ragged] if by_length else []
        self._cuts = max(ragged, default=1) > 1
        self._numbers = np.array(samples)
        self._stored = read(calls.source, self._numbers)

    def outcome(self) -> Outcome:
        spec = self._spec
        if (hook := self._calls.sample) is not None:
            found = []
            for cut in range(1 + self._cuts):
                samples, values = self._samples(1, cut)
                made = next(self._calls.of_samples(KeyedSamples(0, samples), values))
                found.append(self._kinds(hook, samples, made))
            spec = self._named(hook.where, self._numbers[:1], found)
        return Outcome(spec, spec if self._calls.batch is None else self._of_batches(spec))

    def _samples(self, count: int, cut: int) -> tuple[Indices, dict[str, Array]]:
        """The first samples, repeated if there are fewer; samples of variable length lose ``cut`` elements."""
        rows = np.arange(count) % len(self._numbers)
        stored = {key: array[rows] for key, array in self._stored.items()}
        for key, field in self._spec.fields.items():
            if cut and field.ragged:
                width, length = _cut(field, cut)[0], length_key(key)
                stored[key] = np.ascontiguousarray(stored[key][:, :width])
                stored[length] = np.minimum(stored[length], width)
        return self._numbers[rows], delivered(self._spec, stored)

    def _kinds(self, hook: Hook, samples: Indices, made: Made, rows: int = 0) -> Kinds:
        """Shapes and dtypes of one sample's fields; ``rows`` is the length of a batch, or 0 for one sample."""
        try:
            arrays = {k: with_rows(k, value, rows) if rows else named_array(k, value) for k, value in made.items()}
        except UnfitError as error:
            raise failure(hook.where, self._calls.source, samples, str(error)) from None
        return {key: (array.shape[1 if rows else 0 :], array.dtype) for key, array in arrays.items()}

    def _of_batches(self, spec: BatchSpec) -> BatchSpec:
        hook = self._calls.batch
        assert hook is not None
        found: list[Kinds] = []
        for cut in range(1 + self._cuts):
            samples, values = self._samples(ROWS, cut)
            if self._calls.sample is not None:
                fields = spec.fields.items()
                target = {key: np.empty((ROWS, *_cut(field, cut)), field.dtype) for key, field in fields}
                self._calls.put_samples(KeyedSamples(0, samples), values, target)
                values = target
            made = self._calls.of_batch(KeyedSamples(0, samples), values)
            found.append(self._kinds(hook, samples, made, ROWS))
        return self._named(hook.where, self._numbers, found)

    def _named(self, where: str, samples: Indices, found: Sequence[Kinds]) -> BatchSpec:
        """The fields of the source in its order, then the others; by what came of samples, and of shorter ones."""
        one, cut, known = found[0], found[-1], self._spec.fields
        if not one:
            raise failure(where, self._calls.source, samples, "returned no field for {}; return at least one")
        # The fields that are one element shorter if their samples are.
        shapes = {key: shape for key, (shape, _) in one.items() if self._cuts and shape and key in cut}
        follow = {key for key, (first, *rest) in shapes.items() if cut[key][0] == (first - 1, *rest)}
        fields = {}
        for key in [*(key for key in known if key in one), *(key for key in one if key not in known)]:
            shape, dtype = one[key]
            concat = key in known and known[key].concat
            if concat and ((self._cuts and key not in follow) or shape[0] != known[key].shape[0]):
                raise failure(where, self._calls.source, samples, f"changed the length of {key} of {{}}; {FIXED}")
            field = FieldSpec(shape, dtype.newbyteorder("="), ragged=concat or key in follow, concat=concat)
            if key in known and (known[key].shape, known[key].dtype) == (field.shape, field.dtype):
                names = {name: getattr(known[key], name) for name in ("classes", "texts", "meanings")}
                field = dataclasses.replace(field, **names)
            fields[key] = field
        return BatchSpec(fields, as_mapping=self._spec.as_mapping)


# Reads samples into arrays for all fields of a source.
ReadInto = Callable[[Mapping[str, Array]], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    of_samples: BatchSpec  # the fields after ``sample_transform``
    spec: BatchSpec  # the fields of a slot, after ``batch_transform``
    drawn: Sequence[str] = ()  # the global random generators from which reading and hooks drew


class Transformation:
    """Reads samples into scratch memory, calls the host hooks, and puts the results into a slot.

    Any thread may call it. Each has its own scratch memory; one at a time calls hooks.
    """

    def __init__(
        self,
        calls: HookCalls,
        outcome: Outcome,
        capacity: int,
        buckets: Buckets | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self._calls, self._outcome, self.capacity, self._buckets = calls, outcome, capacity, buckets
        self._spec = calls.source.spec
        self._raw = BatchLayout(self._spec, capacity, buckets=buckets)
        both = calls.sample is not None and calls.batch is not None
        self._between = BatchLayout(outcome.of_samples, capacity, buckets=buckets) if both else None
        # Of each thread.
        self.scratch_bytes = self._raw.nbytes + (0 if self._between is None else self._between.nbytes)
        self.takes_batches = calls.batch is not None  # several batches cannot be read as one
        self._lock = threading.Lock() if lock is None else lock
        self._thread = threading.local()

    def __reduce__(self) -> Any:
        return Transformation, (self._calls, self._outcome, self.capacity, self._buckets)

    def __call__(self, keyed: KeyedSamples, read: ReadInto, out: Mapping[str, Array], rows: Sequence[int]) -> None:
        """Put the samples into these rows of ``out``; a batch into all of it."""
        if not hasattr(self._thread, "memory"):
            self._thread.memory = np.empty(self.scratch_bytes, np.uint8)
        memory: Bytes = self._thread.memory
        raw = self._raw.views_of(memory, keyed.samples)
        read(raw)
        values, began = delivered(self._spec, raw), time.perf_counter()
        with self._lock:
            CLOCK.add(cpu_s=(locked := time.perf_counter()) - began)
            if self._calls.sample is not None:
                target = out
                if self._between is not None:
                    target = self._between.views_of(memory[self._raw.nbytes :], keyed.samples)
                self._calls.put_samples(keyed, values, target, rows)
                values = dict(target)
            if self._calls.batch is not None:
                self._calls.put_batch(keyed, values, out)
            CLOCK.add(transform_s=time.perf_counter() - locked)

    def check(self, keyed: KeyedSamples, read: ReadInto) -> None:
        values = self._spec.empty(1)
        read(values)
        if self._calls.sample is not None:
            with self._lock:
                values = delivered(self._spec, values)
                self._calls.put_samples(keyed, values, self._outcome.of_samples.empty(1))


def delivered(spec: BatchSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {key: spec[key].delivered(array) for key, array in arrays.items()}
