"""Sequences of different lengths in the global heap of a file."""

import h5py
import numpy as np

STORED = {
    "contiguous": {},
    "chunks": {"chunks": (7,)},
    "gzip": {"chunks": (16,), "compression": "gzip", "shuffle": True},  # which libhdf5 skips, as it cannot be undone
}


def sequences(dtype, count=60):
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 40, count)
    lengths[[3, 5]] = 0, 900  # one is larger than a collection of the heap
    return [generator.integers(0, 100, length).astype(dtype) for length in lengths]


def written(path, values, dtype, **options):
    """In the heap as x, and one after the other as z."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (len(values),), h5py.vlen_dtype(dtype), **options)
        for row, value in enumerate(values):
            dataset[row] = value
        file["y"] = np.arange(len(values))
        file["z/values"], file["z/offsets"] = np.concatenate(values), np.cumsum([0, *map(len, values)])


def check(source, values):
    batch = source.__getitems__(range(len(values)))
    for one, value in zip(batch, values, strict=True):
        assert one["x_length"] == len(value)
        assert np.array_equal(one["x"][: len(value)], value)
        assert not one["x"][len(value) :].any()
