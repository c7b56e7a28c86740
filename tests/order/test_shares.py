"""Several readers share each batch: every sample has one reader, and every chunk is decoded by one."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.plan import EpochPlan, Share
from lit_async_data.order.shares import Shares
from lit_async_data.order.weights import Weights

few_runs = st.lists(st.builds(ChunkRun, samples=st.integers(3, 90), rows=st.integers(1, 20)), min_size=1, max_size=4)


@st.composite
def plans(draw, shuffles=("none", "chunk", "global")):
    runs = draw(few_runs)
    length = sum(run.samples for run in runs)
    world_size = draw(st.integers(1, 3))
    return EpochPlan(
        length=length,
        batch_size=draw(st.integers(1, 40)),
        shuffle=draw(st.sampled_from(shuffles)),
        seed=draw(st.integers(0, 9)),
        epoch=draw(st.integers(0, 2)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        start=draw(st.integers(0, length - world_size)),
        runs=tuple(runs),
        shuffle_chunks=draw(st.integers(1, 12)),
        weights=Weights(np.arange(1, length + 1), length) if draw(st.booleans()) else None,
    )


def batches(plan):
    for step in range(len(plan)):
        yield step, plan.bounds(step)[0], plan.batch(step)


@given(plan=plans(), readers=st.integers(2, 5))
def test_each_sample_has_one_reader_of_those_there_are(plan, readers):
    shares = Shares(ChunkExtents(plan.runs))
    for _, first, samples in batches(plan):
        found = shares.readers(plan, first, samples, readers)
        assert found.shape == samples.shape
        assert ((found >= 0) & (found < readers)).all()
        own = [shares.own(plan, first, samples, Share(reader, readers)) for reader in range(readers)]
        assert sorted(np.concatenate(own).tolist()) == list(range(len(samples)))
        assert all((np.diff(places) > 0).all() for places in own)


@given(plan=plans(), readers=st.integers(2, 5), kept=st.booleans())
def test_all_samples_of_a_chunk_have_the_same_reader_all_epoch_and_in_the_next_where_chunks_are_kept(
    plan, readers, kept
):
    extents = ChunkExtents(plan.runs)
    readers_of = collections.defaultdict(set)
    for each in [plan, dataclasses.replace(plan, epoch=1, _cache=[], _begun=[])][: 1 + kept]:
        for _, first, samples in batches(each):
            found = Shares(extents, kept).readers(each, first, samples, readers)
            for chunk, reader in zip(extents.chunks_of(samples).tolist(), found.tolist(), strict=True):
                readers_of[chunk].add(reader)
    assert all(len(found) == 1 for found in readers_of.values())


@given(plan=plans(shuffles=("chunk",)), readers=st.integers(2, 5), kept=st.booleans())
def test_what_is_decoded_ahead_by_a_reader_is_what_it_will_read(plan, readers, kept):
    """`due` finds the reader of a chunk by its place in the order of chunks."""
    order, extents = plan.chunk_order, ChunkExtents(plan.runs)
    shares, reader_of_chunk = Shares(extents, kept), {}
    for number in range(order.groups):
        places = order.places_of(number)
        chunks = extents.chunks_of(order.first_of(places))
        reader_of_chunk.update(zip(chunks.tolist(), shares.readers_of(plan, places, readers).tolist(), strict=True))
    for _, first, samples in batches(plan):
        found = shares.readers(plan, first, samples, readers)
        expected = [reader_of_chunk[chunk] for chunk in extents.chunks_of(samples).tolist()]
        assert found.tolist() == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_chunks_of_a_group_fall_evenly_to_the_readers_of_each_rank(world_size):
    for rank in range(world_size):
        plan = EpochPlan(
            length=6400,
            batch_size=16,
            shuffle="chunk",
            seed=1,
            epoch=0,
            rank=rank,
            world_size=world_size,
            runs=(ChunkRun(6400, 100),),
            shuffle_chunks=16,
        )
        shares = Shares(ChunkExtents(plan.runs))
        for _, first, samples in batches(plan):
            assert np.bincount(shares.readers(plan, first, samples, 4)).tolist() == [4, 4, 4, 4]
