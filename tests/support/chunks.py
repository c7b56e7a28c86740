"""Chunks by their definition, counted one by one, for tests of orders over them."""

import numpy as np


def chunks_of(runs):
    """The samples of each chunk."""
    chunks, begin = [], 0
    for run in runs:
        end = begin + run.samples
        chunks += [range(first, min(first + run.rows, end)) for first in range(begin, end, run.rows)]
        begin = end
    return chunks


def chunk_numbers(runs):
    """The chunk of each sample."""
    chunks = chunks_of(runs)
    return np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])


def all_of(order):
    return order.samples(np.arange(order.length))
