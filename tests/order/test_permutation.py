import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import keys

from lit_async_data.order.permutation import Permutation, Permutations, derived_key, derived_keys

sizes = st.integers(1, 3000)


@given(sizes, keys)
def test_every_element_comes_once_where_the_inverse_finds_it(n, key):
    shuffled = Permutation(n, key)
    assert np.array_equal(shuffled.inverse(shuffled(np.arange(n))), np.arange(n))


def test_a_position_outside_is_refused():
    with pytest.raises(IndexError, match="outside an order of 5"):
        Permutation(5, 0)([5])


def test_the_order_never_changes_between_versions():
    """Otherwise a training could not be resumed with a newer version."""
    assert Permutation(10, 0)(np.arange(10)).tolist() == [7, 8, 2, 4, 1, 6, 5, 9, 3, 0]
    far = Permutation(10**12, 7)([0, 1, 2, 10**12 - 1]).tolist()
    assert far == [804138359754, 228798818488, 941449478152, 988962532007]


@given(keys, st.lists(keys, max_size=20))
def test_keys_derived_together_are_those_derived_alone(first, seconds):
    assert derived_keys(first, seconds).tolist() == [derived_key(first, second) for second in seconds]
    assert derived_keys(seconds, first).tolist() == [derived_key(second, first) for second in seconds]


ranges = st.integers(1, 100) | st.integers(1, 10**15) | st.sampled_from([32, 33])
many = st.lists(st.tuples(ranges, keys), min_size=1, max_size=10)


@given(many, st.data())
def test_many_permutations_are_each_what_they_are_alone(shuffles, data):
    """Above 32 elements they equal a `Permutation`; smaller ones sort their elements by hash."""
    shuffled = Permutations(*zip(*shuffles))
    which = data.draw(st.lists(st.integers(0, len(shuffles) - 1), max_size=50))
    positions = [data.draw(st.integers(0, shuffles[number][0] - 1)) for number in which]
    alone = []
    for number, position in zip(which, positions):
        n, key = shuffles[number]
        by_hash = sorted(range(n), key=lambda row: (derived_key(key, row) >> 5, row)) if n <= 32 else None
        alone.append(by_hash[position] if by_hash else int(Permutation(n, key)(position)))
    assert shuffled(positions, which).tolist() == alone


@pytest.mark.parametrize("n", [2, 3, 5, 10, 32, 33])
def test_in_many_permutations_every_element_is_equally_likely_at_every_position(n):
    """Chi-squared over each pair of neighbours; the mean of the statistic is its degrees of freedom."""
    count = 20_000
    drawn = Permutations(np.full(count, n), derived_keys(1, np.arange(count)))(
        np.tile(np.arange(n), count), np.arange(count).repeat(n)
    ).reshape(count, n)
    for first in range(n - 1):
        pairs = np.bincount(drawn[:, first] * n + drawn[:, first + 1], minlength=n * n).reshape(n, n)
        assert not pairs.diagonal().any()
        expected, freedom = count / (n * (n - 1)), n * (n - 1) - 1
        chi2 = ((pairs - expected) ** 2 / expected).sum() - n * expected  # without the diagonal, which is impossible
        assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)
