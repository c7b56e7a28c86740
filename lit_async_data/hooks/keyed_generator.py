"""`KeyedGenerator`: numpy's random numbers for each sample, from a key alone."""

from __future__ import annotations

from typing import Any

import numpy as np


class KeyedGenerator:
    """One generator that begins anew with each key. For one thread at a time.

    Philox computes its numbers from a counter and a key. Setting both in an existing generator costs 2 µs; building a
    generator costs 10 to 20. It has no seed sequence, so ``rng.spawn``, whose results would depend on how often it was
    called, is an error of numpy.

    Example:
        >>> generator = KeyedGenerator()
        >>> first, other = (generator.at(key).random() for key in (7, 8))
        >>> first == generator.at(7).random(), first == other
        (True, False)
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

    def at(self, key: int) -> np.random.Generator:
        """The generator, set to the beginning of a key's numbers: those of ``Generator(Philox(key=key))``.

        Args:
            key: 64 bits; see `derived_keys`.
        """
        self._key[0] = key
        self._bits.state = self._state
        return self._generator
