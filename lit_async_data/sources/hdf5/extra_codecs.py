"""Decoding what others than HDF5 itself compress: lzf, lz4, zstd, blosc, bitshuffle, through `imagecodecs`.

It comes with the extra ``codecs`` and is imported when a file asks for it. It holds no lock while it decodes and writes
no more than it is given room for. What a chunk says of its own lengths is checked here first: c-blosc believes it, and
reads beyond the chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.errors import CorruptError
from lit_async_data.spec import Bytes

# The bytes of a chunk, how many shall come out, and the filter's parameters.
Decoder = Callable[[Bytes, int, tuple[int, ...]], Bytes]

# The numbers that the HDF Group registered.
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD = 32000, 32001, 32004, 32008, 32015
# What bitshuffle's fifth parameter says of the blocks.
_BLOCKS = PLAIN_BLOCKS, LZ4_BLOCKS, ZSTD_BLOCKS = 0, 2, 3
# Values that bitshuffle moves the bits of together; fewer stay as they are.
_BIT_GROUP = 8
_BLOSC_HEADER = 16


def installed() -> bool:
    """Whether `imagecodecs` can be imported."""
    try:
        _library()
    except ImportError:
        return False
    return True


def understood(number: int, parameters: tuple[int, ...]) -> bool:
    """Whether a filter with these parameters is decoded here."""
    if number == BITSHUFFLE:
        return len(parameters) >= 3 and parameters[2] > 0 and _blocks_of(parameters) in _BLOCKS
    return number in DECODERS


def packs(number: int, parameters: tuple[int, ...]) -> bool:
    """Whether it changes how many bytes there are."""
    return number != BITSHUFFLE or _blocks_of(parameters) != PLAIN_BLOCKS


def _library() -> Any:
    import imagecodecs

    return imagecodecs


def _called(decode: Callable[..., Any], data: Any, nbytes: int, **options: int) -> Bytes:
    if not len(data):
        raise CorruptError(f"no bytes at all instead of what decodes to {nbytes}")
    try:
        out = np.frombuffer(decode(data, out=nbytes, **options), np.uint8)
    except (RuntimeError, ValueError) as error:
        raise CorruptError(f"does not decode to {nbytes} bytes: {error}") from error
    if len(out) != nbytes:
        raise CorruptError(f"{len(out)} bytes instead of {nbytes}")
    return out


def _lzf(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return _called(_library().lzf_decode, data, nbytes)


def _zstd(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return _called(_library().zstd_decode, data, nbytes)


def _lz4(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    """A header of total and block length; then each block's stored length, and its bytes, packed if that is shorter."""
    _block_bytes(data, nbytes)
    return _called(_library().lz4h5_decode, data, nbytes)


def _blosc(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    if len(data) < _BLOSC_HEADER:
        raise CorruptError("too short for blosc")
    total, _, stored = struct.unpack_from("<III", data.data, 4)
    if total != nbytes or stored > len(data):
        raise CorruptError(f"says {total} bytes in {stored}, but is {nbytes} in {len(data)}")
    return _called(_library().blosc_decode, data, nbytes, numthreads=1)


def _bitshuffle(data: Bytes, nbytes: int, parameters: tuple[int, ...]) -> Bytes:
    itemsize, compression = parameters[2], _blocks_of(parameters)
    group = _BIT_GROUP * itemsize
    if nbytes % itemsize:
        raise CorruptError(f"{nbytes} bytes are no whole number of values of {itemsize}")
    block = (parameters[3] if len(parameters) > 3 else 0) * itemsize
    if compression != PLAIN_BLOCKS:
        block = _block_bytes(data, nbytes)
        if block % group:
            raise CorruptError(f"blocks of {block} bytes do not fit values of {itemsize}")
        data = _unpacked(data, nbytes, nbytes - nbytes % group, block, compression)
    if len(data) != nbytes:
        raise CorruptError(f"{len(data)} bytes instead of {nbytes}")
    # As a memoryview: of an array, it takes the size of a value from the type.
    decode = _library().bitshuffle_decode
    return _called(decode, data.data, nbytes, itemsize=itemsize, blocksize=block // itemsize)


def _blocks_of(parameters: tuple[int, ...]) -> int:
    return parameters[4] if len(parameters) > 4 else PLAIN_BLOCKS


def _block_bytes(data: Bytes, nbytes: int) -> int:
    """The length of a block, from the header that lz4 and bitshuffle share."""
    if len(data) < 12:
        raise CorruptError("too short for its header")
    total, block = struct.unpack_from(">QI", data.data)
    if total != nbytes or not block:
        raise CorruptError(f"says {total} bytes in blocks of {block}, but is {nbytes}")
    return int(block)


def _unpacked(data: Bytes, nbytes: int, whole: int, block: int, compression: int) -> Bytes:
    """The blocks of bitshuffle, decompressed in one call: one for each would hold Python's lock between them.

    Behind the blocks lie ``nbytes - whole`` bytes as they are.
    """
    library, view = _library(), data.data
    pieces: list[Any] = []
    at = 12
    for begin in range(0, whole, block):
        length = min(block, whole - begin)
        stored = int.from_bytes(view[at : at + 4], "big")
        packed = view[at + 4 : at + 4 + stored]
        if len(packed) < stored or not stored:
            raise CorruptError(f"ends within the block of byte {begin}")
        if compression == ZSTD_BLOCKS:
            pieces.append(packed)
        elif stored == length:
            # The lz4 filter takes a block for unpacked if it is as long as its content; here it is always packed.
            pieces += (view[at : at + 4], _called(library.lz4_decode, packed, length))
        else:
            pieces.append(view[at : at + 4 + stored])
        at += 4 + stored
    rest = view[at:]
    if len(rest) != nbytes - whole:
        raise CorruptError(f"{len(rest)} bytes behind the last block instead of {nbytes - whole}")
    if not whole:
        return np.frombuffer(rest, np.uint8)
    if compression == ZSTD_BLOCKS:
        out = _called(library.zstd_decode, b"".join(pieces), whole)
    else:
        out = _called(library.lz4h5_decode, b"".join((struct.pack(">QI", whole, block), *pieces)), whole)
    return np.append(out, np.frombuffer(rest, np.uint8)) if len(rest) else out


NAMES = {LZF: "lzf", BLOSC: "blosc", LZ4: "lz4", BITSHUFFLE: "bitshuffle", ZSTD: "zstd"}
DECODERS: dict[int, Decoder] = {LZF: _lzf, BLOSC: _blosc, LZ4: _lz4, BITSHUFFLE: _bitshuffle, ZSTD: _zstd}
