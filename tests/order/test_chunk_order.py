"""The order by chunks; and what it, a permutation and draws by weight have in common."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.chunks import all_of, chunk_numbers, chunks_of, keys, layouts, weighted
from support.plans import plan_of

from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun, runs_of
from lit_async_data.order.permutation import Permutation, derived_key
from lit_async_data.order.weights import WeightedChunkOrder, Weights

widths, lengths = st.integers(1, 40), st.integers(1, 300)


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=30))
def test_chunks_of_one_size_that_follow_each_other_are_one_run(counts):
    runs = runs_of(np.array(counts))
    assert [len(chunk) for chunk in chunks_of(runs)] == counts
    assert all(one.rows != other.rows for one, other in itertools.pairwise(runs))


def keyed_rows(n, key):
    if n > 32:
        return Permutation(n, key)(np.arange(n)).tolist()
    return sorted(range(n), key=lambda row: (derived_key(key, row) >> 5, row))


def reference_order(runs, width, key):
    """The definition: groups of chunks, dealt round-robin from all chunks of the group that have samples left."""
    chunks = chunks_of(runs)
    order = Permutation(len(chunks), derived_key(key, 0))(np.arange(len(chunks))).tolist()
    row_key = derived_key(key, 1)
    for begin in range(0, len(order), width):
        dealt = [
            [chunks[chunk][row] for row in keyed_rows(len(chunks[chunk]), derived_key(row_key, chunk))]
            for chunk in order[begin : begin + width]
        ]
        while dealt:
            for chunk in dealt:
                yield chunk.pop(0)
            dealt = [chunk for chunk in dealt if chunk]


@given(layouts, widths, keys)
@example([ChunkRun(1, 10**18)], 64, 1)  # one chunk, far from full
@example([ChunkRun(100, 1)], 10**9, 1)  # one group of everything
@example([ChunkRun(640, 10)], 64, 1)  # one group, and just full
@example([ChunkRun(641, 10)], 64, 1)  # a last group of one chunk of one sample
@example([ChunkRun(5000, 1), ChunkRun(100, 50)], 64, 1)  # odd chunks are longer; more chunks than the table holds
def test_samples_come_in_the_order_of_the_reference(runs, width, key):
    order = ChunkOrder(runs, width, key)
    assert order.length == sum(run.samples for run in runs)
    assert all_of(order).tolist() == list(reference_order(runs, width, key))


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 10**6])
@pytest.mark.parametrize("length", [10**12, 10**12 + 5])
def test_a_million_million_samples_take_no_longer(length, rows):
    """Groups at both ends, in the middle and around the short chunk hold exactly their chunks: O(1) must find them."""
    width = 64 if rows < 10**6 else 2
    order = ChunkOrder([ChunkRun(length, rows)], width, key=9)
    short = int(Permutation(order.chunks, derived_key(9, 0)).inverse([order.chunks - 1])[0]) // order.width
    near = [0, order.groups // 2, short - 1, short, short + 1, order.groups - 2, order.groups - 1]
    for number in {number for number in near if 0 <= number < order.groups}:
        group = order.group(number)
        if rows < 10**6:
            firsts = order.first_of(order.places_of(number))
            held = np.concatenate([np.arange(first, min(first + rows, length)) for first in firsts])
            assert np.array_equal(np.sort(order.samples(np.arange(group.start, group.stop))), np.sort(held))
        assert order.group_of(group[0]) == order.group_of(group[-1]) == number
        assert group.start == 0 or order.group_of(group.start - 1) == number - 1
    assert order.group(order.groups - 1).stop == length


def test_a_run_of_nothing_is_refused():
    for samples, rows in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"{samples} samples in chunks of {rows}"):
            ChunkRun(samples, rows)


@given(layouts, weighted(), st.tuples(widths, lengths, st.integers(1, 10**15)), keys, st.data())
def test_a_position_gives_the_same_sample_alone_as_in_a_block(runs, case, sizes, key, data):
    (weighed, weights), (width, length, n) = case, sizes
    chunked = ChunkOrder(runs, width, key)
    drawing = {"length": length, "weights": Weights(weights)}
    for order, positions, samples in (
        (Permutation(n, key), n, n),
        (chunked.samples, chunked.length, chunked.length),
        (plan_of(batch_size=1, shuffle="global", seed=key, epoch=0, **drawing).deck.samples, length, len(weights)),
        (WeightedChunkOrder(weighed, width, key=key, **drawing).samples, length, len(weights)),
    ):
        places = np.array(data.draw(st.lists(st.integers(0, positions - 1), min_size=1, max_size=20)))
        together = order(places)
        assert together.dtype == np.int64
        assert 0 <= together.min() <= together.max() < samples
        assert [int(order(place[None])[0]) for place in places] == together.tolist()
        if positions < 10**5:
            assert order(np.arange(positions))[places].tolist() == together.tolist()


@pytest.mark.parametrize("by_weight", [False, True])
@given(weighted(), widths, lengths, keys)
def test_a_whole_group_is_dealt_before_the_next_and_needs_the_chunks_it_names(by_weight, case, width, length, key):
    runs, weights = case
    order = (
        WeightedChunkOrder(runs, width, Weights(weights), length, key) if by_weight else ChunkOrder(runs, width, key)
    )
    chunks, numbers, samples, seen, begin = chunks_of(runs), chunk_numbers(runs), all_of(order), set(), 0
    for number in range(order.groups):
        group, begun = order.group(number), order.first_of(order.places_of(number)).tolist()
        assert group.start == begin
        # In the order of the first samples: the chunk needed first is decoded first.
        assert begun == [chunks[c].start for c in dict.fromkeys(numbers[samples[group.start : group.stop]].tolist())]
        assert 1 <= len(begun) <= order.width <= width
        assert not seen & set(begun)
        seen |= set(begun)
        assert {order.group_of(position) for position in (group[0], group[-1])} == {number}
        begin = group.stop
    assert begin == order.length


@pytest.mark.parametrize("by_weight", [False, True])
def test_positions_out_of_range_are_refused(by_weight):
    runs = [ChunkRun(100, 10)]
    order = WeightedChunkOrder(runs, 4, Weights(np.ones(100)), 100, 0) if by_weight else ChunkOrder(runs, 4, 0)
    for position in (100, -1):
        for refused in (lambda at: order.samples([0, at]), order.group_of):
            with pytest.raises(IndexError, match="outside an order of 100"):
                refused(position)
    assert (order.samples([]).size, order.samples([]).dtype) == (0, np.int64)
