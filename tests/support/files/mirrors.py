"""A mirror of seven blocks and a part, and the bytes that go into it."""

import os

import numpy as np

from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import BLOCK, Mirror

WHICH = FileIdentity.of_object("x", 1, "tag")
SIZE = 7 * BLOCK + 123
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def opened(folder, size=SIZE, ring=None):
    names = (os.path.join(folder, name) for name in ("x.data", "x.crc"))
    return Mirror(*(os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names), size, ring)


def get(begin, end):
    return memoryview(DATA[begin:end].tobytes())


def at(*blocks):
    begins = np.array(blocks, np.int64) * BLOCK
    return begins, np.minimum(begins + BLOCK, SIZE)
