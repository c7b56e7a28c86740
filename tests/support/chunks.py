"""Chunks by their definition, counted one by one, for tests of orders over them."""

import numpy as np
from hypothesis import strategies as st

from lit_async_data.order.chunk_order import ChunkRun

keys = st.integers(0, 2**64 - 1)
few_runs = st.lists(st.builds(ChunkRun, samples=st.integers(1, 300), rows=st.integers(1, 80)), min_size=1, max_size=6)
# Many files, in which most chunks have the usual number of rows: the shifts behind uneven groups matter here.
like_files = st.builds(
    lambda samples, rows: [ChunkRun(n, rows) for n in samples],
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(1, 20),
)
layouts = few_runs | like_files
# Powers of two, values too small to change a sum, and many zeros, so that runs of zeros occur.
some_weight = st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0, 0.1, 1 / 3, 1e-9, 1e9, 1e-17, 5e-324])


@st.composite
def weighted(draw):
    """Runs, and weights for their samples that are not all 0."""
    builds = st.builds(ChunkRun, samples=st.integers(1, 40), rows=st.integers(1, 15))
    runs = draw(st.lists(builds, min_size=1, max_size=5))
    samples = sum(run.samples for run in runs)
    return runs, draw(st.lists(some_weight, min_size=samples, max_size=samples).filter(any))


def chunks_of(runs):
    chunks, begin = [], 0
    for run in runs:
        end = begin + run.samples
        chunks += [range(first, min(first + run.rows, end)) for first in range(begin, end, run.rows)]
        begin = end
    return chunks


def chunk_numbers(runs):
    chunks = chunks_of(runs)
    return np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])


def all_of(order):
    return order.samples(np.arange(order.length))
