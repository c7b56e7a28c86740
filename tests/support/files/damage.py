"""Datasets of chunks whose records, or other bytes of the file, are changed; and system calls that fail."""

import os
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from lit_async_data.errors import CorruptError
from support.files.hdf5 import create
from support.sources.oracle import read_from

VALUES = np.random.default_rng(1).integers(0, 10**6, (50, 6)).astype("<i4")
ODD = h5py.h5t.STD_I32LE.copy()  # numpy has no such type, so h5py must read it
ODD.set_precision(24)
LOCKED = {
    "scale-offset": {"filters": ["scaleoffset"]},
    "n-bit": {"filters": ["nbit"], "dtype": ODD},
}


def made(path, filters=(), dtype="<i4", shape=(50, 6), maxshape=None, **options):
    """Writes a dataset of chunks of (5, 6); returns the record of the chunk of rows 25 to 29."""
    with h5py.File(path, "w", **options) as file:
        dataset = create(file, "data", shape, dtype, chunks=(5, 6), filters=filters, maxshape=maxshape)
        dataset[...] = np.resize(VALUES, shape)
        file.flush()
        found = []
        dataset.id.chunk_iter(lambda info: found.append(info) if info.chunk_offset == (25, 0) else None)
    return found[0] if found else None  # libhdf5 lists wrong ones if only the second axis is unlimited


def patch(path, at, layout, value):
    content = bytearray(Path(path).read_bytes())
    struct.pack_into(layout, content, at, value)
    Path(path).write_bytes(content)


def damage_chunk(path, name, corner, content=b"\xff" * 8, skip=2):
    """Overwrites bytes of a stored chunk, behind its first ones."""
    with h5py.File(path) as file:
        begin = file[name].id.get_chunk_info_by_coord(corner).byte_offset
    with open(path, "r+b") as file:
        file.seek(begin + skip)
        file.write(content)


def key_of(path, info, user_block=0):
    """Where the record of a chunk begins in a B-tree of version 1: size, mask, corner, 0, address."""
    return Path(path).read_bytes().index(struct.pack("<Q", info.byte_offset - user_block)) - 32


def read_all(path):
    return read_from(str(path), {"data": "data"})["data"]


def check_refused(path, message):
    with pytest.raises(CorruptError, match=rf"^{path}:/data{message}.*restore") as caught:
        read_all(path)
    assert (caught.value.file, caught.value.dataset) == (str(path), "data")


def failing(real, number, times):
    """A system call that fails a number of times, then works."""
    left = [times]

    def call(*args, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    return call
