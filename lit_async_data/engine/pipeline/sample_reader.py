"""`SampleReader`: reads samples, and adds what belongs to the loader: indices, random keys, and the user's hooks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import MASK, Array, BatchSpec, Bytes, FieldSpec, length_key, offsets_key
from lit_async_data.engine.hooks.calls import INDEX
from lit_async_data.engine.hooks.failures import FIXED, failure
from lit_async_data.engine.hooks.transformation import Transformation
from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.epoch_cursor import EpochCursor
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.source import Source

# Separates the keys of random numbers for samples, and for whole batches, from those of the order. 3 and 4 are for
# host hooks: see `engine/hooks/calls.py`.
SAMPLE_KEYS, BATCH_KEYS = 1, 2


@dataclasses.dataclass(frozen=True)
class SampleReader:
    """Reads samples of an epoch into arrays. Safe to call from any thread."""

    source: Source
    return_indices: bool  # whether to add the samples' indices as field ``index``
    seed: int | None  # seed of random numbers for samples; None if the source draws none
    transformation: Transformation | None = None  # the host hooks; None without any
    concat: Sequence[str] = ()  # the fields whose samples come one after the other in a batch
    buckets: Buckets | None = None  # to which these are padded before that
    masks: bool = False  # whether to mark samples as real, in field ``mask``

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
        ids = self.source.ids(samples) if self.return_indices or self.seed is not None else samples
        own: dict[str, Any] = ({INDEX: ids} if self.return_indices else {}) | ({MASK: True} if self.masks else {})
        if own:
            for key, values in own.items():
                out[key][... if rows is None else rows] = values
            out = {key: array for key, array in out.items() if key not in own}
        whole = out
        if self.concat:
            out = self._padded(samples, out)
        if raw is not None:
            assert self.transformation is not None
            self.transformation.apply(epoch, samples, raw, out)
        elif self.transformation is not None:
            read = functools.partial(self._read, epoch, samples, ids)
            self.transformation(epoch, samples, read, out, None if rows is None else rows.tolist())
        elif rows is not None:
            values = {key: np.empty((len(samples), *array.shape[1:]), array.dtype) for key, array in out.items()}
            self._read(epoch, samples, ids, values)
            for key, array in out.items():
                array[rows] = values[key]
        elif self.seed is None:
            self.source.read_into(samples, out)  # most loaders: a call less for each batch
        else:
            self._read(epoch, samples, ids, out)
        if self.concat:
            self._concatenate(samples, out, whole, range(len(samples)) if rows is None else rows.tolist())

    def _padded(self, samples: Indices, out: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays with others in place of those in which samples come one after the other: there they are padded."""
        made = {key: array for key, array in out.items() if key not in map(offsets_key, self.concat)}
        for key in self.concat:
            lengths = np.diff(out[offsets_key(key)])
            width = self.source.spec[key].shape[0] if self.transformation is not None else max(int(lengths.max()), 1)
            width = width if self.buckets is None else self.buckets.width(samples)
            made[key] = np.empty((len(lengths), width, *out[key].shape[1:]), out[key].dtype)
        return made

    def _concatenate(
        self, samples: Indices, padded: Mapping[str, Array], out: Mapping[str, Array], rows: Iterable[int]
    ) -> None:
        for key in self.concat:
            edges, values, into = out[offsets_key(key)].tolist(), padded[key], out[key]
            lengths = padded.get(length_key(key))
            for place, row in enumerate(rows):
                first, end = edges[row : row + 2]
                if lengths is not None and lengths[row] != end - first:
                    what = f"changed {length_key(key)} of {{}} from {end - first} to {lengths[row]}; {FIXED}"
                    raise failure("transform", self.source, samples[place : place + 1], what)
                into[first:end] = values[row, : end - first]

    def check(self, epoch: int, sample: Indices) -> None:
        """Read one sample, and call ``sample_transform`` with it."""
        ids = self.source.ids(sample) if self.seed is not None else sample
        read = functools.partial(self._read, epoch, sample, ids)
        if self.transformation is None:
            read(self.source.spec.empty(1))
        else:
            self.transformation.check(epoch, sample, read)

    def before_hooks(self) -> SampleReader:
        return SampleReader(self.source, False, self.seed)

    def _read(self, epoch: int, samples: Indices, ids: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        if self.seed is None:
            self.source.read_into(samples, out)
        else:
            self.source.read_random(samples, out, derived_keys(derived_key(self.seed, epoch, SAMPLE_KEYS), ids))


def with_own_fields(spec: BatchSpec, options: LoaderOptions) -> BatchSpec:
    """The fields of batches with those that the loader adds; a `ConfigError` if there is a field of that name."""
    concat = [key for key, field in spec.fields.items() if field.concat]
    if concat and options.pad_last:
        raise ConfigError(f"pad_last: with ragged='concat', batches of {concat[0]} differ in shape; leave it out")
    added: dict[str, tuple[str, type]] = {offsets_key(key): ("ragged", np.int64) for key in concat}
    added |= {MASK: ("pad_last", np.bool_)} if options.pad_last else {}
    added |= {INDEX: ("return_indices", np.int64)} if options.return_indices else {}
    for key, (option, dtype) in added.items():
        if key in spec.fields:
            raise ConfigError(f"{option}: the source has a field {key!r} of its own; give that field another key")
        spec = spec.with_field(key, FieldSpec((), np.dtype(dtype)))
    return spec


def batch_seed(source: Source, cursor: EpochCursor, seed: int, key: BatchIndex) -> int:
    """The seed of a batch's generator: by its first sample, whatever its rank and step."""
    first = cursor.schedule.plan(key.epoch).batch(key.step)[:1]
    return derived_key(seed, key.epoch, BATCH_KEYS, int(source.ids(first)[0]))
