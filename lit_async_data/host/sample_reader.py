"""`SampleReader`: reads samples, and adds what belongs to the loader: their indices, and random keys for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.errors import ConfigError
from lit_async_data.host.nan_check import NanCheck
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.sources.contract.source import Source

INDEX = "index"
# Separates the keys of random numbers for samples, and for whole batches, from those of the order.
SAMPLE_KEYS, BATCH_KEYS = 1, 2


@dataclasses.dataclass(frozen=True)
class SampleReader:
    """Reads samples of an epoch into arrays. Safe to call from any thread.

    Attributes:
        source: Where samples come from.
        return_indices: Whether to add the samples' indices as field ``index``.
        seed: Seed of random numbers for samples; None if the source draws none.
        nan_check: Checks the first batch.
    """

    source: Source
    return_indices: bool
    seed: int | None
    nan_check: NanCheck

    def __call__(self, epoch: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        ids = self.source.ids(samples) if self.return_indices or self.seed is not None else samples
        if self.return_indices:
            out[INDEX][...] = ids
            out = {key: array for key, array in out.items() if key != INDEX}
        if self.seed is None:
            self.source.read_into(samples, out)
        else:
            self.source.read_random(samples, out, derived_keys(derived_key(self.seed, epoch, SAMPLE_KEYS), ids))
        self.nan_check(epoch, samples, out)


def indexed_spec(spec: BatchSpec) -> BatchSpec:
    """The fields of batches with the indices of their samples.

    Raises:
        ConfigError: The source has a field of that name.
    """
    if INDEX in spec.fields:
        raise ConfigError(f"return_indices: the source has a field {INDEX!r} of its own; give that field another key")
    return spec.with_field(INDEX, FieldSpec((), np.dtype(np.int64)))
