"""What a permutation, an order by chunks and draws by weight have in common."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import all_of, chunk_numbers, chunks_of, keys, layouts, weighted
from support.plans import plan_of

from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun
from lit_async_data.order.permutation import Permutation
from lit_async_data.order.weights import WeightedChunkOrder, Weights

widths, lengths = st.integers(1, 12), st.integers(1, 300)


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
