from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.permutation import Permutation, derived_key

sizes = st.integers(1, 3000)
keys = st.integers(0, 2**64 - 1)


@given(sizes, keys)
def test_every_element_comes_once(n, key):
    assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n))


@given(sizes, keys)
def test_the_inverse_finds_every_position(n, key):
    shuffled = Permutation(n, key)
    assert np.array_equal(shuffled.inverse(shuffled(np.arange(n))), np.arange(n))


@given(st.integers(1, 10**15), keys, st.data())
def test_a_position_alone_is_the_position_in_the_whole(n, key, data):
    shuffled = Permutation(n, key)
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)))
    together = shuffled(positions)
    assert [int(shuffled(position)) for position in positions] == together.tolist()
    assert together.min() >= 0
    assert together.max() < n


@given(st.integers(30, 3000), keys)
def test_another_key_is_another_order(n, key):
    assert not np.array_equal(Permutation(n, key)(np.arange(n)), Permutation(n, key ^ 1)(np.arange(n)))


@pytest.mark.parametrize("n", [2, 3, 5, 10, 64, 65])
def test_every_element_is_equally_likely_at_every_position(n):
    """Chi-squared over 4000 keys; the mean of the statistic is its (n − 1)² degrees of freedom."""
    keys = 4000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), Permutation(n, derived_key(key, 0))(np.arange(n))] += 1
    expected = keys / n
    freedom = (n - 1) ** 2
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [100, 1797, 4096, 5000])
def test_neighbours_end_up_apart(n):
    """Distances between successive elements have the mean of a random order, n/3, and no sample stays in place more
    often than by chance."""
    distances, fixed = [], []
    for key in range(50):
        order = Permutation(n, derived_key(key, 7))(np.arange(n))
        distances.append(np.abs(np.diff(order)).mean() / n)
        fixed.append((order == np.arange(n)).sum())
    assert abs(np.mean(distances) - 1 / 3) < 0.01
    assert np.mean(fixed) < 2


def test_a_position_outside_is_refused():
    with pytest.raises(IndexError, match="5 elements"):
        Permutation(5, 0)([5])


def test_no_elements_are_refused():
    with pytest.raises(ValueError, match="0 elements"):
        Permutation(0, 0)
