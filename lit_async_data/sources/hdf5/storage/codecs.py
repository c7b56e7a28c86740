"""Chunks as they are stored, and the filters that are undone here.

Before version 3.16, h5py does not take its lock for chunks. Another thread may then be inside libhdf5 at the same time,
which makes reads fail, and can end the process: https://github.com/h5py/h5py/pull/2764.

A decoded chunk has exactly its number of bytes: h5py returns uninitialised memory behind too few, and too many are
refused before they are allocated. The lengths that a chunk declares are checked first: c-blosc trusts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import deflate
import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, REMEDIES, context_of, h5py
from lit_async_data.sources.local_files import errno_of
from lit_async_data.system import Lazy

_objects = Lazy("h5py._objects")  # has the lock of libhdf5
imagecodecs = Lazy("imagecodecs")


def read_chunk(dataset: h5py.Dataset, corner: tuple[int, ...]) -> tuple[int, bytes]:
    """The filter mask, whose bit i means a skipped filter i, and the stored bytes of a chunk."""
    with _objects.phil:
        return cast("tuple[int, bytes]", dataset.id.read_direct_chunk(corner))


def is_found(dataset: h5py.Dataset, corner: tuple[int, ...]) -> bool:
    """Whether libhdf5 finds a chunk. Reads only its index, unless the chunk has a single byte."""
    try:
        with _objects.phil:
            dataset.id.read_direct_chunk(corner, out=bytearray(1))
    except LIBRARY_ERRORS as error:
        if errno_of(error) in REMEDIES:
            raise
        return isinstance(error, ValueError)  # h5py has found it, and it does not fit
    return True


def write_chunk(dataset: h5py.Dataset, corner: tuple[int, ...], mask: int, data: bytes) -> None:
    with _objects.phil:
        dataset.id.write_direct_chunk(corner, data, mask)


def check_filters(dataset: h5py.Dataset, path: str, name: str) -> None:
    """Check that libhdf5 can decode a dataset in this process, which may have fewer filters than its parent."""
    if dataset.is_virtual:
        _importable("hdf5plugin")  # the filters are those of other datasets
    properties = dataset.id.get_create_plist()
    for number, _, _, known in map(properties.get_filter, range(properties.get_nfilters())):
        if h5py.h5z.filter_avail(number) or ((tried := _importable("hdf5plugin")) and h5py.h5z.filter_avail(number)):
            continue
        named = f"{known.decode(errors='replace').partition(';')[0] or 'without a name'} ({number})"
        where = "hdf5plugin does not have it: " if tried else "pip install hdf5plugin; or "
        what = f"cannot be decoded without the HDF5 filter {named}; {where}set HDF5_PLUGIN_PATH to the folder of its "
        raise FormatError(f"{what}plugin before Python starts", **context_of(path, name))


def _importable(library: str) -> bool:
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
        return True
    return False


# Takes the bytes of a chunk, the number of bytes to return, and the filter's parameters.
Decoder = Callable[[Bytes, int, tuple[int, ...]], Bytes]

LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD = 32000, 32001, 32004, 32008, 32015  # as registered with the HDF Group
PLAIN_BLOCKS, LZ4_BLOCKS, ZSTD_BLOCKS = 0, 2, 3  # compression of blocks: the fifth parameter of bitshuffle
_BIT_GROUP = 8  # values whose bits bitshuffle transposes together; it leaves fewer unchanged
_BLOSC_HEADER = 16
_HEADER = struct.Struct(">QI")  # before the blocks: the decoded bytes of all of them, and of one


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


def _plain(name: str, data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return _decode_into(np.empty(nbytes, np.uint8), getattr(imagecodecs, name), data)


def _lz4(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    """Blocks with their stored lengths in front. A block with the length of its content is not compressed."""
    _block_bytes(data, nbytes)
    return _decode_into(np.empty(nbytes, np.uint8), imagecodecs.lz4h5_decode, data)


def _blosc(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    """A header that ends with the length of the chunk, followed by the data of c-blosc."""
    if len(data) < _BLOSC_HEADER or int.from_bytes(data[_BLOSC_HEADER - 4 : _BLOSC_HEADER], "little") > len(data):
        raise CorruptError(f"{len(data)} bytes, fewer than its header declares")
    return _decode_into(np.empty(nbytes, np.uint8), imagecodecs.blosc_decode, data, numthreads=1)


def _bitshuffle(data: Bytes, nbytes: int, parameters: tuple[int, ...]) -> Bytes:
    itemsize = parameters[2]
    block = (parameters[3] if len(parameters) > 3 else 0) * itemsize
    if _block_compression(parameters) != PLAIN_BLOCKS:
        block = _block_bytes(data, nbytes)
        data = _decompress_blocks(data, np.empty(nbytes, np.uint8), block, itemsize, _block_compression(parameters))
    # As a memoryview: for an array, the decoder takes the size of a value from its dtype.
    options = {"itemsize": itemsize, "blocksize": block // itemsize}
    return _decode_into(np.empty(nbytes, np.uint8), imagecodecs.bitshuffle_decode, data.data, **options)


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


def _decompress_blocks(data: Bytes, out: Bytes, block: int, itemsize: int, compression: int) -> Bytes:
    """Full blocks, in one call, since each takes the GIL; a shorter one of whole groups; trailing bytes as they are."""
    full, group = len(out) // block * block, _BIT_GROUP * itemsize
    whole = len(out) // group * group
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
    _decode_into(out, imagecodecs.zstd_decode, b"".join(blocks))


def _lz4_blocks(out: Bytes, blocks: list[memoryview], length: int) -> None:
    """Decode blocks as a chunk of the lz4 filter, which takes a block of full length for an uncompressed one."""
    if len(blocks) == 1:
        _decode_into(out, imagecodecs.lz4_decode, blocks[0])
        return
    pieces: list[Any] = [_HEADER.pack(len(out), length)]
    for block in blocks:
        pieces.append(len(block).to_bytes(4, "big"))
        same = len(block) == length
        pieces.append(_decode_into(np.empty(length, np.uint8), imagecodecs.lz4_decode, block).data if same else block)
    _decode_into(out, imagecodecs.lz4h5_decode, b"".join(pieces))


DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3  # as in h5py.h5z, which a reader process does not import
SUM_BYTES = 4  # of the checksum that fletcher32 appends to a chunk
# Words per step of the checksum, and the weight of each. Their weighted sum stays below 2**45, which float64 represents
# exactly. Smaller steps would release the GIL more often.
_SUM_WORDS = 2**15
_WEIGHTS = np.arange(_SUM_WORDS, 0, -1, dtype=np.float64)


def _undo_deflate(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    try:
        return np.frombuffer(deflate.zlib_decompress(data, nbytes), np.uint8)
    except deflate.DeflateError as error:
        raise CorruptError(f"not {nbytes} bytes of deflate: {error}") from error


def _undo_fletcher32(data: Bytes, _nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    if len(data) < SUM_BYTES:
        raise CorruptError("too short for its checksum")
    content, stored = data[:-SUM_BYTES], int.from_bytes(data[-SUM_BYTES:].tobytes(), "little")
    if stored != (found := fletcher32(content)):
        raise CorruptError(f"checksum {stored:#010x} instead of {found:#010x}")
    return content


def fletcher32(data: Bytes) -> int:
    """Fletcher's checksum (IEEE Trans. Comm. 30, 1982) as HDF5 computes it, of big-endian words of 16 bits."""
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    words = data.view(">u2")
    first = second = 0
    for begin in range(0, len(words), _SUM_WORDS):
        block = words[begin : begin + _SUM_WORDS].astype(np.float64)
        # Each word of this block adds to every second sum from its own place on. Not np.dot: BLAS would start threads.
        second += len(block) * first + int(np.einsum("i,i->", block, _WEIGHTS[-len(block) :]))
        first += int(block.sum())
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    return (total - 1) % 0xFFFF + 1 if total else 0


def unshuffle(planes: Bytes, out: Bytes) -> None:
    """Turn byte planes, (chunks, bytes per value, values), into values, (chunks, values × bytes per value)."""
    count, itemsize, _ = planes.shape
    columns = out.reshape(count, -1, itemsize)
    for byte in range(itemsize):
        columns[:, :, byte] = planes[:, byte]


def _undo_shuffle(data: Bytes, _nbytes: int, parameters: tuple[int, ...]) -> Bytes:
    """Turn byte planes into values; trailing bytes that fill no value stay in place."""
    if not parameters:  # of references, for which libhdf5 skips it
        raise CorruptError("shuffled values of unknown size")
    (itemsize,) = parameters
    if itemsize == 1:
        return data
    out, whole = np.empty_like(data), len(data) // itemsize * itemsize
    unshuffle(data[:whole].reshape(1, itemsize, -1), out[None, :whole])
    out[whole:] = data[whole:]
    return out


class Codec(NamedTuple):
    decode: Decoder
    own: bool = False  # whether it needs no library beside those that this package requires

    @property
    def missing(self) -> bool:
        return not self.own and not _importable("imagecodecs")


CODECS = {
    SHUFFLE: Codec(_undo_shuffle, own=True),
    DEFLATE: Codec(_undo_deflate, own=True),
    FLETCHER32: Codec(_undo_fletcher32, own=True),
    LZF: Codec(functools.partial(_plain, "lzf_decode")),
    BLOSC: Codec(_blosc),
    LZ4: Codec(_lz4),
    BITSHUFFLE: Codec(_bitshuffle),
    ZSTD: Codec(functools.partial(_plain, "zstd_decode")),
}


class Filter(NamedTuple):
    number: int
    parameters: tuple[int, ...] = ()

    @property
    def codec(self) -> Codec | None:
        """The codec that undoes the filter; None if only libhdf5 can."""
        given, known = self.parameters, True
        if self.number == SHUFFLE:
            known = not given or (len(given) == 1 and given[0] > 0)
        elif self.number == BITSHUFFLE:
            of_blocks = _block_compression(given) in (PLAIN_BLOCKS, LZ4_BLOCKS, ZSTD_BLOCKS)
            known = len(given) >= 3 and given[2] > 0 and of_blocks
        return CODECS.get(self.number) if known else None

    @property
    def changes_size(self) -> bool:
        """Whether the filter changes the number of bytes by more than a checksum."""
        plain = self.number == BITSHUFFLE and self.codec and _block_compression(self.parameters) == PLAIN_BLOCKS
        return self.number not in (SHUFFLE, FLETCHER32) and not plain


@dataclasses.dataclass(frozen=True)
class FilterPipeline:
    # In the order of writing. At most one of them changes the size, so that the size of its result is known.
    filters: tuple[Filter, ...]
    nbytes: int

    def decode(self, stored: Bytes, mask: int) -> Bytes:
        """Decode a chunk, or raise `CorruptError`. Thread-safe. Bit i of ``mask`` means that filter i was skipped."""
        return self._run(stored, self._steps_of(mask) if mask else self._steps)

    def decode_to_planes(self, stored: Bytes) -> Bytes:
        """Decode a chunk up to its last step, which must be shuffle (`shuffle_itemsize` > 1). Raises as `decode`."""
        return self._run(stored, self._steps[:-1])

    @functools.cached_property
    def shuffle_itemsize(self) -> int:
        """Bytes per value of the shuffle that is undone last; 1 if the last step is something else."""
        if not self.filters or self.filters[0].number != SHUFFLE:
            return 1
        itemsize = (*self.filters[0].parameters, 1)[0]
        return itemsize if self.nbytes % itemsize == 0 else 1

    def _run(self, data: Bytes, steps: Sequence[tuple[Decoder, int, tuple[int, ...]]]) -> Bytes:
        for decode, nbytes, parameters in steps:
            data = decode(data, nbytes, parameters)
        if len(data) != self.nbytes:
            raise CorruptError(f"{len(data)} bytes instead of {self.nbytes}")
        return data

    @functools.cached_property
    def _steps(self) -> list[tuple[Decoder, int, tuple[int, ...]]]:
        return self._steps_of(0)

    def _steps_of(self, mask: int) -> list[tuple[Decoder, int, tuple[int, ...]]]:
        """Functions, with the number of bytes that each returns, and its parameters."""
        nbytes, steps = self.nbytes, []
        for place, (number, parameters) in enumerate(self.filters):
            if not mask >> place & 1:
                steps.append((CODECS[number].decode, nbytes, parameters))
                nbytes += SUM_BYTES * (number == FLETCHER32)
        return steps[::-1]


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    properties = dataset.id.get_create_plist()
    found = (properties.get_filter(number) for number in range(properties.get_nfilters()))
    return tuple(Filter(number, tuple(parameters)) for number, _, parameters, _ in found)
