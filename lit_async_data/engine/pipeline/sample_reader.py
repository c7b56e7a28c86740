"""`SampleReader`: reads samples, and adds what belongs to the loader: indices, random keys, and the user's hooks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, Bytes, FieldSpec
from lit_async_data.engine.hooks.calls import INDEX
from lit_async_data.engine.hooks.transformation import Transformation
from lit_async_data.errors import ConfigError
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
        if self.return_indices:
            out[INDEX][... if rows is None else rows] = ids
            out = {key: array for key, array in out.items() if key != INDEX}
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


def indexed_spec(spec: BatchSpec) -> BatchSpec:
    """The fields of batches with the indices of their samples; a `ConfigError` if there is a field of that name."""
    if INDEX in spec.fields:
        raise ConfigError(f"return_indices: the source has a field {INDEX!r} of its own; give that field another key")
    return spec.with_field(INDEX, FieldSpec((), np.dtype(np.int64)))


def batch_seed(source: Source, cursor: EpochCursor, seed: int, key: BatchIndex) -> int:
    """The seed of a batch's generator: by its first sample, whatever its rank and step."""
    first = cursor.schedule.plan(key.epoch).batch(key.step).samples[:1]
    return derived_key(seed, key.epoch, BATCH_KEYS, int(source.ids(first)[0]))
