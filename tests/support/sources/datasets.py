"""Samples of datasets, and errors of their sources."""

import math

import numpy as np
import pytest


def read(source, samples, keys=None):
    """What `read_into` makes of arrays full of rubbish."""
    out = {}
    for key in keys or source.spec.fields:
        shape, dtype = (len(samples), *source.spec[key].stored_shape), source.spec[key].dtype
        out[key] = np.full(math.prod(shape) * dtype.itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
    source.read_into(np.asarray(samples, np.int64), out)
    return out


def refused(kind, said, build):
    with pytest.raises(kind, match=said) as caught:
        build()
    assert type(caught.value) is kind
    return caught.value
