"""Decoding chunks without libhdf5, and so without its lock: deflate, shuffle, fletcher32.

A chunk's filters are undone in reverse order. What comes out has exactly the bytes of the chunk: fewer would leave
rubbish behind them, as they do in h5py, and more are refused before they are made.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from lit_async_data.errors import CorruptError
from lit_async_data.spec import Bytes

DEFLATE, SHUFFLE, FLETCHER32 = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32
# The one order in which these are applied; each may be missing.
ORDER = (SHUFFLE, DEFLATE, FLETCHER32)
# Bytes that fletcher32 puts behind a chunk.
SUM_BYTES = 4
# Words summed at once: their weighted sum stays far below 2**64.
_SUM_WORDS = 2**20


def _inflated_by_zlib(data: Any, nbytes: int) -> Any:
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise CorruptError(str(error)) from error


def _inflater() -> Callable[[Any, int], Any]:
    """libdeflate, 2 to 3 times as fast as zlib, if it is installed."""
    try:
        import deflate
    except ImportError:
        return _inflated_by_zlib

    def inflated(data: Any, nbytes: int) -> Any:
        try:
            return deflate.zlib_decompress(data, nbytes)
        except deflate.DeflateError as error:
            raise CorruptError(f"not {nbytes} bytes of deflate: {error}") from error

    return inflated


_inflated = _inflater()


@dataclasses.dataclass(frozen=True)
class FilterPipeline:
    """The filters of a dataset, in the order in which they were applied.

    Attributes:
        filters: Their numbers, a part of `ORDER`.
        itemsize: Bytes that shuffle took for one value.
        nbytes: Bytes of a decoded chunk.
    """

    filters: tuple[int, ...]
    itemsize: int
    nbytes: int

    def decoded(self, stored: Bytes, mask: int) -> Bytes:
        """The bytes of a chunk. Holds no lock while it inflates; safe from any thread.

        Args:
            stored: As they lie in the file, uint8.
            mask: Bit i says that filter i was left out for this chunk.

        Raises:
            CorruptError: They do not decode to exactly the bytes of a chunk, or their sum is wrong.
        """
        data: Any = stored
        for number in reversed(range(len(self.filters))):
            if mask >> number & 1:
                continue
            which = self.filters[number]
            if which == FLETCHER32:
                data = _summed(data)
            elif which == DEFLATE:
                data = np.frombuffer(_inflated(data, self.nbytes), np.uint8)
            elif len(data) == self.nbytes:
                data = _unshuffled(data, self.itemsize)
        if len(data) != self.nbytes:
            raise CorruptError(f"{len(data)} bytes instead of {self.nbytes}")
        return np.asarray(data)


def _summed(data: Bytes) -> Bytes:
    if len(data) < SUM_BYTES:
        raise CorruptError("too short for its checksum")
    content, stored = data[:-SUM_BYTES], int.from_bytes(data[-SUM_BYTES:].tobytes(), "little")
    found = fletcher32(content)
    # HDF5 before 1.6.3 stored the two halves with swapped bytes, and readers since take both.
    swapped = int.from_bytes(np.frombuffer(found.to_bytes(4, "little"), np.uint16).byteswap().tobytes(), "little")
    if stored not in (found, swapped):
        raise CorruptError(f"checksum {stored:#010x} instead of {found:#010x}")
    return content


def fletcher32(data: Bytes) -> int:
    """Fletcher's checksum as HDF5 computes it: two ones'-complement sums over big-endian words of 16 bits.

    The second sum weighs each word by how many words come from it on (Fletcher, IEEE Trans. Comm. 30, 1982).

    Example:
        >>> hex(fletcher32(np.arange(5, dtype=np.uint8)))
        '0x8090604'
    """
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    words = data.view(">u2")
    first = second = 0
    for begin in range(0, len(words), _SUM_WORDS):
        block = words[begin : begin + _SUM_WORDS].astype(np.uint64)
        # Every word of this block adds to all second sums from its own place on.
        second += len(block) * first + int((block * np.arange(len(block), 0, -1, dtype=np.uint64)).sum())
        first += int(block.sum())
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    """A sum in ones' complement of 16 bits: 0 only if it is 0."""
    return (total - 1) % 0xFFFF + 1 if total else 0


def _unshuffled(data: Bytes, itemsize: int) -> Bytes:
    """Byte k of every value, for each k in turn, back to values; what does not fill a value stays behind."""
    if itemsize == 1:
        return data
    values = len(data) // itemsize
    out = np.empty_like(data)
    columns = out[: values * itemsize].reshape(values, itemsize)
    for byte in range(itemsize):
        columns[:, byte] = data[byte * values : (byte + 1) * values]
    out[values * itemsize :] = data[values * itemsize :]
    return out
