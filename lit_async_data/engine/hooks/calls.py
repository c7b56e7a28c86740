"""`HookCalls`: calls the host hooks with samples and batches, and with random numbers for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.engine.hooks.callables import Hook
from lit_async_data.engine.hooks.failures import failure, no_dict, raised
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.sources.contract.randomness import READING, seed_generators
from lit_async_data.sources.contract.source import Source

# Separate the keys of random numbers for host hooks from those of sources, 1 and 2 in `sample_reader.py`.
SAMPLE_HOOK_KEYS, BATCH_HOOK_KEYS = 3, 4

# The key of sample numbers in a batch.
INDEX = "index"

Made = Mapping[str, Any]


class KeyedGenerator:
    """One generator that begins anew with each key. For one thread at a time.

    Philox computes its numbers from a counter and a key. Setting both in an existing generator costs 2 µs; building a
    generator costs 10 to 20. It has no seed sequence, so ``rng.spawn``, whose results would depend on how often it was
    called, is an error of numpy.
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
        """The generator at the beginning of the numbers of a key of 64 bits: of ``Philox(key=key)``."""
        self._key[0] = key
        self._bits.state = self._state
        return self._generator


class HookCalls:
    """Calls the host hooks. One thread at a time.

    Args:
        source: Where samples come from.
        sample: ``sample_transform``.
        batch: ``batch_transform``.
        seed: Of the loader; None if hooks get None in place of random numbers.
        indexed: Whether hooks get the numbers of their samples, as key ``index``. They need not return it: the loader
            adds it.
    """

    def __init__(
        self, source: Source, sample: Hook | None, batch: Hook | None, seed: int | None, *, indexed: bool = False
    ) -> None:
        self.source, self.sample, self.batch, self._seed, self._indexed = source, sample, batch, seed, indexed
        self._generator = KeyedGenerator()

    def _with_index(self, samples: Indices, values: Mapping[str, Array]) -> dict[str, Array]:
        return {**values, INDEX: self.source.ids(samples)} if self._indexed else dict(values)

    def _without_index(self, where: str, samples: Indices, made: Made, given: Any) -> Made:
        if not self._indexed or INDEX not in made:
            return made
        if not np.array_equal(made[INDEX], given):
            raise failure(
                where,
                self.source,
                samples,
                f"returned another {INDEX!r} for {{}}, which return_indices fills with sample numbers; return it under "
                "another key",
            )
        return {key: value for key, value in made.items() if key != INDEX}

    def of_samples(self, epoch: int, samples: Indices, values: Mapping[str, Array]) -> Iterator[Made]:
        """What ``sample_transform`` makes of each sample; it may write to ``values``, of shape (n, …)."""
        hook = self.sample
        assert hook is not None
        keys = seeds = None
        if hook.draws and self._seed is not None:
            epoch_key = derived_key(self._seed, epoch, SAMPLE_HOOK_KEYS)
            keys = derived_keys(epoch_key, self.source.ids(samples)).tolist()
        if READING.key is not None:
            seeds = READING.keys(SAMPLE_HOOK_KEYS, self.source.ids(samples))
        values = self._with_index(samples, values)
        for place in range(len(samples)):
            sample = {key: array[place, ...] for key, array in values.items()}
            if seeds is not None:
                seed_generators(seeds[place])
            rng = None if keys is None else self._generator.at(keys[place])
            try:
                made = hook(sample, rng)
            except Exception as error:
                raise failure(hook.where, self.source, samples[place : place + 1], raised(error)) from error
            if made is None:
                made = sample
            if made.__class__ is not dict and not isinstance(made, Mapping):
                raise failure(hook.where, self.source, samples[place : place + 1], no_dict(made))
            yield self._without_index(hook.where, samples[place : place + 1], made, sample.get(INDEX))

    def of_batch(self, epoch: int, samples: Indices, values: dict[str, Array]) -> Made:
        """What ``batch_transform`` makes of a batch; as `of_samples`."""
        hook = self.batch
        assert hook is not None
        rng, first = None, int(self.source.ids(samples[:1])[0])
        if READING.key is not None:
            seed_generators(*READING.keys(BATCH_HOOK_KEYS, np.array([first])))
        if hook.draws and self._seed is not None:
            rng = self._generator.at(derived_key(self._seed, epoch, BATCH_HOOK_KEYS, first))
        values = self._with_index(samples, values)
        try:
            made = hook(values, rng)
        except Exception as error:
            raise failure(hook.where, self.source, samples, raised(error)) from error
        if made is None:
            made = values
        if not isinstance(made, Mapping):
            raise failure(hook.where, self.source, samples, no_dict(made))
        return self._without_index(hook.where, samples, made, values.get(INDEX))
