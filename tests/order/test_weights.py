"""`Weights`: what is refused, which sample a number draws; weights with which classes are equally frequent."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.chunks import some_weight

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.weighted import WeightedChunkOrder
from lit_async_data.order.weights import Weights, class_weights, drawn_between

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
        np.array([0, 1, 1, 1], "u1"),
        np.array([-5, 2**62, 2**62, 2**62]),
        np.array([True, False, False, False]),
        ["a", "b", "b", "b"],
        np.array([b"a", b"b", b"b", b"b"]),
        np.array(["a", "b", "b", "b"], object),  # text as h5py reads it
        np.array([b"a", b"b", b"b", b"b"], object),
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
        (np.array([0, 1, np.nan, np.nan], "f4"), r"weights: .*float32 numbers \(that of sample 2 is NaN\)"),
        (np.zeros((4, 1), int), "weights: several labels per sample are 1 .*, but no sample has one"),
        ([[1, 0], [3, 2]], "weights: several labels per sample are 1 .*, but they are int64, also 3"),
        (np.zeros((4, 1, 1)), r"weights: the array has shape \(4, 1, 1\)"),
        ([], r"weights: the array has shape \(0,\)"),
        ([[1], [2, 3]], "weights: not an array: .*give one value"),
        (np.array(["a", b"a"], object), "weights: the labels are of type object"),
        (np.array(["2020-01-01"], "M8[D]"), "weights: the labels are of type datetime64"),
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
        (np.ones((2, 2)), r"weights: the array has shape \(2, 2\)"),
        ([], r"weights: the array has shape \(0,\)"),
        (["1", "2"], "weights: they are of type <U1"),
        ([None, 1], "weights: they are of type object"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Weights(weights)


def test_a_wrong_number_of_weights_is_refused():
    assert Weights([1, 2], samples=2).samples == 2
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


def test_chunks_are_weighed_once():
    table = Weights(np.arange(10))
    runs = [ChunkRun(10, 4)]
    chunks = table.chunks(runs)
    assert table.chunks(list(runs)) is chunks
    assert (chunks.firsts.tolist(), chunks.rows.tolist(), chunks.sums.tolist()) == ([0, 4, 8], [4, 4, 2], [6, 22, 17])
    assert table.chunks([ChunkRun(10, 1)]).firsts.tolist() == list(range(1, 10))  # the first has no weight
    assert table.chunks(runs).firsts.tolist() == [0, 4, 8]


@given(st.lists(some_weight, min_size=1, max_size=200), st.lists(st.floats(0, ALMOST_ONE), max_size=20))
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


@pytest.mark.parametrize(
    "weights", [[5e-324, 0, 0], [0, 5e-324, 0], [0, 0, 5e-324], [5e-324, 5e-324, 0], [1, 1e-17, 0]]
)
def test_a_product_that_rounds_up_to_the_sum_does_not_leave_the_samples(weights):
    table = Weights(weights)
    sample = table.drawn(np.array([ALMOST_ONE]))[0]
    assert sample == max(np.flatnonzero(np.diff(table.edges)))
    assert weights[sample] > 0


def test_in_the_middle_of_a_sum_a_product_does_not_reach_the_next_chunk():
    """3 · (1 − 2⁻⁵³) + 2⁵³ rounds up to the edge where the next chunk begins."""
    edges = np.array([0.0, 2.0**53, 2.0**53 + 4, 2.0**53 + 8])
    assert drawn_between(edges, np.array([1]), np.array([2]), np.array([ALMOST_ONE])).tolist() == [1]


@pytest.mark.parametrize("samples", [63, 64, 65, 128, 1000])
def test_as_many_samples_as_draws_are_found_in_tables_of_any_length(samples):
    """The middle of each sample's interval maps to that sample: the coarse table has no gaps."""
    table = Weights(np.ones(samples))
    assert table.drawn((np.arange(samples) + 0.5) / samples).tolist() == list(range(samples))
    assert table.drawn(np.arange(samples) / samples + 1e-9).tolist() == list(range(samples))
