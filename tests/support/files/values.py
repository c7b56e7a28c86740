"""Random values of any type, with every bit pattern."""

import math

import numpy as np


def some(shape, dtype="u1", seed=0):
    """Random bit patterns: floats include NaNs with payloads and infinities, integers their extremes."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(seed)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    return np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
