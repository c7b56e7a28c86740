"""Decoders of filters that are not part of HDF5: lzf, lz4, zstd, blosc and bitshuffle, through `imagecodecs`.

The extra ``codecs`` installs the library, which is imported when a file needs it. It releases the GIL and never writes
beyond its output buffer. The lengths that a chunk declares are checked here first: c-blosc trusts them, and reads
beyond the chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError

# Takes the bytes of a chunk, the number of bytes to return, and the filter's parameters.
Decoder = Callable[[Bytes, int, tuple[int, ...]], Bytes]

# Filter numbers registered with the HDF Group.
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD = 32000, 32001, 32004, 32008, 32015
# Compression of blocks: the fifth parameter of bitshuffle.
PLAIN_BLOCKS, LZ4_BLOCKS, ZSTD_BLOCKS = 0, 2, 3
# Bitshuffle transposes the bits of this many values together and leaves fewer unchanged.
_BIT_GROUP = 8
_BLOSC_HEADER = 16
# Precedes the blocks: the decoded bytes of all of them, and of one.
_HEADER = struct.Struct(">QI")


def is_installed() -> bool:
    try:
        _library()
    except ImportError:
        return False
    return True


def is_supported(number: int, parameters: tuple[int, ...]) -> bool:
    """Whether a filter with these parameters can be decoded here."""
    if number == BITSHUFFLE:
        return (
            len(parameters) >= 3
            and parameters[2] > 0
            and _block_compression(parameters) in (PLAIN_BLOCKS, LZ4_BLOCKS, ZSTD_BLOCKS)
        )
    return number in DECODERS


def changes_size(number: int, parameters: tuple[int, ...]) -> bool:
    """Whether a filter with these parameters changes the number of bytes."""
    return number != BITSHUFFLE or _block_compression(parameters) != PLAIN_BLOCKS


def _library() -> Any:
    import imagecodecs

    return imagecodecs


def _decode_into(out: Bytes, decode: Callable[..., Any], data: Any, **options: int) -> Bytes:
    if not len(data):
        raise CorruptError("no bytes at all")  # liblzf reads the first byte without checking
    try:
        found = len(decode(data, out=out, **options))
    except (RuntimeError, ValueError) as error:
        raise CorruptError(f"does not decode to {len(out)} bytes: {error}") from error
    if found != len(out):
        raise CorruptError(f"{found} bytes instead of {len(out)}")
    return out


def _lzf(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return _decode_into(np.empty(nbytes, np.uint8), _library().lzf_decode, data)


def _zstd(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return _decode_into(np.empty(nbytes, np.uint8), _library().zstd_decode, data)


def _lz4(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    """Blocks with their stored lengths in front. A block with the length of its content is not compressed."""
    _block_bytes(data, nbytes)
    return _decode_into(np.empty(nbytes, np.uint8), _library().lz4h5_decode, data)


def _blosc(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    """A header that ends with the length of the chunk, followed by the data of c-blosc."""
    if len(data) < _BLOSC_HEADER or int.from_bytes(data[_BLOSC_HEADER - 4 : _BLOSC_HEADER], "little") > len(data):
        raise CorruptError(f"{len(data)} bytes, fewer than its header declares")
    return _decode_into(np.empty(nbytes, np.uint8), _library().blosc_decode, data, numthreads=1)


def _bitshuffle(data: Bytes, nbytes: int, parameters: tuple[int, ...]) -> Bytes:
    itemsize = parameters[2]
    block = (parameters[3] if len(parameters) > 3 else 0) * itemsize
    if _block_compression(parameters) != PLAIN_BLOCKS:
        block = _block_bytes(data, nbytes)
        data = _decompress_blocks(
            data, np.empty(nbytes, np.uint8), block, _BIT_GROUP * itemsize, _block_compression(parameters)
        )
    # As a memoryview: for an array, the decoder takes the size of a value from its dtype.
    options = {"itemsize": itemsize, "blocksize": block // itemsize}
    return _decode_into(np.empty(nbytes, np.uint8), _library().bitshuffle_decode, data.data, **options)


def _block_compression(parameters: tuple[int, ...]) -> int:
    return parameters[4] if len(parameters) > 4 else PLAIN_BLOCKS


def _block_bytes(data: Bytes, nbytes: int) -> int:
    """The decoded bytes per block, from the header that lz4 and bitshuffle share."""
    if len(data) < _HEADER.size:
        raise CorruptError("too short for its header")
    total, block = _HEADER.unpack_from(data.data)
    if total != nbytes or not block:
        raise CorruptError(f"its header declares {total} bytes in blocks of {block} instead of {nbytes} bytes")
    return int(block)


def _decompress_blocks(data: Bytes, out: Bytes, block: int, group: int, compression: int) -> Bytes:
    """Decompress bitshuffle's blocks: full blocks, a shorter one of whole groups, and uncompressed trailing bytes.

    All full blocks take one call, since each call releases and takes the GIL. They fill ``out`` only if every block has
    the length that the header declares.
    """
    full, whole = len(out) // block * block, len(out) // group * group
    view, at = data.data, _HEADER.size
    blocks: list[memoryview] = []
    for begin in range(0, max(full, whole), block):
        stored = int.from_bytes(view[at : at + 4], "big")
        blocks.append(view[at + 4 : at + 4 + stored])
        at += 4 + stored
        if not stored or at > len(view):
            raise CorruptError(f"ends within the block at byte {begin}")
    if len(view) - at != len(out) - whole:
        raise CorruptError(f"{len(view) - at} bytes behind the last block instead of {len(out) - whole}")
    decode = _zstd_blocks if compression == ZSTD_BLOCKS else _lz4_blocks
    if full:
        decode(out[:full], blocks[: full // block], block)
    if whole > full:
        decode(out[full:whole], blocks[full // block :], whole - full)
    out[whole:] = data[at:]
    return out


def _zstd_blocks(out: Bytes, blocks: list[memoryview], _length: int) -> None:
    _decode_into(out, _library().zstd_decode, b"".join(blocks))


def _lz4_blocks(out: Bytes, blocks: list[memoryview], length: int) -> None:
    """Decode blocks as a chunk of the lz4 filter, which takes a block of full length for an uncompressed one."""
    library = _library()
    if len(blocks) == 1:
        _decode_into(out, library.lz4_decode, blocks[0])
        return
    pieces: list[Any] = [_HEADER.pack(len(out), length)]
    for block in blocks:
        pieces.append(len(block).to_bytes(4, "big"))
        same = len(block) == length
        pieces.append(_decode_into(np.empty(length, np.uint8), library.lz4_decode, block).data if same else block)
    _decode_into(out, library.lz4h5_decode, b"".join(pieces))


NAMES = {LZF: "lzf", BLOSC: "blosc", LZ4: "lz4", BITSHUFFLE: "bitshuffle", ZSTD: "zstd"}
DECODERS: dict[int, Decoder] = {LZF: _lzf, BLOSC: _blosc, LZ4: _lz4, BITSHUFFLE: _bitshuffle, ZSTD: _zstd}
