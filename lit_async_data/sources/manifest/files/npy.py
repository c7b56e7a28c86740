"""Reading ``.npy`` files into arrays. Objects are refused: reading one runs whatever code its file holds."""

from __future__ import annotations

import functools
import io
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from lit_async_data.batch.spec import Array
from lit_async_data.errors import CorruptError, FormatError

# Characters of a header that numpy parses as Python; longer ones could take its parser down.
_MOST_HEADER = 10_000
# Version 3 differs from 2 in the names of fields only, and records are no values of a tensor.
_READERS: dict[tuple[int, ...], Any] = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    (3, 0): npy_format.read_array_header_2_0,
}


class NpyHeader(NamedTuple):
    """What a ``.npy`` file says of itself.

    Attributes:
        shape: Of the array.
        dtype: Of its elements, in the byte order of the file.
        fortran: Whether the first axis varies fastest.
        start: Byte at which the values begin.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def header_of(data: Any, where: str) -> NpyHeader:
    """What a ``.npy`` file says of itself: versions 1 to 3.

    Args:
        data: Its bytes, at least those of the header.
        where: What it is called in messages; they begin with it.

    Raises:
        FormatError: It is none, or holds Python objects.
        CorruptError: The header cannot be read.

    Example:
        >>> stream = io.BytesIO()
        >>> np.save(stream, np.zeros((2, 3), "f4"))
        >>> header_of(stream.getvalue(), "x.npy").shape
        (2, 3)
    """
    if bytes(data[: len(npy_format.MAGIC_PREFIX)]) != npy_format.MAGIC_PREFIX:
        raise FormatError(f"{where}: not a .npy file; write it with numpy.save")
    version = tuple(data[len(npy_format.MAGIC_PREFIX) : npy_format.MAGIC_LEN])
    if len(version) == 2 and version not in _READERS:
        raise FormatError(f"{where}: a .npy file of version {version[0]}.{version[1]}; write it with numpy.save")
    try:
        shape, fortran, dtype, start = _parsed(_head(data, version))
    except Exception as error:  # numpy raises what Python's parser and its own types make of damaged text
        raise CorruptError(
            f"{where}: the header of the .npy file cannot be read ({error}); is the file whole?"
        ) from error
    if dtype.hasobject:
        raise FormatError(f"{where}: holds Python objects; refused (pickle can run code). Store numbers")
    if any(length < 0 for length in shape):
        raise CorruptError(f"{where}: the header of the .npy file names the shape {shape}; is the file whole?")
    return NpyHeader(shape, dtype, fortran, start)


def _head(data: Any, version: tuple[int, ...]) -> bytes:
    """The bytes up to the values, as far as they are there; they begin with their own length."""
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(data[npy_format.MAGIC_LEN : npy_format.MAGIC_LEN + width], "little")
    return bytes(data[: npy_format.MAGIC_LEN + width + min(length, _MOST_HEADER + 1)])


# Files of one field have the same header, and numpy parses it as Python: 25 of the 30 µs that decoding took.
@functools.lru_cache(maxsize=64)
def _parsed(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    stream = io.BytesIO(head)
    version = npy_format.read_magic(stream)
    shape, fortran, dtype = _READERS[version](stream, max_header_size=_MOST_HEADER)
    return shape, fortran, dtype, stream.tell()


def decode(data: Any, out: Array, where: str) -> None:
    """Write the values of a ``.npy`` file into an array.

    Args:
        data: All bytes of the file.
        out: What it must fit: shape and element type, in any byte order. Overwritten.
        where: What it is called in messages; they begin with it.

    Raises:
        FormatError: It is of another shape or type, or as in `header_of`.
        CorruptError: It has fewer or more bytes than its header says.
    """
    header = header_of(data, where)
    if header.shape != out.shape or header.dtype.newbyteorder("=") != out.dtype:
        raise FormatError(
            f"{where}: holds {header.dtype} of shape {header.shape}, where {out.dtype} of shape {out.shape} is "
            "expected; all files of a field must be alike"
        )
    wanted, found = math.prod(header.shape) * header.dtype.itemsize, len(data) - header.start
    if found != wanted:
        raise CorruptError(
            f"{where}: {found} bytes follow the header, which promises {wanted}; was the file cut short, or written "
            "twice?"
        )
    values = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
    out[...] = values.reshape(header.shape, order="F" if header.fortran else "C")
