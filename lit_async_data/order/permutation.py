"""Keyed permutations of ``range(n)``: any position in O(1) time and memory, in both directions.

An alternating Feistel network over the smallest power of two that holds n, with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002): a value outside ``range(n)`` is permuted again until it falls
inside. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). This is a shuffle, not
a cipher: it is fair to look at, and nobody should hide anything behind it.

`Permutation` is one of them; `Permutations` is many at once, for a block of positions in any of them.
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
# Below this many bits a half has too few values for the rounds to mix; cycle walking then costs little anyway.
_LEAST_BITS = 6
# Permutations of up to 2⁵ elements are sorted where there are many at once.
_FEW_BITS = 5


def mixed(word: int) -> int:
    """The finaliser of SplitMix64 on one 64-bit word."""
    word = ((word ^ (word >> 30)) * _MIX_A) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_B) & _WORD
    return word ^ (word >> 31)


def derived_key(*words: int) -> int:
    """A 64-bit key from several integers; any change in any of them gives an unrelated key.

    Example:
        >>> derived_key(0, 1) != derived_key(1, 0)
        True
    """
    key = 0
    for word in words:
        key = mixed((key + _GOLDEN + mixed(word & _WORD)) & _WORD)
    return key


def derived_keys(first: npt.ArrayLike, second: npt.ArrayLike) -> Words:
    """``derived_key(first, second)`` for each pair of 64-bit words of two arrays, which are broadcast.

    Example:
        >>> derived_keys(7, [0, 1]).tolist() == [derived_key(7, 0), derived_key(7, 1)]
        True
    """
    # At least one axis: numpy warns when a single word wraps around, and is silent about those of an array.
    one, two = (np.atleast_1d(np.asarray(words, np.uint64)) for words in (first, second))
    golden = np.uint64(_GOLDEN)
    return _each_mixed(_each_mixed(_each_mixed(one) + golden) + golden + _each_mixed(two))


def _each_mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_A)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_B)
    return words ^ (words >> np.uint64(31))


class Permutation:
    """One permutation of ``range(n)``. Immutable; safe to call from any thread.

    A call costs about 50 ns per index in blocks of 4096 or more, the same for 10⁶ and 10¹² elements, and about 100 µs
    however few they are: ask for blocks.

    Args:
        n: How many elements, ≥ 1.
        key: Which permutation, 64 bits; see `derived_key`.

    Example:
        >>> shuffled = Permutation(5, key=1)
        >>> sorted(shuffled(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
        >>> shuffled.inverse(shuffled(np.arange(5))).tolist()
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} elements")
        self.n = n
        keys = derived_keys(key & _WORD, np.arange(ROUNDS))[:, None]
        self._network = _Network(np.array([n], np.uint64), np.array([(n - 1).bit_length()], np.uint64), keys)

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """The elements at these positions.

        Args:
            positions: Integers in ``range(n)``, any shape.

        Returns:
            int64, of the same shape.
        """
        return self._walked(positions, _FORWARD)

    def inverse(self, elements: npt.ArrayLike) -> Indices:
        """The positions of these elements; shapes as in a call."""
        return self._walked(elements, _BACKWARD)

    def _walked(self, values: npt.ArrayLike, rounds: range) -> Indices:
        given = np.asarray(values, np.int64)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"position outside a permutation of {self.n} elements")
        return self._network.walked(given.ravel(), rounds).reshape(given.shape)


class Permutations:
    """Many permutations, each of a range and with a key of its own. Immutable; safe to call from any thread.

    One of more than 32 elements is the `Permutation` with that n and key. The elements of a smaller one stand in the
    order of the words that its key gives them: walks would be long, since most of their steps lie outside so small a
    range.

    A block of 4096 positions costs 15 to 65 ns each for up to 32 elements or just under a power of two, and up to
    180 ns just above one.

    Args:
        n: How many elements each has, ≥ 1; shape (k,).
        keys: Which permutation each is, 64 bits; shape (k,). See `derived_keys`.

    Example:
        >>> shuffled = Permutations([2, 100], keys=derived_keys(0, [0, 1]))
        >>> sorted(shuffled([0, 1], which=[0, 0]).tolist())
        [0, 1]
        >>> shuffled([7], which=[1]).tolist() == [Permutation(100, derived_key(0, 1))(7)]
        True
    """

    def __init__(self, n: npt.ArrayLike, keys: npt.ArrayLike) -> None:
        self.n = np.asarray(n, np.int64)
        if self.n.size and self.n.min() < 1:
            raise ValueError(f"a permutation of {self.n.min()} elements")
        self._keys = np.asarray(keys, np.uint64)

    def __call__(self, positions: npt.ArrayLike, which: npt.ArrayLike) -> Indices:
        """The elements at these positions.

        Args:
            positions: Integers, each in the range of its permutation; shape (m,).
            which: The number of each one's permutation; shape (m,).

        Returns:
            int64, shape (m,).
        """
        given, which = np.asarray(positions, np.int64), np.asarray(which, np.int64)
        n = self.n[which]
        if given.size and (given.min() < 0 or (given >= n).any()):
            raise IndexError("position outside its permutation")
        out = np.empty(given.shape, np.int64)
        few = n <= 2**_FEW_BITS
        for chosen, permuted in (few, self._sorted), (~few, self._walked):
            if chosen.any():
                out[chosen] = permuted(given[chosen], which[chosen])
        return out

    def _sorted(self, positions: Indices, which: Indices) -> Indices:
        width = min(int(self.n.max()), 2**_FEW_BITS)
        rows = np.arange(width, dtype=np.uint64)
        # The number of a row stands in the low bits of its word, so that sorting words sorts rows.
        words = derived_keys(self._keys[:, None], rows) >> np.uint64(_FEW_BITS) << np.uint64(_FEW_BITS) | rows
        words[rows >= self.n[:, None].astype(np.uint64)] = _WORD  # rows that are not there come last
        words.sort(axis=1)
        return (words[which, positions] & np.uint64(2**_FEW_BITS - 1)).astype(np.int64)

    def _walked(self, positions: Indices, which: Indices) -> Indices:
        keys = derived_keys(self._keys, np.arange(ROUNDS)[:, None])
        n = self.n[which]
        if (n == n[0]).all():
            n = n[:1]  # one for all takes less time
        # The exponent of n − 1 as a float is its bit length (up to 2⁵³, where floats begin to round).
        bits = np.frexp((n - 1).astype(np.float64))[1]
        return _Network(n.astype(np.uint64), bits.astype(np.uint64), keys[:, which]).walked(positions, _FORWARD)


class _Network:
    """The network and the walks through it, for a block of m values.

    Args:
        n: How many elements: one number for all values, or one for each; shape (1,) or (m,).
        bits: How many bits hold ``n - 1``; likewise.
        keys: The key of each round; shape (ROUNDS, 1) or (ROUNDS, m).
    """

    def __init__(self, n: Words, bits: Words, keys: Words) -> None:
        one, bits = np.uint64(1), np.maximum(bits, np.uint64(_LEAST_BITS))
        self.n, self._bits, self._keys = n, bits, keys
        self._low_bits: Words = bits >> one
        self._low_mask = (one << self._low_bits) - one
        self._high_mask = (one << (bits - self._low_bits)) - one

    def walked(self, values: Indices, rounds: range) -> Indices:
        """Where the walks from these values end; the order of ``rounds`` says in which direction they go."""
        out = self.once(values.astype(np.uint64), rounds)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            some = self._of(outside)
            again = some.once(out[outside], rounds)
            out[outside] = again
            outside = outside[again >= some.n]
        return out.astype(np.int64)

    def _of(self, chosen: Indices) -> _Network:
        """The network of some of the values."""
        if self._keys.shape[-1] == 1 == self.n.size:
            return self
        n, bits = (part if part.size == 1 else part[chosen] for part in (self.n, self._bits))
        return _Network(n, bits, self._keys[:, chosen])

    def once(self, values: Words, rounds: range) -> Words:
        """The values after one step of their walks."""
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
