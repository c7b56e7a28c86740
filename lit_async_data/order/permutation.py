"""Keyed permutations of ``range(n)``: any position in O(1) time and memory, in both directions.

An alternating Feistel network over the smallest power of two that holds n, with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002): a value outside ``range(n)`` is permuted again until it falls
inside. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). This is a shuffle, not
a cipher: it is statistically fair, but not secure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 6
_FORWARD, _BACKWARD = range(ROUNDS), range(ROUNDS - 1, -1, -1)
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
# A narrower network has too few values per half for the rounds to mix. Cycle walking costs little at this size.
_LEAST_BITS = 6
# `Permutations` sorts hashes instead of walking where a permutation has at most 2⁵ elements.
_SMALL_BITS = 5


def hash64(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_A) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_B) & _WORD
    return word ^ (word >> 31)


def derived_key(*words: int) -> int:
    """A 64-bit key from several integers. A change in any of them gives an unrelated key."""
    key = 0
    for word in words:
        key = hash64((key + _GOLDEN + hash64(word & _WORD)) & _WORD)
    return key


def derived_keys(first: npt.ArrayLike, second: npt.ArrayLike) -> Words:
    """``derived_key(first, second)`` for each pair of 64-bit words of two arrays, which are broadcast."""
    # At least one axis: numpy warns when a scalar wraps around, but not when the words of an array do.
    one, two = (np.atleast_1d(np.asarray(words, np.uint64)) for words in (first, second))
    golden = np.uint64(_GOLDEN)
    return _hash64_array(_hash64_array(_hash64_array(one) + golden) + golden + _hash64_array(two))


def _hash64_array(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_A)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_B)
    return words ^ (words >> np.uint64(31))


def in_range(positions: npt.ArrayLike, length: int) -> Indices:
    checked = np.asarray(positions, np.int64)
    if checked.size and (checked.min() < 0 or checked.max() >= length):
        raise IndexError(f"position outside an order of {length} samples")
    return checked


class Permutation:
    """One permutation of ``range(n)``. Immutable; safe to call from any thread.

    In blocks of 4096 or more, a call costs about 50 ns per index, for 10⁶ elements as for 10¹². Even for one index it
    costs at least 100 µs: ask for blocks.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        keys = derived_keys(key & _WORD, np.arange(ROUNDS))[:, None]
        self._network = _Network(np.array([n], np.uint64), np.array([(n - 1).bit_length()], np.uint64), keys)

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """The elements at positions; raises an IndexError outside of ``range(n)``."""
        return self._walked(positions, _FORWARD)

    def inverse(self, elements: npt.ArrayLike) -> Indices:
        return self._walked(elements, _BACKWARD)

    def _walked(self, values: npt.ArrayLike, rounds: range) -> Indices:
        values = in_range(values, self.n)
        return self._network.walked(values.ravel(), rounds).reshape(values.shape)


class Permutations:
    """Many permutations, each with its own range and key. Immutable; safe to call from any thread.

    A permutation of more than 32 elements equals the `Permutation` with that n and key. A smaller one sorts its
    elements by keyed hashes: in so small a range most steps of a cycle walk would fall outside.
    """

    def __init__(self, n: npt.ArrayLike, keys: npt.ArrayLike) -> None:
        self.n = np.asarray(n, np.int64)
        self._keys = np.asarray(keys, np.uint64)

    def __call__(self, positions: npt.ArrayLike, which: npt.ArrayLike) -> Indices:
        """The elements at positions of the permutations with the numbers ``which``; all of shape (m,)."""
        positions, which = np.asarray(positions, np.int64), np.asarray(which, np.int64)
        n = self.n[which]
        out = np.empty(positions.shape, np.int64)
        small = n <= 2**_SMALL_BITS
        for chosen, permuted in (small, self._sorted), (~small, self._walked):
            if chosen.any():
                out[chosen] = permuted(positions[chosen], which[chosen])
        return out

    def _sorted(self, positions: Indices, which: Indices) -> Indices:
        width = min(int(self.n.max()), 2**_SMALL_BITS)
        elements = np.arange(width, dtype=np.uint64)
        # The low bits of a word hold its element, so that sorting the words sorts the elements.
        low_bits = np.uint64(_SMALL_BITS)
        words = derived_keys(self._keys[:, None], elements) >> low_bits << low_bits | elements
        words[elements >= self.n[:, None].astype(np.uint64)] = _WORD  # elements that do not exist come last
        words.sort(axis=1)
        return (words[which, positions] & np.uint64(2**_SMALL_BITS - 1)).astype(np.int64)

    def _walked(self, positions: Indices, which: Indices) -> Indices:
        keys = derived_keys(self._keys, np.arange(ROUNDS)[:, None])
        n = self.n[which]
        if (n == n[0]).all():
            n = n[:1]  # broadcasting one number takes less time
        # The exponent of n − 1 as a float is its bit length (up to 2⁵³, where floats begin to round).
        bits = np.frexp((n - 1).astype(np.float64))[1]
        return _Network(n.astype(np.uint64), bits.astype(np.uint64), keys[:, which]).walked(positions, _FORWARD)


class _Network:
    """The Feistel network and the cycle walks through it, for a block of m values.

    ``n`` and ``bits`` have shape (1,) or (m,), ``keys`` (ROUNDS, 1) or (ROUNDS, m).
    """

    def __init__(self, n: Words, bits: Words, keys: Words) -> None:
        one, bits = np.uint64(1), np.maximum(bits, np.uint64(_LEAST_BITS))
        self.n, self._bits, self._keys = n, bits, keys
        self._low_bits: Words = bits >> one
        self._low_mask = (one << self._low_bits) - one
        self._high_mask = (one << (bits - self._low_bits)) - one

    def walked(self, values: Indices, rounds: range) -> Indices:
        """The ends of the walks from these values. The order of ``rounds`` gives the direction."""
        out = self.step(values.astype(np.uint64), rounds)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            subset = self._subset(outside)
            again = subset.step(out[outside], rounds)
            out[outside] = again
            outside = outside[again >= subset.n]
        return out.astype(np.int64)

    def _subset(self, chosen: Indices) -> _Network:
        if self._keys.shape[-1] == 1 == self.n.size:
            return self
        n, bits = (part if part.size == 1 else part[chosen] for part in (self.n, self._bits))
        return _Network(n, bits, self._keys[:, chosen])

    def step(self, values: Words, rounds: range) -> Words:
        high, low = values >> self._low_bits, values & self._low_mask
        for number in rounds:
            if number % 2:
                low ^= _round(high, self._keys[number]) & self._low_mask
            else:
                high ^= _round(low, self._keys[number]) & self._high_mask
        return (high << self._low_bits) | low


def _round(half: Words, key: Words) -> Words:
    word = half ^ key
    word *= np.uint64(_MIX_A)
    word ^= word >> np.uint64(32)
    word *= np.uint64(_MIX_B)
    word ^= word >> np.uint64(29)
    return word
