"""`SampleReader`: reads samples, and adds what belongs to the loader: indices, random keys, and the user's hooks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import MASK, RUN_BYTES, Array, BatchSpec, Bytes, FieldSpec, length_key, offsets_key
from lit_async_data.engine.hooks.calls import INDEX
from lit_async_data.engine.hooks.failures import FIXED, failure
from lit_async_data.engine.hooks.transformation import Transformation
from lit_async_data.errors import ConfigError
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.randomness import READING, seed_generators
from lit_async_data.sources.contract.source import Source

if TYPE_CHECKING:  # no reader process needs them
    from lit_async_data.options import LoaderOptions
    from lit_async_data.order.epoch_cursor import EpochCursor

# Separates the keys of random numbers for samples, and for whole batches, from those of the order. 3 and 4 are for
# host hooks: see `engine/hooks/calls.py`.
SAMPLE_KEYS, BATCH_KEYS, SOURCE_KEYS = 1, 2, 5


class EndToEnd:
    """Samples of variable length, one after the other. Who writes to them sees an array of padded ones."""

    def __init__(self, values: Array, offsets: Indices, width: int) -> None:
        self._values, self._firsts, self.lengths = values, offsets[:-1], np.diff(offsets)
        self.shape, self.dtype = (len(self.lengths), width, *values.shape[1:]), values.dtype

    def __setitem__(self, rows: Any, padded: Array) -> None:
        if isinstance(rows, int):
            rows, padded = slice(rows, rows + 1), padded[None]
        places = zip(self._firsts[rows].tolist(), self.lengths[rows].tolist(), padded, strict=True)
        for first, length, sample in places:
            self._values[first : first + length] = sample[:length]

    def padded(self, rows: slice | Indices) -> Array:
        """Memory for some of them, padded to the longest of these."""
        lengths = self.lengths[rows]
        return np.empty((len(lengths), max(int(lengths.max()), 1), *self.shape[2:]), self.dtype)


def padded_runs(joined: Sequence[EndToEnd], rows: slice | Indices) -> Iterator[slice]:
    """Which samples to read together: padded, they take at most the bytes of all as they are, or `RUN_BYTES`."""
    lengths = np.array([each.lengths[rows] for each in joined])
    nbytes = np.array([math.prod(each.shape[2:]) * each.dtype.itemsize for each in joined])
    most, first = max(int(nbytes @ lengths.sum(axis=1)), RUN_BYTES), 0
    while first < lengths.shape[1]:
        longest = nbytes @ np.maximum.accumulate(lengths[:, first:], axis=1)
        end = first + int(np.searchsorted(longest * np.arange(1, len(longest) + 1), most, side="right"))
        yield slice(first, end)
        first = end


@dataclasses.dataclass(frozen=True)
class SampleReader:
    """Reads samples of an epoch into arrays. Safe to call from any thread."""

    source: Source
    return_indices: bool  # whether to add the samples' indices as field ``index``
    seed: int | None  # seed of random numbers for samples; None if the source draws none
    transformation: Transformation | None = None  # the host hooks; None without any
    concat: Sequence[str] = ()  # the fields whose samples come one after the other in a batch
    buckets: Buckets | None = None  # to which these are padded for the host hooks
    masks: bool = False  # whether to mark samples as real, in field ``mask``
    global_seed: int | None = None  # by which the global random generators are seeded; None if they are left alone
    alike: bool = False  # whether all epochs are the same, as in evaluation

    def __call__(
        self,
        epoch: int,
        samples: Indices,
        out: Mapping[str, npt.NDArray[Any]],
        *,
        raw: Bytes | None = None,
        rows: Indices | None = None,
    ) -> None:
        """Read samples, or take them from memory as they were before the host hooks; into rows, or the first ones."""
        with READING.of(epoch, self.global_seed, alike=self.alike):
            self._put(epoch, samples, out, raw, rows)

    def _put(
        self, epoch: int, samples: Indices, out: Mapping[str, Any], raw: Bytes | None, rows: Indices | None
    ) -> None:
        own: dict[str, Any] = {INDEX: self.source.ids(samples)} if self.return_indices else {}
        own |= {MASK: True} if self.masks else {}
        for key, values in own.items():
            out[key][... if rows is None else rows] = values
        into: dict[str, Any] = {key: array for key, array in out.items() if key not in own}
        for key in self.concat:
            width = self.source.spec[key].shape[0] if self.buckets is None else self.buckets.width(samples)
            into[key] = EndToEnd(out[key], into.pop(offsets_key(key)), width)
        if self.transformation is not None:
            self._transform(epoch, samples, into, range(len(samples)) if rows is None else rows.tolist(), raw)
        elif self.concat:
            for run in padded_runs([into[key] for key in self.concat], slice(None) if rows is None else rows):
                self._read_rows(epoch, samples[run], into, run if rows is None else rows[run])
        elif rows is not None:
            self._read_rows(epoch, samples, into, rows)
        else:
            self._read(epoch, samples, into)

    def _read_rows(self, epoch: int, samples: Indices, into: Mapping[str, Any], rows: slice | Indices) -> None:
        """Read samples into rows; by other memory where these are scattered, or the samples are padded first."""
        apart = into.keys() if isinstance(rows, np.ndarray) else self.concat
        values = {key: array[rows] for key, array in into.items() if key not in apart}
        for key in apart:
            array, shape = into[key], (len(samples), *into[key].shape[1:])
            values[key] = array.padded(rows) if key in self.concat else np.empty(shape, array.dtype)
        self._read(epoch, samples, values)
        for key in apart:
            into[key][rows] = values[key]

    def _transform(
        self, epoch: int, samples: Indices, into: Mapping[str, Any], rows: Sequence[int], raw: Bytes | None
    ) -> None:
        hooks = self.transformation
        assert hooks is not None
        if raw is not None:
            hooks.apply(epoch, samples, raw, into)
        for first in range(0, len(samples) if raw is None else 0, hooks.capacity):
            run = slice(first, first + hooks.capacity)
            hooks(epoch, samples[run], functools.partial(self._read, epoch, samples[run]), into, rows[run])
        for key in self.concat:
            for place, row in enumerate(rows if length_key(key) in into else ()):
                length, made = into[key].lengths[row], into[length_key(key)][row]
                if made != length:
                    what = f"changed {length_key(key)} of {{}} from {length} to {made}; {FIXED}"
                    raise failure("transform", self.source, samples[place : place + 1], what)

    def check(self, epoch: int, sample: Indices) -> None:
        """Read one sample, and call ``sample_transform`` with it."""
        with READING.of(epoch, self.global_seed, alike=self.alike):
            if self.transformation is None:
                self._read(epoch, sample, self.source.spec.empty(1))
            else:
                self.transformation.check(epoch, sample, functools.partial(self._read, epoch, sample))

    def before_hooks(self) -> SampleReader:
        return SampleReader(self.source, False, self.seed, global_seed=self.global_seed, alike=self.alike)

    def _read(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        if READING.key is not None:
            seed_generators(*READING.keys(SOURCE_KEYS, self.source.ids(samples[:1])))
        if self.seed is None:
            self.source.read_into(samples, out)
        else:
            ids = self.source.ids(samples)
            self.source.read_random(samples, out, derived_keys(derived_key(self.seed, epoch, SAMPLE_KEYS), ids))


def with_own_fields(spec: BatchSpec, options: LoaderOptions) -> BatchSpec:
    """The fields of batches with those that the loader adds; a `ConfigError` if there is a field of that name."""
    concat = [key for key, field in spec.fields.items() if field.concat]
    if concat and options.pad_last:
        raise ConfigError(f"with ragged='concat', batches of {concat[0]} differ in shape; leave it out", "pad_last")
    added: dict[str, tuple[str, type]] = {offsets_key(key): ("ragged", np.int64) for key in concat}
    added |= {MASK: ("pad_last", np.bool_)} if options.pad_last else {}
    added |= {INDEX: ("return_indices", np.int64)} if options.return_indices else {}
    for key, (option, dtype) in added.items():
        if key in spec.fields:
            raise ConfigError(f"the source has a field {key!r} of its own; give that field another key", option)
        spec = spec.with_field(key, FieldSpec((), np.dtype(dtype)))
    return spec


def batch_seed(source: Source, cursor: EpochCursor, seed: int, key: BatchIndex) -> int:
    """The seed of a batch's generator: by its first sample, whatever its rank and step."""
    first = cursor.schedule.plan(key.epoch).batch(key.step)[:1]
    return derived_key(seed, key.epoch, BATCH_KEYS, int(source.ids(first)[0]))
