"""`FilterPipeline`: decodes chunks without libhdf5 and its lock.

deflate, shuffle and fletcher32 are decoded here, other filters in `extra_codecs`. Filters are undone in reverse order.
A decoded chunk has exactly its number of bytes: h5py returns uninitialised memory behind too few, and too many are
refused before they are allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage.extra_codecs import (
    DECODERS,
    NAMES,
    Decoder,
    changes_size,
    is_installed,
    is_supported,
)

if TYPE_CHECKING:
    import h5py

# As in h5py.h5z, which a reader process does not import.
DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
# Bytes of the checksum that fletcher32 appends to a chunk.
SUM_BYTES = 4
# Words per step of the checksum, and the weight of each. Their weighted sum stays below 2**45, which float64 represents
# exactly. A step takes 256 KiB of temporaries; smaller ones would release the GIL more often.
_SUM_WORDS = 2**15
_WEIGHTS = np.arange(_SUM_WORDS, 0, -1, dtype=np.float64)


def inflate_with_zlib(data: Any, nbytes: int) -> Any:
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise CorruptError(str(error)) from error


def _choose_inflate() -> Callable[[Any, int], Any]:
    """The function that inflates: of libdeflate, 2 to 3 times as fast as zlib, if installed."""
    try:
        import deflate
    except ImportError:
        return inflate_with_zlib

    def inflate(data: Any, nbytes: int) -> Any:
        try:
            return deflate.zlib_decompress(data, nbytes)
        except deflate.DeflateError as error:
            raise CorruptError(f"not {nbytes} bytes of deflate: {error}") from error

    return inflate


_inflate = _choose_inflate()


def _undo_deflate(data: Bytes, nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    return np.frombuffer(_inflate(data, nbytes), np.uint8)


def _undo_fletcher32(data: Bytes, _nbytes: int, _parameters: tuple[int, ...]) -> Bytes:
    if len(data) < SUM_BYTES:
        raise CorruptError("too short for its checksum")
    content, stored = data[:-SUM_BYTES], int.from_bytes(data[-SUM_BYTES:].tobytes(), "little")
    found = fletcher32(content)
    # HDF5 before 1.6.3 stored the two halves with swapped bytes; readers accept both.
    swapped = int.from_bytes(np.frombuffer(found.to_bytes(4, "little"), np.uint16).byteswap().tobytes(), "little")
    if stored not in (found, swapped):
        raise CorruptError(f"checksum {stored:#010x} instead of {found:#010x}")
    return content


def fletcher32(data: Bytes) -> int:
    """Fletcher's checksum as HDF5 computes it: two ones'-complement sums over big-endian words of 16 bits.

    The second sum weights each word by the number of words from it to the end (Fletcher, IEEE Trans. Comm. 30, 1982).

    Example:
        >>> hex(fletcher32(np.arange(5, dtype=np.uint8)))
        '0x8090604'
    """
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
    """A ones'-complement sum of 16 bits, which is 0 only if the total is 0."""
    return (total - 1) % 0xFFFF + 1 if total else 0


def unshuffle(planes: Bytes, out: Bytes) -> None:
    """Turn byte planes into values, for several chunks in one call.

    From uint8 of shape (chunks, bytes per value, values) to shape (chunks, values × bytes per value).
    """
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
    values = len(data) // itemsize
    out = np.empty_like(data)
    whole = values * itemsize
    unshuffle(data[:whole].reshape(1, itemsize, values), out[None, :whole])
    out[values * itemsize :] = data[values * itemsize :]
    return out


class Codec(NamedTuple):
    """Undoes a filter."""

    name: str
    decode: Decoder
    extra: str | None = None  # the extra of this package that installs the library, if the filter needs one

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return self.extra is not None and not is_installed()


CODECS = {
    SHUFFLE: Codec("shuffle", _undo_shuffle),
    DEFLATE: Codec("deflate", _undo_deflate),
    FLETCHER32: Codec("fletcher32", _undo_fletcher32),
    **{number: Codec(NAMES[number], decode, "codecs") for number, decode in DECODERS.items()},
}


class Filter(NamedTuple):
    """One filter of a dataset, with its parameters as stored."""

    number: int
    parameters: tuple[int, ...] = ()

    @property
    def codec(self) -> Codec | None:
        """The codec that undoes the filter; None if only libhdf5 can."""
        codec = CODECS.get(self.number)
        known = is_supported(*self) if codec and codec.extra else True
        if self.number == SHUFFLE:
            known = not self.parameters or (len(self.parameters) == 1 and self.parameters[0] > 0)
        return codec if known else None

    @property
    def changes_size(self) -> bool:
        """Whether the filter changes the number of bytes by more than a checksum."""
        return self.number not in (SHUFFLE, FLETCHER32) and changes_size(*self)


@dataclasses.dataclass(frozen=True)
class FilterPipeline:
    # In the order of writing. At most one of them changes the size, so that the size of its result is known.
    filters: tuple[Filter, ...]
    nbytes: int

    def decode(self, stored: Bytes, mask: int) -> Bytes:
        """Decode a chunk, or raise `CorruptError`. Holds no lock meanwhile; thread-safe.

        Bit i of ``mask`` means that filter i was skipped.
        """
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
        # The steps of nearly every chunk. Computing them per chunk would cost a tenth of decoding a small one.
        return self._steps_of(0)

    def _steps_of(self, mask: int) -> list[tuple[Decoder, int, tuple[int, ...]]]:
        """The steps that decode a chunk: the function, the number of bytes it returns, and its parameters."""
        applied = [each for number, each in enumerate(self.filters) if not mask >> number & 1]
        nbytes = self.nbytes + SUM_BYTES * sum(each.number == FLETCHER32 for each in applied)
        steps = []
        for number, parameters in reversed(applied):
            if number == FLETCHER32:
                nbytes -= SUM_BYTES
            steps.append((CODECS[number].decode, nbytes, parameters))
        return steps


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    """The filters of a dataset, in the order of writing."""
    properties = dataset.id.get_create_plist()
    found = (properties.get_filter(number) for number in range(properties.get_nfilters()))
    return tuple(Filter(number, tuple(parameters)) for number, _, parameters, _ in found)
