"""Datasets of several kinds of storage, and what they hold."""

import h5py
import numpy as np

ROWS = 20
STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": 6},
    "gzip": {"chunks": 6, "compression": "gzip"},
    "gzip rows": {"chunks": 1, "compression": "gzip", "shuffle": True},
}


def stored(values, storage="contiguous", **more):
    """Arguments of create_dataset, with chunks of this many rows."""
    arguments = dict(STORAGE[storage], data=values, **more)
    if "chunks" in arguments:
        arguments["chunks"] = (min(arguments["chunks"], len(values)), *values.shape[1:])
    return arguments


def in_every_way(values, name="{}"):
    return {name.format(storage): stored(values, storage) for storage in STORAGE}


def numbers(shape, dtype="i4"):
    return (np.arange(np.prod(shape)).reshape(shape) * 7 % 120).astype(dtype)


def set_attributes(path, name, **attributes):
    with h5py.File(path, "r+") as file:
        for key, value in attributes.items():
            file[name].attrs[key] = value


AT = 13  # the row with a bad value
HOLES = numbers((ROWS, 3))
HOLES[4, 1] = HOLES[11] = 121
