"""Compressed images for reader processes, which may share each batch of them."""

import contextlib

import numpy as np
import pytest

from lit_async_data import HDF5Source


@pytest.fixture
def storage():
    return {"chunks": (16, 8, 8), "compression": "gzip"}


@pytest.fixture
def stored(h5, storage):
    images = np.random.default_rng(0).integers(0, 99, (100, 8, 8), np.uint8)
    path = h5(x={"data": images, **storage}, y=np.arange(100))
    with contextlib.closing(HDF5Source(path, {"x": "x", "y": "y"})) as source:
        yield source
