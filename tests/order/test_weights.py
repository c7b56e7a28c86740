"""`Weights`: what is refused, which sample a number draws; weights with which classes are equally frequent."""

import bisect
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.chunks import all_of, chunk_numbers, chunks_of, keys, some_weight, weighted
from support.plans import plan_of as epoch_plan

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Permutation, derived_key
from lit_async_data.order.weights import WeightedChunkOrder, Weights, class_weights, drawn_between

# The largest number that `uniform` returns.
ALMOST_ONE = 1 - 2.0**-53


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60))
def test_each_label_has_the_same_total(labels):
    weights = class_weights(labels)
    assert weights.dtype == np.float64
    assert weights.tolist() == [1 / labels.count(label) for label in labels]


@pytest.mark.parametrize(
    "labels",
    [
        np.array([-5, 2**62, 2**62, 2**62]),
        np.array([True, False, False, False]),
        ["a", "b", "b", "b"],
        np.array([b"a", b"b", b"b", b"b"], object),  # text as h5py reads it
        np.array(["a", "b", "b", "b"], np.dtypes.StringDType()),
    ],
)
def test_labels_may_be_numbers_or_text(labels):
    assert class_weights(labels).tolist() == [1, 1 / 3, 1 / 3, 1 / 3]


def test_each_of_several_labels_and_none_is_drawn_equally_often():
    labels = np.array([[1, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0], [0, -100, 0]])
    assert class_weights(np.where(labels == -100, np.nan, labels)).tolist() == class_weights(labels).tolist()
    assert class_weights(labels).tolist() == [1 / 2 + 1, 1 / 2, 1 / 2, 1 / 2, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.0, 1.0], "weights: the labels are float64 numbers, which seldom .* or leave weights out"),
        (np.array([0, 1, np.nan, np.nan], "f4"), r"weights: .*float32 numbers \(sample 2 has NaN\)"),
        (np.zeros((4, 1), int), "weights: give 1 for each label .*; no sample has a label"),
        ([[1, 0], [3, 2]], "weights: give 1 for each label .*; these are int64, such as 3"),
        (np.zeros((4, 1, 1)), r"weights: the array has shape \(4, 1, 1\)"),
        ([[1], [2, 3]], "weights: not an array: .*give one value"),
        (np.array(["a", b"a"], object), "weights: the labels are of type object"),
    ],
)
def test_labels_that_cannot_be_counted_are_refused(labels, message):
    with pytest.raises(ConfigError, match=message):
        class_weights(labels)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, np.nan, -1], "weights: sample 1 has nan; each must be a finite number from 0 on"),
        ([-1e-300, 1], "weights: sample 0 has -1e-300"),
        ([0, 0.0], "weights: all of them are 0"),
        ([1e308, 1e308], "weights: their sum exceeds the range of float64"),
        ([], r"weights: the array has shape \(0,\)"),
        (["1", "2"], "weights: they are of type <U1"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Weights(weights)


def test_a_wrong_number_of_weights_is_refused():
    with pytest.raises(ConfigError, match="weights: there are 2 for 3 samples"):
        Weights([1, 2], samples=3)
    with pytest.raises(ConfigError, match="weights: there are 2 for 3 samples"):
        WeightedChunkOrder([ChunkRun(3, 2)], 1, Weights([1, 2]), 10, key=0)


@pytest.mark.parametrize("dtype", ["?", "u1", ">f8", "g"])
def test_weights_may_be_of_any_type_of_number(dtype):
    weights = np.array([1, 0, 1], dtype)
    table = Weights(weights)
    weights[:] = 0  # the user may overwrite the array
    assert table.edges.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        table.edges[0] = 1


@given(st.lists(some_weight, min_size=1, max_size=200), st.lists(st.floats(0, ALMOST_ONE), max_size=20))
@example([5e-324, 0, 0], [])  # a product that rounds up to the sum does not leave the samples
@example([1, 1e-17, 0], [])
def test_the_ends_of_the_uniform_numbers_fall_on_samples_with_weight(weights, numbers):
    assume(any(weights))
    table = Weights(weights)
    samples = table.drawn(np.array([0.0, ALMOST_ONE, *numbers]))
    assert all(weights[sample] > 0 for sample in samples)
    assert samples[0] == next(i for i, weight in enumerate(weights) if weight)
    # The last that adds anything to the sum of those before it.
    assert samples[1] <= max(np.flatnonzero(np.diff(table.edges)))
    low, high = np.zeros(samples.size, np.int64), np.full(samples.size, len(weights))
    assert drawn_between(table.edges, low, high, np.array([0.0, ALMOST_ONE, *numbers])).tolist() == samples.tolist()


widths = st.integers(1, 12)
lengths = st.integers(1, 300)


def reference_uniform(key, position):
    return (derived_key(key, position) >> 11) / 2**53


def reference_draw(edges, first, end, number):
    """The last edge from ``first`` on and before ``end`` that is not above the scaled number."""
    sought = edges[first] + number * (edges[end] - edges[first])
    sought = min(sought, math.nextafter(edges[end], 0))
    return bisect.bisect_right(edges, sought) - 1


def sums(values):
    return [0.0, *itertools.accumulate(values)]


def reference_groups(runs, width, weights, length, key):
    """The definition: chunks, first position, end and chunk edges of each group that gets positions."""
    edges = sums(weights)
    chunks = [c for c in chunks_of(runs) if edges[c.stop] > edges[c.start]]
    chunks = [chunks[i] for i in Permutation(len(chunks), derived_key(key, 0))(np.arange(len(chunks)))]
    places = sums(edges[c.stop] - edges[c.start] for c in chunks)
    shift, begin, groups = reference_uniform(derived_key(key, 1), 0), 0, []
    for first in range(0, len(chunks), width):
        last = min(first + width, len(chunks))
        end = length if last == len(chunks) else min(math.floor(places[last] / places[-1] * length + shift), length)
        if end > begin:
            groups.append((chunks[first:last], begin, end, places[first : last + 1]))
        begin = end
    return groups


def reference_order(runs, width, weights, length, key):
    edges = sums(weights)
    for chunks, begin, end, places in reference_groups(runs, width, weights, length, key):
        for position in range(begin, end):
            number = reference_uniform(derived_key(key, 2), position)
            chunk = chunks[reference_draw(places, 0, len(chunks), number)]
            number = reference_uniform(derived_key(key, 3), position)
            yield reference_draw(edges, chunk.start, chunk.stop, number)


def plan_of(weights, length, seed):
    return epoch_plan(length=length, batch_size=1, shuffle="global", seed=seed, epoch=0, weights=Weights(weights)).deck


@given(weighted(), lengths, keys)
def test_samples_are_drawn_as_by_the_reference(case, length, key):
    _, weights = case
    edges, own = sums(weights), derived_key(derived_key(key, 0), 0)
    reference = [reference_draw(edges, 0, len(weights), reference_uniform(own, q)) for q in range(length)]
    assert all_of(plan_of(weights, length, key)).tolist() == reference


@given(weighted(), widths, lengths, keys)
def test_samples_from_chunks_are_drawn_as_by_the_reference(case, width, length, key):
    runs, weights = case
    order = WeightedChunkOrder(runs, width, Weights(weights), length, key)
    assert all_of(order).tolist() == list(reference_order(runs, width, weights, length, key))


@given(weighted(), widths, lengths, keys, st.tuples(st.integers(0, 4), st.integers(1, 5)))
def test_a_rank_needs_the_chunks_of_its_own_positions(case, width, length, key, ranks):
    (runs, weights), (rank, world_size) = case, ranks
    order = WeightedChunkOrder(runs, width, Weights(weights), length, key)
    firsts = np.array([chunk.start for chunk in chunks_of(runs)])[chunk_numbers(runs)]
    for number in range(order.groups):
        group = order.group(number)
        own = np.arange(group.start + rank, group.stop, world_size)
        needed = list(dict.fromkeys(firsts[order.samples(own)].tolist()))
        assert order.first_of(order.places_of(number, rank, world_size)).tolist() == needed


def test_a_very_long_group_needs_all_of_its_chunks():
    order = WeightedChunkOrder([ChunkRun(40, 10)], 3, Weights([1] * 10 + [0] * 10 + [1] * 20), 10**12, key=1)
    firsts = [order.first_of(order.places_of(number)).tolist() for number in range(order.groups)]
    assert sorted(itertools.chain(*firsts)) == [0, 20, 30]
    assert order.group(order.groups - 1).stop == 10**12
    assert order.group_of(10**12 - 1) == order.groups - 1
    assert sorted(order.first_of(order.places_of(0, 5, 10**7)).tolist()) == sorted(firsts[0])
    assert 0 <= order.samples([10**12 - 1])[0] < 40
