"""Applies the transforms of samples and batches on the host to the samples that a worker has read."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self

import numpy as np

from lit_async_data.batch.spec import (
    NOTHING,
    Array,
    BatchLayout,
    BatchSpec,
    Bytes,
    FieldSpec,
    length_key,
    most_elements,
)
from lit_async_data.engine.hooks.calls import (
    FIXED,
    Function,
    Hook,
    HookCalls,
    Made,
    check_callable,
    failure,
    fitting,
    fitting_rows,
    named_array,
    other_keys,
    with_rows,
)
from lit_async_data.errors import TransformError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import KeyedSamples
from lit_async_data.sources.contract.checks import UnfitError
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.contract.user_code import put_back, values_in, why_not_pickled

log = logging.getLogger(__name__)

# The argument of each hook, for messages.
CALLED_WITH = {"sample_transform": "a sample", "batch_transform": "a batch", "device_transform": "a batch"}
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
            check_callable(name, function, CALLED_WITH[name])
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

    def transformation(
        self,
        source: Source,
        seed: int | None,
        outcome: Outcome,
        capacity: int,
        *,
        indexed: bool,
        buckets: Buckets | None = None,
        concat: Mapping[str, Indices] = NOTHING,
    ) -> Transformation:
        """At most ``capacity`` samples are read together.

        Fewer if they are concatenated: padded, they take no more elements than a batch can have.
        """
        if self.batch is None and buckets is None:
            fits = [most_elements(of, capacity)[0] // source.spec[key].shape[0] for key, of in concat.items()]
            capacity = max(min([capacity, *fits]), 1)
        calls = HookCalls(source, self.sample, self.batch, seed, indexed=indexed)
        return Transformation(calls, outcome, capacity, buckets, self.lock)

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
            spec = self._named(hook.where, self._numbers[:1], found[0], self._follow(found))
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

    def _follow(self, found: Sequence[Kinds]) -> set[str]:
        """The fields that are one element shorter if their samples are."""
        one, cut = found[0], found[-1]
        shapes = {key: shape for key, (shape, _) in one.items() if self._cuts and shape and key in cut}
        return {key for key, (first, *rest) in shapes.items() if cut[key][0] == (first - 1, *rest)}

    def _of_batches(self, spec: BatchSpec) -> BatchSpec:
        hook = self._calls.batch
        assert hook is not None
        found: list[Kinds] = []
        for cut in range(1 + self._cuts):
            samples, values = self._samples(ROWS, cut)
            if self._calls.sample is not None:
                fields = spec.fields.items()
                target = {key: np.empty((ROWS, *_cut(field, cut)), field.dtype) for key, field in fields}
                put_samples(self._calls, KeyedSamples(0, samples), values, target)
                values = target
            made = self._calls.of_batch(KeyedSamples(0, samples), values)
            found.append(self._kinds(hook, samples, made, ROWS))
        return self._named(hook.where, self._numbers, found[0], self._follow(found))

    def _named(self, where: str, samples: Indices, found: Kinds, follow: AbstractSet[str]) -> BatchSpec:
        """The fields of the source in its order, then the others."""
        if not found:
            raise failure(where, self._calls.source, samples, "returned no field for {}; return at least one")
        known = self._spec.fields
        fields = {}
        for key in [*(key for key in known if key in found), *(key for key in found if key not in known)]:
            shape, dtype = found[key]
            concat = key in known and known[key].concat
            if concat and ((self._cuts and key not in follow) or shape[0] != known[key].shape[0]):
                what = f"changed the length of {key} of {{}}; {FIXED}"
                raise failure(where, self._calls.source, samples, what)
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

    Any thread may call it. Each has its own scratch memory, so threads read and decode at the same time; one at a time
    calls hooks, since few augmentations are thread-safe.

    Attributes:
        scratch_bytes: Scratch memory of each thread.
        takes_batches: Whether ``batch_transform`` takes whole batches, so that several cannot be read as one.
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
        self.scratch_bytes = self._raw.nbytes + (0 if self._between is None else self._between.nbytes)
        self.takes_batches = calls.batch is not None
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
            CLOCK.waited_for_others((locked := time.perf_counter()) - began)
            if self._calls.sample is not None:
                target = out
                if self._between is not None:
                    target = self._between.views_of(memory[self._raw.nbytes :], keyed.samples)
                put_samples(self._calls, keyed, values, target, rows)
                values = dict(target)
            if self._calls.batch is not None:
                put_batch(self._calls, keyed.samples, self._calls.of_batch(keyed, values), out)
            CLOCK.transformed(time.perf_counter() - locked)

    def check(self, keyed: KeyedSamples, read: ReadInto) -> None:
        """Read a sample, and call ``sample_transform``."""
        values = self._spec.empty(1)
        read(values)
        if self._calls.sample is not None:
            with self._lock:
                values = delivered(self._spec, values)
                put_samples(self._calls, keyed, values, self._outcome.of_samples.empty(1))


def delivered(spec: BatchSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {key: spec[key].delivered(array) for key, array in arrays.items()}


def put_samples(
    calls: HookCalls,
    keyed: KeyedSamples,
    values: Mapping[str, Array],
    out: Mapping[str, Array],
    rows: Sequence[int] | None = None,
) -> None:
    """Into these rows of ``out``, or the first ones."""
    samples = keyed.samples
    assert calls.sample is not None
    targets = [(key, array, array.shape[1:], array.dtype) for key, array in out.items()]
    keys, plain = out.keys(), np.ndarray
    places = range(len(samples))
    for place, row, made in zip(places, rows or places, calls.of_samples(keyed, values), strict=True):
        if made.keys() != keys:
            raise failure(calls.sample.where, calls.source, samples[place : place + 1], other_keys(made, keys))
        try:
            for key, array, shape, dtype in targets:
                value = made[key]
                if value.__class__ is not plain or value.shape != shape or value.dtype != dtype:
                    value = fitting(key, value, shape, dtype)
                array[row] = value
        except UnfitError as error:
            raise failure(calls.sample.where, calls.source, samples[place : place + 1], str(error)) from None


def put_batch(calls: HookCalls, samples: Indices, made: Made, out: Mapping[str, Array]) -> None:
    assert calls.batch is not None
    if made.keys() != out.keys():
        raise failure(calls.batch.where, calls.source, samples, other_keys(made, out))
    try:
        for key, array in out.items():
            array[...] = fitting_rows(key, made[key], array.shape, array.dtype)
    except UnfitError as error:
        raise failure(calls.batch.where, calls.source, samples, str(error)) from None
