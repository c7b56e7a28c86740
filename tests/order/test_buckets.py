import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.errors import ConfigError
from lit_async_data.order.buckets import Buckets

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80).map(np.array)


def waste(lengths, bounds):
    return int(np.asarray(bounds)[np.searchsorted(bounds, lengths)].sum() - lengths.sum())


@given(LENGTHS, st.integers(1, 9), st.integers(60, 300), st.integers(1, 5), st.none() | st.integers(0, 3))
def test_batches_hold_each_sample_once_within_their_budget(lengths, batch_size, elements, count, key):
    buckets = Buckets.of(lengths, batch_size, elements, count)
    samples, edges = buckets.batches(key)
    assert sorted(samples.tolist()) == list(range(len(lengths)))
    assert (edges[0], edges[-1]) == (0, len(lengths))
    for first, end in itertools.pairwise(edges.tolist()):
        batch = samples[first:end]
        width = buckets.width(batch)
        assert len(set(buckets.numbers[batch].tolist())) == 1
        assert lengths[batch].max() <= width
        assert 0 < len(batch) <= batch_size
        assert len(batch) * width <= min(elements, buckets.elements)
    assert len(edges) == len(buckets.batches(7)[1])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30).map(np.array), st.integers(1, 4))
def test_the_bounds_need_the_least_padding(lengths, count):
    found = Buckets.of(lengths, 4, None, count).bounds
    each = np.unique(lengths)
    choices = itertools.combinations(each[:-1].tolist(), min(count, len(each)) - 1)
    assert waste(lengths, found) == min(waste(lengths, np.array([*choice, each[-1]])) for choice in choices)
    assert len(found) <= count


def test_buckets_beyond_the_longest_sample_cost_nothing():
    buckets = Buckets.of(np.array([0, 3, 40]), 8, 100, [8, 64, 10**9])
    assert buckets.bounds.tolist() == [8, 64]
    assert buckets.elements == 64
    assert len(buckets.batches(1)[1]) == 3


@pytest.mark.parametrize(
    ("elements", "given", "option", "text"),
    [
        (50, 2, "batch_elements", "sample 103 alone takes 90 elements"),
        (None, [10, 80], "buckets", "sample 103 has length 90, and the last bucket ends at 80"),
    ],
)
def test_a_sample_that_is_too_long_is_named(elements, given, option, text):
    with pytest.raises(ConfigError, match=text) as caught:
        Buckets.of(np.array([10, 10, 10, 90]), 4, elements, given, lambda samples: samples + 100)
    assert caught.value.option == option


def test_epochs_put_other_samples_together():
    buckets = Buckets.of(np.arange(400) % 40, 16, None, 4)
    one, two = ({frozenset(each) for each in np.split(*buckets.batches(key))} for key in (1, 2))
    assert not (one & two) - {frozenset()}
