"""How well chunks mix, by counts of what orders deal; and how many ranks decode each chunk."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import all_of, chunk_numbers, keys, layouts

from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun
from lit_async_data.order.mixing import evenness, mixing, ranks_per_chunk
from lit_async_data.order.weighted import WeightedChunkOrder
from lit_async_data.order.weights import Weights

widths = st.integers(1, 40)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), keys)
def test_a_world_size_that_divides_the_width_gives_each_rank_its_own_chunks(groups, rows, times, world_size, key):
    width = times * world_size
    order = ChunkOrder([ChunkRun(groups * width * rows, rows)], width, key)
    assert ranks_per_chunk(order, world_size) == 1
    chunks = all_of(order) // rows
    own = [set(chunks[rank::world_size]) for rank in range(world_size)]
    assert sum(map(len, own)) == len(set.union(*own)) == order.chunks


@given(st.integers(1, 5), st.integers(1, 20), widths, st.integers(1, 12), keys)
def test_otherwise_each_chunk_goes_to_as_many_ranks_as_predicted(groups, rows, width, world_size, key):
    order = ChunkOrder([ChunkRun(groups * width * rows, rows)], width, key)
    chunks = all_of(order) // rows
    ranks = Counter(chunk for chunk, _ in set(zip(chunks.tolist(), (np.arange(order.length) % world_size).tolist())))
    assert set(ranks.values()) == {ranks_per_chunk(order, world_size)}


@given(layouts, widths, keys, st.integers(1, 50), st.integers(1, 4))
def test_mixing_of_chunks_equals_a_count(runs, width, key, batch_size, world_size):
    """The denominator comes from another form of the same formula, for chunks of the mean size."""
    order = ChunkOrder(runs, width, key)
    own = chunk_numbers(runs)[all_of(order)][::world_size]
    size = min(batch_size, len(own))
    distinct = [len(set(own[begin : begin + size])) for begin in range(0, len(own) - size + 1, size)]
    rows = order.length / order.chunks
    arguments = [order.length - rows + 1, order.length - size + 1, order.length + 1, order.length - rows - size + 1]
    signs = [1, 1, -1, -1]
    missed = 0 if arguments[3] <= 0 else math.exp(sum(s * math.lgamma(a) for s, a in zip(signs, arguments)))
    expected = np.mean(distinct) / (order.chunks * (1 - missed))
    assert mixing(order, batch_size, world_size) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("width", "score"), [(16, 16 / 256), (64, 64 / 256), (256, 1.0), (1024, 1.0)])
def test_mixing_of_a_long_order_is_that_of_its_width(width, score):
    order = ChunkOrder([ChunkRun(10**12, 64)], width, key=0)
    assert mixing(order, batch_size=256) == pytest.approx(score, rel=1e-3)


RUNS = [ChunkRun(31, 5), ChunkRun(29, 4)]
WEIGHTS = Weights(np.random.default_rng(5).choice([0, 0.5, 1, 1, 3, 10], 60))


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixing_of_draws_equals_a_count(world_size):
    order = WeightedChunkOrder(RUNS, 3, WEIGHTS, 3000, key=8)
    own = chunk_numbers(RUNS)[all_of(order)][::world_size]
    batches = own[: own.size // 16 * 16].reshape(-1, 16)
    distinct = np.mean([len(set(batch)) for batch in batches.tolist()])
    assert mixing(order, 16, world_size) == pytest.approx(distinct / order.chunks_per_global_batch(16))


def test_one_group_of_everything_mixes_as_the_global_order():
    assert mixing(WeightedChunkOrder(RUNS, 100, WEIGHTS, 100_000, key=1), 16) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("patients", "even"), [([0] * 8, 0.0), ([0, 0, 0, 0, 1, 1, 1, 1], 0.0), ([0, 1] * 4, 1.0)])
def test_a_field_is_even_if_its_batches_are_those_of_a_global_shuffle(patients, even):
    found = evenness(np.reshape(patients, (2, 4)), np.reshape([0, 1, 1, 0, 1, 0, 1, 0], (2, 4)))
    assert found == pytest.approx(even)
    assert evenness(np.zeros((2, 4)), np.zeros((2, 4))) == 1  # it has only one value
